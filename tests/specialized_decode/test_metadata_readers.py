"""Who reads the metadata object of a FULL step, besides its forward: KV connectors and
speculators, driven as the runner drives them on a step that was served in the graph.
"""

import dis
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import get_args
from unittest.mock import MagicMock

import pytest
import torch
import vllm
from decode_steps import Step
from rig import Architecture, Serving, vllm_config
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.config.speculative import MTPModelTypes, SpeculativeMethod
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata_readers import (
    READING_CONNECTORS,
    READING_SPECULATORS,
    SERVED_CONNECTORS,
    SERVED_SPECULATORS,
    reading_connector,
    reading_speculator,
)
from vllm.v1.worker.gpu import kv_connector as runner_connector
from vllm.v1.worker.gpu.spec_decode import init_speculator
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.extract_hidden_states import (
    ExtractHiddenStatesSpeculator,
)
from vllm.v1.worker.gpu.spec_decode.lilicorr.speculator import LiLiCorrSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import (
    MultiModuleMTPSpeculator,
)
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import (
    StandaloneARSpeculator,
)
from vllm.v1.worker.gpu.spec_decode.xpress.speculator import XPressSpeculator

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1."


class MetadataRead(AssertionError):
    """Somebody has read the metadata object of a step."""


def _read(*_, **__):
    raise MetadataRead


class Untouched(dict):
    """Metadata that raises when it is read; to pass it on is no reading."""

    __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = __or__ = _read
    get = items = keys = values = copy = _read
    __hash__ = None


def without_init(cls: type) -> object:
    """An instance whose methods are those of ``cls`` and whose every attribute, made
    with engines and networks elsewhere, is a mock.
    """

    def attribute(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self).setdefault(name, MagicMock())

    return object.__new__(type(cls.__name__, (cls,), {"__getattr__": attribute}))


def pretending(cls: type) -> MagicMock:
    mock = MagicMock()
    mock.__class__ = cls
    return mock


def connector_metadata(cls: type) -> MagicMock:
    """What the scheduler's half of the connector sends, with no request in it."""
    module = sys.modules[cls.__module__]
    classes = [
        each
        for each in vars(module).values()
        if isinstance(each, type)
        and issubclass(each, KVConnectorMetadata)
        and each is not KVConnectorMetadata
    ]
    return pretending(classes[0]) if classes else MagicMock()


def make_connector(short: str):
    module, _, name = short.rpartition(".")
    cls = getattr(importlib.import_module(CONNECTORS + module), name)
    connector = without_init(cls)
    worker = MagicMock()
    if name.startswith("Nixl"):
        worker.__class__ = getattr(sys.modules[cls.__module__], name + "Worker")
    worker.get_finished.return_value = (set(), set())
    worker.get_finished_operations.return_value = (set(), set())
    worker.get_kv_events.return_value = []
    vars(connector).update(
        connector_worker=worker,
        worker_handler=worker,
        worker_adapter=worker,
        _async_manager=worker,
        _connector_metadata=None,
        # At start-up, not in a step.
        register_kv_caches=lambda _: None,
    )
    return connector


@pytest.fixture
def served(make_rig):
    """A batch, and the metadata object that its in-graph step was handed."""
    rig = make_rig(Architecture.SM90, 1, Serving.IN_GRAPH)
    rig.keep_graphs(2)
    rig.record()
    batch = rig.fill(Step((1025, 300), 2, 1))
    metadata = rig.run_batch(batch)
    assert rig.state.graphs.stats.in_graph == 1
    return rig.config, batch, Untouched(metadata)


