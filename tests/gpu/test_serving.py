"""Engines that serve requests, each in a process of its own, beside one another."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

CI = Path(__file__).parents[2] / "ci"
SCRIPT = Path(__file__).with_name("served_requests.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    from proxy_model.write import write

    folder = tmp_path_factory.mktemp("proxy")
    write(folder, 8)
    return folder


@pytest.fixture
def served(model, tmp_path):
    """``served(scenario, backend)``: what ``served_requests.py`` found, and its log."""

    def run(scenario: str, backend: str) -> tuple[dict, str]:
        out, log = tmp_path / "out.json", tmp_path / "log"
        out.unlink(missing_ok=True)
        paths = [str(CI), os.environ.get("PYTHONPATH", "")]
        with log.open("w") as written:
            code = subprocess.run(
                [sys.executable, SCRIPT, scenario, model, backend, out],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                stdout=written,
                stderr=subprocess.STDOUT,
                timeout=400,
            ).returncode
        text = log.read_text()
        assert code == 0, text[-4000:]
        return json.loads(out.read_text()), text

    return run


def assert_served(counters: dict, log: str) -> None:
    """All FULL steps but a few went without an eager build, and none was wrong."""
    print(counters["line"])
    assert counters["verified"] > 20
    assert counters["served"] > 0.95 * counters["full_decode_steps"] > 0
    assert set(counters["eager"]) <= {"not_full"}
    assert "differ from upstream" not in log
    assert "differs from upstream" not in log


def accepted(found: dict) -> float:
    """Of the drafts that were verified, the part that was accepted."""
    metrics = found["metrics"]
    tokens = metrics["vllm:spec_decode_num_accepted_tokens"]
    return tokens / metrics["vllm:spec_decode_num_draft_tokens"]


def test_the_recipe_serves_what_the_stock_decode_does(served):
    """DSpark with adaptive verification, 500 requests, a batch that drains."""
    stock, _ = served("recipe", "stock")
    ours, log = served("recipe", "auto")
    assert_served(ours["counters"], log)
    print("stock", stock["metrics"], "ours", ours["metrics"])
    lengths = [[len(tokens) for tokens in found["tokens"]] for found in (stock, ours)]
    assert lengths[0] == lengths[1]
    assert 0.1 < accepted(stock) < 1
    if ours["tokens"] == stock["tokens"]:
        assert ours["metrics"] == stock["metrics"]
        return
    again, _ = served("recipe", "stock")
    assert again["tokens"] != stock["tokens"], "other tokens than the stock decode"
    print("two runs of the stock decode differ: no oracle for tokens")
    assert accepted(ours) == pytest.approx(accepted(stock), rel=0.03)


@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_sleep_changes_no_output(served, backend):
    found, log = served("sleep", backend)
    assert_served(found["counters"], log)
    tokens, free_bytes = found["tokens"], found["free_bytes"]
    for level in (1, 2):
        assert free_bytes[f"asleep {level}"] > free_bytes["awake"] + 2**30
    if tokens["awake"] != tokens["awake again"]:
        pytest.skip("the engine repeats no output: no oracle")
    assert tokens["after 1"] == tokens["awake"]
    assert tokens["after 2"] == tokens["awake"]
