"""Command line, called by `scripts/COMMAND.sh`."""

import argparse
import errno
import importlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from .errors import StackError

COMMANDS = ("apply", "refresh", "status", "doctor", "rebase", "export")
_WHOLE = "the tree is whole: run it again when you like"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Terminated(BaseException):
    """SIGTERM or SIGHUP: unwinds like an interrupt, so that scratch files go."""


def _terminate(number: int, _frame: FrameType | None) -> None:
    raise _Terminated(number)


def main(argv: list[str]) -> int:
    name = argv[0] if argv else ""
    if name not in COMMANDS:
        print(f"error: no such command: {name!r}", file=sys.stderr)
        return 2
    command = importlib.import_module(f".{name}", __package__)
    parser = argparse.ArgumentParser(prog=f"scripts/{name}.sh")
    command.add_arguments(parser)
    options = parser.parse_args(argv[1:])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)
    try:
        return command.run(_repo(), options)
    except StackError as fault:
        text = str(fault)
        if "No space left on device" in text:
            text = _disk_full()
        return _fail(text, 1)
    except KeyboardInterrupt:
        return _fail(f"interrupted: {_WHOLE}", 128 + signal.SIGINT)
    except _Terminated as stop:
        return _fail(f"stopped: {_WHOLE}", 128 + stop.args[0])
    except BrokenPipeError:
        # The reader of our output has gone: there is no one to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as fault:
        if fault.errno in _FULL:
            return _fail(_disk_full(), 1)
        where = f"{fault.filename}: " if fault.filename else ""
        return _fail(f"{where}{fault.strerror or fault}: mend that and run again", 1)


def _repo() -> Path:
    return Path(__file__).resolve().parents[2]


def _disk_full() -> str:
    return (
        "the disk is full: apply needs about 2 GB free beside vllm/ and in the "
        "cache: free some and run again"
    )


def _fail(text: str, code: int) -> int:
    print(f"error: {text}", file=sys.stderr)
    return code
