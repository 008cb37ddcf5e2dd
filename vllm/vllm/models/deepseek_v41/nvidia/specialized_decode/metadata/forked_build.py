# SPDX-License-Identifier: Apache-2.0
"""Upstream's build of a step with its KV-cache groups side by side."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.utils.torch_utils import current_stream

from .fused_build import AttnGroups, BuildFn


def forked_build(
    attn_groups: AttnGroups,
    block_tables: Sequence[torch.Tensor],
    build_fn: BuildFn,
    side_streams: list[torch.cuda.Stream],
) -> dict[str, Any]:
    """Build the KV-cache groups as concurrent branches, one per block-table storage,
    and return the serial build's metadata in its layer order.

    Groups on one storage stay in serial order on one branch: the sparse-MLA builder
    clamps its block table in place. Apart from that groups share only read-only
    inputs and the token-to-request map, which the first group that asks builds into a
    buffer of its own for the groups after it. The forward graphs read that buffer; its
    owner is the first to ask on its branch too, so it fills the buffer again, and
    every other branch builds its own map.

    ``side_streams`` grows as needed. Callers keep it, so that a warm-up meets the
    per-stream state of the recording.
    """
    branches: dict[int, AttnGroups] = {}
    for index, groups in enumerate(attn_groups):
        if groups:
            storage = block_tables[index].untyped_storage().data_ptr()
            branch = branches.setdefault(storage, [[] for _ in attn_groups])
            branch[index] = groups
    if len(branches) < 2:
        return build_fn(attn_groups)

    first, *others = branches.values()
    while len(side_streams) < len(others):
        side_streams.append(torch.cuda.Stream())
    forked = side_streams[: len(others)]
    main_stream = current_stream()
    for stream in forked:
        stream.wait_stream(main_stream)
    try:
        built = build_fn(first)
        for stream, branch in zip(forked, others, strict=True):
            with torch.cuda.stream(stream):
                built |= build_fn(branch)
    finally:
        # After an error too: no capture can end with a stream still apart.
        for stream in forked:
            main_stream.wait_stream(stream)
    return {
        name: built[name]
        for groups in attn_groups
        for group in groups
        for name in group.layer_names
    }
