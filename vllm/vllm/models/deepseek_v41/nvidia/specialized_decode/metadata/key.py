# SPDX-License-Identifier: Apache-2.0
"""The key of a decode step, or why it builds its attention metadata eagerly.

Both follow from host state that all ranks of a TP group share, and anything unknown
means an eager build.
"""

from collections.abc import Container
from enum import StrEnum
from typing import NamedTuple

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch


class GraphKey(NamedTuple):
    """The shape of a decode step, as upstream's callers unpack it.

    Ours are of the batch that fills a FULL graph, which fixes every host value that
    a build reads: fewer requests differ from it on the device alone, where
    ``query_start_loc`` ends in the token count, ``seq_lens`` in zeros, slot mappings
    in -1 and block tables in null blocks.
    """

    num_reqs: int
    num_reqs_after_padding: int
    num_tokens: int
    num_tokens_after_padding: int

    @classmethod
    def padded(cls, num_reqs: int, num_tokens: int) -> "GraphKey":
        """The key of the FULL graph of so many requests and tokens."""
        return cls(num_reqs, num_reqs, num_tokens, num_tokens)


class Eager(StrEnum):
    """The reasons for an eager build, each a counter of ``MetadataGraphStats``."""

    NOT_FULL = "not_full"
    """The step runs no FULL CUDA graph: its forward reads the object it is given."""
    BEYOND_GRAPHS = "beyond_graphs"
    """So does a decode step that is larger than any FULL graph of its query length."""
    UNEVEN = "uneven"
    """Query lengths differ between requests, or from the graph's, or may."""
    FAST_PREFILL = "fast_prefill"
    """The step's logits indices are part of its metadata."""
    UNKNOWN_BUILDER = "unknown_builder"
    """A builder is none that the jobs of a fused build are known of."""
    STALE = "stale"
    """The step's buffers are not those of the recording."""
    DIFFERED = "differed"
    """An earlier step of the key was verified, and was not as upstream's build."""
    UNRECORDED = "unrecorded"
    """The key has no recording."""


def key_of(
    input_batch: InputBatch, cudagraph_mode: CUDAGraphMode, varlen: Container[GraphKey]
) -> GraphKey | Eager:
    """The key of a step that runs a FULL graph of its query length, or one of
    variable length, whose keys are ``varlen``; or why it has none.

    One-token extensions of a prefill and the dummy steps of idle ranks have one too:
    nothing that tells them from decodes is baked into a build.
    """
    if cudagraph_mode != CUDAGraphMode.FULL:
        return Eager.NOT_FULL
    if input_batch.fast_prefill is not None:
        return Eager.FAST_PREFILL
    num_reqs = input_batch.num_reqs
    key = GraphKey.padded(
        input_batch.num_reqs_after_padding, input_batch.num_tokens_after_padding
    )
    if key in varlen:
        # Only the device knows how adaptive verification splits the drafts.
        return key
    query_len = int(input_batch.num_scheduled_tokens[:num_reqs].max())
    if (
        input_batch.max_query_len is not None
        or input_batch.num_tokens != num_reqs * query_len
        or key.num_tokens != key.num_reqs * query_len
    ):
        return Eager.UNEVEN
    return key
