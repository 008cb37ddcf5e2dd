"""The package index, asked as PEP 503 and 691 say, with pip's own settings.

Of pip's settings only those count that say where packages are; none that it has for
installing can do harm, since nothing is installed.
"""

import base64
import json
import os
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path
from typing import Any

from ..errors import StackError
from ..progress import Ticker, note

_PROJECT = "vllm"
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_CHECK = "check the network or pip's index settings"
_TIMEOUT_S = 60
# pip as it is installed, else as Python brings it for new environments.
_PIP = """
import pathlib, sys
try:
    import pip
except ImportError:
    import ensurepip
    bundled = pathlib.Path(ensurepip.__file__).with_name("_bundled")
    sys.path += map(str, bundled.glob("pip-*.whl"))
from pip._internal.models.index import PyPI
print(PyPI.simple_url, flush=True)
from pip._internal.cli.main import main
main(["config", "list"])
"""


@dataclass(frozen=True)
class Link:
    """A file that the index offers."""

    name: str
    url: str
    sha256: str | None
    """None where the index does not state it."""


class Index:
    """The places that pip would look at for vLLM."""

    @cached_property
    def settings(self) -> dict[str, list[str]]:
        """What pip's settings say of where packages are: values by name."""
        deaf = ("PYTHON", "PIP_QUIET", "PIP_VERBOSE")
        env = {k: v for k, v in os.environ.items() if not k.startswith(deaf)}
        done = subprocess.run(
            [sys.executable, "-c", _PIP],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env=env,
        )
        default, _, listed = done.stdout.partition("\n")
        if done.returncode or not default:
            raise StackError(
                f"{sys.executable} has no pip, whose settings say where the package "
                "index is: install it (python3-pip), or give the files: "
                "scripts/apply.sh --from SDIST --wheel WHEEL"
            )
        found = {"index-url": [default]}
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            scope, _, key = name.rpartition(".")
            # pip's order of precedence: the environment comes last and wins.
            if scope in ("global", "download", ":env:"):
                found[key] = value.strip("'\"").split()
        return found

    def offers(self) -> dict[str, Link]:
        """Return the files of all releases, by name."""
        settings = self.settings
        pages = [*settings.get("find-links", [])]
        if settings.get("no-index", ["0"])[0].lower() not in ("1", "true", "yes", "on"):
            indexes = settings["index-url"] + settings.get("extra-index-url", [])
            pages += [f"{url.rstrip('/')}/{_PROJECT}/" for url in indexes]
        elif not pages:
            raise StackError(
                "pip is set to use no index (no-index): give the files: "
                "scripts/apply.sh --from SDIST --wheel WHEEL"
            )
        note(f"asking the package index for {_PROJECT}")
        found: dict[str, Link] = {}
        for page in pages:
            for link in self._links(page):
                found.setdefault(link.name, link)
        return found

    def fetch(self, link: Link, into: Path) -> None:
        """Write a file of the index to the new file `into`."""
        note(f"fetching {link.name}")
        ticker = Ticker(f"fetching {link.name}")
        try:
            with self._open(link.url) as answer, into.open("xb") as out:
                while data := answer.read(1 << 20):
                    out.write(data)
                    ticker.tick(f"{out.tell() >> 20} MiB")
        except (HTTPException, urllib.error.URLError, TimeoutError) as fault:
            raise StackError(f"cannot fetch {link.name}: {fault}: {_CHECK}") from None

    def _links(self, page: str) -> Iterator[Link]:
        parts = urllib.parse.urlsplit(page)
        if parts.scheme in ("", "file"):
            folder = Path(urllib.request.url2pathname(parts.path)).absolute()
            if (folder / "index.html").is_file():
                text = (folder / "index.html").read_bytes()
                yield from _anchors(text, f"{folder.as_uri()}/")
            elif folder.is_dir():
                for place in sorted(folder.iterdir()):
                    yield Link(place.name, place.as_uri(), None)
            return
        try:
            with self._open(page) as answer:
                data = answer.read()
                kind, base = answer.headers.get_content_type(), answer.url
        except (HTTPException, OSError) as fault:
            if isinstance(fault, urllib.error.HTTPError) and fault.code == 404:
                return
            raise StackError(
                f"cannot ask the package index on {parts.hostname}: {fault}: {_CHECK}"
            ) from None
        if not kind.endswith("json"):
            yield from _anchors(data, base)
            return
        for file in json.loads(data)["files"]:
            if not file.get("yanked"):
                url = urllib.parse.urljoin(base, file["url"])
                yield Link(file["filename"], url, file["hashes"].get("sha256"))

    def _open(self, url: str) -> Any:
        """Open a URL; credentials in it are for its own host alone."""
        parts = urllib.parse.urlsplit(url)
        plain = parts._replace(netloc=parts.netloc.rpartition("@")[2])
        request = urllib.request.Request(
            urllib.parse.urlunsplit(plain), headers={"Accept": _ACCEPT}
        )
        if parts.username is not None:
            pair = f"{parts.username}:{parts.password or ''}"
            token = base64.b64encode(urllib.parse.unquote(pair).encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {token}")
        certificates = next(iter(self.settings.get("cert", [])), None)
        context = ssl.create_default_context(cafile=certificates)
        if {parts.hostname, plain.netloc}.intersection(
            self.settings.get("trusted-host", [])
        ):
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        handlers: list[urllib.request.BaseHandler] = [
            urllib.request.HTTPSHandler(context=context)
        ]
        for proxy in self.settings.get("proxy", []):
            proxies = {"http": proxy, "https": proxy}
            handlers.append(urllib.request.ProxyHandler(proxies))
        return urllib.request.build_opener(*handlers).open(request, timeout=_TIMEOUT_S)


def _anchors(page: bytes, base: str) -> Iterator[Link]:
    """The files that an HTML page links to."""
    reader = _Anchors()
    reader.feed(page.decode(errors="replace"))
    for href in reader.links:
        url, _, fragment = urllib.parse.urljoin(base, href).partition("#")
        name = urllib.parse.unquote(url.rpartition("/")[2])
        digest = re.search(r"sha256=([0-9a-f]{64})", fragment)
        yield Link(name, url, digest[1] if digest else None)


@dataclass
class _Anchors(HTMLParser):
    links: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "a" and named.get("href") and "data-yanked" not in named:
            self.links.append(named["href"] or "")
