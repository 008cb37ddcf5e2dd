"""The step bench where it needs no GPU: traces, bytes, tables, plots, turns."""

import ast
import json
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import cli
import pytest
import schemas
import torch
import vllm
from bench.step import __main__ as step
from bench.step import engine, ranges, reads, record, trace
from bench.step.parts import Part
from bench.step.request import Request
from bench.trace import FORWARD
from proxy_model import sizes
from proxy_model.config import proxy_config

CI = Path(__file__).resolve().parents[2] / "ci"
BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench.sh"
MARLIN = "void marlin::Marlin<bf16, 128, 1, 8>(int4 const*)"
BLOCK = (256, 1, 1)


class Trace:
    """A chrome trace of torch.profiler, event by event."""

    def __init__(self) -> None:
        self.events: list[dict] = []
        self._correlation = 0

    def range(self, name: str, start: float, end: float) -> None:
        self._add("user_annotation", name, start, end, {})
        # The GPU's view of the same range is not another one.
        self._add("gpu_user_annotation", name, start, end, {})

    def launch(self, at: float, *kernels: tuple, call: str = "cudaLaunchKernel"):
        """A launch of ``(name, start, end[, grid])``."""
        self._correlation += 1
        ids = {"correlation": self._correlation}
        self._add("cuda_runtime", call, at, at + 1, ids)
        for name, start, end, *grid in kernels:
            if name.startswith("Mem"):
                self._add("gpu_memset", name, start, end, ids)
                continue
            shape = {"grid": [*(grid or [132]), 1, 1], "block": list(BLOCK)}
            self._add("kernel", name, start, end, ids | shape)

    def _add(self, category, name, start, end, arguments) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "ts": start,
                "dur": end - start,
                "args": arguments,
            }
        )

    def as_written(self) -> dict:
        noise = {"ph": "M", "name": "process_name", "args": {}}
        return json.loads(json.dumps({"traceEvents": [noise, *self.events]}))


def of(trace_: Trace) -> trace.Reference:
    return trace.Reference(trace_.as_written())


def launched(*launches: tuple[Part | None, str, int]) -> Trace:
    """A reference's trace: one launch after another, each in its part's range."""
    built = Trace()
    for index, (part, name, *grid) in enumerate(launches):
        at = 100.0 * index
        if part is not None:
            built.range(part.range, at, at + 50)
        built.launch(at + 10, (name, at + 20, at + 30, *grid))
    return built


def works(*launches: tuple) -> list[trace.Work]:
    """Work of a graph, in the order of its start."""
    return [
        trace.Work(10.0 * i, 10.0 * i + 5, name, (*(grid or (132,)), 1, 1, *BLOCK))
        for i, (name, *grid) in enumerate(launches)
    ]


def test_one_kernel_of_many_parts_is_told_apart_by_order():
    order = [Part.QUERY, Part.QUERY, Part.OUTPUT, Part.SHARED_EXPERT]
    reference = of(launched(*[(part, MARLIN) for part in order * 3]))
    assert reference.launches == 12
    assert reference.parts(works(*[(MARLIN,)] * 12)) == order * 3


def test_work_beside_does_not_shift_the_order_of_others():
    reference = of(
        launched(
            (Part.QUERY, MARLIN),
            (Part.SHARED_EXPERT, "swiglu"),
            (Part.ROUTER, "top_k"),
            (Part.QUERY, MARLIN),
        )
    )
    # On their own streams the two in the middle start the other way round.
    found = reference.parts(works((MARLIN,), ("top_k",), ("swiglu",), (MARLIN,)))
    assert found == [Part.QUERY, Part.ROUTER, Part.SHARED_EXPERT, Part.QUERY]


def test_the_grid_tells_launches_of_a_kernel_apart():
    reference = of(launched((Part.EXPERTS, "gemm", 8), (Part.ROUTER, "gemm", 3)))
    assert reference.parts(works(("gemm", 3), ("gemm", 8))) == [
        Part.ROUTER,
        Part.EXPERTS,
    ]


def test_a_part_that_cannot_be_told_is_not_guessed():
    reference = of(
        launched(
            (Part.QUERY, MARLIN),
            (Part.OUTPUT, MARLIN),
            (Part.EXPERTS, "moe", 8),
            (Part.EXPERTS, "moe", 8),
            (None, "embed"),
        )
    )
    # More than there were, and of two parts; of one part, however many; of another
    # grid, but of one part; one of no part; one that was never there.
    found = reference.parts(
        works(*[(MARLIN,)] * 3, ("moe", 8), ("moe", 9), ("embed",), ("new",))
    )
    assert found == [None] * 3 + [Part.EXPERTS] * 2 + [Part.OTHER, None]


