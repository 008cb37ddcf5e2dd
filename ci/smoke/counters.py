"""The counters that the server logs about its metadata builds."""

import re

_LINE = re.compile(r"decode metadata: (in_graph=[^\n]*)")
_PAIR = re.compile(r"(\w+)=(\d+)")
SERVED = ("in_graph", "replay", "launch")
REQUIRED = (*SERVED, "eager", "full_decode_steps")


def last(log: str) -> dict[str, int] | None:
    """The newest counters in a server's log, or None where there are none.

    The counters and, by its name, each reason for an eager build.
    """
    lines = _LINE.findall(log)
    if not lines:
        return None
    counters = {name: int(value) for name, value in _PAIR.findall(lines[-1])}
    return counters if all(name in counters for name in REQUIRED) else None


def faults(counters: dict[str, int] | None, least: float = 0.95) -> list[str]:
    """What is wrong with the counters, each in one line; nothing if all is well.

    More than ``least`` of the FULL decode steps must have been served without an
    eager build, and none for want of a recording.
    """
    if counters is None:
        return ["the server's log has no 'decode metadata:' line"]
    steps = counters["full_decode_steps"]
    served = sum(counters[way] for way in SERVED)
    if steps == 0:
        return ["the server ran no FULL decode step"]
    found = []
    if served <= least * steps:
        found.append(
            f"{served} of {steps} FULL decode steps went without an eager metadata "
            f"build; more than {least:.0%} must"
        )
    if missed := counters.get("unrecorded"):
        found.append(f"{missed} FULL decode steps found no recording of their shape")
    return found
