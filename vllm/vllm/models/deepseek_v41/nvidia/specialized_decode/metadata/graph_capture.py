# SPDX-License-Identifier: Apache-2.0
"""Recording work as a CUDA graph, with no harm done where that fails.

``torch.cuda.graph`` is made for captures that succeed. Where CUDA breaks a capture
off, it leaves the process with its own stream current, the allocators still
filling the graph's pool and the random generator in capture mode: the next
capture or forward then fails, far from the cause. Here a recording that fails
raises, and everything else is as before.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.torch_utils import current_stream

_T = TypeVar("_T")
_CU_STREAM_CAPTURE_MODE_RELAXED = 2


@contextmanager
def _refuse_host_syncs() -> Iterator[None]:
    """Raise RuntimeError where the host would wait for the device, before it does:
    a graph cannot hold such work, and in a capture it would break that off.
    """
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def record(
    build: Callable[[], _T], vllm_config: VllmConfig
) -> tuple[_T, torch.cuda.CUDAGraph]:
    """``build`` as a graph in the global CUDA graph pool, which the FULL forward graphs
    and memory profiling use, and what it returned while it was recorded.

    It runs once before that, for what it allocates and compiles the first time. Raises
    RuntimeError where it waits for the device or does other work that a graph cannot
    hold. Streams that it forks must be joined, also where it raises.
    """
    with _refuse_host_syncs():
        build()
    graph = torch.cuda.CUDAGraph()
    pool = current_platform.get_global_graph_pool()
    with capture_pool(pool, vllm_config) as pool, _record_into(graph, pool):
        return build(), graph


@contextmanager
def _record_into(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Record what runs in the block into ``graph``, with memory from ``pool``.

    Under CUDA's global capture mode, so that an unsafe call of any thread raises.
    """
    main_stream = current_stream()
    # Restores the current stream, whatever is left current inside.
    with torch.cuda.stream(main_stream):
        try:
            with torch.cuda.graph(graph, pool), _refuse_host_syncs():
                yield
        except BaseException:
            if torch.cuda.current_stream() != main_stream:
                _end_broken_capture(graph)
            raise


def _end_broken_capture(graph: torch.cuda.CUDAGraph) -> None:
    """Let torch end a capture that CUDA has dropped: give it an empty one to end,
    on the stream of the capture, which is still current.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    driver.cuStreamBeginCapture_v2(stream, _CU_STREAM_CAPTURE_MODE_RELAXED)
    # Raises if the capture had not even begun; then there is nothing to undo.
    with suppress(RuntimeError):
        graph.capture_end()
    graph.reset()
