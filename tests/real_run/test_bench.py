"""The metadata bench where it needs no GPU: statistics, traces, turns, lines."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cli
import pytest
import schemas
from bench import metadata, ported
from bench.records import Record, aims, percentile, table
from bench.switch import SETTLE, Switch, prompts
from bench.trace import FORWARD, HEAD, costs, mark
from cli import Fault

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench.sh"


def record(**changes) -> Record:
    return replace(
        Record(
            proxy=40,
            batch=1,
            query_len=1,
            max_model_len=2048,
            path="replay",
            steps=120,
            host_us_p50=50.0,
            host_us_p99=60.0,
            launch_calls=1.0,
            step_launch_calls=32.0,
            planner_launches=3.0,
            device_us=30.0,
            gpu_metadata_us=40.0,
            step_ms_p50=10.0,
            recordings=7,
            record_seconds=0.1,
            record_mib=8.0,
            torch="2.11.0",
            gpu="a GPU",
            commit="abc",
            stack="0123.4567",
        ),
        **changes,
    )


CASE = "40 layers, batch 1, query length 1, max_model_len 2048"
EAGER = dict(path="eager", recordings=None, record_seconds=None, record_mib=None)


def test_percentiles():
    values = [float(v) for v in range(1, 101)]
    assert percentile(values, 50) == 50
    assert percentile(values, 99) == 99
    assert percentile([7.0], 99) == 7
    with pytest.raises(ValueError, match="no steps"):
        percentile([], 50)


def test_the_records_are_what_readers_expect():
    written = schemas.conforming(
        "bench-metadata.v2", json.loads(metadata.as_json([record()]))
    )
    assert set(written["records"][0]) >= {
        *("proxy", "batch", "query_len", "max_model_len"),
        *("path", "host_us_p50", "host_us_p99"),
        *("launch_calls", "device_us", "step_ms_p50", "recordings"),
        *("step_launch_calls", "planner_launches", "gpu_metadata_us"),
        *("record_seconds", "record_mib", "torch", "gpu", "commit", "stack"),
    }


def test_the_table_lines_up():
    lines = table([record(), record(**EAGER, host_us_p50=2500.0)]).splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    shape = ["proxy", "batch", "query_len", "max_model_len", "path"]
    assert lines[0].split()[:5] == shape
    assert "2500.00" in lines[2]
    assert lines[2].endswith("-")


@pytest.mark.parametrize(
    ("eager_us", "line"),
    [
        (1000.0, f"met: {CASE}: replay 20.0x below"),
        (999.0, f"not met: {CASE}: replay 20.0x"),
    ],
)
def test_the_aim_at_batch_one(eager_us, line):
    (found,) = aims([record(), record(**EAGER, host_us_p50=eager_us)])
    assert found.startswith(line)


def test_the_aims_against_upstreams_recordings():
    ported = record(path="ported", recordings=32, record_seconds=0.21, record_mib=8.0)
    assert aims([record(), ported]) == [
        "met: 40 layers: recordings 7, ported 32",
        "met: 40 layers: record_seconds 0.10 s, ported 0.21 s",
        "not met: 40 layers: record_mib 8.00 MiB, ported 8.00 MiB",
    ]
    assert aims([record(**EAGER)]) == []


IN_GRAPH = dict(EAGER, path="in_graph", proxy=8, host_us_p50=10.0, gpu_metadata_us=15.0)


def test_the_aims_of_the_build_in_the_graph():
    eager = record(**EAGER, proxy=8, step_ms_p50=4.5)
    case = "8 layers, batch 1, query length 1, max_model_len 2048: in_graph"
    assert aims([eager, record(**IN_GRAPH, step_ms_p50=3.0)]) == [
        f"met: {case} host_us_p50 10.00 us (aim 10 us)",
        f"met: {case} gpu_metadata_us 15.00 us (aim 15 us)",
        f"met: {case} planner_launches 3.00 (aim 3)",
        f"met: {case} step 1.50x faster than eager (aim 1.5x)",
    ]
    slow = dict(host_us_p50=11.0, gpu_metadata_us=16.0, planner_launches=4.0)
    missed = aims([eager, record(**IN_GRAPH | slow, step_ms_p50=3.1)])
    assert [line.partition(":")[0] for line in missed] == ["not met"] * 4


def test_an_unknown_figure_meets_no_aim():
    lines = aims([record(**IN_GRAPH | {"gpu_metadata_us": None})])
    assert not [line for line in lines if "gpu_metadata_us" in line]
    # Deeper proxies and larger batches are bound by the GPU.
    deep = [record(**IN_GRAPH | {"proxy": 40}), record(**EAGER)]
    assert not [line for line in aims(deep) if "faster" in line]


def test_the_aims_of_two_query_lengths_stay_apart():
    six = record(query_len=6, host_us_p50=100.0)
    lines = aims([record(), six, record(**EAGER, host_us_p50=1000.0)])
    assert len(lines) == 1
    assert lines[0].startswith(f"met: {CASE}: replay 20.0x")


def test_the_aims_of_two_lengths_stay_apart():
    long = dict(max_model_len=2**20)
    eager = record(**EAGER, host_us_p50=1000.0)
    lines = aims([record(), eager, record(**EAGER | long, host_us_p50=999.0)])
    assert [line.partition(" (")[0] for line in lines] == [
        f"met: {CASE}: replay 20.0x below eager"
    ]
    ported = dict(path="ported", record_mib=9.0, recordings=8, record_seconds=0.2)
    both = [record(), record(**ported), record(**long), record(**ported | long)]
    assert len([line for line in aims(both) if "recordings" in line]) == 2


@pytest.mark.parametrize(("device_us", "verdict"), [(5.0, "met"), (5.1, "not met")])
def test_the_aim_at_the_longest_length(device_us, verdict):
    long = dict(max_model_len=2**20, device_us=device_us)
    case = "40 layers, batch 1, query length 1, max_model_len 1048576"
    assert aims([record(**long), record(device_us=device_us)]) == [
        f"{verdict}: {case}: replay device_us {device_us:.2f} us (aim 5 us)"
    ]


class Trace:
    """A profiler's trace, event by event."""

    def __init__(self) -> None:
        self.events: list[dict] = []
        self._correlation = 0

    def build(self, path: str, start: float, end: float) -> None:
        self._add("user_annotation", mark(path), start, end)
        # The GPU's view of the same range is not another build.
        self._add("gpu_user_annotation", mark(path), start, end)

    def forward(self, at: float, *kernels: tuple[float, float, str]) -> None:
        """The launch of the forward graph of a step."""
        self._add("user_annotation", FORWARD, at, at + 10)
        self.launch("cudaGraphLaunch", at + 1, *kernels)

    def launch(self, name: str, at: float, *kernels: tuple) -> None:
        self._correlation += 1
        self._add("cuda_runtime", name, at, at + 1)
        for start, end, *names in kernels:
            self._add("kernel", *(names or ["some_kernel"]), start, end)

    def nested_driver_call(self, name: str, at: float) -> None:
        self._add("cuda_driver", name, at, at + 1)

    def _add(self, category: str, name: str, start: float, end: float) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "ts": start,
                "dur": end - start,
                "args": {"correlation": self._correlation},
            }
        )