def test_the_innermost_range_counts():
    built = Trace()
    built.range(Part.QUERY.range, 0, 100)
    built.range(Part.INDEXER.range, 20, 60)
    built.range("another's range", 30, 50)
    built.launch(10, ("a", 200, 201))
    built.launch(40, ("b", 202, 203))
    built.launch(70, ("c", 204, 205))
    built.launch(150, ("d", 206, 207))
    assert of(built).parts(works(("a",), ("b",), ("c",), ("d",))) == [
        Part.QUERY,
        Part.INDEXER,
        Part.QUERY,
        Part.OTHER,
    ]


def test_a_draft_is_a_draft_whatever_it_runs():
    built = Trace()
    built.range(Part.SAMPLING.range, 0, 100)
    built.range(Part.DRAFT.range, 20, 80)
    built.range(Part.QUERY.range, 30, 50)
    built.launch(40, ("a", 200, 201))
    built.launch(90, ("b", 202, 203))
    # After it, with no launch in between.
    built.range(Part.DRAFT.range, 200, 210)
    built.range(Part.METADATA.range, 220, 240)
    built.launch(230, ("c", 204, 205))
    assert of(built).parts(works(("a",), ("b",), ("c",))) == [
        Part.DRAFT,
        Part.SAMPLING,
        Part.METADATA,
    ]


# A small step of 90 us: metadata, a graph of two layers, lm_head, sampling.
REFERENCE = launched(
    (Part.QUERY, MARLIN),
    (Part.SHARED_EXPERT, MARLIN),
    (Part.EXPERTS, "moe"),
    (None, "Memset (Device)"),
)


def a_step(built: Trace, at: float, *, more: tuple = ()) -> None:
    host, gpu = at, at + 20
    built.range(Part.METADATA.range, host, host + 20)
    built.launch(host + 1, ("metadata", gpu, gpu + 4))
    built.range(FORWARD, host + 5, host + 8)
    built.launch(
        host + 6,
        (MARLIN, gpu + 10, gpu + 30),
        # Beside the experts, and done before them.
        (MARLIN, gpu + 32, gpu + 50),
        ("moe", gpu + 31, gpu + 61),
        ("Memset (Device)", gpu + 61, gpu + 62),
        *more,
        call="cudaGraphLaunch",
    )
    built.range(Part.SAMPLING.range, host + 30, host + 60)
    built.range(Part.LM_HEAD.range, host + 35, host + 40)
    built.launch(host + 36, ("gemm", gpu + 65, gpu + 75))
    built.launch(host + 45, ("argmax", gpu + 80, gpu + 90))


def some_steps(count: int, **more) -> list[trace.StepTime]:
    built = Trace()
    for index in range(count):
        a_step(built, 100.0 * index, **more)
    return trace.steps(built.as_written(), of(REFERENCE))


def test_the_parts_of_a_step():
    (found,) = some_steps(3)
    assert list(found.parts) == [
        Part.METADATA,
        Part.QUERY,
        Part.EXPERTS,
        Part.SHARED_EXPERT,
        Part.OTHER,
        Part.LM_HEAD,
        Part.SAMPLING,
    ]
    # The step before ended 10 us earlier; 6 us of the query's 26 are its wait.
    assert found.parts[Part.METADATA] == trace.PartTime(1, 4, 4, 14)
    assert found.parts[Part.QUERY] == trace.PartTime(1, 20, 20, 26)
    assert found.parts[Part.EXPERTS] == trace.PartTime(1, 30, 30, 31)
    assert found.parts[Part.SHARED_EXPERT] == trace.PartTime(1, 18, 18, 0)
    assert found.parts[Part.LM_HEAD].us == 10
    assert found.other == {"Memset (Device)": (1, 1.0)}
    assert found.untold == 0


def test_spans_add_up_to_the_step():
    for found in some_steps(5):
        assert found.span_us == 100
        assert found.launches == 7
        assert found.busy_us == 4 + 20 + 31 + 10 + 10


def test_the_first_step_and_the_last_are_not_read():
    assert len(some_steps(12)) == 10
    assert some_steps(2) == []


def test_unknown_kernels_are_kept_by_name():
    (found,) = some_steps(3, more=(("new kernel", 90, 95), ("new kernel", 95, 98)))
    assert found.other["new kernel"] == (2, 8.0)
    assert found.untold == 2
    assert found.parts[Part.OTHER].launches == 3
    kept = record.other_records(found)
    assert [other.name for other in kept] == ["new kernel", "Memset (Device)"]