def drive(config, batch, metadata, connector, monkeypatch, sync):
    """A FULL step of ``connector``, as the runner makes it; its calls to mocks."""
    monkeypatch.setattr(runner_connector, "get_kv_transfer_group", lambda: connector)
    active = runner_connector.ActiveKVConnector(config, {})
    scheduled = SimpleNamespace(
        kv_connector_metadata=connector_metadata(type(connector).__mro__[1]),
        has_sync_kv_loads=sync,
    )
    active.pre_forward(scheduled, batch, attn_metadata=metadata)
    active.finish_forward()
    active.post_forward(set(), defer_finalize=True)
    active.finalize_step()
    return [
        argument
        for mock in vars(connector).values()
        if isinstance(mock, MagicMock)
        for _, args, kwargs in mock.mock_calls
        for argument in (*args, *kwargs.values())
    ]


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("short", sorted(SERVED_CONNECTORS))
def test_a_served_connector_never_reads_it(served, packages, monkeypatch, short, sync):
    config, batch, metadata = served
    connector = make_connector(short)
    started = []
    start = type(connector).start_load_kv

    def start_load_kv(self, forward_context, **kwargs):
        # What the runner offers, and the only other way to it.
        assert kwargs["attn_metadata"] is metadata
        assert forward_context.attn_metadata is None
        started.append(1)
        return start(self, forward_context, **kwargs)

    monkeypatch.setattr(type(connector), "start_load_kv", start_load_kv)
    passed_on = drive(config, batch, metadata, connector, monkeypatch, sync)
    assert started == [1]
    # No worker holds it to read it later.
    assert not any(each is metadata for each in passed_on)


@pytest.mark.parametrize("sync", [True, False])
def test_upstreams_own_lmcache_adapter_never_reads_it(
    served, packages, monkeypatch, sync
):
    """Only ``use_native`` gives it; otherwise the lmcache package is given all."""
    config, batch, metadata = served
    connector = make_connector("lmcache_connector.LMCacheConnectorV1")
    adapter = importlib.import_module(
        CONNECTORS + "lmcache_integration.vllm_v1_adapter"
    )
    engine = without_init(adapter.LMCacheConnectorV1Impl)
    engine.kv_caches = {"layer": torch.zeros(1)}
    engine._parent = connector
    connector._lmcache_engine = engine
    monkeypatch.setattr(
        connector, "bind_connector_metadata", lambda metadata: None, raising=False
    )
    connector._connector_metadata = pretending(adapter.LMCacheConnectorMetadata)
    engine.get_finished = lambda _: (set(), set())
    drive(config, batch, metadata, connector, monkeypatch, sync)
    config.kv_transfer_config = transfer("LMCacheConnectorV1", {"use_native": True})
    assert reading_connector(config.kv_transfer_config) is None


def test_the_tripwire_bites(served, monkeypatch):
    """HiSparse, driven as the others are, reads it."""
    config, batch, metadata = served
    connector = make_connector("hisparse.connector.HiSparseConnector")
    worker = importlib.import_module(CONNECTORS + "hisparse.worker")
    connector.connector_worker = without_init(worker.HiSparseConnectorWorker)
    connector.connector_worker._group_leaders = [("full.mla", MagicMock())]
    connector.connector_worker.start_step = MagicMock()
    with pytest.raises(MetadataRead):
        drive(config, batch, metadata, connector, monkeypatch, True)


def transfer(name, extra_config=None, module_path=None) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=name,
        kv_role="kv_both",
        kv_connector_extra_config=extra_config or {},
        kv_connector_module_path=module_path,
    )


def multi(*members) -> KVTransferConfig:
    connectors = [
        {
            "kv_connector": member.kv_connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": member.kv_connector_extra_config,
            "kv_connector_module_path": member.kv_connector_module_path,
        }
        for member in members
    ]
    return transfer("MultiConnector", {"connectors": connectors})


def test_every_connector_of_the_factory_is_known(packages):
    """A release that brings another one has it named here, served or refused."""
    shorts = set()
    for name in KVConnectorFactory._registry:
        cls = KVConnectorFactory.get_connector_class_by_name(name)
        shorts.add(f"{cls.__module__}.{cls.__qualname__}".removeprefix(CONNECTORS))
    assert shorts == (
        SERVED_CONNECTORS - {"umbp.connector.UMBPStoreConnector"}
        | READING_CONNECTORS.keys()
        | {"multi_connector.MultiConnector"}
    )


def test_served_connectors_are_let_through(packages):
    for name in KVConnectorFactory._registry:
        cls = KVConnectorFactory.get_connector_class_by_name(name)
        short = f"{cls.__module__}.{cls.__qualname__}".removeprefix(CONNECTORS)
        served = short in SERVED_CONNECTORS or name == "MultiConnector"
        assert (reading_connector(transfer(name)) is None) is served
    path = CONNECTORS + "umbp.connector"
    assert reading_connector(transfer("UMBPStoreConnector", module_path=path)) is None


