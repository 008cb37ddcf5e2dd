"""One rank of expert parallelism, alone in its engine.

A rank of upstream's tensor-parallel group with ``--enable-expert-parallel`` routes
every token over all experts, computes those of its choices that it holds, and sums
with the others in the all-reduce that ends the layer; nothing is sent before. So one
rank without its peers is what it is among them, less that all-reduce, and less what
the peers would have added. ``Worker`` gives its layers the expert map and the shared
expert's part of such a rank. A configuration cannot say either: upstream takes
both from the size of the group.

Give its name, ``WORKER``, as ``--worker-cls``, with a configuration that
``proxy_config`` made with ``expert_parallel``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.models.deepseek_v4.nvidia import model
from vllm.v1.worker import gpu_worker

from .config import EXPERT_PARALLEL_SIZE

WORKER = f"{__name__}.Worker"


@contextmanager
def layers_of_one_rank(ranks: int) -> Iterator[None]:
    """Within, layers are made as on rank 0 of ``ranks`` that divide the experts."""
    make, mlp = FusedMoEParallelConfig.make, model.DeepseekV4MLP

    def with_experts_divided(*sizes: Any, **more: Any) -> FusedMoEParallelConfig:
        alone = make(*sizes, **more)
        return replace(
            alone, use_ep=True, ep_size=ranks, ep_rank=0, tp_size=1, tp_rank=0
        )

    def with_its_part(*, intermediate_size: int, **more: Any) -> Any:
        return mlp(intermediate_size=intermediate_size // ranks, **more)

    patched: Any = FusedMoEParallelConfig
    patched.make = staticmethod(with_experts_divided)
    vars(model)["DeepseekV4MLP"] = with_its_part
    try:
        yield
    finally:
        patched.make = staticmethod(make)
        vars(model)["DeepseekV4MLP"] = mlp


class Worker(gpu_worker.Worker):
    """vLLM's GPU worker, whose model is one rank's."""

    def load_model(self, **options: Any) -> None:
        """Load the model as one rank has it."""
        config = self.vllm_config.model_config.hf_config
        with layers_of_one_rank(getattr(config, EXPERT_PARALLEL_SIZE)):
            super().load_model(**options)
