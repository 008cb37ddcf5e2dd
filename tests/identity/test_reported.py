"""The identity reaches the start-up log, `/version` and `/metrics`."""

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm import stack_identity
from vllm.config import VllmConfig
from vllm.entrypoints.serve.instrumentator import basic, metrics
from vllm.stack_identity import IDENTITY, StackIdentity
from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics import prometheus, ray_wrappers
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.version import __version__

LABELS = {
    "base": IDENTITY.base,
    "stack": IDENTITY.stack,
    "version": IDENTITY.version,
}


class Started(Exception):
    pass


def start_engine(local_rank):
    """The start of an engine core, up to its executor."""

    def executor(_config):
        raise Started

    parallel = SimpleNamespace(data_parallel_rank_local=local_rank)
    with pytest.raises(Started):
        EngineCore(SimpleNamespace(parallel_config=parallel), executor, log_stats=False)


@pytest.fixture
def log():
    """Messages of the module's logger, which vLLM lets reach the root or not."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    level = stack_identity.logger.level
    stack_identity.logger.setLevel(logging.INFO)
    stack_identity.logger.addHandler(handler)
    yield messages
    stack_identity.logger.removeHandler(handler)
    stack_identity.logger.setLevel(level)


def test_the_first_engine_of_a_host_logs_it(log, monkeypatch):
    known = StackIdentity("9.9.0", "abc.def", "9.9.0+ours.1")
    monkeypatch.setattr(stack_identity, "IDENTITY", known)
    start_engine(local_rank=0)
    start_engine(local_rank=1)
    assert log == ["vLLM 9.9.0 with stack abc.def, version 9.9.0+ours.1"]


def test_the_log_names_edited_files(log, monkeypatch):
    known = StackIdentity("9.9.0", "abc.def+edited", "9.9.0+ours.1", ("vllm/a.py",))
    monkeypatch.setattr(stack_identity, "IDENTITY", known)
    start_engine(local_rank=None)
    assert log[1] == "Edited since the stack was applied: ('vllm/a.py',)"


def test_version_route():
    app = FastAPI()
    app.include_router(basic.router)
    assert TestClient(app).get("/version").json() == {
        "version": __version__,
        "stack": IDENTITY.stack,
    }


@pytest.fixture
def one_server(monkeypatch):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    prometheus.unregister_vllm_metrics()
    yield
    prometheus.unregister_vllm_metrics()


def make_stat_logger():
    config = VllmConfig()
    config.model_config = SimpleNamespace(
        served_model_name="model", max_model_len=64, is_diffusion=False
    )
    return PrometheusStatLogger(config, [0, 1])


def test_metric_of_one_server(one_server):
    make_stat_logger()
    # Elastic scaling makes the loggers again.
    make_stat_logger()
    app = FastAPI()
    metrics.attach_router(app)
    text = TestClient(app).get("/metrics").text
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(LABELS.items()))
    assert [it for it in text.splitlines() if it.startswith("vllm:stack_info")] == [
        f"vllm:stack_info{{{labels}}} 1.0"
    ]


SERVER = """
from prometheus_client import Gauge
from vllm.stack_identity import register_identity
register_identity(Gauge)
"""


def test_several_servers_show_one_metric(tmp_path, monkeypatch):
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", SERVER], env=env, check=True)
    assert len(list(tmp_path.glob("*.db"))) == 2
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    (metric,) = prometheus.get_prometheus_registry().collect()
    (sample,) = metric.samples
    assert (sample.name, sample.labels, sample.value) == ("vllm:stack_info", LABELS, 1)


def test_metric_of_a_ray_server(monkeypatch):
    made = []

    class RayGauge:
        def __init__(self, name, description, tag_keys):
            made.append(name)
            self._tag_keys = tag_keys

        def set(self, value, tags):
            made.append((value, tags))

    ray = SimpleNamespace(Gauge=RayGauge)
    monkeypatch.setattr(ray_wrappers, "ray_metrics", ray)
    stack_identity.register_identity(ray_wrappers.RayGaugeWrapper)
    assert made == ["vllm_stack_info", (1, LABELS | {"ReplicaId": ""})]
