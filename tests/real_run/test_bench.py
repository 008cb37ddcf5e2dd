"""The metadata bench where it needs no GPU: statistics, traces, turns, lines."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench import metadata, ported
from bench.records import Record, aims, percentile, table
from bench.switch import SETTLE, Switch, prompts
from bench.trace import costs, mark

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench.sh"


def record(**changes) -> Record:
    return replace(
        Record(
            proxy=40,
            batch=1,
            query_len=1,
            path="recorded",
            steps=120,
            host_us_p50=50.0,
            host_us_p99=60.0,
            launch_calls=1.0,
            step_launch_calls=32.0,
            device_us=30.0,
            step_ms_p50=10.0,
            recordings=7,
            record_seconds=0.1,
            record_mib=8.0,
            torch="2.11.0",
            gpu="a GPU",
            commit="abc",
        ),
        **changes,
    )


STOCK = dict(path="stock", recordings=None, record_seconds=None, record_mib=None)


def test_percentiles():
    values = [float(v) for v in range(1, 101)]
    assert percentile(values, 50) == 50
    assert percentile(values, 99) == 99
    assert percentile([7.0], 99) == 7
    with pytest.raises(ValueError, match="no steps"):
        percentile([], 50)


def test_the_records_are_what_readers_expect():
    written = json.loads(metadata.as_json([record()]))
    assert set(written["records"][0]) >= {
        *("proxy", "batch", "query_len", "path", "host_us_p50", "host_us_p99"),
        *("launch_calls", "device_us", "step_ms_p50", "recordings"),
        *("record_seconds", "record_mib", "torch", "gpu", "commit"),
    }


def test_the_table_lines_up():
    lines = table([record(), record(**STOCK, host_us_p50=2500.0)]).splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split()[:3] == ["proxy", "batch", "path"]
    assert "2500.00" in lines[2]
    assert lines[2].endswith("-")


@pytest.mark.parametrize(
    ("stock_us", "line"),
    [
        (1000.0, "met: 40 layers, batch 1: recorded build 20.0x below stock (aim 20x)"),
        (999.0, "not met: 40 layers, batch 1: recorded build 20.0x below stock"),
    ],
)
def test_the_aim_at_batch_one(stock_us, line):
    (found,) = aims([record(), record(**STOCK, host_us_p50=stock_us)])
    assert found.startswith(line)


def test_the_aims_against_upstreams_recordings():
    ported = record(path="ported", recordings=32, record_seconds=0.21, record_mib=8.0)
    assert aims([record(), ported]) == [
        "met: 40 layers: recordings 7, ported 32",
        "met: 40 layers: record_seconds 0.10 s, ported 0.21 s",
        "not met: 40 layers: record_mib 8.00 MiB, ported 8.00 MiB",
    ]
    assert aims([record(**STOCK)]) == []


class Trace:
    """A profiler's trace, event by event."""

    def __init__(self) -> None:
        self.events: list[dict] = []
        self._correlation = 0

    def build(self, path: str, start: float, end: float) -> None:
        self._add("user_annotation", mark(path), start, end)
        # The GPU's view of the same range is not another build.
        self._add("gpu_user_annotation", mark(path), start, end)

    def launch(self, name: str, at: float, *kernels: tuple[float, float]) -> None:
        self._correlation += 1
        self._add("cuda_runtime", name, at, at + 1)
        for start, end in kernels:
            self._add("kernel", "some_kernel", start, end)

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
    trace.build("stock", 100, 200)
    trace.launch("cudaLaunchKernel", 110, (300, 310))
    # Two streams overlap: 5 us of it count once.
    trace.launch("cuLaunchKernelEx", 120, (305, 320))
    trace.launch("cudaMemcpyAsync", 130, (400, 402))
    trace.launch("cudaEventRecord", 140)
    trace.launch("cudaStreamIsCapturing", 150)
    # The forward, outside the build.
    trace.launch("cudaGraphLaunch", 250, (500, 900), (910, 990))
    trace.build("recorded", 1000, 1030)
    trace.launch("cudaGraphLaunch", 1010, (1100, 1120), (1120, 1130))
    trace.nested_driver_call("cuGraphLaunch", 1011)
    trace.launch("cudaGraphLaunch", 1050, (1200, 1600))
    trace.build("stock", 2000, 2100)
    trace.events.append({"ph": "M", "name": "process_name", "args": {}})

    found = costs({"traceEvents": trace.events})
    stock, recorded = found["stock"], found["recorded"]
    assert (stock.builds, recorded.builds) == (2, 1)
    # Medians of (3, 0) launches and (22, 0) us; only the first has a step.
    assert (stock.launch_calls, stock.device_us) == (1.5, 11.0)
    assert stock.step_launch_calls == 4
    assert (recorded.launch_calls, recorded.device_us) == (1, 30)
    assert recorded.step_launch_calls == 2


def test_a_trace_without_builds():
    assert costs({"traceEvents": []}) == {}


