"""What each deployment gets, why, and what a bad configuration is told."""

from copy import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rig import vllm_config
from vllm.config import CompilationMode, CUDAGraphMode, KVTransferConfig
from vllm.config.attention import HiSparseConfig
from vllm.models.deepseek_v41.nvidia import specialized_decode
from vllm.models.deepseek_v41.nvidia.specialized_decode import deployment, tp_group
from vllm.models.deepseek_v41.nvidia.specialized_decode.deployment import (
    HOPPER_REQUIREMENTS,
    Deployment,
    decode_deployment,
    describe_platform,
    missing_for_device_metadata,
    requested_backend,
    requested_metadata_graphs,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.hopper import kernels, linear


class NvidiaGpu:
    # No kernels of its own, so that metadata are all there is.
    capability = 100

    def is_cuda(self):
        return True

    def is_device_capability(self, capability):
        return capability == self.capability

    def get_device_name(self):
        return "a GPU"


@pytest.fixture
def gpu(monkeypatch):
    gpu = NvidiaGpu()
    monkeypatch.setattr(deployment, "current_platform", gpu)
    return gpu


@pytest.fixture
def other_ranks(monkeypatch):
    """What other ranks of the TP group can have: device metadata, Hopper kernels, the
    executor.
    """
    ranks = []

    def all_reduce(tensor, op, group):
        assert op == dist.ReduceOp.MIN
        assert group == "cpu"
        for rank in ranks:
            tensor.copy_(torch.minimum(tensor, torch.tensor(rank)))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    group = SimpleNamespace(cpu_group="cpu", world_size=2)
    monkeypatch.setattr(tp_group, "get_tp_group", lambda: group)
    return ranks


@pytest.fixture
def config(gpu, other_ranks, monkeypatch):
    # Without the variable other settings turn it off, and two needs go at once.
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config = vllm_config(6)
    config.additional_config = {}
    return config


def test_auto_is_device_metadata_where_it_can_be(config):
    assert decode_deployment(config) == Deployment(device_metadata=True)


def test_without_additional_config_it_is_auto(config):
    for nothing in ({}, None, object()):
        config.additional_config = nothing
        assert decode_deployment(config).device_metadata


def test_stock_is_stock(config):
    config.additional_config = {"decode_backend": "stock"}
    assert decode_deployment(config) == Deployment()


def breaking(path, value):
    def change(config):
        *parents, name = path.split(".")
        for parent in parents:
            config = getattr(config, parent)
        object.__setattr__(config, name, value)

    return change


BREAKING = {
    "metadata_graphs other than eager": lambda config: None,
    "Model Runner V2": lambda config: None,
    "FULL CUDA graphs for decode batches only": breaking(
        "compilation_config.cudagraph_mode", CUDAGraphMode.PIECEWISE
    ),
    "no prefill or decode context parallelism": breaking(
        "parallel_config.decode_context_parallel_size", 2
    ),
    "no micro-batching": breaking("parallel_config.enable_dbo", True),
    "no KV connector that may read a step's metadata object": breaking(
        "kv_transfer_config",
        KVTransferConfig(kv_connector="HiSparseConnector", kv_role="kv_both"),
    ),
    "no speculative decoding but by dspark, dflash, ngram": breaking(
        "speculative_config.method", "eagle"
    ),
    "an NVIDIA GPU": lambda config: None,
}


@pytest.mark.parametrize("need", BREAKING)
def test_each_requirement_alone_is_named(config, gpu, monkeypatch, need):
    assert missing_for_device_metadata(config) == ()
    if need == "an NVIDIA GPU":
        gpu.is_cuda = lambda: False
    if need == "Model Runner V2":
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    metadata_graphs = "auto"
    if need == "metadata_graphs other than eager":
        metadata_graphs = "eager"
    config.additional_config = {"metadata_graphs": metadata_graphs}
    BREAKING[need](config)
    [missing] = missing_for_device_metadata(config)
    assert missing.startswith(need)
    assert missing.endswith(")")
    # auto serves all the same, latency_specialized says what is missing.
    assert decode_deployment(config) == Deployment(missing=(missing,))
    config.additional_config["decode_backend"] = "latency_specialized"
    with pytest.raises(ValueError, match="decode_backend=auto to serve") as error:
        decode_deployment(config)
    assert missing in str(error.value)


def test_every_requirement_has_its_case():
    needs = [r.need for r in deployment.DEVICE_METADATA_REQUIREMENTS]
    assert len(needs) == len(BREAKING)
    assert all(any(need.startswith(case) for case in BREAKING) for need in needs)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("parallel_config.tensor_parallel_size", 8),
        ("parallel_config.data_parallel_size", 2),
        ("parallel_config.pipeline_parallel_size", 2),
        ("parallel_config.enable_expert_parallel", True),
        ("parallel_config.enable_eplb", True),
        ("parallel_config.enable_elastic_ep", True),
        ("lora_config", object()),
        ("model_config.enable_sleep_mode", True),
        ("model_config.enable_cumem_allocator", True),
        *(("compilation_config.mode", mode) for mode in CompilationMode),
    ],
)
def test_other_features_go_with_device_metadata(config, path, value):
    config.model_config = copy(config.model_config)
    breaking(path, value)(config)
    assert decode_deployment(config).device_metadata


