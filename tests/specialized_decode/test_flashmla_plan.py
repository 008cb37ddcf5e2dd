"""FlashMLA plans shared over the KV-cache groups of a step: how many are made, that
each step makes its own, and everything that forbids to share them.
"""

from dataclasses import replace

import pytest
import torch
from decode_steps import Step
from rig import DEVICE, KERNEL_BLOCK, Architecture, FakeBlockTables
from vllm.config import CUDAGraphMode
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata import flashmla_plan
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.flashmla_plan import (
    PLANS,
    NotShared,
    PlanSharing,
)
from vllm.v1.worker.utils import AttentionGroup

STEP = Step((200, 300, 400), 4, 1)
# What the rig's model has: layers of ratio 0, 1 and 2.
LAYER_TYPES = {"tile_sched_swaonly", "tile_sched_c1a", "tile_sched_c2a"}
WINDOWS = ("window", "window.1", "window.2")


def add_group(rig, name: str, like: AttentionGroup, **changes) -> AttentionGroup:
    """Give ``rig`` one more KV-cache group with a layer ``name``, as ``like``
    but for ``changes`` of its spec.
    """
    spec = replace(like.kv_cache_spec, **changes)
    group = AttentionGroup(like.backend, [name], spec, len(rig.attn_groups))
    group.create_metadata_builders(
        rig.config,
        DEVICE,
        kernel_block_size=KERNEL_BLOCK if like.kernel_block_size else None,
    )
    rig.attn_groups.append([group])
    rig.specs.append(spec)
    cache_group = type(rig.kv_cache_config.kv_cache_groups[0])(
        kv_cache_spec=spec, layer_names=[name]
    )
    rig.kv_cache_config.kv_cache_groups.append(cache_group)
    rig.block_tables = FakeBlockTables([64, 64, 64, 1] + [64] * (len(rig.specs) - 4))
    return group


@pytest.fixture
def make_windows(make_rig, cuda_graphs):
    """``make_windows(...)``: a rig with three window groups."""

    def make(architecture=Architecture.SM90, query_len=1, **options):
        rig = make_rig(architecture, query_len, **options)
        for name in WINDOWS[1:]:
            add_group(rig, name, rig.attn_groups[0][0])
        cuda_graphs.device_storages = rig.device_storages
        return rig

    return make


@pytest.fixture
def rig(make_windows):
    return make_windows()


class FlashMLA:
    """FlashMLA's real Python interface over an op that plans as the compiled one
    does: where it is given no plan.
    """

    def __init__(self, monkeypatch) -> None:
        from vllm.third_party.flashmla import flash_mla_interface

        self.interface = flash_mla_interface
        self.planned_for: list[tuple] = []
        monkeypatch.setattr(flash_mla_interface, "flash_mla_cuda", self)

    def sparse_decode_fwd(
        self, q, cache, indices, lengths, sink, plan, splits, *extra
    ) -> tuple:
        extra_lengths = extra[2]
        made_for = lengths
        if extra_lengths is not None:
            made_for = torch.cat([lengths, extra_lengths])
        if plan is None:
            self.planned_for.append(tuple(made_for.tolist()))
            plan, splits = made_for.clone(), torch.zeros(1)
        assert torch.equal(plan, made_for), "a plan for other lengths"
        return q, None, plan, splits

    def forward(self, rig, metadata, pages: int = 32, layers: int = 2) -> None:
        """A decode forward: ``layers`` layers of each type in each window group."""
        for name in WINDOWS:
            window = metadata[name]
            rows = window.num_decode_tokens
            q = torch.zeros(rows, 1, 64, 512)
            for plan, compressed in (
                ("swaonly", None),
                ("c2a", "half"),
                ("c1a", "full"),
            ):
                more = {}
                if compressed is not None:
                    ratio = 2 if compressed == "half" else 1
                    found = window.seq_lens.repeat_interleave(rig.query_len) // ratio
                    more = dict(
                        extra_k_cache=torch.zeros(1, pages // ratio, 1, 8),
                        extra_indices_in_kvcache=torch.zeros(rows, 1, 512),
                        extra_topk_length=found.clamp(max=512)
                        * window.is_valid_token[:rows],
                    )
                for _ in range(layers):
                    self.interface.flash_mla_with_kvcache(
                        q,
                        torch.zeros(1, 128, 1, 8),
                        None,
                        None,
                        512,
                        getattr(window, f"tile_sched_{plan}"),
                        is_fp8_kvcache=True,
                        indices=window.decode_swa_indices,
                        topk_length=window.decode_swa_lens,
                        **more,
                    )


@pytest.fixture
def flashmla(monkeypatch):
    return FlashMLA(monkeypatch)


def eager_batch(rig, step=STEP):
    return replace(
        rig.fill(step),
        num_reqs_after_padding=step.num_reqs,
        num_tokens_after_padding=step.num_tokens,
    )


def stock_build(rig, step=STEP):
    """The step's metadata as upstream's own model state builds it."""
    return rig.build(
        eager_batch(rig, step),
        CUDAGraphMode.NONE,
        prepare_attn=rig.stock_state.prepare_attn,
    )


def plans(metadata) -> dict[str, set[int]]:
    """The distinct plan objects of each layer type over the window groups."""
    return {
        plan: {id(getattr(metadata[name], plan)) for name in WINDOWS}
        for plan in PLANS
        if getattr(metadata[WINDOWS[0]], plan) is not None
    }


def shared(metadata) -> bool:
    counts = {len(objects) for objects in plans(metadata).values()}
    assert counts in ({1}, {len(WINDOWS)})
    return counts == {1}


@pytest.mark.parametrize("query_len", [1, 6])
@pytest.mark.parametrize(
    "architecture", [Architecture.SM90, Architecture.SM100_FLASHMLA]
)
def test_a_step_plans_once_per_layer_type(
    make_windows, flashmla, architecture, query_len
):
    rig = make_windows(architecture, query_len)
    step = replace(STEP, query_len=query_len)
    batch = eager_batch(rig, step)
    mode = CUDAGraphMode.NONE
    flashmla.forward(rig, stock_build(rig, step))
    assert len(flashmla.planned_for) == 3 * len(WINDOWS)
    stock = set(flashmla.planned_for)

    flashmla.planned_for.clear()
    metadata = rig.build(batch, mode)
    assert plans(metadata).keys() == LAYER_TYPES
    flashmla.forward(rig, metadata)
    assert len(flashmla.planned_for) == 3
    assert set(flashmla.planned_for) == stock


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        (CUDAGraphMode.NONE, {}),
        (CUDAGraphMode.PIECEWISE, {}),
        (CUDAGraphMode.NONE, {"for_capture": True}),
        (CUDAGraphMode.FULL, {"for_capture": True}),
        # An unrecorded FULL step.
        (CUDAGraphMode.FULL, {}),
    ],
)
def test_every_build_a_forward_runs_on_is_shared(rig, mode, options):
    metadata = rig.build(eager_batch(rig), mode, **options)
    assert shared(metadata)
    assert plans(metadata).keys() == LAYER_TYPES


