"""Marks in a profile what each launch of an engine is for.

Kernel names do not tell: one Marlin kernel serves six projections. So the functions
that launch a part's work are wrapped in ranges of that part, and a launch belongs to
the innermost range around it. A CUDA graph is one launch, whatever it holds: the
launches inside the FULL graphs are told apart by a *reference*, the same forward run
launch by launch just before it is captured, on the path that the capture takes.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch.profiler import record_function

from .parts import Part

_MODEL = "vllm.models.deepseek_v41.nvidia.model"
_V4_MODEL = "vllm.models.deepseek_v4.nvidia.model"
_ATTENTION = "vllm.models.deepseek_v41.attention"
_HOPPER = "vllm.models.deepseek_v41.nvidia.specialized_decode.hopper"
_MOE = "vllm.model_executor.layers.fused_moe"
# Where each part's launches come from, as ``module:name``. A range within another
# wins, so that what has no range of its own counts for the one around it.
SOURCES: dict[str, Part] = {
    f"{_MODEL}:DeepseekV4Model.forward": Part.OTHER,
    f"{_MODEL}:mhc_pre_delayed_tilelang": Part.MHC,
    f"{_MODEL}:mhc_pre_delayed_overlap": Part.MHC,
    f"{_MODEL}:mhc_shifted_post_pre": Part.MHC,
    f"{_MODEL}:mhc_post_tilelang": Part.MHC,
    f"{_MODEL}:hc_collapse_triton": Part.MHC,
    f"{_V4_MODEL}:DeepseekV4MoE.forward": Part.EXPERTS,
    f"{_V4_MODEL}:DeepseekV4MLP.forward": Part.SHARED_EXPERT,
    f"{_MODEL}:DeepseekV41LLMForCausalLM.compute_logits": Part.LM_HEAD,
    f"{_ATTENTION}:DeepseekV4Attention.forward": Part.QUERY,
    f"{_ATTENTION}:DeepseekV4Attention._wo_b_proj": Part.OUTPUT,
    f"{_ATTENTION}:DeepseekV4Indexer.forward": Part.INDEXER,
    "vllm.model_executor.layers.sparse_attn_indexer:SparseAttnIndexer.forward_cuda": (
        Part.INDEXER
    ),
    "vllm.model_executor.layers.sparse_mqa_indexer:SparseMQAIndexer.forward": (
        Part.INDEXER
    ),
    "vllm.models.deepseek_v41.compressor:DeepseekCompressor.forward": Part.INDEXER,
    "vllm.models.deepseek_v41.compressor:DeepseekCompressor.insert_cache": Part.INDEXER,
    f"{_MOE}.router.gate_linear:GateLinear.forward": Part.ROUTER,
    f"{_MOE}.router.fused_moe_router:FusedMoERouter.select_experts": Part.ROUTER,
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model": Part.METADATA,
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens": Part.SAMPLING,
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.propose": (
        Part.DRAFT
    ),
}
# Our own, which take the place of a layer's method; not to be had on a machine that
# cannot compile them.
HOPPER: dict[str, Part] = {
    f"{_HOPPER}.experts:DecodeMoE.route": Part.ROUTER,
    f"{_HOPPER}.output:OutputProjection.__call__": Part.OUTPUT,
}
# Methods of every attention of ``_ATTENTION``; each platform has a class of its own.
ATTENTIONS: dict[str, Part] = {
    "forward_mqa": Part.ATTENTION,
    "_o_proj": Part.OUTPUT,
}


class Ranges:
    """Marks the ranges of an engine in this process, while ``on``."""

    def __init__(self) -> None:
        self.on = False

    def mark(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` in a range called ``name``."""

        @wraps(function)
        def marked(*values: Any, **more: Any) -> Any:
            if not self.on:
                return function(*values, **more)
            with record_function(name):
                return function(*values, **more)

        return marked

    def part(self, part: Part, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` in a range of ``part``."""
        return self.mark(part.range, function)

    def install(self) -> None:
        """Wrap all that is named above; call before the engine is made.

        Raises AttributeError or ImportError where upstream's code has moved.
        """
        for source, part in SOURCES.items():
            self._wrap(*find(source), part)
        for source, part in HOPPER.items():
            with suppress(ModuleNotFoundError):
                self._wrap(*find(source), part)
        attention = import_module(_ATTENTION)
        for owner in subclasses(attention.DeepseekV4Attention):
            for name, part in ATTENTIONS.items():
                if name in vars(owner):
                    self._wrap(owner, name, part)
        self._wrap_side_projections(attention)

    def _wrap(self, owner: Any, name: str, part: Part) -> None:
        setattr(owner, name, self.part(part, vars(owner)[name]))

    def _wrap_side_projections(self, attention: Any) -> None:
        # The indexer's and the compressor's projections of the layer's input are
        # closures that run beside the query's.
        execute = attention.execute_in_parallel

        def execute_in_parallel(
            query: Any, beside: Iterable[Any], *rest: Any, **more: Any
        ) -> Any:
            marked = [
                None if function is None else self.part(Part.INDEXER, function)
                for function in beside
            ]
            return execute(query, marked, *rest, **more)

        attention.execute_in_parallel = execute_in_parallel


def find(source: str) -> tuple[Any, str]:
    """The owner of ``module:name`` and the last part of the name."""
    module, _, path = source.partition(":")
    owner: Any = import_module(module)
    *outer, name = path.split(".")
    for attribute in outer:
        owner = getattr(owner, attribute)
    if name not in vars(owner):
        raise AttributeError(f"{source} is not there any more")
    return owner, name


def subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    """``cls`` and all below it."""
    yield cls
    for below in cls.__subclasses__():
        yield from subclasses(below)


@contextmanager
def as_if_capturing() -> Iterator[None]:
    """Within, code that asks whether a stream captures is told that it does, and so
    takes the path that its graph has.
    """
    asked = "is_current_stream_capturing"
    real = vars(torch.cuda)[asked]
    vars(torch.cuda)[asked] = lambda: True
    try:
        yield
    finally:
        vars(torch.cuda)[asked] = real