@pytest.mark.parametrize(
    "mode", [CUDAGraphMode.FULL, CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE]
)
def test_mixed_full_graphs_are_not_enough(config, mode):
    config.compilation_config.cudagraph_mode = mode
    assert missing_for_device_metadata(config)


def test_hisparse_is_named_however_it_is_turned_on(config):
    config.attention_config.hisparse_config = HiSparseConfig()
    [missing] = missing_for_device_metadata(config)
    assert "HiSparse's attention reads host fields of it" in missing


def test_a_connector_that_reads_nothing_is_served(config):
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="NixlConnector", kv_role="kv_both"
    )
    assert missing_for_device_metadata(config) == ()


def test_everything_missing_is_listed_at_once(config):
    config.parallel_config.enable_dbo = True
    config.speculative_config.method = "eagle"
    assert len(missing_for_device_metadata(config)) == 2


@pytest.mark.parametrize("value", ["fast", "", None, 3, "STOCK"])
def test_unknown_values_are_errors_that_name_the_valid_ones(config, value):
    config.additional_config = {"decode_backend": value}
    with pytest.raises(ValueError, match="'auto', 'stock', 'latency_specialized'"):
        decode_deployment(config)


def test_unknown_keys_are_errors_that_name_the_valid_ones(config):
    config.additional_config = {"decode_backnd": "stock"}
    with pytest.raises(ValueError, match=r"'decode_backnd'.*'decode_backend'") as error:
        decode_deployment(config)
    assert "'metadata_graphs'" in str(error.value)


def test_keys_of_any_type_are_named(config):
    config.additional_config = {3: "stock", None: 1, "x": 2}
    with pytest.raises(ValueError, match=r"'x', 3, None: DeepSeek-V4.1 takes"):
        decode_deployment(config)


@pytest.fixture
def warnings(monkeypatch):
    lines = []
    monkeypatch.setattr(
        deployment.logger,
        "warning_once",
        lambda text, *args: lines.append(text % args),
    )
    return lines


@pytest.mark.parametrize(
    ("value", "warned"),
    [("auto", False), ("replay", True), ("launch", True), ("eager", False)],
)
def test_metadata_graphs_without_effect_are_told(config, warnings, value, warned):
    config.additional_config = {"decode_backend": "stock", "metadata_graphs": value}
    decode_deployment(config)
    assert bool(warnings) is warned
    if warned:
        assert f"metadata_graphs={value} has no effect: the stock" in warnings[0]


