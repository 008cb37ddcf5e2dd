# SPDX-License-Identifier: Apache-2.0
"""The model state that takes attention-metadata builds off the host.

It changes where the metadata of a FULL step comes from, and nothing else. In
order of preference, each graph is served by

- its own head: the fused build was captured in front of the forward;
- a recording of the fused build, or of upstream's builders, replayed before it;
- a launch of the fused build (``metadata_graphs=launch``);
- an eager build of ``DeepseekV41ModelState``, as all other steps are.
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
from ..deployment import MetadataGraphs, requested_metadata_graphs
from ..runtime.metadata_graphs import AttnGroups, AttnMetadataCudaGraphs, GraphKey
from .eligibility import Eager
from .flashmla_plan import PlanSharing
from .in_graph import InGraphBuilds
from .padded_build import PaddedBuild
from .proven_builds import FusedBuilds
from .stats import RecordingReport

logger = init_logger(__name__)

_FULL = CUDAGraphMode.FULL

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


class DeepseekV41DeviceMetadataModelState(DeepseekV41ModelState):
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
        self.metadata_graphs = requested_metadata_graphs(vllm_config.additional_config)
        self.graphs = AttnMetadataCudaGraphs(
            vllm_config,
            vllm_config.num_speculative_tokens + self.num_new_sampled_tokens_per_step,
        )
        self.fused_builds = FusedBuilds(self.max_model_len)
        self.in_graph = InGraphBuilds(self.fused_builds, MAX_RECORDING_SECONDS)
        # The last metadata built for a capture, and how, for the graph that is
        # captured with it.
        self._for_capture: tuple[dict[str, Any], PaddedBuild] | None = None
        # The key whose build capture_inner_cudagraphs is recording.
        self._recording: GraphKey | None = None
        # Whose buffers the recorded builds read and write.
        self._recorded_owners: tuple[int, ...] | None = None
        # Leading rows of _replay_start known to hold zeros, as all do when made.
        self._zero_replay_starts = self._replay_start.shape[0]
        self._plan_sharing: PlanSharing | None = None
        if is_global_first_rank():
            atexit.register(_log_stats, weakref.ref(self))

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self.release_metadata_graphs()
        # Made with the weights, the first one may come back from sleep with anything
        # in it; what is made here is kept at every level of sleep.
        self._replay_start = torch.zeros_like(self._replay_start)
        self._zero_replay_starts = self._replay_start.shape[0]

    def release_metadata_graphs(self) -> None:
        """Drop the recordings, with the memory and the builders they keep alive."""
        self.graphs.release()
        self.in_graph.release()
        self.fused_builds.release()
        self._for_capture = None
        self._recorded_owners = None
        self._plan_sharing = None

    def build_in_graph(
        self, graph: BatchExecutionDescriptor, attn_metadata: dict[str, Any]
    ) -> None:
        """Refresh ``attn_metadata`` at the head of the forward of ``graph``.

        The runner calls this when it warms up the forward of a FULL graph, and
        again while it captures it.
        """
        if self.metadata_graphs != MetadataGraphs.AUTO:
            return
        built, build = self._for_capture or (None, None)
        if (
            build is not None
            and built is attn_metadata
            and graph.uniform_token_count is not None
            and graph.num_ubatches == 1
        ):
            self.in_graph.head(build.fused(attn_metadata), build.by_upstream)
        elif graph.num_reqs is not None:
            self.in_graph.leave_out((graph.num_reqs, graph.num_tokens))

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
        self.graphs.release()
        self._for_capture = None
        for shape, attn_metadata in self.in_graph.captured().items():
            self.graphs.keep_in_graph(GraphKey.padded(*shape), attn_metadata)
        if self.graphs.can_record(attn_groups):
            report = self._record(
                input_buffers, block_tables, attn_groups, kv_cache_config
            )
            outcome = report.line()
        else:
            outcome = "metadata built eagerly: a builder is unknown"
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
            if key in self.graphs:
                continue
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
        return RecordingReport(
            self.graphs.served(),
            len(keys),
            self.in_graph.seconds + seconds,
            mib,
            stopped,
        )

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        # A FULL graph that refreshes its own metadata needs nothing from the host
        # but the replay starts, which are zero and stay so in decode steps. No
        # function of Python's and no enum's member here: after a long step the
        # caches are cold, and either costs microseconds.
        if (
            cudagraph_mode is _FULL
            and not input_batch.has_prefill
            and input_batch.num_reqs <= self._zero_replay_starts
        ):
            attn_metadata = self.graphs.in_graph.get(
                (
                    input_batch.num_reqs_after_padding,
                    input_batch.num_tokens_after_padding,
                )
            )
            if attn_metadata is not None:
                if self.decoder_replay_layers is not None:
                    # Of an earlier prefill; no FULL step has one.
                    self.decoder_replay_layers.replay_batch = None
                stats = self.graphs.stats
                stats.in_graph += 1
                if time.monotonic() >= stats.line_due:
                    self._log_stats()
                return attn_metadata
        return super().prepare_attn(input_batch, cudagraph_mode, *args, **kwargs)

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

        def padded_build() -> PaddedBuild:
            return PaddedBuild(
                eager_build,
                input_batch,
                block_tables,
                slot_mappings,
                attn_groups,
                kv_cache_config,
                self._replay_start,
            )

        if self._recording is not None:
            attn_metadata = self._record_build(self._recording, padded_build())
            self._recorded_owners = _owners(
                input_batch, block_tables, slot_mappings, attn_groups
            )
            return attn_metadata

        replayed = None
        if ubatch_idx != 0:
            self.graphs.build_eagerly(Eager.MICRO_BATCH)
        else:
            key = self.graphs.key(input_batch, cudagraph_mode, for_capture)
            if key is not None:
                replayed = self._replay_recorded(
                    key, input_batch, block_tables, slot_mappings, attn_groups
                )
            if time.monotonic() >= self.graphs.stats.line_due:
                self._log_stats()
        if replayed is not None:
            return replayed
        attn_metadata = eager_build(
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
        if self._plan_sharing is None or not self._plan_sharing.is_of(attn_groups):
            self._plan_sharing = PlanSharing(attn_groups)
        self._plan_sharing.share(attn_metadata)
        if for_capture and self.metadata_graphs == MetadataGraphs.AUTO:
            self._for_capture = attn_metadata, padded_build()
        return attn_metadata

    def _record_build(self, key: GraphKey, build: PaddedBuild) -> dict[str, Any]:
        """Take the build of ``key`` off the host, fused as far as may be."""
        recorded = self.metadata_graphs != MetadataGraphs.LAUNCH
        # A key of a partial batch bakes in what the fused build reads on the device.
        if key.num_reqs == key.num_reqs_after_padding:
            attn_metadata = build.by_upstream(build.attn_groups)
            fused = self.fused_builds.prove(
                build.fused(attn_metadata), build.by_upstream
            )
            if fused is not None and recorded:
                self.graphs.capture_fused(key, attn_metadata, fused, build.by_upstream)
                return attn_metadata
            if fused is not None and not any(fused.left):
                self.graphs.keep_launch(key, attn_metadata, fused)
                return attn_metadata
        if recorded:
            return self.graphs.capture(
                key, build.attn_groups, build.block_tables, build.by_upstream
            )
        return build.by_upstream(build.attn_groups)

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
            self._zero_replay_starts = 0 if replays else num_reqs
        return self._replay_start[:num_reqs]

    def _log_stats(self) -> None:
        line = self.graphs.stats.due_line()
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


def _log_stats(model_state: "weakref.ref[DeepseekV41DeviceMetadataModelState]") -> None:
    state = model_state()
    if state is not None and state.graphs.stats.full_decode_steps:
        logger.info("%s", state.graphs.stats.line())
