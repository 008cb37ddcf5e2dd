"""A fused build serves only after it was held to upstream's builders; what it does
not know, or gets wrong, those go on to build.
"""

import re
from dataclasses import replace

import pytest
import torch
from decode_steps import Step
from rig import MAX_MODEL_LEN, MAX_NUM_REQS, Architecture, Serving, varlen_graph
from vllm.config import set_current_vllm_config
from vllm.models.deepseek_v41.compressor import CompressorMetadataBuilder
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata import (
    fused_build,
    jobs,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.fused_build import (
    FusedBuild,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.kernel import (
    Kind,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.key import (
    Eager,
    GraphKey,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.proof import (
    difference_from_upstream,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.stats import Way
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.tensors import (
    tensors,
)
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder

STEP = Step((1025,), 2, 1)


@pytest.fixture
def make_small_rig(make_rig):
    """A rig of one FULL graph, of two requests."""

    def make(way, architecture=Architecture.SM90, query_len=1, **options):
        rig = make_rig(architecture, query_len, way, **options)
        rig.keep_graphs(2)
        return rig

    return make


def offered(rig, num_reqs=2):
    """The fused build that a forward graph of so many requests would begin with,
    and upstream's.
    """
    builds = rig.state._builds(*rig.where)
    rig.state._max_query_lens |= {
        GraphKey.padded(graph.num_reqs, graph.num_tokens): graph.max_query_len
        for graph in rig.full_graphs
        if graph.max_query_len is not None
    }
    key = GraphKey.padded(num_reqs, rig.padded_tokens(num_reqs))
    build = builds.fused(key, rig.for_capture(num_reqs))
    build_upstream = builds.by_upstream(key)

    def in_config(*args):
        with set_current_vllm_config(rig.config):
            return build_upstream(*args)

    return build, in_config


OTHER_JOBS = {
    Kind.REQUEST: (),
    Kind.WINDOW: ("window", "block_size", "scale", "clamp", "table"),
    Kind.COMPRESSED_SLOT: ("block_size", "ratio", "scale", "clamp", "table"),
    Kind.RING_SLOT: ("block_size", "scale", "table"),
    Kind.CONTEXT: ("ratio",),
    Kind.TABLE: ("split", "scale", "clamp", "out_columns", "table"),
    Kind.TOKEN_TABLE: ("split", "scale", "out_columns", "table"),
}


def other_jobs(build, job):
    """``job`` with one thing wrong, by what that is."""
    tables = [table.data_ptr() for table in build.inputs.block_tables]
    fields = OTHER_JOBS[job.kind]
    if not job.outs[0]:
        # A context job that writes no contexts has no use for the ratio.
        fields = ()
    for field in fields:
        value = getattr(job, field)
        values = {
            "clamp": not value,
            "window": value - 1,
            "out_columns": value - 1,
            "table": tables[tables.index(value) - 1] if field == "table" else 0,
        }
        yield field, job._replace(**{field: values.get(field, value + 1)})
    for index, out in enumerate(job.outs):
        if out:
            outs = (*job.outs[:index], ELSEWHERE.data_ptr(), *job.outs[index + 1 :])
            yield f"output {index}", job._replace(outs=outs)


ELSEWHERE = torch.zeros(1 << 16, dtype=torch.int64)


@pytest.mark.parametrize(
    ("query_len", "kinds"),
    [(1, set(Kind) - {Kind.TOKEN_TABLE, Kind.SCHEDULE}), (3, {Kind.TOKEN_TABLE})],
)
def test_the_check_sees_every_wrong_job(make_small_rig, query_len, kinds):
    rig = make_small_rig(Serving.IN_GRAPH, query_len=query_len, proof_steps=None)
    build, build_upstream = offered(rig)
    missed, seen = [], set()
    for index, job in enumerate(build._jobs):
        if job.kind not in kinds:
            continue
        seen.add(job.kind)
        for wrong, other in other_jobs(build, job):
            jobs = [*build._jobs[:index], other, *build._jobs[index + 1 :]]
            path = difference_from_upstream(
                replace(build, _jobs=jobs), build_upstream, MAX_MODEL_LEN
            )
            if path is None:
                missed.append((job.kind.name, wrong))
    assert not missed
    assert seen == kinds


def test_the_check_sees_the_slots_of_another_group(make_small_rig):
    """They differ where a token is cached in some groups only."""
    rig = make_small_rig(Serving.IN_GRAPH, proof_steps=None)
    build, build_upstream = offered(rig, 4)
    rows = [row.data_ptr() for row in build.inputs.slot_mappings]
    for index, job in enumerate(build._jobs):
        if job.kind in (Kind.WINDOW, Kind.COMPRESSED_SLOT):
            jobs = list(build._jobs)
            jobs[index] = job._replace(slots=rows[rows.index(job.slots) - 1])
            wrong = replace(build, _jobs=jobs)
            assert difference_from_upstream(wrong, build_upstream, MAX_MODEL_LEN)


def test_the_check_names_the_tensor(make_small_rig):
    build, build_upstream = offered(make_small_rig(Serving.IN_GRAPH))
    jobs = [job for job in build._jobs if job.kind != Kind.RING_SLOT]
    path = difference_from_upstream(
        replace(build, _jobs=jobs), build_upstream, MAX_MODEL_LEN
    )
    assert path == "['ring'].slot_mapping"


def test_the_check_sees_a_missing_schedule(make_small_rig):
    build, build_upstream = offered(make_small_rig(Serving.IN_GRAPH))
    path = difference_from_upstream(
        replace(build, _schedules=[]), build_upstream, MAX_MODEL_LEN
    )
    assert path.endswith("decode.schedule_metadata")


@pytest.mark.parametrize("query_len", [1, 2, 3, 4])
def test_the_check_sees_every_wrong_schedule(make_small_rig, query_len):
    rig = make_small_rig(Serving.IN_GRAPH, query_len=query_len, proof_steps=None)
    build, build_upstream = offered(rig)
    assert len(build._schedules) == 2
    for index, schedule in enumerate(build._schedules):
        job = schedule.job
        for field in ("workers", "item_tokens", "block_size", "ratio"):
            # No value that writes past the schedule.
            values = {"workers": job.workers - 1, "block_size": 2 * job.block_size}
            value = values.get(field, getattr(job, field) + 1)
            other = job._replace(**{field: value})
            schedules = list(build._schedules)
            schedules[index] = schedule._replace(job=other)
            path = difference_from_upstream(
                replace(build, _schedules=schedules), build_upstream, MAX_MODEL_LEN
            )
            assert path is not None, field
            assert path.endswith("schedule_metadata"), field


FUSED = [Serving.IN_GRAPH, Serving.REPLAY, Serving.LAUNCH]


@pytest.mark.parametrize("way", FUSED)
@pytest.mark.parametrize("query_len", [1, 3, 4])
def test_an_unexpected_schedule_stays_deepgemms(
    make_small_rig, monkeypatch, log, way, query_len
):
    """All else is fused all the same."""
    monkeypatch.setattr(jobs, "_SM90_UNIT", 128)
    rig = make_small_rig(way, query_len=query_len)
    rig.record()
    served = Way(way.value)
    assert rig.state.graphs.served() == {served: 1}
    [line] = [line for line in log.lines if "DeepGEMM" in line]
    assert re.search(r"makes the schedule .*\.schedule_metadata\.", line)
    rig.check_step(replace(STEP, query_len=query_len))
    assert rig.state.graphs.stats.served == {served: 1}


def test_a_warm_up_runs_the_build_that_was_proven(make_small_rig, monkeypatch):
    """The forward that follows it reads the schedules."""
    monkeypatch.setattr(jobs, "_SM90_UNIT", 128)
    rig = make_small_rig(Serving.IN_GRAPH)
    build, build_upstream = offered(rig)
    rig.fill(Step((1025, 300), 2, 1))
    build_upstream(build.attn_groups)
    outs = [schedule.out for schedule in build._schedules]
    want = [out.clone() for out in outs]
    rig.state.in_graph.warm_up(build, build_upstream, MAX_MODEL_LEN)
    for out, value in zip(outs, want, strict=True):
        assert torch.equal(out, value)


@pytest.mark.parametrize("architecture", [Architecture.SM100, Architecture.SM120])
def test_schedules_of_other_architectures_stay_deepgemms(make_small_rig, architecture):
    build, _ = offered(make_small_rig(Serving.IN_GRAPH, architecture))
    assert build._schedules
    assert not build.knows_schedules


def explode(*_, **__):
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("outcome", ["equal", "different", "failed"])
def test_the_check_leaves_everything_as_it_was(make_small_rig, monkeypatch, outcome):
    """A warm-up forward follows, on these very buffers."""
    build, build_upstream = offered(make_small_rig(Serving.IN_GRAPH))
    built = [tensor for _, tensor in tensors(build.attn_metadata)]
    everything = [*build.inputs.tensors(), *built]
    before = [tensor.clone() for tensor in everything]
    assert len(built) > 30
    if outcome == "equal":
        assert difference_from_upstream(build, build_upstream, MAX_MODEL_LEN) is None
    elif outcome == "different":
        build = replace(build, _jobs=build._jobs[1:])
        assert difference_from_upstream(build, build_upstream, MAX_MODEL_LEN)
    else:
        monkeypatch.setattr(fused_build, "write_decode_metadata", explode)
        with pytest.raises(RuntimeError, match="on purpose"):
            difference_from_upstream(build, build_upstream, MAX_MODEL_LEN)
    for tensor, value in zip(everything, before, strict=True):
        assert torch.equal(tensor, value)


def wrong_ring_jobs(builder, metadata, source):
    right = jobs._ring_jobs(builder, metadata, source)
    return [job._replace(block_size=job.block_size + 1) for job in right]


def differing(monkeypatch):
    monkeypatch.setitem(jobs._JOBS, CompressorMetadataBuilder, wrong_ring_jobs)


def failing(monkeypatch):
    monkeypatch.setattr(fused_build, "write_decode_metadata", explode)


def exhausted(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory.")


def without_memory(monkeypatch):
    monkeypatch.setattr(fused_build, "write_decode_metadata", exhausted)


WRONG = {
    "differs from upstream's in ['ring'].slot_mapping: please report": differing,
    "could not be compared with upstream's (RuntimeError: on purpose): please": failing,
    "memory is full: lower gpu_memory_utilization": without_memory,
}


@pytest.mark.parametrize("way", FUSED)
@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_fused_build_is_not_used(make_small_rig, monkeypatch, log, why, way):
    WRONG[why](monkeypatch)
    rig = make_small_rig(way)
    rig.record()
    [error] = [line for line in log.lines if "is not used" in line]
    assert "2 requests of 2 tokens is not used" in error
    assert why in error
    rig.check_step(STEP)
    if way == Serving.LAUNCH:
        assert not rig.state.graphs.served()
        assert rig.state.graphs.stats.eager[Eager.UNRECORDED] == 1
    else:
        assert rig.state.graphs.served() == {Way.REPLAY: 1}
        assert rig.state.graphs.stats.served == {Way.REPLAY: 1}
        # Upstream's own builds were recorded, and those are the forward's alone.
        assert not any(graph.calls for graph in rig.forward_graphs.values())


NOT_FUSED = {
    # Another version of the builder may lack what its jobs follow from.
    "jobs": lambda monkeypatch, kind: monkeypatch.setitem(jobs._JOBS, kind, explode),
    "schedule": lambda monkeypatch, kind: monkeypatch.setattr(
        jobs.Schedule, "of", explode
    ),
}


@pytest.mark.parametrize("why", NOT_FUSED)
@pytest.mark.parametrize("way", FUSED)
def test_what_cannot_be_fused_is_built_by_upstream(
    make_small_rig, monkeypatch, log, way, why
):
    NOT_FUSED[why](monkeypatch, DeepseekV32IndexerMetadataBuilder)
    rig = make_small_rig(way)
    assert offered(rig)[0] is None
    rig.record()
    rig.check_step(STEP)
    served = {} if way == Serving.LAUNCH else {Way.REPLAY: 1}
    assert rig.state.graphs.served() == rig.state.graphs.stats.served == served
    assert not any(graph.calls for graph in rig.forward_graphs.values())


def test_the_log_names_what_cannot_be_fused(make_small_rig, monkeypatch):
    lines = []
    monkeypatch.setattr(
        fused_build.logger,
        "warning_once",
        lambda text, *args: lines.append(text % args),
    )
    NOT_FUSED["jobs"](monkeypatch, CompressorMetadataBuilder)
    rig = make_small_rig(Serving.LAUNCH)
    offered(rig)
    monkeypatch.delitem(jobs._JOBS, CompressorMetadataBuilder)
    offered(rig)
    assert [line.partition("build: ")[2] for line in lines] == [
        "CompressorMetadataBuilder: RuntimeError('on purpose').",
        "CompressorMetadataBuilder is unknown.",
    ]


@pytest.mark.parametrize("way", FUSED)
def test_an_unknown_builder_serves_every_step(make_small_rig, monkeypatch, way):
    monkeypatch.delitem(jobs._JOBS, CompressorMetadataBuilder)
    rig = make_small_rig(way)
    rig.record()
    rig.check_step(STEP)
    assert not rig.state.graphs.served()
    assert rig.state.graphs.stats.eager[Eager.UNKNOWN_BUILDER] == 1


@pytest.mark.parametrize("way", FUSED)
def test_a_builder_that_builds_into_new_memory_is_refused(make_small_rig, way, log):
    """Nothing would refresh what the forward graphs read."""
    rig = make_small_rig(way)
    builder = rig.attn_groups[-1][0].get_metadata_builder()
    build = builder.build

    def reallocating_build(*args, **kwargs):
        metadata = build(*args, **kwargs)
        return replace(metadata, slot_mapping=metadata.slot_mapping.clone())

    builder.build = reallocating_build
    rig.record()
    assert "differs from upstream's in ['ring'].slot_mapping" in log.lines[0]
    assert not rig.state.graphs.served()


def test_a_clamp_after_a_reader_of_its_table_is_not_fused(make_small_rig):
    """In one launch the two would race: the reader is to see negative blocks."""
    rig = make_small_rig(Serving.IN_GRAPH, Architecture.SM100)
    for groups in rig.attn_groups[1:3]:
        groups.reverse()
    assert offered(rig)[0] is None
    rig.record()
    assert rig.state.graphs.served() == {Way.REPLAY: 1}
    rig.check_step(STEP)


@pytest.mark.parametrize("narrow", [True, False])
def test_the_proof_stays_within_the_tables(make_small_rig, monkeypatch, narrow):
    """The runner may shorten the longest length after the model state was made."""
    rig = make_small_rig(Serving.IN_GRAPH, proof_steps=None)
    if narrow:
        rig.block_tables = type(rig.block_tables)([16, 16, 16, 1])
    else:
        monkeypatch.setattr(rig.config.model_config, "max_model_len", 2048)
    longest = []
    launch = FusedBuild.launch

    def noted(build):
        if not torch.cuda.is_current_stream_capturing():
            longest.append(int(build.inputs.seq_lens.max()))
        launch(build)

    monkeypatch.setattr(FusedBuild, "launch", noted)
    rig.record()
    assert 128 < max(longest) <= 2048
    assert rig.state.graphs.served() == {Way.IN_GRAPH: 1}


def test_other_inputs_need_another_build(make_small_rig):
    """A proven build reads the inputs it was made of."""
    rig = make_small_rig(Serving.IN_GRAPH)
    build, build_upstream = offered(rig)
    proven = rig.state.proven_builds
    assert proven.prove(build, build_upstream, MAX_MODEL_LEN) is build
    assert proven.known(replace(build)) is build
    for name in ("query_start_loc", "seq_lens", "positions", "replay_start"):
        moved = getattr(build.inputs, name).clone()
        other = replace(build, inputs=build.inputs._replace(**{name: moved}))
        assert proven.known(other) is None, name


def uneven(num_tokens, query_len, *query_lens):
    """A step of adaptive verification in the graph of so many tokens."""
    seq_lens = (300, 1024, 129, 64, 8192, 7, 2048, 512)[: len(query_lens)]
    return Step(
        tuple(map(max, seq_lens, query_lens)),
        min(num_tokens, MAX_NUM_REQS),
        query_len,
        seed=5,
        uneven=query_lens,
        graph_tokens=num_tokens,
    )


SIX = [
    uneven(20, 6, 6, 1, 2),
    uneven(20, 6, 2, 1, 6, 1, 4, 1, 2, 3),
    uneven(4, 6, 3),
    uneven(1, 6, 1),
]
FULL = [uneven(16, 2, *(2,) * 8), uneven(16, 2, 2, 1, 2)]
FOUR = [uneven(12, 4, 4, 3, 4, 1)]


@pytest.mark.parametrize(
    ("architecture", "way", "steps"),
    [
        *((architecture, Serving.IN_GRAPH, SIX) for architecture in Architecture),
        (Architecture.SM90, Serving.IN_GRAPH, FOUR),
        (Architecture.SM90, Serving.IN_GRAPH, FULL),
        (Architecture.SM90, Serving.REPLAY, FOUR),
        (Architecture.SM90, Serving.LAUNCH, FOUR),
    ],
)
def test_adaptive_verification(make_rig, architecture, way, steps):
    """Only the device tells the launch which request a token is of."""
    [query_len] = {step.query_len for step in steps}
    rig = make_rig(architecture, query_len, way, adaptive=True)
    sizes = {step.padded_tokens for step in steps}
    rig.full_graphs = [varlen_graph(tokens, query_len) for tokens in sizes]
    rig.record()
    for step in steps:
        rig.check_step(step)
    assert rig.state.graphs.stats.served == {Way(way.value): len(steps)}
