"""``scripts/bench.sh step``: time decode steps by path, and take one apart."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import cli
from cli import Fault, note
from proxy_model import write as proxy_model
from proxy_model.config import RANKS, TOPOLOGIES

from ..metadata import ENVIRONMENT, check_machine, name_of_fork, numbers
from . import record
from .request import Request

BACKENDS = ("stock", "auto", "latency_specialized")
OUT_OF_TIME = "no time was left"
# What an engine takes at least to start, with warm compile caches, in seconds.
START_SECONDS = 45

EPILOG = f"""\
A path is a decode_backend, {", ".join(BACKENDS)}, and after a colon a value of
metadata_graphs where it is to be another than the default, as in
latency_specialized:eager. Each path has an engine of its own, which times --steps
steps of each batch size without a profiler and then profiles 10.

The table of a batch size has a row for each part of a step, and for each path
  span    us by which the part's launches move the end of the step on, the gaps
          before them included: these add up to the step
  busy    us in which any of them runs
  n       how many they are
  % copy  the speed at which they read what they have to (column MB), of that of a
          copy on this GPU in this run
A launch that starts before the one ahead of it ends waits within its own time: then
span tells what it costs, busy does not. The bytes of a shared expert or a router
without launches of its own count for the experts.
What has to be read is each weight once, of the experts those that the tokens are
expected to choose, and each record of the KV cache once. The bound is the time to
read all of it. The proxy of one rank leaves out the all-reduces, and its embedding
and lm_head are those of all ranks. Under the profiler a step waits longer for its
host: 'ms' is measured without.

On a GPU machine without a network, after scripts/unbundle.sh, in one command that
ends by itself and prints the table last:

  scripts/bench.sh step --rank-of 8 --batch 1,8,32 --query-len 1,6 \\
      --paths stock auto --budget-seconds 480 --out $OUT/step.json

An engine starts in about 40 s where the compile caches are warm, and in some
minutes where they are not; a batch size takes 5-10 s. What the budget does not
reach is listed as left out, and a run that is killed keeps what it has measured.
Draw the plot anywhere: bench.sh step --draw step.json --plot step.svg
"""


def path(text: str) -> str:
    """A path's name. Raises ValueError."""
    backend, colon, metadata_graphs = text.partition(":")
    if backend not in BACKENDS or (colon and not metadata_graphs):
        raise ValueError(text)
    return text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="bench.sh step",
        description="Time decode steps of a proxy by path, and show where the GPU's "
        "time goes. Needs a GPU and the fork, --draw needs neither.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--paths", type=path, nargs="+", default=["stock", "auto"], metavar="PATH"
    )
    parser.add_argument("--layers", type=int, choices=list(TOPOLOGIES), default=40)
    parser.add_argument(
        "--rank-of",
        type=int,
        choices=RANKS,
        help="a proxy of one of so many ranks, with all experts that fit (default: of "
        "the whole model, with 16)",
    )
    parser.add_argument(
        "--expert-parallel", action="store_true", help="whole experts on each rank"
    )
    parser.add_argument(
        "--batch", type=numbers, default=[1, 2, 4, 8, 16, 32], metavar="1,2,4,8,16,32"
    )
    parser.add_argument(
        "--query-len",
        type=numbers,
        default=[1],
        metavar="1,6",
        help="tokens a request decodes per step; above 1 with DSpark (default: 1)",
    )
    parser.add_argument(
        "--steps", type=int, default=60, metavar="N", help="to time (default: 60)"
    )
    parser.add_argument(
        "--budget-seconds",
        type=float,
        metavar="S",
        help="begin nothing that would not end in this time",
    )
    parser.add_argument("--commit", help="what to call this fork in the records")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the JSON here, batch size by batch size",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="JSON on standard output, no table (docs/schemas/bench-step.v1.json)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw ms a step by batch size (.svg)"
    )
    parser.add_argument(
        "--plot-host",
        type=Path,
        metavar="JSON",
        help="beside it the host time of a step's metadata, from results of "
        "'bench.sh metadata'",
    )
    parser.add_argument(
        "--draw",
        type=Path,
        metavar="JSON",
        help="measure nothing: show and plot results of before",
    )
    options = parser.parse_args(arguments)
    if max(options.batch) > 32:
        parser.error("--batch: the engine serves 32 requests at most")
    if max(options.query_len) > 6:
        parser.error("--query-len: the proxy drafts 5 tokens at most")
    if options.steps < 10:
        parser.error("give 10 --steps or more")
    if options.expert_parallel and options.rank_of in (None, 1):
        parser.error("--expert-parallel needs --rank-of 2, 4 or 8")
    if options.plot_host and not options.plot:
        parser.error("--plot-host needs --plot")
    if options.draw and options.draw == options.out:
        parser.error("--draw measures nothing, so there is nothing to write --out")
    return options