def test_a_pause_does_not_count():
    steps_ = some_steps(10)
    steps_[3].parts[Part.METADATA].span_us += 10_000
    steps_[3].untold = 9
    found = trace.mean(steps_)
    assert found.span_us == pytest.approx(100)
    assert found.launches == pytest.approx(7)
    assert found.other["Memset (Device)"] == pytest.approx((1, 1.0))
    assert found.untold == 0


def test_ranges_are_found_in_a_real_profile():
    marks = ranges.Ranges()
    marks.on = True
    with torch.profiler.profile() as running:
        marks.part(Part.QUERY, marks.part(Part.INDEXER, torch.ones))(3)
    found = trace._ranges(engine.exported(running)["traceEvents"])
    assert [r.name for r in found] == [Part.QUERY.range, Part.INDEXER.range]


@pytest.mark.parametrize("source", ranges.SOURCES)
def test_what_is_marked_is_still_there(source):
    owner, name = ranges.find(source)
    assert callable(vars(owner)[name])


@pytest.mark.parametrize("source", ranges.HOPPER)
def test_our_own_is_still_there(source):
    """By its text: what compiles it is not on every machine."""
    module, _, path = source.partition(":")
    tree = Path(vllm.__file__).parents[1]
    owner, name = path.split(".")
    parsed = ast.parse((tree / f"{module.replace('.', '/')}.py").read_text())
    (cls,) = (n for n in parsed.body if getattr(n, "name", None) == owner)
    assert name in {getattr(n, "name", None) for n in cls.body}


def test_upstreams_classes_are_taken_hold_of():
    """In a process of its own, whose classes are lost to others."""
    script = """
        from bench.step import engine, ranges
        marks = ranges.Ranges()
        marks.install()
        engine._install(engine.References([1], 1, marks), engine.Meter(1, marks))
        from vllm.models.deepseek_v41 import attention
        from vllm.models.deepseek_v41.nvidia.flashmla import (
            DeepseekV4FlashMLAAttention as FlashMLA,
        )
        assert all(hasattr(vars(FlashMLA)[n], "__wrapped__") for n in ranges.ATTENTIONS)
        done = attention.execute_in_parallel(
            lambda: "query", [None, lambda: "keys"], None, [None, None]
        )
        print(done)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": str(CI)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "('query', [None, 'keys'])"


def test_what_has_moved_is_named():
    with pytest.raises(AttributeError, match=r"argparse:ArgumentParser\.gone is not"):
        ranges.find("argparse:ArgumentParser.gone")


def test_marks_cost_nothing_while_off():
    marks, opened = ranges.Ranges(), []
    marked = marks.part(Part.QUERY, lambda value: opened.append(value))
    with torch.profiler.profile() as running:
        marked(1)
    assert opened == [1]
    assert trace._ranges(engine.exported(running)["traceEvents"]) == []


def test_the_path_of_a_capture_is_taken():
    real = torch.cuda.is_current_stream_capturing
    with ranges.as_if_capturing():
        assert torch.cuda.is_current_stream_capturing()
    assert torch.cuda.is_current_stream_capturing is real
    with pytest.raises(RuntimeError), ranges.as_if_capturing():
        raise RuntimeError
    assert torch.cuda.is_current_stream_capturing is real


@pytest.fixture(autouse=True)
def no_gpu_to_wait_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


FULL = SimpleNamespace(name="FULL")


class Modes:
    """CUDAGraphMode."""

    NONE = "NONE"


class Full(Modes):
    pass


class State:
    def build_in_graph(self, graph, metadata):
        return f"metadata of {graph.num_tokens}"


class Manager:
    """The graph managers' surface that the bench takes hold of."""

    def __init__(self, sizes_=(1, 8, 32), profiling: bool = False) -> None:
        graphs = [SimpleNamespace(num_reqs=n, num_tokens=n, full=True) for n in sizes_]
        self.shapes = [Graph(g.num_reqs, g.num_tokens) for g in graphs]
        self._capture_descs = {FULL_MODE: self.shapes}
        self._max_full_descs_to_capture = 2 if profiling else None
        self.log: list = []

    def capture(self, create):
        for graph in self.shapes:
            create(graph, warmup=True)("warm up")
            create(graph, warmup=False)("capture")


class Graph(tuple):
    """BatchExecutionDescriptor."""

    def __new__(cls, num_reqs, num_tokens):
        return super().__new__(cls, (num_reqs, num_tokens))

    num_reqs = property(lambda self: self[0])
    num_tokens = property(lambda self: self[1])


