"""What each deployment gets, why, and what a bad configuration is told."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from rig import vllm_config
from vllm.config import CUDAGraphMode
from vllm.models.deepseek_v41.nvidia import specialized_decode
from vllm.models.deepseek_v41.nvidia.specialized_decode import deployment
from vllm.models.deepseek_v41.nvidia.specialized_decode.deployment import (
    Decode,
    decode_deployment,
    describe_platform,
    missing_for_device_metadata,
    requested_backend,
    requested_metadata_graphs,
)


class NvidiaGpu:
    capability = 90

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
    """The decodes that the other ranks of the TP group settle for."""
    ranks = []

    def all_reduce(tensor, op, group):
        assert op == dist.ReduceOp.MIN and group == "cpu"
        for rank in ranks:
            tensor.clamp_(max=int(rank))

    monkeypatch.setattr(deployment.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(
        deployment, "get_tp_group", lambda: SimpleNamespace(cpu_group="cpu")
    )
    return ranks


@pytest.fixture
def config(gpu, other_ranks, monkeypatch):
    # Without the variable other settings turn it off, and two needs go at once.
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config = vllm_config(6)
    config.additional_config = {}
    return config


def test_auto_is_device_metadata_where_it_can_be(config):
    assert decode_deployment(config).decode == Decode.DEVICE_METADATA


def test_without_additional_config_it_is_auto(config):
    for nothing in ({}, None, object()):
        config.additional_config = nothing
        assert decode_deployment(config).device_metadata


def test_stock_is_stock(config):
    config.additional_config = {"decode_backend": "stock"}
    assert decode_deployment(config).decode == Decode.STOCK


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
    "no KV transfer and no HiSparse": breaking("kv_transfer_config", object()),
    "no speculative decoding other than": breaking(
        "speculative_config.method", "eagle"
    ),
    "no adaptive verification": breaking(
        "speculative_config.enable_adaptive_verification", True
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
    assert missing.startswith(need) and missing.endswith(")")
    # auto serves all the same, latency_specialized says what is missing.
    assert decode_deployment(config).decode == Decode.STOCK
    assert decode_deployment(config).missing == (missing,)
    config.additional_config["decode_backend"] = "latency_specialized"
    with pytest.raises(ValueError, match="decode_backend=auto to serve") as error:
        decode_deployment(config)
    assert missing in str(error.value)


def test_every_requirement_has_its_case():
    needs = [r.need for r in deployment.DEVICE_METADATA_REQUIREMENTS]
    assert len(needs) == len(BREAKING)
    assert all(any(need.startswith(case) for case in BREAKING) for need in needs)


@pytest.mark.parametrize(
    "mode", [CUDAGraphMode.FULL, CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE]
)
def test_mixed_full_graphs_are_not_enough(config, mode):
    config.compilation_config.cudagraph_mode = mode
    assert missing_for_device_metadata(config)


def test_everything_missing_is_listed_at_once(config):
    config.parallel_config.enable_dbo = True
    config.kv_transfer_config = object()
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


def test_metadata_graphs_are_auto_unless_asked_for():
    for nothing in ({}, None, {"decode_backend": "stock"}):
        assert requested_metadata_graphs(nothing) == "auto"


def test_ranks_settle_on_the_lowest_decode(config, other_ranks):
    other_ranks.append(Decode.STOCK)
    assert decode_deployment(config).decode == Decode.STOCK
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
        deployed = decode_deployment(config)
        assert (deployed.decode, deployed.executor) == (Decode.EXECUTOR, "executor")
        assert not deployed.device_metadata

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
        assert decode_deployment(config).decode == Decode.EXECUTOR
        assert bool(warnings) is (value != "auto")

    def test_auto_keeps_the_outputs_of_the_stock_decode(self, config):
        deployed = decode_deployment(config)
        assert deployed.device_metadata and deployed.executor is None

    def test_ranks_settle_on_device_metadata_together(self, config, other_ranks):
        other_ranks.append(Decode.DEVICE_METADATA)
        config.additional_config = {"decode_backend": "latency_specialized"}
        assert decode_deployment(config).device_metadata


def test_the_default_backend():
    assert requested_backend({}) == "auto"


def test_the_platform_in_a_line(gpu):
    assert "device metadata" in describe_platform()
    gpu.is_cuda = lambda: False
    assert describe_platform().startswith("no NVIDIA GPU")
