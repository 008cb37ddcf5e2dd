"""Two sets of FULL CUDA graphs in one engine: the fork's own, and upstream's.

The forward graphs themselves differ: the fork's plan FlashMLA once per layer type,
upstream's once per layer type and KV-cache group. Both sets run in the same input
and output buffers, so each step can be served by either.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class FullGraphs:
    """Takes the place of a graph manager's capture and replay."""

    def __init__(self) -> None:
        # Whether the metadata builds of a capture are to be upstream's.
        self.capturing_upstream = False
        self._ours: dict[Any, Any] = {}
        self._upstream: dict[Any, Any] = {}

    def install(
        self,
        manager_class: Any,
        full: Any,
        runs_upstream: Callable[[], bool],
        marked: Callable[[], AbstractContextManager[Any]],
        both: bool = True,
    ) -> None:
        """Patch ``manager_class``; call before the engine is made.

        Args:
            manager_class: ``ModelCudaGraphManager``.
            full: ``CUDAGraphMode.FULL``.
            runs_upstream: Whether the step at hand is to run upstream's graphs.
            marked: A context in which the step's graph is launched.
            both: Whether upstream's graphs are needed.
        """
        capture, run = manager_class.capture, manager_class.run_fullgraph

        def capture_both(manager: Any, *where: Any, **more: Any) -> None:
            capture(manager, *where, **more)
            # Memory profiling captures a sample, and throws it away.
            if manager._max_full_descs_to_capture is not None:
                return
            self._ours = manager.graphs
            if not both:
                return
            with self._upstream_graphs(manager, full):
                capture(manager, *where, **more)
                self._upstream = manager.graphs

        def run_fullgraph(manager: Any, *what: Any) -> Any:
            manager.graphs = self._upstream if runs_upstream() else self._ours
            with marked():
                return run(manager, *what)

        manager_class.capture = capture_both
        manager_class.run_fullgraph = run_fullgraph

    @contextmanager
    def _upstream_graphs(self, manager: Any, full: Any) -> Iterator[None]:
        """Let ``manager`` capture its FULL graphs again, the others not."""
        shapes = manager._capture_descs
        manager._capture_descs = {full: shapes[full]}
        manager.graphs = {}
        self.capturing_upstream = True
        try:
            yield
        finally:
            self.capturing_upstream = False
            manager._capture_descs, manager.graphs = shapes, self._ours
