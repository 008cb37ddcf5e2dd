"""Steps that are held to upstream's build while they are served."""

import re

import pytest
from decode_steps import Step
from rig import Architecture, Rig, Serving, varlen_graph
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.kernel import Job
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.key import Eager
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.stats import Way

STEP = Step((1025, 300), 2, 1)
PADDED = Step((600,), 2, 1)


@pytest.fixture
def make_verifying_rig(make_rig):
    """A rig of one FULL graph, of two requests, that verifies every second step."""

    def make(
        way: Serving,
        query_len: int = 1,
        architecture=Architecture.SM90,
        verify: int = 2,
    ) -> Rig:
        rig = make_rig(architecture, query_len, way, verify=verify)
        rig.keep_graphs(2)
        rig.record()
        return rig

    return make


def spoil(rig: Rig) -> None:
    """Let the launch go wrong after start-up has proven it."""
    [kept] = rig.state.graphs._graphs.values()
    for job, row in zip(kept.fused.jobs, kept.fused._job_table, strict=True):
        if job.window:
            row[Job._fields.index("window") + 3] -= 1


@pytest.mark.parametrize("way", list(Serving))
def test_steps_that_are_right_go_on(make_verifying_rig, way):
    rig = make_verifying_rig(way, query_len=3)
    # Of fewer requests upstream builds in another way.
    for seq_lens in ((1025, 300), (600,), (129,), (4, 5)):
        rig.check_step(Step(seq_lens, 2, 3))
    stats = rig.state.graphs.stats
    served = Way.REPLAY if way == Serving.UPSTREAM else Way(way.value)
    assert stats.served == {served: 4}
    assert stats.verified == 2
    assert " verified=2" in stats.line()


def test_adaptive_steps_are_verified_too(make_rig):
    rig = make_rig(Architecture.SM90, 6, Serving.IN_GRAPH, adaptive=True, verify=1)
    rig.full_graphs = [varlen_graph(6, 6)]
    rig.record()
    rig.check_step(Step((300, 1024), 6, 6, uneven=(1, 4), graph_tokens=6))
    stats = rig.state.graphs.stats
    assert stats.verified == 1
    assert stats.served == {Way.IN_GRAPH: 1}


@pytest.mark.parametrize(
    ("architecture", "way"),
    [
        (Architecture.SM90, Serving.IN_GRAPH),
        (Architecture.SM90, Serving.REPLAY),
        (Architecture.SM90, Serving.LAUNCH),
        (Architecture.SM100, Serving.IN_GRAPH),
    ],
)
def test_a_step_that_is_wrong_is_the_last_of_its_graph(
    make_verifying_rig, log, architecture, way
):
    rig = make_verifying_rig(way, architecture=architecture)
    view = rig.forward_view(2)
    rig.check_step(STEP, view)
    spoil(rig)
    # The step that is found out is right already.
    rig.check_step(STEP, view)
    [line] = [line for line in log.lines if "differ" in line]
    assert re.search(
        rf"2 requests and 2 tokens, served {way.value}, .*decode_swa_indices, "
        r"rows 0, 1 of 2: \d+ for \d+\.",
        line,
    )
    for step in (STEP, PADDED):
        rig.check_step(step, view)
    stats = rig.state.graphs.stats
    assert stats.eager[Eager.DIFFERED] == 2
    assert stats.served == {Way(way.value): 2}
    # What is captured anew is proven anew.
    rig.state.release_metadata_graphs()
    rig.record()
    rig.check_step(STEP, view)
    assert stats.served == {Way(way.value): 3}


def test_padding_that_is_wrong_is_seen(make_verifying_rig, log):
    """A slot where there is none would be written to."""
    rig = make_verifying_rig(Serving.IN_GRAPH, verify=1)
    [kept] = rig.state.graphs._graphs.values()
    launch = kept.fused.launch

    def write_a_slot():
        launch()
        kept.attn_metadata["ring"].slot_mapping[1] = 5

    kept.fused.launch = write_a_slot
    rig.run(PADDED)
    assert any("slot_mapping, rows 1 of 2: 5 for" in line for line in log.lines)
    assert rig.state.graphs.stats.verified == 1
    rig.run(PADDED)
    assert rig.state.graphs.stats.eager[Eager.DIFFERED] == 1


def test_nothing_is_verified_unless_asked_for(make_verifying_rig, monkeypatch):
    rig = make_verifying_rig(Serving.IN_GRAPH, verify=0)
    spoil(rig)
    for _ in range(3):
        rig.run(STEP)
    stats = rig.state.graphs.stats
    assert (stats.verified, stats.in_graph) == (0, 3)
