"""A stand-in for CUDA graphs on CPU tensors.

While a graph records, the ATen calls and the Triton launches run and are noted
down with their arguments; ``replay`` runs them again on the same storages, with
the same host values, as a CUDA graph does. It also raises on what a CUDA graph
cannot hold: a read of a device tensor by the host, and a copy of host memory to
the device. Which storages are on the "device" is told by ``device_storages`` and
followed through the calls; until it is told, all of them are.

It cannot see the concurrency of streams, nor what the allocator of a graph pool
does: those need a GPU.
"""

import contextlib
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor


class CaptureError(RuntimeError):
    """The recorded work is none that a CUDA graph can hold."""


class CpuCudaGraph:
    def __init__(self, keep_graph: bool = False) -> None:
        self.calls: list[Callable[[], object]] = []
        self.launches = 0
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for call in self.calls:
            call()

    def reset(self) -> None:
        self.calls.clear()

    def pool(self) -> tuple[int, int]:
        return (0, 0)


def _tensors(*trees: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: CpuCudaGraph, device_storages: set[int] | None) -> None:
        super().__init__()
        self.graph = graph
        self.device_storages = None if device_storages is None else {*device_storages}
        # Storages are told apart by address, so none may be freed meanwhile.
        self.keep_alive: list[torch.Tensor] = []

    def on_device(self, tensor: torch.Tensor) -> bool:
        return self.device_storages is None or _storage(tensor) in self.device_storages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        inputs = _tensors(args, kwargs)
        on_device = [tensor for tensor in inputs if self.on_device(tensor)]
        if name == "aten::_local_scalar_dense" and on_device and self.device_storages:
            raise CaptureError("the host reads a device tensor")
        if name == "aten::copy_" and 0 < len(on_device) < len(inputs):
            source_on_device = self.on_device(args[1])
            if source_on_device or args[1].numel() > 1:
                raise CaptureError("a copy between host and device memory")
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        self.keep_alive += outputs
        input_storages = {_storage(tensor) for tensor in inputs}
        fresh = [t for t in outputs if _storage(t) not in input_storages]
        if self.device_storages is not None and (on_device or not inputs):
            self.device_storages.update(_storage(tensor) for tensor in fresh)
        is_view = not fresh and not func._schema.is_mutable
        # Host arithmetic happens once, when a graph records.
        on_host = inputs and not on_device
        if not is_view and not on_host:
            self.graph.calls.append(_again(func, args, kwargs, outputs, fresh))
        return result


def _again(func, args, kwargs, outputs, fresh) -> Callable[[], None]:
    """``func`` once more, its new tensors landing where the first ones lie."""
    uninitialized = func._schema.name.startswith("aten::empty")

    def call() -> None:
        again = _tensors(func(*args, **kwargs))
        for first, now in zip(outputs, again, strict=True):
            if not uninitialized and any(first is tensor for tensor in fresh):
                first.copy_(now)

    return call


class CpuStream:
    def wait_stream(self, stream: "CpuStream") -> None: ...

    def synchronize(self) -> None: ...


class CpuCudaGraphs:
    """Puts the stand-in in the place of ``torch.cuda``'s graphs and streams."""

    def __init__(self) -> None:
        self.device_storages: set[int] | None = None
        self.fail_on_capture: int | None = None
        self.captures = 0
        self._recorder: _Recorder | None = None

    @contextlib.contextmanager
    def graph(self, graph: CpuCudaGraph, pool=None, stream=None, **options):
        self.captures += 1
        if self.captures == self.fail_on_capture:
            raise CaptureError("capture failed on purpose")
        self._recorder = _Recorder(graph, self.device_storages)
        try:
            with self._recorder:
                yield
        finally:
            self._recorder = None

    def install(self, monkeypatch) -> None:
        from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata import (
            forked_build,
            graph_capture,
        )

        run_grid = GridExecutor.__call__

        def launch(executor, *args, **kwargs):
            recorder = self._recorder
            if recorder is None:
                return run_grid(executor, *args, **kwargs)
            # The interpreter's own tensor work is not part of the graph.
            with _disable_current_modes():
                run_grid(executor, *args, **kwargs)
            recorder.graph.launches += 1
            recorder.graph.calls.append(lambda: run_grid(executor, *args, **kwargs))

        class Platform:
            def __getattr__(self, name):
                return getattr(platform, name)

            def get_global_graph_pool(self):
                return None

        platform = graph_capture.current_platform
        stream = CpuStream()
        monkeypatch.setattr(GridExecutor, "__call__", launch)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", CpuCudaGraph)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)
        monkeypatch.setattr(torch.cuda, "Stream", CpuStream)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(
            torch.cuda,
            "is_current_stream_capturing",
            lambda: self._recorder is not None,
        )
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 31))
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        for module in (graph_capture, forked_build):
            monkeypatch.setattr(module, "current_stream", lambda: stream)
        monkeypatch.setattr(
            graph_capture, "capture_pool", lambda *_: contextlib.nullcontext(None)
        )
        monkeypatch.setattr(graph_capture, "current_platform", Platform())
