"""Serve a proxy model, send completions at several concurrencies, stop, check.

    python -m smoke.serve_smoke --out result.json

Starts ``scripts/serve.sh`` (its Python must have the fork and a GPU), and leaves no
process behind whatever happens. The result tells the answers, the counters of the
metadata builds and every fault; the exit code is 0 where there is none.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cli
from cli import Fault, note

from . import counters

SERVE = cli.REPO / "scripts" / "serve.sh"
# The workers log their counters at most this often, on a decode step.
LOG_INTERVAL_S = 10.0


class Server:
    """A running server.

    Args:
        process: Its first process, the leader of its process group.
        port: Where it listens.
        log: Where it logs.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log

    def request(self, path: str, body: Any = None, timeout: float = 60.0) -> bytes:
        """GET ``path``, or POST ``body`` as JSON. Raises ``OSError``."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            content: bytes = answer.read()
        return content

    def wait_until_healthy(self, timeout: float) -> float:
        """Seconds until ``/health`` answers."""
        start = time.monotonic()
        told = start
        while time.monotonic() - start < timeout:
            if self.process.poll() is not None:
                raise Fault(
                    f"the server stopped with exit code {self.process.returncode} "
                    f"before it was ready; {self._tail()}"
                )
            try:
                self.request("/health", timeout=5)
            except OSError:
                pass
            else:
                return time.monotonic() - start
            if time.monotonic() - told > 15:
                told = time.monotonic()
                note(f"waiting for the server, {told - start:.0f} s")
            time.sleep(0.5)
        raise Fault(f"the server was not ready in {timeout:.0f} s; {self._tail()}")

    def stop(self, timeout: float) -> int:
        """Ask the server to stop; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise Fault(
                f"the server did not stop in {timeout:.0f} s after SIGTERM"
            ) from None

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"its last line: {lines[-1] if lines else '(nothing)'}"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def serving(command: Sequence[str], log: Path) -> Iterator[Server]:
    """Start ``command`` with a port appended; its process group ends with the block."""
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--host", "127.0.0.1"],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield Server(process, port, log)
    finally:
        # Its children too, which outlive a parent that was killed.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def complete(
    server: Server, model: str, prompt: str | list[int], tokens: int, timeout: float
) -> dict[str, Any]:
    """One completion of exactly ``tokens`` tokens: its text, usage and seconds."""
    start = time.monotonic()
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    try:
        answer = json.loads(server.request("/v1/completions", body, timeout))
        got = answer["usage"]["completion_tokens"]
        text = answer["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        reason = error.read().decode(errors="replace")[:300]
        return {"fault": f"HTTP {error.code}: {reason}"}
    except (OSError, ValueError, LookupError) as error:
        return {"fault": f"{type(error).__name__}: {error}"}
    result = {"tokens": got, "text": text, "seconds": time.monotonic() - start}
    if got != tokens:
        result["fault"] = f"{got} tokens instead of {tokens}"
    return result


def wave(
    server: Server,
    model: str,
    concurrency: int,
    tokens: int,
    prompt_tokens: int,
    timeout: float,
) -> dict[str, Any]:
    """``concurrency`` completions of random token ids at once."""
    rng = random.Random(concurrency)
    prompts = [
        [rng.randrange(2, 129_000) for _ in range(prompt_tokens)]
        for _ in range(concurrency)
    ]
    start = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(
            pool.map(
                lambda prompt: complete(server, model, prompt, tokens, timeout), prompts
            )
        )
    seconds = time.monotonic() - start
    faults = [answer["fault"] for answer in answers if "fault" in answer]
    done = sum(answer.get("tokens", 0) for answer in answers)
    return {
        "concurrency": concurrency,
        "completions": len(answers),
        "tokens": done,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(done / seconds, 1),
        "faults": faults,
    }


def drive(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Send all requests and stop the server; the result so far."""
    note("starting the server")
    result: dict[str, Any] = {
        "start_seconds": round(server.wait_until_healthy(options.start_timeout), 1)
    }
    models = json.loads(server.request("/v1/models"))
    model = models["data"][0]["id"]
    result["model"] = model
    note(f"{model} is ready after {result['start_seconds']} s")
    text = complete(server, model, "Hello, world", 16, options.timeout)
    result["text_prompt"] = text
    result["waves"] = []
    for concurrency in options.concurrency:
        answered = wave(
            server,
            model,
            concurrency,
            options.tokens,
            options.prompt_tokens,
            options.timeout,
        )
        result["waves"].append(answered)
        note(
            f"concurrency {concurrency}: {answered['tokens']} tokens, "
            f"{answered['tokens_per_second']} tokens/s"
        )
    # Counters are logged on a step some seconds after those before it.
    time.sleep(options.settle)
    complete(server, model, [2, 3, 4], 8, options.timeout)
    note("stopping the server")
    result["exit_code"] = server.stop(options.stop_timeout)
    return result


def verdict(result: dict[str, Any], log: str) -> list[str]:
    """Every fault of a finished run."""
    found = []
    if "fault" in result["text_prompt"]:
        found.append(f"the text prompt: {result['text_prompt']['fault']}")
    for answered in result["waves"]:
        found += [
            f"concurrency {answered['concurrency']}: {fault}"
            for fault in answered["faults"]
        ]
    # Python's servers leave by the signal or by 0 after a clean stop.
    if result["exit_code"] not in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
        found.append(f"the server's exit code was {result['exit_code']}")
    return found + counters.faults(counters.last(log))


def concurrencies(text: str) -> list[int]:
    """``1,8,32`` as a list. Raises ValueError."""
    values = [int(word) for word in text.split(",")]
    if min(values) < 1:
        raise ValueError(text)
    return values


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="smoke.serve_smoke",
        description="Serve a proxy model and check real completions and the "
        "counters of the metadata builds. Options after -- go to serve.sh.",
    )
    parser.add_argument("--proxy", choices=("40", "8"), default="40")
    parser.add_argument(
        "--concurrency", type=concurrencies, default=[1, 8, 32], metavar="1,8,32"
    )
    parser.add_argument("--tokens", type=int, default=128, metavar="N")
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="for the result, which is printed too (docs/schemas/smoke.v2.json)",
    )
    parser.add_argument(
        "--log", type=Path, default=Path("serve.log"), help="the server's log"
    )
    parser.add_argument("--serve", default=str(SERVE), help=argparse.SUPPRESS)
    parser.add_argument("--start-timeout", type=float, default=420, metavar="S")
    parser.add_argument("--stop-timeout", type=float, default=60, metavar="S")
    parser.add_argument(
        "--timeout", type=float, default=120, metavar="S", help="for one completion"
    )
    parser.add_argument(
        "--settle", type=float, default=LOG_INTERVAL_S + 1, help=argparse.SUPPRESS
    )
    parser.add_argument("options", nargs="*", metavar="OPTION", help="for serve.sh")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Serve, ask, stop, and print the result with every fault."""
    command = [options.serve, "--proxy", options.proxy]
    command += ["--python", sys.executable, *options.options]
    result: dict[str, Any] = {"command": command}
    try:
        with serving(command, options.log) as server:
            result |= drive(server, options)
        log = options.log.read_text(errors="replace")
        result["counters"] = counters.last(log)
        result["faults"] = verdict(result, log)
    except (Fault, OSError) as error:
        result["faults"] = [str(error)]
    except KeyboardInterrupt:
        result["faults"] = ["stopped"]
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    for fault in result["faults"]:
        cli.fail(fault)
    return cli.FOUND if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(cli.run(parse, run))