FULL_MODE = Full()


def forwards(manager: Manager, state: State):
    def create(graph, warmup):
        def forward(mode):
            capturing = torch.cuda.is_current_stream_capturing()
            state.build_in_graph(graph, {})
            manager.log.append((graph.num_tokens, mode, capturing))

        return forward

    return create


@pytest.fixture
def referenced(monkeypatch):
    """The log of a capture, and the references that were made."""

    def capture(batches, **options):
        class Base(Manager):
            pass

        class Target(Base):
            def capture(self, model, state):
                Base.capture(self, forwards(self, state))

        monkeypatch.setattr(engine, "profiler", torch.profiler.profile)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        found = engine.References(batches, 1, ranges.Ranges())
        found.install(Base, Target, FULL_MODE)
        manager, state = Target(**options), State()
        manager.capture("a model", state)
        assert "build_in_graph" not in vars(state)
        return manager.log, found.of

    return capture


def test_a_reference_is_run_right_before_its_capture(referenced):
    log, found = referenced([8])
    assert log == [
        *[(1, "warm up", False), (1, "capture", False)],
        # Launch by launch, on the path of the capture.
        *[(8, "warm up", False), (8, "NONE", True), (8, "capture", False)],
        *[(32, "warm up", False), (32, "capture", False)],
    ]
    assert list(found) == [(8, 8)]


def test_the_graph_that_serves_a_batch_is_the_smallest_that_holds_it(referenced):
    _, found = referenced([1, 5, 16, 64])
    assert sorted(found) == [(1, 1), (8, 8), (32, 32)]


def test_memory_profiling_has_no_references(referenced):
    log, found = referenced([8], profiling=True)
    assert len(log) == 6
    assert not found


class Runner:
    """The model runner's surface that the bench takes hold of."""

    def __init__(self, manager) -> None:
        self.manager = manager

    def execute_model(self, scheduled, full=True):
        return self.manager.run_fullgraph("a graph") if full else None


class Replays:
    def run_fullgraph(self, graph):
        return f"replayed {graph}"


@pytest.fixture
def metered(monkeypatch):
    class Own(Runner):
        pass

    class OwnReplays(Replays):
        pass

    profiles = []

    class Profile:
        def __init__(self, **_):
            profiles.append("made")

        def start(self):
            profiles.append("started")

        def stop(self):
            profiles.append("stopped")

    monkeypatch.setattr(engine, "profile", Profile)
    monkeypatch.setattr(engine, "exported", lambda ended: {"of": len(profiles)})
    meter = engine.Meter(1, ranges.Ranges())
    meter.install(Own, OwnReplays)
    runner = Own(OwnReplays())

    def run(*tokens: int, **options):
        scheduled = dict(enumerate(tokens))
        return runner.execute_model(
            SimpleNamespace(num_scheduled_tokens=scheduled), **options
        )

    return meter, run, profiles


def test_full_steps_of_the_batch_are_timed(metered):
    meter, run, _ = metered
    meter.measure(2)
    assert run(512, 512, full=False) is None
    for _ in range(engine.SETTLE + 3):
        assert run(1, 1) == "replayed a graph"
    assert len(meter.step_ms) == 3
    assert min(meter.step_ms) >= 0
    assert meter.request_steps == 2 * (engine.SETTLE + 3)


@pytest.mark.parametrize(
    ("tokens", "options"),
    [((1,), {}), ((1, 1, 1), {}), ((1, 512), {}), ((1, 1), {"full": False})],
)
def test_steps_around_another_are_no_neighbours(metered, tokens, options):
    meter, run, _ = metered
    meter.measure(2)
    for _ in range(engine.SETTLE + 2):
        run(1, 1)
    run(*tokens, **options)
    for _ in range(engine.SETTLE):
        run(1, 1)
    assert len(meter.step_ms) == 2


def test_some_steps_are_profiled_once(metered):
    meter, run, profiles = metered
    meter.measure(2, profiling=True)
    for _ in range(3 * (engine.SETTLE + engine.PROFILED)):
        assert meter.ranges.on == (profiles[-1:] == ["started"])
        run(1, 1)
    assert profiles == ["made", "started", "stopped"]
    assert meter.profiled is not None
    assert meter.graph == "a graph"


def test_a_profile_with_another_batch_in_it_is_thrown_away(metered):
    meter, run, profiles = metered
    meter.measure(2, profiling=True)
    for _ in range(engine.SETTLE + 1):
        run(1, 1)
    run(1)
    assert profiles == ["made", "started", "stopped"]
    assert meter.profiled is None
    assert not meter.ranges.on
    # The next steps in a row are profiled instead.
    for _ in range(engine.SETTLE + engine.PROFILED + 1):
        run(1, 1)
    assert meter.profiled is not None


