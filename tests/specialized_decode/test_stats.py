"""The lines operators and tools read."""

from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata import stats as module
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.key import (
    Eager,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.recording import (
    Report,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.stats import (
    MetadataGraphStats,
    Way,
)


def stats() -> MetadataGraphStats:
    stats = MetadataGraphStats()
    stats.in_graph = 55
    stats.refreshed.update({Way.IN_GRAPH: 5, Way.REPLAY: 20, Way.LAUNCH: 10})
    stats.eager.update({Eager.UNRECORDED: 2, Eager.UNEVEN: 8, Eager.NOT_FULL: 40})
    return stats


def test_the_counters_add_up_over_full_decode_steps():
    assert stats().full_decode_steps == 100
    assert stats().missed == 2


def test_the_line():
    assert stats().line() == (
        "decode metadata: in_graph=60 replay=20 launch=10 eager=10 "
        "full_decode_steps=100 (not_full=40, uneven=8, unrecorded=2)"
    )
    assert MetadataGraphStats().line() == (
        "decode metadata: in_graph=0 replay=0 launch=0 eager=0 full_decode_steps=0"
    )


def test_the_line_is_due_after_a_while_and_after_new_steps(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    counted = stats()
    now = counted.line_due
    assert now > 1000
    assert counted.due_line() == counted.line()
    assert counted.line_due > now
    assert counted.due_line() is None
    counted.in_graph += 1
    assert counted.due_line() == counted.line()


def test_the_start_up_line():
    ways = (*(Way.IN_GRAPH,) * 6, Way.REPLAY)
    assert Report(ways, 0.034, 2.0).line() == (
        "metadata of 7 FULL graphs: 6 in_graph, 1 replay; took 0.03 s and 2 MiB"
    )
    stopped = Report((Way.EAGER,) * 7, 0.02, 1.0, "OutOfMemoryError: full").line()
    assert stopped == (
        "metadata of 7 FULL graphs: 7 eager; took 0.02 s and 1 MiB; stopped: "
        "OutOfMemoryError: full"
    )
