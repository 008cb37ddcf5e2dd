"""``scripts/bench.sh metadata``: metadata builds by each of the paths.

Two engine processes for each proxy, query length and max_model_len. In the first,
eager, ported and replay take turns over the decode steps of the same requests (see
``bench.switch``); the second has the build inside its forward graphs. Each starts
where the one before has left the compile caches warm.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

import cli
from cli import Fault, note
from patchstack.tree.marker import read as read_marker
from proxy_model.config import TOPOLOGIES
from proxy_model.write import write

from .ported import RELATIVE
from .records import LONGEST, PATHS, Record, aims, table

# Of max_model_len, in tokens: room for a run's requests.
SHORTEST = 2048
# The engine in the bench's own process, where its model state can be reached; no
# sampler that compiles; no network.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def numbers(text: str) -> list[int]:
    """``1,8,32`` as a list. Raises ValueError."""
    values = [int(word) for word in text.split(",")]
    if min(values) < 1:
        raise ValueError(text)
    return values


def paths(text: str) -> list[str]:
    """``eager,replay`` as a list, in the order of ``PATHS``. Raises ValueError."""
    words = text.split(",")
    if not set(words) <= set(PATHS):
        raise ValueError(text)
    return [path for path in PATHS if path in words]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="bench.sh metadata",
        description="Measure the metadata build of FULL decode steps side by side: "
        "eager (upstream's), ported (upstream's recordings with the Hopper builders "
        "let in), replay (our recordings) and in_graph (inside our forward graphs). "
        "Needs a GPU and the fork.",
    )
    parser.add_argument("--proxy", type=numbers, default=[40, 8], metavar="40,8")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32], metavar="1,8,32")
    parser.add_argument(
        "--query-len",
        type=numbers,
        default=[1],
        metavar="1,6",
        help="tokens a request decodes per step; above 1 with DSpark (default: 1)",
    )
    parser.add_argument(
        "--max-model-len",
        type=numbers,
        default=[SHORTEST],
        metavar=f"{SHORTEST},{LONGEST}",
        help="tokens a sequence may have, which the width of block tables follows; the "
        f"requests stay short (default: {SHORTEST})",
    )
    parser.add_argument(
        "--path",
        type=paths,
        default=list(PATHS),
        metavar=",".join(PATHS),
        help="what to measure (default: all); gpu_metadata_us of in_graph needs one "
        "of the others too",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=120,
        metavar="N",
        help="decode steps to measure, for each path (default: 120)",
    )
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N")
    parser.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="folder of pristine upstream files for the ported path (default: the "
        "bundle's); without one that path is left out",
    )
    parser.add_argument("--commit", help="what to call this fork in the records")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON here")
    parser.add_argument(
        "--json",
        action="store_true",
        help="JSON on standard output, no table (docs/schemas/bench-metadata.v2.json)",
    )
    options = parser.parse_args(arguments)
    for proxy in options.proxy:
        if proxy not in TOPOLOGIES:
            parser.error(f"--proxy {proxy}: choose from {sorted(TOPOLOGIES)}")
    if max(options.batch) > 32:
        parser.error("--batch: the engine serves 32 requests at most")
    if max(options.query_len) > 6:
        parser.error("--query-len: the proxy drafts 5 tokens at most")
    if not all(SHORTEST <= it <= LONGEST for it in options.max_model_len):
        parser.error(f"--max-model-len: the proxy takes {SHORTEST} to {LONGEST}")
    if options.steps < 10 or options.new_tokens < 64:
        parser.error("give 10 --steps and 64 --new-tokens or more")
    return options


def check_machine() -> None:
    """Raise ``Fault`` where the engine cannot run."""
    try:
        import torch
    except ImportError as error:
        raise Fault("no torch here: install the fork first") from error
    if not torch.cuda.is_available():
        raise Fault("no NVIDIA GPU here: run this on a GPU node")


def find_upstream(given: Path | None) -> Path | None:
    """Upstream's pristine ``metadata_graphs.py``, or None where there is none."""
    bundle = os.environ.get("VLLM_BUNDLE")
    folder = given or (Path(bundle, "base") if bundle else None)
    if folder is None:
        return None
    path = folder / RELATIVE
    if not path.is_file():
        raise Fault(f"{folder} holds no pristine {RELATIVE}")
    return path


