# SPDX-License-Identifier: Apache-2.0
"""The model state that takes attention-metadata builds off the host.

It changes where the metadata of a FULL step comes from, and nothing else: the README
of this folder names the ways.
"""

import atexit
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
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
from ..deployment import (
    MetadataGraphs,
    requested_metadata_graphs,
    requested_verification,
)
from ..runtime.metadata_graphs import AttnMetadataCudaGraphs
from .flashmla_plan import PlanSharing
from .fused_build import AttnGroups
from .in_graph import InGraphBuilds
from .key import Eager, GraphKey
from .padded_builds import PaddedBuilds
from .proven_builds import ProvenBuilds
from .recording import MAX_SECONDS, Recorder, Report, log_over_ranks
from .stats import Way
from .verify import Verifier

logger = init_logger(__name__)

_FULL = CUDAGraphMode.FULL


class DeepseekV41DeviceMetadataModelState(DeepseekV41ModelState):
    """DeepSeek-V4.1's, with builds recorded or captured at start-up."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: EncoderCache | None,
        device: torch.device,
    ):
        super().__init__(vllm_config, model, encoder_cache, device)
        self.metadata_graphs = requested_metadata_graphs(vllm_config.additional_config)
        # Of the variable-length FULL graphs that were captured.
        self._max_query_lens: dict[GraphKey, int] = {}
        self.graphs = AttnMetadataCudaGraphs(
            vllm_config,
            vllm_config.num_speculative_tokens + self.num_new_sampled_tokens_per_step,
            self._max_query_lens,
        )
        self.proven_builds = ProvenBuilds()
        self.in_graph = InGraphBuilds(self.proven_builds, MAX_SECONDS)
        # Of the FULL decode graphs that were captured.
        self._full_graphs: set[GraphKey] = set()
        # Whose buffers the recorded builds read and write.
        self._recorded_owners: tuple[int, ...] | None = None
        # Leading rows of _replay_start known to hold zeros, as all do when made.
        self._zero_replay_starts = self._replay_start.shape[0]
        self._plan_sharing: PlanSharing | None = None
        self._verify_every = requested_verification(vllm_config.additional_config)
        self._verifier: Verifier | None = None
        if is_global_first_rank():
            atexit.register(_log_stats, weakref.ref(self))

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        """Forget what was recorded for an earlier KV cache."""
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self.release_metadata_graphs()
        # Made with the weights, the first one may come back from sleep with anything
        # in it; what is made here is kept at every level of sleep.
        self._replay_start = torch.zeros_like(self._replay_start)
        self._zero_replay_starts = self._replay_start.shape[0]

    def release_metadata_graphs(self) -> None:
        """Drop the recordings, with the memory and the builders they keep alive."""
        self.graphs.release()
        self.graphs.coverage.clear()
        self.in_graph.release()
        self.proven_builds.release()
        self._full_graphs.clear()
        self._max_query_lens.clear()
        self._recorded_owners = None
        self._plan_sharing = None
        self._verifier = None

    def build_in_graph(
        self,
        graph: BatchExecutionDescriptor,
        attn_metadata: dict[str, Any],
        input_buffers: InputBuffers,
        block_tables: BlockTables,
        attn_groups: AttnGroups,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """Refresh ``attn_metadata`` at the head of the forward of ``graph``.

        The runner calls this when it warms up the forward of a FULL graph, and
        again while it captures it.
        """
        if graph.num_reqs is None:
            # No step has its key.
            return
        self.graphs.coverage.add(graph)
        key = GraphKey.padded(graph.num_reqs, graph.num_tokens)
        build = None
        if graph.max_query_len is not None:
            self._max_query_lens[key] = graph.max_query_len
        # A mixed graph, which takes prefills, has neither.
        if graph.uniform_token_count is not None or key in self._max_query_lens:
            self._full_graphs.add(key)
            builds = self._builds(
                input_buffers, block_tables, attn_groups, kv_cache_config
            )
            if self.metadata_graphs == MetadataGraphs.AUTO:
                if not torch.cuda.is_current_stream_capturing():
                    self.in_graph.agree_on_budget()
                build = builds.fused(key, attn_metadata)
        if build is None:
            self.in_graph.leave_out(key)
        elif torch.cuda.is_current_stream_capturing():
            self.in_graph.capture(build)
        else:
            self.in_graph.warm_up(build, builds.by_upstream(key), builds.max_len)

    def capture_inner_cudagraphs(
        self,
        input_buffers: InputBuffers,
        block_tables: BlockTables,
        attn_groups: AttnGroups,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """Record the builds of the FULL graphs that were captured, and log how they
        are served.
        """
        where = input_buffers, block_tables, attn_groups, kv_cache_config
        log_over_ranks(self.record_metadata_graphs(*where))
        shortfall = self.graphs.coverage.shortfall(self.max_num_reqs)
        if shortfall is not None and is_global_first_rank():
            logger.warning("DeepSeek-V4.1 decode: %s.", shortfall)
        super().capture_inner_cudagraphs(*where)

    def record_metadata_graphs(
        self,
        input_buffers: InputBuffers,
        block_tables: BlockTables,
        attn_groups: AttnGroups,
        kv_cache_config: KVCacheConfig,
    ) -> Report:
        """Take the builds of the FULL graphs captured last off the host, in place of
        what was recorded earlier; collective over the TP group.
        """
        builds = self._builds(input_buffers, block_tables, attn_groups, kv_cache_config)
        self._recorded_owners = _owners(
            input_buffers.query_start_loc,
            block_tables.input_block_tables,
            block_tables.slot_mappings,
            attn_groups,
        )
        self.graphs.release()
        for key, (attn_metadata, build) in self.in_graph.captured().items():
            self.graphs.keep(key, Way.IN_GRAPH, attn_metadata, _nothing, build)
        if self._verify_every:
            self._verifier = Verifier(self._verify_every, builds)
            # The fast path of ``prepare_attn`` verifies nothing.
            self.graphs.in_graph.clear()
        recorder = Recorder(
            self.graphs, self.proven_builds, builds, self.metadata_graphs
        )
        return recorder.record_all(self._full_graphs, self.in_graph.seconds)

    def _builds(
        self,
        input_buffers: InputBuffers,
        block_tables: BlockTables,
        attn_groups: AttnGroups,
        kv_cache_config: KVCacheConfig,
    ) -> PaddedBuilds:
        return PaddedBuilds(
            super()._build_attn_metadata,
            input_buffers,
            block_tables,
            attn_groups,
            kv_cache_config,
            self._replay_start,
            self.max_model_len,
            self._max_query_lens,
        )

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The step's metadata, by layer; a FULL graph may refresh its own."""
        # A FULL graph that refreshes its own metadata needs nothing from the host
        # but the replay starts, which are zero and stay so in decode steps. No
        # function of Python's and no enum's member here: after a long step the
        # caches are cold, and either costs microseconds.
        if (
            cudagraph_mode is _FULL
            and not input_batch.has_prefill
            and input_batch.num_reqs <= self._zero_replay_starts
        ):
            num_reqs = input_batch.num_reqs_after_padding
            num_tokens = input_batch.num_tokens_after_padding
            attn_metadata: dict[str, Any] | None = self.graphs.in_graph.get(
                (num_reqs, num_reqs, num_tokens, num_tokens)  # type: ignore[call-overload]
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
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        build_eagerly = partial(
            super()._build_attn_metadata,
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            *args,
            **kwargs,
        )
        attn_metadata = None
        key = self.graphs.key(input_batch, cudagraph_mode)
        if key is not None:
            starts = input_batch.query_start_loc
            owners = _owners(starts, block_tables, slot_mappings, attn_groups)
            attn_metadata = self._refreshed(key, owners, attn_groups)
        if time.monotonic() >= self.graphs.stats.line_due:
            self._log_stats()
        if key is not None and attn_metadata is not None:
            if self._verifier is not None and self._verifier.due():
                self._verify(key, input_batch.num_tokens, build_eagerly)
            return attn_metadata
        attn_metadata = build_eagerly()
        if self._plan_sharing is None or not self._plan_sharing.is_of(attn_groups):
            self._plan_sharing = PlanSharing(attn_groups)
        self._plan_sharing.share(attn_metadata)
        return attn_metadata

    def _refreshed(
        self, key: GraphKey, owners: tuple[int, ...], attn_groups: AttnGroups
    ) -> dict[str, Any] | None:
        """The metadata recorded for ``key``, refreshed, or None, counted."""
        if not self.graphs.can_record(attn_groups):
            self.graphs.build_eagerly(Eager.UNKNOWN_BUILDER)
        elif self._recorded_owners not in (None, owners):
            self.graphs.build_eagerly(Eager.STALE)
        else:
            return self.graphs.replay(key)
        return None

    def _verify(
        self, key: GraphKey, num_tokens: int, build_eagerly: Callable[[], Any]
    ) -> None:
        """Hold the step to upstream's build, whose bytes its forward then reads."""
        assert self._verifier is not None
        kept = self.graphs[key]
        difference = self._verifier.difference(key, kept, num_tokens, build_eagerly)
        self.graphs.stats.verified += 1
        if difference is None:
            return
        if kept.way == Way.IN_GRAPH:
            self.in_graph.disable(key)
        self.graphs.retire(key, Eager.DIFFERED)
        logger.error(
            "DeepSeek-V4.1 decode: the metadata of a step of %d tokens in the graph of "
            "%d requests and %d tokens, served %s, differ from upstream's in %s. Steps "
            "of that graph build eagerly from now on. Please report this.",
            num_tokens,
            key.num_reqs,
            key.num_tokens,
            kept.way,
            difference,
        )

    def _upload_replay_start(self, values: np.ndarray, num_reqs: int) -> torch.Tensor:
        # Decode steps have no replay start: once the rows hold zeros, uploading
        # zeros again only costs a launch. All other writers write zeros.
        replays = bool(values.any())
        if replays or num_reqs > self._zero_replay_starts:
            super()._upload_replay_start(values, num_reqs)
            self._zero_replay_starts = 0 if replays else num_reqs
        return self._replay_start[:num_reqs]

    def take_decode_metadata_steps(self) -> list[tuple[str, str, int]]:
        """Steps since the last call, by way and reason."""
        return self.graphs.stats.take()

    def _log_stats(self) -> None:
        line = self.graphs.stats.due_line()
        if line is not None and is_global_first_rank():
            logger.info("%s", line)


def _nothing() -> None:
    """The refresh of a key whose forward graphs do it."""


def _owners(
    query_start_loc: torch.Tensor,
    block_tables: Sequence[torch.Tensor],
    slot_mappings: torch.Tensor,
    attn_groups: AttnGroups,
) -> tuple[int, ...]:
    """What a recorded build has baked in and no key tells: whose buffers it reads and
    writes. One address of each owner will do, as each makes all of its buffers at
    once.
    """
    return (
        id(attn_groups),
        query_start_loc.data_ptr(),
        slot_mappings.data_ptr(),
        block_tables[0].data_ptr(),
    )


def _log_stats(
    model_state: "weakref.ref[DeepseekV41DeviceMetadataModelState]",
) -> None:
    state = model_state()
    if state is not None and state.graphs.stats.decode_steps:
        logger.info("%s", state.graphs.stats.line())
