"""Decode steps that no FULL graph is large enough for are counted and told of."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from decode_steps import Step
from rig import Architecture
from vllm.config import CUDAGraphMode
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata import model_state
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.coverage import (
    Coverage,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.key import Eager
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

BUFFERS = InputBuffers(16, 64, torch.device("cpu"))


def coverage(*graphs: BatchExecutionDescriptor) -> Coverage:
    covered = Coverage()
    for graph in graphs:
        covered.add(graph)
    return covered


def full(
    reqs: int, tokens: int, query_len: int | None, longest: int | None = None
) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(
        CUDAGraphMode.FULL, tokens, reqs, query_len, max_query_len=longest
    )


def decode(*query_lens: int, **fields) -> InputBatch:
    batch = InputBatch.make_dummy(len(query_lens), sum(query_lens), BUFFERS)
    lens = np.array(query_lens, dtype=np.int32)
    return replace(batch, **{"num_scheduled_tokens": lens} | fields)


UNIFORM = coverage(full(4, 8, 2), full(2, 4, 2))
VARLEN = coverage(full(8, 8, None, 3), full(4, 4, None, 3))
DYNAMIC = coverage(full(2, 6, 3), full(8, 8, 1))


@pytest.mark.parametrize(
    ("covered", "batch", "exceeded"),
    [
        (UNIFORM, decode(2, 2, 2, 2), False),
        (UNIFORM, decode(2, 2, 2, 2, 2), True),
        # No graph of their query lengths is there, however small they are.
        (UNIFORM, decode(1, 1, 1, 1, 1), False),
        (UNIFORM, decode(2, 2, 2, 2, 1), False),
        (VARLEN, decode(3, 1, 2, 2), False),
        (VARLEN, decode(3, 1, 3, 2), True),
        (VARLEN, decode(*[1] * 9), True),
        (VARLEN, decode(4, 4, 4), False),
        # Adaptive verification admits fewer tokens than are scheduled.
        (VARLEN, decode(3, 3, 3, num_tokens=8), False),
        (VARLEN, decode(3, 3, 3, has_prefill=True), False),
        (UNIFORM, decode(2, 2, 2, 2, 2, has_prefill=True), True),
        (DYNAMIC, decode(3, 3), False),
        (DYNAMIC, decode(3, 3, 3), True),
        (DYNAMIC, decode(*[1] * 8), False),
        (DYNAMIC, decode(*[1] * 9), True),
        (coverage(), decode(1, 1), False),
        # Of a mode whose graphs take prefills too.
        (coverage(full(1, 1, None)), decode(1, 1), False),
    ],
)
def test_which_decode_steps_are_too_large(covered, batch, exceeded):
    assert covered.is_exceeded_by(batch) is exceeded
    prefill = replace(batch, decode_graph_eligible=False)
    assert not covered.is_exceeded_by(prefill)


@pytest.mark.parametrize(
    ("covered", "reqs", "tokens"),
    [
        (UNIFORM, 4, 2 * 16),
        (VARLEN, 2, 3 * 16),
        # The largest batches are those of few drafts.
        (DYNAMIC, 8, 16),
    ],
)
def test_what_falls_short_is_told_with_the_remedy(covered, reqs, tokens):
    assert covered.shortfall(reqs) is None
    assert covered.shortfall(16) == (
        f"FULL graphs take decode batches of up to {reqs} requests, and max_num_seqs "
        "is 16: larger steps run without, counted as beyond_graphs; set "
        f"--max-num-seqs {reqs}, or end --cudagraph-capture-sizes with {tokens}"
    )


def test_without_full_graphs_nothing_falls_short():
    assert coverage().shortfall(16) is None


class TestOfAModelState:
    SMALL, LARGE = Step((200,) * 2, 2, 2), Step((200,) * 5, 5, 2)

    @pytest.fixture
    def make(self, make_rig, monkeypatch):
        def make(*num_reqs: int):
            rig = make_rig(Architecture.SM90, 2)
            rig.keep_graphs(*num_reqs)
            rig.record()
            return rig

        self.lines = []
        for level in ("info", "warning"):
            monkeypatch.setattr(
                model_state.logger,
                level,
                lambda text, *args: self.lines.append(text % args),
            )
        return make

    def test_a_step_beyond_its_graphs_is_counted_and_logged(self, make):
        rig = make(2, 4)
        stats = rig.state.graphs.stats
        rig.build(rig.fill(self.SMALL), CUDAGraphMode.NONE)
        assert stats.eager == {Eager.NOT_FULL: 1}
        self.lines.clear()
        stats.line_due = 0
        rig.build(rig.fill(self.LARGE), CUDAGraphMode.PIECEWISE)
        assert stats.eager == {Eager.NOT_FULL: 1, Eager.BEYOND_GRAPHS: 1}
        assert stats.full_decode_steps == 0
        assert self.lines == [stats.line()]
        assert "(beyond_graphs=1, not_full=1)" in stats.line()

    def test_without_its_graphs_nothing_is_beyond_them(self, make):
        rig = make(2, 4)
        rig.state.release_metadata_graphs()
        rig.build(rig.fill(self.LARGE), CUDAGraphMode.NONE)
        assert rig.state.graphs.stats.eager == {Eager.NOT_FULL: 1}

    def test_the_start_up_tells_what_falls_short(self, make):
        make(2, 4)
        told = [line for line in self.lines if "max_num_seqs is 8" in line]
        assert len(told) == 1
        assert "--cudagraph-capture-sizes with 16" in told[0]
        self.lines.clear()
        make(2, 8)
        assert not any("max_num_seqs" in line for line in self.lines)
