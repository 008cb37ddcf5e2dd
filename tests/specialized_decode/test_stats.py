"""The lines operators and tools read."""

import re

from vllm.models.deepseek_v41.nvidia.specialized_decode.runtime import stats as module
from vllm.models.deepseek_v41.nvidia.specialized_decode.runtime.eligibility import Eager
from vllm.models.deepseek_v41.nvidia.specialized_decode.runtime.stats import (
    MetadataGraphStats,
    RecordingReport,
)


def stats() -> MetadataGraphStats:
    stats = MetadataGraphStats(replayed=90)
    stats.eager.update(
        {Eager.UNRECORDED: 2, Eager.PREFILL: 8, Eager.NOT_FULL: 40, Eager.DUMMY: 5}
    )
    return stats


def test_the_counters_add_up_over_full_decode_steps():
    assert stats().full_decode_steps == 100
    assert stats().missed == 2


def test_the_line():
    assert stats().line() == (
        "decode metadata: replayed=90 missed=2 ineligible=8 full_decode_steps=100 "
        "(dummy=5, not_full=40, prefill=8, unrecorded=2)"
    )
    assert MetadataGraphStats().line() == (
        "decode metadata: replayed=0 missed=0 ineligible=0 full_decode_steps=0"
    )


def test_the_line_is_due_after_a_while_and_after_new_steps(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    counted = stats()
    counted._logged_at = now
    assert counted.line_if_due() is None
    now += 60
    assert counted.line_if_due() == counted.line()
    now += 60
    assert counted.line_if_due() is None
    counted.replayed += 1
    now += 60
    assert counted.line_if_due() == counted.line()


def test_the_start_up_line():
    assert RecordingReport(7, 7, 0.034, 2.0).line() == (
        "recorded 7 of 7 attention-metadata builds in 0.03 s and 2 MiB"
    )
    stopped = RecordingReport(2, 7, 0.02, 1.0, "OutOfMemoryError: full").line()
    assert re.search("2 of 7 .* stopped: OutOfMemoryError: full; the other", stopped)
