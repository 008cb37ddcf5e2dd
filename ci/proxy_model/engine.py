"""An offline engine on a proxy model, in this process. Needs a GPU."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import EXPERT_PARALLEL_SIZE


def make(
    model: str,
    query_len: int,
    decode_backend: str,
    metadata_graphs: str | None = None,
    metadata_graphs_verify: int = 0,
    dspark: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A ``vllm.LLM`` on the proxy in the folder ``model``.

    Decode steps have ``query_len`` tokens a request, with DSpark above 1, whose
    settings ``dspark`` adds to; without adaptive verification unless they ask for it.
    Where ``metadata_graphs`` is None, it is the fork's default. The model runner is
    within reach only under ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.
    """
    from vllm import LLM

    if query_len > 1:
        options["speculative_config"] = {
            "method": "dspark",
            "num_speculative_tokens": query_len - 1,
            "enable_adaptive_verification": False,
            **(dspark or {}),
        }
    config = json.loads(Path(model, "config.json").read_text())
    if EXPERT_PARALLEL_SIZE in config["text_config"]:
        from .expert_parallel import WORKER

        options["worker_cls"] = WORKER
    decode: dict[str, Any] = {"decode_backend": decode_backend}
    if metadata_graphs is not None:
        decode["metadata_graphs"] = metadata_graphs
    if metadata_graphs_verify:
        decode["metadata_graphs_verify"] = metadata_graphs_verify
    return LLM(
        model=model,
        load_format="dummy",
        tokenizer_mode="deepseek_v41",
        kv_cache_dtype="fp8",
        max_num_seqs=32,
        limit_mm_per_prompt={"image": 0},
        compilation_config={"cudagraph_mode": "FULL_AND_PIECEWISE"},
        additional_config=decode,
        seed=0,
        **options,
    )