def proxy(options: argparse.Namespace, folder: Path) -> Path:
    """Write the proxy's files. Raises ``Fault``."""
    model = folder / "proxy"
    arguments = ["--layers", str(options.layers), "--out", str(model)]
    if options.rank_of is not None:
        arguments += ["--rank-of", str(options.rank_of)]
    if options.expert_parallel:
        arguments.append("--expert-parallel")
    proxy_model.run(proxy_model.parse(arguments))
    return model


def requests(
    options: argparse.Namespace, model: Path, out: Path, deadline: float | None
) -> Iterator[Request]:
    """What each engine is to measure, in turn: all paths at one query length first,
    so that what a budget leaves can be compared.
    """
    commit = options.commit or name_of_fork()
    lengths, names = map(dict.fromkeys, (options.query_len, options.paths))
    for query_len, name in product(lengths, names):
        yield Request(
            layers=options.layers,
            rank_of=options.rank_of or 1,
            expert_parallel=options.expert_parallel,
            model=str(model),
            path=name,
            query_len=query_len,
            batches=tuple(dict.fromkeys(options.batch)),
            steps=options.steps,
            deadline=deadline,
            commit=commit,
            out=str(out),
        )


def run_engine(request: Request) -> str | None:
    """Run an engine to its end; why it did not come to it, if so."""
    command = [sys.executable, "-m", "bench.step.engine", request.as_json()]
    left = None if request.deadline is None else request.deadline - time.time()
    try:
        # vLLM logs to standard output, which is the result's here.
        code = subprocess.run(
            command, env=os.environ | ENVIRONMENT, stdout=sys.stderr, timeout=left
        ).returncode
    except subprocess.TimeoutExpired:
        return OUT_OF_TIME
    return f"its engine failed (exit code {code}), its log says why" if code else None


def bench(options: argparse.Namespace, out: Path) -> bool:
    """Measure into ``out``; whether no engine failed.

    Raises ``Fault`` where nothing can be measured.
    """
    check_machine()
    deadline = None
    if options.budget_seconds is not None:
        deadline = time.time() + options.budget_seconds
    none_failed = True
    record.save(out, record.Results())
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        model = proxy(options, Path(folder))
        for request in requests(options, model, out, deadline):
            reason: str | None = OUT_OF_TIME
            if deadline is None or time.time() + START_SECONDS <= deadline:
                reason = run_engine(request)
            missing = _missing(request, record.load(out))
            if reason and missing:
                record.add(out, request.left_out(missing, reason))
            if reason:
                note(f"{request.path}, query length {request.query_len}: {reason}")
            none_failed &= reason in (None, OUT_OF_TIME)
    return none_failed


def _missing(request: Request, results: record.Results) -> tuple[int, ...]:
    """The batch sizes of a request that the results say nothing of."""
    engine = (request.path, request.query_len)
    told = {r.batch for r in results.records if (r.path, r.query_len) == engine}
    for left in results.left_out:
        if (left.path, left.query_len) == engine:
            told |= set(left.batches)
    return tuple(batch for batch in request.batches if batch not in told)


def show(options: argparse.Namespace, results: record.Results) -> None:
    """Print the results, and draw them where ``--plot`` says."""
    print(results.as_json() if options.json else record.table(results), flush=True)
    if options.plot is not None:
        from .plot import draw, host_time

        host = host_time(options.plot_host) if options.plot_host else None
        draw(results, options.plot, host)


def run(options: argparse.Namespace) -> int:
    """Measure, or show what was measured; raises ``Fault`` where that cannot be."""
    try:
        if options.plot is not None:
            # Rather now than when all is measured.
            import matplotlib  # noqa: F401
        if options.draw is not None:
            show(options, record.load(options.draw))
            return 0
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            out = options.out or Path(folder, "results.json")
            none_failed = bench(options, out)
            show(options, record.load(out))
        return 0 if none_failed else cli.FAILED
    except ValueError as error:
        raise Fault(str(error)) from error
    except ImportError as error:
        raise Fault(f"{error.name} is not installed: --plot needs it") from error
    except (KeyboardInterrupt, cli.Stopped):
        if options.out:
            note(f"{options.out} has what was measured")
        raise


if __name__ == "__main__":
    sys.exit(cli.run(parse, run))
