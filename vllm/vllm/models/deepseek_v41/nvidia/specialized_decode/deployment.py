# SPDX-License-Identifier: Apache-2.0
"""What decode a DeepSeek-V4.1 deployment gets, and why.

``additional_config={"decode_backend": ...}`` asks for one of

- ``auto`` (the default): the best decode the deployment supports whose outputs
  are bitwise those of the stock decode, i.e. device metadata: the attention
  metadata of decode steps without host work;
- ``stock``: the stock decode;
- ``latency_specialized``: more than the stock decode or a start-up error that
  lists everything that is missing. Where the requirements of upstream's GB300
  executor hold it is the executor, on Hopper device metadata and kernels of our
  own (``hopper``), elsewhere device metadata.

``metadata_graphs`` names the best way in which a FULL step may get its metadata;
a step that it cannot serve falls to a later one of

- ``auto`` (the default): ``in_graph``, at the head of the forward graph, where the
  build is proven;
- ``replay``: a CUDA graph of the build is replayed before the forward graph;
- ``launch``: the fused build is launched before the forward graph, without graphs
  of it;
- ``eager``: upstream's builders run on the host, with nothing of ours.

``metadata_graphs_verify`` N holds every N-th step so served to upstream's builders; 0,
the default, none. It is for finding faults: each such step waits for the device.

This module states every requirement once, with its reason. They all read
configuration that the ranks of a TP group share; the verdict is agreed over the group
all the same, so that no rank can go its own way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import vllm.envs as envs
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from .metadata_readers import (
    SERVED_SPECULATORS,
    reading_connector,
    reading_speculator,
)
from .tp_group import agreed

logger = init_logger(__name__)


class DecodeBackend(StrEnum):
    """The values of ``decode_backend``."""

    AUTO = "auto"
    STOCK = "stock"
    LATENCY_SPECIALIZED = "latency_specialized"


class MetadataGraphs(StrEnum):
    """The values of ``metadata_graphs``, the best first."""

    AUTO = "auto"
    REPLAY = "replay"
    LAUNCH = "launch"
    EAGER = "eager"


@dataclass(frozen=True)
class Requirement:
    """What a decode needs of a deployment."""

    need: str
    reason: str | Callable[[VllmConfig], str | None]
    """Why; or, where that depends on the deployment, what tells: None then means
    that it is met."""
    met: Callable[[VllmConfig], bool] = lambda _: False

    def missing(self, vllm_config: VllmConfig) -> str | None:
        """The need and why the deployment does not meet it; None if it does."""
        if isinstance(self.reason, str):
            reason = None if self.met(vllm_config) else self.reason
        else:
            reason = self.reason(vllm_config)
        return None if reason is None else f"{self.need} ({reason})"


def _reading_connector(vllm_config: VllmConfig) -> str | None:
    if vllm_config.attention_config.hisparse_config is not None:
        return "HiSparse's attention reads host fields of it"
    return reading_connector(vllm_config.kv_transfer_config)


def _reading_speculator(vllm_config: VllmConfig) -> str | None:
    speculative = vllm_config.speculative_config
    return None if speculative is None else reading_speculator(speculative.method)


def _decode_steps_alone_run_full(vllm_config: VllmConfig) -> bool:
    mode = vllm_config.compilation_config.cudagraph_mode
    return (
        mode is not None
        and mode.decode_mode() == CUDAGraphMode.FULL
        and mode.mixed_mode() != CUDAGraphMode.FULL
    )


DEVICE_METADATA_REQUIREMENTS = (
    Requirement(
        "metadata_graphs other than eager",
        "that asks for upstream's builders",
        lambda config: (
            requested_metadata_graphs(config.additional_config) != MetadataGraphs.EAGER
        ),
    ),
    Requirement(
        "an NVIDIA GPU",
        "the builds are parts of CUDA graphs",
        lambda config: current_platform.is_cuda(),
    ),
    Requirement(
        "Model Runner V2",
        "its model state owns the metadata build",
        lambda config: config.use_v2_model_runner,
    ),
    Requirement(
        "FULL CUDA graphs for decode batches only (cudagraph_mode "
        "FULL_AND_PIECEWISE or FULL_DECODE_ONLY)",
        "only a FULL graph reads its metadata from fixed buffers, and a mixed one "
        "also serves prefills",
        _decode_steps_alone_run_full,
    ),
    Requirement(
        "no prefill or decode context parallelism",
        "their metadata builds contain collectives",
        lambda config: (
            config.parallel_config.prefill_context_parallel_size == 1
            and config.parallel_config.decode_context_parallel_size == 1
        ),
    ),
    Requirement(
        "no micro-batching",
        "each micro-batch builds into buffers of its own",
        lambda config: not config.parallel_config.use_ubatching,
    ),
    Requirement(
        "no KV connector that may read a step's metadata object", _reading_connector
    ),
    Requirement(
        f"no speculative decoding but by {', '.join(SERVED_SPECULATORS)}, which never "
        "read a step's metadata object",
        _reading_speculator,
    ),
)


HOPPER = 90

HOPPER_REQUIREMENTS = (
    Requirement(
        "FULL CUDA graphs for decode batches",
        "the kernels serve the steps that replay them",
        lambda config: (
            (mode := config.compilation_config.cudagraph_mode) is not None
            and mode.decode_mode() == CUDAGraphMode.FULL
        ),
    ),
    Requirement(
        "no torch.compile of the model",
        "a compiled forward would trace their launches",
        lambda config: (
            config.compilation_config.mode != CompilationMode.STOCK_TORCH_COMPILE
        ),
    ),
    Requirement(
        "no LoRA",
        "adapters take the place of the layers that the kernels serve",
        lambda config: config.lora_config is None,
    ),
    Requirement(
        "no micro-batching",
        "its steps run outside the FULL graphs of whole batches",
        lambda config: not config.parallel_config.use_ubatching,
    ),
    Requirement(
        "no batch invariance",
        "the rows of a step choose its kernels",
        lambda config: not envs.VLLM_BATCH_INVARIANT,
    ),
)


@dataclass(frozen=True)
class Deployment:
    """The decode of one process, and what keeps it from a better one.

    ``executor`` holds the settings of upstream's executor where that decodes.
    """

    device_metadata: bool = False
    hopper_kernels: bool = False
    executor: Any = None
    missing: tuple[str, ...] = ()

    def model_state_cls(self) -> type:
        """The class of the model state, where upstream's executor does not decode."""
        from ..model_state import DeepseekV41ModelState

        state: type[DeepseekV41ModelState] = DeepseekV41ModelState
        if self.device_metadata:
            from .metadata.model_state import DeepseekV41DeviceMetadataModelState

            state = DeepseekV41DeviceMetadataModelState
        if self.hopper_kernels:
            from .hopper.binding import with_kernels

            state = with_kernels(state)
        return state