def test_launches_and_gpu_time_of_a_build():
    trace = Trace()
    trace.build("eager", 100, 200)
    trace.launch("cudaLaunchKernel", 110, (300, 310))
    # Two streams overlap: 5 us of it count once.
    trace.launch("cuLaunchKernelEx", 120, (305, 320))
    trace.launch("cudaMemcpyAsync", 130, (400, 402))
    trace.launch("cudaEventRecord", 140)
    trace.launch("cudaStreamIsCapturing", 150)
    # The forward, outside the build.
    trace.launch("cudaGraphLaunch", 250, (500, 900), (910, 990))
    trace.build("replay", 1000, 1030)
    trace.launch("cudaGraphLaunch", 1010, (1100, 1120), (1120, 1130))
    trace.nested_driver_call("cuGraphLaunch", 1011)
    trace.launch("cudaGraphLaunch", 1050, (1200, 1600))
    trace.build("eager", 2000, 2100)
    trace.events.append({"ph": "M", "name": "process_name", "args": {}})

    found = costs({"traceEvents": trace.events})
    eager, replay = found["eager"], found["replay"]
    assert (eager.builds, replay.builds) == (2, 1)
    # Medians of (3, 0) launches and (22, 0) us; only the first has a step.
    assert (eager.launch_calls, eager.device_us) == (1.5, 11.0)
    assert eager.step_launch_calls == 4
    assert (replay.launch_calls, replay.device_us) == (1, 30)
    assert replay.step_launch_calls == 2