def text_of(rank_of=8, experts=384, expert_parallel=False):
    config = proxy_config(40, experts, None, rank_of, expert_parallel)
    return config["text_config"]


def test_the_experts_that_tokens_choose_between_them():
    routed = sizes.routed(text_of(), 5)
    assert reads.distinct(routed, 1) == pytest.approx(6)
    two = 12 - 36 / 384
    assert reads.distinct(routed, 2) == pytest.approx(two)
    assert reads.distinct(routed, 10_000) == pytest.approx(384)
    here = sizes.routed(text_of(expert_parallel=True), 5)
    assert reads.distinct(here, 1) == pytest.approx(0.75)
    assert reads.distinct(here, 10_000) == pytest.approx(48)


def test_what_a_step_of_a_rank_reads():
    found = reads.step(text_of(), batch=1, query_len=1, context=512)
    mxfp8 = 1025 / 1024
    assert found[Part.QUERY] == pytest.approx(40 * (1792 * 5120 + 4096 * 1280) * mxfp8)
    assert found[Part.OUTPUT] == pytest.approx(40 * 2 * 1024 * 4608 * mxfp8)
    assert found[Part.MHC] == 40 * 2 * 24 * 20480 * 4
    assert found[Part.ROUTER] == 40 * 384 * 5120 * 2
    assert found[Part.EXPERTS] == pytest.approx(40 * 6 * 3 * 5120 * 288 * 17 / 32)
    assert found[Part.SHARED_EXPERT] == pytest.approx(40 * 3 * 5120 * 288 * mxfp8)
    assert found[Part.LM_HEAD] == 129_280 * 5120 * 2
    # 128 of the window in each layer, all 256 pairs in 18, and 512 in 20.
    assert found[Part.ATTENTION] == (40 * 128 + 18 * 256 + 20 * 512) * 584
    # 8 indexers; 4 have keys of their own, of which one has no gate; 132 bytes a key.
    weights = 8 * (4096 * 1280 * mxfp8 + 32 * 5120 * 2)
    weights += (3 * 1024 + 512) * 5120 * 2 + 4 * 128 * 512 * 2
    keys = (3 * 256 + 5 * 512) * 132
    assert found[Part.INDEXER] == pytest.approx(weights + keys)
    assert set(found) == set(Part) - {
        *(Part.METADATA, Part.SAMPLING, Part.DRAFT, Part.OTHER)
    }


def test_what_more_requests_read():
    one, eight = (reads.step(text_of(), b, 1, 512) for b in (1, 8))
    assert eight[Part.ATTENTION] == 8 * one[Part.ATTENTION]
    assert 7 < eight[Part.EXPERTS] / one[Part.EXPERTS] < 8
    same = {Part.QUERY, Part.OUTPUT, Part.MHC, Part.ROUTER, Part.LM_HEAD}
    assert all(one[part] == eight[part] for part in same)


def test_what_a_draft_reads():
    text = text_of()
    alone, drafting = (reads.step(text, 2, n, 512) for n in (1, 6))
    assert alone[Part.ATTENTION] == drafting[Part.ATTENTION]
    assert drafting[Part.EXPERTS] > alone[Part.EXPERTS]
    head, markov = 129_280 * 5120 * 2, 129_280 * 256 * 2
    layers = 3 * sum(matrix.bytes for matrix in sizes.layer(text, 40))
    experts = 3 * reads.distinct(sizes.Routed(128, 3, 128), 10) * sizes.expert(text)
    combine = 5120 * 3 * 5120 * 1025 / 1024
    kv = 3 * 2 * 128 * 584
    assert drafting[Part.DRAFT] == pytest.approx(
        head + 5 * markov + layers + experts + combine + kv
    )


def test_speeds_and_percentages():
    time = trace.StepTime(
        parts={
            Part.OTHER: trace.PartTime(1, 2, 2, 2),
            Part.QUERY: trace.PartTime(80, 900, 500, 600),
        }
    )
    query, other = record.part_records(time, {Part.QUERY: 1e9}, copy_gb_per_s=4000)
    assert (query.part, query.bytes) == ("query", 1e9)
    assert query.gb_per_s == pytest.approx(2000)
    assert query.copy_percent == pytest.approx(50)
    assert (other.part, other.bytes, other.gb_per_s, other.copy_percent) == (
        "other",
        *[None] * 3,
    )


