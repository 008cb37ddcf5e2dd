"""The core test: a replayed build leaves in every buffer that the FULL forward
graphs read what an eager build leaves there."""

import pytest
from decode_steps import Step, assert_same_for_forward, clones
from rig import MAX_MODEL_LEN, NUM_SMS, Architecture

QUERY_LENS = (1, 2, 3, 4, 6)
PADDED_REQS = (1, 2, 4, 8)


def random_step(num_reqs: int, padded_reqs: int, query_len: int, seed: int) -> Step:
    return Step.random(num_reqs, padded_reqs, query_len, MAX_MODEL_LEN, seed)


@pytest.mark.parametrize("query_len", QUERY_LENS)
@pytest.mark.parametrize("architecture", list(Architecture))
def test_replayed_build_equals_eager_build(make_rig, architecture, query_len):
    rig = make_rig(architecture, query_len)
    rig.record()
    assert len(rig.state.graphs) == len(PADDED_REQS)
    replayed = 0
    for padded in reversed(PADDED_REQS):
        view = rig.forward_view(padded)
        written = [path for path in view if path.endswith(("swa_lens", "slot_mapping"))]
        assert len(view) > 30 and len(written) > 3, view.keys()
        for num_reqs in range(1, padded + 1):
            step = random_step(num_reqs, padded, query_len, seed=97 * padded + num_reqs)
            rig.eager(step)
            want = clones(view)
            batch = rig.fill(step)
            rig.poison(view)
            rig.build(batch)
            replayed += 1
            assert rig.state.graphs.stats.replayed == replayed
            assert_same_for_forward(want, clones(view), step)
    assert rig.state.graphs.stats.missed == 0


@pytest.mark.parametrize("architecture", list(Architecture))
def test_replay_after_larger_batches_leaves_no_stale_rows(make_rig, architecture):
    """Batch sizes down and up again, buffers as the steps before left them."""
    query_len = 3
    rig = make_rig(architecture, query_len)
    rig.record()
    views = {padded: rig.forward_view(padded) for padded in PADDED_REQS}
    for seed, num_reqs in enumerate((8, 7, 4, 3, 2, 1, 2, 5, 8)):
        padded = min(size for size in PADDED_REQS if size >= num_reqs)
        step = random_step(num_reqs, padded, query_len, seed)
        rig.build(rig.fill(step))
        got = clones(views[padded])
        rig.eager(step)
        assert_same_for_forward(clones(views[padded]), got, step)


@pytest.mark.parametrize("architecture", list(Architecture))
def test_graph_larger_than_the_batch_needs(make_rig, architecture):
    """Data parallelism pads a rank to the largest one: any n runs in any P."""
    rig = make_rig(architecture, 2)
    rig.record()
    view = rig.forward_view(8)
    step = random_step(1, 8, 2, seed=5)
    rig.eager(step)
    want = clones(view)
    batch = rig.fill(step)
    rig.poison(view)
    rig.build(batch)
    assert_same_for_forward(want, clones(view), step)
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
