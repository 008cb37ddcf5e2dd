# SPDX-License-Identifier: Apache-2.0
"""Serving steps held to upstream's eager build, for who wants to see it on their own.

The proof at start-up is made of drawn steps; this compares real ones. It waits for the
device and holds copies of the buffers, so it is off unless it is asked for.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..runtime.metadata_graphs import Kept
from .key import GraphKey
from .outputs import Padding, outputs_of, paddings, same_rows
from .padded_builds import PaddedBuilds
from .stats import Way


class Verifier:
    """Compares every ``every``-th step of those that are served."""

    def __init__(self, every: int, builds: PaddedBuilds) -> None:
        self._every = every
        self._builds = builds
        self._steps = 0

    def due(self) -> bool:
        """Whether the step, which this counts, is one to compare."""
        self._steps += 1
        return self._steps % self._every == 0

    def difference(
        self,
        key: GraphKey,
        kept: Kept,
        num_tokens: int,
        build_eagerly: Callable[[], Any],
    ) -> str | None:
        """Where what ``kept`` leaves for a step of ``num_tokens`` real tokens is other
        than what ``build_eagerly``, upstream's build of the step, leaves; or None.

        The buffers hold the latter then.
        """
        fused = kept.fused
        metadata = kept.attn_metadata if fused is None else fused.attn_metadata
        outputs = outputs_of(metadata, self._builds.inputs(key))
        if kept.way == Way.IN_GRAPH and fused is not None:
            # The forward graph has yet to do it.
            fused.launch()
        ours = {path: tensor.clone() for path, tensor in outputs.items()}
        build_eagerly()
        if fused is None:
            # As upstream's build of the full batch leaves them.
            padding: dict[str, Padding] = {
                path: lambda _: True
                for path, tensor in outputs.items()
                if tensor.shape[0] == key.num_tokens
            }
        else:
            padding = paddings(fused.jobs, outputs, key.num_reqs)
        for path, want in outputs.items():
            if not same_rows(ours[path], want, num_tokens, padding.get(path)):
                return _described(path, ours[path], want)
        return None


def _described(path: str, ours: torch.Tensor, want: torch.Tensor) -> str:
    """The rows in which ``ours`` is not ``want``, and the first such values."""
    at = (ours != want).nonzero()
    rows = at[:, 0].unique().tolist()
    first = tuple(at[0].tolist())
    few = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    return f"{path}, rows {few} of {len(ours)}: {ours[first]} for {want[first]}"
