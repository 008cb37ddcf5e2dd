"""What the model state serves from recordings, and what it never does."""

import gc
import time
import weakref
from dataclasses import replace
from itertools import product

import pytest
import torch
from cpu_cuda_graph import CaptureError
from decode_steps import Step
from rig import Architecture, Serving
from vllm.config import CUDAGraphMode
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata import (
    model_state,
    recording,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.key import (
    Eager,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.stats import Way
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.tensors import (
    tensors,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.runtime import metadata_graphs
from vllm.models.deepseek_v41.nvidia.specialized_decode.runtime.metadata_graphs import (
    AttnMetadataCudaGraphs,
    NotRecordableError,
)

STEP = Step((200, 300, 400), 4, 1)


@pytest.fixture
def rig(make_rig):
    rig = make_rig(Architecture.SM90, 1)
    rig.record()
    return rig


def recorded_objects(rig) -> set[int]:
    return {
        id(metadata)
        for recorded in rig.state.graphs._graphs.values()
        for metadata in recorded.attn_metadata.values()
    }


def served_from_recording(rig, metadata) -> bool:
    return not recorded_objects(rig).isdisjoint(map(id, metadata.values()))


def test_a_full_decode_step_is_served(rig):
    assert served_from_recording(rig, rig.build(rig.fill(STEP)))


@pytest.mark.parametrize(
    ("mode", "options", "reason"),
    [
        (CUDAGraphMode.NONE, {}, Eager.NOT_FULL),
        (CUDAGraphMode.PIECEWISE, {}, Eager.NOT_FULL),
        (CUDAGraphMode.NONE, {"for_capture": True}, Eager.NOT_FULL),
    ],
)
def test_a_forward_never_meets_a_recorded_object(rig, mode, options, reason):
    batch = rig.fill(STEP)
    if mode != CUDAGraphMode.FULL:
        batch = replace(batch, num_reqs_after_padding=3, num_tokens_after_padding=3)
    metadata = rig.build(batch, mode, **options)
    assert not served_from_recording(rig, metadata)
    assert rig.state.graphs.stats.eager == {reason: 1}


@pytest.mark.parametrize(
    ("architecture", "query_len", "way"),
    [
        *product(Architecture, (3,), [Serving.UPSTREAM]),
        *product([Architecture.SM90], (1, 4), [Serving.UPSTREAM]),
        (Architecture.SM90, 3, Serving.REPLAY),
    ],
)
def test_extensions_and_idle_ranks_are_served(make_rig, architecture, query_len, way):
    """Nothing of theirs is baked into a recording. An idle rank's dummy forward would
    else write through the slots of the last step, into blocks that are live.
    """
    rig = make_rig(architecture, query_len, way)
    rig.keep_graphs(4)
    rig.record()
    view = rig.forward_view(4)
    step = Step((1025, 300, 129), 4, query_len)
    for start in (960, 1000):
        rig.check_batch(lambda start=start: rig.extending(step, start), step, view)
    [lens] = [view[path] for path in view if path.endswith("decode_swa_lens")]
    assert lens[query_len - 1] == 1025 - 1000
    slots = [view[path] for path in view if path.endswith("slot_mapping")]
    assert any((each >= 0).any() for each in slots)
    idle_step = Step((query_len,) * 4, 4, query_len)
    rig.check_batch(lambda: rig.idle(4), idle_step, view, for_capture=True)
    assert all((each == -1).all() for each in slots)
    assert rig.state.graphs.stats.served == {Way.REPLAY: 3}


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
def test_metadata_of_an_eager_idle_step_ends_with_it(rig, mode):
    metadata = rig.build(rig.idle(4), mode, for_capture=True)
    built = [weakref.ref(each) for each in metadata.values()]
    del metadata
    # Builders keep what they built last.
    rig.build(rig.idle(2), mode, for_capture=True)
    gc.collect()
    assert not any(each() for each in built)


def test_a_recording_keeps_its_table_of_jobs(make_rig):
    """Its graph reads the table at every replay."""
    rig = make_rig(Architecture.SM90, 1, Serving.REPLAY)
    rig.keep_graphs(1)
    rig.record()
    [build] = rig.state.proven_builds._proven.values()
    table = weakref.ref(build._job_table)
    del build
    [kept] = rig.state.graphs._graphs.values()
    # A CUDA graph keeps no tensor alive.
    kept.refresh.__self__.reset()
    del kept
    rig.state.proven_builds.release()
    gc.collect()
    assert table() is not None
    rig.state.release_metadata_graphs()
    gc.collect()
    assert table() is None


@pytest.mark.parametrize("way", list(Serving))
@pytest.mark.parametrize(
    ("architecture", "layer", "holder"),
    [
        (Architecture.SM90, "window", "tile_sched_swaonly"),
        (Architecture.SM100, "full.indexer", "sparse_decode"),
        (Architecture.SM100, "window", "flashinfer_sparse_index_cache"),
    ],
)
def test_what_is_handed_out_holds_nothing_of_one_step(
    make_rig, way, architecture, layer, holder
):
    """A FlashMLA plan is good for one step: a forward fails where it would be."""
    rig = make_rig(architecture, 1, way)
    rig.keep_graphs(4)
    rig.record()
    step = Step((200, 300), 4, 1)
    handed_out = rig.build(rig.fill(step))
    assert rig.state.graphs.stats.served.total() == 1
    assert getattr(handed_out[layer], holder) is None
    eager = rig.eager(step)
    assert getattr(eager[layer], holder) is not None


def test_other_buffers_than_the_recorded_ones_are_stale(rig):
    rig.block_tables.slot_mappings = rig.block_tables.slot_mappings.clone()
    assert not served_from_recording(rig, rig.build(rig.fill(STEP)))
    assert rig.state.graphs.stats.eager == {Eager.STALE: 1}


def test_other_builders_than_the_recorded_ones_are_stale(rig):
    rig.attn_groups = [list(groups) for groups in rig.attn_groups]
    assert not served_from_recording(rig, rig.build(rig.fill(STEP)))
    assert rig.state.graphs.stats.eager == {Eager.STALE: 1}


def new_kv_cache(rig, monkeypatch):
    monkeypatch.setattr(
        model_state.DeepseekV41ModelState, "initialize_kv_cache", lambda *_: None
    )
    rig.state.initialize_kv_cache(rig.kv_cache_config, rig.block_tables)


def test_a_new_kv_cache_drops_the_recordings(rig, monkeypatch):
    new_kv_cache(rig, monkeypatch)
    assert len(rig.state.graphs) == 0
    rig.build(rig.fill(STEP))
    assert rig.state.graphs.stats.missed == 1


def test_capturing_again_records_again(rig, cuda_graphs):
    before = dict(rig.state.graphs._graphs)
    rig.record()
    assert cuda_graphs.captures == 8
    assert before.keys() == rig.state.graphs._graphs.keys()
    for key, recorded in rig.state.graphs._graphs.items():
        assert recorded.refresh != before[key].refresh
    assert served_from_recording(rig, rig.build(rig.fill(STEP)))


def test_a_failure_while_recording_leaves_a_working_engine(make_rig, cuda_graphs):
    cuda_graphs.fail_on_capture = 3
    rig = make_rig(Architecture.SM90, 1)
    rig.record()
    assert len(rig.state.graphs) == 2
    assert served_from_recording(rig, rig.build(rig.fill(STEP)))
    small = rig.build(rig.fill(Step((200,), 1, 1)))
    assert not served_from_recording(rig, small)
    assert rig.state.graphs.stats.eager == {Eager.UNRECORDED: 1}


def test_a_failing_builder_leaves_a_working_engine(make_rig, monkeypatch):
    rig = make_rig(Architecture.SM90, 1)
    [group] = rig.attn_groups[-1]
    builder = group.get_metadata_builder()
    build = builder.build
    monkeypatch.setattr(builder, "build", lambda *_, **__: 1 / 0)
    rig.record()
    assert len(rig.state.graphs) == 0
    monkeypatch.setattr(builder, "build", build)
    assert rig.build(rig.fill(STEP)).keys()
    assert rig.state.graphs.stats.missed == 1


@pytest.mark.parametrize(("limit", "value"), [("MAX_SECONDS", 0.0), ("MAX_MIB", -1.0)])
def test_recording_stays_within_its_budget(make_rig, monkeypatch, limit, value):
    monkeypatch.setattr(recording, limit, value)
    rig = make_rig(Architecture.SM90, 1)
    rig.record()
    # What was recorded by then serves; it is the largest graph.
    assert list(rig.state.graphs._graphs) == [(8, 8, 8, 8)]


def test_a_build_that_reads_the_device_is_refused(make_rig, monkeypatch):
    rig = make_rig(Architecture.SM90, 1)
    [group] = rig.attn_groups[-1]
    builder = group.get_metadata_builder()
    build = builder.build

    def syncing_build(prefix_len, common, **kwargs):
        common.seq_lens.max().item()
        return build(prefix_len, common, **kwargs)

    monkeypatch.setattr(builder, "build", syncing_build)
    rig.record()
    assert len(rig.state.graphs) == 0


def test_a_build_into_new_memory_is_refused(make_rig, monkeypatch):
    """The forward graphs read the tensors of an eager build; a build that puts
    them elsewhere each time would never refresh those.
    """
    rig = make_rig(Architecture.SM90, 1)
    [group] = rig.attn_groups[-1]
    builder = group.get_metadata_builder()
    build = builder.build

    def reallocating_build(prefix_len, common, **kwargs):
        metadata = build(prefix_len, common, **kwargs)
        return replace(metadata, slot_mapping=metadata.slot_mapping.clone())

    monkeypatch.setattr(builder, "build", reallocating_build)
    graphs = AttnMetadataCudaGraphs(rig.config, 1)
    batch = rig.fill(STEP)

    def record(some_batch, mode, tables, slots, groups, config, **kwargs):
        kwargs.pop("for_capture"), kwargs.pop("ubatch_idx")
        return graphs.capture(
            (4, 4, 4, 4),
            groups,
            tables,
            lambda some: plain(some_batch, mode, tables, slots, some, config, **kwargs),
        )

    plain = rig.stock_state._build_attn_metadata
    rig.stock_state._build_attn_metadata = record
    with pytest.raises(NotRecordableError, match=r"slot_mapping elsewhere"):
        rig.build(batch, prepare_attn=rig.stock_state.prepare_attn)
    assert len(graphs) == 0


def test_recorded_metadata_is_never_mutated(rig):
    def contents(metadata):
        views = [(path, t.data_ptr(), t.shape) for path, t in tensors(metadata)]
        host = [
            {k: v for k, v in vars(m).items() if isinstance(v, int | bool)}
            for m in metadata.values()
        ]
        return views, host

    first = rig.build(rig.fill(STEP))
    before = contents(first)
    for seed in range(3):
        assert rig.build(rig.fill(replace(STEP, seed=seed))) is first
    assert contents(first) == before


def test_the_longest_length_is_recorded(rig):
    """A shorter bound would let an eager consumer take a short-context path."""
    metadata = rig.build(rig.fill(STEP))
    assert metadata["full.indexer"].max_seq_len == rig.state.max_model_len


class TestReplayStarts:
    """Rows of ``_replay_start`` after any series of steps are what stock uploads."""

    def uploads(self, rig, monkeypatch):
        calls = []
        upload = model_state.DeepseekV41ModelState._upload_replay_start

        def counted(state, values, num_reqs):
            calls.append(values.copy())
            return upload(state, values, num_reqs)

        monkeypatch.setattr(
            model_state.DeepseekV41ModelState, "_upload_replay_start", counted
        )
        return calls

    def prefilling(self, rig, start):
        batch = rig.fill(STEP)
        rig.state._replay_start_np[:] = start
        batch.is_prefilling_np[:] = True
        return replace(batch, has_prefill=True)

    def test_decode_steps_upload_zeros_once(self, rig, monkeypatch):
        calls = self.uploads(rig, monkeypatch)
        rig.state._zero_replay_starts = 0
        for _ in range(3):
            rig.build(rig.fill(STEP))
        assert len(calls) == 1

    def test_a_replaying_prefill_is_undone_by_the_next_decode(self, rig, monkeypatch):
        rig.build(self.prefilling(rig, 128))
        assert (rig.state._replay_start[:3] == 128).all()
        rig.build(rig.fill(STEP))
        assert (rig.state._replay_start[:3] == 0).all()

    def test_a_larger_batch_after_it_reads_no_stale_rows(self, rig):
        rig.build(rig.fill(Step((200,) * 8, 8, 1)))
        rig.build(self.prefilling(rig, 128))
        rig.build(rig.fill(Step((200,), 1, 1)))
        rig.build(rig.fill(Step((200,) * 8, 8, 1)))
        assert (rig.state._replay_start == 0).all()

    @pytest.mark.parametrize("way", [Serving.UPSTREAM, Serving.IN_GRAPH])
    @pytest.mark.parametrize("bounded_replay", [True, False])
    def test_what_sleep_may_discard_is_not_read(
        self, make_rig, monkeypatch, way, bounded_replay
    ):
        """Of what the model state made with the weights anything may come back."""
        rig = make_rig(Architecture.SM90, 1, way, bounded_replay=bounded_replay)
        rig.keep_graphs(2)
        made_with_weights = rig.state._replay_start
        new_kv_cache(rig, monkeypatch)
        rig.record()
        made_with_weights.fill_(500)
        for _ in range(2):
            rig.check_step(Step((600, 520), 2, 1))
        assert rig.state.graphs.stats.served.total() == 2


def test_forked_and_serial_recordings_agree(make_rig, monkeypatch):
    """Stale columns of -1 make the in-place clamp of a shared block table count."""
    results = []
    for serial in (False, True):
        rig = make_rig(Architecture.SM90, 3)
        if serial:
            monkeypatch.setattr(
                metadata_graphs,
                "forked_build",
                lambda groups, tables, build, streams: build(groups),
            )
        rig.record()
        view = rig.forward_view(4)
        rig.poison(view)
        rig.build(rig.fill(Step((200, 300, 400), 4, 3)))
        results.append({path: tensor.clone() for path, tensor in view.items()})
    forked, serial = results
    assert forked.keys() == serial.keys()
    for path in forked:
        assert torch.equal(forked[path], serial[path]), path


def test_the_stand_in_refuses_what_a_cuda_graph_cannot_hold(cuda_graphs):
    on_device, on_host = torch.ones(4), torch.ones(4)
    cuda_graphs.device_storages = {on_device.untyped_storage().data_ptr()}
    for work in (
        lambda: on_device.sum().item(),
        lambda: on_device.copy_(on_host),
        lambda: on_host.copy_(on_device),
    ):
        with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            work()


@pytest.mark.parametrize("way", Serving)
def test_the_counters_are_logged_when_due(make_rig, way, monkeypatch):
    rig = make_rig(Architecture.SM90, 1, way)
    rig.keep_graphs(4)
    rig.record()
    stats = rig.state.graphs.stats
    lines: list[str] = []
    monkeypatch.setattr(
        model_state.logger,
        "info",
        lambda text, *args: lines.append(text % args),
    )
    stats.line_due = float("inf")
    rig.run(STEP)
    assert not lines
    stats.line_due = time.monotonic()
    rig.run(STEP)
    assert lines == [stats.line()]
    assert "full_decode_steps=2" in lines[0]
    rig.run(STEP)
    assert len(lines) == 1
