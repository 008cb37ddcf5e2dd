"""What a decode step has to read, by part, in bytes.

Weights once, in the precision of the checkpoint: of the routed experts those that
the step's tokens are expected to choose between them, each expert as likely as any
other. Records of the KV cache once a request. What one kernel leaves for the next is
not counted, nor what is written: it is the least that any kernels have to read.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from proxy_model import sizes
from proxy_model.config import DRAFT_LAYERS

from .parts import Part

# One token's record in the caches of a Hopper GPU: ``fp8_ds_mla`` (448 values in
# fp8, 64 in bf16, 7 scales and a byte of padding), and the indexer's key of
# ``index_head_dim`` values in fp8 with a scale in fp32.
RECORD = 448 + 2 * 64 + 7 + 1
SCALE_OF_KEY = 4


def distinct(routed: sizes.Routed, tokens: int) -> float:
    """How many of this rank's experts ``tokens`` tokens are expected to choose.

    The complement of n tokens that all miss an expert, of which each token chooses
    ``chosen`` at random: held * (1 - (1 - chosen / experts) ** n).
    """
    missed = (1 - routed.chosen / routed.experts) ** tokens
    return routed.held * (1 - missed)


def step(
    text: Mapping[str, Any], batch: int, query_len: int, context: int
) -> dict[Part, float]:
    """Bytes of each part that reads any.

    Args:
        text: The ``text_config`` of the proxy.
        batch: Requests of the step.
        query_len: Tokens of each; above 1 a draft model drafts all but one of them.
        context: Tokens of a request before the step.
    """
    found: defaultdict[Part, float] = defaultdict(float)
    tokens = batch * query_len
    for index in range(text["num_hidden_layers"]):
        for part, count in _layer(text, index, tokens).items():
            found[part] += count
        found[Part.ATTENTION] += batch * _records(text, index, context) * RECORD
        if index in text["index_source_layer_ids"]:
            key = text["index_head_dim"] + SCALE_OF_KEY
            keys = context // text["compress_ratios"][index]
            found[Part.INDEXER] += batch * keys * key
    (head,) = (m.bytes for m in sizes.heads(text) if m.part == Part.LM_HEAD)
    found[Part.LM_HEAD] += head
    if query_len > 1:
        found[Part.DRAFT] += _draft(text, batch, query_len - 1, context) + head
    return {part: count for part, count in found.items() if count}


def _layer(text: Mapping[str, Any], index: int, tokens: int) -> dict[Part, float]:
    found: defaultdict[Part, float] = defaultdict(float)
    for matrix in sizes.layer(text, index):
        found[Part(matrix.part)] += matrix.bytes
    experts = distinct(sizes.routed(text, index), tokens)
    found[Part.EXPERTS] += experts * sizes.expert(text)
    return found


def _records(text: Mapping[str, Any], index: int, context: int) -> int:
    """Records that a layer attends for one request."""
    count = min(context, int(text["sliding_window"]))
    ratio = text["compress_ratios"][index]
    if ratio:
        count += min(context // ratio, int(text["index_topk"]))
    return count


def _draft(text: Mapping[str, Any], batch: int, drafted: int, context: int) -> float:
    """The draft's own weights and records; it uses the target's lm_head too."""
    first = text["num_hidden_layers"]
    total = 0.0
    for index in range(first, first + DRAFT_LAYERS):
        total += sum(_layer(text, index, batch * drafted).values())
        total += batch * _records(text, index, context) * RECORD
    total += sum(m.bytes for m in sizes.draft(text))
    # The head that follows the token drafted last runs once for each.
    markov = sizes.markov_head(text).bytes
    return total + drafted * markov