def test_no_plan_outlives_its_step(rig, flashmla):
    """Two steps with very different lengths: the first step's plans are stale."""
    for options in ({}, {"for_capture": True}):
        for length in (5, 3000):
            metadata = rig.build(
                eager_batch(rig, Step((length,) * 3, 4, 1)),
                CUDAGraphMode.NONE,
                **options,
            )
            for name in WINDOWS:
                for plan in LAYER_TYPES:
                    assert not getattr(metadata[name], plan).have_initialized
            # Refuses a plan that was made for other lengths.
            flashmla.forward(rig, metadata)


def test_recorded_metadata_stays_unused(rig, flashmla):
    rig.record()
    recordings = rig.state.graphs._graphs
    flashmla.forward(rig, rig.build(eager_batch(rig), CUDAGraphMode.NONE))
    served = rig.build(rig.fill(STEP))
    assert any(served is recorded.attn_metadata for recorded in recordings.values())
    assert all(
        getattr(served[name], plan) is None for name in WINDOWS for plan in LAYER_TYPES
    )


def test_a_prefill_that_replays_its_window_shares(rig):
    """Replayed slots are padded in groups that prefix caching serves, which no
    window group is, or all are: the lengths agree all the same.
    """
    rig.state._replay_start_np[:] = 128
    batch = eager_batch(rig)
    batch.is_prefilling_np[:] = True
    metadata = rig.build(replace(batch, has_prefill=True), CUDAGraphMode.NONE)
    assert shared(metadata)
    first, *others = (metadata[name] for name in WINDOWS)
    assert first.decode_swa_lens.tolist() == [72, 128, 128]
    for other in others:
        assert torch.equal(first.decode_swa_lens, other.decode_swa_lens)


