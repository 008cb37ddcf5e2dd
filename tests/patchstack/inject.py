"""Run the tool of a checkout with an event at a point in it.

Arguments: the checkout, `EVENT:before|after:MODULES.NAME`, then the command.  With
`*N` after the name the event is at the Nth call only.
"""

import importlib
import itertools
import os
import signal
import sys
import time
from pathlib import Path

repo, point, *command = sys.argv[1:]
sys.path.insert(0, str(Path(repo) / "scripts"))
event, when, target = point.split(":")
target, _, number = target.partition("*")


def act():
    if event == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif event in ("SIGINT", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, event))
        time.sleep(0.01)
    elif event == "pause":
        print("paused", flush=True)
        sys.stdin.readline()
    elif event == "save":
        # As an editor does: write beside, rename over.
        own = Path(repo) / "vllm" / "vllm" / "ours.py"
        beside = own.with_name("ours.py~")
        beside.write_text("OURS = 'saved meanwhile'\n")
        beside.replace(own)
    elif event == "edit":
        place = Path(repo) / "vllm" / "vllm" / "layers.py"
        place.write_text(place.read_text() + "EDITED = True\n")
    elif event == "full":
        raise OSError(28, "No space left on device")
    else:
        raise SystemExit(f"no such event: {event}")


def wrap(original):
    calls = itertools.count(1)

    def wrapped(*args, **kwargs):
        meant = next(calls) == int(number) if number else True
        if when == "before" and meant:
            act()
        result = original(*args, **kwargs)
        if when == "after" and meant:
            act()
        return result

    return wrapped


*parents, name = target.split(".")
holder = importlib.import_module("patchstack")
for parent in parents:
    if not hasattr(holder, parent):
        importlib.import_module(f"{holder.__name__}.{parent}")
    holder = getattr(holder, parent)
if name == "_exchange":
    # A system that cannot exchange folders: the two renames of the fallback.
    holder._exchange = lambda a, b: False
    holder, name = Path, "rename"
    original, calls = Path.rename, []

    def rename(self, target):
        result = original(self, target)
        calls.append(target)
        if Path(target).name == "old":
            act()
        return result

    Path.rename = rename
else:
    setattr(holder, name, wrap(getattr(holder, name)))

from patchstack import __main__  # noqa: E402

sys.exit(__main__.main(command))
