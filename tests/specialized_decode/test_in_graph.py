"""Metadata builds in the forward graphs: which shapes get one, and what steps of
those find in the buffers.
"""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from decode_steps import Step, assert_same_for_forward, clones
from rig import MAX_MODEL_LEN, Architecture, Serving
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor
from vllm.config import CUDAGraphMode
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata import in_graph
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.key import (
    Eager,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.stats import Way
from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache
from vllm.v1.attention.backends.mla import indexer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu_worker import Worker

STEP = Step((1025,), 2, 1)
FULL = Step((1025, 300), 2, 1)


@pytest.fixture
def make_small_rig(make_rig):
    """A rig of one FULL graph, of two requests."""

    def make(architecture=Architecture.SM90, **options):
        rig = make_rig(architecture, 1, Serving.IN_GRAPH, **options)
        rig.keep_graphs(2)
        return rig

    return make


@pytest.fixture
def rig(make_small_rig):
    rig = make_small_rig()
    rig.record()
    assert rig.state.graphs.served() == {Way.IN_GRAPH: 1}
    return rig


class Launches(TorchDispatchMode):
    """What the host launches: Triton kernels, and torch's but for views."""

    VIEWS = ("aten::slice", "aten::select", "aten::view", "aten::detach")

    def __init__(self, monkeypatch):
        super().__init__()
        self.names = []
        run_grid = GridExecutor.__call__

        def launch(executor, *args, **kwargs):
            self.names.append(executor.fn.__name__)
            return run_grid(executor, *args, **kwargs)

        monkeypatch.setattr(GridExecutor, "__call__", launch)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func._schema.name.startswith(self.VIEWS):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("query_len", [1, 2, 3, 4])
def test_a_fused_build_is_one_launch(make_rig, monkeypatch, query_len):
    rig = make_rig(Architecture.SM90, query_len, Serving.LAUNCH)
    rig.keep_graphs(2)
    rig.record()
    monkeypatch.delattr(indexer, "get_paged_mqa_logits_metadata")
    batch = rig.fill(replace(STEP, query_len=query_len))
    with Launches(monkeypatch) as launches:
        rig.run_batch(batch)
    # The interpreter moves its arguments by torch.
    kernels = [name for name in launches.names if not name.startswith("aten::")]
    assert kernels == ["_decode_metadata_kernel"]
    assert rig.state.graphs.stats.served == {Way.LAUNCH: 1}


class TestWhatIsCaptured:
    """Every graph of a shape must hold the build: a step does not say which it runs."""

    def capture(self, rig, *graphs):
        """The forwards of ``graphs`` in order, as the runner captures them."""
        rig.full_graphs = list(graphs)
        rig.record()

    def graph(self, **options):
        return replace(BatchExecutionDescriptor(CUDAGraphMode.FULL, 2, 2, 1), **options)

    def check_served(self, rig, served):
        assert rig.state.graphs.served() == {served: 1}
        rig.check_step(STEP)
        assert rig.state.graphs.stats.served == {served: 1}

    def check_left_out(self, rig, graph, attn_metadata):
        """A forward captured on ``attn_metadata`` holds no build, and another way
        serves its shape.
        """
        forward_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward_graph):
            rig.build_in_graph(graph, attn_metadata)
        assert not forward_graph.calls
        rig.capture_inner()
        self.check_served(rig, Way.REPLAY)

    def test_all_lora_variants_hold_it(self, make_small_rig):
        rig = make_small_rig()
        variants = [self.graph(num_active_loras=loras) for loras in (2, 1, 0)]
        rig.full_graphs = variants
        captured = []
        for variant in variants:
            rig.capture_forward(variant)
            captured.append(rig.forward_graphs[2])
        rig.capture_inner()
        for forward_graph in captured:
            rig.forward_graphs[2] = forward_graph
            rig.check_step(STEP)
        assert rig.state.graphs.stats.served == {Way.IN_GRAPH: 3}

    @pytest.mark.parametrize("unproven", [0, 1])
    def test_one_variant_without_it_leaves_the_shape_out(
        self, make_small_rig, monkeypatch, unproven
    ):
        rig = make_small_rig()
        capture = rig.capture_forward
        order = iter(range(2))

        def capture_forward(graph):
            with monkeypatch.context() as patch:
                if next(order) == unproven:
                    # Nothing a variant before it proved holds for its metadata.
                    patch.setattr(rig.state.proven_builds, "known", lambda _: None)
                    patch.setattr(rig.state.proven_builds, "prove", lambda *_: None)
                capture(graph)

        monkeypatch.setattr(rig, "capture_forward", capture_forward)
        self.capture(rig, self.graph(num_active_loras=1), self.graph())
        self.check_served(rig, Way.REPLAY)

    def test_a_recording_has_metadata_that_no_forward_was_given(self, make_small_rig):
        """The warm-up's is proven with the build, and its plans are of that forward."""
        rig = make_small_rig()
        [graph] = rig.full_graphs
        warmed_up = rig.for_capture(2)
        rig.build_in_graph(graph, warmed_up)
        warmed_up["window"].tile_sched_swaonly.have_initialized = True
        rig.build_in_graph(self.graph(uniform_token_count=None), {})
        rig.capture_inner()
        self.check_served(rig, Way.REPLAY)

    def test_a_mixed_graph_holds_none(self, make_small_rig):
        rig = make_small_rig()
        self.capture(rig, self.graph(uniform_token_count=None))
        assert not rig.forward_graphs[2].calls
        assert not rig.state.graphs.served()

    @pytest.mark.parametrize("moved", ["tables", "slot_mappings"])
    def test_metadata_that_moved_after_the_warm_up(self, make_small_rig, moved):
        """The warm-up proved a build of other buffers."""
        rig = make_small_rig()
        [graph] = rig.full_graphs
        blocks = rig.block_tables
        rig.build_in_graph(graph, rig.for_capture(2))
        if moved == "tables":
            blocks.tables = [table.clone() for table in blocks.tables]
        else:
            blocks.slot_mappings = blocks.slot_mappings.clone()
        self.check_left_out(rig, graph, rig.for_capture(2))

    def test_a_graph_outlives_the_build_of_another_variant(self, make_small_rig):
        """A graph reads its table of jobs at every replay, so no later variant of the
        shape may free it.
        """
        rig = make_small_rig()
        graph = self.graph()
        rig.capture_forward(graph)
        [table] = tables_of_jobs(rig)
        blocks = rig.block_tables
        blocks.slot_mappings = blocks.slot_mappings.clone()
        rig.capture_forward(self.graph(num_active_loras=1))
        assert table in tables_of_jobs(rig)
        assert len(tables_of_jobs(rig)) == 2

    def test_a_rank_without_time_for_proofs_holds_none(
        self, make_small_rig, monkeypatch
    ):
        """Whichever of the TP group it is."""
        rig = make_small_rig()
        monkeypatch.setattr(in_graph, "agreed", lambda *_: (False,))
        rig.record()
        assert not rig.forward_graphs[2].calls
        self.check_served(rig, Way.REPLAY)

    def test_only_auto_builds_in_the_graphs(self, make_rig):
        for way in (Serving.REPLAY, Serving.LAUNCH):
            rig = make_rig(Architecture.SM90, 1, way)
            rig.keep_graphs(2)
            rig.way = Serving.IN_GRAPH  # The runner asks for it all the same.
            rig.record()
            assert not rig.forward_graphs[2].calls
            assert Way.IN_GRAPH not in rig.state.graphs.served()


