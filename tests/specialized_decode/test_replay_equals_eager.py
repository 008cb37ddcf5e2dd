"""The core test: a replayed build leaves in every buffer that the FULL forward
graphs read what an eager build leaves there.
"""

import pytest
from decode_steps import Step, assert_same_for_forward, clones
from rig import MAX_MODEL_LEN, NUM_SMS, Architecture, Serving
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.stats import Way

QUERY_LENS = (1, 2, 3, 4, 6)
PADDED_REQS = (1, 2, 4, 8)


def random_step(num_reqs: int, padded_reqs: int, query_len: int, seed: int) -> Step:
    return Step.random(num_reqs, padded_reqs, query_len, MAX_MODEL_LEN, seed)


def check_steps(rig, padded_reqs, request_counts) -> None:
    """Steps of so many requests leave what upstream's eager build leaves."""
    view = rig.forward_view(padded_reqs)
    written = [path for path in view if path.endswith(("swa_lens", "slot_mapping"))]
    assert len(view) > 30, view.keys()
    assert len(written) > 3, view.keys()
    for num_reqs in request_counts:
        step = random_step(
            num_reqs, padded_reqs, rig.query_len, seed=97 * padded_reqs + num_reqs
        )
        served = rig.state.graphs.stats.served.total()
        rig.check_step(step, view)
        assert rig.state.graphs.stats.served.total() == served + 1


@pytest.mark.parametrize("query_len", QUERY_LENS)
@pytest.mark.parametrize("architecture", list(Architecture))
def test_recorded_upstream_build_equals_eager_build(make_rig, architecture, query_len):
    rig = make_rig(architecture, query_len, Serving.UPSTREAM)
    rig.record()
    assert rig.state.graphs.served() == {Way.REPLAY: len(PADDED_REQS)}
    for padded in reversed(PADDED_REQS):
        check_steps(rig, padded, range(1, padded + 1))
    assert rig.state.graphs.stats.missed == 0


@pytest.mark.parametrize("query_len", QUERY_LENS)
@pytest.mark.parametrize("architecture", list(Architecture))
def test_fused_build_equals_eager_build(make_rig, architecture, query_len):
    """The request counts at which something changes: none is special in between."""
    rig = make_rig(architecture, query_len, Serving.LAUNCH)
    rig.keep_graphs(1, 4)
    rig.record()
    assert rig.state.graphs.served() == {Way.LAUNCH: 2}
    check_steps(rig, 1, [1])
    check_steps(rig, 4, [1, 3, 4])


@pytest.mark.parametrize("way", [Serving.IN_GRAPH, Serving.REPLAY])
@pytest.mark.parametrize("architecture", list(Architecture))
def test_fused_build_in_a_graph_equals_eager_build(make_rig, architecture, way):
    rig = make_rig(architecture, 3, way)
    rig.keep_graphs(1, 4)
    rig.record()
    served = Way.IN_GRAPH if way == Serving.IN_GRAPH else Way.REPLAY
    assert rig.state.graphs.served() == {served: 2}
    check_steps(rig, 1, [1])
    check_steps(rig, 4, [1, 3, 4])
    assert rig.state.graphs.stats.served == {served: 4}


@pytest.mark.parametrize("way", [Serving.UPSTREAM, Serving.IN_GRAPH])
@pytest.mark.parametrize("architecture", list(Architecture))
def test_steps_after_larger_batches_leave_no_stale_rows(make_rig, architecture, way):
    """Batch sizes down and up again, buffers as the steps before left them."""
    query_len = 3
    rig = make_rig(architecture, query_len, way)
    rig.keep_graphs(2, 4)
    rig.record()
    views = {padded: rig.forward_view(padded) for padded in (2, 4)}
    for seed, num_reqs in enumerate((4, 3, 2, 1, 2, 4)):
        padded = 2 if num_reqs <= 2 else 4
        step = random_step(num_reqs, padded, query_len, seed)
        rig.run(step)
        got = clones(views[padded])
        rig.eager(step)
        assert_same_for_forward(clones(views[padded]), got, step)


@pytest.mark.parametrize("way", [Serving.UPSTREAM, Serving.IN_GRAPH])
@pytest.mark.parametrize("architecture", list(Architecture))
def test_graph_larger_than_the_batch_needs(make_rig, architecture, way):
    """Data parallelism pads a rank to the largest one: any n runs in any P."""
    rig = make_rig(architecture, 2, way)
    rig.keep_graphs(8)
    rig.record()
    check_steps(rig, 8, [1])
    assert rig.state.graphs.stats.missed == 0


CORRUPTIONS = {
    "a sequence length off by one": lambda rig: rig.buffers.seq_lens[:1].add_(1),
    "a padded slot": lambda rig: rig.block_tables.slot_mappings[:, 3].fill_(7),
    "tokens of another request": lambda rig: rig.buffers.query_start_loc[1:2].add_(1),
    "another block": lambda rig: rig.block_tables.tables[0][0].add_(1),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_the_comparison_sees(make_rig, corruption):
    """Negative controls: the comparison above is not blind to what it guards."""
    rig = make_rig(Architecture.SM90, 1)
    rig.record()
    view = rig.forward_view(4)
    step = Step((200, 300, 400), 4, 1)
    rig.eager(step)
    want = clones(view)
    batch = rig.fill(step)
    rig.poison(view)
    CORRUPTIONS[corruption](rig)
    rig.build(batch)
    # The inputs are part of the view too: look at what the build wrote.
    built = rig.built(view)
    want = {path: want[path] for path in built}
    with pytest.raises(AssertionError):
        assert_same_for_forward(want, clones(built), step)


def test_poison_would_show_a_build_that_does_not_run(make_rig):
    rig = make_rig(Architecture.SM90, 1)
    rig.record()
    view = rig.forward_view(2)
    step = Step((200, 300), 2, 1)
    rig.eager(step)
    want = clones(view)
    rig.fill(step)
    rig.poison(view)
    with pytest.raises(AssertionError):
        assert_same_for_forward(want, clones(view), step)


def test_the_rig_takes_the_branches_of_each_architecture(make_rig):
    indexers, window_builders = {}, {}
    for architecture in Architecture:
        rig = make_rig(architecture, 6)
        indexers[architecture] = next(
            builder for builder in rig.builders() if hasattr(builder, "use_flattening")
        )
        window_builders[architecture] = type(next(rig.builders()))
    assert {a: b.num_sms for a, b in indexers.items()} == {
        a: NUM_SMS[a.family] for a in Architecture
    }
    assert [a for a, b in indexers.items() if b.supports_varlen] == [
        Architecture.SM100,
        Architecture.SM100_FLASHMLA,
    ]
    assert [a for a, b in indexers.items() if b.use_flattening] == [
        Architecture.SM90,
        Architecture.SM120,
    ]
    assert len({type(b) for b in indexers.values()}) == 2
    assert len(set(window_builders.values())) == 2
