"""What a TP group does where its ranks fare differently, in two processes over gloo."""

import pytest
from tp_ranks import on_ranks
from tp_recordings import LARGE, MIDDLE, Fault, Outcome, start_up

ALL = ("launch",) * 3
LINE = "DeepSeek-V4.1 decode: metadata of 3 FULL graphs: "


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    return on_ranks(start_up, 2, tmp_path_factory.mktemp("tp"))


@pytest.fixture
def outcomes(started):
    """``outcomes(fault)``: of rank 0 and of rank 1, which has the fault."""
    return lambda fault: [recorded[fault] for recorded, _ in started]


def test_without_a_fault_the_first_rank_logs_for_all(outcomes):
    first, second = outcomes(Fault.NONE)
    assert first == Outcome(ALL, None, [LINE + "3 launch; took 0.00 s and 0 MiB."])
    assert second == Outcome(ALL, None, [])


@pytest.mark.parametrize(
    ("fault", "ways", "why"),
    [
        (Fault.SLOW, ("launch", "eager", "eager"), "over the budget of 60 s"),
        (Fault.UNKNOWN, ("eager",) * 3, "a builder is unknown"),
    ],
)
def test_what_ends_recording_on_a_rank_ends_it_alike_on_all(outcomes, fault, ways, why):
    first, second = outcomes(fault)
    assert first.ways == second.ways == ways
    assert (first.stopped, second.stopped) == ("another TP rank did", why)
    assert first.lines[0].endswith("stopped: another TP rank did.")
    assert not second.lines


def test_a_rank_on_which_recording_raises_says_so(outcomes):
    first, second = outcomes(Fault.RAISES)
    assert first.ways == ("launch", "launch", "eager")
    assert second.ways == ("launch", "eager", "eager")
    [line] = first.lines
    assert line.endswith("stopped: another TP rank did; other ways on TP ranks 1.")
    [line] = second.lines
    assert line.startswith(
        "DeepSeek-V4.1 decode: TP rank 1, other than rank 0: metadata of 3 FULL "
        "graphs: 1 launch, 2 eager;"
    )
    assert line.endswith("stopped: RuntimeError: no memory.")


def test_a_rank_that_differs_without_an_end_says_so_too(outcomes):
    first, second = outcomes(Fault.UNPROVEN)
    assert (first.ways, second.ways) == (ALL, ("launch", "launch", "eager"))
    assert first.lines[0].endswith("; other ways on TP ranks 1.")
    assert "2 launch, 1 eager" in second.lines[0]


def test_the_time_for_proofs_ends_alike(started):
    assert [proven for _, proven in started] == [[LARGE, MIDDLE]] * 2