PLANNER = "void smxx::decode::get_mla_metadata_kernel<true>(Params)"
# How a forward graph without metadata begins.
FORWARD_HEAD = ("fill", "embed", "norm")


def a_forward(at: float, *planners: float) -> list[tuple[float, float, str]]:
    kernels = [
        (at + 10 * index, at + 10 * index + 5, name)
        for index, name in enumerate((*FORWARD_HEAD, "attention"))
    ]
    return kernels + [(start, start + 11, PLANNER) for start in planners]


def test_the_wait_for_the_metadata_and_the_planners():
    trace = Trace()
    for begin in (0, 1000):
        trace.build("replay", begin + 100, begin + 130)
        trace.launch("cudaGraphLaunch", begin + 110, (begin + 150, begin + 170))
        # Between build and forward: part of the wait, and of no range.
        trace.launch(
            "cudaLaunchKernel", begin + 135, (begin + 172, begin + 174, PLANNER)
        )
        trace.forward(begin + 140, *a_forward(begin + 180, begin + 230, begin + 250))
        # A draft's graph plans for itself.
        trace.launch(
            "cudaGraphLaunch", begin + 160, (begin + 300, begin + 310, PLANNER)
        )
    found = costs({"traceEvents": trace.events})["replay"]
    assert found.gpu_metadata_us == 30
    assert found.planner_launches == 2
    assert found.device_us == 20
    assert found.head == FORWARD_HEAD
    assert len(found.head) == HEAD


def in_graph_trace(*metadata: tuple[float, float, str]) -> dict:
    trace = Trace()
    trace.build("in_graph", 100, 104)
    trace.forward(110, *metadata, *a_forward(180, 230))
    return {"traceEvents": trace.events}


def test_metadata_at_the_head_of_the_forward():
    # A fill of the metadata is not the forward's, nor is one that runs beside.
    trace = in_graph_trace((150, 155, "fill"), (152, 160, "build"), (170, 172, "fill"))
    found = costs(trace, {"in_graph": FORWARD_HEAD})["in_graph"]
    assert found.gpu_metadata_us == 30
    assert found.device_us == 12
    assert found.launch_calls == 0
    assert found.planner_launches == 1


@pytest.mark.parametrize("head", [(), ("embed", "fill", "norm")])
def test_a_head_that_is_not_found_gives_no_figure(head):
    trace = in_graph_trace((150, 155, "build"))
    found = costs(trace, {"in_graph": head})["in_graph"]
    assert found.gpu_metadata_us is None
    assert found.planner_launches == 1


def test_a_forward_belongs_to_the_build_before_it():
    trace = Trace()
    trace.build("eager", 100, 110)
    trace.launch("cudaLaunchKernel", 105, (120, 125))
    # No forward graph: the step after it has one.
    trace.build("replay", 200, 210)
    trace.launch("cudaGraphLaunch", 205, (220, 225))
    trace.forward(215, *a_forward(230))
    found = costs({"traceEvents": trace.events})
    assert found["eager"].gpu_metadata_us is None
    assert found["eager"].planner_launches is None
    assert found["replay"].gpu_metadata_us == 10


def test_a_trace_without_builds():
    assert costs({"traceEvents": []}) == {}


class StockState:
    def prepare_attn(self, *inputs, **options):
        return self._build_attn_metadata(*inputs, **options)

    def _build_attn_metadata(self, *inputs, **options):
        return {"by": "eager"}

    def _upload_replay_start(self, values, num_reqs):
        return "uploaded"


class RecordedState(StockState):
    """The model state's surface that the switch takes hold of."""

    def record_metadata_graphs(self, *where):
        return SimpleNamespace(served=Counter(replay=7), seconds=0.5, mib=3.0)

    def release_metadata_graphs(self):
        pass

    def _build_attn_metadata(self, *inputs, **options):
        return {"by": "replay"}

    def _upload_replay_start(self, values, num_reqs):
        return "skipped"


