# SPDX-License-Identifier: Apache-2.0
"""The steps of a decode by how they got their attention metadata, in Prometheus.

A model state that counts them reports those since its last report with the output of
a step (``ModelRunnerOutput.decode_metadata_steps``) to the engine's scheduler, and that
to one front end (``SchedulerStats.decode_metadata_steps``), as (way, reason, steps) in
plain words and numbers. Of the workers of an engine one reports: the one whose output
the engine reads.
"""

from collections.abc import Sequence
from typing import Any


class DecodeMetadataProm:
    """Exports ``vllm:decode_metadata_steps_total``.

    The share of decode steps whose metadata upstream's builders did not make:

      sum(rate(vllm:decode_metadata_steps_total{way!="eager"}[$interval])) /
      sum(rate(vllm:decode_metadata_steps_total{reason!="not_full"}[$interval]))

    A model whose state counts no such steps has no series.
    """

    def __init__(
        self,
        counter_cls: Any,
        labelnames: Sequence[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        self._labelvalues = per_engine_labelvalues
        # Made here, as the loggers' other metrics are: what an earlier logger of the
        # process has registered under the name is gone only now.
        self._counter = counter_cls(
            name="vllm:decode_metadata_steps_total",
            documentation=(
                "Steps of the model by the way in which they got their attention "
                "metadata; those of way 'eager' by the reason."
            ),
            labelnames=[*labelnames, "way", "reason"],
        )

    def observe(
        self, steps: list[tuple[str, str, int]] | None, engine_idx: int
    ) -> None:
        """Add what an engine has reported; None where its model counts none."""
        for way, reason, number in steps or ():
            labelvalues = self._labelvalues[engine_idx]
            self._counter.labels(*labelvalues, way, reason).inc(number)
