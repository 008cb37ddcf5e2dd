"""A proxy of one rank: what upstream's layers make of it, and what starts it."""

import json
from collections import Counter
from pathlib import Path

import cli
import pytest
import torch
from proxy_model import sizes
from proxy_model import write as writer
from proxy_model.config import (
    ALL_ROUTED_EXPERTS,
    EXPERT_PARALLEL_SIZE,
    RANKS,
    proxy_config,
)
from proxy_model.write import experts_of_rank, parse, run

GIB = 2**30
H200, H100 = 139 * GIB, 79 * GIB


def text_of(layers: int, rank_of: int, expert_parallel: bool = False) -> dict:
    config = proxy_config(layers, ALL_ROUTED_EXPERTS, None, rank_of, expert_parallel)
    return config["text_config"]


def test_a_rank_of_one_is_the_whole_model():
    assert proxy_config(40, rank_of=1) == proxy_config(40)


@pytest.mark.parametrize("rank_of", RANKS)
def test_what_tensor_parallelism_divides(rank_of):
    whole, part = text_of(40, 1), text_of(40, rank_of)
    divided = {"num_attention_heads", "o_groups", "moe_intermediate_size"}
    assert {k for k in whole if whole[k] != part[k]} == (
        divided if rank_of > 1 else set()
    )
    assert all(whole[name] == rank_of * part[name] for name in divided)


def test_what_expert_parallelism_divides():
    by_width, whole_experts = text_of(40, 8), text_of(40, 8, expert_parallel=True)
    assert {k for k in whole_experts if whole_experts[k] != by_width.get(k)} == {
        "moe_intermediate_size",
        EXPERT_PARALLEL_SIZE,
    }
    assert whole_experts["moe_intermediate_size"] == 2304
    routed = sizes.routed(whole_experts, 0)
    assert routed == (384, 6, 48)
    # 0.75 of a token's choices are here.
    assert routed.chosen * routed.held / routed.experts == 0.75
    assert sizes.routed(whole_experts, 40) == (128, 3, 16)
    assert sizes.shared_width(whole_experts) == sizes.shared_width(by_width) == 288


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rank_of": 3}, "no even share: choose from 1, 2, 4, 8"),
        ({"expert_parallel": True}, "give a rank of 2 or more"),
        (
            {"rank_of": 8, "expert_parallel": True, "routed_experts": 12},
            "12 experts are no whole number on each of 8 ranks",
        ),
    ],
)
def test_there_is_no_such_rank(options, reason):
    with pytest.raises(ValueError, match=reason):
        proxy_config(8, **options)


def test_a_rank_has_no_engram_tables():
    from proxy_model.config import EngramTables

    with pytest.raises(ValueError, match="with Engram"):
        proxy_config(8, engram=EngramTables(1, 1, [1], 1), rank_of=2)


class Build:
    """Upstream's decoder layers of a Hopper GPU, on the meta device."""

    def __init__(self, folder: Path) -> None:
        from vllm.config import CacheConfig, LoadConfig, ModelConfig, VllmConfig

        self.config = VllmConfig(
            model_config=ModelConfig(model=str(folder), max_model_len=2048),
            cache_config=CacheConfig(cache_dtype="fp8"),
            load_config=LoadConfig(load_format="dummy"),
        )
        # No kernel for these weights runs on a CPU; the shapes are the same.
        self.config.quant_config = None
        self.config.kernel_config.enable_jit_warmup = False

    def layer(self, index: int) -> torch.nn.Module:
        from vllm.models.deepseek_v41.nvidia.model import DeepseekV4DecoderLayer

        with torch.device("meta"):
            return DeepseekV4DecoderLayer(
                self.config,
                prefix=f"model.layers.{index}",
                topk_indices_buffer=torch.empty(4, 512),
                candidate_block_buffer=torch.empty(4, 4),
            )


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    # Imported while the class of CUDA events is still torch's own.
    from vllm.models.deepseek_v41.nvidia import model  # noqa: F401
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(torch.cuda, "Event", object)
    monkeypatch.setattr(
        type(current_platform),
        "get_device_capability",
        classmethod(lambda platform, device_id=0: DeviceCapability(9, 0)),
    )
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path}/group", 0, "gloo")
        initialize_model_parallel(1)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        yield
        torch.set_default_dtype(default)
        cleanup_dist_env_and_memory()


