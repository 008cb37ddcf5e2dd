"""Progress for people, on stderr, so that stdout stays for results."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PERIOD_S = 2.0


class _Step:
    """What is being done, and since when nothing was said of it."""

    text = ""
    began = 0.0


def note(text: str) -> None:
    """Say which step begins, or how far it is."""
    step(text)
    print(f"  {text}", file=sys.stderr, flush=True)


def step(text: str) -> None:
    """Name a step that is worth a word only if it takes long."""
    _Step.text, _Step.began = text, time.monotonic()


class Ticker:
    """Says how far a long step is, at most once in `PERIOD_S` seconds."""

    def __init__(self, text: str) -> None:
        """Name the step."""
        self.text = text
        self.last = time.monotonic()

    def tick(self, how_far: str) -> None:
        """Say it, if it is time."""
        now = time.monotonic()
        if now - self.last >= PERIOD_S:
            self.last = now
            note(f"{self.text}: {how_far}")


@contextmanager
def heartbeat(text: str) -> Iterator[None]:
    """Show that a step goes on that says nothing itself: after 2 s, 4 s, 8 s, ..."""
    step(text)
    done = threading.Event()
    thread = threading.Thread(target=_beat, args=(done,), daemon=True)
    # A thread inherits what is blocked: signals are for the main thread alone, which
    # may have put them off.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    thread.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield
    finally:
        done.set()
        thread.join()


def _beat(done: threading.Event) -> None:
    began, due = _Step.began, PERIOD_S
    while not done.wait(PERIOD_S / 10):
        if began != _Step.began:
            began, due = _Step.began, PERIOD_S
        elif time.monotonic() - began >= due:
            print(f"  {_Step.text}: {due:.0f} s", file=sys.stderr, flush=True)
            due *= 2