def test_the_bytes_of_a_fused_part_are_not_lost():
    apart = {p: trace.PartTime(1, 2, 2, 2) for p in (Part.EXPERTS, Part.ROUTER)}
    has_to = {Part.EXPERTS: 6e6, Part.ROUTER: 4e6, Part.SHARED_EXPERT: 1e6}
    router, experts = record.part_records(trace.StepTime(apart), has_to, 4000)
    assert (router.bytes, experts.bytes) == (4e6, 7e6)
    assert experts.gb_per_s == pytest.approx(3500)
    both = dict.fromkeys([*apart, Part.SHARED_EXPERT], trace.PartTime(1, 2, 2, 2))
    rows = record.part_records(trace.StepTime(both), has_to, 4000)
    assert [row.bytes for row in rows] == [4e6, 6e6, 1e6]


def a_record(**changes) -> record.StepRecord:
    (time,) = some_steps(3)
    return replace(
        record.StepRecord(
            layers=40,
            rank_of=8,
            expert_parallel=False,
            routed_experts=384,
            query_len=1,
            batch=1,
            path="stock",
            steps=60,
            step_ms_p50=6.63,
            step_ms_p99=7.0,
            step_ms_mean=6.65,
            tokens_per_request=1.0,
            tokens_per_s=150.4,
            profiled_steps=10,
            context=522,
            launches=1320.0,
            untold_launches=0.0,
            busy_us=6000.0,
            span_us=6600.0,
            bytes=2.2e9,
            bound_ms=0.5,
            copy_gb_per_s=4270.0,
            parts=record.part_records(time, {Part.QUERY: 1e6}, 4270.0),
            other=record.other_records(time),
            torch="2.11.0",
            gpu="a GPU",
            commit="abc",
            stack="0123.4567",
        ),
        **changes,
    )


LEFT = record.LeftOut(40, 8, False, 6, "auto", (8, 32), "no time was left")
RESULTS = record.Results(
    tuple(
        a_record(path=path, batch=batch, query_len=n, step_ms_p50=ms * (1 + batch / 8))
        for n in (1, 6)
        for path, ms in (("stock", 6.6), ("auto", 6.4), ("latency_specialized", 3.2))
        for batch in (1, 8, 32)
    ),
    (LEFT,),
)


def test_the_results_are_what_readers_expect(tmp_path):
    written = json.loads(RESULTS.as_json())
    assert schemas.conforming("bench-step.v1", written) == written
    schemas.conforming("bench-step.v1", json.loads(record.Results().as_json()))
    record.save(tmp_path / "step.json", RESULTS)
    assert record.load(tmp_path / "step.json") == RESULTS


def test_every_part_is_in_the_schema():
    schema = json.loads((schemas.FOLDER / "bench-step.v1.json").read_text())
    row = schema["properties"]["records"]["items"]["properties"]["parts"]["items"]
    assert row["properties"]["part"]["enum"] == list(Part)


