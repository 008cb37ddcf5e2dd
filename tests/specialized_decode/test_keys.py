"""Which steps have a key, which key, and the named reason where they have none."""

from dataclasses import replace

import numpy as np
import pytest
from decode_steps import Step
from rig import Architecture, Serving, varlen_graph
from vllm.config import CUDAGraphMode
from vllm.models.deepseek_v41.compressor import CompressorMetadataBuilder
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.key import (
    Eager,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.runtime.metadata_graphs import (
    GraphKey,
)
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

STEP = Step((200, 300, 400), 4, 2)


def uneven(batch):
    return replace(
        batch,
        num_scheduled_tokens=np.array([1, 2, 2], dtype=np.int32),
        num_tokens=5,
    )


def in_varlen_graph(batch):
    # Adaptive verification on, but a step without drafts: nothing but the shape of
    # the graph tells.
    return replace(batch, num_reqs_after_padding=6, num_tokens_after_padding=6)


def adaptive(batch):
    return replace(batch, max_query_len=2)


INELIGIBLE = {
    Eager.NOT_FULL: (lambda batch: batch, CUDAGraphMode.PIECEWISE),
    Eager.FAST_PREFILL: (
        lambda batch: replace(batch, fast_prefill=object()),
        CUDAGraphMode.FULL,
    ),
    Eager.UNEVEN: (uneven, CUDAGraphMode.FULL),
}


@pytest.fixture
def rig(make_rig):
    rig = make_rig(Architecture.SM90, 2)
    rig.record()
    return rig


def test_the_key_of_a_step_is_that_of_its_graph(rig):
    key = rig.state.graphs.key(rig.fill(STEP), CUDAGraphMode.FULL)
    assert key == GraphKey(4, 4, 8, 8)


@pytest.mark.parametrize("reason", INELIGIBLE)
def test_no_key_and_a_named_reason(rig, reason):
    change, mode = INELIGIBLE[reason]
    assert rig.state.graphs.key(change(rig.fill(STEP)), mode) is None
    assert rig.state.graphs.stats.eager == {reason: 1}


@pytest.mark.parametrize("change", [in_varlen_graph, adaptive])
def test_a_step_of_another_graph_than_its_own_has_no_key(rig, change):
    batch = change(rig.fill(STEP))
    assert rig.state.graphs.key(batch, CUDAGraphMode.FULL) is None
    assert rig.state.graphs.stats.eager == {Eager.UNEVEN: 1}


def test_what_a_variable_length_graph_takes_has_its_key(make_rig):
    """Until it is captured anew, as after elastic scaling."""
    rig = make_rig(Architecture.SM90, 2, Serving.LAUNCH, adaptive=True)
    rig.full_graphs = [varlen_graph(6, 2)]
    rig.record()
    step = Step((200, 300, 400), 6, 2, uneven=(1, 2, 1), graph_tokens=6)
    for batch in (rig.fill(step), in_varlen_graph(rig.fill(STEP))):
        key = rig.state.graphs.key(batch, CUDAGraphMode.FULL)
        assert key == GraphKey(6, 6, 6, 6)
    rig.state.release_metadata_graphs()
    assert rig.state.graphs.key(rig.fill(step), CUDAGraphMode.FULL) is None


def test_no_build_of_upstreams_is_recorded_for_queries_of_any_length(make_rig):
    """On SM90 it repeats rows as often as the host believes, in all."""
    rig = make_rig(Architecture.SM90, 2, Serving.UPSTREAM, adaptive=True)
    rig.full_graphs = [varlen_graph(6, 2)]
    rig.record()
    step = Step((200, 300, 400), 6, 2, uneven=(1, 2, 1), graph_tokens=6)
    rig.check_step(step, rig.forward_view(6))
    stats = rig.state.graphs.stats
    assert stats.eager[Eager.UNRECORDED]
    assert not stats.served


def test_not_full_steps_are_no_decode_steps_of_ours(rig):
    rig.state.graphs.key(rig.fill(STEP), CUDAGraphMode.NONE)
    assert rig.state.graphs.stats.full_decode_steps == 0


def test_one_recording_per_full_graph(rig):
    assert list(rig.state.graphs._graphs) == [
        GraphKey(reqs, reqs, 2 * reqs, 2 * reqs) for reqs in (8, 4, 2, 1)
    ]


def test_keys_come_from_the_captured_graphs(make_rig):
    """Dynamic speculative decoding captures several query lengths, LoRA a shape more
    than once; mixed graphs are not ours.
    """
    rig = make_rig(Architecture.SM90, 2, Serving.LAUNCH)

    def graph(reqs, query_len, **options):
        return BatchExecutionDescriptor(
            CUDAGraphMode.FULL, reqs * query_len, reqs, query_len, **options
        )

    rig.full_graphs = [
        graph(2, 2),
        graph(4, 1),
        graph(2, 1),
        graph(2, 2, num_active_loras=1),
        BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 8),
    ]
    rig.record()
    assert list(rig.state.graphs._graphs) == [
        GraphKey(4, 4, 4, 4),
        GraphKey(2, 2, 4, 4),
        GraphKey(2, 2, 2, 2),
    ]
    rig.state.release_metadata_graphs()
    rig.full_graphs = []
    rig.record()
    assert len(rig.state.graphs) == 0


def test_a_subclass_of_a_known_builder_is_unknown(make_rig):
    class Compressor(CompressorMetadataBuilder): ...

    rig = make_rig(Architecture.SM90, 2)
    [group] = rig.attn_groups[-1]
    group.metadata_builders[0].__class__ = Compressor
    rig.record()
    assert len(rig.state.graphs) == 0
    rig.build(rig.fill(STEP))
    assert rig.state.graphs.stats.eager == {Eager.UNKNOWN_BUILDER: 1}
