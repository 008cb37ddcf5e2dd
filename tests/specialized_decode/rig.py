"""Real attention-metadata builders and the real model state over a runner's
buffers, with the decode steps a runner would prepare.
"""

import json
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from decode_metadata_reference import schedule
from decode_steps import (
    Step,
    View,
    assert_same_for_forward,
    built,
    clones,
    forward_view,
    poison,
    storage,
    write_step,
)
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    CUDAGraphMode,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.models.deepseek_v41 import compressor, sparse_mla
from vllm.models.deepseek_v41.nvidia import flashinfer_sparse, flashmla
from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata import holders
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.model_state import (
    DeepseekV41DeviceMetadataModelState,
)
from vllm.v1.attention.backends.mla import indexer, sparse_indexer, sparse_swa
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.utils import AttentionGroup

MAX_NUM_REQS = 8
MAX_MODEL_LEN = 8192
MAX_NUM_TOKENS = 256
KERNEL_BLOCK = 64
DEVICE = torch.device("cpu")
LAYERS = ("window", "full.mla", "full.indexer", "half.mla", "half.indexer", "ring")


class Architecture(StrEnum):
    """The deployments that differ in their metadata builders or in the branches
    those take.
    """

    SM90 = "sm90"  # FlashMLA, dense indexer in kernel blocks
    SM100 = "sm100"  # FlashInfer, sparse indexer
    SM100_FLASHMLA = "sm100_flashmla"  # FlashMLA and mega attention, dense indexer
    SM120 = "sm120"  # FlashInfer, dense indexer

    @property
    def family(self) -> int:
        """The compute capability family, e.g. 90."""
        return int(self.value.partition("_")[0].removeprefix("sm"))

    @property
    def uses_flashmla(self) -> bool:
        return self in (Architecture.SM90, Architecture.SM100_FLASHMLA)


class Serving(StrEnum):
    """How the metadata of FULL steps leaves the host."""

    IN_GRAPH = "in_graph"  # the fused build, in the forward graph
    REPLAY = "replay"  # the fused build, recorded
    LAUNCH = "launch"  # the fused build, launched
    UPSTREAM = "upstream"  # upstream's builders, recorded

    @property
    def metadata_graphs(self) -> str:
        """The setting that asks for it."""
        settings = {Serving.IN_GRAPH: "auto", Serving.LAUNCH: "launch"}
        return settings.get(self, "replay")


# Few on SM90, that small steps fill them, some with more work than others.
NUM_SMS = {90: 12, 100: 148, 120: 188}

# A small model with every kind of DeepSeek-V4.1 attention layer.
MODEL = {
    "model_type": "deepseek_v41",
    "architectures": ["DeepseekV41ForCausalLM"],
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "deepseek_v41",
        "hidden_size": 512,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 256,
        "o_lora_rank": 256,
        "o_groups": 4,
        "vocab_size": 1024,
        "sliding_window": 128,
        "compress_ratios": [0, 2, 2, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 4],
        "candidate_source_layer_id": 3,
        "candidate_block_size": 64,
        "candidate_topk_blocks": 64,
        "index_topk": 512,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "moe_intermediate_size": 256,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 2**20,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_target_layer_ids": [2, 3, 4],
    },
    "vision_config": {},
}


@cache
def _model_dir() -> str:
    folder = Path(tempfile.mkdtemp(prefix="deepseek-v41-"))
    (folder / "config.json").write_text(json.dumps(MODEL))
    return str(folder)


@cache
def _model_config(max_model_len: int) -> ModelConfig:
    return ModelConfig(
        model=_model_dir(),
        tokenizer=_model_dir(),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=0,
        max_model_len=max_model_len,
    )