class StockState:
    def _build_attn_metadata(self, *inputs, **options):
        return {"by": "stock"}

    def _upload_replay_start(self, values, num_reqs):
        return "uploaded"


class RecordedState(StockState):
    """The model state's surface that the switch takes hold of."""

    def _record(self, *where):
        return SimpleNamespace(recordings=7, seconds=0.5, mib=3.0)

    def release_metadata_graphs(self):
        pass

    def _build_attn_metadata(self, *inputs, **options):
        return {"by": "recorded"}

    def _upload_replay_start(self, values, num_reqs):
        return "skipped"


@pytest.fixture
def switched():
    class State(RecordedState):
        pass

    switch = Switch(None, query_len=1)
    switch.install(State, StockState, decode_batch=dict)
    return switch, State()


def step(state, batch=8, mode="FULL", prefill=False, **options):
    input_batch = SimpleNamespace(num_reqs=batch, num_tokens=batch, has_prefill=prefill)
    mode_of_step = SimpleNamespace(name=mode)
    built = state._build_attn_metadata(
        input_batch, mode_of_step, (), None, [], None, **options
    )
    return built["by"]


def test_paths_take_turns(switched):
    switch, state = switched
    switch.measure(batch=8, turn=4)
    served = [step(state) for _ in range(16)]
    assert served == (["stock"] * 4 + ["recorded"] * 4) * 2
    for path in ("stock", "recorded"):
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
        assert step(state, **others) == "recorded"
    assert not switch.samples
    assert step(state) == "stock"


def test_steps_of_two_runs_are_no_neighbours(switched):
    switch, state = switched
    switch.measure(batch=8, turn=100)
    for _ in range(SETTLE + 1):
        step(state)
    switch.new_run()
    step(state)
    assert len(switch.samples["stock"].host_us) == 2
    assert switch.samples["stock"].step_ms == []


def test_a_new_measurement_starts_anew(switched):
    switch, state = switched
    switch.measure(batch=8, turn=4)
    for _ in range(4):
        step(state)
    switch.measure(batch=8, turn=4)
    assert not switch.samples
    assert step(state) == "stock"


def test_before_a_measurement_the_engine_is_as_it_was(switched):
    _, state = switched
    assert step(state) == "recorded"
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
    assert state._record().recordings == 7
    report = switch.recordings["recorded"]
    assert (report.count, report.seconds, report.mib) == (7, 0.5, 3.0)


def test_a_recorded_path_without_a_recording_is_an_error():
    class Unrecorded(RecordedState):
        def _build_attn_metadata(self, *inputs, **options):
            return None

    switch = Switch(None, query_len=1)
    switch.install(Unrecorded, StockState, decode_batch=dict)
    switch.paths = ["recorded"]
    switch.measure(batch=8, turn=1)
    with pytest.raises((RuntimeError, TypeError), match="recorded path"):
        step(Unrecorded())


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
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "bench.sh: no NVIDIA GPU here: run this on a GPU node\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "bench.sh: say what to measure: bench.sh metadata [options]"),
        (["speed"], "bench.sh: say what to measure: bench.sh metadata [options]"),
        (["metadata", "--proxy", "7"], "--proxy 7: choose from [8, 40]"),
        (["metadata", "--batch", "0"], "argument --batch: invalid numbers value: '0'"),
        (["metadata", "--batch", "64"], "the engine serves 32 requests at most"),
        (["metadata", "--query-len", "9"], "argument --query-len: invalid choice: 9"),
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
    with pytest.raises(metadata.BenchError, match="holds no pristine"):
        metadata.find_upstream(tmp_path)
    path = tmp_path / "base" / metadata.RELATIVE
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setenv("VLLM_BUNDLE", str(tmp_path))
    assert metadata.find_upstream(None) == path


def test_what_is_measured_is_kept(tmp_path, monkeypatch):
    def engine(options, proxy, folder):
        if proxy == 8:
            raise metadata.BenchError("the engine of 8 layers failed")
        return [record(proxy=proxy)]

    monkeypatch.setattr(metadata, "check_machine", lambda: None)
    monkeypatch.setattr(metadata, "run_engine", engine)
    out = tmp_path / "results" / "records.json"
    assert metadata.main(["--out", str(out)]) == 1
    assert [r["proxy"] for r in json.loads(out.read_text())["records"]] == [40]


def test_json_alone_on_standard_output(monkeypatch, capsys):
    monkeypatch.setattr(metadata, "check_machine", lambda: None)
    monkeypatch.setattr(
        metadata, "run_engine", lambda options, proxy, folder: [record(proxy=proxy)]
    )
    assert metadata.main(["--json"]) == 0
    written = json.loads(capsys.readouterr().out)["records"]
    assert [r["proxy"] for r in written] == [40, 8]
    assert metadata.main([]) == 0
    assert capsys.readouterr().out.split()[:2] == ["proxy", "batch"]
