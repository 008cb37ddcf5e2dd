# SPDX-License-Identifier: Apache-2.0
"""The tensors of attention metadata, whatever their builder."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch


def tensors(metadata: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a metadata object with its path, in field order."""
    if isinstance(metadata, torch.Tensor):
        yield path, metadata
    elif isinstance(metadata, Mapping):
        for name, value in metadata.items():
            yield from tensors(value, f"{path}[{name!r}]")
    elif dataclasses.is_dataclass(metadata):
        for field in dataclasses.fields(metadata):
            yield from tensors(getattr(metadata, field.name), f"{path}.{field.name}")


class View(NamedTuple):
    """Where a tensor lies."""

    data_ptr: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "View":
        """That of ``tensor``."""
        return cls(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def unrefreshed_tensor(eager: Any, recorded: Any, device_type: str) -> str | None:
    """The path of the first device tensor of ``eager`` that ``recorded`` does
    not hold as the same view of the same memory, or None.

    The FULL forward graphs read the tensors of an eager build: one that lands
    elsewhere in the recorded build would never be refreshed. Where it stands in
    the recorded metadata does not matter, since a forked build gives each branch
    a token-to-request map of its own.
    """
    refreshed = {View.of(tensor) for _, tensor in tensors(recorded)}
    for path, tensor in tensors(eager):
        if tensor.device.type == device_type and View.of(tensor) not in refreshed:
            return path
    return None
