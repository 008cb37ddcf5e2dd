# SPDX-License-Identifier: Apache-2.0
"""The one-step state in attention metadata, which recorded metadata must not have.

The first forward of a step fills it, as a FlashMLA plan, and later layers of that step
trust it: in an object that lives on, it would be of another step.
"""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

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
