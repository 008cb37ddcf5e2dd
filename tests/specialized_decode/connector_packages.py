"""Stands in for the packages that KV connectors import and this environment lacks."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import MagicMock

_NAMES = ("lmcache", "msgpack", "mori", "umbp")
_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1."


class _Packages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in _NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__path__ = []
        # What it holds may be a base class, a decorator or a function.
        module.__getattr__ = lambda name: _Decorator
        return module

    def exec_module(self, module): ...


class _Decorator:
    def __new__(cls, *args, **kwargs):
        return args[0] if args and callable(args[0]) else MagicMock()

    def __class_getitem__(cls, item):
        return cls


@contextmanager
def pretended() -> Iterator[None]:
    """Let them be imported; what was imported meanwhile is forgotten in the end."""
    before = set(sys.modules)
    finder = _Packages()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.startswith((*_NAMES, _CONNECTORS)):
                del sys.modules[name]
