# SPDX-License-Identifier: Apache-2.0
"""Which stack this package was made from, for logs, `/version` and metrics.

`scripts/apply.sh` leaves a marker beside the package.  It names the stack and
the sha256 of each file here that is not upstream's, so that an edit made since
then shows.  Both are read once, when this module is imported: an edit under a
running server is none of what runs.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.version import __version__

MARKER = ".stack.json"
UNKNOWN = "unknown"
EDITED = "+edited"

logger = init_logger(__name__)


@dataclass(frozen=True)
class StackIdentity:
    """What runs, in the words of a bug report."""

    base: str
    """The upstream release."""
    stack: str
    """`DIGEST.CONTENT`: of the stack, and of our files' and patched files' text;
    with `+edited` if a file is not as it was applied."""
    version: str
    """The fork's own version."""
    edited: tuple[str, ...] = ()
    """Paths of the files that are not as they were applied."""


def read(tree: Path) -> StackIdentity:
    """The identity of the package in `tree`; `unknown` where nothing tells it."""
    try:
        marker: dict[str, Any] = json.loads((tree / MARKER).read_text())
        base, stack = str(marker["base"]), str(marker["identity"])
        files = dict(marker["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return StackIdentity(UNKNOWN, UNKNOWN, __version__)
    edited = tuple(
        path for path, digest in files.items() if _sha256(tree / path) != digest
    )
    return StackIdentity(base, stack + EDITED * bool(edited), __version__, edited)


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


IDENTITY = read(Path(__file__).resolve().parents[1])


def log_identity() -> None:
    """Say at start-up what runs, for whoever reads a log without the machine."""
    logger.info(
        "vLLM %s with stack %s, version %s",
        IDENTITY.base,
        IDENTITY.stack,
        IDENTITY.version,
    )
    if IDENTITY.edited:
        logger.warning("Edited since the stack was applied: %s", IDENTITY.edited)


def register_identity(gauge_cls: Any) -> None:
    """Export `vllm:stack_info`, a gauge that is always 1.

    Several API servers share their metrics in files, where Prometheus' own info type
    is missing.
    """
    labels = {
        "base": IDENTITY.base,
        "stack": IDENTITY.stack,
        "version": IDENTITY.version,
    }
    gauge = gauge_cls(
        name="vllm:stack_info",
        documentation="The release, the patch stack and the version that run.",
        multiprocess_mode="mostrecent",
        labelnames=list(labels),
    )
    gauge.labels(**labels).set(1)
