# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the attention-metadata builds of FULL decode steps.

A FULL CUDA graph replays the forward alone. It reads no metadata object, only
the device buffers that the metadata builders refreshed before it, so a build
that runs the same launches into the same buffers serves it just as well.
``AttnMetadataCudaGraphs`` records such builds while the CUDA graphs of the model
are captured, one for each FULL graph, and replays them by the key of the step:

    input_batch -> key() -> replay() -> forward graph
                     |          |
                     +----------+-> None: the caller builds eagerly

Upstream's executor drives it as it does upstream's own class of the name; the model
state of ``metadata/`` also keeps here what refreshes a graph in other ways.
"""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.utils.math_utils import round_up
from vllm.v1.worker.gpu.input_batch import InputBatch

from ..metadata.coverage import Coverage
from ..metadata.forked_build import forked_build
from ..metadata.fused_build import AttnGroups, BuildFn, FusedBuild
from ..metadata.graph_capture import record
from ..metadata.holders import without_holders
from ..metadata.jobs import knows
from ..metadata.key import Eager, GraphKey, key_of
from ..metadata.stats import MetadataGraphStats, Way
from ..metadata.tensors import unrefreshed_tensor

logger = init_logger(__name__)


class NotRecordableError(RuntimeError):
    """A recorded build would not refresh what the forward graphs read."""


class Kept(NamedTuple):
    """How the steps of a key get their metadata."""

    way: Way
    # Refreshes what the forward graph reads.
    refresh: Callable[[], None]
    attn_metadata: dict[str, Any]
    # Kept alive: what refresh reads on the device.
    fused: FusedBuild | None


class AttnMetadataCudaGraphs:
    """Records attention-metadata builds by graph key during CUDA graph capture
    and replays them.

    The graphs write the builders' buffers at their capture-time addresses:
    every capture of the model's graphs must ``release`` and record again.
    ``decode_query_len`` is 1 + the number of speculative tokens, ``varlen`` has the
    keys of the graphs that take shorter queries too, in any mix.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        decode_query_len: int,
        varlen: Container[GraphKey] = (),
    ) -> None:
        self.vllm_config = vllm_config
        self._decode_query_len = decode_query_len
        self._varlen = varlen
        self._graphs: dict[GraphKey, Kept] = {}
        # Why keys that were kept are no longer.
        self._retired: dict[GraphKey, Eager] = {}
        self.in_graph: dict[GraphKey, dict[str, Any]] = {}
        """The metadata of the steps whose forward graph refreshes it: what ``key`` and
        ``replay`` come to, without a call."""
        self._side_streams: list[torch.cuda.Stream] = []
        self._can_record: bool | None = None
        self.coverage = Coverage()
        """Of the FULL graphs that the model state has told of."""
        self.stats = MetadataGraphStats()

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def __getitem__(self, key: GraphKey) -> Kept:
        return self._graphs[key]

    def key(
        self, input_batch: InputBatch, cudagraph_mode: CUDAGraphMode
    ) -> GraphKey | None:
        """The key of a step whose build can be recorded, or None, counted with its
        reason.
        """
        found = key_of(input_batch, cudagraph_mode, self._varlen)
        if isinstance(found, Eager):
            if found == Eager.NOT_FULL and self.coverage.is_exceeded_by(input_batch):
                found = Eager.BEYOND_GRAPHS
            self.build_eagerly(found)
            return None
        return found

    def build_eagerly(self, why: Eager) -> None:
        """Count a step that does not replay."""
        self.stats.eager[why] += 1

    def capture_keys(self) -> list[GraphKey]:
        """The keys of the uniform FULL decode graphs, largest first, as
        ``CudaGraphManager`` derives these from the configuration: each capture size in
        whole requests of the query length.
        """
        compilation = self.vllm_config.compilation_config
        query_len = self._decode_query_len
        most_tokens = min(
            self.vllm_config.scheduler_config.max_num_seqs * query_len,
            compilation.max_cudagraph_capture_size,
        )
        sizes = {
            round_up(size, query_len)
            for size in compilation.cudagraph_capture_sizes or ()
        }
        return [
            GraphKey.padded(num_tokens // query_len, num_tokens)
            for num_tokens in sorted(sizes, reverse=True)
            if num_tokens <= most_tokens
        ]

    def can_record(self, attn_groups: AttnGroups) -> bool:
        """Whether the builder of every attention group is known. Decided once until
        ``release``.
        """
        if self._can_record is None:
            builders = [
                group.get_metadata_builder()
                for groups in attn_groups
                for group in groups
            ]
            self._can_record = bool(builders) and all(map(knows, builders))
        return self._can_record

    def capture(
        self,
        key: GraphKey,
        attn_groups: AttnGroups,
        block_tables: Sequence[torch.Tensor],
        build_fn: BuildFn,
    ) -> dict[str, Any]:
        """Record the build of ``key`` and return the metadata it built.

        The eager builds before it warm lazy allocations, kernel compilation and
        per-stream library state. Raises NotRecordableError if the recorded build
        leaves out a tensor that the forward graphs read, and RuntimeError if a graph
        cannot hold it. Then nothing is kept.
        """
        eager_metadata = build_fn(attn_groups)
        attn_metadata, graph = record(
            lambda: forked_build(
                attn_groups, block_tables, build_fn, self._side_streams
            ),
            self.vllm_config,
        )
        unrefreshed = unrefreshed_tensor(
            eager_metadata, attn_metadata, block_tables[0].device.type
        )
        if unrefreshed is not None:
            raise NotRecordableError(
                f"the recorded build puts {unrefreshed} elsewhere than an eager one"
            )
        self.keep(key, Way.REPLAY, attn_metadata, graph.replay)
        return attn_metadata

    def keep(
        self,
        key: GraphKey,
        way: Way,
        attn_metadata: dict[str, Any],
        refresh: Callable[[], None],
        fused: FusedBuild | None = None,
    ) -> None:
        """Serve ``key`` by ``refresh``, which refreshes ``attn_metadata`` and reads the
        jobs of ``fused``.
        """
        attn_metadata = without_holders(attn_metadata)
        self._graphs[key] = Kept(way, refresh, attn_metadata, fused)
        if way == Way.IN_GRAPH:
            self.in_graph[key] = attn_metadata

    def way(self, key: GraphKey) -> Way:
        """How the steps of ``key`` get their metadata."""
        kept = self._graphs.get(key)
        return Way.EAGER if kept is None else kept.way

    def served(self) -> Counter[Way]:
        """How many keys are served each way."""
        return Counter(kept.way for kept in self._graphs.values())

    def replay(self, key: GraphKey) -> dict[str, Any] | None:
        """Refresh what the forward graphs of ``key`` read, the way it was recorded,
        and return the metadata recorded with it.

        None, counted, where the key was not recorded: the caller then builds
        eagerly. The metadata is the same object on every replay; it must reach
        no forward but the replayed FULL graph, and another would fail at it: what is
        good for one step is not in it.
        """
        kept = self._graphs.get(key)
        if kept is None:
            why = self._retired.get(key, Eager.UNRECORDED)
            if why == Eager.UNRECORDED:
                logger.warning_once(
                    "DeepSeek-V4.1 decode: no recorded attention-metadata build for %d "
                    "of %d requests and %d of %d tokens; such steps build it eagerly.",
                    *key,
                )
            self.build_eagerly(why)
            return None
        kept.refresh()
        self.stats.refreshed[kept.way] += 1
        return kept.attn_metadata

    def retire(self, key: GraphKey, why: Eager) -> None:
        """Let the steps of ``key`` build eagerly from now on, counted as ``why``."""
        del self._graphs[key]
        self.in_graph.pop(key, None)
        self._retired[key] = why

    def release(self) -> None:
        """Drop the recordings and the verdict of ``can_record``."""
        self._graphs.clear()
        self._retired.clear()
        self.in_graph.clear()
        self._can_record = None
