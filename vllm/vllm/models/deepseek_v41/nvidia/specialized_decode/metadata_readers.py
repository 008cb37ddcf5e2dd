# SPDX-License-Identifier: Apache-2.0
"""Who else reads the metadata object of a FULL step.

A FULL graph reads device buffers and no object, but the runner hands the object of
the step on: to the KV connector before the forward
(``start_load_kv(attn_metadata=...)``) and to the speculator after it
(``propose(attn_metadata=...)``). With device metadata that object is one of the
batch that fills the graph: its host fields are bounds, its tensors are refreshed no
earlier than the graph runs, and the one-step state in it is of no step. So who reads
it needs the stock build.

The runner enters no forward context for a FULL graph: the ``attn_metadata`` of the
context is None there, whoever asks. And no layer of DeepSeek-V4.1 calls
``save_kv_layer``.

A connector or speculator is served only if it is listed here; the tests drive each
on the object of a served step, which raises when it is read.
"""

from dataclasses import dataclass

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1."

SERVED_CONNECTORS = frozenset(
    {
        "decode_bench_connector.DecodeBenchConnector",
        "example_connector.ExampleConnector",
        "example_hidden_states_connector.ExampleHiddenStatesConnector",
        "hf3fs.hf3fs_connector.HF3FSKVConnector",
        "lmcache_mp_connector.LMCacheMPConnectorUpstream",
        "mooncake.mooncake_connector.MooncakeConnector",
        "mooncake.store.connector.MooncakeStoreConnector",
        "moriio.moriio_connector.MoRIIOConnector",
        "nixl.connector.NixlPullConnector",
        "nixl.connector.NixlPushConnector",
        "offloading_connector.OffloadingConnector",
        "simple_cpu_offload_connector.SimpleCPUOffloadConnector",
        "umbp.connector.UMBPStoreConnector",
    }
)
"""Upstream's KV connectors that never read it, by module and class. Neither a
subclass nor what a package of its own puts in the place of one is known."""

SERVED_SPECULATORS = ("dspark", "dflash", "ngram", "ngram_gpu", "draft_model")
"""Methods whose speculators never read it: they look tokens up, or build the
metadata of their own forwards."""


@dataclass(frozen=True)
class Read:
    """Where upstream reads the object, or hands it on: a line in a file of vllm/."""

    file: str
    line: str
    by: str = ""
    """The package that gets it, where upstream does not read it itself."""

    def __str__(self) -> str:
        verb = f"hands it to {self.by}" if self.by else "reads it"
        return f"{verb} in vllm/{self.file}: {self.line}"


_CONNECTOR_FILES = "distributed/kv_transfer/kv_connector/v1/"
_SPECULATORS = "v1/worker/gpu/spec_decode/"

_LMCACHE = "lmcache_connector.LMCacheConnectorV1"
READING_CONNECTORS = {
    "hisparse.connector.HiSparseConnector": Read(
        _CONNECTOR_FILES + "hisparse/connector.py", 'kwargs.get("attn_metadata")'
    ),
    "flexkv_connector.FlexKVConnectorV1": Read(
        _CONNECTOR_FILES + "flexkv_connector.py",
        "start_load_kv(forward_context, **kwargs)",
        by="the flexkv package",
    ),
    # Upstream's own LMCache adapter, use_native, does not read it.
    _LMCACHE: Read(
        _CONNECTOR_FILES + "lmcache_connector.py",
        "start_load_kv(forward_context, **kwargs)",
        by="the lmcache package",
    ),
}

_DRAFT_PREFILL = Read(
    _SPECULATORS + "target_dependent_ar/speculator.py", "self._prefill("
)
READING_SPECULATORS = {
    "eagle": _DRAFT_PREFILL,
    "eagle3": _DRAFT_PREFILL,
    "mtp": _DRAFT_PREFILL,
    "extract_hidden_states": Read(
        _SPECULATORS + "extract_hidden_states.py", "attn_metadata[name]"
    ),
}


def reading_connector(config: KVTransferConfig | None) -> str | None:
    """The first KV connector of a deployment that reads the object, or may, and
    where; None if there is none. A multi-connector is as good as its worst member.
    """
    if config is None or not config.is_kv_transfer_instance:
        return None
    cls = KVConnectorFactory.get_connector_class(config)
    name = f"{cls.__module__}.{cls.__qualname__}"
    short = name.removeprefix(_CONNECTORS)
    if name == f"{_CONNECTORS}multi_connector.MultiConnector":
        members = config.get_from_extra_config("connectors", ())
        each = (reading_connector(KVTransferConfig(**member)) for member in members)
        return next(filter(None, each), None)
    served = short in SERVED_CONNECTORS or (
        short == _LMCACHE and config.get_from_extra_config("use_native", False)
    )
    if served and name != short:
        return None
    read = READING_CONNECTORS.get(short)
    return f"{name} is not known" if read is None else f"{cls.__name__} {read}"


def reading_speculator(method: str | None) -> str | None:
    """As ``reading_connector``, of the method of speculative decoding."""
    if method is None or method in SERVED_SPECULATORS:
        return None
    read = READING_SPECULATORS.get(method)
    return f"{method} is not known" if read is None else f"{method} {read}"
