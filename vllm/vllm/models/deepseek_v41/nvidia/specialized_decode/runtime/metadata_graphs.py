# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the attention-metadata builds of FULL decode steps.

A FULL CUDA graph replays the forward alone. It reads no metadata object, only
the device buffers that the metadata builders refreshed before it, so a build
that runs the same launches into the same buffers serves it just as well.
``AttnMetadataCudaGraphs`` records such builds while the CUDA graphs of the model
are captured, by the shape of the decode step (the graph key), and replays them:

    input_batch -> key() -> replay() -> forward graph
                     |          |
                     +----------+-> None: the caller builds eagerly

Where every builder may be recorded by padded shape (``recordable``), one
recording serves all request counts of a FULL graph.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.math_utils import round_up
from vllm.utils.torch_utils import current_stream
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch

from ..metadata.eligibility import Eager, why_not_uniform_decode
from ..metadata.fused_build import AttnGroups, BuildFn, FusedBuild
from ..metadata.graph_capture import record_graph, refuse_host_syncs
from ..metadata.recordable import OneStepHolders, Recording, recording_of
from ..metadata.stats import MetadataGraphStats, Way
from ..metadata.tensors import unrefreshed_tensor

logger = init_logger(__name__)


class GraphKey(NamedTuple):
    """The shape of a decode step."""

    num_reqs: int
    num_reqs_after_padding: int
    num_tokens: int
    num_tokens_after_padding: int

    @classmethod
    def padded(cls, num_reqs: int, num_tokens: int) -> "GraphKey":
        """The key of the batch that fills a graph of this shape."""
        return cls(num_reqs, num_reqs, num_tokens, num_tokens)


class NotRecordableError(RuntimeError):
    """A recorded build would not refresh what the forward graphs read."""


class _Recorded(NamedTuple):
    served: Way
    # Refreshes what the forward graph reads.
    refresh: Callable[[], None]
    attn_metadata: dict[str, Any]
    # What a forward fills in attn_metadata, and must not have.
    holders: OneStepHolders
    # Whether refresh follows from device data alone, whatever the host knows.
    device_driven: bool