def vllm_config(
    query_len: int = 1,
    architecture: Architecture = Architecture.SM90,
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE,
    additional_config: dict | None = None,
    adaptive: bool = False,
    max_model_len: int = MAX_MODEL_LEN,
) -> VllmConfig:
    """A real configuration whose decode steps have ``query_len`` tokens, or up to so
    many with adaptive verification.
    """
    speculative = None
    if query_len > 1:
        speculative = SpeculativeConfig(
            method="dspark",
            num_speculative_tokens=query_len - 1,
            target_model_config=_model_config(max_model_len),
            target_parallel_config=ParallelConfig(),
        )
    attention = AttentionConfig()
    if architecture == Architecture.SM100:
        attention = AttentionConfig(
            indexer_kv_dtype="mxfp4", indexer_sparse_logits=True
        )
    config = VllmConfig(
        model_config=_model_config(max_model_len),
        cache_config=CacheConfig(block_size=128, cache_dtype="auto"),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=MAX_NUM_REQS,
            max_num_batched_tokens=MAX_NUM_TOKENS,
            enable_chunked_prefill=True,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig("cpu"),
        load_config=LoadConfig(),
        compilation_config=CompilationConfig(),
        attention_config=attention,
        speculative_config=speculative,
        additional_config=additional_config or {},
    )
    # The CPU platform turns CUDA graphs off when the configuration is made, and
    # adaptive verification needs them.
    config.compilation_config.cudagraph_mode = cudagraph_mode
    if adaptive:
        config.speculative_config.enable_adaptive_verification = True
    config.compilation_config.cudagraph_capture_sizes = [
        reqs * query_len for reqs in (1, 2, 4, 8)
    ]
    config.compilation_config.max_cudagraph_capture_size = MAX_NUM_REQS * query_len
    return config


