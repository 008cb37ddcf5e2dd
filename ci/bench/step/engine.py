"""An engine of the step bench, one process each. Needs a GPU.

Run by ``bench.step`` with its request as JSON on the command line; adds each batch
size to the results as it is measured.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from proxy_model import engine as proxy_engine
from torch.profiler import ProfilerActivity, profile

from ..records import percentile
from ..switch import prompts
from ..trace import FORWARD
from . import reads, trace
from .parts import Part
from .ranges import Ranges, as_if_capturing
from .record import StepRecord, add, other_records, part_records
from .request import Request

PROMPT_TOKENS = 512
# Ids below the vocabulary's special tail.
VOCABULARY = 129_000
# Steps after a prefill that are not counted: the host runs ahead of the GPU.
SETTLE = 4
# Steps of a profile; the first and the last are not read.
PROFILED = 12
# Requests of a large batch start some steps apart.
APART = 16
MAX_RUNS = 20
MAX_PROFILES = 4
COPIED_BYTES = 2**29


def measure(request: Request) -> None:
    """Make the engine, and measure and record each batch size in turn."""
    out = Path(request.out)
    ranges = Ranges()
    ranges.install()
    references = References(request.batches, request.query_len, ranges)
    meter = Meter(request.query_len, ranges)
    _install(references, meter)
    from vllm.stack_identity import IDENTITY

    backend, _, metadata_graphs = request.path.partition(":")
    began = time.time()
    engine = proxy_engine.make(
        request.model,
        request.query_len,
        decode_backend=backend,
        metadata_graphs=metadata_graphs or None,
        max_model_len=2048,
        gpu_memory_utilization=0.9,
    )
    say(f"engine ready in {time.time() - began:.0f} s")
    text = json.loads(Path(request.model, "config.json").read_text())["text_config"]
    copy = copy_gb_per_s()
    longest = 0.0
    for index, batch in enumerate(request.batches):
        began = time.time()
        if request.deadline is not None and began + longest > request.deadline:
            rest = request.batches[index:]
            add(out, request.left_out(rest, "no time was left"))
            break
        try:
            timed, window = _run(engine, meter, references, batch, request.steps)
        except TooFewSteps as error:
            add(out, request.left_out((batch,), str(error)))
            continue
        step = trace.mean(window)
        has_to = reads.step(text, batch, request.query_len, timed.context)
        count = sum(has_to.values())
        mean_ms = sum(timed.step_ms) / len(timed.step_ms)
        add(
            out,
            StepRecord(
                layers=request.layers,
                rank_of=request.rank_of,
                expert_parallel=request.expert_parallel,
                routed_experts=text["n_routed_experts"],
                query_len=request.query_len,
                batch=batch,
                path=request.path,
                steps=len(timed.step_ms),
                step_ms_p50=percentile(timed.step_ms, 50),
                step_ms_p99=percentile(timed.step_ms, 99),
                step_ms_mean=mean_ms,
                tokens_per_request=timed.tokens_per_request,
                tokens_per_s=1e3 * batch * timed.tokens_per_request / mean_ms,
                profiled_steps=len(window),
                context=timed.context,
                launches=step.launches,
                untold_launches=step.untold,
                busy_us=step.busy_us,
                span_us=step.span_us,
                bytes=count,
                bound_ms=count / copy / 1e6,
                copy_gb_per_s=copy,
                parts=part_records(step, has_to, copy),
                other=other_records(step),
                torch=torch.__version__,
                gpu=torch.cuda.get_device_name(),
                commit=request.commit,
                stack=IDENTITY.stack,
            ),
        )
        longest = max(longest, time.time() - began)
        say(
            f"{request.path}, query length {request.query_len}, batch {batch}: "
            f"{percentile(timed.step_ms, 50):.2f} ms a step "
            f"(in {time.time() - began:.0f} s)"
        )


class TooFewSteps(Exception):
    """The engine ran too few FULL decode steps of a batch size."""


@dataclass(frozen=True)
class Timed:
    """Steps of one batch size without the profiler; words as in ``StepRecord``."""

    step_ms: list[float]
    tokens_per_request: float
    context: int


class References:
    """Profiles the forward of each FULL graph that will serve one of ``batches``,
    launch by launch, right before it is captured.
    """

    def __init__(self, batches: Sequence[int], query_len: int, ranges: Ranges) -> None:
        self.of: dict[Any, trace.Reference] = {}
        self._shapes = [(batch, batch * query_len) for batch in batches]
        self._ranges = ranges
        self._model_state: Any = None

    def install(self, manager: Any, model_manager: Any, full: Any) -> None:
        """Patch the graph managers' classes; call before the engine is made.

        Args:
            manager: ``CudaGraphManager``.
            model_manager: ``ModelCudaGraphManager``, its subclass of the target.
            full: ``CUDAGraphMode.FULL``.
        """
        capture, capture_model = manager.capture, model_manager.capture

        def capture_target(
            graphs: Any, model: Any, model_state: Any, *rest: Any, **more: Any
        ) -> Any:
            self._model_state = model_state
            return capture_model(graphs, model, model_state, *rest, **more)

        def capture_with_references(
            graphs: Any, create: Callable[..., Any], *rest: Any, **more: Any
        ) -> Any:
            # Memory profiling captures a sample, and throws it away.
            if (
                not isinstance(graphs, model_manager)
                or graphs._max_full_descs_to_capture is not None
            ):
                return capture(graphs, create, *rest, **more)
            wanted = self._wanted(graphs._capture_descs.get(full, ()))

            def create_forward(graph: Any, warmup: bool) -> Any:
                # The warm-up has compiled and proven all that the capture runs.
                if not warmup and graph in wanted:
                    self.of[graph] = self._profile(
                        lambda: create(graph, warmup=False), type(full).NONE
                    )
                return create(graph, warmup=warmup)

            return capture(graphs, create_forward, *rest, **more)

        model_manager.capture = capture_target
        manager.capture = capture_with_references

    def _wanted(self, graphs: Any) -> set[Any]:
        """The graphs that serve our batch sizes: the smallest that hold each."""
        found = set()
        for requests, tokens in self._shapes:
            holding = [
                graph
                for graph in graphs
                if graph.num_reqs is not None
                and graph.num_reqs >= requests
                and graph.num_tokens >= tokens
            ]
            if holding:
                found.add(min(holding, key=lambda graph: graph.num_tokens))
        return found

    def _profile(self, create: Callable[[], Any], mode: Any) -> trace.Reference:
        state = self._model_state
        in_graph = getattr(state, "build_in_graph", None)
        forward = create()
        torch.cuda.synchronize()
        self._ranges.on = True
        if in_graph is not None:
            state.build_in_graph = self._ranges.part(Part.METADATA, in_graph)
        try:
            with profiler() as running, as_if_capturing():
                forward(mode)
                torch.cuda.synchronize()
        finally:
            self._ranges.on = False
            if in_graph is not None:
                del state.build_in_graph
        return trace.Reference(exported(running))


@dataclass
class Meter:
    """Times FULL decode steps of a batch size, and profiles some of them."""

    query_len: int
    ranges: Ranges
    step_ms: list[float] = field(default_factory=list)
    # The graph that the profiled steps ran, and their trace.
    graph: Any = None
    profiled: dict[str, Any] | None = None
    # Of decode steps, with others in between or not.
    request_steps: int = 0

    _batch: int | None = None
    _counted: bool = False
    _full: bool = False
    _in_a_row: int = 0
    _last: int | None = None
    _profiling: bool = False
    _running: Any = None

    def measure(self, batch: int, profiling: bool = False) -> None:
        """From now on, decode steps of ``batch`` requests count; the samples start
        anew. With ``profiling``, some of them are profiled once.
        """
        self._batch, self._profiling = batch, profiling
        self.step_ms, self.profiled, self.request_steps = [], None, 0
        self.new_run()

    def new_run(self) -> None:
        """The next step does not follow the last one."""
        self._in_a_row, self._last = 0, None

    def install(self, runner: Any, model_manager: Any) -> None:
        """Patch the classes of the model runner and of its graphs' manager; call
        before the engine is made.
        """
        execute, run = runner.execute_model, model_manager.run_fullgraph

        def execute_model(self_: Any, scheduled: Any, *values: Any, **more: Any) -> Any:
            self._begin(list(scheduled.num_scheduled_tokens.values()))
            return execute(self_, scheduled, *values, **more)

        launch = self.ranges.mark(FORWARD, run)

        def run_fullgraph(manager: Any, graph: Any) -> Any:
            self._time(graph)
            return launch(manager, graph)

        runner.execute_model = execute_model
        model_manager.run_fullgraph = run_fullgraph

    def _begin(self, tokens: list[int]) -> None:
        """A step of requests with so many tokens each is about to be prepared."""
        decoding = [n for n in tokens if n == self.query_len]
        self.request_steps += len(decoding)
        if not (self._counted and self._full):
            self.new_run()
        self._counted = len(tokens) == len(decoding) == self._batch
        self._full = False
        self._in_a_row += self._counted
        if self._running is not None and not self._counted:
            # Another batch size came in between: these steps are of no use.
            self.stop()
        elif self._running is not None and self._in_a_row > SETTLE + PROFILED:
            self.profiled = self.stop()
        elif (
            self._profiling
            and self._running is None
            and self.profiled is None
            and self._in_a_row == SETTLE
        ):
            torch.cuda.synchronize()
            self._running = profiler()
            self._running.start()
            self.ranges.on = True

    def _time(self, graph: Any) -> None:
        """The FULL graph of the step is about to be launched."""
        self._full = True
        if not self._counted:
            return
        now = time.perf_counter_ns()
        if self._last is not None and self._in_a_row > SETTLE:
            self.step_ms.append((now - self._last) / 1e6)
        self._last, self.graph = now, graph

    def stop(self) -> dict[str, Any] | None:
        """End a profile that is running; its trace."""
        if self._running is None:
            return None
        torch.cuda.synchronize()
        self._running.stop()
        self.ranges.on = False
        ended, self._running = self._running, None
        return exported(ended)


def profiler() -> profile:
    """A profiler of the host and the GPU."""
    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])


def exported(ended: profile) -> dict[str, Any]:
    """The chrome trace of a profile that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        ended.export_chrome_trace(str(path))
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def _install(references: References, meter: Meter) -> None:
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import (
        CudaGraphManager,
        ModelCudaGraphManager,
    )
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    references.install(CudaGraphManager, ModelCudaGraphManager, CUDAGraphMode.FULL)
    meter.install(GPUModelRunner, ModelCudaGraphManager)