_Setting = TypeVar("_Setting", bound=StrEnum)
_VERIFY = "metadata_graphs_verify"
_SETTINGS = ("decode_backend", "metadata_graphs", _VERIFY)


def _requested(additional_config: Any, key: str, values: type[_Setting]) -> _Setting:
    """The value of ``key``, ``auto`` where there is none.

    Raises ValueError on an unknown key or value, naming the valid ones: a typo
    would otherwise serve another decode in silence.
    """
    if not isinstance(additional_config, dict):
        return values("auto")
    unknown = sorted(map(repr, set(additional_config) - set(_SETTINGS)))
    if unknown:
        raise ValueError(
            f"Unknown additional_config key(s) {', '.join(unknown)}: "
            f"DeepSeek-V4.1 takes {', '.join(map(repr, _SETTINGS))}."
        )
    value = additional_config.get(key, "auto")
    try:
        return values(value)
    except ValueError:
        raise ValueError(
            f"Unknown {key} {value!r}: use one of "
            f"{', '.join(repr(str(each)) for each in values)}."
        ) from None


def requested_backend(additional_config: Any) -> DecodeBackend:
    """The ``decode_backend`` of ``additional_config``; ValueError on a bad one."""
    return _requested(additional_config, "decode_backend", DecodeBackend)


