"""The smoke client against a small server that behaves, and some that do not."""

import json
import os
import signal
import stat
import sys
import time
from pathlib import Path

import cli
import pytest
import schemas
from smoke import counters, serve_smoke

LINE = (
    "(EngineCore pid=7) INFO 11-29 decode metadata: in_graph=900 replay=80 "
    "launch=10 eager=10 full_decode_steps=1000 (not_full=4, prefill=10)"
)

SERVER = '''#!{python}
"""Takes the place of serve.sh; BEHAVIOUR says how it goes wrong."""
import json, os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

how = os.environ.get("BEHAVIOUR", "")
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)
if how == "dies":
    child.kill()
    sys.exit("no memory")
if how == "never ready":
    time.sleep(600)
port = int(sys.argv[sys.argv.index("--port") + 1])

class Handler(BaseHTTPRequestHandler):
    def answer(self, content, code=200):
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({{"data": [{{"id": "a-model"}}]}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "a-model" and body["ignore_eos"]
        if how == "error" and len(body["prompt"]) == 5:
            return self.answer({{"error": "out of blocks"}}, 500)
        tokens = body["max_tokens"] - (how == "short" and len(body["prompt"]) == 5)
        self.answer(
            {{"usage": {{"completion_tokens": tokens}}, "choices": [{{"text": "x"}}]}}
        )

    def log_message(self, *arguments):
        pass

def stop(*_):
    if how != "silent":
        missed = 3 if how == "misses" else 0
        print(f"decode metadata: in_graph=99 replay=0 launch=0 eager=1 "
              f"full_decode_steps=100 (unrecorded={{missed}})", flush=True)
    if how == "leaves a child":
        os._exit(0)
    child.kill()
    os._exit(9 if how == "crashes" else 0)

if how == "stays":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, stop)
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''


def test_the_newest_counters():
    log = f"decode metadata: in_graph=1 replay=9\n{LINE}\nanother line"
    assert counters.last(log) == {
        "in_graph": 900,
        "replay": 80,
        "launch": 10,
        "eager": 10,
        "full_decode_steps": 1000,
        "not_full": 4,
        "prefill": 10,
    }
    assert counters.last("nothing of the kind") is None
    assert counters.last("decode metadata: in_graph=1 replay=9") is None


@pytest.mark.parametrize(
    ("served", "missed", "steps", "fault"),
    [
        (951, 0, 1000, None),
        (950, 0, 1000, "950 of 1000 FULL decode steps went without"),
        (999, 1, 1000, "1 FULL decode steps found no recording"),
        (0, 0, 0, "the server ran no FULL decode step"),
    ],
)
def test_what_the_counters_must_say(served, missed, steps, fault):
    found = counters.faults(
        {
            "in_graph": served // 3,
            "replay": served // 3,
            "launch": served - 2 * (served // 3),
            "eager": steps - served,
            "unrecorded": missed,
            "full_decode_steps": steps,
        }
    )
    if fault is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(fault)
    assert counters.faults(None) == ["the server's log has no 'decode metadata:' line"]


@pytest.fixture
def smoke(tmp_path, monkeypatch, capsys):
    script = tmp_path / "serve.sh"
    script.write_text(SERVER.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    log = tmp_path / "serve.log"

    def run(behaviour: str = "", *more: str) -> tuple[int, dict]:
        monkeypatch.setenv("BEHAVIOUR", behaviour)
        code = cli.run(
            serve_smoke.parse,
            serve_smoke.run,
            [
                *("--serve", str(script), "--log", str(log), "--settle", "0"),
                *("--out", str(tmp_path / "out.json"), "--concurrency", "1,4"),
                *("--tokens", "6", "--prompt-tokens", "5", "--stop-timeout", "2"),
                *("--start-timeout", "20", *more),
            ],
        )
        result = json.loads(capsys.readouterr().out)
        assert result == json.loads((tmp_path / "out.json").read_text())
        assert_gone(int(log.read_text().split()[1]))
        return code, schemas.conforming("smoke.v2", result)

    return run


def assert_gone(pid: int) -> None:
    """The server's child is dead (or a zombie that nobody has waited for)."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the server's child has outlived it")


def test_a_good_server(smoke):
    code, result = smoke()
    assert (code, result["faults"]) == (0, [])
    assert result["model"] == "a-model"
    assert [w["completions"] for w in result["waves"]] == [1, 4]
    assert [w["tokens"] for w in result["waves"]] == [6, 24]
    assert result["counters"]["in_graph"] == 99
    assert result["exit_code"] == 0


def test_options_reach_the_server(smoke):
    _, result = smoke("", "--proxy", "8", "--", "--max-num-seqs", "4")
    assert result["command"][1:3] == ["--proxy", "8"]
    assert result["command"][-2:] == ["--max-num-seqs", "4"]


@pytest.mark.parametrize(
    ("behaviour", "fault"),
    [
        ("short", "concurrency 1: 5 tokens instead of 6"),
        ("error", 'concurrency 1: HTTP 500: {"error": "out of blocks"}'),
        ("misses", "3 FULL decode steps found no recording"),
        ("silent", "the server's log has no 'decode metadata:' line"),
        ("crashes", "the server's exit code was 9"),
        ("stays", "the server did not stop in 2 s after SIGTERM"),
        ("dies", "the server stopped with exit code 1 before it was ready"),
    ],
)
def test_a_bad_server(smoke, behaviour, fault):
    code, result = smoke(behaviour)
    assert code == 1
    assert result["faults"][0].startswith(fault)


def test_a_server_that_is_never_ready(smoke):
    code, result = smoke("never ready", "--start-timeout", "1")
    assert code == 1
    assert result["faults"][0].startswith("the server was not ready in 1 s")


def test_a_child_that_outlives_its_server_is_ended(smoke):
    assert smoke("leaves a child")[0] == 0


def test_no_server_at_all(tmp_path, capsys):
    log = tmp_path / "log"
    arguments = ["--serve", "/no/such/serve.sh", "--log", str(log)]
    assert cli.run(serve_smoke.parse, serve_smoke.run, arguments) == cli.FOUND
    assert "/no/such/serve.sh" in json.loads(capsys.readouterr().out)["faults"][0]
