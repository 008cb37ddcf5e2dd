"""Pipeline stages: each builds the metadata of its own layers.

A stage has the KV-cache groups of the whole model, in order, some without any layer.
"""

import pytest
from decode_steps import Step
from rig import MAX_MODEL_LEN, Architecture, Serving
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.stats import Way

STAGES = {
    "the first layers": ("window", "half.mla", "half.indexer", "ring"),
    "the last layers": ("window", "full.mla", "full.indexer"),
    "one kind of layer": ("window",),
    "none of the first group": ("full.mla", "full.indexer", "ring"),
}


@pytest.mark.parametrize(
    ("way", "served"),
    [
        (Serving.IN_GRAPH, Way.IN_GRAPH),
        (Serving.LAUNCH, Way.LAUNCH),
        (Serving.UPSTREAM, Way.REPLAY),
    ],
)
@pytest.mark.parametrize("architecture", [Architecture.SM90, Architecture.SM100])
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_served_as_the_whole_model(
    make_rig, architecture, stage, way, served
):
    rig = make_rig(architecture, 1, way, stage=STAGES[stage])
    rig.keep_graphs(4)
    rig.record()
    assert rig.state.graphs.served() == {served: 1}
    view = rig.forward_view(4)
    for step in (
        Step((1025, 300), 4, 1),
        Step.random(4, 4, 1, MAX_MODEL_LEN, seed=0),
        Step((1,), 4, 1),
    ):
        metadata = rig.check_step(step, view)
        assert metadata.keys() == set(STAGES[stage])
    assert rig.state.graphs.stats.served == {served: 3}