@pytest.fixture
def switched():
    class State(RecordedState):
        pass

    switch = Switch(["eager", "replay"], None, query_len=1)
    switch.install(State, StockState, decode_batch=dict)
    return switch, State()


def step(state, batch=8, mode="FULL", prefill=False, **options):
    input_batch = SimpleNamespace(num_reqs=batch, num_tokens=batch, has_prefill=prefill)
    mode_of_step = SimpleNamespace(name=mode)
    built = state.prepare_attn(input_batch, mode_of_step, (), None, [], None, **options)
    return built["by"]


def test_paths_take_turns(switched):
    switch, state = switched
    switch.measure(batch=8, turn=4)
    served = [step(state) for _ in range(16)]
    assert served == (["eager"] * 4 + ["replay"] * 4) * 2
    for path in ("eager", "replay"):
        samples = switch.samples[path]
        assert len(samples.host_us) == 2 * (4 - SETTLE)
        assert len(samples.step_ms) == 2 * (4 - SETTLE - 1)
        assert min(samples.host_us) > 0
    assert switch.enough(4)
    assert not switch.enough(5)


def test_only_full_decode_steps_of_the_batch_count(switched):
    switch, state = switched
    switch.measure(batch=8, turn=1)
    for others in (
        {"batch": 7},
        {"mode": "PIECEWISE"},
        {"prefill": True},
        {"for_capture": True},
    ):
        assert step(state, **others) == "replay"
    assert not switch.samples
    assert step(state) == "eager"


def test_steps_of_two_runs_are_no_neighbours(switched):
    switch, state = switched
    switch.measure(batch=8, turn=100)
    for _ in range(SETTLE + 1):
        step(state)
    switch.new_run()
    step(state)
    assert len(switch.samples["eager"].host_us) == 2
    assert switch.samples["eager"].step_ms == []


def test_a_new_measurement_starts_anew(switched):
    switch, state = switched
    switch.measure(batch=8, turn=4)
    for _ in range(4):
        step(state)
    switch.measure(batch=8, turn=4)
    assert not switch.samples
    assert step(state) == "eager"


def test_before_a_measurement_the_engine_is_as_it_was(switched):
    _, state = switched
    assert step(state) == "replay"
    assert state._upload_replay_start(_Values(False), 8) == "skipped"


class _Values:
    def __init__(self, some: bool) -> None:
        self._some = some

    def any(self) -> bool:
        return self._some


def test_stock_uploads_its_zeros(switched):
    switch, state = switched
    switch.measure(batch=8, turn=1)
    assert state._upload_replay_start(_Values(False), 8) == "uploaded"
    # What is not zero is for the state that keeps count of zeros.
    assert state._upload_replay_start(_Values(True), 8) == "skipped"
    step(state)
    assert state._upload_replay_start(_Values(False), 8) == "skipped"


def test_recordings_are_reported(switched):
    switch, state = switched
    assert state.record_metadata_graphs().served.total() == 7
    report = switch.recordings["replay"]
    assert (report.count, report.seconds, report.mib) == (7, 0.5, 3.0)


def test_a_recorded_path_without_a_recording_is_an_error():
    class Unrecorded(RecordedState):
        def _build_attn_metadata(self, *inputs, **options):
            return None

    switch = Switch(["replay"], None, query_len=1)
    switch.install(Unrecorded, StockState, decode_batch=dict)
    switch.measure(batch=8, turn=1)
    with pytest.raises((RuntimeError, TypeError), match="replay path"):
        step(Unrecorded())


class Manager:
    """The graph manager's surface that the bench takes hold of."""

    def __init__(self, profiling: bool = False) -> None:
        self.graphs: dict = {}
        self._capture_descs = {"PIECEWISE": ["large"], "FULL": ["1", "8"]}
        self._max_full_descs_to_capture = 2 if profiling else None
        self.captured: list = []

    def capture(self, state, **options):
        for mode, shapes in self._capture_descs.items():
            for shape in shapes:
                self.captured.append((mode, shape))
                if mode == "FULL":
                    assert shape not in self.graphs
                    by = step(state, for_capture=True)
                    self.graphs[shape] = f"graph of the {by} build"

    def run_fullgraph(self, shape):
        return self.graphs[shape]


