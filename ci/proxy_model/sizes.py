"""Weights of the model that a configuration describes, in bytes.

The shapes are those of upstream's layers for one rank: ``deepseek_v41/attention.py``,
``compressor.py``, ``nvidia/model.py`` and ``nvidia/dspark.py``.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from .config import EXPERT_PARALLEL_SIZE

Text = Mapping[str, Any]


class Format(Enum):
    """How a matrix is kept; the value is the bytes of a weight, scales included."""

    # One byte of scale for each block of 32x32.
    MXFP8 = 1 + 1 / (32 * 32)
    # One byte of scale for each 32 of a row.
    MXFP4 = 1 / 2 + 1 / 32
    BF16 = 2.0
    FP32 = 4.0


class Matrix(NamedTuple):
    """One weight: the part of a step that reads it, and its shape."""

    part: str
    rows: int
    columns: int
    format: Format

    @property
    def bytes(self) -> float:
        """What it takes in memory."""
        return self.rows * self.columns * self.format.value


def layer(text: Text, index: int) -> Iterator[Matrix]:
    """The weights of one layer, target's or draft's, without its routed experts."""
    hidden, head = text["hidden_size"], text["head_dim"]
    heads, groups = text["num_attention_heads"], text["o_groups"]
    q_lora, o_lora = text["q_lora_rank"], text["o_lora_rank"]
    mxfp8, bf16 = Format.MXFP8, Format.BF16
    yield Matrix("query", q_lora + head, hidden, mxfp8)
    yield Matrix("query", heads * head, q_lora, mxfp8)
    yield Matrix("output", groups * o_lora, heads * head // groups, mxfp8)
    yield Matrix("output", hidden, groups * o_lora, mxfp8)
    if index in text["kv_source_layer_ids"]:
        # Where tokens are compressed there is a gate beside the keys.
        gated = 2 if text["compress_ratios"][index] > 1 else 1
        yield Matrix("indexer", gated * head, hidden, bf16)
        yield Matrix("indexer", text["index_head_dim"], head, bf16)
    if index in text["index_source_layer_ids"]:
        indexer_heads = text["index_n_heads"]
        width = indexer_heads * text["index_head_dim"]
        yield Matrix("indexer", width, q_lora, mxfp8)
        yield Matrix("indexer", indexer_heads, hidden, bf16)
    streams = text["hc_mult"]
    for _ in ("attention", "experts"):
        yield Matrix("mHC", (2 + streams) * streams, streams * hidden, Format.FP32)
    yield Matrix("router", routed(text, index).experts, hidden, bf16)
    width = shared_width(text)
    yield Matrix("shared expert", 2 * width, hidden, mxfp8)
    yield Matrix("shared expert", hidden, width, mxfp8)


def heads(text: Text) -> Iterator[Matrix]:
    """What stands before and after the layers."""
    yield Matrix("embedding", text["vocab_size"], text["hidden_size"], Format.BF16)
    yield Matrix("lm_head", text["vocab_size"], text["hidden_size"], Format.BF16)


def draft(text: Text) -> Iterator[Matrix]:
    """What the draft has beside its layers and ``markov_head``."""
    hidden, inputs = text["hidden_size"], len(text["dspark_target_layer_ids"])
    yield Matrix("draft", hidden, inputs * hidden, Format.MXFP8)


def markov_head(text: Text) -> Matrix:
    """What a drafted token adds to the logits of the next; whole on every rank."""
    return Matrix("draft", text["vocab_size"], text["dspark_markov_rank"], Format.BF16)


class Routed(NamedTuple):
    """The routed experts of a layer.

    How many there are, how many of them a token has, and how many this rank holds.
    """

    experts: int
    chosen: int
    held: int


def routed(text: Text, index: int) -> Routed:
    """The routed experts of layer ``index``; the draft's have numbers of their own."""
    prefix = "dspark_" if index >= text["num_hidden_layers"] else ""
    experts = text[f"{prefix}n_routed_experts"]
    chosen = text[f"{prefix}num_experts_per_tok"]
    return Routed(experts, chosen, experts // text.get(EXPERT_PARALLEL_SIZE, 1))


def expert(text: Text, multiple: int = 1) -> float:
    """Bytes of one routed expert, its width rounded up to a ``multiple``."""
    width = -(-text["moe_intermediate_size"] // multiple) * multiple
    weights: int = 3 * text["hidden_size"] * width
    return weights * Format.MXFP4.value


def shared_width(text: Text) -> int:
    """Columns of the shared expert on this rank."""
    width: int = text["moe_intermediate_size"] * text["n_shared_experts"]
    return width // int(text.get(EXPERT_PARALLEL_SIZE, 1))


# Upstream's layout for Hopper, Marlin's, fills an expert up to this width
# (``mxfp4_round_up_hidden_size_and_intermediate_size``).
HELD_WIDTH = 128


def held(text: Text) -> float:
    """Bytes of the weights as an engine holds them on Hopper, with draft layers."""
    count = text["num_hidden_layers"] + text["num_nextn_predict_layers"]
    bytes_of_expert = expert(text, HELD_WIDTH)
    total = sum(matrix.bytes for matrix in (*heads(text), *draft(text)))
    # A table of embeddings and one of logits.
    total += 2 * markov_head(text).bytes
    for index in range(count):
        total += sum(matrix.bytes for matrix in layer(text, index))
        total += routed(text, index).held * bytes_of_expert
    return total


def experts_that_fit(text: Text, memory: float) -> int:
    """How many of the configuration's routed experts fit into ``memory`` bytes.

    They lie beside the other weights. It is all, or a multiple of 16, or 0.
    """
    count: int = text["n_routed_experts"]
    if held(text) <= memory:
        return count
    parts = text.get(EXPERT_PARALLEL_SIZE, 1)
    one = text["num_hidden_layers"] * expert(text, HELD_WIDTH) / parts
    rest = held({**text, "n_routed_experts": 0})
    return max(int((memory - rest) / one) // 16 * 16, 0)