def tables_of_jobs(rig):
    """The addresses of the tables that captured builds keep."""
    return {
        build._job_table.data_ptr()
        for builds in rig.state.in_graph._captured.values()
        for build in builds
    }


class TestCapturingAgain:
    @pytest.mark.parametrize("released", [True, False])
    def test_the_last_capture_serves(self, rig, released):
        first = rig.forward_graphs[2]
        if released:
            rig.state.release_metadata_graphs()
            assert len(rig.state.graphs) == 0
        rig.record()
        assert rig.forward_graphs[2] is not first
        assert rig.state.graphs.served() == {Way.IN_GRAPH: 1}
        rig.check_step(STEP)

    def test_no_step_is_served_after_a_release(self, rig):
        """The graphs it would rely on are gone."""
        rig.state.release_metadata_graphs()
        rig.forward_graphs.clear()
        rig.check_step(STEP)
        assert rig.state.graphs.stats.eager[Eager.UNRECORDED] == 1
        assert not rig.state.graphs.stats.served

    @pytest.mark.parametrize("fitted", [MAX_MODEL_LEN, 2048])
    def test_memory_profiling_comes_first(
        self, make_small_rig, monkeypatch, cuda_graphs, fitted
    ):
        """It captures into buffers that are thrown away, and ends in a release. What
        it finds may shorten the longest sequence (``--max-model-len auto``).
        """
        rig = make_small_rig()
        rig.record()
        rig.state.release_metadata_graphs()
        monkeypatch.setattr(rig.config.model_config, "max_model_len", MAX_MODEL_LEN)
        worker = SimpleNamespace(
            model_config=rig.config.model_config, model_runner=None
        )
        Worker.update_max_model_len(worker, fitted)
        thrown_away = list(rig.builders())
        rig.initialize_kv_cache()
        cuda_graphs.device_storages = rig.device_storages
        assert not {*map(id, thrown_away)} & {*map(id, rig.builders())}
        rig.record()
        assert rig.state.graphs.served() == {Way.IN_GRAPH: 1}
        rig.check_step(STEP)
        handed_out = rig.check_step(Step((fitted, 300), 2, 1))
        assert handed_out["full.indexer"].max_seq_len == fitted

    def test_a_shape_left_out_later_is_no_longer_served_in_the_graph(self, rig):
        """Also without a release in between."""
        rig.full_graphs.append(replace(rig.full_graphs[0], uniform_token_count=None))
        rig.record()
        assert rig.state.graphs.served() == {Way.REPLAY: 1}
        rig.check_step(STEP)


