"""The counters of the worker reach the front end's metrics, each step once."""

import pickle
from types import SimpleNamespace
from unittest.mock import MagicMock

import prometheus_client
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from rig import vllm_config
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.key import Eager
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.model_state import (
    DeepseekV41DeviceMetadataModelState,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.stats import (
    MetadataGraphStats,
    Way,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.metrics import prometheus
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState

METRIC = "vllm:decode_metadata_steps_total"


def make_scheduler() -> Scheduler:
    config = vllm_config()
    config.cache_config.num_gpu_blocks = 8
    register_all_kvcache_specs(config)
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return Scheduler(
        config,
        KVCacheConfig(
            num_blocks=8,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        StructuredOutputManager(config),
        block_size=16,
        mm_registry=MagicMock(),
        log_stats=True,
    )


class Engine:
    """A step of an engine, from where the forward has run to what a front end gets."""

    def __init__(self, model_state: ModelState, monkeypatch) -> None:
        self.scheduler = make_scheduler()
        self.runner = MagicMock(
            model_state=model_state,
            pcp_manager=None,
            pp_handler=None,
            aux_output_connector=None,
            speculator=None,
            num_speculative_steps=0,
        )
        self.runner.sample.return_value = MagicMock(), None, None
        self.runner.kv_connector.post_forward.return_value = None
        prompts = self.runner.prompt_logprobs_worker
        prompts.compute_prompt_logprobs.return_value = {}
        prompts.compute_prompt_token_id_logprobs.return_value = {}
        monkeypatch.setattr(
            model_runner, "AsyncOutput", lambda **parts: parts["model_runner_output"]
        )

    def step(self) -> EngineCoreOutputs:
        self.runner.execute_model_state = MagicMock(
            input_batch=MagicMock(req_ids=[]),
            cudagraph_stats=None,
            ec_connector_output=None,
        )
        output = model_runner.GPUModelRunner.sample_tokens(self.runner, None)
        output = pickle.loads(pickle.dumps(output))
        scheduled = self.scheduler.schedule()
        [sent] = self.scheduler.update_from_output(scheduled, output).values()
        frames = MsgpackEncoder().encode(sent)
        return MsgpackDecoder(EngineCoreOutputs).decode(frames)


@pytest.fixture
def make_logger(monkeypatch):
    def make(engines: int) -> PrometheusStatLogger:
        return PrometheusStatLogger(vllm_config(), list(range(engines)))

    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    prometheus.unregister_vllm_metrics()
    yield make
    prometheus.unregister_vllm_metrics()


def record(logger: PrometheusStatLogger, engine: Engine, at: int = 0) -> None:
    logger.record(engine.step().scheduler_stats, None, engine_idx=at)


def exposed() -> dict[tuple[str, str, str], float]:
    """The samples by engine, way and reason, as Prometheus reads them."""
    samples = {}
    text = prometheus_client.generate_latest().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == METRIC:
                labels = dict(sample.labels)
                assert labels.pop("model_name")
                assert labels.keys() == {"engine", "way", "reason"}
                key = labels["engine"], labels["way"], labels["reason"]
                samples[key] = sample.value
    return samples


def counting(stats: MetadataGraphStats) -> ModelState:
    state = object.__new__(DeepseekV41DeviceMetadataModelState)
    state.graphs = SimpleNamespace(stats=stats)
    return state


def test_every_step_is_exported_once(make_logger, monkeypatch):
    stats = [MetadataGraphStats(), MetadataGraphStats()]
    engines = [Engine(counting(it), monkeypatch) for it in stats]
    logger = make_logger(2)

    stats[0].in_graph = 7
    stats[0].refreshed[Way.REPLAY] = 2
    stats[0].eager.update({Eager.NOT_FULL: 4, Eager.UNEVEN: 1})
    record(logger, engines[0], 0)
    assert exposed() == {
        ("0", "in_graph", ""): 7,
        ("0", "replay", ""): 2,
        ("0", "eager", "not_full"): 4,
        ("0", "eager", "uneven"): 1,
    }

    stats[0].in_graph += 1
    stats[0].eager[Eager.UNEVEN] += 2
    stats[1].refreshed[Way.LAUNCH] += 3
    for at, engine in enumerate(engines):
        record(logger, engine, at)
        record(logger, engine, at)
    assert exposed() == {
        ("0", "in_graph", ""): 8,
        ("0", "replay", ""): 2,
        ("0", "eager", "not_full"): 4,
        ("0", "eager", "uneven"): 3,
        ("1", "launch", ""): 3,
    }


def test_another_model_exports_no_such_series(make_logger, monkeypatch):
    engine = Engine(object.__new__(DefaultModelState), monkeypatch)
    record(make_logger(1), engine)
    assert exposed() == {}


def test_the_loggers_are_made_again(make_logger, monkeypatch):
    """Elastic scaling and a second engine of the process do so."""
    stats = MetadataGraphStats()
    engine = Engine(counting(stats), monkeypatch)
    former, latter = make_logger(1), make_logger(1)
    for logger in (latter, former):
        stats.in_graph += 1
        record(logger, engine)
    assert exposed() == {("0", "in_graph", ""): 1}


@pytest.mark.parametrize("counted", [Eager, Way])
def test_what_crosses_processes_is_plain(counted):
    """The engine and the front end do not import a model's modules for it."""
    stats = MetadataGraphStats(in_graph=1)
    for it in counted:
        (stats.eager if counted is Eager else stats.refreshed)[it] += 1
    taken = stats.take()
    assert len(taken) == 1 + len(counted)
    assert {type(it) for labels in taken for it in labels} == {str, int}
    assert stats.take() == []