def requested_metadata_graphs(additional_config: Any) -> MetadataGraphs:
    """The ``metadata_graphs`` of ``additional_config``; ValueError on a bad one."""
    return _requested(additional_config, "metadata_graphs", MetadataGraphs)


def requested_verification(additional_config: Any) -> int:
    """The ``metadata_graphs_verify`` of ``additional_config``, 0 where there is none;
    ValueError on a bad one.
    """
    if not isinstance(additional_config, dict):
        return 0
    every = additional_config.get(_VERIFY, 0)
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ValueError(
            f"Unknown {_VERIFY} {every!r}: use a number of steps, or 0 for none."
        )
    return every


def _missing(
    requirements: Sequence[Requirement], vllm_config: VllmConfig
) -> tuple[str, ...]:
    missing = (requirement.missing(vllm_config) for requirement in requirements)
    return tuple(filter(None, missing))


def missing_for_device_metadata(vllm_config: VllmConfig) -> tuple[str, ...]:
    """Every requirement of device metadata that the deployment misses."""
    return _missing(DEVICE_METADATA_REQUIREMENTS, vllm_config)


def missing_for_hopper_kernels(vllm_config: VllmConfig) -> tuple[str, ...]:
    """Every requirement of the Hopper kernels that the deployment misses. Where it
    misses none, the kernels have been compiled.
    """
    if not current_platform.is_device_capability(HOPPER):
        return ("a Hopper (SM90) GPU (the kernels are made of its instructions)",)
    missing = _missing(HOPPER_REQUIREMENTS, vllm_config)
    if not missing:
        from .hopper.kernels import KernelError, kernels

        try:
            kernels().load()
        except (KernelError, ImportError) as error:
            missing = (f"kernels that compile ({error})",)
    return missing


def _missing_for_executor(vllm_config: VllmConfig) -> tuple[str, ...]:
    # Upstream's own list probes NVLink multicast, which only its GPU has.
    if not current_platform.is_device_capability(103):
        return ("a GB300 (SM103) GPU",)
    from . import unsupported

    return tuple(unsupported(vllm_config))


def _warn_of_no_effect(
    additional_config: Any, why: str, *heeded: MetadataGraphs
) -> None:
    """Name the settings of device metadata that a decode ignores: all but ``auto`` and
    what is ``heeded``.
    """
    settings: dict[str, Any] = {}
    metadata_graphs = requested_metadata_graphs(additional_config)
    if metadata_graphs not in (MetadataGraphs.AUTO, *heeded):
        settings["metadata_graphs"] = metadata_graphs
    verify_every = requested_verification(additional_config)
    if verify_every:
        settings[_VERIFY] = verify_every
    for setting, value in settings.items():
        logger.warning_once(
            "DeepSeek-V4.1 decode: %s=%s has no effect: %s.", setting, value, why
        )


_METADATA = "device metadata"
_KERNELS = "Hopper kernels"
_EXECUTOR = "upstream's executor"


def _missing_on_any_rank(
    vllm_config: VllmConfig, demanded: bool
) -> dict[str, tuple[str, ...]]:
    """What each decode but the stock one misses; collective over the TP group."""
    missing = {
        _METADATA: missing_for_device_metadata(vllm_config),
        _KERNELS: ("decode_backend=latency_specialized",),
        _EXECUTOR: ("decode_backend=latency_specialized",),
    }
    if demanded:
        missing[_KERNELS] = missing_for_hopper_kernels(vllm_config)
        missing[_EXECUTOR] = _missing_for_executor(vllm_config)
    everywhere = agreed(*(not needs for needs in missing.values()))
    for (what, needs), on_all in zip(missing.items(), everywhere, strict=True):
        if not needs and not on_all:
            missing[what] = ("another tensor-parallel rank to support it",)
    return missing


