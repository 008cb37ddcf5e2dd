"""A stand-in for the cuMem allocator of sleep mode, on CPU tensors.

What is made inside ``use_memory_pool(tag)`` has that tag, as upstream's allocator gives
it. While it is asleep all of it holds garbage; what was offloaded has its bytes again
after waking, what was discarded still garbage: on a GPU that is whatever the memory
held.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.device_allocator import DEFERRABLE_TAGS

GARBAGE = 0x5B


@dataclass
class _Allocation:
    bytes: torch.Tensor
    tag: str
    backup: torch.Tensor | None = None
    is_asleep: bool = False

    def suspend(self, offload: bool) -> None:
        if offload:
            self.backup = self.bytes.clone()
        self.bytes.fill_(GARBAGE)
        self.is_asleep = True

    def resume(self) -> None:
        if self.backup is not None:
            self.bytes.copy_(self.backup)
            self.backup = None
        self.is_asleep = False


class CpuCuMem(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._tags: list[str] = []
        self._allocations: dict[int, _Allocation] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        had = {_address(each) for each in tree_leaves((args, kwargs)) if _holds(each)}
        for each in tree_leaves(out):
            if _holds(each) and _address(each) not in had | self._allocations.keys():
                storage = each.untyped_storage()
                bytes_ = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._allocations[_address(each)] = _Allocation(bytes_, self._tags[-1])
        return out

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        self._tags.append(tag)
        try:
            with self:
                yield
        finally:
            self._tags.pop()

    def get_current_usage(self) -> int:
        return sum(each.bytes.numel() for each in self._allocations.values())

    def tag_of(self, tensor: torch.Tensor) -> str | None:
        """The tag of ``tensor``, or None if it was made outside all pools."""
        allocation = self._allocations.get(_address(tensor))
        return None if allocation is None else allocation.tag

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        for each in self._allocations.values():
            if not each.is_asleep:
                each.suspend(each.tag in offload_tags)

    def wake_up(self, tags: list[str] | None = None) -> None:
        for each in self._allocations.values():
            wanted = tags is None or each.tag in tags
            if each.is_asleep and (wanted or each.tag not in DEFERRABLE_TAGS):
                each.resume()


def _holds(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes() > 0


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
