"""Single tests of upstream's, without the imports and marks of their files."""

import ast
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import vllm
from vllm.models.deepseek_v41.nvidia.specialized_decode.runtime.metadata_graphs import (
    AttnMetadataCudaGraphs,
)

# Beside the package in the tree, in a folder of its own where it was bundled.
_ROOT = Path(
    os.environ["VLLM_BUNDLE"] + "/upstream"
    if "VLLM_BUNDLE" in os.environ
    else Path(vllm.__file__).parents[1]
)
UPSTREAM_TESTS = (
    _ROOT / "tests/models/deepseek_v41/nvidia/specialized_decode/test_kernels.py"
)


def upstream_test(name: str, device: torch.device) -> Callable[[], None]:
    """One test function of upstream's file.

    The imports and the GPU mark of the rest of the file are left out.
    """
    names = {name, "_ChainBuilder"}
    module = ast.parse(UPSTREAM_TESTS.read_text())
    module.body = [node for node in module.body if getattr(node, "name", "") in names]
    assert len(module.body) == len(names)
    namespace = {
        "torch": torch,
        "SimpleNamespace": SimpleNamespace,
        "AttnMetadataCudaGraphs": AttnMetadataCudaGraphs,
        "DEVICE": device,
    }
    exec(compile(module, str(UPSTREAM_TESTS), "exec"), namespace)
    return namespace[name]
