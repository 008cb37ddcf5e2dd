"""The proxies are DeepSeek-V4.1-Flash to vLLM, in every shape that is kept."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import cli
import pytest
from proxy_model.config import TOPOLOGIES, VOCABULARY, proxy_config
from proxy_model.write import parse, run, write

ATTENTION_GROUPS = {
    # 7 windows, 2 compressed caches, 2 indexers, 1 compressor: the real model's.
    40: {"window": 7, "compressed": 2, "indexer": 2, "ring": 1},
    8: {"window": 8, "compressed": 2, "indexer": 2, "ring": 1},
}


@pytest.fixture(scope="module", params=sorted(TOPOLOGIES))
def proxy(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(f"proxy-{request.param}")
    write(folder, request.param)
    return folder


def layers_of(proxy: Path) -> int:
    return json.loads((proxy / "config.json").read_text())["text_config"][
        "num_hidden_layers"
    ]


@pytest.fixture(scope="module")
def model_config(proxy):
    from vllm.config import ModelConfig

    return ModelConfig(model=str(proxy), max_model_len=8192)


def test_vllm_takes_it(proxy, model_config):
    config = model_config.hf_config
    assert model_config.architectures == ["DeepseekV41ForCausalLM"]
    assert model_config.tokenizer_mode == "deepseek_v41"
    assert str(model_config.dtype) == "torch.bfloat16"
    assert config.num_hidden_layers == layers_of(proxy)
    assert config.expert_dtype == "fp4"
    assert config.quantization_config["weight_block_size"] == [32, 32]


def test_published_figures():
    text = proxy_config(40)["text_config"]
    assert text["compress_ratios"] == [0, 0] + [2] * 18 + [1] * 20 + [0] * 3
    assert text["kv_source_layer_ids"] == [2, 8, 14, 20]
    assert text["index_source_layer_ids"] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert text["candidate_source_layer_id"] == 20
    assert text["candidate_block_size"] * text["candidate_topk_blocks"] == 16384
    assert (text["hidden_size"], text["head_dim"]) == (5120, 512)
    assert text["num_attention_heads"] == 64
    assert (text["q_lora_rank"], text["o_lora_rank"], text["o_groups"]) == (
        1280,
        1024,
        8,
    )
    assert text["moe_intermediate_size"] == 2304
    assert (text["num_experts_per_tok"], text["n_shared_experts"]) == (6, 1)
    assert text["sliding_window"] == 128
    assert text["index_topk"] == 512
    assert text["hc_mult"] == 4
    assert text["dspark_block_size"] == 5
    assert "engram_layer_ids" not in text


def test_the_short_proxy_differs_in_depth_alone():
    long, short = (proxy_config(n)["text_config"] for n in (40, 8))
    depends_on_depth = {
        "num_hidden_layers",
        "compress_ratios",
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "candidate_source_layer_id",
        "dspark_target_layer_ids",
    }
    assert {k for k in long if long[k] != short[k]} == depends_on_depth


@pytest.mark.parametrize("layers", sorted(TOPOLOGIES))
def test_every_layer_has_its_sources(layers):
    topology = TOPOLOGIES[layers]
    assert topology.layers == layers
    for layer, ratio in enumerate(topology.compress_ratios):
        if not ratio:
            continue
        source = max(s for s in topology.kv_sources if s <= layer)
        assert topology.compress_ratios[source] == ratio
        assert any(s <= layer for s in topology.index_sources)
    assert set(topology.kv_sources) <= set(topology.index_sources)
    assert topology.candidate_source in topology.index_sources
    assert any(s > topology.candidate_source for s in topology.index_sources)
    # A layer of each kind, and one that reads another's keys.
    assert set(topology.compress_ratios) == {0, 1, 2}
    assert set(topology.index_sources) - set(topology.kv_sources)
    assert len(topology.compress_ratios) > len(topology.kv_sources)


def kv_cache_specs(topology) -> dict:
    """The caches a Hopper GPU keeps for the layers, as the model declares them."""
    import torch
    from vllm.v1.kv_cache_interface import (
        CircularBufferSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
    )

    common = dict(num_kv_heads=1, dtype=torch.uint8, alignment=576)
    latent = dict(head_size=512, state_content_bytes=584, model_version="deepseek_v4")
    latent["cache_dtype_str"] = "fp8_ds_mla"
    specs: dict = {}
    for layer, ratio in enumerate(topology.compress_ratios):
        specs[f"{layer}.window"] = SlidingWindowMLASpec(
            block_size=32, max_tp_shards=1, sliding_window=128, **common, **latent
        )
        if layer not in topology.kv_sources:
            continue
        paged = dict(block_size=64, tokens_per_state=ratio, **common)
        specs[f"{layer}.compressed"] = MLAAttentionSpec(**paged, **latent)
        specs[f"{layer}.indexer"] = MLAAttentionSpec(head_size=132, **paged)
        if ratio > 1:
            specs[f"{layer}.ring"] = CircularBufferSpec(
                block_size=8,
                num_kv_heads=1,
                head_size=1024,
                head_size_v=0,
                dtype=torch.float32,
            )
    return specs


@pytest.mark.parametrize("layers", sorted(TOPOLOGIES))
def test_every_kind_of_attention_group_is_kept(layers):
    """As vLLM's planner divides the caches; each kind in a group has a builder."""
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups

    specs = kv_cache_specs(TOPOLOGIES[layers])
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=_blocks_outermost),
    )
    found: Counter[str] = Counter()
    for group in get_kv_cache_groups(config, specs):
        kinds = {(name.split(".")[1], specs[name]) for name in group.layer_names}
        found.update(kind for kind, _ in kinds)
    assert found == ATTENTION_GROUPS[layers]


