# SPDX-License-Identifier: Apache-2.0
"""Upstream's builds of the batches that fill FULL graphs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from ...model_state import ReplayAttnMetadata
from .fused_build import AttnGroups, FusedBuild, UpstreamBuild
from .jobs import DecodeInputs
from .key import GraphKey


def decode_batch(
    key: GraphKey,
    input_buffers: InputBuffers,
    max_model_len: int,
    max_query_len: int | None = None,
) -> InputBatch:
    """A dummy decode batch that fills the graph of ``key``, in which queries are up to
    ``max_query_len`` tokens long; None: all as long.

    Sequence lengths are the longest on the host, where they are only bounds, so
    that nothing derived from them is too small for a later step.
    """
    return replace(
        InputBatch.make_dummy(
            key.num_reqs, key.num_tokens, input_buffers, max_query_len
        ),
        seq_lens_cpu_upper_bound=torch.full(
            (key.num_reqs,), max_model_len, dtype=torch.int32
        ),
    )


def _with_query_lens(batch: InputBatch, query_lens: Sequence[int]) -> InputBatch:
    """``batch`` on whose host the requests have ``query_lens``, and further ones are
    padding.
    """
    num_tokens = sum(query_lens)
    starts = np.full(batch.num_reqs_after_padding + 1, num_tokens, dtype=np.int32)
    starts[: len(query_lens)] = np.cumsum([0, *query_lens[:-1]])
    return replace(
        batch,
        num_reqs=len(query_lens),
        num_tokens=num_tokens,
        num_scheduled_tokens=np.array(query_lens, dtype=np.int32),
        query_start_loc_np=starts,
    )


@dataclass(frozen=True)
class PaddedBuilds:
    """The builds of one set of the runner's buffers.

    ``build`` is upstream's eager build, ``replay_start`` [max requests] int32 the
    model state's persistent buffer. ``max_query_lens`` has the longest query of each
    variable-length graph.
    """

    build: Callable[..., dict[str, Any]]
    input_buffers: InputBuffers
    block_tables: BlockTables
    attn_groups: AttnGroups
    kv_cache_config: KVCacheConfig
    replay_start: torch.Tensor
    max_model_len: int
    max_query_lens: Mapping[GraphKey, int]

    def inputs(self, key: GraphKey) -> DecodeInputs:
        """Where the runner puts the inputs of the steps of ``key``. No device work."""
        buffers, num_reqs, num_tokens = self.input_buffers, key.num_reqs, key.num_tokens
        return DecodeInputs(
            buffers.query_start_loc[: num_reqs + 1],
            buffers.seq_lens[:num_reqs],
            buffers.positions[:num_tokens],
            self.replay_start[:num_reqs],
            tuple(table[:num_reqs] for table in self.block_tables.input_block_tables),
            self.block_tables.slot_mappings[:, :num_tokens],
        )

    def by_upstream(self, key: GraphKey) -> UpstreamBuild:
        """What builds the metadata of attention groups by their builders, as a FULL
        step asks for it. Puts a dummy batch into the buffers.
        """
        batch = decode_batch(
            key, self.input_buffers, self.max_model_len, self.max_query_lens.get(key)
        )
        block_tables = self.block_tables.get_dummy_block_tables(key.num_reqs)
        slot_mappings = self.block_tables.get_dummy_slot_mappings(key.num_tokens)

        def build(
            attn_groups: AttnGroups, query_lens: Sequence[int] | None = None
        ) -> dict[str, Any]:
            return self.build(
                batch if query_lens is None else _with_query_lens(batch, query_lens),
                CUDAGraphMode.FULL,
                block_tables,
                slot_mappings,
                attn_groups,
                self.kv_cache_config,
                # Its rows at replay count, whatever they hold now.
                model_specific_attn_metadata=ReplayAttnMetadata(self.replay_start),
            )

        return build

    def fused(self, key: GraphKey, attn_metadata: dict[str, Any]) -> FusedBuild | None:
        """The fused build that refreshes ``attn_metadata``, as the builders made it for
        ``key``. No device work.
        """
        return FusedBuild.of(
            key,
            self.max_query_lens.get(key),
            self.inputs(key),
            attn_metadata,
            self.attn_groups,
            self.replay_start.shape[0],
        )

    @property
    def max_len(self) -> int:
        """The longest sequence that the block tables hold, at most the model's."""
        groups = self.kv_cache_config.kv_cache_groups
        held = [
            table.shape[1] * group.kv_cache_spec.block_size
            for table, group in zip(
                self.block_tables.input_block_tables, groups, strict=True
            )
            # A ring has one block whatever the length.
            if not isinstance(group.kv_cache_spec, CircularBufferSpec)
        ]
        return min([self.max_model_len, *held])