@pytest.mark.parametrize("content", ["{}", "[]", '{"records": [{}]}', "not JSON"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "step.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"has no results of 'bench\.sh step'"):
        record.load(path)


def test_the_table():
    text = record.table(RESULTS)
    first, *blocks = text.split("\n\n")
    lines = first.splitlines()
    assert lines[0] == "40 layers, one rank of 8, query length 1"
    assert lines[1].split()[:3] == ["batch", "path", "ms"]
    assert len(lines) == 2 + 9
    assert lines[2].split()[:3] == ["1", "stock", "7.42"]
    parts = next(b for b in blocks if b.startswith(f"{lines[0]}, batch 8"))
    rows = parts.splitlines()
    query = next(row for row in rows if row.split()[0] == "query").split()
    # 1 MB in 20 us.
    assert query == ["query", "1.0", *["26.0", "20.0", "1", "1"] * 3]
    assert "other, stock: Memset (Device) 1.0" in rows
    assert blocks[-1] == (
        "left out: 40 layers, one rank of 8, query length 6, auto, batch 8, 32: "
        "no time was left"
    )


def test_the_table_of_many_kernels_stays_short():
    others = tuple(record.OtherRecord(f"k{i}" * 50, 1, 9.0 - i) for i in range(8))
    text = record.table(record.Results((a_record(other=others, untold_launches=3.0),)))
    assert "and 5 more" in text
    assert "stock: the part of 3 launches of the forward graph cannot be told" in text
    assert max(map(len, text.splitlines())) < 300


def test_a_case_that_not_all_paths_reached():
    partial = record.Results((a_record(batch=1), a_record(batch=8, path="auto")))
    text = record.table(partial)
    assert "batch 1: us a step" in text
    assert "batch 8: us a step" in text
    assert "expert parallelism" not in text
    assert "with expert parallelism" in record.table(
        record.Results((a_record(expert_parallel=True),))
    )


def run(*arguments: str, **options):
    return subprocess.run(
        [str(BENCH), "step", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        **options,
    )


def test_a_plot_is_redrawn_from_the_results_alone(tmp_path):
    kept, plot = tmp_path / "step.json", tmp_path / "plots" / "step.svg"
    record.save(kept, RESULTS)
    done = run("--draw", str(kept), "--plot", str(plot))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == record.table(RESULTS) + "\n"
    drawn = plot.read_text()
    # Names on the lines, as text, in a panel for each query length.
    for name in ("stock", "auto", "latency_specialized", "bandwidth bound"):
        assert drawn.count(f">{name}<") == 2
    assert "query length 6" in drawn
    assert len(drawn) < 100_000
    again = run("--draw", str(kept), "--plot", str(plot), "--json")
    assert json.loads(again.stdout) == json.loads(RESULTS.as_json())
    assert plot.read_text() == drawn


def test_host_time_is_drawn_beside_the_step(tmp_path):
    kept, host, plot = (tmp_path / name for name in ("s.json", "h.json", "p.svg"))
    record.save(kept, RESULTS)
    builds = [
        {"proxy": 40, "query_len": q, "batch": b, "path": p, "host_us_p50": us}
        for q, b, p, us in [
            (1, 1, "stock", 2500.0),
            (1, 8, "stock", 2600.0),
            (1, 1, "recorded", 150.0),
            (1, 1, "in_graph", 9.0),
            (1, 8, "in_graph", 11.0),
            (6, 32, "in_graph", 12.0),
        ]
    ]
    host.write_text(json.dumps({"records": builds}))
    done = run("--draw", str(kept), "--plot", str(plot), "--plot-host", str(host))
    assert (done.returncode, done.stderr) == (0, "")
    drawn = plot.read_text()
    assert "metadata on the host, 40 layers, query length 1" in drawn
    assert drawn.count(">stock<") == 3
    assert drawn.count(">in_graph<") == 1
    assert ">recorded<" not in drawn


@pytest.mark.parametrize("content", ["{}", '{"records": []}', '{"records": [{}]}'])
def test_host_time_of_other_files_is_refused(tmp_path, content):
    kept, host = tmp_path / "step.json", tmp_path / "host.json"
    record.save(kept, RESULTS)
    host.write_text(content)
    done = run(
        *("--draw", str(kept), "--plot", str(tmp_path / "p.svg")),
        *("--plot-host", str(host)),
    )
    assert done.returncode == cli.FAILED
    assert "has no results of 'bench.sh metadata'" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "p.svg").exists()


def test_labels_do_not_overlap(tmp_path):
    from bench.step.plot import _label

    placed = []
    panel = SimpleNamespace(annotate=lambda name, at, **_: placed.append((name, at[1])))
    ends = [(10.0, "stock", "#000"), (9.9, "auto", "#000"), (0.5, "bound", "#000")]
    _label(panel, ends, 5)
    heights = [height for _, height in placed]
    assert [name for name, _ in placed] == ["bound", "auto", "stock"]
    assert min(b - a for a, b in pairwise(heights)) == pytest.approx(10 / 14)


def test_nothing_to_draw_is_one_line(tmp_path):
    kept = tmp_path / "step.json"
    record.save(kept, record.Results())
    done = run("--draw", str(kept), "--plot", str(tmp_path / "step.svg"))
    assert done.returncode == cli.FAILED
    assert done.stderr.splitlines()[-1] == "error: there is no step to draw"
    missing = run("--draw", str(tmp_path / "none.json"))
    assert missing.returncode == cli.FAILED
    assert missing.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/none.json: ")


def test_without_a_gpu_it_is_one_line():
    done = run()
    assert (done.returncode, done.stdout) == (cli.FAILED, "")
    # Other lines tell that it goes on.
    last = done.stderr.splitlines()[-1]
    assert last == "error: no NVIDIA GPU here: run this on a GPU node"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--paths", "fast"], "argument --paths: invalid path value: 'fast'"),
        (["--paths", "auto:"], "argument --paths: invalid path value: 'auto:'"),
        (["--batch", "64"], "the engine serves 32 requests at most"),
        (["--query-len", "7"], "the proxy drafts 5 tokens at most"),
        (["--steps", "1"], "give 10 --steps or more"),
        (["--expert-parallel"], "--expert-parallel needs --rank-of 2, 4 or 8"),
    ],
)
def test_bad_input_is_one_line(arguments, line):
    done = run(*arguments)
    assert done.returncode == 2
    assert line in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.fixture
