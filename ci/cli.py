"""What the commands of this folder do alike: how they start, speak, fail and end.

Exit codes: 0 where all is well, `FOUND` where a check has found a fault, `FAILED`
where the work could not be done, 128 and the signal's number where it was stopped.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

REPO = Path(__file__).resolve().parents[1]
# The commands build on the patch-stack tool, whose folder is on no one's path.
sys.path.insert(0, str(REPO / "scripts"))

from patchstack.errors import StackError as Fault  # noqa: E402
from patchstack.progress import heartbeat, note  # noqa: E402

__all__ = ["FAILED", "FOUND", "REPO", "Fault", "Stopped", "fail", "note", "run"]

FOUND = 1
FAILED = 2


class Stopped(BaseException):
    """SIGTERM or SIGHUP: unwinds like an interrupt, so that scratch files go."""


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    raise Stopped(number)


def fail(text: str, code: int = FAILED) -> int:
    """Say in one line what went wrong; returns `code`."""
    # A path may hold line feeds.
    print("error: " + text.replace("\n", "\\n"), file=sys.stderr, flush=True)
    return code


def run(
    parse: Callable[[Sequence[str] | None], argparse.Namespace],
    command: Callable[[argparse.Namespace], int],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run `command` with what `parse` makes of the arguments; returns its exit code.

    A `Fault`, an error of the operating system and a signal each end in one line on
    stderr. What takes long without a word is named there all the while.
    """
    options = parse(arguments)
    before = {it: signal.signal(it, _stop) for it in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with heartbeat("starting"):
            return command(options)
    except Fault as fault:
        return fail(str(fault))
    except OSError as fault:
        said = fault.strerror or str(fault)
        return fail(f"{fault.filename}: {said}" if fault.filename else said)
    except KeyboardInterrupt:
        return fail("interrupted: run it again when you like", 128 + signal.SIGINT)
    except Stopped as stopped:
        return fail("stopped: run it again when you like", 128 + stopped.args[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
