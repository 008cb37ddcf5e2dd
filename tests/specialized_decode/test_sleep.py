"""Steps after a sleep, driven by upstream's worker over a stand-in of its allocator."""

import contextlib
from copy import copy
from types import SimpleNamespace

import pytest
import torch
from cpu_cumem import GARBAGE, CpuCuMem
from decode_steps import Step
from rig import Architecture, Serving
from vllm import device_allocator
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.model_state import (
    DeepseekV41DeviceMetadataModelState,
)
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu_worker import Worker

WAYS = (Serving.IN_GRAPH, Serving.UPSTREAM)


class Cuda:
    def is_cuda_alike(self):
        return True

    def is_xpu(self):
        return False

    def is_cpu(self):
        return False

    def is_rocm(self):
        return False


class Runner:
    """What the worker asks of a model runner, by a rig."""

    def __init__(self, rig) -> None:
        self.rig = rig
        self.kv_cache = None

    def load_model(self, load_dummy_weights: bool) -> None:
        self.model = torch.nn.Linear(4, 4)
        self.model.register_buffer("table", torch.arange(4.0))
        self.rig.load_model()

    def get_draft_model(self) -> None:
        return None

    def initialize_kv_cache(self, kv_cache_config, kv_cache_allocation_context):
        self.rig.initialize_kv_cache()
        with kv_cache_allocation_context:
            self.kv_cache = torch.ones(64)


@pytest.fixture
def cumem(monkeypatch):
    cumem = CpuCuMem()
    for module in (gpu_worker, device_allocator):
        monkeypatch.setattr(module, "get_mem_allocator_instance", lambda: cumem)
    monkeypatch.setattr(gpu_worker, "current_platform", Cuda())
    monkeypatch.setattr(gpu_worker, "set_torch_threads_for_runtime", lambda: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (1 << 30,) * 2)
    return cumem


@pytest.fixture
def make_worker(make_rig, cumem, cuda_graphs):
    """``make_worker(way, sleep_mode)``: a worker that has captured its graphs."""

    def make(way: Serving, sleep_mode: bool = True) -> Worker:
        rig = make_rig(Architecture.SM90, 1, way)
        rig.keep_graphs(2)
        model_config = copy(rig.config.model_config)
        model_config.enable_sleep_mode = sleep_mode
        # Sleep mode turns it on.
        model_config.enable_cumem_allocator = True
        rig.config.model_config = model_config
        worker = object.__new__(Worker)
        vars(worker).update(
            vllm_config=rig.config,
            model_config=model_config,
            cache_config=rig.config.cache_config,
            model_runner=Runner(rig),
            _sleep_mode_backend=None,
            _sleep_saved_parameters={},
            _sleep_saved_buffers={},
            _sleep_saved_draft_buffers={},
            _scoped_allocator_max_split=lambda **_: contextlib.nullcontext(),
        )
        worker.load_model()
        worker.initialize_from_config(
            SimpleNamespace(
                num_blocks=4096,
                kv_cache_layout=None,
                hash_block_size=128,
                cache_hit_alignment_tokens=128,
                needs_kv_cache_zeroing=False,
            )
        )
        cuda_graphs.device_storages = rig.device_storages
        rig.record()
        return worker

    return make


def check_steps(rig) -> None:
    """A decode, a one-token extension of a prompt, an idle rank's dummy batch, and a
    decode after these.
    """
    view = rig.forward_view(2)
    step, idle = Step((1025, 300), 2, 1), Step((1, 1), 2, 1)
    rig.check_step(step, view)
    rig.check_batch(lambda: rig.extending(step, 960), step, view)
    rig.check_batch(lambda: rig.idle(2), idle, view, for_capture=True)
    rig.check_step(step, view)


@pytest.mark.parametrize(
    ("sleep_mode", "woken"),
    [
        (True, [None]),
        # As reinforcement learning does, to load weights before there is a KV cache.
        (True, [["weights"], ["kv_cache"]]),
        # The worker sleeps with the allocator alone, too.
        (False, [None]),
    ],
)
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_steps_after_waking_are_those_of_the_stock_decode(
    make_worker, cumem, way, level, sleep_mode, woken
):
    worker = make_worker(way, sleep_mode)
    rig = worker.model_runner.rig
    rig.run_batch(rig.extending(Step((1025, 300), 2, 1), 960))
    for _ in range(2):
        worker.sleep(level)
        for tags in woken:
            worker.wake_up(tags)
    check_steps(rig)
    assert rig.state.graphs.stats.served.total() == 5
    # That it slept.
    model = worker.model_runner.model
    assert cumem.tag_of(model.weight) == "weights"
    assert is_garbage(model.weight) is (level == 2)
    assert model.table.tolist() == [0, 1, 2, 3]
    assert is_garbage(worker.model_runner.kv_cache)


def is_garbage(tensor: torch.Tensor) -> bool:
    return bool((tensor.detach().view(torch.uint8) == GARBAGE).all())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", [1, 2])
def test_a_buffer_of_the_weights_that_a_build_read_would_be_seen(
    make_worker, monkeypatch, level, way
):
    """The model state makes its replay starts with the weights, and anew with the KV
    cache. Without the second, level 2 would leave garbage in them.
    """
    monkeypatch.delattr(DeepseekV41DeviceMetadataModelState, "initialize_kv_cache")
    worker = make_worker(way)
    worker.sleep(level)
    worker.wake_up()
    with contextlib.nullcontext() if level == 1 else pytest.raises(AssertionError):
        worker.model_runner.rig.check_step(Step((1025, 300), 2, 1))