@pytest.mark.parametrize("backend", ["auto", "stock"])
@pytest.mark.parametrize(("drafts", "warned"), [(0, False), (5, False), (6, True)])
def test_drafts_longer_than_their_training_are_warned_of(
    config, warnings, backend, drafts, warned
):
    config.speculative_config = vllm_config(1 + drafts).speculative_config
    config.additional_config = {"decode_backend": backend}
    decode_deployment(config)
    line = (
        "DeepSeek-V4.1 decode: num_speculative_tokens=6 is more than the blocks of 5 "
        "tokens that the draft is trained for: acceptance falls. Use 5 or fewer."
    )
    assert warnings == [line] * warned


@pytest.mark.parametrize("value", ["auto", "replay", "launch", "eager"])
def test_metadata_graphs_go_with_every_backend(config, value):
    for backend, records in (
        ("auto", value != "eager"),
        ("latency_specialized", True),
        ("stock", False),
    ):
        if (backend, value) == ("latency_specialized", "eager"):
            continue
        config.additional_config = {
            "decode_backend": backend,
            "metadata_graphs": value,
        }
        assert decode_deployment(config).device_metadata is records
        assert requested_metadata_graphs(config.additional_config) == value


@pytest.mark.parametrize(
    "value", ["on", "", None, False, "AUTO", "in_graph", "separate", "off"]
)
@pytest.mark.parametrize("backend", ["auto", "stock", "latency_specialized"])
def test_unknown_metadata_graphs_are_errors_whatever_the_decode(config, backend, value):
    """Also of the stock decode, which has no use for them: the next one may."""
    config.additional_config = {"decode_backend": backend, "metadata_graphs": value}
    with pytest.raises(
        ValueError, match=r"metadata_graphs .*'auto', 'replay', 'launch', 'eager'\."
    ):
        decode_deployment(config)


@pytest.mark.parametrize("value", [-1, True, 2.0, "10", None])
def test_a_verification_that_makes_no_sense_is_an_error(config, value):
    config.additional_config = {"metadata_graphs_verify": value}
    with pytest.raises(ValueError, match="use a number of steps, or 0 for none"):
        decode_deployment(config)


@pytest.mark.parametrize("setting", ["decode_backend", "metadata_graphs"])
def test_a_verification_without_effect_is_told(config, warnings, setting):
    value = "stock" if setting == "decode_backend" else "eager"
    config.additional_config = {setting: value, "metadata_graphs_verify": 10}
    decode_deployment(config)
    [warning] = warnings
    assert "metadata_graphs_verify=10 has no effect: " in warning


def test_metadata_graphs_are_auto_unless_asked_for():
    for nothing in ({}, None, {"decode_backend": "stock"}):
        assert requested_metadata_graphs(nothing) == "auto"


def test_ranks_settle_on_the_lowest_decode(config, other_ranks):
    other_ranks.append([0, 0, 0])
    assert not decode_deployment(config).device_metadata
    config.additional_config = {"decode_backend": "latency_specialized"}
    with pytest.raises(ValueError, match="another tensor-parallel rank"):
        decode_deployment(config)


class TestExecutor:
    @pytest.fixture(autouse=True)
    def gb300(self, gpu, monkeypatch):
        gpu.capability = 103
        self.missing = []
        monkeypatch.setattr(specialized_decode, "unsupported", lambda _: self.missing)
        monkeypatch.setattr(
            specialized_decode, "specialized_decode_config", lambda _: "executor"
        )

    def test_latency_specialized_is_the_executor(self, config):
        config.additional_config = {"decode_backend": "latency_specialized"}
        assert decode_deployment(config) == Deployment(executor="executor")

    def test_where_it_cannot_run_metadata_is_the_devices(self, config):
        self.missing = ["DSpark"]
        config.additional_config = {"decode_backend": "latency_specialized"}
        assert decode_deployment(config).device_metadata

    @pytest.mark.parametrize("value", ["auto", "replay", "launch", "eager"])
    def test_its_recordings_are_not_set(self, config, warnings, value):
        config.additional_config = {
            "decode_backend": "latency_specialized",
            "metadata_graphs": value,
        }
        assert decode_deployment(config).executor == "executor"
        assert bool(warnings) is (value != "auto")

    def test_auto_keeps_the_outputs_of_the_stock_decode(self, config):
        deployed = decode_deployment(config)
        assert deployed.device_metadata
        assert deployed.executor is None

    def test_ranks_settle_on_device_metadata_together(self, config, other_ranks):
        other_ranks.append([1, 0, 0])
        config.additional_config = {"decode_backend": "latency_specialized"}
        assert decode_deployment(config).device_metadata


