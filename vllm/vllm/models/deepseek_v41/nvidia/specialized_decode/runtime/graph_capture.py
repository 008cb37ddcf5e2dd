# SPDX-License-Identifier: Apache-2.0
"""Recording work as a CUDA graph, with no harm done where that fails.

``torch.cuda.graph`` is made for captures that succeed. One that fails leaves the
process with its own stream current, the allocator still filling the graph's pool
and the random generator in capture mode: the next forward fails far away from the
cause. Here a failed recording raises, and everything else is as before.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from vllm.utils.torch_utils import current_stream


@contextmanager
def refuse_host_syncs() -> Iterator[None]:
    """Raise RuntimeError where the host would wait for the device: such work can
    not be recorded, and it is better refused before a capture than in it."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def record_graph(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Record what runs in the block into ``graph``, with memory from ``pool``.

    Under CUDA's global capture mode, so that an unsafe call of any thread raises.
    """
    # torch.cuda.stream restores the current stream, whatever is left current in it.
    with torch.cuda.stream(current_stream()):
        try:
            with torch.cuda.graph(graph, pool):
                yield
        except BaseException:
            _abandon_capture(pool)
            raise


def _abandon_capture(pool: Any) -> None:
    """Undo what the begin of a capture set up and its failed end did not undo."""
    device = torch.cuda.current_device()
    # Raises if the end of the capture came as far as this itself.
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
    # A clone of the generator's state is the same sequence, not in capture mode.
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
