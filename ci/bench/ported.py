"""Upstream's own recordings, with the Hopper builders let in: the peer to beat.

Upstream's ``metadata_graphs.py`` is loaded from a pristine copy, as the fork's
file has taken its place. Its list of builders is the one thing changed.
"""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

RELATIVE = Path(
    "vllm/models/deepseek_v41/nvidia/specialized_decode/runtime/metadata_graphs.py"
)


def load(path: Path) -> ModuleType:
    """Upstream's module from its pristine copy ``path``."""
    spec = importlib.util.spec_from_file_location("upstream_metadata_graphs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hopper_builders() -> set[type]:
    """The builders of a Hopper deployment that upstream does not record."""
    from vllm.models.deepseek_v41.nvidia.flashmla import (
        DeepseekSparseSWAFlashMLAMetadataBuilder,
    )
    from vllm.models.deepseek_v41.sparse_mla import DeepseekV4FlashMLAMetadataBuilder
    from vllm.v1.attention.backends.mla.indexer import (
        DeepseekV32IndexerMetadataBuilder,
    )

    return {
        DeepseekSparseSWAFlashMLAMetadataBuilder,
        DeepseekV4FlashMLAMetadataBuilder,
        DeepseekV32IndexerMetadataBuilder,
    }


def graphs(path: Path, vllm_config: Any, query_len: int, more: Iterable[type]) -> Any:
    """Upstream's ``AttnMetadataCudaGraphs`` that records ``more`` builders too."""
    module = load(path)
    vars(module)["_RECORDABLE_BUILDERS"] |= frozenset(more)
    return module.AttnMetadataCudaGraphs(vllm_config, query_len)