class TestSteps:
    def prefilling(self, rig, start, step=FULL):
        """One-token extensions of a prefix, of which the first was just replayed."""
        batch = rig.fill(step)
        rig.state._replay_start_np[:] = 0
        rig.state._replay_start_np[0] = start
        rig.stock_state._replay_start_np[:] = rig.state._replay_start_np
        batch.is_prefilling_np[:] = True
        return replace(batch, has_prefill=True)

    def test_the_host_launches_nothing(self, rig, monkeypatch):
        batch = rig.fill(STEP)
        rig.build(batch)
        with Launches(monkeypatch) as launches:
            rig.build(batch)
        assert not launches.names
        with Launches(monkeypatch) as launches:
            rig.build(batch, prepare_attn=rig.stock_state.prepare_attn)
        assert len(launches.names) > 10

    @pytest.mark.parametrize("start", [1000, 960])
    def test_a_one_token_prefill_sees_its_replay_start(self, rig, start):
        """Below it there is no window."""
        rig.check_batch(lambda: self.prefilling(rig, start), FULL)
        served = rig.state.graphs.stats
        assert served.served == {Way.IN_GRAPH: 1}
        assert not served.eager[Eager.UNEVEN]
        view = rig.forward_view(2)
        rig.run_batch(self.prefilling(rig, start))
        [lens] = [view[path] for path in view if path.endswith("decode_swa_lens")]
        assert lens[:2].tolist() == [1025 - start, 128]

    def test_a_decode_after_it_reads_no_stale_start(self, rig):
        view = rig.forward_view(2)
        [lens] = [view[path] for path in view if path.endswith("decode_swa_lens")]
        rig.run_batch(self.prefilling(rig, 1000))
        assert lens[0] == 25
        rig.run(STEP)
        assert lens[0] == 128
        rig.run_batch(self.prefilling(rig, 1000))
        rig.run(FULL)
        assert lens.tolist() == [128, 128]
        rig.check_step(FULL)

    def test_an_idle_rank_launches_nothing_and_writes_no_slot(self, rig, monkeypatch):
        """Its dummy forward would write through the slots of the last step."""
        view = rig.forward_view(2)
        slots = [view[path] for path in view if path.endswith("slot_mapping")]
        rig.run(FULL)
        assert any((each >= 0).any() for each in slots)
        eager = rig.state.graphs.stats.eager.copy()
        rig.block_tables.get_dummy_block_tables(2)
        dummy = rig.dummy(2)
        with Launches(monkeypatch) as launches:
            rig.build(dummy, for_capture=True)
        assert not launches.names
        rig.forward_graphs[2].replay()
        assert all((each == -1).all() for each in slots)
        assert rig.state.graphs.stats.served == {Way.IN_GRAPH: 2}
        assert rig.state.graphs.stats.eager == eager

    @pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
    def test_other_steps_get_fresh_metadata(self, rig, mode):
        in_graph = rig.build(rig.fill(FULL))
        captured = rig.state.graphs.stats.eager[Eager.NOT_FULL]
        batches = [rig.build(rig.fill(FULL), mode) for _ in range(2)]
        plans = {id(batch["window"].tile_sched_swaonly) for batch in batches}
        assert len(plans) == 2
        assert id(None) not in plans
        assert all(batch["window"] is not in_graph["window"] for batch in batches)
        assert rig.state.graphs.stats.eager[Eager.NOT_FULL] == captured + 2

    def test_a_step_of_a_shape_without_a_graph_is_built_eagerly(self, rig):
        rig.check_step(Step((200, 300, 400), 4, 1))
        assert rig.state.graphs.stats.eager[Eager.UNRECORDED] == 1
        assert not rig.state.graphs.stats.served

    def test_both_ways_through_a_step_count_alike(self, rig):
        """A decode is served on the fast path, a prefill on the slow one."""
        decode = rig.run(FULL)
        prefill = rig.run_batch(self.prefilling(rig, 1000))
        assert prefill is decode
        stats = rig.state.graphs.stats
        assert stats.served == {Way.IN_GRAPH: 2}
        assert stats.full_decode_steps == 2

    def test_a_step_leaves_no_replay_batch_of_an_earlier_one(self, rig):
        rig.state.decoder_replay_layers = SimpleNamespace(replay_batch="earlier")
        rig.run(FULL)
        assert rig.state.graphs.stats.served == {Way.IN_GRAPH: 1}
        assert rig.state.decoder_replay_layers.replay_batch is None


