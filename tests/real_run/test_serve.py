"""serve.sh: what it starts, and its one line where it cannot."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SERVE = Path(__file__).resolve().parents[2] / "scripts" / "serve.sh"
PACKAGE = "vllm/models/deepseek_v41/nvidia/specialized_decode"


def serve(*arguments, home: Path, **environment):
    return subprocess.run(
        [str(SERVE), *arguments],
        capture_output=True,
        text=True,
        cwd=home,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "PYTHON": sys.executable,
            **environment,
        },
    )


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path


@pytest.fixture
def fork(tmp_path) -> Path:
    """Stands for an applied tree and its torch; the server prints its arguments."""
    tree = tmp_path / "a tree"
    for package in (PACKAGE, "vllm/entrypoints/cli", "torch"):
        folder = tree / package
        folder.mkdir(parents=True)
        while folder != tree:
            (folder / "__init__.py").touch()
            folder = folder.parent
    (tree / ".stack.json").write_text("{}")
    (tree / "torch/__init__.py").write_text(
        "import os\n"
        "class cuda:\n"
        "    is_available = staticmethod(lambda: bool(os.environ.get('A_GPU')))\n"
    )
    (tree / PACKAGE / "deployment.py").write_text(
        "def describe_platform():\n    return 'the stock decode'\n"
    )
    (tree / "vllm/entrypoints/cli/main.py").write_text(
        "import json, sys\nprint(json.dumps(sys.argv[1:]))\n"
    )
    return tree


def dry_run(*arguments, home):
    result = serve(*arguments, "--dry-run", home=home)
    assert (result.returncode, result.stderr) == (0, "")
    return shlex.split(result.stdout)


def value_of(command: list[str], option: str) -> str:
    assert command.count(option) == 1
    return command[command.index(option) + 1]


def test_defaults(home):
    command = dry_run("a/model", home=home)
    assert command[:4] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    assert command[-1] == "a/model"
    assert value_of(command, "--kv-cache-dtype") == "fp8"
    graphs = json.loads(value_of(command, "--compilation-config"))
    assert graphs == {"cudagraph_mode": "FULL_AND_PIECEWISE"}
    backend = json.loads(value_of(command, "--additional-config"))
    assert backend == {"decode_backend": "auto"}
    assert "--load-format" not in command


@pytest.mark.parametrize("layers", ["40", "8"])
def test_a_proxy_has_no_weights(home, layers):
    command = dry_run("--proxy", layers, home=home)
    assert command[4].endswith(f"/proxy-{layers}")
    assert value_of(command, "--load-format") == "dummy"
    assert json.loads(value_of(command, "--limit-mm-per-prompt")) == {"image": 0}
    assert not Path(command[4]).exists()


def test_a_proxy_of_one_rank(home):
    command = dry_run("--proxy", "40", "--rank-of", "8", home=home)
    assert command[4].endswith("/proxy-40-rank-of-8")
    assert value_of(command, "--served-model-name") == "dsv41-proxy-40-rank-of-8"
    assert "--worker-cls" not in command
    command = dry_run("--proxy=40", "--rank-of=8", "--expert-parallel", home=home)
    assert command[4].endswith("/proxy-40-rank-of-8-expert-parallel")
    worker = value_of(command, "--worker-cls")
    assert worker == "proxy_model.expert_parallel.Worker"


@pytest.mark.parametrize(
    "given",
    [
        ["--kv-cache-dtype", "auto"],
        ["--kv-cache-dtype=auto"],
        ["--additional-config.decode_backend", "stock"],
        ["--max-num-seqs", "4"],
    ],
)
def test_what_is_given_wins(home, given):
    command = dry_run("--proxy=8", *given, home=home)
    assert command[-len(given) :] == given
    name = given[0].split("=")[0].split(".")[0]
    assert [word for word in command if word.startswith(name)] == [given[0]]


def test_everything_else_passes_through(home):
    command = dry_run("m", "--port", "9", "--api-key", "a b", home=home)
    assert command[-5:] == ["m", "--port", "9", "--api-key", "a b"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--proxy", "7"], "--proxy 7: choose 40 or 8"),
        (["--proxy"], "--proxy needs a value; see --help"),
        (["--proxy", "8", "--rank-of", "3"], "--rank-of 3: choose 1, 2, 4 or 8"),
        (
            ["--proxy", "8", "--expert-parallel"],
            "--expert-parallel needs --rank-of 2, 4 or 8",
        ),
        (
            ["--rank-of", "8", "m"],
            "--rank-of and --expert-parallel are a proxy's: give --proxy 40 or 8 too",
        ),
        ([], "give a model, as for 'vllm serve', or --proxy 40; see --help"),
        (
            ["--proxy", "8", "--python", "/no/such"],
            "--python /no/such: there is no such program",
        ),
    ],
)
def test_bad_input_is_one_line(home, arguments, line):
    result = serve(*arguments, home=home)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"serve.sh: {line}\n"


def test_without_a_gpu_it_says_what_it_would_get(home, fork):
    result = serve("--proxy", "8", home=home, PYTHONPATH=str(fork))
    assert result.returncode == 1
    assert result.stderr == "serve.sh: no NVIDIA GPU here: run this on a GPU node\n"
    assert result.stdout == "this deployment would get: the stock decode\n"
    assert not (home / ".cache").exists()


def test_without_a_gpu_and_a_broken_package(home, fork):
    (fork / PACKAGE / "deployment.py").unlink()
    result = serve("m", home=home, PYTHONPATH=str(fork))
    assert result.returncode == 1
    assert "cannot be imported" in result.stdout
    assert "Traceback" not in result.stderr


def test_another_vllm_is_refused(home, fork):
    (fork / ".stack.json").unlink()
    result = serve("m", home=home, PYTHONPATH=str(fork), A_GPU="1")
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "pip install -e vllm" in result.stderr


def test_on_a_gpu_it_writes_the_proxy_and_serves(home, fork):
    result = serve(
        "--proxy", "8", "--port", "1", home=home, PYTHONPATH=str(fork), A_GPU="1"
    )
    assert (result.returncode, result.stderr) == (0, "")
    arguments = json.loads(result.stdout)
    assert arguments[0] == "serve"
    assert arguments[-2:] == ["--port", "1"]
    model = Path(arguments[1])
    assert sorted(p.name for p in model.iterdir()) == [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    # Written again over itself.
    again = serve("--proxy", "8", home=home, PYTHONPATH=str(fork), A_GPU="1")
    assert again.returncode == 0


def test_on_a_gpu_it_writes_the_proxy_of_a_rank(home, fork):
    result = serve(
        *("--proxy", "8", "--rank-of", "4", "--expert-parallel"),
        home=home,
        PYTHONPATH=str(fork),
        A_GPU="1",
    )
    assert (result.returncode, result.stderr) == (0, "")
    model = Path(json.loads(result.stdout)[1])
    text = json.loads((model / "config.json").read_text())["text_config"]
    assert (text["num_attention_heads"], text["n_routed_experts"]) == (16, 384)
    assert text["proxy_expert_parallel_size"] == 4


def test_help(home):
    result = serve("--help", home=home)
    assert result.returncode == 0
    assert result.stdout.startswith("usage: serve.sh")


def test_user_without_a_home(home):
    done = serve("--proxy", "8", "--dry-run", home=home, HOME="")
    assert done.returncode == 1
    assert done.stderr == (
        "serve.sh: set HOME or XDG_CACHE_HOME: the proxy's files are written below it\n"
    )