@pytest.mark.parametrize(
    ("rank_of", "expert_parallel"), [(1, False), (2, False), (8, False), (8, True)]
)
def test_upstreams_layers_have_the_shapes_that_are_counted(
    hopper, tmp_path, rank_of, expert_parallel
):
    from contextlib import nullcontext

    from proxy_model.expert_parallel import layers_of_one_rank
    from vllm.config import set_current_vllm_config

    folder = tmp_path / "proxy"
    writer.write(
        folder,
        8,
        ALL_ROUTED_EXPERTS,
        rank_of=rank_of,
        expert_parallel=expert_parallel,
    )
    text = json.loads((folder / "config.json").read_text())["text_config"]
    build = Build(folder)
    of_a_rank = layers_of_one_rank(rank_of) if expert_parallel else nullcontext()
    with set_current_vllm_config(build.config), of_a_rank:
        for index in range(8):
            layer = build.layer(index)
            matrices: Counter[tuple[int, ...]] = Counter()
            experts = {}
            for name, parameter in layer.named_parameters():
                if "routed_experts" in name:
                    experts[name.rpartition(".")[2]] = tuple(parameter.shape)
                elif parameter.dim() == 2:
                    matrices[tuple(parameter.shape)] += 1
            assert matrices == Counter(
                (m.rows, m.columns) for m in sizes.layer(text, index)
            )
            held, width = sizes.routed(text, index).held, text["moe_intermediate_size"]
            assert experts == {
                "w13_weight": (held, 2 * width, 5120),
                "w2_weight": (held, 5120, width),
            }
    if expert_parallel:
        here = layer.ffn.experts.routed_experts.expert_map
        assert here.shape == (384,)


def test_the_layers_of_a_rank_are_made_within_alone():
    from proxy_model.expert_parallel import layers_of_one_rank
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.models.deepseek_v4.nvidia import model

    before = (FusedMoEParallelConfig.make, model.DeepseekV4MLP)

    def fail():
        with layers_of_one_rank(8):
            assert before[0] is not FusedMoEParallelConfig.make
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        fail()
    assert before == (FusedMoEParallelConfig.make, model.DeepseekV4MLP)


def test_an_experts_weights():
    # 4 bits a weight, and a byte for each 32.
    assert sizes.expert(text_of(40, 1)) == 3 * 5120 * 2304 * 17 / 32
    assert sizes.expert(text_of(40, 8)) == 3 * 5120 * 288 * 17 / 32
    assert sizes.expert(text_of(40, 8), 128) == 3 * 5120 * 384 * 17 / 32


@pytest.mark.parametrize(
    ("layers", "rank_of", "memory", "experts"),
    [
        (40, 8, H200, 384),
        (40, 8, H100, 384),
        (40, 4, H200, 384),
        (8, 1, H200, 384),
        (8, 2, H100, 384),
        (40, 8, None, 384),
    ],
)
def test_all_experts_where_they_fit(layers, rank_of, memory, experts):
    assert experts_of_rank(layers, rank_of, False, memory) == experts


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("rank_of", [2, 4])
def test_as_many_experts_as_fit(rank_of, expert_parallel):
    memory = 60 * GIB
    count = experts_of_rank(40, rank_of, expert_parallel, memory)
    assert 16 <= count < 384
    assert count % 16 == 0

    def held(experts):
        config = proxy_config(40, experts, None, rank_of, expert_parallel)
        return sizes.held(config["text_config"])

    limit = memory * writer.SHARE_OF_WEIGHTS
    assert held(count) <= limit < held(count + 16)


def test_a_rank_that_does_not_fit():
    with pytest.raises(ValueError, match="a rank of 1 with 40 layers does not fit"):
        experts_of_rank(40, 1, False, 16 * GIB)


def test_a_small_gpu_is_told_of(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writer, "gpu_memory", lambda: H200)
    where = ["--layers", "40", "--out", str(tmp_path), "--no-tokenizer"]
    assert cli.run(parse, run, [*where, "--rank-of", "8"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.run(parse, run, [*where, "--rank-of", "2"]) == 0
    told = capsys.readouterr().err
    written = json.loads((tmp_path / "config.json").read_text())["text_config"]
    count = written["n_routed_experts"]
    assert 16 <= count < 384
    assert told == (
        f"  {count} routed experts of 384: this GPU's memory does not hold more\n"
    )
    assert (
        cli.run(parse, run, [*where, "--rank-of", "2", "--routed-experts", "32"]) == 0
    )
    assert capsys.readouterr().err == ""