def benched(monkeypatch, tmp_path, capsys):
    """Runs the bench with ``engine_(request)`` in place of engine processes."""
    monkeypatch.setattr(step, "check_machine", lambda: None)
    out = tmp_path / "kept" / "step.json"

    def bench(engine_, *arguments: str):
        monkeypatch.setattr(step, "run_engine", engine_)
        code = cli.run(
            step.parse, step.run, ["--out", str(out), "--layers", "8", *arguments]
        )
        return code, record.load(out), capsys.readouterr()

    return bench


def measured(request: Request, *batches: int) -> None:
    for batch in batches or request.batches:
        record.add(
            Path(request.out),
            a_record(path=request.path, batch=batch, query_len=request.query_len),
        )


def test_each_path_has_an_engine_and_all_have_a_query_length_first(benched):
    asked = []

    def an_engine(request):
        asked.append((request.query_len, request.path, request.batches))
        assert Request.of(request.as_json()) == request
        measured(request)

    paths = ("stock", "latency_specialized:eager", "stock")
    code, results, told = benched(
        an_engine, "--paths", *paths, "--batch", "1,8", "--query-len", "1,6"
    )
    assert code == 0
    assert asked == [(n, path, (1, 8)) for n in (1, 6) for path in paths[:2]]
    assert len(results.records) == 8
    assert told.out == record.table(results) + "\n"


def test_a_failed_engine_leaves_the_others(benched):
    def an_engine(request):
        if request.path == "stock":
            measured(request, 1)
            return "its engine failed (exit code 1), its log says why"
        measured(request)
        return None

    code, results, told = benched(an_engine, "--batch", "1,8")
    assert code == cli.FAILED
    assert [(r.path, r.batch) for r in results.records] == [
        ("stock", 1),
        ("auto", 1),
        ("auto", 8),
    ]
    (left,) = results.left_out
    assert (left.path, left.batches) == ("stock", (8,))
    assert "stock, query length 1: its engine failed (exit code 1)" in told.err


def test_a_budget_ends_the_run_with_what_it_has(benched, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(step.time, "time", lambda: clock[0])

    def an_engine(request):
        assert request.deadline == 1100
        clock[0] += 70
        measured(request)

    code, results, _ = benched(
        an_engine, "--budget-seconds", "100", "--batch", "1", "--json"
    )
    assert code == 0
    assert [r.path for r in results.records] == ["stock"]
    assert [(left.path, left.reason) for left in results.left_out] == [
        ("auto", "no time was left")
    ]


def test_an_engine_ends_with_the_budget(monkeypatch):
    request = Request(8, 1, False, "m", "auto", 1, (1,), 10, 0.0, "c", "out")
    monkeypatch.setattr(step.sys, "executable", "/bin/sleep")
    assert step.run_engine(replace(request, deadline=None)) is not None

    def slow(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(step.subprocess, "run", slow)
    assert step.run_engine(request) == "no time was left"


def test_an_interruption_keeps_what_was_measured(benched):
    def an_engine(request):
        measured(request, 1)
        raise KeyboardInterrupt

    code, results, told = benched(an_engine)
    assert code == 130
    assert [r.batch for r in results.records] == [1]
    kept, end = told.err.splitlines()
    assert kept.endswith("step.json has what was measured")
    assert end == "error: interrupted: run it again when you like"


def test_a_killed_engine_leaves_a_whole_file(tmp_path):
    """Killed at any time, as the file of results is written again and again."""
    out = tmp_path / "step.json"
    record.save(out, RESULTS)
    writer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent("""
                import sys
                from pathlib import Path
                from bench.step import record
                out = Path(sys.argv[1])
                some = record.load(out).records[0]
                print("ready", flush=True)
                while True:
                    record.add(out, some)
            """),
            str(out),
        ],
        env={**os.environ, "PYTHONPATH": str(CI)},
        stdout=subprocess.PIPE,
    )
    with writer.stdout or nullcontext():
        assert writer.stdout.readline() == b"ready\n"
        while len(record.load(out).records) < len(RESULTS.records) + 5:
            pass
        writer.kill()
    assert writer.wait() == -signal.SIGKILL
    kept = record.load(out)
    schemas.conforming("bench-step.v1", json.loads(kept.as_json()))
    assert len(kept.records) >= len(RESULTS.records) + 5
