"""The frame of ci's commands: every end is one line and an exit code."""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import cli
import pytest
from cli import Fault

CI = Path(cli.__file__).parent


def parse(_arguments):
    return argparse.Namespace()


def ends(with_what):
    def command(_options):
        raise with_what

    return cli.run(parse, command, [])


@pytest.mark.parametrize("code", [0, cli.FOUND])
def test_the_command_s_own_code_is_kept(code):
    assert cli.run(parse, lambda options: code, []) == code


@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        (Fault("no such\nfile: make it"), cli.FAILED, "no such\\nfile: make it"),
        (PermissionError(13, "Denied", "/x"), cli.FAILED, "/x: Denied"),
        (OSError("no more sockets"), cli.FAILED, "no more sockets"),
        (KeyboardInterrupt(), 130, "interrupted: run it again when you like"),
    ],
)
def test_each_fault_is_one_line(fault, code, line, capsys):
    assert ends(fault) == code
    assert capsys.readouterr().err == f"error: {line}\n"


def test_a_bug_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        ends(ZeroDivisionError())


def test_a_signal_ends_it_and_is_handled_as_before_afterwards(capsys):
    before = signal.getsignal(signal.SIGTERM)

    def command(_options):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    assert cli.run(parse, command, []) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "error: stopped: run it again when you like\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_it_finds_the_patch_stack_tool_by_itself():
    script = "import cli; from patchstack import stack; print(cli.REPO)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(CI)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{CI.parent}\n"