@pytest.fixture
def make_forwards():
    def make(*paths):
        class State(RecordedState):
            pass

        class OwnManager(Manager):
            pass

        switch = Switch(paths, None, query_len=1)
        switch.install(State, StockState, decode_batch=dict)
        switch.install_forwards(OwnManager, "FULL")
        return switch, State(), OwnManager

    return make


def test_stock_steps_run_upstreams_forward_graphs(make_forwards):
    switch, state, manager_class = make_forwards("eager", "replay")
    manager = manager_class()
    manager.capture(state)
    # PIECEWISE graphs are captured once.
    assert manager.captured == [
        ("PIECEWISE", "large"),
        *[("FULL", "1"), ("FULL", "8")] * 2,
    ]
    switch.measure(batch=8, turn=2)
    served = []
    for _ in range(4):
        step(state)
        served.append(manager.run_fullgraph("8"))
    upstreams, ours = "graph of the eager build", "graph of the replay build"
    assert served == [upstreams] * 2 + [ours] * 2
    # A step that is not measured, after one of stock's.
    step(state)
    step(state, batch=7)
    assert manager.run_fullgraph("8") == ours


@pytest.mark.parametrize(
    ("paths", "profiling"), [(["in_graph"], False), (["eager", "replay"], True)]
)
def test_one_set_of_forward_graphs_where_one_will_do(make_forwards, paths, profiling):
    _, state, manager_class = make_forwards(*paths)
    manager = manager_class(profiling)
    manager.capture(state)
    assert len(manager.captured) == 3
    assert list(manager._capture_descs) == ["PIECEWISE", "FULL"]


def test_a_capture_that_fails_leaves_the_manager_as_it_was(make_forwards, monkeypatch):
    switch, state, manager_class = make_forwards("eager", "replay")
    monkeypatch.setattr(StockState, "_build_attn_metadata", lambda *_, **__: 1 / 0)
    manager = manager_class()
    with pytest.raises(ZeroDivisionError):
        manager.capture(state)
    assert list(manager._capture_descs) == ["PIECEWISE", "FULL"]
    assert not switch.full_graphs.capturing_upstream


def test_the_build_in_the_graph_has_an_engine_to_itself(make_forwards):
    switch, state, _ = make_forwards("in_graph")
    switch.measure(batch=8, turn=4)
    assert [step(state) for _ in range(4)] == ["replay"] * 4
    assert list(switch.samples) == ["in_graph"]


def test_upstreams_class_gets_the_builders(tmp_path):
    pristine = tmp_path / "metadata_graphs.py"
    pristine.write_text(
        "_RECORDABLE_BUILDERS = frozenset({int})\n"
        "class AttnMetadataCudaGraphs:\n"
        "    def __init__(self, *arguments):\n"
        "        self.arguments = arguments\n"
        "    def recordable(self):\n"
        "        return _RECORDABLE_BUILDERS\n"
    )
    graphs = ported.graphs(pristine, "config", 6, {str})
    assert graphs.arguments == ("config", 6)
    assert graphs.recordable() == {int, str}