def test_without_a_connector_there_is_none():
    assert reading_connector(None) is None
    assert reading_connector(KVTransferConfig()) is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "HiSparseConnector",
            "HiSparseConnector reads it in vllm/distributed/kv_transfer/kv_connector/"
            'v1/hisparse/connector.py: kwargs.get("attn_metadata")',
        ),
        (
            "LMCacheConnectorV1",
            "LMCacheConnectorV1 hands it to the lmcache package in vllm/distributed/",
        ),
        (
            "FlexKVConnectorV1",
            "FlexKVConnectorV1 hands it to the flexkv package in vllm/distributed/",
        ),
    ],
)
def test_a_connector_that_reads_it_is_named_with_the_line(name, says):
    assert reading_connector(transfer(name)).startswith(says)


def test_a_connector_of_another_package_is_not_known(monkeypatch):
    """Neither one of its own name, nor a subclass, nor one that a package puts in the
    place of upstream's, as lmcache does.
    """
    offloading = importlib.import_module(CONNECTORS + "offloading_connector")
    module = ModuleType("company.connectors")

    class OffloadingConnector(offloading.OffloadingConnector):
        def __init__(self, vllm_config, role, kv_cache_config): ...

    OffloadingConnector.__module__ = module.__name__
    OffloadingConnector.__qualname__ = "OffloadingConnector"
    module.OffloadingConnector = OffloadingConnector
    monkeypatch.setitem(sys.modules, module.__name__, module)
    unknown = "company.connectors.OffloadingConnector is not known"
    config = transfer("OffloadingConnector", module_path=module.__name__)
    assert reading_connector(config) == unknown
    assert reading_connector(multi(transfer("ExampleConnector"), config)) == unknown
    monkeypatch.setitem(
        KVConnectorFactory._registry, "ExampleConnector", lambda: OffloadingConnector
    )
    assert reading_connector(transfer("ExampleConnector")) == unknown


def test_a_multi_connector_is_as_good_as_its_worst_member():
    good = transfer("NixlConnector"), transfer("OffloadingConnector")
    assert reading_connector(multi(*good)) is None
    worst = reading_connector(transfer("HiSparseConnector"))
    assert reading_connector(multi(*good, transfer("HiSparseConnector"))) == worst
    nested = multi(good[0], multi(good[1], transfer("HiSparseConnector")))
    assert reading_connector(nested) == worst


def test_a_multi_connector_hands_it_to_every_member(served):
    """So what its members do is all that it does."""
    config, _, metadata = served
    connector = make_connector("multi_connector.MultiConnector")
    members = [
        make_connector("nixl.connector.NixlPullConnector"),
        make_connector("decode_bench_connector.DecodeBenchConnector"),
    ]
    for member in members:
        member._connector_metadata = connector_metadata(type(member).__mro__[1])
    connector._connectors = members
    with set_current_vllm_config(config), set_forward_context(None, config):
        connector.start_load_kv(get_forward_context(), attn_metadata=metadata)
    assert members[0].connector_worker.start_load_kv.called
    assert members[1].connector_worker.start_fill_kv.called


@pytest.mark.parametrize(
    "read", [*READING_CONNECTORS.values(), *READING_SPECULATORS.values()], ids=str
)
def test_the_lines_that_read_it_are_upstreams(read):
    source = (Path(vllm.__file__).parent / read.file).read_text()
    assert read.line in source


# As init_speculator maps methods to classes.
SPECULATORS = {
    "dspark": (DSparkSpeculator,),
    "dflash": (
        DFlashSpeculator,
        DFlash2Speculator,
        LiLiCorrSpeculator,
        XPressSpeculator,
    ),
    "ngram": (NgramGPUSpeculator,),
    "ngram_gpu": (NgramGPUSpeculator,),
    "draft_model": (StandaloneARSpeculator,),
}
READING = {
    "eagle": (EagleSpeculator,),
    "eagle3": (EagleSpeculator,),
    "mtp": (MTPSpeculator, MultiModuleMTPSpeculator),
    "extract_hidden_states": (ExtractHiddenStatesSpeculator,),
}


