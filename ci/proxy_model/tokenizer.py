"""A tokenizer for the proxies: every byte is a token, and every id is a word.

A model without weights emits any id of its vocabulary, so each id must decode.
The first ids are the special tokens and the 256 bytes; the rest are words that no
text is ever encoded to.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from .config import (
    BEGIN_OF_SENTENCE,
    END_OF_SENTENCE,
    IMAGE_TOKEN,
    VOCABULARY,
)

_BAR = "\N{FULLWIDTH VERTICAL LINE}"
SPECIAL = {
    f"<{_BAR}begin▁of▁sentence{_BAR}>": BEGIN_OF_SENTENCE,
    f"<{_BAR}end▁of▁sentence{_BAR}>": END_OF_SENTENCE,
    f"<{_BAR}deepseek_image{_BAR}>": IMAGE_TOKEN,
}


def build() -> Tokenizer:
    """The tokenizer, with as many ids as the model has."""
    vocabulary = dict(SPECIAL)
    taken = set(SPECIAL.values())
    letters = iter(sorted(pre_tokenizers.ByteLevel.alphabet()))
    for token_id in range(VOCABULARY):
        if token_id not in taken:
            vocabulary[next(letters, f"word{token_id}")] = token_id
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    return tokenizer


def save(folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``."""
    build().save(str(folder / "tokenizer.json"))
    begin, end, _ = SPECIAL
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "pad_token": end,
        "model_max_length": 1_048_576,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=1))
