"""Upstream's own test of its class, on the device, against ours."""

import pytest
import torch
from upstream_test_file import upstream_test

pytestmark = pytest.mark.gpu


def test_upstreams_own_test():
    upstream_test(
        "test_metadata_graph_replay_matches_eager_build", torch.device("cuda")
    )()
