"""Upstream's own recordings, with the Hopper builders let in: the peer to beat.

Upstream's ``metadata_graphs.py`` is loaded from a pristine copy, as the fork's
file has taken its place. Its list of builders is the one thing changed.
"""

import importlib.util
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

RELATIVE = Path(
    "vllm/models/deepseek_v41/nvidia/specialized_decode/runtime/metadata_graphs.py"
)


def load(path: Path) -> ModuleType:
    """Upstream's module from its pristine copy ``path``."""
    spec = importlib.util.spec_from_file_location("upstream_metadata_graphs", path)
    assert spec is not None
    assert spec.loader is not None
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


def decode_batch(
    key: tuple[int, int, int, int], input_buffers: Any, max_model_len: int
) -> Any:
    """A dummy ``InputBatch`` of one of upstream's keys.

    A key is requests, requests with padding, tokens, tokens with padding. Lengths on
    the host are bounds.
    """
    from vllm.v1.worker.gpu.input_batch import InputBatch

    num_reqs, padded_reqs, num_tokens, padded_tokens = key
    batch = InputBatch.make_dummy(num_reqs, num_tokens, input_buffers)
    # Requests past the real ones are empty: they start where the tokens end.
    query_start_loc_np = np.pad(
        batch.query_start_loc_np, (0, padded_reqs - num_reqs), mode="edge"
    )
    return replace(
        batch,
        num_reqs_after_padding=padded_reqs,
        num_tokens_after_padding=padded_tokens,
        query_start_loc=input_buffers.query_start_loc[: padded_reqs + 1],
        query_start_loc_np=query_start_loc_np,
        seq_lens=input_buffers.seq_lens[:padded_reqs],
        seq_lens_cpu_upper_bound=torch.full(
            (padded_reqs,), max_model_len, dtype=torch.int32
        ),
        input_ids=input_buffers.input_ids[:padded_tokens],
        positions=input_buffers.positions[:padded_tokens],
        is_padding=input_buffers.is_padding[:padded_tokens],
    )
