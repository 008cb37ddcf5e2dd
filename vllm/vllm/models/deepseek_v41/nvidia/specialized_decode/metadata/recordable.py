# SPDX-License-Identifier: Apache-2.0
"""How each attention-metadata builder may be recorded in a CUDA graph.

A build is recordable when, for a uniform decode batch, it only launches
capture-safe work (no device-to-host read, no pageable copy) into buffers that
outlive the step, and every host value it reads is fixed by the graph key. What
the host values may be is the builder's declaration:

- ``PADDED``: the batch of a whole FULL graph. The build of a full batch leaves
  the same bytes in the rows of the requests a smaller batch really has, since
  padding is on the device (``query_start_loc`` ends in the token count,
  ``seq_lens`` in zeros, slot mappings in -1, block tables in null blocks).
- ``EXACT``: the step's own number of requests and tokens.
- ``NOT``: never.

Declarations hold for the exact type: a subclass may override anything.
"""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from enum import IntEnum
from operator import attrgetter
from typing import Any, NamedTuple

from vllm.models.deepseek_v41.compressor import CompressorMetadataBuilder
from vllm.models.deepseek_v41.nvidia.flashinfer_sparse import (
    DeepseekSparseSWAFlashInferMetadataBuilder,
    DeepseekV4FlashInferSparseMLAMetadataBuilder,
)
from vllm.models.deepseek_v41.nvidia.flashmla import (
    DeepseekSparseSWAFlashMLAMetadataBuilder,
)
from vllm.models.deepseek_v41.sparse_mla import DeepseekV4FlashMLAMetadataBuilder
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder
from vllm.v1.attention.backends.mla.sparse_indexer import (
    DeepseekV41SparseIndexerMetadataBuilder,
    SparseMQARowsMetadata,
)
from vllm.v1.attention.ops.flashmla import FlashMLASchedMeta


class Recording(IntEnum):
    """How a build may be recorded, weakest first."""

    NOT = 0
    EXACT = 1
    PADDED = 2


_DECLARED: dict[type, Recording] = {
    # SM90, SM100 FlashMLA and SM100 mega attention.
    DeepseekSparseSWAFlashMLAMetadataBuilder: Recording.PADDED,
    DeepseekV4FlashMLAMetadataBuilder: Recording.PADDED,
    # SM100 and SM120 FlashInfer.
    DeepseekSparseSWAFlashInferMetadataBuilder: Recording.PADDED,
    DeepseekV4FlashInferSparseMLAMetadataBuilder: Recording.PADDED,
    # Every architecture. A full batch of query lengths without a native kernel
    # takes the indexer's uniform branch; its variable-length branch, which bakes
    # in a token count, is taken by partial batches only.
    DeepseekV32IndexerMetadataBuilder: Recording.PADDED,
    DeepseekV41SparseIndexerMetadataBuilder: Recording.PADDED,
    CompressorMetadataBuilder: Recording.PADDED,
}


def recording_of(builder: Any) -> Recording:
    """The declaration of ``builder``'s exact type, NOT where there is none."""
    return _DECLARED.get(type(builder), Recording.NOT)


def _holders(layer_metadata: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a layer's metadata that hold one-step state, by name."""
    if not dataclasses.is_dataclass(layer_metadata):
        return
    for field in dataclasses.fields(layer_metadata):
        value = getattr(layer_metadata, field.name)
        if (
            # Without FlashMLA (SM120) the class is an empty stand-in.
            (isinstance(value, FlashMLASchedMeta) and dataclasses.is_dataclass(value))
            or isinstance(value, SparseMQARowsMetadata)
            or (field.name == "flashinfer_sparse_index_cache" and value is not None)
        ):
            yield field.name, value


class OneStepHolders(NamedTuple):
    """The objects in metadata that the first forward of a step fills and later
    layers of that step trust.

    They are good for one step, so recorded metadata, which lives on, must never
    reach a forward that fills them.
    """

    plans: tuple[FlashMLASchedMeta, ...]
    index_caches: tuple[dict, ...]
    sparse_schedules: tuple[SparseMQARowsMetadata, ...]

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "OneStepHolders":
        """Those of ``metadata``, a mapping of layer names; layers share them."""
        plans, index_caches, sparse_schedules = {}, {}, {}
        for layer_metadata in metadata.values():
            for _, holder in _holders(layer_metadata):
                if isinstance(holder, FlashMLASchedMeta):
                    plans[id(holder)] = holder
                elif isinstance(holder, SparseMQARowsMetadata):
                    sparse_schedules[id(holder)] = holder
                else:
                    index_caches[id(holder)] = holder
        return cls(
            tuple(plans.values()),
            tuple(index_caches.values()),
            tuple(sparse_schedules.values()),
        )

    def used(self) -> bool:
        """Whether a forward has filled any. Called on every replay."""
        return (
            any(map(_have_initialized, self.plans))
            or any(self.index_caches)
            or any(s.kernel_metadata is not None for s in self.sparse_schedules)
        )


_have_initialized = attrgetter("have_initialized")


def without_holders(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``metadata`` for reading: a forward that is given it fails at the
    first one-step holder, instead of filling one that outlives the step."""
    copies: dict[int, Any] = {}
    for layer_metadata in metadata.values():
        copied = copies[id(layer_metadata)] = copy.copy(layer_metadata)
        for name, _ in _holders(layer_metadata):
            setattr(copied, name, None)
    return {
        layer: copies[id(layer_metadata)] for layer, layer_metadata in metadata.items()
    }
