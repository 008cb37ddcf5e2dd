"""The engine's side of the metadata bench, one process an engine. Needs a GPU.

Run by ``bench.metadata`` with its request as JSON on the command line; writes what
it measured as JSON.
"""

import json
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from proxy_model import engine as proxy_engine

from . import ported, trace
from .records import Record, percentile
from .switch import Switch, prompts

PROMPT_TOKENS = 512
TURN = 12
# A profiled run is short: its trace has every kernel of every layer.
PROFILED_TURN = 4
PROFILED_ROUNDS = 3
MAX_RUNS = 50
# Ids below the vocabulary's special tail.
VOCABULARY = 129_000


@dataclass(frozen=True)
class Request:
    """What to measure (units and words as in ``records.Record``).

    ``forward_heads`` names, for each batch size, the first work of a forward graph
    without metadata, where ``paths`` is ``in_graph`` and it is known.
    """

    proxy: int
    model: str
    paths: list[str]
    forward_heads: dict[str, list[str]]
    batches: list[int]
    query_len: int
    max_model_len: int
    steps: int
    new_tokens: int
    upstream: str | None
    commit: str
    out: str


@dataclass(frozen=True)
class Measured:
    """The records of an engine, and ``trace.Cost.head`` for each batch size."""

    records: list[Record]
    forward_heads: dict[str, list[str]]


def measure(request: Request) -> Measured:
    """Make the engine and measure each batch size in turn."""
    upstream = Path(request.upstream) if request.upstream else None
    switch = Switch(request.paths, upstream, request.query_len)
    in_graph = request.paths == ["in_graph"]
    _install(switch)
    from vllm.stack_identity import IDENTITY

    engine = proxy_engine.make(
        request.model,
        request.query_len,
        decode_backend="auto",
        metadata_graphs="auto" if in_graph else "replay",
        max_model_len=request.max_model_len,
        gpu_memory_utilization=0.6,
    )
    if not in_graph and "replay" not in switch.recordings:
        raise SystemExit("the engine recorded no metadata: its log above says why")
    records = []
    heads: dict[str, list[str]] = {}
    for batch in request.batches:
        _say(
            f"{request.proxy} layers, query length {request.query_len}, max_model_len "
            f"{request.max_model_len}, batch {batch}: {', '.join(request.paths)}"
        )
        run = _Runs(engine, batch)
        # Kernels compile and caches fill here.
        switch.measure(batch, TURN)
        run(switch, request.new_tokens)
        switch.measure(batch, TURN)
        while not switch.enough(request.steps):
            if run.count > MAX_RUNS:
                raise SystemExit(f"too few FULL decode steps of {batch} requests")
            run(switch, request.new_tokens)
        samples = dict(switch.samples)
        head = request.forward_heads.get(str(batch), [])
        costs = _profile(switch, run, batch, head)
        # The builds of a step whose graph has them launch nothing.
        if in_graph and costs["in_graph"].launch_calls:
            raise SystemExit("the engine has no metadata build in its FULL graphs")
        heads[str(batch)] = list(costs[switch.paths[-1]].head)
        for path in switch.paths:
            cost, start_up = costs[path], switch.recordings.get(path)
            host_us, step_ms = samples[path].host_us, samples[path].step_ms
            records.append(
                Record(
                    proxy=request.proxy,
                    batch=batch,
                    query_len=request.query_len,
                    max_model_len=request.max_model_len,
                    path=path,
                    steps=len(host_us),
                    host_us_p50=percentile(host_us, 50),
                    host_us_p99=percentile(host_us, 99),
                    launch_calls=cost.launch_calls,
                    step_launch_calls=cost.step_launch_calls,
                    planner_launches=cost.planner_launches,
                    device_us=cost.device_us,
                    gpu_metadata_us=cost.gpu_metadata_us,
                    step_ms_p50=percentile(step_ms, 50),
                    recordings=start_up.count if start_up else None,
                    record_seconds=start_up.seconds if start_up else None,
                    record_mib=start_up.mib if start_up else None,
                    torch=torch.__version__,
                    gpu=torch.cuda.get_device_name(),
                    commit=request.commit,
                    stack=IDENTITY.stack,
                )
            )
    return Measured(records, heads)


def _install(switch: Switch) -> None:
    from vllm.config import CUDAGraphMode
    from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState
    from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata import (
        model_state as ours,
    )
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    switch.install(
        ours.DeepseekV41DeviceMetadataModelState,
        DeepseekV41ModelState,
        ported.decode_batch,
    )
    switch.install_forwards(ModelCudaGraphManager, CUDAGraphMode.FULL)


class _Runs:
    """Generates from fresh prompts each time it is called."""

    def __init__(self, engine: Any, batch: int) -> None:
        self.count = 0
        self._engine = engine
        self._batch = batch

    def __call__(self, switch: Switch, new_tokens: int) -> None:
        from vllm.sampling_params import SamplingParams

        self.count += 1
        ids = prompts(self._batch, PROMPT_TOKENS, VOCABULARY, self.count)
        switch.new_run()
        self._engine.generate(
            [{"prompt_token_ids": prompt} for prompt in ids],
            SamplingParams(
                temperature=0.0,
                max_tokens=new_tokens,
                ignore_eos=True,
                detokenize=False,
            ),
            use_tqdm=False,
        )


def _profile(
    switch: Switch, run: _Runs, batch: int, forward_head: list[str]
) -> dict[str, trace.Cost]:
    """Launches and GPU time of each path, from a short run under the profiler."""
    from torch.profiler import ProfilerActivity, profile

    switch.measure(batch, PROFILED_TURN, profiling=True)
    # Requests of a large batch start some steps apart.
    tokens = len(switch.paths) * PROFILED_TURN * PROFILED_ROUNDS + 16
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run(switch, tokens)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        costs = trace.costs(json.loads(path.read_text()), {"in_graph": forward_head})
    missing = [path for path in switch.paths if path not in costs]
    if missing:
        raise SystemExit(f"the profiler saw no build of the {missing[0]} path")
    return costs


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure what the command line asks for, as JSON."""
    values = json.loads(sys.argv[1])
    request = Request(**{f.name: values[f.name] for f in fields(Request)})
    Path(request.out).write_text(json.dumps(asdict(measure(request))))


if __name__ == "__main__":
    main()