HOPPER_BREAKING = {
    "FULL CUDA graphs": breaking(
        "compilation_config.cudagraph_mode", CUDAGraphMode.PIECEWISE
    ),
    "no torch.compile": breaking(
        "compilation_config.mode", CompilationMode.STOCK_TORCH_COMPILE
    ),
    "no LoRA": breaking("lora_config", object()),
    "no micro-batching": breaking("parallel_config.enable_dbo", True),
    "no batch invariance": lambda config: None,
}


class TestHopper:
    @pytest.fixture(autouse=True)
    def hopper(self, gpu, monkeypatch):
        gpu.capability = 90
        self.loaded = SimpleNamespace(load=lambda: None)
        monkeypatch.setattr(kernels, "kernels", lambda: self.loaded)
        self.preferred = []
        monkeypatch.setattr(
            linear, "prefer_hopper_kernel", lambda: self.preferred.append(True)
        )

    @pytest.fixture
    def asked(self, config):
        config.additional_config = {"decode_backend": "latency_specialized"}
        return config

    def test_latency_specialized_has_kernels_and_metadata(self, asked):
        assert decode_deployment(asked) == Deployment(True, True)
        assert self.preferred

    def test_auto_keeps_the_outputs_of_the_stock_decode(self, config):
        assert decode_deployment(config) == Deployment(device_metadata=True)
        assert not self.preferred

    @pytest.mark.parametrize("need", HOPPER_BREAKING)
    def test_each_requirement_alone_is_named(self, asked, monkeypatch, need):
        if need == "no batch invariance":
            monkeypatch.setattr(deployment.envs, "VLLM_BATCH_INVARIANT", True)
        HOPPER_BREAKING[need](asked)
        with pytest.raises(ValueError, match="decode_backend=auto to serve") as error:
            decode_deployment(asked)
        assert f"latency_specialized needs {need}" in str(error.value)
        assert not self.preferred

    def test_every_requirement_has_its_case(self):
        assert len(HOPPER_REQUIREMENTS) == len(HOPPER_BREAKING)

    def test_kernels_that_do_not_compile_are_told(self, asked):
        def load():
            raise kernels.KernelError("no such instruction")

        self.loaded.load = load
        with pytest.raises(ValueError, match=r"kernels that compile \(no such instr"):
            decode_deployment(asked)

    def test_a_rank_without_them_is_told_on_every_rank(self, asked, other_ranks):
        other_ranks.append([1, 0, 0])
        with pytest.raises(ValueError, match="another tensor-parallel rank"):
            decode_deployment(asked)

    def test_kernels_go_without_device_metadata(self, asked):
        asked.additional_config["metadata_graphs"] = "eager"
        deployed = decode_deployment(asked)
        assert deployed.hopper_kernels
        assert not deployed.device_metadata
        assert "metadata_graphs" in deployed.missing[0]

    def test_the_line_of_the_platform_names_them(self):
        assert "Hopper kernels too under latency_specialized" in describe_platform()


def test_the_default_backend():
    assert requested_backend({}) == "auto"


def test_the_platform_in_a_line(gpu):
    assert "device metadata" in describe_platform()
    gpu.is_cuda = lambda: False
    assert describe_platform().startswith("no NVIDIA GPU")