class AttnMetadataCudaGraphs:
    """Records attention-metadata builds by graph key during CUDA graph capture
    and replays them.

    The graphs write the builders' buffers at their capture-time addresses:
    every capture of the model's graphs must ``release`` and record again.
    ``decode_query_len`` is 1 + the number of speculative tokens.
    """

    def __init__(self, vllm_config: VllmConfig, decode_query_len: int) -> None:
        self._vllm_config = vllm_config
        self._decode_query_len = decode_query_len
        self._graphs: dict[GraphKey, _Recorded] = {}
        self.in_graph: dict[tuple[int, int], dict[str, Any]] = {}
        """By padded requests and tokens, the metadata of the steps whose forward
        graph refreshes it; what ``key`` and ``replay`` come to, without a call."""
        self._side_streams: list[torch.cuda.Stream] = []
        self._recording: Recording | None = None
        self.stats = MetadataGraphStats()

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def key(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        is_dummy: bool = False,
    ) -> GraphKey | None:
        """The key of a step whose build can be recorded, or None, counted with
        its reason.

        Only uniform decodes in a FULL graph qualify; where the build follows from
        device data alone, one-token prefills and dummy steps do too. The key fixes
        every host value the build reads: under padded recording those of the full
        graph, else those of the step.
        """
        padded = GraphKey.padded(
            input_batch.num_reqs_after_padding, input_batch.num_tokens_after_padding
        )
        recorded = self._graphs.get(padded)
        device_driven = recorded is not None and recorded.device_driven
        why = why_not_uniform_decode(input_batch, cudagraph_mode, device_driven)
        if is_dummy and not (device_driven and why is None):
            why = Eager.DUMMY
        if why is not None:
            self.build_eagerly(why)
            return None
        if device_driven or self._recording == Recording.PADDED:
            return padded
        return padded._replace(
            num_reqs=input_batch.num_reqs, num_tokens=input_batch.num_tokens
        )

    def build_eagerly(self, why: Eager) -> None:
        """Count a step that does not replay."""
        self.stats.eager[why] += 1

    def capture_keys(
        self, full_graphs: Iterable[BatchExecutionDescriptor] | None = None
    ) -> list[GraphKey]:
        """The keys of the decode steps that the FULL decode graphs serve,
        largest first.

        The graphs are ``full_graphs`` where the caller knows them, else those
        ``CudaGraphManager`` derives from the configuration. A step runs the
        smallest graph that holds its requests.
        """
        if full_graphs is None:
            shapes = self._configured_shapes()
        else:
            shapes = {
                (graph.num_reqs, graph.num_tokens)
                for graph in full_graphs
                if graph.num_reqs is not None
                and graph.uniform_token_count is not None
                and graph.num_ubatches == 1
            }
        keys: list[GraphKey] = []
        # Per query length, the largest request count a smaller graph holds.
        held: dict[int, int] = {}
        for padded_reqs, padded_tokens in sorted(shapes):
            query_len = padded_tokens // padded_reqs
            if self._recording == Recording.PADDED:
                counts = range(padded_reqs, padded_reqs + 1)
            else:
                counts = range(held.get(query_len, 0) + 1, padded_reqs + 1)
            held[query_len] = padded_reqs
            keys += [
                GraphKey(n, padded_reqs, n * query_len, padded_tokens) for n in counts
            ]
        return sorted(keys, key=lambda key: key[::-1], reverse=True)

    def _configured_shapes(self) -> set[tuple[int, int]]:
        """(requests, tokens) of the uniform decode graphs, by the configuration:
        each capture size in whole requests of the query length."""
        compilation = self._vllm_config.compilation_config
        query_len = self._decode_query_len
        most_tokens = min(
            self._vllm_config.scheduler_config.max_num_seqs * query_len,
            compilation.max_cudagraph_capture_size,
        )
        return {
            (num_tokens // query_len, num_tokens)
            for size in compilation.cudagraph_capture_sizes or ()
            if (num_tokens := round_up(size, query_len)) <= most_tokens
        }

    def can_record(self, attn_groups: AttnGroups) -> bool:
        """Whether every metadata builder of ``attn_groups`` may be recorded, and
        how: the weakest declaration holds for all. Decided once until
        ``release``."""
        if self._recording is None:
            self._recording = min(
                (
                    recording_of(group.get_metadata_builder())
                    for groups in attn_groups
                    for group in groups
                ),
                default=Recording.NOT,
            )
        return self._recording != Recording.NOT

    def capture(
        self,
        key: GraphKey,
        attn_groups: AttnGroups,
        block_tables: Sequence[torch.Tensor],
        build_fn: BuildFn,
    ) -> dict[str, Any]:
        """Record the build of ``key`` and return the metadata it built.

        Recorded in the global CUDA graph pool, which the FULL forward graphs and
        memory profiling use. The eager builds before it warm lazy allocations,
        kernel compilation and per-stream library state.

        Raises NotRecordableError if the recorded build leaves out a tensor that
        the forward graphs read, and RuntimeError if it waits for the device or
        does other work that a graph cannot hold. Then nothing is kept.
        """
        eager_metadata = build_fn(attn_groups)
        with refuse_host_syncs():
            self._forked_build(attn_groups, block_tables, build_fn)
        attn_metadata, replay = self._record(
            lambda: self._forked_build(attn_groups, block_tables, build_fn)
        )
        unrefreshed = unrefreshed_tensor(
            eager_metadata, attn_metadata, block_tables[0].device.type
        )
        if unrefreshed is not None:
            raise NotRecordableError(
                f"the recorded build puts {unrefreshed} elsewhere than an eager one"
            )
        self._keep(key, Way.REPLAY, replay, attn_metadata, device_driven=False)
        return attn_metadata

    def capture_fused(
        self,
        key: GraphKey,
        attn_metadata: dict[str, Any],
        fused: FusedBuild,
        build_left: BuildFn,
    ) -> None:
        """Record ``fused``, which refreshes ``attn_metadata`` and has run before;
        ``build_left`` builds the groups it leaves."""

        def launch() -> None:
            fused.launch(build_left)

        with refuse_host_syncs():
            launch()
        _, replay = self._record(launch)
        self._keep(
            key,
            Way.REPLAY,
            replay,
            attn_metadata,
            device_driven=not any(fused.left),
        )

    def keep_launch(
        self, key: GraphKey, attn_metadata: dict[str, Any], fused: FusedBuild
    ) -> None:
        """As ``capture_fused`` of a build that leaves no group, but launched anew on
        every step."""
        self._keep(key, Way.LAUNCH, fused.launch, attn_metadata, device_driven=True)

    def keep_in_graph(self, key: GraphKey, attn_metadata: dict[str, Any]) -> None:
        """The forward graphs of ``key`` refresh ``attn_metadata``, which holds
        nothing that a forward could fill."""
        self._keep(key, Way.IN_GRAPH, _nothing, attn_metadata, device_driven=True)
        self.in_graph[key.num_reqs, key.num_tokens] = attn_metadata

    def _record(self, build: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What ``build`` returns while it is recorded, and its replay."""
        graph = torch.cuda.CUDAGraph()
        with (
            capture_pool(
                current_platform.get_global_graph_pool(), self._vllm_config
            ) as pool,
            record_graph(graph, pool),
        ):
            built = build()
        return built, graph.replay

    def _keep(
        self,
        key: GraphKey,
        served: Way,
        refresh: Callable[[], None],
        attn_metadata: dict[str, Any],
        device_driven: bool,
    ) -> None:
        holders = OneStepHolders.of(attn_metadata)
        self._graphs[key] = _Recorded(
            served, refresh, attn_metadata, holders, device_driven
        )

    def served(self) -> Counter[Way]:
        """How many keys are served each way."""
        return Counter(recorded.served for recorded in self._graphs.values())

    def replay(self, key: GraphKey) -> dict[str, Any] | None:
        """Refresh what the forward graphs of ``key`` read, the way it was recorded,
        and return the metadata recorded with it.

        None, counted, where the key was not recorded: the caller then builds
        eagerly. The metadata is the same object on every replay; it must reach
        no forward but the replayed FULL graph.
        """
        recorded = self._graphs.get(key)
        if recorded is None:
            logger.warning_once(
                "DeepSeek-V4.1 decode: no recorded attention-metadata build for %d of "
                "%d requests and %d of %d tokens; such steps build it eagerly.",
                *key,
            )
            self.build_eagerly(Eager.UNRECORDED)
            return None
        if recorded.holders.used():
            # Whoever used it has broken the rule above. The buffers are right all
            # the same, but the object is not fit to be handed out again.
            del self._graphs[key]
            logger.error(
                "DeepSeek-V4.1 decode: a forward has used recorded attention "
                "metadata; its steps build eagerly from now on. Please report this."
            )
            self.build_eagerly(Eager.USED_HOLDER)
            return None
        recorded.refresh()
        self.stats.refreshed[recorded.served] += 1
        return recorded.attn_metadata

    def release(self) -> None:
        """Drop the recordings and the verdict of ``can_record``."""
        self._graphs.clear()
        self.in_graph.clear()
        self._recording = None

    def _forked_build(
        self,
        attn_groups: AttnGroups,
        block_tables: Sequence[torch.Tensor],
        build_fn: BuildFn,
    ) -> dict[str, Any]:
        """Build the KV-cache groups as concurrent branches, one per block-table
        storage, and return the serial build's metadata in its layer order.

        Groups on one storage stay in serial order on one branch: the sparse-MLA
        builder clamps its block table in place. Apart from that groups share only
        read-only inputs and the token-to-request map, which the first group that
        asks builds into a buffer of its own for the groups after it. The forward
        graphs read that buffer; its owner is the first to ask on its branch too,
        so it fills the buffer again, and every other branch builds its own map.
        """
        branches: dict[int, AttnGroups] = {}
        for index, groups in enumerate(attn_groups):
            if groups:
                storage = block_tables[index].untyped_storage().data_ptr()
                branch = branches.setdefault(storage, [[] for _ in attn_groups])
                branch[index] = groups
        if len(branches) < 2:
            return build_fn(attn_groups)

        first, *others = branches.values()
        # Kept, so that the warm-up meets the per-stream state of the recording.
        while len(self._side_streams) < len(others):
            self._side_streams.append(torch.cuda.Stream())
        side_streams = self._side_streams[: len(others)]
        main_stream = current_stream()
        for stream in side_streams:
            stream.wait_stream(main_stream)
        try:
            built = build_fn(first)
            for stream, branch in zip(side_streams, others, strict=True):
                with torch.cuda.stream(stream):
                    built |= build_fn(branch)
        finally:
            # After an error too: no capture can end with a stream still apart.
            for stream in side_streams:
                main_stream.wait_stream(stream)
        return {
            name: built[name]
            for groups in attn_groups
            for group in groups
            for name in group.layer_names
        }


def _nothing() -> None:
    """The refresh of a key whose forward graphs do it."""