def test_every_method_of_speculation_is_known():
    """Model Runner V2 has no speculator for the two that are not."""
    methods = set(get_args(SpeculativeMethod)) - set(get_args(MTPModelTypes))
    unknown = {"suffix", "custom_class"}
    assert methods - unknown == {*SERVED_SPECULATORS, *READING_SPECULATORS} - {"mtp"}
    assert SPECULATORS.keys() == set(SERVED_SPECULATORS)
    for method in unknown:
        config = vllm_config(2)
        object.__setattr__(config.speculative_config, "method", method)
        with pytest.raises(NotImplementedError, match=f"{method} is not supported"):
            init_speculator(config, torch.device("cpu"), None)
        assert reading_speculator(method) == f"{method} is not known"


@pytest.mark.parametrize("method", READING_SPECULATORS)
def test_a_speculator_that_reads_it_is_named_with_the_line(method):
    says = reading_speculator(method)
    assert says.startswith(f"{method} reads it in vllm/v1/worker/gpu/spec_decode/")
    assert says.endswith(READING_SPECULATORS[method].line)


def test_served_speculators_are_let_through():
    for method in (None, *SERVED_SPECULATORS):
        assert reading_speculator(method) is None


def uses_of_the_argument(function) -> int:
    """How often the code of ``function``, nested functions too, loads its argument
    ``attn_metadata``.
    """

    def loads(code):
        count = sum(
            "LOAD" in each.opname and each.argval == "attn_metadata"
            for each in dis.get_instructions(code)
        )
        nested = (each for each in code.co_consts if hasattr(each, "co_code"))
        return count + sum(map(loads, nested))

    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    assert "attn_metadata" in function.__code__.co_varnames
    return loads(function.__code__)


@pytest.mark.parametrize("method", SERVED_SPECULATORS)
def test_a_served_speculator_never_loads_it(method):
    for cls in SPECULATORS[method]:
        assert uses_of_the_argument(cls.propose) == 0


@pytest.mark.parametrize("method", READING)
def test_a_refused_speculator_does(method):
    for cls in READING[method]:
        assert uses_of_the_argument(cls.propose) > 0


class TestDrivenOnAServedStep:
    def propose(self, speculator, batch, metadata):
        arguments = (MagicMock(),) * 9
        return speculator.propose(batch, metadata, *arguments, num_speculative_tokens=2)

    def test_ngram_never_reads_it(self, served):
        config, batch, metadata = served
        requests = SimpleNamespace(
            all_token_ids=SimpleNamespace(
                gpu=torch.tensor([[5, 6, 7, 8, 5, 6], [1, 2, 3, 1, 2, 0]])
            ),
            total_len=SimpleNamespace(gpu=torch.tensor([6, 5], dtype=torch.int32)),
        )
        config.speculative_config = SimpleNamespace(
            num_speculative_tokens=2,
            prompt_lookup_min=2,
            prompt_lookup_max=2,
            method="ngram",
        )
        speculator = without_init(NgramGPUSpeculator)
        vars(speculator).update(
            req_states=requests,
            scratch=torch.zeros(8, 1, dtype=torch.int64),
            drafts=torch.zeros(8, 2, dtype=torch.int64),
            max_model_len=6,
            min_n=2,
            max_n=2,
            block_l=16,
            n_blocks=1,
            num_speculative_steps=2,
        )
        one = torch.ones(2, dtype=torch.int32)
        last = torch.tensor([[6], [2]])
        drafts = speculator.propose(
            batch, metadata, None, None, None, one, 0 * one, last, None, None, None
        )
        # What followed the same two tokens before.
        assert drafts.tolist() == [[7, 8], [3, 1]]

    @pytest.mark.parametrize("steps", [1, 2])
    def test_a_draft_model_never_reads_it(self, served, steps):
        _, batch, metadata = served
        speculator = without_init(StandaloneARSpeculator)
        called = []
        speculator.num_speculative_steps = steps
        speculator._prefill = lambda *args: called.append(args)
        speculator._multi_step_decode = lambda *args: called.append(args)
        self.propose(speculator, batch, metadata)
        assert len(called) == steps
        assert not any(each is metadata for args in called for each in args)