def test_prompts_are_random_and_repeatable():
    first, again, other = (prompts(2, 5, 100, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert [len(prompt) for prompt in first] == [5, 5]


def run(*arguments: str):
    return subprocess.run(
        [str(BENCH), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
    )


def test_without_a_gpu_it_is_one_line():
    done = run("metadata")
    assert (done.returncode, done.stdout) == (cli.FAILED, "")
    # Other lines tell that it goes on.
    last = done.stderr.splitlines()[-1]
    assert last == "error: no NVIDIA GPU here: run this on a GPU node"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "error: say what to measure: bench.sh metadata|step [options]"),
        (["speed"], "error: say what to measure: bench.sh metadata|step [options]"),
        (["metadata", "--proxy", "7"], "--proxy 7: choose from [8, 40]"),
        (["metadata", "--batch", "0"], "argument --batch: invalid numbers value: '0'"),
        (["metadata", "--batch", "64"], "the engine serves 32 requests at most"),
        (["metadata", "--query-len", "9"], "the proxy drafts 5 tokens at most"),
        (
            ["metadata", "--max-model-len", "2048,1024"],
            "--max-model-len: the proxy takes 2048 to 1048576",
        ),
        (["metadata", "--max-model-len", "2000000"], "the proxy takes 2048 to 1048576"),
        (
            ["metadata", "--path", "fast"],
            "argument --path: invalid paths value: 'fast'",
        ),
        (["metadata", "--steps", "1"], "give 10 --steps and 64 --new-tokens or more"),
    ],
)
def test_bad_input_is_one_line(arguments, line):
    done = run(*arguments)
    assert done.returncode == 2
    assert line in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_pristine_copy_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_BUNDLE", raising=False)
    assert metadata.find_upstream(None) is None
    with pytest.raises(Fault, match="holds no pristine"):
        metadata.find_upstream(tmp_path)
    path = tmp_path / "base" / metadata.RELATIVE
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setenv("VLLM_BUNDLE", str(tmp_path))
    assert metadata.find_upstream(None) == path


def measure(*arguments):
    return cli.run(metadata.parse, metadata.run, arguments)


def test_what_is_measured_is_kept(tmp_path, monkeypatch):
    def engine(options, proxy, query_len, max_model_len, paths, heads, folder):
        if proxy == 8:
            raise Fault("the engine of 8 layers failed")
        return [record(proxy=proxy, path=path) for path in paths], {}

    monkeypatch.setattr(metadata, "check_machine", lambda: None)
    monkeypatch.setattr(metadata, "run_engine", engine)
    out = tmp_path / "results" / "records.json"
    assert measure("--out", str(out)) == cli.FAILED
    written = json.loads(out.read_text())["records"]
    assert [(r["proxy"], r["path"]) for r in written] == [
        (40, path) for path in ("eager", "replay", "in_graph")
    ]


def test_json_alone_on_standard_output(monkeypatch, capsys):
    monkeypatch.setattr(metadata, "check_machine", lambda: None)
    asked = []

    def engine(options, proxy, query_len, max_model_len, paths, heads, folder):
        asked.append((proxy, query_len, max_model_len, paths, heads))
        heads = {"1": ["a", "kernel", str(query_len)]}
        shape = dict(query_len=query_len, max_model_len=max_model_len)
        return [record(proxy=proxy, **shape)], heads

    monkeypatch.setattr(metadata, "run_engine", engine)
    subset = ["--query-len", "1,6", "--path", "in_graph,replay", "--proxy", "8"]
    assert measure("--json", *subset) == 0
    written = json.loads(capsys.readouterr().out)
    written = schemas.conforming("bench-metadata.v2", written)["records"]
    assert [(r["proxy"], r["query_len"]) for r in written] == [(8, 1)] * 2 + [
        (8, 6)
    ] * 2
    assert {r["max_model_len"] for r in written} == {2048}
    # The second engine knows how the first one's forward graphs begin.
    assert asked == [
        (8, 1, 2048, ["replay"], {}),
        (8, 1, 2048, ["in_graph"], {"1": ["a", "kernel", "1"]}),
        (8, 6, 2048, ["replay"], {}),
        (8, 6, 2048, ["in_graph"], {"1": ["a", "kernel", "6"]}),
    ]
    assert measure() == 0
    assert capsys.readouterr().out.split()[:2] == ["proxy", "batch"]


def test_each_length_has_engines_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(metadata, "check_machine", lambda: None)

    def engine(options, proxy, query_len, max_model_len, paths, heads, folder):
        # The heads of another length's graphs are no help.
        assert not heads
        return [record(max_model_len=max_model_len)], {"1": ["a", "kernel"]}

    monkeypatch.setattr(metadata, "run_engine", engine)
    lengths = ["--max-model-len", "2048,1048576", "--proxy", "8", "--path", "replay"]
    assert measure("--json", *lengths) == 0
    written = json.loads(capsys.readouterr().out)
    written = schemas.conforming("bench-metadata.v2", written)["records"]
    assert [r["max_model_len"] for r in written] == [2048, 1048576]
