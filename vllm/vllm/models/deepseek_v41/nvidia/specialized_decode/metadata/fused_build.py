# SPDX-License-Identifier: Apache-2.0
"""The attention metadata of a decode step, all KV-cache groups in one launch.

Upstream's builders refresh the buffers of one KV-cache group after the other,
in two to twenty small launches each. ``FusedBuild`` writes the same bytes from
the same device data at once. It starts from metadata that those builders made
for the padded shape of the step: the tensors of that metadata are what a FULL
forward graph reads, so they are what it writes. A schedule of the indexer's paged
logits that it does not know is left to DeepGEMM.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from vllm.logger import init_logger
from vllm.v1.worker.utils import AttentionGroup

from .jobs import DecodeInputs, NotFusedError, Schedule, jobs_of
from .kernel import Job, Kind, job_table, longest_window, write_decode_metadata
from .key import GraphKey
from .tensors import View

logger = init_logger(__name__)

# Per KV-cache group, its attention groups; empty for a group left out.
AttnGroups = list[list[AttentionGroup]]
# Builds the metadata of the attention groups it is given, by layer name.
BuildFn = Callable[[AttnGroups], dict[str, Any]]


class UpstreamBuild(Protocol):
    """A ``BuildFn`` that calls upstream's builders for one padded shape."""

    def __call__(
        self, attn_groups: AttnGroups, query_lens: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """``query_lens`` [requests] are those of a step of a variable-length graph,
        whose sum some builders read on the host; None: those of the batch that fills
        the graph.
        """
        ...


@dataclass
class FusedBuild:
    """The build of the decode steps of ``key``, in as few launches as can be.

    ``attn_metadata`` is what upstream's builders made of that shape.
    """

    key: GraphKey
    max_query_len: int | None
    """The longest query of a variable-length graph; None: each is as long."""
    inputs: DecodeInputs
    attn_metadata: dict[str, Any]
    attn_groups: AttnGroups
    _jobs: list[Job]
    _schedules: list[Schedule]
    _max_num_reqs: int
    _max_window: int

    @property
    def jobs(self) -> list[Job]:
        """All that the launch writes."""
        schedules = [each.job for each in self._schedules if each.job is not None]
        return self._jobs + schedules

    @cached_property
    def _job_table(self) -> torch.Tensor:
        inputs = self.inputs
        return job_table(
            self.jobs, inputs.num_reqs, inputs.num_tokens, inputs.seq_lens.device
        )

    @classmethod
    def of(
        cls,
        key: GraphKey,
        max_query_len: int | None,
        inputs: DecodeInputs,
        attn_metadata: dict[str, Any],
        attn_groups: AttnGroups,
        max_num_reqs: int,
    ) -> "FusedBuild | None":
        """The fused build of decode-only ``attn_metadata``, which the builders of
        ``attn_groups`` made of ``inputs``; None, logged, where one of those builds is
        not known. Does no work on the device.
        """
        try:
            jobs, schedules = jobs_of(inputs, attn_metadata, attn_groups)
        except NotFusedError as error:
            logger.warning_once(
                "DeepSeek-V4.1 decode: no fused metadata build: %s.", str(error)
            )
            return None
        return cls(
            key,
            max_query_len,
            inputs,
            attn_metadata,
            attn_groups,
            jobs,
            schedules,
            max_num_reqs,
            longest_window(jobs),
        )

    def launch(self) -> None:
        """Refresh the buffers of the metadata from the inputs' present values.

        The first launch copies the table of jobs to the device, and may compile.
        """
        inputs = self.inputs
        write_decode_metadata(
            self._job_table,
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.positions,
            inputs.replay_start,
            inputs.num_reqs,
            inputs.num_tokens,
            self._max_num_reqs,
            self._max_window,
        )
        for schedule in self._schedules:
            if schedule.job is None:
                schedule.write()

    def disable(self) -> None:
        """Let no launch write anything any more, those in captured graphs included.

        What DeepGEMM makes beside it is what upstream's builder lets it make.
        """
        # A table without columns.
        nothing = Job(Kind.TABLE, (0, 0, 0, 0))
        self._job_table.copy_(torch.tensor(nothing.row()))

    @property
    def knows_schedules(self) -> bool:
        """Whether the launch writes a schedule of DeepGEMM's."""
        return any(schedule.job is not None for schedule in self._schedules)

    def with_deepgemm_schedules(self) -> "FusedBuild":
        """This build with all schedules left to DeepGEMM."""
        schedules = [schedule._replace(job=None) for schedule in self._schedules]
        return replace(self, _schedules=schedules)

    def writes_for(self, other: "FusedBuild") -> bool:
        """Whether this build refreshes the metadata of ``other`` as well."""
        return (
            self._jobs == other._jobs
            and self.max_query_len == other.max_query_len
            and _views(self.inputs) == _views(other.inputs)
            and [schedule.out.data_ptr() for schedule in self._schedules]
            == [schedule.out.data_ptr() for schedule in other._schedules]
        )


def _views(inputs: DecodeInputs) -> list[View]:
    return [View.of(tensor) for tensor in inputs.tensors()]
