# SPDX-License-Identifier: Apache-2.0
"""The model state that records attention-metadata builds and replays them.

It changes where the metadata of a FULL decode step comes from, and nothing
else: the builds are recorded after the CUDA graphs of the model were captured,
replayed on real FULL decode steps, and done by ``DeepseekV41ModelState`` on
every other step.
"""

import atexit
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import is_global_first_rank
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache

from ...model_state import DeepseekV41ModelState
from .eligibility import Eager
from .metadata_graphs import AttnGroups, AttnMetadataCudaGraphs, GraphKey
from .stats import RecordingReport

logger = init_logger(__name__)

# A recording takes milliseconds and well under a MiB. Far beyond that something
# is wrong, and the start-up of the server and its KV cache come first.
MAX_RECORDING_SECONDS = 60.0
MAX_RECORDING_MIB = 1024.0


def decode_batch(
    key: GraphKey, input_buffers: InputBuffers, max_model_len: int
) -> InputBatch:
    """A dummy uniform decode batch in the shape of ``key``, padded as a step is.

    Sequence lengths are the longest on the host, where they are only bounds, so
    that nothing derived from them is too small for a later step.
    """
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


class DeepseekV41RecordedModelState(DeepseekV41ModelState):
    # The FULL graphs the runner captures, set by it before
    # capture_inner_cudagraphs; None on a runner that does not.
    full_graphs: Sequence[BatchExecutionDescriptor] | None = None

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: EncoderCache | None,
        device: torch.device,
    ):
        super().__init__(vllm_config, model, encoder_cache, device)
        self.graphs = AttnMetadataCudaGraphs(
            vllm_config,
            vllm_config.num_speculative_tokens + self.num_new_sampled_tokens_per_step,
        )
        # The key whose build capture_inner_cudagraphs is recording.
        self._recording: GraphKey | None = None
        # Whose buffers the recorded builds read and write.
        self._recorded_owners: tuple[int, ...] | None = None
        # Leading rows of _replay_start known to hold zeros.
        self._zero_replay_starts = 0
        # Waking up from sleep may leave other values in _replay_start.
        self._trust_replay_starts = not vllm_config.model_config.enable_sleep_mode
        if is_global_first_rank():
            atexit.register(_log_stats, weakref.ref(self))

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self.release_metadata_graphs()

    def release_metadata_graphs(self) -> None:
        """Drop the recordings, with the memory and the builders they keep alive."""
        self.graphs.release()
        self._recorded_owners = None

    def capture_inner_cudagraphs(
        self,
        input_buffers: InputBuffers,
        block_tables: BlockTables,
        attn_groups: AttnGroups,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        self.record_metadata_graphs(
            input_buffers, block_tables, attn_groups, kv_cache_config
        )
        super().capture_inner_cudagraphs(
            input_buffers, block_tables, attn_groups, kv_cache_config
        )

    def record_metadata_graphs(
        self,
        input_buffers: InputBuffers,
        block_tables: BlockTables,
        attn_groups: AttnGroups,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """Record the builds of the FULL decode steps, in place of earlier ones."""
        self.release_metadata_graphs()
        if self.graphs.can_record(attn_groups):
            report = self._record(
                input_buffers, block_tables, attn_groups, kv_cache_config
            )
            outcome = report.line()
        else:
            outcome = "attention metadata built eagerly: a builder is not recordable"
        if is_global_first_rank():
            logger.info("DeepSeek-V4.1 decode: %s.", outcome)

    def _record(
        self,
        input_buffers: InputBuffers,
        block_tables: BlockTables,
        attn_groups: AttnGroups,
        kv_cache_config: KVCacheConfig,
    ) -> RecordingReport:
        """Record the build of every decode step the FULL graphs serve.

        A failure ends the session, not the start-up: what is recorded by then
        serves, and every other step builds eagerly.
        """
        keys = self.graphs.capture_keys(self.full_graphs)
        stopped = None
        start = time.perf_counter()
        free_bytes = torch.cuda.mem_get_info()[0]
        seconds = mib = 0.0
        for key in keys:
            self._recording = key
            try:
                self.prepare_attn(
                    decode_batch(key, input_buffers, self.max_model_len),
                    CUDAGraphMode.FULL,
                    block_tables.get_dummy_block_tables(key.num_reqs_after_padding),
                    block_tables.get_dummy_slot_mappings(key.num_tokens_after_padding),
                    attn_groups,
                    kv_cache_config,
                )
            except Exception as error:
                logger.exception("Recording the attention-metadata build failed.")
                # CUDA's errors go on for lines about debugging.
                stopped = f"{type(error).__name__}: {error}".partition("\n")[0]
            finally:
                self._recording = None
            seconds = time.perf_counter() - start
            mib = max(0, free_bytes - torch.cuda.mem_get_info()[0]) / 2**20
            if stopped is None and seconds > MAX_RECORDING_SECONDS:
                stopped = f"over the budget of {MAX_RECORDING_SECONDS:.0f} s"
            if stopped is None and mib > MAX_RECORDING_MIB:
                stopped = f"over the budget of {MAX_RECORDING_MIB:.0f} MiB"
            if stopped is not None:
                break
        return RecordingReport(len(self.graphs), len(keys), seconds, mib, stopped)

    def _build_attn_metadata(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: AttnGroups,
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        ubatch_idx: int = 0,
        **kwargs: Any,
    ) -> dict[str, Any]:
        eager_build = super()._build_attn_metadata
        if self._recording is not None:
            attn_metadata = self.graphs.capture(
                self._recording,
                attn_groups,
                block_tables,
                lambda groups: eager_build(
                    input_batch,
                    cudagraph_mode,
                    block_tables,
                    slot_mappings,
                    groups,
                    kv_cache_config,
                    **kwargs,
                ),
            )
            self._recorded_owners = _owners(
                input_batch, block_tables, slot_mappings, attn_groups
            )
            return attn_metadata

        replayed = None
        if for_capture:
            self.graphs.build_eagerly(Eager.DUMMY)
        elif ubatch_idx != 0:
            self.graphs.build_eagerly(Eager.MICRO_BATCH)
        else:
            key = self.graphs.key(input_batch, cudagraph_mode)
            if key is not None:
                replayed = self._replay_recorded(
                    key, input_batch, block_tables, slot_mappings, attn_groups
                )
            self._log_stats_if_due()
        if replayed is not None:
            return replayed
        return eager_build(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture=for_capture,
            ubatch_idx=ubatch_idx,
            **kwargs,
        )

    def _replay_recorded(
        self,
        key: GraphKey,
        input_batch: InputBatch,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: AttnGroups,
    ) -> dict[str, Any] | None:
        if not self.graphs.can_record(attn_groups):
            self.graphs.build_eagerly(Eager.UNKNOWN_BUILDER)
            return None
        if self._recorded_owners is not None and self._recorded_owners != _owners(
            input_batch, block_tables, slot_mappings, attn_groups
        ):
            self.graphs.build_eagerly(Eager.STALE)
            return None
        return self.graphs.replay(key)

    def _upload_replay_start(self, values: np.ndarray, num_reqs: int) -> torch.Tensor:
        # Decode steps have no replay start: once the rows hold zeros, uploading
        # zeros again only costs a launch. All other writers write zeros.
        replays = bool(values.any())
        if replays or num_reqs > self._zero_replay_starts:
            super()._upload_replay_start(values, num_reqs)
            if self._trust_replay_starts:
                self._zero_replay_starts = 0 if replays else num_reqs
        return self._replay_start[:num_reqs]

    def _log_stats_if_due(self) -> None:
        line = self.graphs.stats.line_if_due()
        if line is not None and is_global_first_rank():
            logger.info("%s", line)


def _owners(
    input_batch: InputBatch,
    block_tables: Sequence[torch.Tensor],
    slot_mappings: torch.Tensor,
    attn_groups: AttnGroups,
) -> tuple[int, ...]:
    """What a recorded build has baked in and no key tells: whose buffers it reads
    and writes. One address of each owner will do, as each makes all of its
    buffers at once."""
    return (
        id(attn_groups),
        input_batch.query_start_loc.data_ptr(),
        slot_mappings.data_ptr(),
        block_tables[0].data_ptr(),
    )


def _log_stats(model_state: "weakref.ref[DeepseekV41RecordedModelState]") -> None:
    state = model_state()
    if state is not None and state.graphs.stats.full_decode_steps:
        logger.info("%s", state.graphs.stats.line())