def _run(
    engine: Any, meter: Meter, references: References, batch: int, steps: int
) -> tuple[Timed, list[trace.StepTime]]:
    """Time ``steps`` steps of ``batch`` requests, then read a profile of some."""
    generate = _Generate(engine, meter, batch)
    meter.measure(batch)
    # Kernels compile and caches fill here.
    generate(SETTLE + APART)
    meter.measure(batch)
    runs = tokens = 0
    while len(meter.step_ms) < steps:
        if runs == MAX_RUNS:
            raise TooFewSteps(f"{len(meter.step_ms)} FULL steps in {runs} runs")
        tokens += generate(min(steps, 128) + SETTLE + APART)
        runs += 1
    yielded = 1.0
    if meter.query_len > 1:
        # A request's first token is the prefill's.
        yielded = (tokens - runs * batch) / meter.request_steps
    step_ms = meter.step_ms
    for _ in range(MAX_PROFILES):
        meter.measure(batch, profiling=True)
        generate((SETTLE + PROFILED + APART) * meter.query_len)
        meter.stop()
        if meter.profiled is not None:
            break
    else:
        raise TooFewSteps(f"no {PROFILED} FULL steps in a row to profile")
    # Without one, all of the graph's launches are of no known part.
    reference = references.of.get(meter.graph) or trace.Reference({"traceEvents": []})
    window = trace.steps(meter.profiled, reference)
    if not window:
        raise TooFewSteps("the profiler saw no whole step")
    context = PROMPT_TOKENS + round((SETTLE + PROFILED / 2) * yielded)
    return Timed(step_ms, yielded, context), window


class _Generate:
    """Generates from fresh prompts each time it is called; how many tokens."""

    def __init__(self, engine: Any, meter: Meter, batch: int) -> None:
        self._count = 0
        self._engine = engine
        self._meter = meter
        self._batch = batch

    def __call__(self, new_tokens: int) -> int:
        from vllm.sampling_params import SamplingParams

        self._count += 1
        self._meter.new_run()
        outputs = self._engine.generate(
            [
                {"prompt_token_ids": prompt}
                for prompt in prompts(
                    self._batch, PROMPT_TOKENS, VOCABULARY, self._count
                )
            ],
            SamplingParams(
                temperature=0.0,
                max_tokens=new_tokens,
                ignore_eos=True,
                detokenize=False,
            ),
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)


def copy_gb_per_s() -> float:
    """Bandwidth of a copy on the GPU, bytes read and written together, in GB/s: the
    best of several.
    """
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = max(best, 2 * COPIED_BYTES / start.elapsed_time(end) / 1e6)
    return best


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    measure(Request.of(sys.argv[1]))