def _check_and_log_missing(
    missing: Mapping[str, tuple[str, ...]], demanded: bool
) -> None:
    """Raises ValueError where what was demanded is missing."""
    on_hopper = current_platform.is_device_capability(HOPPER)
    wanted = _KERNELS if on_hopper else _METADATA
    if demanded and missing[wanted]:
        raise ValueError(
            f"decode_backend=latency_specialized needs {'; '.join(missing[wanted])}. "
            "Use decode_backend=auto to serve without a specialized decode."
        )
    for what, needs in missing.items():
        # What no one asked for, or no such GPU can have, is not missed.
        if needs and (what == _METADATA or (demanded and not on_hopper)):
            logger.info_once(
                "DeepSeek-V4.1 decode: without %s, which needs %s.",
                what,
                "; ".join(needs),
            )


def _warn_of_long_drafts(vllm_config: VllmConfig) -> None:
    """Say where DSpark is asked for more tokens than its blocks are trained for, which
    it drafts all the same.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_dspark():
        return
    draft = speculative.draft_model_config.hf_config
    block_size = getattr(draft, "block_size", None)
    if block_size is None:
        block_size = getattr(draft, "dspark_block_size", None)
    asked = speculative.num_speculative_tokens
    if block_size is not None and asked > block_size:
        logger.warning_once(
            "DeepSeek-V4.1 decode: num_speculative_tokens=%d is more than the blocks "
            "of %d tokens that the draft is trained for: acceptance falls. Use %d or "
            "fewer.",
            asked,
            block_size,
            block_size,
        )


def decode_deployment(vllm_config: VllmConfig) -> Deployment:
    """The decode of this deployment; collective over the TP group.

    Where it has Hopper kernels, layers made from now on in this process take them.

    Raises ValueError on a bad ``additional_config``, and on every rank when
    ``latency_specialized`` is asked for and a rank cannot have it.
    """
    config = vllm_config.additional_config
    backend = requested_backend(config)
    # A bad value is told whatever the decode.
    metadata_graphs = requested_metadata_graphs(config)
    requested_verification(config)
    _warn_of_long_drafts(vllm_config)
    if backend == DecodeBackend.STOCK:
        logger.info_once("DeepSeek-V4.1 decode: stock (decode_backend=stock).")
        _warn_of_no_effect(
            config, "the stock decode builds eagerly", MetadataGraphs.EAGER
        )
        return Deployment()

    demanded = backend == DecodeBackend.LATENCY_SPECIALIZED
    missing = _missing_on_any_rank(vllm_config, demanded)
    if not missing[_EXECUTOR]:
        from . import specialized_decode_config

        _warn_of_no_effect(config, "upstream's executor replays its own")
        return Deployment(executor=specialized_decode_config(vllm_config))
    _check_and_log_missing(missing, demanded)
    if metadata_graphs == MetadataGraphs.EAGER:
        _warn_of_no_effect(
            config, "metadata_graphs=eager builds eagerly", MetadataGraphs.EAGER
        )
    hopper_kernels = not missing[_KERNELS]
    if hopper_kernels:
        from .hopper.linear import prefer_hopper_kernel

        prefer_hopper_kernel()
    # The lines that say what is served how follow the loading and the capture.
    return Deployment(
        not missing[_METADATA], hopper_kernels, missing=missing[_METADATA]
    )


def describe_platform() -> str:
    """One line: what the GPUs here get under each decode backend, or would get."""
    ours = "device metadata under decode_backend=auto"
    if not current_platform.is_cuda():
        return (
            f"no NVIDIA GPU here; with one, {ours} and latency_specialized, and under "
            "the latter Hopper kernels on a Hopper, upstream's executor on a GB300"
        )
    demanded = "the same"
    if current_platform.is_device_capability(HOPPER):
        demanded = "Hopper kernels too"
    elif current_platform.is_device_capability(103):
        demanded = "upstream's executor"
    return (
        f"{current_platform.get_device_name()}: {ours}, {demanded} under "
        "latency_specialized"
    )
