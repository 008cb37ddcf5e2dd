"""The real upstream builders on a CPU, under the Triton interpreter."""

import logging
import os
import sys
import types
from itertools import islice
from types import SimpleNamespace

# Before vllm or triton is imported. An empty device list keeps Triton enabled
# with no active driver.
os.environ.update(
    VLLM_TARGET_DEVICE="cpu",
    CUDA_VISIBLE_DEVICES="",
    TRITON_INTERPRET="1",
    HF_HUB_OFFLINE="1",
)

# FlashMLA's Python interface is real; only its compiled kernels are missing.
sys.modules.setdefault("vllm._flashmla_C", types.ModuleType("vllm._flashmla_C"))

import connector_packages
import pytest
from cpu_cuda_graph import CpuCudaGraphs
from rig import Architecture, Rig, Serving, pretend_architecture
from vllm.models.deepseek_v41.nvidia.specialized_decode import tp_group
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata import proof
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.steps import (
    decode_steps,
)


@pytest.fixture
def cuda_graphs(monkeypatch):
    """``torch.cuda`` graphs and streams that run on the CPU."""
    graphs = CpuCudaGraphs()
    graphs.install(monkeypatch)
    return graphs


@pytest.fixture
def tp_of_one(monkeypatch):
    """This process is all of its TP group."""
    group = SimpleNamespace(world_size=1, rank_in_group=0)
    monkeypatch.setattr(tp_group, "get_tp_group", lambda: group)


@pytest.fixture
def make_rig(monkeypatch, cuda_graphs, tp_of_one):
    """``make_rig(architecture, query_len, ...)``: a model state with real
    metadata builders over the buffers of a model runner.

    Its fused builds are held to upstream's on ``proof_steps`` steps, all if None:
    those take seconds, and what tests anything else is served as well after a few.
    """

    def make(
        architecture: Architecture,
        query_len: int,
        way: Serving = Serving.UPSTREAM,
        proof_steps: int | None = 2,
        **options,
    ) -> Rig:
        pretend_architecture(architecture, monkeypatch)
        monkeypatch.setattr(
            proof,
            "decode_steps",
            lambda *shape: islice(decode_steps(*shape), proof_steps),
        )
        rig = Rig(architecture, query_len, way, **options)
        if way == Serving.UPSTREAM:
            monkeypatch.setattr(rig.state.proven_builds, "prove", lambda *_: None)
        cuda_graphs.device_storages = rig.device_storages
        return rig

    return make


@pytest.fixture
def packages(monkeypatch):
    """The packages that KV connectors import."""
    # Lest an external connector takes the place of upstream's.
    monkeypatch.setenv("LMCACHE_USE_UPSTREAM_MP", "1")
    with connector_packages.pretended():
        yield


class Log(logging.Handler):
    """Keeps the lines that the decode package logs from a warning on."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def log():
    handler = Log()
    logger = logging.getLogger("vllm.models.deepseek_v41.nvidia.specialized_decode")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
