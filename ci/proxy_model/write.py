"""Write a proxy model: ``python -m proxy_model.write --layers 40 --out DIR``."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .config import ROUTED_EXPERTS, TOPOLOGIES, proxy_config


def write(
    folder: Path,
    layers: int,
    routed_experts: int = ROUTED_EXPERTS,
    engram: bool = False,
    tokenizer: bool = True,
) -> None:
    """Write the proxy of ``layers`` layers into ``folder``, made where missing.

    ``engram`` needs vLLM and writes the tokenizer too, which its tables depend
    on. Raises ``ValueError`` as ``proxy_config`` does.
    """
    tables = None
    if engram:
        from .engram import tables as sized

        tables = sized(layers)
    config = proxy_config(layers, routed_experts, tables)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer or engram:
        from . import tokenizer as made

        made.save(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="proxy_model.write",
        description="Write the configuration of a model with DeepSeek-V4.1-Flash's "
        "shapes that fits one GPU, to be loaded with --load-format dummy.",
    )
    parser.add_argument("--layers", type=int, choices=list(TOPOLOGIES), required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--routed-experts", type=int, default=ROUTED_EXPERTS, metavar="N"
    )
    parser.add_argument(
        "--engram", action="store_true", help="with n-gram tables, 0.8 GB in all"
    )
    parser.add_argument(
        "--no-tokenizer",
        dest="tokenizer",
        action="store_false",
        help="the configuration alone: prompts are token ids",
    )
    options = parser.parse_args(arguments)
    try:
        write(
            options.out,
            options.layers,
            options.routed_experts,
            options.engram,
            options.tokenizer,
        )
    except (ValueError, OSError) as error:
        print(f"proxy_model.write: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(
            f"proxy_model.write: {error.name} is not installed: install vLLM's "
            "requirements, or leave out --engram and give --no-tokenizer",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
