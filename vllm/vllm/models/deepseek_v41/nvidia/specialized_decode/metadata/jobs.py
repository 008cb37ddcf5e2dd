# SPDX-License-Identifier: Apache-2.0
"""What upstream's metadata builders write of a decode step, as jobs of one launch.

For each builder, in the one table of those that are known: which tensors of the
metadata it made are refreshed in every step, and from which device data. What DeepGEMM
adds to that, its schedule of the indexer's paged logits, is a job too where its way to
share out the work is known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.models.deepseek_v41.compressor import CompressorMetadataBuilder
from vllm.models.deepseek_v41.nvidia.flashinfer_sparse import (
    DeepseekSparseSWAFlashInferMetadataBuilder,
    DeepseekV4FlashInferSparseMLAMetadataBuilder,
)
from vllm.models.deepseek_v41.nvidia.flashmla import (
    DeepseekSparseSWAFlashMLAMetadataBuilder,
)
from vllm.models.deepseek_v41.sparse_mla import (
    DeepseekV4FlashMLAMetadataBuilder,
    DeepseekV4SparseMLAMetadataBuilder,
)
from vllm.v1.attention.backends.mla import indexer
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder
from vllm.v1.attention.backends.mla.sparse_indexer import (
    DeepseekV41SparseIndexerMetadataBuilder,
)
from vllm.v1.worker.utils import AttentionGroup

from .kernel import Job, Kind


class DecodeInputs(NamedTuple):
    """The device data a decode step's metadata follows from, all persistent.

    For P requests of T tokens, both with padding: ``query_start_loc`` [P + 1]
    int32, ``seq_lens`` [P] int32, ``positions`` [T] int64, ``replay_start`` [P]
    int32; ``block_tables``, one [P, blocks] int32 a KV-cache group, and
    ``slot_mappings`` [groups, T] int64.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    replay_start: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: torch.Tensor

    @property
    def num_reqs(self) -> int:
        """Requests of the shape, padding included."""
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of the shape, padding included."""
        return self.positions.shape[0]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them."""
        *arrays, block_tables, slot_mappings = self
        return (*arrays, *block_tables, slot_mappings)


@dataclass(frozen=True)
class _Source:
    """What the jobs of one attention group read."""

    slots: torch.Tensor
    table: torch.Tensor
    clamp: bool
    split: int = 1
    scale: int = 1

    @classmethod
    def of(
        cls,
        group: AttentionGroup,
        slots: torch.Tensor,
        table: torch.Tensor,
        clamp: bool,
    ) -> "_Source":
        """For groups whose kernels see smaller blocks, as ``AttentionGroup`` maps
        them.
        """
        if group.kernel_block_size is None:
            return cls(slots, table, clamp)
        split = group.kv_cache_spec.block_size // group.kernel_block_size
        return cls(slots, table, clamp, split, group.kernel_block_stride or split)

    def job(self, kind: Kind, *outs: torch.Tensor | None, **values: int) -> Job:
        addresses = [0 if out is None else out.data_ptr() for out in outs]
        first, second, third, fourth = addresses + [0] * (4 - len(addresses))
        return Job(
            kind,
            (first, second, third, fourth),
            slots=self.slots.data_ptr(),
            table=self.table.data_ptr(),
            table_stride=self.table.stride(0),
            split=self.split,
            scale=self.scale,
            clamp=self.clamp,
            **values,
        )

    def table_job(self, kind: Kind, out: torch.Tensor) -> Job:
        return self.job(
            kind, out, out_stride=out.stride(0), out_columns=self.columns_of(out)
        )

    def columns_of(self, out: torch.Tensor) -> int:
        return min(out.shape[1], self.table.shape[1] * self.split)


def _window_jobs(builder: Any, metadata: Any, source: _Source) -> list[Job]:
    indices = metadata.decode_swa_indices
    return [
        source.job(Kind.REQUEST, metadata.token_to_req_indices),
        source.job(
            Kind.WINDOW,
            metadata.is_valid_token,
            metadata.decode_swa_lens,
            indices,
            out_stride=indices.stride(0),
            block_size=metadata.block_size,
            window=builder.window_size,
        ),
    ]


