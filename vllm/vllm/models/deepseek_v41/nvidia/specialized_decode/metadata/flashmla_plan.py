# SPDX-License-Identifier: Apache-2.0
"""One FlashMLA plan per layer type for all KV-cache groups of a decode step.

A plan says how FlashMLA splits the rows of a decode step over the SMs. The first
layer that is given an empty ``FlashMLASchedMeta`` launches the planner, the
layers after it reuse its plan. The sliding-window builders make one such object
per layer type *and KV-cache group*, so a step plans again for every group what
it has planned already. ``PlanSharing`` lets all groups use the first group's.

Why one plan serves all groups. The planner reads the number of rows, query
heads and SMs, the two index widths, and per row ``topk_length`` and, on layers
with a compressed cache, ``extra_topk_length``; FlashMLA asserts on reuse that the
page sizes are equal as well. Among the layers of one type, over groups:

- rows, heads: each decode token is a row; the target's layers have one class and
  one head count. Draft layers may stand in the same groups, but a draft forward
  runs on metadata of its own.
- ``topk_length`` is ``decode_swa_lens``: for a token at position p,
  p + 1 - max(p - window + 1, 0, replay_start), or 0 where its slot is negative.
  Positions follow from ``seq_lens`` and ``query_start_loc``, which the groups
  share, as they do the replay starts. A graph capture builds without those, and
  each builder then takes zeros of its own.
- A slot is negative on padding, the same tokens in every group, and on tokens
  that replay a window after a prefix hit, but only in groups that prefix caching
  serves. Whether it does is part of a group's KV-cache spec, as are its window,
  page size and whether it has slots at all; all specs must be equal. Context
  parallelism, under which slots are a rank's own, is refused.
- ``extra_topk_length`` counts the indices the indexer found. A top-k over n keys
  finds min(k, n) of them, and n is the token's row in the lengths of the
  indexer's metadata, one object for all indexers of a compress ratio if they
  form one attention group. An indexer that looks only into candidate blocks
  finds as many if these hold k keys or are all there are. Its tokens are masked
  by the slots of the window group, see above. Scores that are not numbers can
  leave a row shorter in one layer; the output of that row is lost then, and a
  plan splits every row by itself. Upstream rests on this too: in the whole model
  each group has layers of several indexers.
- page size and width of the compressed caches: those of one ratio must form one
  attention group; the indices of all layers stand in one buffer.

None of this depends on lengths, so what holds for the build of a captured graph
holds for every step it replays. Everything is checked on host state of each
build; where it does not hold, or cannot be seen, every group keeps its own plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.models.deepseek_v41.nvidia.flashmla import (
    DeepseekSparseSWAFlashMLAMetadataBuilder,
)
from vllm.models.deepseek_v41.sparse_mla import (
    DeepseekV4SparseMLAMetadataBuilder,
    deepseek_v41_layer_type,
)
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder
from vllm.v1.attention.backends.mla.sparse_swa import (
    DeepseekSparseSWAMetadata,
    DeepseekSparseSWAMetadataBuilder,
)
from vllm.v1.worker.utils import AttentionGroup

from .tensors import View

logger = init_logger(__name__)

AttnGroups = Sequence[Sequence[AttentionGroup]]

# The plans of a window group's metadata, one field per layer type.
PLANS = tuple(
    field.name
    for field in fields(DeepseekSparseSWAMetadata)
    if field.name.startswith("tile_sched_")
)


class NotShared(StrEnum):
    """Why the groups keep plans of their own."""

    BUILDER = "a sliding-window group has another metadata builder"
    CONTEXT_PARALLEL = "the slots of a step are divided over ranks"
    SPEC = "sliding-window groups differ in their KV-cache spec"
    COMPRESSED_GROUPS = "the compressed caches of a ratio are in several groups"
    INDEXER_GROUPS = "the indexers of a ratio are in several groups"
    CANDIDATES = "the candidate blocks may hold fewer keys than the top-k takes"
    METADATA = "a sliding-window group has other metadata"
    ROWS = "sliding-window groups differ in their decode rows"
    INPUTS = "sliding-window groups are built from different inputs"
    REPLAY_START = "sliding-window groups are built from different replay starts"
    USED = "a forward has used a plan already"


class PlanSharing:
    """Lets the window groups of a step use one plan per layer type.

    What follows from the groups alone is decided once, for all builds of them.
    """

    def __init__(self, attn_groups: AttnGroups) -> None:
        self._attn_groups = attn_groups
        windows = [
            group
            for groups in attn_groups
            for group in groups
            if isinstance(_builder(group), DeepseekSparseSWAMetadataBuilder)
        ]
        plans = any(
            type(_builder(group)) is DeepseekSparseSWAFlashMLAMetadataBuilder
            for group in windows
        )
        # None where there is nothing to share.
        self._windows = windows if plans and len(windows) > 1 else []
        self._why = _differing_groups(windows, attn_groups) if self._windows else None

    def is_of(self, attn_groups: AttnGroups) -> bool:
        """Whether it was made for these very groups."""
        return self._attn_groups is attn_groups

    def share(self, attn_metadata: Mapping[str, Any]) -> NotShared | None:
        """Let every window group of a freshly built step use the first one's plans.

        Args:
            attn_metadata: What one build of the groups returned, by layer name. The
                plan fields of its ``DeepseekSparseSWAMetadata`` are set; they are as
                fresh as before.

        Returns:
            None where they share, or where there is nothing to share: a single group,
            no decode rows, or attention that does not plan. Else why not, logged once;
            ``attn_metadata`` is then unchanged.
        """
        if not self._windows:
            return None
        built = [attn_metadata.get(group.layer_names[0]) for group in self._windows]
        why = self._why or _differing_steps(self._windows, built)
        if why is not None:
            logger.info_once(
                "DeepSeek-V4.1 decode: FlashMLA plans are not shared: %s.", why
            )
            return why
        first, *others = built
        for metadata in others:
            for plan in PLANS:
                setattr(metadata, plan, getattr(first, plan))
        return None


def _builder(group: AttentionGroup) -> Any:
    """Micro-batches have builders of their own, made alike."""
    return group.get_metadata_builder()


def _differing_groups(
    windows: Sequence[AttentionGroup], attn_groups: AttnGroups
) -> NotShared | None:
    """What in the groups themselves, the same in every step, forbids sharing."""
    builders = [_builder(group) for group in windows]
    if any(type(b) is not DeepseekSparseSWAFlashMLAMetadataBuilder for b in builders):
        return NotShared.BUILDER
    builder = builders[0]
    parallel = builder.vllm_config.parallel_config
    if (
        parallel.prefill_context_parallel_size > 1
        or parallel.decode_context_parallel_size > 1
    ):
        return NotShared.CONTEXT_PARALLEL
    if len({_shape(group) for group in windows}) > 1:
        return NotShared.SPEC
    if (why := _several_indices(builder, attn_groups)) is not None:
        return why
    if not _candidates_fill_top_k(builder.vllm_config.model_config.hf_config):
        return NotShared.CANDIDATES
    return None


def _several_indices(builder: Any, attn_groups: AttnGroups) -> NotShared | None:
    """Whether layers of one type read the indices of more groups than one."""
    for ratio in (1, 2):
        if deepseek_v41_layer_type(ratio) not in builder._layer_types:
            continue
        if _count(attn_groups, DeepseekV4SparseMLAMetadataBuilder, ratio) != 1:
            return NotShared.COMPRESSED_GROUPS
        if _count(attn_groups, DeepseekV32IndexerMetadataBuilder, ratio) != 1:
            return NotShared.INDEXER_GROUPS
    return None


def _shape(group: AttentionGroup) -> tuple[Any, ...]:
    """What the plans and lengths of a window group depend on."""
    builder = _builder(group)
    return (
        group.kv_cache_spec,
        builder.kv_cache_spec,
        builder.window_size,
        builder.block_size,
        builder.decode_threshold,
        frozenset(builder._layer_types),
    )


def _count(attn_groups: AttnGroups, builder_type: type, ratio: int) -> int:
    """The attention groups of ``ratio`` whose builder is a ``builder_type``."""
    return sum(
        isinstance(_builder(group), builder_type)
        and group.kv_cache_spec.tokens_per_state == ratio
        for groups in attn_groups
        for group in groups
    )


def _candidates_fill_top_k(config: Any) -> bool:
    """Whether a top-k among the candidate blocks finds as many keys as one among
    all keys does. All blocks are candidates until there are too many; from then
    on all candidates are full but the one that holds the newest keys.
    """
    if getattr(config, "candidate_source_layer_id", -1) < 0:
        return True
    full = (config.candidate_topk_blocks - 1) * config.candidate_block_size
    return bool(full >= config.index_topk)


def _differing_steps(
    windows: Sequence[AttentionGroup], built: Sequence[Any]
) -> NotShared | None:
    """What in the metadata of one step forbids sharing."""
    if any(type(metadata) is not DeepseekSparseSWAMetadata for metadata in built):
        return NotShared.METADATA
    if len({_rows(metadata) for metadata in built}) > 1:
        return NotShared.ROWS
    if len({_inputs(metadata) for metadata in built}) > 1:
        return NotShared.INPUTS
    zeros = all(
        metadata.replay_start is _builder(group).no_replay_start
        for group, metadata in zip(windows, built, strict=True)
    )
    if not zeros and len({_view(metadata.replay_start) for metadata in built}) > 1:
        return NotShared.REPLAY_START
    plans = [getattr(metadata, plan) for metadata in built for plan in PLANS]
    if any(plan is not None and plan.have_initialized for plan in plans):
        return NotShared.USED
    return None


def _rows(metadata: DeepseekSparseSWAMetadata) -> tuple[Any, ...]:
    return (
        metadata.num_decodes,
        metadata.num_decode_tokens,
        metadata.decode_swa_width,
        None
        if metadata.decode_swa_indices is None
        else metadata.decode_swa_indices.shape,
        tuple(getattr(metadata, plan) is not None for plan in PLANS),
    )


def _inputs(metadata: DeepseekSparseSWAMetadata) -> tuple[Any, ...]:
    slots = metadata.slot_mapping
    return (
        _view(metadata.seq_lens),
        _view(metadata.query_start_loc),
        # A row per group of one slot mapping.
        slots.untyped_storage().data_ptr(),
        slots.shape,
    )


def _view(tensor: torch.Tensor | None) -> View | None:
    return None if tensor is None else View.of(tensor)
