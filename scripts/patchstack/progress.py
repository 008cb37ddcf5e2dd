"""Progress for people, on stderr, so that stdout stays for results."""

import sys
import time

PERIOD_S = 2.0


def note(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


class Ticker:
    """Says how far a long step is, at most once in `PERIOD_S` seconds."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.last = time.monotonic()

    def tick(self, how_far: str) -> None:
        now = time.monotonic()
        if now - self.last >= PERIOD_S:
            self.last = now
            note(f"{self.text}: {how_far}")