def _blocks_outermost():
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return KVCacheLayout.BLHNC


def test_rotary_embeddings_are_built(model_config):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.models.deepseek_v41.common.rope import build_deepseek_v4_rope

    config = model_config.hf_config
    with set_current_vllm_config(VllmConfig()):
        for ratio in (0, 1):
            rope = build_deepseek_v4_rope(
                config,
                head_dim=config.head_dim,
                rope_head_dim=config.qk_rope_head_dim,
                max_position_embeddings=4096,
                compress_ratio=ratio,
            )
            assert rope.rotary_dim == 64


def test_text_and_any_id_pass_the_tokenizer(proxy):
    from vllm.models.deepseek_v41.common.mm_preprocess import (
        validate_image_sentinel_ids,
    )
    from vllm.tokenizers.deepseek_v41 import DeepseekV41Tokenizer

    tokenizer = DeepseekV41Tokenizer.from_pretrained(str(proxy))
    assert len(tokenizer) == VOCABULARY
    text = "Ünïcode, and\ttabs"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(tokenizer.decode([i]) for i in (2, 777, 100_000, VOCABULARY - 1))
    validate_image_sentinel_ids(tokenizer)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_engram_tables_are_the_models_own():
    from proxy_model.engram import tables
    from vllm.models.deepseek_v41.common.engram import EngramLayout

    config = proxy_config(8, engram=tables(8))["text_config"]
    layout = EngramLayout(SimpleNamespace(**config))
    sums = [sum(map(sum, primes)) for primes in layout.primes]
    assert list(layout.num_embeddings) == sums
    assert layout.layer_ids == TOPOLOGIES[8].engram


def test_bad_input_is_one_line(tmp_path):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "proxy_model.write", *arguments],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(Path(__file__).parents[2] / "ci")},
        )

    few = run("--layers", "8", "--out", str(tmp_path / "p"), "--routed-experts", "3")
    assert (few.returncode, few.stderr) == (
        cli.FAILED,
        "error: 6 experts serve a token: give 6 routed experts or more\n",
    )
    assert not (tmp_path / "p").exists()
    assert run("--layers", "9", "--out", str(tmp_path)).returncode == 2
    assert "Traceback" not in run("--layers", "9", "--out", str(tmp_path)).stderr


def test_a_configuration_alone(tmp_path):
    arguments = ["--layers", "8", "--out", str(tmp_path), "--no-tokenizer"]
    assert cli.run(parse, run, arguments) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
