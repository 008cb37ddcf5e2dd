"""Upstream's callers work with our class unchanged."""

import pytest
import torch
from decode_steps import Step
from rig import MAX_MODEL_LEN, Architecture, vllm_config
from upstream_test_file import upstream_test
from vllm.config import CUDAGraphMode
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.stats import Way
from vllm.models.deepseek_v41.nvidia.specialized_decode.runtime.metadata_graphs import (
    AttnMetadataCudaGraphs,
)


def test_upstreams_own_test(cuda_graphs):
    test = upstream_test(
        "test_metadata_graph_replay_matches_eager_build", torch.device("cpu")
    )
    test()
    assert cuda_graphs.captures == 1


@pytest.mark.parametrize("architecture", list(Architecture))
def test_the_executors_model_state_drives_it(make_rig, architecture):
    """The calls of upstream's GB300 model state, in its order."""
    rig = make_rig(architecture, 6)
    graphs = AttnMetadataCudaGraphs(rig.config, 6)
    graphs.release()
    assert graphs.can_record(rig.attn_groups)
    stock = rig.stock_state
    build = stock._build_attn_metadata
    for key in graphs.capture_keys():
        num_reqs, padded_reqs, num_tokens, padded_tokens = key
        assert (num_reqs, num_tokens) == (padded_reqs, padded_tokens)

        def record(batch, mode, tables, slots, groups, config, key=key, **kwargs):
            kwargs = {
                name: value
                for name, value in kwargs.items()
                if name == "model_specific_attn_metadata"
            }
            return graphs.capture(
                key,
                groups,
                tables,
                lambda some: build(batch, mode, tables, slots, some, config, **kwargs),
            )

        stock._build_attn_metadata = record
        rig.build(
            rig.fill(Step((MAX_MODEL_LEN,) * num_reqs, padded_reqs, 6)),
            prepare_attn=stock.prepare_attn,
        )
    stock._build_attn_metadata = build
    assert len(graphs._graphs) == 4
    batch = rig.fill(Step((100, 200, 300), 4, 6))
    key = graphs.key(batch, CUDAGraphMode.FULL)
    assert graphs.replay(key) is not None
    assert graphs.stats.served[Way.REPLAY] == 1


def test_capture_keys_without_the_captured_graphs_follow_the_configuration():
    graphs = AttnMetadataCudaGraphs(vllm_config(6), 6)
    assert [tuple(key) for key in graphs.capture_keys()] == [
        (8, 8, 48, 48),
        (4, 4, 24, 24),
        (2, 2, 12, 12),
        (1, 1, 6, 6),
    ]


def test_capture_sizes_round_up_to_whole_requests_within_the_limits():
    config = vllm_config(6)
    config.compilation_config.cudagraph_capture_sizes = [1, 7, 13, 44, 49]
    config.compilation_config.max_cudagraph_capture_size = 44
    graphs = AttnMetadataCudaGraphs(config, 6)
    sizes = {key.num_tokens_after_padding for key in graphs.capture_keys()}
    assert sizes == {6, 12, 18}