def name_of_fork() -> str:
    """The commit of this checkout, or the digest of the stack it was packed with."""
    git = subprocess.run(
        ["git", "-C", str(cli.REPO), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
    )
    if git.returncode == 0:
        return git.stdout.strip()
    bundle = os.environ.get("VLLM_BUNDLE")
    marker = read_marker(Path(bundle, "fork") if bundle else cli.REPO / "vllm")
    return f"stack {marker.digest}" if marker else "unknown"


def engines(options: argparse.Namespace) -> Iterator[list[str]]:
    """The paths that each engine of one proxy and kind of step measures."""
    apart = [path for path in options.path if path != "in_graph"]
    if "ported" in apart and find_upstream(options.base) is None:
        apart.remove("ported")
    if apart:
        # The last path is the engine's own.
        yield apart
    if "in_graph" in options.path:
        yield ["in_graph"]


def run_engine(
    options: argparse.Namespace,
    proxy: int,
    query_len: int,
    max_model_len: int,
    measured: Sequence[str],
    forward_heads: dict[str, list[str]],
    folder: Path,
) -> tuple[list[Record], dict[str, list[str]]]:
    """Measure some paths in an engine process of their own.

    Returns the records of ``measured``, and how the engine's forward graphs begin,
    for each batch size.
    """
    model, out = folder / f"proxy-{proxy}", folder / "measured.json"
    if not model.exists():
        write(model, proxy)
    upstream = find_upstream(options.base)
    request = {
        "proxy": proxy,
        "model": str(model),
        "paths": list(measured),
        "forward_heads": forward_heads,
        "batches": options.batch,
        "query_len": query_len,
        "max_model_len": max_model_len,
        "steps": options.steps,
        "new_tokens": options.new_tokens,
        "upstream": str(upstream) if upstream else None,
        "commit": options.commit or name_of_fork(),
        "out": str(out),
    }
    command = [sys.executable, "-m", "bench.engine", json.dumps(request)]
    # vLLM logs to standard output, which is the result's here.
    code = subprocess.run(
        command, env=os.environ | ENVIRONMENT, stdout=sys.stderr
    ).returncode
    if code:
        raise Fault(
            f"the engine of {proxy} layers at query length {query_len} and "
            f"max_model_len {max_model_len} failed ({', '.join(measured)}): its log is "
            "above"
        )
    written = json.loads(out.read_text())
    return [Record(**values) for values in written["records"]], written["forward_heads"]


def bench(options: argparse.Namespace) -> list[Record]:
    """Measure all that is asked for, one engine after the other."""
    check_machine()
    if "ported" in options.path and find_upstream(options.base) is None:
        note("no --base: the ported path is left out")
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for engine in product(options.proxy, options.query_len, options.max_model_len):
            heads: dict[str, list[str]] = {}
            for measured in engines(options):
                found, heads = run_engine(
                    options, *engine, measured, heads, Path(folder)
                )
                records += found
                # What is measured is kept, whatever happens to the next engine.
                save(options.out, records)
    return records


def as_json(records: Sequence[Record]) -> str:
    """The document of docs/schemas/bench-metadata.v2.json."""
    return json.dumps({"records": [asdict(record) for record in records]}, indent=1)


def save(path: Path | None, records: Sequence[Record]) -> None:
    """Write the records where ``--out`` says, if it does."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_json(records) + "\n")


def run(options: argparse.Namespace) -> int:
    """Measure and print what was measured."""
    records = bench(options)
    if options.json:
        print(as_json(records))
    else:
        print(table(records))
        print("\n".join(aims(records)))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(parse, run))
