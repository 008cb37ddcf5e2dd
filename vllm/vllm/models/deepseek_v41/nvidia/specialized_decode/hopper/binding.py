# SPDX-License-Identifier: Apache-2.0
"""Where the Hopper decode takes the place of upstream's kernels.

Linear layers take theirs as they are made (``linear``). Experts and output projections
are bound here once all weights are loaded, those of a draft model too: both register
in the forward context, where upstream finds its attention and MoE layers by name.
"""

from collections import defaultdict
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.models.deepseek_v41.attention import DeepseekV4Attention

from ...model_state import DeepseekV41ModelState
from .experts import DecodeMoE
from .ops import MAX_ROWS
from .output import OutputProjection

logger = init_logger(__name__)

_BINDINGS: tuple[tuple[str, type, Any], ...] = (
    ("experts", MoERunner, DecodeMoE),
    ("output projection", DeepseekV4Attention, OutputProjection),
)


def bind_kernels(vllm_config: VllmConfig) -> None:
    """Bind the kernels to every layer that they serve, and log which they do not, and
    why.
    """
    bound: dict[str, int] = defaultdict(int)
    left: dict[tuple[str, str], int] = defaultdict(int)
    for layer in vllm_config.compilation_config.static_forward_context.values():
        for part, cls, binding in _BINDINGS:
            if isinstance(layer, cls):
                why = binding.why_not(layer)
                if why is None:
                    binding(layer).bind()
                    bound[part] += 1
                else:
                    left[part, why] += 1
    logger.info_once(
        "DeepSeek-V4.1 decode: Hopper kernels in FULL graphs of up to %d rows, for "
        "MXFP8 linear layers%s.",
        MAX_ROWS,
        "".join(f", the {part} of {count} layers" for part, count in bound.items()),
    )
    for (part, why), count in left.items():
        logger.info_once(
            "DeepSeek-V4.1 decode: upstream's %s in %d layers: %s.", part, count, why
        )


class BindsKernels:
    """Mixed into a model state, which the runner makes when all weights are loaded."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        bind_kernels(vllm_config)
        # The model state's, which this is mixed into.
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]


def with_kernels(
    model_state_cls: type[DeepseekV41ModelState],
) -> type[DeepseekV41ModelState]:
    """``model_state_cls`` with ``BindsKernels``."""
    return type("HopperModelState", (BindsKernels, model_state_cls), {})
