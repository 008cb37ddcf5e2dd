# SPDX-License-Identifier: Apache-2.0
"""Why a step builds its attention metadata eagerly instead of replaying it.

Every reason is decided from host state that all ranks of a TP group share, and
anything unknown means an eager build.
"""

from enum import StrEnum

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch


class Eager(StrEnum):
    """The reasons, each a counter of ``MetadataGraphStats``."""

    NOT_FULL = "not_full"
    """The step runs no FULL CUDA graph: its forward reads the object it is given."""
    DUMMY = "dummy"
    """A capture or an idle data-parallel rank, whose object may meet a forward."""
    PREFILL = "prefill"
    """A request is still in its prompt, e.g. a one-token extension."""
    ADAPTIVE = "adaptive"
    """The device splits the drafts: host query lengths are only bounds."""
    UNEVEN = "uneven"
    """Query lengths differ between requests, or from the graph's."""
    FAST_PREFILL = "fast_prefill"
    """The step's logits indices are part of its metadata."""
    MICRO_BATCH = "micro_batch"
    """A part of a step has buffers of its own."""
    UNKNOWN_BUILDER = "unknown_builder"
    """A builder is not declared recordable."""
    STALE = "stale"
    """The step's buffers are not those of the recording."""
    USED_HOLDER = "used_holder"
    """A forward has filled the recorded object's one-step state."""
    UNRECORDED = "unrecorded"
    """The key has no recording: a miss."""

    @property
    def in_full_decode_step(self) -> bool:
        return self not in (Eager.NOT_FULL, Eager.DUMMY)


def why_not_uniform_decode(
    input_batch: InputBatch, cudagraph_mode: CUDAGraphMode, device_driven: bool
) -> Eager | None:
    """Why the step is not a uniform decode in a FULL graph of its query length,
    the only kind whose host values a graph key fixes, or None if it is one.

    A ``device_driven`` build reads no host value that tells a prefill from a decode.
    """
    if cudagraph_mode != CUDAGraphMode.FULL:
        return Eager.NOT_FULL
    if input_batch.has_prefill and not device_driven:
        return Eager.PREFILL
    if input_batch.max_query_len is not None:
        return Eager.ADAPTIVE
    if input_batch.fast_prefill is not None:
        return Eager.FAST_PREFILL
    num_reqs = input_batch.num_reqs
    query_len = int(input_batch.num_scheduled_tokens[:num_reqs].max())
    # A variable-length graph has another ratio of tokens to requests.
    if (
        input_batch.num_tokens != num_reqs * query_len
        or input_batch.num_tokens_after_padding
        != input_batch.num_reqs_after_padding * query_len
    ):
        return Eager.UNEVEN
    return None
