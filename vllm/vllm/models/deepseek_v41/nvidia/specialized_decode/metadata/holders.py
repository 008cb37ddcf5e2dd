# SPDX-License-Identifier: Apache-2.0
"""The one-step state in attention metadata, which recorded metadata must not have."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from vllm.v1.attention.backends.mla.sparse_indexer import (
    SparseMQARowsMetadata,
)
from vllm.v1.attention.ops.flashmla import FlashMLASchedMeta


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
    index_caches: tuple[dict[str, Any], ...]
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
    first one-step holder, instead of filling one that outlives the step.
    """
    copies: dict[int, Any] = {}
    for layer_metadata in metadata.values():
        copied = copies[id(layer_metadata)] = copy.copy(layer_metadata)
        for name, _ in _holders(layer_metadata):
            setattr(copied, name, None)
    return {
        layer: copies[id(layer_metadata)] for layer, layer_metadata in metadata.items()
    }
