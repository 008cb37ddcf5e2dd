"""Table sizes of a proxy's Engram, worked out by the model's own code.

The rows of a table are the sum of the primes that the model draws, and every hash
multiplier comes from the tokenizer's compressed vocabulary, so both are asked of
vLLM rather than repeated here.
"""

from types import SimpleNamespace

from tokenizers import Tokenizer

from .config import (
    END_OF_SENTENCE,
    ENGRAM_HEAD_DIM,
    ENGRAM_MAX_NGRAM,
    TOPOLOGIES,
    EngramTables,
)

HEADS = 8
# Rows of one head's table: 24 of them are 0.4 GB a layer, where the released
# model has 98 GB.
HEAD_ROWS = 65_536


def tables(layers: int) -> EngramTables:
    """The tables of the proxy of ``layers`` layers. Needs vLLM."""
    from vllm.models.deepseek_v41.common.engram import (
        EngramLayout,
        build_compressed_token_map,
    )

    from .tokenizer import build

    backend = build()
    fast = _Tokenizer(backend)
    _, compressed = build_compressed_token_map(fast)
    ids = TOPOLOGIES[layers].engram
    layout = EngramLayout(
        SimpleNamespace(
            engram_layer_ids=ids,
            engram_num_embeddings=[0] * len(ids),
            engram_max_ngram_size=ENGRAM_MAX_NGRAM,
            engram_n_heads=HEADS,
            engram_head_dim=ENGRAM_HEAD_DIM,
            engram_compressed_vocab_size=compressed,
            engram_pad_token_id=END_OF_SENTENCE,
            engram_vocab_size=HEAD_ROWS,
        )
    )
    rows = [sum(map(sum, layer)) for layer in layout.primes]
    return EngramTables(HEAD_ROWS, HEADS, rows, compressed)


class _Tokenizer:
    """What vLLM's token map asks of a Hugging Face tokenizer."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend

    def __len__(self) -> int:
        size: int = self.backend_tokenizer.get_vocab_size()
        return size