def _compressed_kv_jobs(builder: Any, metadata: Any, source: _Source) -> list[Job]:
    jobs = [source.job(Kind.REQUEST, metadata.req_id_per_token)]
    if builder.compress_ratio > 1:
        jobs.append(_compressed_slots(builder, metadata.slot_mapping, source))
    return jobs


def _compressed_slots(builder: Any, out: torch.Tensor, source: _Source) -> Job:
    return source.job(
        Kind.COMPRESSED_SLOT,
        out,
        block_size=int(builder.kv_cache_spec.num_states),
        ratio=builder.compress_ratio,
    )


def _ring_jobs(builder: Any, metadata: Any, source: _Source) -> list[Job]:
    return [
        source.job(Kind.REQUEST, metadata.token_to_req_indices),
        source.job(Kind.RING_SLOT, metadata.slot_mapping, block_size=builder.capacity),
    ]


def _indexer_jobs(builder: Any, metadata: Any, source: _Source) -> list[Job]:
    decode = metadata.decode
    ratio = builder.compress_ratio
    jobs = []
    if ratio > 1:
        jobs.append(_compressed_slots(builder, metadata.slot_mapping, source))
    # Without compression and speculation the lengths are those of the requests,
    # which nothing has to write.
    states = decode.seq_lens
    if states.data_ptr() == metadata.seq_lens.data_ptr():
        states = None
    query_lens = decode.per_req_decode_lens
    per_token = decode.block_table.data_ptr() == (
        builder.expanded_block_table_buffer.data_ptr()
    )
    outs: list[tuple[torch.Tensor | None, ...]]
    if per_token:
        outs = [(states, query_lens, decode.decode_lens, decode.indices)]
        jobs.append(source.table_job(Kind.TOKEN_TABLE, decode.block_table))
    else:
        outs = [(states, query_lens), (None, decode.decode_lens)]
    return jobs + [source.job(Kind.CONTEXT, *each, ratio=ratio) for each in outs]


def _clamps(builder: Any) -> bool:
    """Whether the builder takes negative blocks for the null block, in its table
    itself.
    """
    return isinstance(builder, DeepseekV4SparseMLAMetadataBuilder) and (
        builder.compress_ratio > 1
    )


_JOBS: dict[type, Callable[[Any, Any, _Source], list[Job]]] = {
    # SM90, SM100 FlashMLA and SM100 mega attention.
    DeepseekSparseSWAFlashMLAMetadataBuilder: _window_jobs,
    DeepseekV4FlashMLAMetadataBuilder: _compressed_kv_jobs,
    # SM100 and SM120 FlashInfer.
    DeepseekSparseSWAFlashInferMetadataBuilder: _window_jobs,
    DeepseekV4FlashInferSparseMLAMetadataBuilder: _compressed_kv_jobs,
    # Every architecture. Whether the indexer takes its branch for queries of one length
    # or of several, it writes the same tensors.
    CompressorMetadataBuilder: _ring_jobs,
    DeepseekV32IndexerMetadataBuilder: _indexer_jobs,
    DeepseekV41SparseIndexerMetadataBuilder: _indexer_jobs,
}


# What one unit of DeepGEMM's schedule for SM90 covers, in states.
_SM90_UNIT = 256


