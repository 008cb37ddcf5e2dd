# SPDX-License-Identifier: Apache-2.0
"""The metadata build of the batch that fills a FULL graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch

from ...model_state import ReplayAttnMetadata
from .fused_build import AttnGroups, FusedBuild
from .jobs import DecodeInputs


@dataclass(frozen=True)
class PaddedBuild:
    """The arguments of a build whose batch has as many requests as its graph.

    ``build`` is the model state's eager build; ``replay_start`` [max requests]
    int32 its persistent buffer.
    """

    build: Callable[..., dict[str, Any]]
    input_batch: InputBatch
    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: torch.Tensor
    attn_groups: AttnGroups
    kv_cache_config: KVCacheConfig
    replay_start: torch.Tensor

    @property
    def inputs(self) -> DecodeInputs:
        batch = self.input_batch
        num_reqs = batch.num_reqs_after_padding
        return DecodeInputs(
            batch.query_start_loc[: num_reqs + 1],
            batch.seq_lens[:num_reqs],
            batch.positions[: batch.num_tokens_after_padding],
            self.replay_start[:num_reqs],
            self.block_tables,
            self.slot_mappings,
        )

    def by_upstream(self, attn_groups: AttnGroups) -> dict[str, Any]:
        """The metadata of ``attn_groups``, by their builders, as a FULL step asks
        for it."""
        return self.build(
            self.input_batch,
            CUDAGraphMode.FULL,
            self.block_tables,
            self.slot_mappings,
            attn_groups,
            self.kv_cache_config,
            # Its rows at replay count, whatever they hold now.
            model_specific_attn_metadata=ReplayAttnMetadata(self.replay_start),
        )

    def fused(self, attn_metadata: dict[str, Any]) -> FusedBuild:
        """The fused build that refreshes ``attn_metadata``, made of this batch."""
        return FusedBuild.of(
            attn_metadata, self.attn_groups, self.inputs, self.replay_start.shape[0]
        )
