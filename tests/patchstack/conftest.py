"""Fixtures: checkouts of small stacks on a small synthetic upstream.

Each test gets a copy of its own; making one from nothing would cost seconds.
"""

import http.server
import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "scripts"))

import synthetic


def pytest_configure():
    # A shell's background job ignores Ctrl-C, and what it starts does too: the
    # commands that tests interrupt would go on.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def upstream(tmp_path_factory):
    """The release that the synthetic stacks are made for."""
    return synthetic.make_upstream(tmp_path_factory.mktemp("upstream"), "9.9.0")


@pytest.fixture(scope="session")
def _bare(tmp_path_factory, upstream):
    return synthetic.make_checkout(tmp_path_factory.mktemp("bare"), upstream)


@pytest.fixture(scope="session")
def _stacked(tmp_path_factory, _bare):
    """Applied, with two patches, all in git."""
    checkout = _bare.copy(tmp_path_factory.mktemp("stacked"))
    checkout.ok("apply")
    checkout.edit(
        "vllm/engine.py",
        "    return step\n\n\ndef stop",
        "    return step + 1\n\n\ndef stop",
    )
    checkout.ok("refresh", "step-by-two", *synthetic.header("Step by two"))
    checkout.edit("vllm/layers.py", "WIDTH = 8", "WIDTH = 16")
    checkout.ok("refresh", "wide-layers", *synthetic.header("Widen the layers"))
    checkout.commit()
    return checkout


@pytest.fixture
def bare(_bare, tmp_path):
    """A checkout without patches, not applied."""
    return _bare.copy(tmp_path / "bare")


@pytest.fixture
def stacked(_stacked, tmp_path):
    """A checkout with two patches, applied and committed."""
    return _stacked.copy(tmp_path / "stacked")


@pytest.fixture
def mount():
    """Runs `mount OPTIONS... FOLDER`; needs root."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    mounted = []

    def run(*command):
        done = subprocess.run(["mount", *command], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        if command[-1] not in mounted:
            mounted.append(command[-1])

    yield run
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def index(tmp_path, upstream):
    """URL of a package index that has the release."""
    page = tmp_path / "index" / "simple" / "vllm"
    page.mkdir(parents=True)
    links = ""
    for archive in (upstream.sdist, upstream.wheel):
        shutil.copy2(archive, page)
        links += f'<a href="{archive.name}">{archive.name}</a>\n'
    (page / "index.html").write_text(f"<html><body>{links}</body></html>")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = partial(Quiet, directory=str(tmp_path / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()
