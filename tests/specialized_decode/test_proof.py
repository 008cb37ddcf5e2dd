"""The start-up proof refuses builds that are wrong on one side of a bound, and takes
the one that is right.
"""

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from rig import MAX_MODEL_LEN, Architecture, Rig, Serving, varlen_graph
from test_fused_builds import offered
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata import proof
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.fused_build import (
    FusedBuild,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.kernel import (
    TILE_COLUMNS,
    Job,
    Kind,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.proof import (
    difference_from_upstream,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.steps import (
    decode_steps,
)

WINDOW = 128
TOPK = 512


@pytest.fixture
def make_build(make_rig):
    """The fused build of a graph of so many requests, and upstream's."""

    def make(
        num_reqs: int,
        query_len: int = 1,
        architecture: Architecture = Architecture.SM90,
    ):
        rig: Rig = make_rig(architecture, query_len, Serving.IN_GRAPH, proof_steps=None)
        return offered(rig, num_reqs)

    return make


@pytest.fixture
def make_adaptive_build(make_rig):
    """The same of a graph of adaptive verification."""

    def make(
        num_reqs: int,
        num_tokens: int,
        architecture: Architecture = Architecture.SM90,
    ):
        rig: Rig = make_rig(
            architecture, 3, Serving.IN_GRAPH, proof_steps=None, adaptive=True
        )
        rig.full_graphs = [replace(varlen_graph(num_tokens, 3), num_reqs=num_reqs)]
        return offered(rig, num_reqs)

    return make


def planted(build: FusedBuild, fault: Callable[[FusedBuild], None]) -> FusedBuild:
    """``build`` with ``fault``, which spoils what it has written."""

    class Planted(FusedBuild):
        def launch(self) -> None:
            super().launch()
            fault(self)

    return Planted(*(getattr(build, field.name) for field in fields(build)))


def contexts(build: FusedBuild, layer: str) -> torch.Tensor:
    """Compressed states up to each token, [tokens] int32."""
    states = build.attn_metadata[f"{layer}.indexer"].decode.seq_lens
    return states.view(-1)[: real_tokens(build)]


def real_tokens(build: FusedBuild) -> int:
    return int(build.inputs.query_start_loc[-1])


def schedules(build: FusedBuild):
    """Each schedule with its units of work."""
    for schedule in build._schedules:
        lasts = schedule.context_lens[:, -1]
        yield schedule.out, int((-(-lasts // 256)).sum())


def schedule_of_few_units(build: FusedBuild) -> None:
    for out, units in schedules(build):
        if 0 < units < out.shape[0] - 1:
            out[0] += 1


def schedule_of_as_many_units_as_workers(build: FusedBuild) -> None:
    for out, units in schedules(build):
        if units == out.shape[0] - 1:
            out[0] += 1


def no_sentinel(build: FusedBuild) -> None:
    for out, units in schedules(build):
        if units == 0:
            out.zero_()


def start_inside_the_window(build: FusedBuild) -> None:
    inputs = build.inputs
    starts, lens = inputs.replay_start, inputs.seq_lens
    before = starts.clone()
    starts[starts > lens - WINDOW] = 0
    FusedBuild.launch(build)
    starts.copy_(before)


def start_below_the_window(build: FusedBuild) -> None:
    """A start that cuts nothing off cuts one off."""
    window = build.attn_metadata["window"]
    at_window = build.inputs.replay_start == build.inputs.seq_lens - WINDOW
    at_window &= build.inputs.replay_start > 0
    # That of the last token of each request.
    ends = build.inputs.query_start_loc[1:].long() - 1
    window.decode_swa_lens[ends[at_window]] -= 1


def no_states_become_one(build: FusedBuild) -> None:
    contexts(build, "half")[contexts(build, "half") == 0] = 1


def below_the_window(build: FusedBuild) -> None:
    tokens = real_tokens(build)
    lens = build.attn_metadata["window"].decode_swa_lens[:tokens]
    lens[(contexts(build, "full") < WINDOW) & (lens > 0)] += 1


def at_the_window(build: FusedBuild) -> None:
    tokens = real_tokens(build)
    lens = build.attn_metadata["window"].decode_swa_lens[:tokens]
    lens[(contexts(build, "full") == WINDOW + 1) & (lens > 0)] += 1


def below_topk(build: FusedBuild) -> None:
    states = contexts(build, "half")
    states[states < TOPK] += 1


def at_topk(build: FusedBuild) -> None:
    states = contexts(build, "half")
    states[states == TOPK] += 1


def at_the_longest(build: FusedBuild) -> None:
    states = contexts(build, "half")
    states[states == MAX_MODEL_LEN // 2] -= 1


def padding(build: FusedBuild) -> None:
    build.attn_metadata["window"].token_to_req_indices[real_tokens(build) :] += 1


def one_of_many(build: FusedBuild) -> None:
    if real_tokens(build) == build.inputs.num_tokens // build.inputs.num_reqs:
        contexts(build, "half")[:] += 1


def idle(build: FusedBuild) -> None:
    """A ring without a block is taken for one."""
    if not build.inputs.block_tables[-1].any():
        build.attn_metadata["ring"].slot_mapping[0] = 0


FAULTS = [
    schedule_of_few_units,
    schedule_of_as_many_units_as_workers,
    start_inside_the_window,
    below_the_window,
    at_the_window,
    below_topk,
    at_topk,
    at_the_longest,
    idle,
]
OF_ONE_TOKEN = [no_sentinel, no_states_become_one]
OF_SOME = [padding, one_of_many, start_below_the_window]


@pytest.mark.parametrize(
    ("fault", "num_reqs", "query_len"),
    [
        *((fault, reqs, 1) for fault in FAULTS + OF_ONE_TOKEN for reqs in (1, 2)),
        *((fault, 2, 3) for fault in [*FAULTS, no_states_become_one]),
        *((fault, 2, 4) for fault in FAULTS[:2]),
        *((fault, 4, 1) for fault in OF_SOME),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_build_that_is_wrong_somewhere_is_refused(
    make_build, fault, num_reqs, query_len
):
    build, build_upstream = make_build(num_reqs, query_len)
    assert difference_from_upstream(
        planted(build, fault), build_upstream, MAX_MODEL_LEN
    )


def even_queries(build: FusedBuild) -> None:
    """The tokens are split as the host believes."""
    starts = build.inputs.query_start_loc
    before = starts.clone()
    tokens, requests = real_tokens(build), int((build.inputs.seq_lens > 0).sum())
    each, more = divmod(tokens, requests)
    lens = torch.full((requests,), each)
    lens[requests - more :] += 1
    starts[1 : requests + 1] = lens.cumsum(0)
    FusedBuild.launch(build)
    starts.copy_(before)


def ring_of_padding(build: FusedBuild) -> None:
    build.attn_metadata["ring"].slot_mapping[real_tokens(build) :] = 0


def blocks_of_padding(build: FusedBuild) -> None:
    build.attn_metadata["half.indexer"].decode.block_table[real_tokens(build) :] += 1


ADAPTIVE_FAULTS = [
    even_queries,
    padding,
    ring_of_padding,
    blocks_of_padding,
    no_states_become_one,
    schedule_of_few_units,
    start_inside_the_window,
    at_the_window,
    at_topk,
    idle,
]


@pytest.mark.parametrize(
    ("fault", "num_reqs", "num_tokens"),
    [
        *((fault, 2, 5) for fault in ADAPTIVE_FAULTS),
        *((fault, 4, 4) for fault in ADAPTIVE_FAULTS[:4]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_adaptive_build_that_is_wrong_somewhere_is_refused(
    make_adaptive_build, fault, num_reqs, num_tokens
):
    build, build_upstream = make_adaptive_build(num_reqs, num_tokens)
    assert difference_from_upstream(
        planted(build, fault), build_upstream, MAX_MODEL_LEN
    )


@pytest.mark.parametrize(
    ("architecture", "num_reqs", "num_tokens"),
    [
        (Architecture.SM90, 1, 1),
        (Architecture.SM90, 4, 4),
        (Architecture.SM90, 2, 5),
        (Architecture.SM100, 2, 5),
        (Architecture.SM100_FLASHMLA, 4, 4),
        (Architecture.SM120, 2, 5),
    ],
)
def test_the_adaptive_build_that_is_right_is_taken(
    make_adaptive_build, architecture, num_reqs, num_tokens
):
    build, build_upstream = make_adaptive_build(num_reqs, num_tokens, architecture)
    assert difference_from_upstream(build, build_upstream, MAX_MODEL_LEN) is None


SHIPPED = [
    (Architecture.SM90, 1, 1),
    (Architecture.SM90, 4, 1),
    (Architecture.SM90, 2, 3),
    (Architecture.SM90, 2, 4),
    (Architecture.SM100, 2, 1),
    (Architecture.SM100_FLASHMLA, 2, 3),
    (Architecture.SM120, 2, 2),
]


@pytest.mark.parametrize(("architecture", "num_reqs", "query_len"), SHIPPED)
def test_the_build_that_is_right_is_taken(
    make_build, architecture, num_reqs, query_len
):
    build, build_upstream = make_build(num_reqs, query_len, architecture)
    assert difference_from_upstream(build, build_upstream, MAX_MODEL_LEN) is None


# More blocks of 128 tokens than a program writes at once.
LONG = 128 * (TILE_COLUMNS + 5)


@pytest.mark.parametrize(
    ("architecture", "query_len"),
    [(Architecture.SM90, 1), (Architecture.SM90, 3), (Architecture.SM100, 1)],
)
def test_the_build_of_a_long_context_is_taken(make_rig, architecture, query_len):
    rig = make_rig(
        architecture, query_len, Serving.IN_GRAPH, proof_steps=1, max_model_len=LONG
    )
    build, build_upstream = offered(rig, 2)
    assert min({job.out_columns for job in build.jobs} - {0}) > TILE_COLUMNS
    assert difference_from_upstream(build, build_upstream, LONG) is None


def test_large_buffers_are_compared_in_parts(make_rig, monkeypatch):
    """What does not fit into the budget is seen all the same."""
    monkeypatch.setattr(proof, "_MAX_COPIED", 256)
    rig = make_rig(Architecture.SM90, 1, Serving.IN_GRAPH, proof_steps=1)
    build, build_upstream = offered(rig, 2)
    assert difference_from_upstream(build, build_upstream, MAX_MODEL_LEN) is None
    assert max(table.nbytes for table in build.inputs.block_tables) > 256

    def last_block(build: FusedBuild) -> None:
        build.attn_metadata["full.indexer"].decode.block_table[-1, -1] += 1

    path = difference_from_upstream(
        planted(build, last_block), build_upstream, MAX_MODEL_LEN
    )
    assert path is not None
    assert path.endswith(".block_table")


JOBS = [
    Job(Kind.WINDOW, (0, 0, 0, 0), block_size=64, window=128),
    Job(Kind.COMPRESSED_SLOT, (0, 0, 0, 0), block_size=64, ratio=2),
    Job(Kind.SCHEDULE, (0, 0, 0, 0), block_size=256, ratio=2, workers=132),
]


@pytest.mark.parametrize("max_len", [100, 8192, 1 << 20])
@pytest.mark.parametrize("query_len", [1, 2, 6])
@pytest.mark.parametrize("num_reqs", [1, 2, 8, 256])
def test_steps_meet_every_bound(num_reqs, query_len, max_len):
    steps = list(decode_steps(JOBS, num_reqs, num_reqs * query_len, None, max_len))
    # Of each token of a step, the length that it sees.
    seen = {
        length - back
        for step in steps
        for length in step.seq_lens
        for back in range(query_len)
    }
    assert max(seen) == max_len
    assert min(seen) == 1
    for bound in (64, 128, 512, 2048):
        assert {bound - 1, bound, bound + 1} <= seen or bound >= max_len
    inside = [
        length - start
        for step in steps
        for length, start in zip(step.seq_lens, step.replay_starts, strict=True)
        if start
    ]
    assert min(inside, default=1) < 128 or max_len < 128
    assert {len(step.seq_lens) for step in steps} >= {1, max(1, num_reqs - 1), num_reqs}
    assert any(step.idle for step in steps)
    assert all(query_len <= n <= max_len for step in steps for n in step.seq_lens)


@pytest.mark.parametrize("max_len", [100, 8192, 1 << 20])
@pytest.mark.parametrize(("num_reqs", "num_tokens"), [(1, 1), (4, 4), (8, 20), (8, 48)])
def test_adaptive_steps_meet_every_bound(num_reqs, num_tokens, max_len):
    steps = list(decode_steps(JOBS, num_reqs, num_tokens, 6, max_len))
    seen = {
        length - back
        for step in steps
        for length, query_len in zip(step.seq_lens, step.query_lens, strict=True)
        for back in range(query_len)
    }
    assert max(seen) == max_len
    assert min(seen) == 1
    for bound in (64, 128, 512, 2048):
        assert {bound - 1, bound, bound + 1} <= seen or bound >= max_len
    for step in steps:
        pairs = list(zip(step.seq_lens, step.query_lens, strict=True))
        assert len(pairs) <= num_reqs
        assert sum(step.query_lens) <= num_tokens
        assert all(1 <= q <= min(6, n) and n <= max_len for n, q in pairs)
    tokens = {sum(step.query_lens) for step in steps}
    requests = {len(step.seq_lens) for step in steps}
    assert tokens >= {1, num_tokens}
    assert requests >= {1, num_reqs}
    if num_tokens > 1:
        assert any(len(set(step.query_lens)) > 1 for step in steps)
        assert any(len(step.seq_lens) < num_reqs for step in steps if not step.idle)
