"""Lets one engine build its metadata by any of its paths, step by step.

The paths refresh the same buffers, so decode steps of one run can take turns: a few
steps eager, a few ported, a few replay, and again. What disturbs the machine then
disturbs all of them. Only the path ``in_graph`` is alone: an engine has it or not.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import ported
from .full_graphs import FullGraphs
from .trace import FORWARD, mark

# Steps after a change of path that are not counted: the host runs ahead of the GPU.
SETTLE = 2


@dataclass
class Samples:
    """Host times of builds, us, and times between neighbouring builds, ms."""

    host_us: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Recordings:
    """What recording cost at start-up."""

    count: int
    seconds: float
    mib: float


class Switch:
    """Takes the place of the model state's metadata build.

    Args:
        paths: Those that take turns; the last is the engine's own, which builds
            what is not measured.
        upstream: Pristine copy of upstream's ``metadata_graphs.py``, for the
            ported path.
        query_len: Tokens a request decodes per step.
    """

    def __init__(
        self, paths: Sequence[str], upstream: Path | None, query_len: int
    ) -> None:
        self.paths = list(paths)
        self.full_graphs = FullGraphs()
        self.samples: dict[str, Samples] = defaultdict(Samples)
        self.recordings: dict[str, Recordings] = {}
        self._upstream = upstream if "ported" in paths else None
        self._query_len = query_len
        self._ported: Any = None
        self._ported_key: tuple[int, int, int, int] | None = None
        self._batch: int | None = None
        self._turn = 0
        self._step = 0
        self._profiling = False
        self._last_start: int | None = None
        # Of the step at hand, from its build on.
        self._running = self.paths[-1]
        # Of the measured build at hand.
        self._prepared: str | None = None

    def measure(self, batch: int, turn: int, profiling: bool = False) -> None:
        """Let decode steps of ``batch`` requests take turns of ``turn`` steps.

        Samples start anew.
        """
        self.samples.clear()
        self._batch, self._turn, self._step = batch, turn, 0
        self._profiling = profiling

    def new_run(self) -> None:
        """The next step does not follow the last one."""
        self._last_start = None

    def install_forwards(self, manager_class: Any, full: Any) -> None:
        """Patch the graph manager's class; call before the engine is made.

        The steps of eager and ported run upstream's FULL graphs.
        """
        upstreams = {"eager", "ported"}
        self.full_graphs.install(
            manager_class,
            full,
            runs_upstream=lambda: self._running in upstreams,
            marked=lambda: self._marked(FORWARD),
            both=not upstreams.isdisjoint(self.paths),
        )

    def install(self, ours: Any, stock: Any, decode_batch: Callable[..., Any]) -> None:
        """Patch the model state's class; call before the engine is made.

        ``ours`` is a subclass of ``stock``. ``decode_batch(key, input_buffers,
        max_model_len)`` makes a dummy step of a graph key.
        """
        record = ours.record_metadata_graphs
        release = ours.release_metadata_graphs
        prepare = ours.prepare_attn
        build = ours._build_attn_metadata
        upload = ours._upload_replay_start

        def record_metadata_graphs(state: Any, *where: Any) -> Any:
            report = record(state, *where)
            self.recordings[self.paths[-1]] = Recordings(
                report.served.total(), report.seconds, report.mib
            )
            if self._upstream is not None:
                self._record_ported(state, decode_batch, *where)
            return report

        def release_metadata_graphs(state: Any) -> None:
            release(state)
            self._ported = None

        def _build_attn_metadata(
            state: Any,
            input_batch: Any,
            cudagraph_mode: Any,
            block_tables: Any,
            slot_mappings: Any,
            attn_groups: Any,
            *rest: Any,
            **more: Any,
        ) -> Any:
            inputs = (input_batch, cudagraph_mode, block_tables, slot_mappings)

            def build_stock(groups: Any) -> Any:
                return stock._build_attn_metadata(state, *inputs, groups, *rest, **more)

            if self._ported_key is not None:
                return self._ported.capture(
                    self._ported_key, attn_groups, block_tables, build_stock
                )
            if self.full_graphs.capturing_upstream or self._prepared == "eager":
                return build_stock(attn_groups)
            if self._prepared == "ported":
                return self._ported.replay(
                    self._ported.key(input_batch, cudagraph_mode)
                )
            return build(state, *inputs, attn_groups, *rest, **more)

        def prepare_attn(
            state: Any, input_batch: Any, cudagraph_mode: Any, *rest: Any, **more: Any
        ) -> Any:
            self._running = self.paths[-1]
            if not self._counts(input_batch, cudagraph_mode, more):
                return prepare(state, input_batch, cudagraph_mode, *rest, **more)
            path = self._running = self._prepared = self._path()
            by = stock.prepare_attn if path in ("eager", "ported") else prepare
            try:
                with self._marked(mark(path)):
                    start = time.perf_counter_ns()
                    built = by(state, input_batch, cudagraph_mode, *rest, **more)
                    end = time.perf_counter_ns()
            finally:
                self._prepared = None
            if built is None:
                raise RuntimeError(f"the {path} path has no recording of this step")
            self._sample(path, start, end)
            return built

        def _upload_replay_start(state: Any, values: Any, num_reqs: int) -> Any:
            # Upstream's recordings save the upload of zeros as ours do.
            if self._path() == "eager" and not values.any():
                return stock._upload_replay_start(state, values, num_reqs)
            return upload(state, values, num_reqs)

        for method in (
            record_metadata_graphs,
            release_metadata_graphs,
            prepare_attn,
            _build_attn_metadata,
            _upload_replay_start,
        ):
            setattr(ours, method.__name__, method)

    def _record_ported(
        self, state: Any, decode_batch: Any, buffers: Any, tables: Any, *where: Any
    ) -> None:
        from vllm.config import CUDAGraphMode

        assert self._upstream is not None
        self._ported = ported.graphs(
            self._upstream, state.vllm_config, self._query_len, ported.hopper_builders()
        )
        groups = where[0]
        if not self._ported.can_record(groups):
            raise RuntimeError("upstream's class cannot record all of the builders")
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        start = time.perf_counter()
        keys = self._ported.capture_keys()
        try:
            for key in keys:
                self._ported_key = key
                _, padded_reqs, _, padded_tokens = key
                state.prepare_attn(
                    decode_batch(key, buffers, state.max_model_len),
                    CUDAGraphMode.FULL,
                    tables.get_dummy_block_tables(padded_reqs),
                    tables.get_dummy_slot_mappings(padded_tokens),
                    *where,
                )
        finally:
            self._ported_key = None
        self.recordings["ported"] = Recordings(
            len(keys),
            time.perf_counter() - start,
            (free - torch.cuda.mem_get_info()[0]) / 2**20,
        )

    def _counts(
        self, input_batch: Any, cudagraph_mode: Any, more: dict[str, Any]
    ) -> bool:
        """Whether a build is that of a decode step under measurement."""
        return (
            self._batch is not None
            and cudagraph_mode.name == "FULL"
            and not more.get("for_capture")
            and not input_batch.has_prefill
            and input_batch.num_reqs == self._batch
            and input_batch.num_tokens == self._batch * self._query_len
        )

    def _path(self) -> str:
        if self._batch is None:
            return self.paths[-1]
        return self.paths[self._step // self._turn % len(self.paths)]

    def _marked(self, name: str) -> AbstractContextManager[Any]:
        if self._profiling:
            return torch.profiler.record_function(name)
        return nullcontext()

    def _sample(self, path: str, start: int, end: int) -> None:
        in_turn = self._step % self._turn
        if in_turn >= SETTLE:
            samples = self.samples[path]
            samples.host_us.append((end - start) / 1e3)
            if self._last_start is not None and in_turn > SETTLE:
                samples.step_ms.append((start - self._last_start) / 1e6)
        self._last_start = start
        self._step += 1

    def enough(self, steps: int) -> bool:
        """Whether every path has ``steps`` samples."""
        return all(len(self.samples[path].host_us) >= steps for path in self.paths)


def prompts(batch: int, length: int, vocabulary: int, seed: int) -> Sequence[list[int]]:
    """``batch`` prompts of ``length`` random token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, vocabulary, (batch, length), generator=generator)
    return ids.tolist()