class Schedule(NamedTuple):
    """DeepGEMM's schedule of one indexer's paged logits.

    ``job`` writes it too, where DeepGEMM divides the work as on SM90
    (``sm90_paged_mqa_logits_metadata`` in its scheduler/sm90_paged_mqa_logits.cuh).
    """

    context_lens: torch.Tensor
    indices: torch.Tensor | None
    block_size: int
    num_sms: int
    out: torch.Tensor
    job: Job | None

    @classmethod
    def of(cls, builder: Any, decode: Any, num_tokens: int) -> list["Schedule"]:
        """That of ``builder``, if it makes one."""
        platform = indexer.current_platform
        if not (platform.is_cuda() and indexer.has_deep_gemm()):
            return []
        context_lens, out = decode.seq_lens, decode.schedule_metadata
        job = None
        if (
            platform.is_device_capability_family(90)
            and decode.indices is None
            and context_lens.numel() == num_tokens
        ):
            job = Job(
                Kind.SCHEDULE,
                (out.data_ptr(), 0, 0, 0),
                block_size=_SM90_UNIT,
                ratio=builder.compress_ratio,
                workers=out.shape[0] - 1,
                item_tokens=context_lens.shape[1],
            )
        return [
            cls(
                context_lens,
                decode.indices,
                builder.kv_cache_spec.num_states,
                builder.num_sms,
                out,
                job,
            )
        ]

    def write(self) -> None:
        """Let DeepGEMM make it anew."""
        self.out.copy_(
            indexer.get_paged_mqa_logits_metadata(
                self.context_lens, self.block_size, self.num_sms, indices=self.indices
            )
        )


def knows(builder: Any) -> bool:
    """Whether the build of ``builder`` is known: that of its exact type, as a subclass
    may override anything.

    Known is also that it can be part of a CUDA graph: for the batch that fills a FULL
    graph it launches only capture-safe work (no device-to-host read, no pageable copy)
    into buffers that outlive the step, and leaves in the rows of real requests what it
    leaves for fewer of them.
    """
    return type(builder) in _JOBS


class NotFusedError(RuntimeError):
    """The build of an attention group is none that jobs are known of."""


def jobs_of(
    inputs: DecodeInputs,
    attn_metadata: dict[str, Any],
    attn_groups: Sequence[Sequence[AttentionGroup]],
) -> tuple[list[Job], list[Schedule]]:
    """The jobs that refresh decode-only ``attn_metadata``, which the builders of
    ``attn_groups`` made of ``inputs``, and the schedules of DeepGEMM in it.

    Raises NotFusedError where a build is unknown, or other than expected.
    """
    # By what they write: groups share a token-to-request map.
    jobs: dict[tuple[int, ...], Job] = {}
    schedules: list[Schedule] = []
    # Addresses of the block tables read so far, and of those that a builder has
    # clamped in place, as later groups see them.
    read: set[int] = set()
    clamped: set[int] = set()
    for index, groups in enumerate(attn_groups):
        table = inputs.block_tables[index]
        address = table.data_ptr()
        for group in groups:
            builder = group.get_metadata_builder()
            name = type(builder).__name__
            if not knows(builder):
                raise NotFusedError(f"{name} is unknown")
            metadata = attn_metadata[group.layer_names[0]]
            clamps = _clamps(builder)
            in_place = clamps and group.kernel_block_size is None
            if in_place and address in read:
                # One launch has no order: the group before it may see the clamp.
                raise NotFusedError("a block table is read before it is clamped")
            source = _Source.of(
                group, inputs.slot_mappings[index], table, clamps or address in clamped
            )
            try:
                of_group = _JOBS[type(builder)](builder, metadata, source)
                if isinstance(builder, DeepseekV32IndexerMetadataBuilder):
                    schedules += Schedule.of(
                        builder, metadata.decode, inputs.num_tokens
                    )
            except Exception as error:
                # Another version of the builder may lack what the jobs follow from.
                raise NotFusedError(f"{name}: {error!r}") from error
            if group.kernel_block_table is not None:
                kernel_table = group.kernel_block_table[0, : inputs.num_reqs]
                of_group.append(source.table_job(Kind.TABLE, kernel_table))
            elif in_place:
                of_group.append(source.table_job(Kind.TABLE, table))
                clamped.add(address)
            read.add(address)
            jobs |= {(job.kind, *job.outs): job for job in of_group}
    return list(jobs.values()), schedules