class TestWhatIsHandedOut:
    """Metadata for reading: no forward but the graph may run on it."""

    @pytest.fixture(params=[Architecture.SM90, Architecture.SM100])
    def any_rig(self, make_small_rig, request):
        rig = make_small_rig(request.param)
        rig.record()
        return rig

    def test_it_has_the_tensors_of_the_eager_build(self, any_rig):
        eager = any_rig.build(
            any_rig.fill(FULL), prepare_attn=any_rig.stock_state.prepare_attn
        )
        handed_out = any_rig.run(FULL)
        assert handed_out.keys() == eager.keys()
        zeros = any_rig.stock_state._replay_start
        for layer, metadata in eager.items():
            assert type(handed_out[layer]) is type(metadata)
            # The model states have replay starts of their own.
            names = {
                field.name
                for field in fields(metadata)
                if isinstance(getattr(metadata, field.name), torch.Tensor)
                and getattr(metadata, field.name).data_ptr() != zeros.data_ptr()
                and not field.name.endswith("_cpu")
            }
            assert names
            for name in names:
                left, right = getattr(handed_out[layer], name), getattr(metadata, name)
                assert left.data_ptr() == right.data_ptr(), (layer, name)
                assert left.shape == right.shape, (layer, name)

    def test_an_eager_flashmla_forward_on_it_fails(self, rig):
        plan = rig.run(FULL)["window"].tile_sched_swaonly
        cache = torch.zeros(1, 64, 1, 584, dtype=torch.uint8)
        query = torch.zeros(2, 1, 16, 512, dtype=torch.bfloat16)
        with pytest.raises(AssertionError, match="must be of type FlashMLASchedMeta"):
            flash_mla_with_kvcache(
                query, cache, None, None, 512, plan, indices=torch.zeros(2, 1, 128)
            )


def test_a_long_run_of_random_steps(make_rig):
    """Batch sizes up and down over two graphs, every buffer poisoned before each
    step.
    """
    rig = make_rig(Architecture.SM90, 1, Serving.IN_GRAPH)
    rig.keep_graphs(1, 2)
    rig.record()
    views = {padded: rig.forward_view(padded) for padded in (1, 2)}
    random = torch.Generator().manual_seed(0)
    for seed in range(60):
        num_reqs, larger = torch.randint(1, 3, (2,), generator=random).tolist()
        padded = max(num_reqs, larger)
        step = Step.random(num_reqs, padded, 1, MAX_MODEL_LEN, seed)
        rig.eager(step)
        want = clones(views[padded])
        batch = rig.fill(step)
        for view in views.values():
            rig.poison(view)
        rig.run_batch(batch)
        assert_same_for_forward(want, clones(views[padded]), step)
    assert rig.state.graphs.stats.served == {Way.IN_GRAPH: 60}
    assert not rig.state.graphs.stats.eager[Eager.UNRECORDED]
