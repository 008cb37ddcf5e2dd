"""An engine on the 8-layer proxy that serves requests, in a process of its own.

    python served_requests.py recipe MODEL DECODE_BACKEND OUT
    python served_requests.py sleep MODEL DECODE_BACKEND OUT

``recipe`` is the published one: DSpark with adaptive verification. ``sleep`` serves the
same requests before and after sleep of each level. What came out is written to OUT as
JSON; every third step that was served without an eager build is held to upstream's.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from proxy_model import engine as proxy_engine

QUERY_LEN = 6
# Of drafts at each position, whatever they are: dummy weights agree on nothing.
ACCEPTANCE = (0.9, 0.8, 0.7, 0.6, 0.5)
# (size, ms), in place of measured ones, which would choose other drafts in each run.
DRAFT_COSTS = [(1, 0.5), (32, 0.6)]
VERIFY_COSTS = [(1, 4.0), (192, 8.0)]
# Memory enough, and no more: other engines may be on the GPU.
LIMITS = {
    "max_model_len": 2048,
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 8 * 2**30,
    # A cached prefix leaves a prefill of another shape.
    "enable_prefix_caching": False,
}


def requests(count: int, longest: int) -> tuple[list[Any], list[Any]]:
    """Prompts and sampling parameters, the same in every process."""
    from vllm import SamplingParams

    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(2, 100_000) for _ in range(length)]}
        for length in (rng.randrange(8, 400) for _ in range(count))
    ]
    parameters = [
        SamplingParams(
            temperature=0.0,
            seed=index,
            max_tokens=rng.randrange(1, longest),
            ignore_eos=True,
            detokenize=False,
        )
        for index in range(count)
    ]
    return prompts, parameters


def generated(engine: Any, count: int, longest: int) -> list[list[int]]:
    outputs = engine.generate(*requests(count, longest), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def worker_of(engine: Any) -> Any:
    executor = engine.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker


def counters(engine: Any) -> dict[str, Any]:
    """How the steps got their metadata; nothing of the stock decode."""
    state = worker_of(engine).model_runner.model_state
    stats = getattr(getattr(state, "graphs", None), "stats", None)
    if stats is None:
        return {}
    return {
        "line": stats.line(),
        "verified": stats.verified,
        "served": stats.served.total(),
        "full_decode_steps": stats.full_decode_steps,
        "eager": {str(why): count for why, count in stats.eager.items() if count},
    }


def recipe(model: str, backend: str) -> dict[str, Any]:
    """500 requests, the last of which leave a batch of 32 one by one."""
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import (
        AdaptiveVerificationManager,
    )

    def fixed_costs(self: Any, samples: Any) -> None:
        self.set_cost_curves(DRAFT_COSTS, VERIFY_COSTS)

    AdaptiveVerificationManager.set_initial_cost_curves = fixed_costs
    engine = proxy_engine.make(
        model,
        QUERY_LEN,
        backend,
        metadata_graphs_verify=0 if backend == "stock" else 3,
        dspark={
            "enable_adaptive_verification": True,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": list(ACCEPTANCE),
        },
        **LIMITS,
        disable_log_stats=False,
    )
    tokens = generated(engine, count=500, longest=100)
    metrics = {
        metric.name: getattr(metric, "value", None) or getattr(metric, "values", None)
        for metric in engine.get_metrics()
        if metric.name.startswith("vllm:spec_decode")
    }
    return {"tokens": tokens, "metrics": metrics, "counters": counters(engine)}


def sleep(model: str, backend: str) -> dict[str, Any]:
    """The same requests, awake and after each level of sleep."""
    engine = proxy_engine.make(
        model,
        1,
        backend,
        metadata_graphs_verify=3,
        **LIMITS,
        enable_sleep_mode=True,
    )
    tokens = {}
    for name in ("awake", "awake again"):
        tokens[name] = generated(engine, count=40, longest=40)
    free_bytes = {"awake": torch.cuda.mem_get_info()[0]}
    parameters = dict(worker_of(engine).model_runner.model.named_parameters())
    weights = {name: weight.to("cpu", copy=True) for name, weight in parameters.items()}
    for level in (1, 2):
        engine.sleep(level)
        free_bytes[f"asleep {level}"] = torch.cuda.mem_get_info()[0]
        engine.wake_up()
        if level == 2:
            # Their loader, which would draw others.
            for name, weight in parameters.items():
                weight.data.copy_(weights[name])
        tokens[f"after {level}"] = generated(engine, count=40, longest=40)
    return {"tokens": tokens, "free_bytes": free_bytes, "counters": counters(engine)}


def main() -> None:
    """Serve what the command line asks for."""
    scenario, model, backend, out = sys.argv[1:]
    found = {"recipe": recipe, "sleep": sleep}[scenario](model, backend)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