def _sm90_paged_mqa_schedule(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices=None
) -> torch.Tensor:
    """What DeepGEMM makes on SM90, where two SMs share an item of four tokens."""
    assert indices is None
    workers = num_sms // 2 if context_lens.shape[1] == 4 else num_sms
    return schedule(-(-context_lens[:, -1] // 256), workers).int()


def _paged_mqa_schedule(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices=None
) -> torch.Tensor:
    """Stands in for DeepGEMM's schedule: a function of what its kernel reads, the
    last context length of every row, padding rows included.
    """
    blocks = (context_lens[:, -1].to(torch.int64) + block_kv - 1) // block_kv
    rows = torch.arange(1, blocks.numel() + 1, dtype=torch.int64)
    work = (blocks * rows).sum()
    slots = torch.arange(num_sms + 1, dtype=torch.int64)
    return torch.stack((work * slots % 1009, blocks.sum() * slots // num_sms), 1).int()


def pretend_architecture(architecture: Architecture, monkeypatch) -> None:
    """Let the builders choose their branches as on a GPU of ``architecture``.

    No kernel of DeepGEMM, FlashMLA or DeepSelect runs in a metadata build but
    the schedule of DeepGEMM.
    """
    family = architecture.family
    platform = indexer.current_platform

    class Platform:
        def __getattr__(self, name):
            return getattr(platform, name)

        def is_cuda(self):
            return True

        def is_cpu(self):
            return False

        def is_device_capability_family(self, capability, *_):
            return capability == family

        def is_device_capability(self, capability, *_):
            return family == 100 and capability in (103, (10, 3))

    from vllm.model_executor.kernels.attention.dsa import sparse_mqa_logits
    from vllm.third_party.flashmla import flash_mla_interface
    from vllm.utils import deep_gemm

    for module in (indexer, sparse_indexer, sparse_swa, sparse_mla, deep_gemm):
        monkeypatch.setattr(module, "current_platform", Platform())
    monkeypatch.setattr(indexer, "has_deep_gemm", lambda: True)
    monkeypatch.setattr(indexer, "num_compute_units", lambda *_: NUM_SMS[family])
    monkeypatch.setattr(
        indexer,
        "get_paged_mqa_logits_metadata",
        _sm90_paged_mqa_schedule if family == 90 else _paged_mqa_schedule,
    )
    monkeypatch.setattr(sparse_indexer, "has_deep_gemm_sparse_mqa", lambda: True)
    monkeypatch.setattr(sparse_indexer, "has_deep_select", lambda: True)
    monkeypatch.setattr(
        sparse_mqa_logits, "get_deep_select_stride_requirement", lambda: (1024, 32)
    )
    monkeypatch.setattr(
        sparse_swa, "get_mla_metadata", flash_mla_interface.get_mla_metadata
    )
    monkeypatch.setattr(
        holders, "FlashMLASchedMeta", flash_mla_interface.FlashMLASchedMeta
    )
    # Pinned memory needs an accelerator.
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)


def varlen_graph(num_tokens: int, max_query_len: int) -> BatchExecutionDescriptor:
    """A graph of adaptive verification, as the runner describes it."""
    return BatchExecutionDescriptor(
        cg_mode=CUDAGraphMode.FULL,
        num_tokens=num_tokens,
        num_reqs=min(num_tokens, MAX_NUM_REQS),
        max_query_len=max_query_len,
    )


class FakeBlockTables:
    """What a model state asks of ``BlockTables`` while it records."""

    def __init__(self, widths: list[int]) -> None:
        self.tables = [
            torch.zeros(MAX_NUM_REQS, width, dtype=torch.int32) for width in widths
        ]
        self.slot_mappings = torch.zeros(len(widths), MAX_NUM_TOKENS, dtype=torch.int64)

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        for table in self.tables:
            table.zero_()
        return tuple(table[:num_reqs] for table in self.tables)

    def get_dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        self.slot_mappings.fill_(-1)
        return self.slot_mappings[:, :num_tokens]

    @property
    def input_block_tables(self) -> list[torch.Tensor]:
        return self.tables


class Rig:
    """Every kind of V4.1 attention group behind a recorded model state.

    KV-cache groups: sliding window; compressed KV of ratio 1 with its indexer on
    the same block table; the same of ratio 2; compressor ring. A pipeline ``stage``
    has some of the layers, and a group without any where it has none of its.
    """

    def __init__(
        self,
        architecture: Architecture,
        query_len: int,
        way: Serving = Serving.UPSTREAM,
        bounded_replay: bool = True,
        adaptive: bool = False,
        stage: Collection[str] = LAYERS,
        max_model_len: int = MAX_MODEL_LEN,
        verify: int = 0,
    ) -> None:
        self.architecture = architecture
        self.query_len = query_len
        self.way = way
        self.config = vllm_config(
            query_len,
            architecture,
            additional_config={
                "metadata_graphs": way.metadata_graphs,
                "metadata_graphs_verify": verify,
            },
            adaptive=adaptive,
            max_model_len=max_model_len,
        )
        self.bounded_replay = bounded_replay
        self.stage = stage
        self.buffers = InputBuffers(MAX_NUM_REQS, MAX_NUM_TOKENS, DEVICE)
        self.load_model()
        self.initialize_kv_cache()
        self.full_graphs = [
            BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.FULL,
                num_tokens=reqs * query_len,
                num_reqs=reqs,
                uniform_token_count=query_len,
            )
            for reqs in (8, 4, 2, 1)
        ]
        if adaptive:
            self.full_graphs = [varlen_graph(n, query_len) for n in (20, 4, 1)]
        # The part of a forward graph that this rig captures, by its requests.
        self.forward_graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def load_model(self) -> None:
        """Make what a runner makes with the weights: the model states."""
        with set_current_vllm_config(self.config):
            self.state, self.stock_state = (
                cls(self.config, SimpleNamespace(token_lookback_depth=3), None, DEVICE)
                for cls in (DeepseekV41DeviceMetadataModelState, DeepseekV41ModelState)
            )

    def initialize_kv_cache(self) -> None:
        """Make what a runner makes with a KV cache: builders and block tables."""
        blocks = self.config.model_config.max_model_len // 128
        self.block_tables = FakeBlockTables([blocks, blocks, blocks, 1])
        with set_current_vllm_config(self.config):
            self._make_groups()
            for state in (self.state, self.stock_state):
                state.initialize_kv_cache(self.kv_cache_config, self.block_tables)

    def _make_groups(self) -> None:
        packed = dict(
            num_kv_heads=1,
            head_size=512,
            dtype=torch.uint8,
            cache_dtype_str="fp8_ds_mla",
            model_version="deepseek_v4",
        )
        window = SlidingWindowMLASpec(
            block_size=128,
            sliding_window=128,
            max_tp_shards=1,
            state_content_bytes=584,
            alignment=576,
            bounded_replay=self.bounded_replay,
            **packed,
        )
        full, half = (
            MLAAttentionSpec(block_size=128, tokens_per_state=ratio, **packed)
            for ratio in (1, 2)
        )
        ring = CircularBufferSpec(
            block_size=16, num_kv_heads=1, head_size=512, dtype=torch.bfloat16
        )
        if self.architecture.uses_flashmla:
            swa_backend = flashmla.DeepseekSparseSWAFlashMLABackend
            mla_backend = sparse_mla.DeepseekV4FlashMLABackend
        else:
            swa_backend = flashinfer_sparse.DeepseekSparseSWAFlashInferBackend
            mla_backend = flashinfer_sparse.DeepseekV4FlashInferMLASparseBackend
        if self.architecture == Architecture.SM100:
            indexer_backend = sparse_indexer.DeepseekV41SparseIndexerBackend
        else:
            indexer_backend = indexer.DeepseekV41IndexerBackend
        groups = [
            (window, [("window", swa_backend)]),
            (full, [("full.mla", mla_backend), ("full.indexer", indexer_backend)]),
            (half, [("half.mla", mla_backend), ("half.indexer", indexer_backend)]),
            (ring, [("ring", compressor.CompressorBackend)]),
        ]
        groups = [
            (spec, [(name, backend) for name, backend in layers if name in self.stage])
            for spec, layers in groups
        ]
        self.specs = [spec for spec, _ in groups]
        # SM90's kernels take smaller blocks than the KV-cache manager's.
        in_kernel_blocks = self.architecture == Architecture.SM90
        self.attn_groups = []
        for index, (spec, layers) in enumerate(groups):
            self.attn_groups.append([])
            for name, backend in layers:
                group = AttentionGroup(backend, [name], spec, index)
                group.create_metadata_builders(
                    self.config,
                    DEVICE,
                    kernel_block_size=(
                        KERNEL_BLOCK if in_kernel_blocks and "." in name else None
                    ),
                )
                self.attn_groups[-1].append(group)
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[
                SimpleNamespace(
                    kv_cache_spec=spec, layer_names=[name for name, _ in layers]
                )
                for spec, layers in groups
            ]
        )

    def builders(self) -> Iterator[object]:
        for groups in self.attn_groups:
            for group in groups:
                yield group.get_metadata_builder()

    @property
    def device_storages(self) -> set[int]:
        """The storages that lie on the device in a real engine."""
        owned = [
            *vars(self.buffers).values(),
            *self.block_tables.tables,
            self.block_tables.slot_mappings,
            *vars(self.state).values(),
            *(value for builder in self.builders() for value in vars(builder).values()),
            *(
                value
                for groups in self.attn_groups
                for group in groups
                for value in vars(group).values()
            ),
        ]
        return {storage(value) for value in owned if isinstance(value, torch.Tensor)}

    def keep_graphs(self, *num_reqs: int) -> None:
        """Of the FULL graphs, capture those of so many requests alone."""
        self.full_graphs = [
            graph for graph in self.full_graphs if graph.num_reqs in num_reqs
        ]

    def record(self) -> None:
        """Capture as the runner does: the forward graphs, then what is inner."""
        with set_current_vllm_config(self.config):
            for graph in self.full_graphs:
                if self.way == Serving.IN_GRAPH:
                    self.capture_forward(graph)
                else:
                    self.build_in_graph(graph, {})
        self.capture_inner()

    def capture_inner(self) -> None:
        """What the runner does after it has captured the forward graphs."""
        with set_current_vllm_config(self.config):
            self.state.capture_inner_cudagraphs(*self.where)

    @property
    def where(self) -> tuple:
        return self.buffers, self.block_tables, self.attn_groups, self.kv_cache_config

    def build_in_graph(
        self, graph: BatchExecutionDescriptor, attn_metadata: dict
    ) -> None:
        """As the runner calls it in the forward of ``graph``."""
        with set_current_vllm_config(self.config):
            self.state.build_in_graph(graph, attn_metadata, *self.where)

    def capture_forward(self, graph: BatchExecutionDescriptor) -> None:
        """Warm up the head of the forward of ``graph``, and capture it."""
        self.build_in_graph(graph, self.for_capture(graph.num_reqs))
        attn_metadata = self.for_capture(graph.num_reqs)
        cuda_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(cuda_graph):
            self.build_in_graph(graph, attn_metadata)
        self.forward_graphs[graph.num_reqs] = cuda_graph

    def for_capture(self, num_reqs: int) -> dict:
        """The metadata that a FULL graph is captured with."""
        return self.build(
            self.dummy(num_reqs),
            CUDAGraphMode.NONE,
            tables=self.block_tables.get_dummy_block_tables(num_reqs),
            for_capture=True,
        )

    def padded_tokens(self, num_reqs: int) -> int:
        """The tokens of the FULL graph of so many requests."""
        tokens = {graph.num_reqs: graph.num_tokens for graph in self.full_graphs}
        return tokens.get(num_reqs, num_reqs * self.query_len)

    def dummy(self, num_reqs: int) -> InputBatch:
        num_tokens = self.padded_tokens(num_reqs)
        self.block_tables.get_dummy_slot_mappings(num_tokens)
        return InputBatch.make_dummy(
            num_reqs,
            num_tokens,
            self.buffers,
            max_query_len=self.query_len,
        )

    def idle(self, num_reqs: int) -> InputBatch:
        """The dummy batch of a data-parallel rank without requests."""
        num_tokens = num_reqs * self.query_len
        self.block_tables.get_dummy_block_tables(num_reqs)
        self.block_tables.get_dummy_slot_mappings(num_tokens)
        return InputBatch.make_dummy(num_reqs, num_tokens, self.buffers)

    def extending(self, step: Step, start: int) -> InputBatch:
        """Requests that compute the last token of their prompt, the first of them right
        after it has replayed the window of a cached prefix; drafts are placeholders.
        """
        batch = self.fill(step)
        for state in (self.state, self.stock_state):
            state._replay_start_np[:] = 0
            state._replay_start_np[0] = start
        batch.is_prefilling_np[:] = True
        return replace(
            batch, has_prefill=True, prefill_runs_as_decode_np=batch.is_prefilling_np
        )

    def run(self, step: Step) -> dict:
        """The step's metadata, refreshed as far as its forward graph does."""
        return self.run_batch(self.fill(step))

    def run_batch(self, batch: InputBatch, **options) -> dict:
        attn_metadata = self.build(batch, **options)
        if batch.num_reqs_after_padding in self.forward_graphs:
            self.forward_graphs[batch.num_reqs_after_padding].replay()
        return attn_metadata

    def fill(self, step: Step) -> InputBatch:
        """Write the inputs of ``step`` and return its batch."""
        return write_step(
            step,
            self.buffers,
            self.block_tables.tables,
            [spec.block_size for spec in self.specs],
            self.block_tables.slot_mappings,
            num_blocks=4096,
            max_model_len=self.config.model_config.max_model_len,
        )

    def build(
        self,
        batch: InputBatch,
        mode: CUDAGraphMode = CUDAGraphMode.FULL,
        prepare_attn: Callable | None = None,
        tables: tuple[torch.Tensor, ...] | None = None,
        **options,
    ) -> dict:
        """The step's metadata, as the runner asks for it."""
        with set_current_vllm_config(self.config):
            return (prepare_attn or self.state.prepare_attn)(
                batch,
                mode,
                tables
                or tuple(
                    table[: batch.num_reqs_after_padding]
                    for table in self.block_tables.tables
                ),
                self.block_tables.slot_mappings[:, : batch.num_tokens_after_padding],
                self.attn_groups,
                self.kv_cache_config,
                **options,
            )

    def eager(self, step: Step) -> dict:
        """The step's metadata as upstream's own model state builds it."""
        return self.build(self.fill(step), prepare_attn=self.stock_state.prepare_attn)

    def check_step(self, step: Step, view: View | None = None) -> dict:
        """``check_batch`` of ``step``."""
        return self.check_batch(lambda: self.fill(step), step, view)

    def check_batch(
        self,
        make_batch: Callable[[], InputBatch],
        step: Step,
        view: View | None = None,
        **options,
    ) -> dict:
        """The metadata of a step, and that its forward finds what it would find after
        upstream's eager build.
        """
        view = self.forward_view(step.padded_reqs) if view is None else view
        self.build(make_batch(), prepare_attn=self.stock_state.prepare_attn, **options)
        want = clones(view)
        batch = make_batch()
        self.poison(view)
        attn_metadata = self.run_batch(batch, **options)
        assert_same_for_forward(want, clones(view), step)
        return attn_metadata

    def forward_view(self, num_reqs: int) -> View:
        """What a FULL graph of ``num_reqs`` requests reads and a step refreshes."""
        batch = self.dummy(num_reqs)
        on_device = self.device_storages
        return forward_view(
            lambda: self.build(
                batch,
                CUDAGraphMode.NONE,
                self.stock_state.prepare_attn,
                for_capture=True,
            ),
            self.input_storages(),
            lambda tensor: storage(tensor) in on_device,
        )

    def built(self, view: View) -> View:
        """``view`` without the inputs of the build."""
        return built(view, self.input_storages())

    def poison(self, view: View) -> None:
        """Overwrite everything in ``view`` that a metadata build has to write."""
        poison(self.built(view))

    def input_storages(self) -> set[int]:
        inputs = [
            *vars(self.buffers).values(),
            *self.block_tables.tables,
            self.block_tables.slot_mappings,
            self.state._replay_start,
            *(getattr(builder, "no_replay_start", None) for builder in self.builders()),
        ]
        return {storage(value) for value in inputs if isinstance(value, torch.Tensor)}
