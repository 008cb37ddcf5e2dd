"""The edits of upstream's files do what they are for."""

import contextlib
import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rig import vllm_config
from vllm.config import CUDAGraphMode
from vllm.distributed.elastic_ep import elastic_execute
from vllm.models.deepseek_v41.nvidia import model, specialized_decode
from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState
from vllm.models.deepseek_v41.nvidia.specialized_decode.deployment import Deployment
from vllm.models.deepseek_v41.nvidia.specialized_decode.hopper.binding import (
    BindsKernels,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.model_state import (
    DeepseekV41DeviceMetadataModelState,
)
from vllm.sequence import IntermediateTensors
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.model_states.default import DefaultModelState


class ModelState:
    supports_mm_inputs = False

    def __init__(self) -> None:
        self.calls = []

    def release_metadata_graphs(self):
        self.calls.append("release")


@pytest.mark.parametrize("hopper_kernels", [False, True])
@pytest.mark.parametrize(
    ("device_metadata", "cls"),
    [(False, DeepseekV41ModelState), (True, DeepseekV41DeviceMetadataModelState)],
)
def test_the_deployment_chooses_the_model_state(device_metadata, cls, hopper_kernels):
    causal_lm = SimpleNamespace(
        specialized_decode_config=None,
        decode_deployment=Deployment(device_metadata, hopper_kernels),
    )
    chosen = model.DeepseekV41LLMForCausalLM.get_model_state_cls(causal_lm)
    assert issubclass(chosen, cls)
    assert issubclass(chosen, BindsKernels) is hopper_kernels
    assert hopper_kernels or chosen is cls


def profiled_runner(model_state):
    return SimpleNamespace(
        model_state=model_state,
        compilation_config=SimpleNamespace(static_forward_context={}),
        cache_config=SimpleNamespace(num_gpu_blocks=1),
        maybe_remove_all_loras=lambda _: None,
        lora_config=None,
        cudagraph_manager=object(),
    )


def test_the_end_of_memory_profiling_releases_its_recordings(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    state = ModelState()
    cudagraph_utils._teardown_profiling_state(profiled_runner(state))
    assert state.calls == ["release"]


def test_other_model_states_ignore_the_hooks():
    """Upstream's own calls them too, whatever the model."""
    state = object.__new__(DefaultModelState)
    state.release_metadata_graphs()
    state.build_in_graph(None, {}, None, None, [], None)
    assert state.take_decode_metadata_steps() is None


def test_elastic_scaling_releases_the_recordings_with_the_graphs(monkeypatch):
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda: None)
    monkeypatch.setattr(elastic_execute, "reset_compile_wrapper", lambda _: None)
    state = ModelState()
    released = []
    runner = SimpleNamespace(
        model_state=state,
        cudagraph_manager=SimpleNamespace(release_graphs=lambda: released.append(1)),
        speculator=None,
        get_model=lambda: None,
    )
    worker = SimpleNamespace(model_runner=runner, vllm_config=vllm_config())
    executor = SimpleNamespace(worker=worker)
    elastic_execute.ElasticEPScalingExecutor._release_cuda_graphs(executor)
    assert state.calls == ["release"]
    assert released == [1]


@pytest.mark.parametrize(
    ("installed", "checked"),
    [
        ("0.7.2", True),
        ("0.7.2.post1", True),
        ("0.7.2+cu130", True),
        ("0.7.2rc1", False),
        ("0.7.2.dev3", False),
        ("0.7.3", False),
        ("0.7.20", False),
        (None, False),
    ],
)
def test_the_checked_flashinfer_is_known_by_its_release(
    monkeypatch, installed, checked
):
    def version(name):
        assert name == "flashinfer-python"
        if installed is None:
            raise importlib.metadata.PackageNotFoundError
        return installed

    monkeypatch.setattr(specialized_decode.importlib.metadata, "version", version)
    specialized_decode.uses_checked_flashinfer.cache_clear()
    try:
        assert specialized_decode.uses_checked_flashinfer("a feature") is checked
    finally:
        specialized_decode.uses_checked_flashinfer.cache_clear()


@pytest.mark.parametrize("last_stage", [True, False])
@pytest.mark.parametrize("first_stage", [True, False])
@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE])
def test_a_full_forward_begins_with_its_metadata_build(
    monkeypatch, mode, first_stage, last_stage
):
    """In the warm-up and in the capture of FULL graphs of every pipeline stage, and in
    no other forward.
    """
    calls = []
    prepared = iter([{"first": 1}, {"second": 2}])

    class InGraphModelState(ModelState):
        def build_in_graph(self, graph, attn_metadata, *where):
            calls.append((graph, dict(attn_metadata), where))

        def prepare_dummy_inputs(self, *_):
            return {}

    between_stages = IntermediateTensors({"hidden_states": torch.zeros(1)})

    def model(intermediate_tensors, **_):
        assert (intermediate_tensors is None) is first_stage
        calls.append("forward")
        return torch.zeros(1) if last_stage else between_stages

    manager = object.__new__(cudagraph_utils.ModelCudaGraphManager)
    vars(manager).update(
        use_breakable_cg=True,
        breakable_cg_runner=model,
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        max_num_reqs=1,
        is_first_pp_rank=first_stage,
        is_last_pp_rank=last_stage,
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1)
        ),
        hidden_states=None,
        intermediate_tensors=None,
    )
    graph = cudagraph_utils.BatchExecutionDescriptor(mode, 1, 1, 1)

    def capture(_, create_forward_fn, *__):
        for warmup in (True, False):
            create_forward_fn(graph, warmup)(
                CUDAGraphMode.NONE if mode == CUDAGraphMode.FULL or warmup else mode
            )

    monkeypatch.setattr(cudagraph_utils.CudaGraphManager, "capture", capture)
    monkeypatch.setattr(
        cudagraph_utils,
        "prepare_inputs_to_capture",
        lambda *_, **__: (next(prepared), {}),
    )
    monkeypatch.setattr(
        cudagraph_utils,
        "set_forward_context",
        lambda *_, **__: contextlib.nullcontext(),
    )
    buffers = SimpleNamespace(
        input_ids=torch.zeros(1), positions=torch.zeros(1), is_padding=torch.zeros(1)
    )
    manager.capture(
        model,
        InGraphModelState(),
        buffers,
        None if first_stage else between_stages,
        "tables",
        ["groups"],
        "config",
    )
    if mode == CUDAGraphMode.FULL:
        where = buffers, "tables", ["groups"], "config"
        assert calls == [
            (graph, {"first": 1}, where),
            "forward",
            (graph, {"second": 2}, where),
            "forward",
        ]
    else:
        assert calls == ["forward", "forward"]


def test_the_package_notes_are_true():
    """Of the decode that each setting gives, and of where to read on."""
    package = Path(specialized_decode.__file__).parent
    notes = (package / "AGENTS.md").read_text()
    assert "`auto`, gives device metadata: `metadata/README.md`" in notes
    assert (package / "metadata" / "README.md").is_file()
    assert "keeps the stock decode" not in notes
    assert "one per FULL decode graph" in notes
