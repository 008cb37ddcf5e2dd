"""FlashMLA plans shared over KV-cache groups, against the plans FlashMLA makes for
each layer by itself.
"""

from dataclasses import dataclass, field

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.models.deepseek_v41.nvidia import flashmla
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.flashmla_plan import (
    PLANS,
    NotShared,
    PlanSharing,
)
from vllm.third_party.flashmla.flash_mla_interface import FlashMLASchedMeta
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadataBuilder

pytestmark = pytest.mark.gpu

# Compress ratios 0, 1 and 2.
LAYER_TYPES = 3
PLANNER = "get_mla_metadata_kernel"
# What each SM is given, in words of 32 bits; one word after them is padding.
PLAN_WORDS = 7


@dataclass
class Seen:
    """The decode calls of FlashMLA on one plan object, and what differed."""

    plan: FlashMLASchedMeta
    inputs: list[torch.Tensor]
    calls: int = 0
    differing: list[str] = field(default_factory=list)


def packed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().clone(memory_format=torch.contiguous_format)


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    # Bitwise: some are no numbers.
    first, second = (packed(t).view(torch.uint8) for t in (a, b))
    return torch.equal(first, second)


class OwnPlans:
    """Takes the place of ``flash_mla_with_kvcache`` for the attention layers: each
    call runs on the plan it is given, and again on an own one.

    Looks on at ``PlanSharing`` too, to know the plans of the target's decode
    steps: a draft's layers, and those that replay a prefill, have metadata of their
    own.
    """

    def __init__(self, real) -> None:
        self.real = real
        self.verdicts: list[NotShared | None] = []
        # By id; the objects are kept, so that no two have one.
        self.shared: dict[int, FlashMLASchedMeta] = {}
        self.seen: dict[int, Seen] = {}

    def note(self, verdict: NotShared | None, attn_metadata) -> None:
        self.verdicts.append(verdict)
        if any(getattr(m, "num_prefills", 0) for m in attn_metadata.values()):
            return
        for metadata in attn_metadata.values():
            for name in PLANS:
                plan = getattr(metadata, name, None)
                if plan is not None:
                    self.shared[id(plan)] = plan

    def __call__(self, *, tile_scheduler_metadata, out, **inputs):
        result = self.real(
            tile_scheduler_metadata=tile_scheduler_metadata, out=out, **inputs
        )
        if id(tile_scheduler_metadata) not in self.shared:
            return result
        own, own_out = FlashMLASchedMeta(), torch.empty_like(out)
        _, own_lse = self.real(tile_scheduler_metadata=own, out=own_out, **inputs)
        lengths = [
            length.clone()
            for name in ("topk_length", "extra_topk_length")
            if (length := inputs.get(name)) is not None
        ]
        shared = tile_scheduler_metadata
        seen = self.seen.setdefault(id(shared), Seen(shared, lengths))
        seen.calls += 1
        for what, a, b in (
            ("output", out, own_out),
            ("lse", result[1].contiguous(), own_lse.contiguous()),
            ("num_splits", shared.num_splits, own.num_splits),
            (
                "tile_scheduler_metadata",
                shared.tile_scheduler_metadata[:, :PLAN_WORDS].contiguous(),
                own.tile_scheduler_metadata[:, :PLAN_WORDS].contiguous(),
            ),
            *(("lengths", *pair) for pair in zip(seen.inputs, lengths, strict=True)),
        ):
            if not same(a, b):
                seen.differing.append(what)
        return result


@pytest.fixture
def own_plans(monkeypatch):
    own_plans = OwnPlans(flashmla.flash_mla_with_kvcache)
    monkeypatch.setattr(flashmla, "flash_mla_with_kvcache", own_plans)
    share = PlanSharing.share

    def noted(sharing, attn_metadata):
        verdict = share(sharing, attn_metadata)
        own_plans.note(verdict, attn_metadata)
        return verdict

    monkeypatch.setattr(PlanSharing, "share", noted)
    return own_plans


# Below and above the window, and what either compress ratio's top-k takes.
PROMPT_LENGTHS = (3, 100, 127, 500, 700, 1100, 3000)


def generate(engine) -> None:
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [2 + (7 * i + j) % 1000 for j in range(length)]}
        for i, length in enumerate(PROMPT_LENGTHS)
    ]
    engine.generate(
        prompts,
        SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
        use_tqdm=False,
    )


def test_a_shared_plan_is_the_plan_of_every_layer(
    engine, runner, own_plans, monkeypatch
):
    """Bitwise: plans, lengths, outputs."""
    windows = [
        group
        for groups in runner.attn_groups
        for group in groups
        if isinstance(group.get_metadata_builder(), DeepseekSparseSWAMetadataBuilder)
    ]
    assert len(windows) > 6
    # A replayed graph calls no layer.
    monkeypatch.setattr(runner.cudagraph_manager, "_graphs_captured", False)
    generate(engine)
    assert set(own_plans.verdicts) == {None}
    assert own_plans.seen, "no decode step ran eagerly"
    for seen in own_plans.seen.values():
        assert not seen.differing, seen.differing
    # All layers of a step ran on three objects.
    layers = runner.vllm_config.model_config.hf_text_config.num_hidden_layers
    steps = len(own_plans.seen) / LAYER_TYPES
    calls = sum(seen.calls for seen in own_plans.seen.values())
    assert calls == steps * layers
    plans = {
        seen.plan.tile_scheduler_metadata[:, :PLAN_WORDS].cpu().numpy().tobytes()
        for seen in own_plans.seen.values()
    }
    assert len(plans) > LAYER_TYPES, "the steps did not differ in their plans"
    print(f"{len(windows)} window groups, {steps:.0f} steps, {calls} calls")


def test_a_full_graph_plans_once_per_layer_type(runner):
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    graphs = runner.cudagraph_manager._capture_descs[CUDAGraphMode.FULL]
    for graph in graphs:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            runner.cudagraph_manager.run_fullgraph(graph)
            torch.cuda.synchronize()
        planners = [
            event
            for event in profiler.events()
            if event.device_type == DeviceType.CUDA and PLANNER in event.name
        ]
        assert len(planners) == LAYER_TYPES, graph
    print(f"graphs: {len(graphs)}")
