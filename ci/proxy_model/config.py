"""The proxy models: DeepSeek-V4.1-Flash's shapes on one GPU.

Every width, head count, window and source layer is the released model's. A proxy
of the whole model differs in the number of routed experts (16 for 384), so that one
GPU holds it, in having no Engram tables unless asked for, and, with 8 layers, in
depth. Loaded with ``load_format=dummy`` it runs the launches of a decode step of the
real model; what it writes is noise.

A proxy of one rank has the shapes that one of 2, 4 or 8 GPUs computes under tensor
parallelism, with all 384 experts where they fit: the heads, output groups and
expert widths of the model divided, all else whole. What such a rank has beside
that, the proxy leaves out: the all-reduces after attention and experts, and a
vocabulary that is divided for embedding and lm_head, which are whole here. Under
expert parallelism the attention and the shared expert are divided in the same way,
and the rank has whole experts instead of a part of each
(``proxy_model.expert_parallel``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

VOCABULARY = 129_280
IMAGE_TOKEN = 129_264
BEGIN_OF_SENTENCE = 0
END_OF_SENTENCE = 1
# Of a proxy of the whole model, and of the released model.
ROUTED_EXPERTS = 16
ALL_ROUTED_EXPERTS = 384
DRAFT_LAYERS = 3
# Sizes of a tensor-parallel group that divide all that a rank has a part of.
RANKS = (1, 2, 4, 8)
# Where a configuration says over how many ranks its experts are divided whole.
EXPERT_PARALLEL_SIZE = "proxy_expert_parallel_size"


@dataclass(frozen=True)
class Topology:
    """Which layer attends how: the part of the shape that depends on depth.

    Attributes:
        compress_ratios: Tokens per compressed key of each layer; 0 is a layer
            with its sliding window alone.
        kv_sources: Layers that compress keys of their own; those above reuse them.
        index_sources: Layers with an indexer.
        candidate_source: The indexer that preselects blocks for those above it.
        engram: Layers with an n-gram table, where Engram is on.
    """

    compress_ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    candidate_source: int
    engram: tuple[int, ...]

    @property
    def layers(self) -> int:
        """How deep the model is."""
        return len(self.compress_ratios)


TOPOLOGIES = {
    40: Topology(
        compress_ratios=(0, 0, *(2,) * 18, *(1,) * 20),
        kv_sources=(2, 8, 14, 20),
        index_sources=(2, 8, 14, 20, 24, 28, 32, 36),
        candidate_source=20,
        engram=(1, 14),
    ),
    # One of each kind of layer, and a consumer of each: a step this short is
    # bound by the host, as one of the whole model is under tensor parallelism.
    # One source of each ratio leaves vLLM's planner a group per window, 8 for
    # the 7 of the whole model.
    8: Topology(
        compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1),
        kv_sources=(2, 5),
        index_sources=(2, 5, 7),
        candidate_source=5,
        engram=(1, 4),
    ),
}


@dataclass(frozen=True)
class EngramTables:
    """Sizes of the n-gram tables (``proxy_model.engram`` works them out)."""

    vocabulary: int
    heads: int
    rows: Sequence[int]
    compressed_vocabulary: int


def proxy_config(
    layers: int,
    routed_experts: int = ROUTED_EXPERTS,
    engram: EngramTables | None = None,
    rank_of: int = 1,
    expert_parallel: bool = False,
) -> dict[str, Any]:
    """The ``config.json`` of a proxy.

    Args:
        layers: A key of ``TOPOLOGIES``.
        routed_experts: How many experts a token's 6 are chosen from.
        engram: The tables to have, or None for a model without Engram.
        rank_of: The ranks of a tensor-parallel group of which the proxy is one.
        expert_parallel: Whether those ranks have whole experts: ``routed_experts``
            divided by ``rank_of``, at full width. Takes effect in an engine with
            ``proxy_model.expert_parallel.WORKER``.

    Raises:
        ValueError: There is no such proxy; the message says why.
    """
    if rank_of not in RANKS:
        known = ", ".join(map(str, RANKS))
        raise ValueError(f"a rank of {rank_of} has no even share: choose from {known}")
    if expert_parallel and rank_of == 1:
        raise ValueError("expert parallelism needs ranks: give a rank of 2 or more")
    if expert_parallel and routed_experts % rank_of:
        raise ValueError(
            f"{routed_experts} experts are no whole number on each of {rank_of} ranks"
        )
    if engram is not None and rank_of > 1:
        raise ValueError("there is no proxy of one rank with Engram tables")
    if layers not in TOPOLOGIES:
        known = " or ".join(map(str, TOPOLOGIES))
        raise ValueError(f"there is no proxy of {layers} layers: choose {known}")
    if routed_experts < 6:
        raise ValueError("6 experts serve a token: give 6 routed experts or more")
    topology = TOPOLOGIES[layers]
    text = {
        "model_type": "deepseek_v41",
        "vocab_size": VOCABULARY,
        "hidden_size": 5120,
        "num_hidden_layers": topology.layers,
        "max_position_embeddings": 1_048_576,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **_attention(topology, rank_of),
        **_experts(routed_experts, 1 if expert_parallel else rank_of),
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        **_draft(topology, routed_experts),
    }
    if expert_parallel:
        text[EXPERT_PARALLEL_SIZE] = rank_of
    if engram is not None:
        text |= {
            "engram_layer_ids": list(topology.engram),
            "engram_num_embeddings": list(engram.rows),
            "engram_vocab_size": engram.vocabulary,
            "engram_n_heads": engram.heads,
            "engram_max_ngram_size": ENGRAM_MAX_NGRAM,
            "engram_head_dim": ENGRAM_HEAD_DIM,
            "engram_pad_token_id": END_OF_SENTENCE,
            "engram_compressed_vocab_size": engram.compressed_vocabulary,
        }
    return {
        "model_type": "deepseek_v41",
        "architectures": ["DeepseekV41ForCausalLM"],
        "torch_dtype": "bfloat16",
        "transformers_version": "5.16.1",
        "bos_token_id": BEGIN_OF_SENTENCE,
        "eos_token_id": END_OF_SENTENCE,
        "image_token_id": IMAGE_TOKEN,
        "text_config": text,
        # The tower is never run (no images), but that there is one selects the
        # router the released model has.
        "vision_config": {"num_hidden_layers": 1},
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [32, 32],
            "expert_dtype": "fp4",
        },
    }


ENGRAM_MAX_NGRAM = 4
ENGRAM_HEAD_DIM = 256


def _attention(topology: Topology, ranks: int) -> dict[str, Any]:
    return {
        "num_attention_heads": 64 // ranks,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8 // ranks,
        "sliding_window": 128,
        "compress_ratios": [*topology.compress_ratios, *(0,) * DRAFT_LAYERS],
        "kv_source_layer_ids": list(topology.kv_sources),
        "index_source_layer_ids": list(topology.index_sources),
        "index_topk": 512,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "candidate_source_layer_id": topology.candidate_source,
        "candidate_block_size": 8,
        "candidate_topk_blocks": 2048,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 65_536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }


def _experts(routed: int, ranks: int) -> dict[str, Any]:
    return {
        "n_routed_experts": routed,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2304 // ranks,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
    }


def _draft(topology: Topology, routed_experts: int) -> dict[str, Any]:
    """DSpark: 3 stages that draft 5 tokens from the last layers' inputs."""
    last = topology.layers
    return {
        "num_nextn_predict_layers": DRAFT_LAYERS,
        "dspark_block_size": 5,
        "dspark_target_layer_ids": [last - 3, last - 2, last - 1],
        "dspark_n_routed_experts": min(routed_experts, 128),
        "dspark_num_experts_per_tok": 3,
        "dspark_markov_rank": 256,
        "dspark_noise_token_id": END_OF_SENTENCE,
    }
