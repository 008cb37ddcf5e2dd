"""The fused decode-metadata launch against its reference in plain torch, bitwise,
and nothing written beside its outputs.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from decode_metadata_cases import Case, Shape, assert_same, random_case, whole
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.kernel import (
    TILE_COLUMNS,
    Job,
    Kind,
    job_table,
)

SHAPES = (
    Shape(num_reqs=1, num_tokens=1, columns=9),
    Shape(num_reqs=1, num_tokens=4, columns=3),
    Shape(num_reqs=3, num_tokens=3, columns=17),
    Shape(num_reqs=3, num_tokens=7, columns=30),
    Shape(num_reqs=4, num_tokens=8, columns=120),
)
LAYOUTS = 3
STEPS = 4

each_kind = pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)


def launch(case: Case) -> None:
    case.launcher(max_num_reqs=4, max_window=128)()


def cases(*kinds: Kind) -> Iterator[Case]:
    """Many small launches, the same ones every time."""
    for layout in range(LAYOUTS):
        for step in range(STEPS):
            for index, shape in enumerate(SHAPES):
                yield random_case(shape, 10 * layout + index, step, kinds)


@each_kind
def test_each_kind_equals_the_reference(kind):
    for case in cases(kind):
        want = case.expected()
        launch(case)
        assert_same(want, case)


@pytest.mark.parametrize("shape", SHAPES[1:4])
def test_all_kinds_in_one_launch(shape):
    case = random_case(shape, seed=1)
    assert {job.kind for job in case.jobs} == set(Kind)
    want = case.expected()
    launch(case)
    assert_same(want, case)


@pytest.mark.parametrize("bounds", [(4, 128), (5, 129), (64, 1024)])
def test_the_bounds_of_a_launch_change_nothing(bounds):
    case = random_case(SHAPES[4], seed=2, kinds=[Kind.REQUEST, Kind.WINDOW])
    want = case.expected()
    case.launcher(*bounds)()
    assert_same(want, case)


def test_the_steps_have_every_edge():
    """What the comparisons rest on: the random steps do reach the special cases."""
    seen: Counter[str] = Counter()
    for case in cases(Kind.COMPRESSED_SLOT):
        inputs, (job,) = case.inputs, case.jobs
        query_lens = inputs.query_start_loc.diff()
        busy = query_lens > 0
        real = int(inputs.query_start_loc[-1])
        states_per_block = job.split * job.block_size * job.ratio
        table = inputs.block_tables[job.group]
        cached = inputs.slot_mappings[job.group, :real] >= 0
        edges = {
            "no request": not busy.any(),
            "no padding request": busy.all(),
            "uneven": query_lens[busy].unique().numel() > 1,
            "a request without tokens among others": bool(
                (~busy[:-1] & busy[1:]).any()
            ),
            "padding tokens": 0 < real < inputs.num_tokens,
            "padding tokens but no padding request": busy.all()
            and real < inputs.num_tokens,
            "a replay": inputs.replay_start[busy].any() and cached.any(),
            "a token that is not cached": not cached.all(),
            "a full table": inputs.seq_lens.max() == table.shape[1] * states_per_block,
            "rows apart": table.stride(0) > table.shape[1],
            "slots past 32 bits": (case.expected().jobs[0].outs[0] > 2**32).any(),
            "no block": (table == -1).any() and (table == 0).any(),
            f"ratio {job.ratio}": True,
            f"clamp {job.clamp}": True,
            f"split {job.split}": True,
        }
        seen.update(edge for edge, reached in edges.items() if reached)
    assert len(seen) == 12 + 2 + 2 + 3, seen


TABLES = (Kind.TABLE, Kind.TOKEN_TABLE)
# About the seams of tiles, and of two tiles that a program may take.
WIDTHS = (
    1,
    TILE_COLUMNS - 1,
    TILE_COLUMNS,
    TILE_COLUMNS + 1,
    2 * TILE_COLUMNS + 1,
    5 * TILE_COLUMNS - 3,
)


def table_of_width(kind, columns, num_reqs, num_tokens, seed=0):
    shape = Shape(num_reqs, num_tokens, columns, out_columns=columns)
    return random_case(shape, seed, kinds=[kind])


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("kind", TABLES)
def test_tiles_meet(kind, columns):
    for seed, rows in enumerate([(1, 1), (2, 2), (1, 3), (2, 6), (3, 7)]):
        case = table_of_width(kind, columns, *rows, seed)
        want = case.expected()
        launch(case)
        assert_same(want, case)


@pytest.mark.parametrize("made_for", [(1, 1), (1, 3), (1, 5000), (2000, 5000)])
@pytest.mark.parametrize("kind", TABLES)
def test_a_program_may_take_several_tiles(kind, made_for):
    """As it does where there are many tokens."""
    for columns in WIDTHS[-2:]:
        case = table_of_width(kind, columns, 2, 4)
        want = case.expected()
        case.launcher(4, 128, made_for)()
        assert_same(want, case)


@pytest.mark.parametrize(
    ("columns", "num_reqs", "num_tokens", "table", "token_table"),
    [
        (1, 1, 1, 1, 1),
        (TILE_COLUMNS, 32, 192, 1, 1),
        (TILE_COLUMNS + 1, 1, 1, 2, 2),
        (16 * TILE_COLUMNS, 1, 1, 16, 16),
        (16 * TILE_COLUMNS, 1, 6, 3, 16),
        (16 * TILE_COLUMNS, 32, 192, 3, 8),
        (16 * TILE_COLUMNS, 256, 1536, 1, 1),
    ],
)
def test_wide_tables_alone_take_more_programs(
    columns, num_reqs, num_tokens, table, token_table
):
    """And no more than run at one time."""
    for kind, jobs in (
        (Kind.TABLE, table),
        (Kind.TOKEN_TABLE, token_table),
        (Kind.REQUEST, 1),
    ):
        job = Job(kind, (0, 0, 0, 0), out_columns=columns)
        rows = job_table([job], num_reqs, num_tokens, torch.device("cpu"))
        assert len(rows) == jobs


SLOTS = (Kind.WINDOW, Kind.COMPRESSED_SLOT)
OTHER_JOBS = [
    *((kind, "window") for kind in [Kind.WINDOW]),
    *((kind, "block_size") for kind in (*SLOTS, Kind.RING_SLOT)),
    *((kind, "ratio") for kind in (Kind.COMPRESSED_SLOT, Kind.CONTEXT, Kind.SCHEDULE)),
    *((Kind.SCHEDULE, field) for field in ("block_size", "workers", "item_tokens")),
    *((kind, "split") for kind in (*SLOTS, *TABLES)),
    *((kind, "scale") for kind in (*SLOTS, *TABLES, Kind.RING_SLOT)),
    *((kind, "clamp") for kind in (*SLOTS, *TABLES, Kind.RING_SLOT)),
]


@pytest.mark.parametrize(("kind", "field"), OTHER_JOBS, ids=str)
def test_the_comparison_sees_another_job(kind, field):
    """Negative control: every field of a job shows in what it writes."""

    def other(job):
        value = getattr(job, field)
        # No value that reads past the table or writes past the row.
        values = {"window": max(1, value - 1), "clamp": not value}
        return replace(job, **{field: values.get(field, value + 1)})

    def noticed(case):
        want = case.expected()
        launch(case._replace(jobs=tuple(map(other, case.jobs))))
        return differs(want, case)

    assert any(map(noticed, cases(kind)))


OTHER_INPUTS = {
    "query_start_loc": (Kind.REQUEST, lambda starts: starts[1:-1].sub_(1).clamp_(0)),
    "seq_lens": (Kind.CONTEXT, lambda lens: lens.sub_(1).clamp_(0)),
    "positions": (Kind.RING_SLOT, lambda positions: positions.add_(1)),
    "replay_start": (Kind.WINDOW, lambda start: start.sub_(1)),
    "block_tables": (Kind.TOKEN_TABLE, lambda tables: tables[1].add_(1)),
    "slot_mappings": (Kind.WINDOW, lambda slots: slots.fill_(-1)),
}


@pytest.mark.parametrize("field", OTHER_INPUTS)
def test_the_comparison_sees_other_inputs(field):
    """Negative control: every input shows in what the launch writes."""
    kind, change = OTHER_INPUTS[field]

    def noticed(case):
        want = case.expected()
        change(getattr(case.inputs, field))
        launch(case)
        outs = zip(want.outs(), case.outs(), strict=True)
        return any(not torch.equal(a, b) for (_, a), (_, b) in outs)

    assert any(map(noticed, cases(kind)))


@each_kind
def test_the_comparison_sees_a_write_beside_an_output(kind):
    want = random_case(SHAPES[3], seed=kind, kinds=[kind]).expected()
    for index, (_, out) in enumerate(want.outs()):
        first = out.storage_offset()
        strides = zip(out.shape, out.stride(), strict=True)
        past = first + 1 + sum((size - 1) * stride for size, stride in strides)
        for beside in (0, first - 1, past, -1):
            got = want.to(torch.device("cpu"))
            whole(list(got.outs())[index][1])[beside] += 1
            with pytest.raises(AssertionError, match="written outside"):
                assert_same(want, got)


@each_kind
def test_poison_shows_a_launch_that_does_not_run(kind):
    assert all(differs(case.expected(), case) for case in cases(kind))


def differs(want: Case, got: Case) -> bool:
    try:
        assert_same(want, got)
    except AssertionError:
        return True
    return False
