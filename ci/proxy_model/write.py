"""Write a proxy model: ``python -m proxy_model.write --layers 40 --out DIR``."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import cli
from cli import Fault, note

from .config import (
    ALL_ROUTED_EXPERTS,
    RANKS,
    ROUTED_EXPERTS,
    TOPOLOGIES,
    proxy_config,
)
from .sizes import experts_that_fit, held

# Of a GPU's memory; the rest is for the KV cache, graphs and workspaces.
SHARE_OF_WEIGHTS = 0.75


def write(
    folder: Path,
    layers: int,
    routed_experts: int = ROUTED_EXPERTS,
    engram: bool = False,
    tokenizer: bool = True,
    rank_of: int = 1,
    expert_parallel: bool = False,
) -> None:
    """Write the proxy of ``layers`` layers into ``folder``, made where missing.

    ``engram`` needs vLLM and writes the tokenizer too, which its tables depend
    on. Raises ``ValueError`` as ``proxy_config`` does.
    """
    tables = None
    if engram:
        from .engram import tables as sized

        tables = sized(layers)
    config = proxy_config(layers, routed_experts, tables, rank_of, expert_parallel)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer or engram:
        from . import tokenizer as made

        made.save(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def experts_of_rank(
    layers: int, rank_of: int, expert_parallel: bool, memory: float | None
) -> int:
    """How many of the model's experts the proxy of a rank has.

    On a GPU of ``memory`` bytes it is all, where they fit or ``memory`` is not known.

    Raises ValueError as ``proxy_config`` does, and where too few fit to route.
    """
    config = proxy_config(layers, ALL_ROUTED_EXPERTS, None, rank_of, expert_parallel)
    if memory is None:
        return ALL_ROUTED_EXPERTS
    text = config["text_config"]
    fitting = experts_that_fit(text, memory * SHARE_OF_WEIGHTS)
    if fitting < 16:
        raise ValueError(
            f"a rank of {rank_of} with {layers} layers does not fit this GPU: its "
            f"weights are {held(text) / 2**30:.0f} GiB"
        )
    return fitting


def gpu_memory() -> int | None:
    """Bytes of the first GPU's memory, or None where there is none to ask."""
    try:
        # vLLM logs to standard output, as it is when the logger is made.
        with redirect_stdout(sys.stderr):
            from vllm.platforms import current_platform
    except ImportError:
        return None
    if not current_platform.is_cuda():
        return None
    return int(current_platform.get_device_total_memory())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="proxy_model.write",
        description="Write the configuration of a model with DeepSeek-V4.1-Flash's "
        "shapes that fits one GPU, to be loaded with --load-format dummy.",
    )
    parser.add_argument("--layers", type=int, choices=list(TOPOLOGIES), required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--rank-of",
        type=int,
        choices=RANKS,
        metavar="|".join(map(str, RANKS)),
        help="the shapes of one rank of so many under tensor parallelism (default: "
        "the whole model's)",
    )
    parser.add_argument(
        "--expert-parallel",
        action="store_true",
        help="with --rank-of: whole experts divided among the ranks, for an engine "
        "with --worker-cls proxy_model.expert_parallel.Worker",
    )
    parser.add_argument(
        "--routed-experts",
        type=int,
        metavar="N",
        help=f"(default: {ROUTED_EXPERTS}; with --rank-of {ALL_ROUTED_EXPERTS}, or "
        "what this machine's GPU has the memory for)",
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
    if options.expert_parallel and options.rank_of is None:
        parser.error("--expert-parallel needs --rank-of")
    return options


def run(options: argparse.Namespace) -> int:
    """Write the proxy that the options ask for."""
    rank_of = options.rank_of or 1
    experts = options.routed_experts
    try:
        if experts is None and options.rank_of is not None:
            experts = experts_of_rank(
                options.layers, rank_of, options.expert_parallel, gpu_memory()
            )
            if experts < ALL_ROUTED_EXPERTS:
                note(
                    f"{experts} routed experts of {ALL_ROUTED_EXPERTS}: this GPU's "
                    "memory does not hold more"
                )
        write(
            options.out,
            options.layers,
            ROUTED_EXPERTS if experts is None else experts,
            options.engram,
            options.tokenizer,
            rank_of,
            options.expert_parallel,
        )
    except ValueError as error:
        raise Fault(str(error)) from error
    except ImportError as error:
        raise Fault(
            f"{error.name} is not installed: install vLLM's requirements, or leave out "
            "--engram and give --no-tokenizer"
        ) from error
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(parse, run))
