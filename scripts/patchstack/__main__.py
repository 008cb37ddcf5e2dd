"""Command line, called by `scripts/COMMAND.sh`."""

import argparse
import errno
import importlib
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from types import FrameType

from .errors import StackError
from .git import GitError
from .progress import heartbeat

COMMANDS = ("apply", "refresh", "status", "doctor", "rebase", "export")
_WHOLE = "the tree is whole: run it again when you like"
_HISTORY = (
    "if .tree.git is damaged, delete it and run scripts/apply.sh, which makes it again"
)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_GIT_FULL = ("No space left on device", "Out of diskspace", "Disk quota exceeded")
_LITTLE = 1 << 20


class _Terminated(BaseException):
    """SIGTERM or SIGHUP: unwinds like an interrupt, so that scratch files go."""


def _terminate(number: int, _frame: FrameType | None) -> None:
    raise _Terminated(number)


def main(argv: list[str]) -> int:
    """Run `COMMAND ARGUMENTS...`; returns the exit code."""
    name = argv[0] if argv else ""
    if name not in COMMANDS:
        print(f"error: no such command: {name!r}", file=sys.stderr)
        return 2
    command = importlib.import_module(f".commands.{name}", __package__)
    parser = argparse.ArgumentParser(prog=f"scripts/{name}.sh")
    command.add_arguments(parser)
    options = parser.parse_args(argv[1:])
    # Modes in the tree are the release's, whoever applies it.
    os.umask(0o022)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)
    _take_any_name()
    try:
        with heartbeat(name):
            code: int = command.run(_repo(), options)
        if sys.stdout:
            # Here, where a reader that has gone can still be seen.
            sys.stdout.flush()
    except (KeyboardInterrupt, _Terminated) as stop:
        code = _stopped(stop)
    except BrokenPipeError:
        # The reader of our output has gone: there is no one to tell.
        _mute()
        code = 1
    except StackError as fault:
        code = _fail(_explained(fault), 1)
    except OSError as fault:
        _mute()
        code = _fail(_disk_full() if fault.errno in _FULL else _said(fault), 1)
    return code


def _stopped(stop: BaseException) -> int:
    if isinstance(stop, _Terminated):
        return _fail(f"stopped: {_WHOLE}", 128 + stop.args[0])
    return _fail(f"interrupted: {_WHOLE}", 128 + signal.SIGINT)


def _take_any_name() -> None:
    """File names may be any bytes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _explained(fault: StackError) -> str:
    text = str(fault)
    if any(said in text for said in _GIT_FULL):
        return _disk_full()
    return f"git failed: {text}: {_HISTORY}" if isinstance(fault, GitError) else text


def _said(fault: OSError) -> str:
    where = " -> ".join(map(str, filter(None, (fault.filename, fault.filename2))))
    said = fault.strerror or str(fault)
    return (f"{where}: {said}" if where else said) + ": mend that and run again"


def _repo() -> Path:
    return Path(__file__).resolve().parents[2]


def _disk_full() -> str:
    # What was written beside the tree is gone by now, and has left room.
    with suppress(OSError):
        temporary = Path(tempfile.gettempdir())
        if shutil.disk_usage(temporary).free < _LITTLE:
            return (
                f"the disk of {temporary} is full: free some of it, or set TMPDIR to "
                "another folder, and run again"
            )
    return (
        "the disk is full: apply needs about 2 GB free beside vllm/ and in the "
        "cache: free some and run again"
    )


def _mute() -> None:
    """Let what stdout still holds go nowhere, instead of failing again at exit."""
    with suppress(AttributeError, OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(text: str, code: int) -> int:
    # A path may hold line feeds; the fault stays one line.
    print("error: " + text.replace("\n", "\\n"), file=sys.stderr)
    return code