class TestRefusals:
    """Each condition alone, on a step that is shared without it."""

    def refused(self, rig):
        metadata = stock_build(rig)
        before = plans(metadata)
        why = PlanSharing(rig.attn_groups).share(metadata)
        if why is not None:
            assert plans(metadata) == before
        return why

    def test_none(self, rig):
        assert self.refused(rig) is None

    def test_another_builder(self, rig):
        class Subclass(flashmla_plan.DeepseekSparseSWAFlashMLAMetadataBuilder):
            pass

        rig.attn_groups[-1][0].get_metadata_builder().__class__ = Subclass
        assert self.refused(rig) == NotShared.BUILDER

    @pytest.mark.parametrize("kind", ["prefill", "decode"])
    def test_context_parallelism(self, rig, kind):
        parallel = rig.config.parallel_config
        setattr(parallel, f"{kind}_context_parallel_size", 2)
        metadata = stock_build(rig)
        assert (
            PlanSharing(rig.attn_groups).share(metadata) == NotShared.CONTEXT_PARALLEL
        )

    @pytest.mark.parametrize(
        "changes",
        [
            {"block_size": 64},
            {"sliding_window": 64},
            {"bounded_replay": False},
            {"state_content_bytes": 528},
        ],
    )
    def test_another_spec(self, rig, changes):
        add_group(rig, "window.3", rig.attn_groups[0][0], **changes)
        assert self.refused(rig) == NotShared.SPEC

    def test_another_window(self, rig):
        rig.attn_groups[-1][0].get_metadata_builder().window_size = 64
        assert self.refused(rig) == NotShared.SPEC

    @pytest.mark.parametrize("ratio", [1, 2])
    @pytest.mark.parametrize(
        ("index", "reason"),
        [(0, NotShared.COMPRESSED_GROUPS), (1, NotShared.INDEXER_GROUPS)],
    )
    def test_several_groups_of_a_ratio(self, rig, ratio, index, reason):
        add_group(rig, "more", rig.attn_groups[ratio][index])
        assert self.refused(rig) == reason

    def test_a_missing_group_of_a_ratio(self, rig):
        rig.attn_groups[1] = rig.attn_groups[1][:1]
        assert self.refused(rig) == NotShared.INDEXER_GROUPS

    def test_too_few_candidates(self, rig, monkeypatch):
        config = rig.config.model_config.hf_config
        need = config.index_topk // config.candidate_block_size + 1
        for blocks, why in ((need, None), (need - 1, NotShared.CANDIDATES)):
            monkeypatch.setattr(config, "candidate_topk_blocks", blocks)
            assert self.refused(rig) == why
        monkeypatch.setattr(config, "candidate_source_layer_id", -1)
        assert self.refused(rig) is None

    def changed(self, rig, **changes):
        metadata = stock_build(rig)
        last = WINDOWS[-1]
        metadata[last] = replace(metadata[last], **changes)
        return PlanSharing(rig.attn_groups).share(metadata)

    def test_no_metadata(self, rig):
        metadata = stock_build(rig)
        del metadata[WINDOWS[-1]]
        assert PlanSharing(rig.attn_groups).share(metadata) == NotShared.METADATA

    @pytest.mark.parametrize(
        "changes",
        [
            {"num_decodes": 2},
            {"num_decode_tokens": 2},
            {"decode_swa_width": 192},
            {"decode_swa_indices": torch.zeros(3, 1, 192)},
            {"tile_sched_c1a": None},
        ],
    )
    def test_other_rows(self, rig, changes):
        assert self.changed(rig, **changes) == NotShared.ROWS

    @pytest.mark.parametrize("name", ["seq_lens", "query_start_loc", "slot_mapping"])
    def test_other_inputs(self, rig, name):
        metadata = rig.build(eager_batch(rig), CUDAGraphMode.NONE)
        other = getattr(metadata[WINDOWS[0]], name).clone()
        assert self.changed(rig, **{name: other}) == NotShared.INPUTS

    def test_other_replay_starts(self, rig):
        assert (
            self.changed(rig, replay_start=torch.zeros(3, dtype=torch.int32))
            == NotShared.REPLAY_START
        )

    def test_a_used_plan(self, rig, flashmla):
        metadata = stock_build(rig)
        metadata[WINDOWS[-1]].tile_sched_c2a.have_initialized = True
        assert PlanSharing(rig.attn_groups).share(metadata) == NotShared.USED


def test_a_refusal_is_logged_once(rig, monkeypatch):
    lines = []
    monkeypatch.setattr(
        flashmla_plan.logger, "info_once", lambda line, *args: lines.append(line % args)
    )
    rig.attn_groups[-1][0].get_metadata_builder().window_size = 64
    metadata = rig.build(eager_batch(rig), CUDAGraphMode.NONE)
    assert not shared(metadata)
    assert lines == [
        "DeepSeek-V4.1 decode: FlashMLA plans are not shared: sliding-window groups "
        "differ in their KV-cache spec."
    ]


@pytest.mark.parametrize("architecture", [Architecture.SM100, Architecture.SM120])
def test_attention_that_does_not_plan_has_nothing_to_share(make_windows, architecture):
    rig = make_windows(architecture)
    metadata = rig.build(
        eager_batch(rig), CUDAGraphMode.NONE, rig.stock_state.prepare_attn
    )
    before = plans(metadata)
    assert PlanSharing(rig.attn_groups).share(metadata) is None
    assert plans(metadata) == before


def test_a_single_window_group_has_nothing_to_share(make_rig):
    rig = make_rig(Architecture.SM90, 1)
    metadata = rig.build(
        eager_batch(rig), CUDAGraphMode.NONE, rig.stock_state.prepare_attn
    )
    assert PlanSharing(rig.attn_groups).share(metadata) is None
