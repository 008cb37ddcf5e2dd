"""Accepting a rebase: the stack's own files rewritten for the new release.

All or nothing: what is written is proven first, the old files are kept aside
until the tree is applied, and any fault puts them back.
"""

import argparse
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import apply, base, checks, fetch, needs, patches, stack, tree, undo
from .base import Archive
from .carry import Carried
from .errors import StackError
from .files import read_text
from .history import History
from .stack import Stack
from .trial import Trial


@dataclass(frozen=True)
class Acceptance:
    """A trial that becomes the stack; needs the lock.

    `pins` are the sha256 of what gives way to us, None for what the release does
    not have.
    """

    loaded: Stack
    history: History
    trial: Trial
    sdist: Path
    pins: Mapping[str, str | None]
    offline: bool

    def write(self) -> list[str]:
        """Write the stack for the trial's release and apply it.

        Returns what was done, a line each.
        """
        version = self.trial.releases.new_version
        files = self._rewritten()
        places = self.loaded.places
        with undo.on_failure(
            places, [*files, *(f"patches/{it}" for it in self.loaded.raw)]
        ):
            for path, data in files.items():
                stack.write(places.repo / path, data)
            for name in self.loaded.raw:
                if f"patches/{name}" not in files:
                    (places.patches / name).unlink()
            options = argparse.Namespace(
                source=str(self.sdist),
                wheel=None,
                machine=platform.machine(),
                offline=self.offline,
                discard_edits=False,
            )
            try:
                apply.apply(stack.load(places.repo), options)
            finally:
                tree.clean(places)
        requirements = f"vllm/{needs.FILE}"
        done = [
            f"{base.FILE}: vLLM {version}",
            f"vllm/{checks.VERSION_FILE}: {checks.own_version(places.tree)}",
        ]
        if requirements in files:
            lock = "lock them (ci/requirements/lock.sh)"
            done.append(f"{requirements}: requirements: {lock}")
        gone = [it for it in self.trial.patches if it.new is None]
        done += [
            f"patches/{it.new.name}: {it.outcome}"
            for it in self.trial.patches
            if it.new
        ]
        done += [f"patches/{it.old.name}: taken off the series" for it in gone]
        return done

    def _rewritten(self) -> dict[str, bytes]:
        """Every file that states the base, by path in the repository."""
        carried = [it for it in self.trial.patches if it.new]
        text = self._base()
        self._prove(carried, base.parse(text))
        series = self.loaded.places.patches / stack.SERIES
        old_series = series.read_text() if series.exists() else ""
        names = [it.new.name for it in carried if it.new]
        version_file = self.loaded.places.tree / checks.VERSION_FILE
        files = {
            base.FILE: text.encode(),
            f"patches/{stack.SERIES}": stack.with_series(
                old_series, names, self.loaded.raw
            ).encode(),
            f"vllm/{checks.VERSION_FILE}": _with_version(
                version_file.read_text(), self.trial.releases.new_version
            ).encode(),
        }
        added, removed = self.trial.needs_added, self.trial.needs_removed
        if needs.FILE in self.loaded.own and (added or removed):
            project = read_text(self.loaded.places.tree / needs.FILE)
            files[f"vllm/{needs.FILE}"] = needs.rewritten(
                project, added, removed
            ).encode()
        faults = []
        for it in carried:
            assert it.new is not None
            data = it.new.to_bytes()
            if data != it.old.to_bytes():
                parsed = patches.parse(it.new.name, data)
                budget = self.loaded.base.budget(it.new.topic)
                faults += patches.lint(parsed, data, budget)
            files[f"patches/{it.new.name}"] = data
        if faults:
            raise StackError("; ".join(faults))
        return files

    def _base(self) -> str:
        """`upstream.toml` for the new release."""
        version = self.trial.releases.new_version
        wheels = {
            machine: fetch.find_wheel(version, machine, self.offline)
            for machine in self.loaded.base.wheels
        }
        archive = Archive(f"vllm-{version}.tar.gz", base.file_sha256(self.sdist))
        released = self.history.files(self.trial.releases.new)
        touches = {
            path: stack.sha256(self.history.blob(released[path][1]))
            for it in self.trial.patches
            if it.new
            for path in it.new.touches
        }
        text = (self.loaded.places.repo / base.FILE).read_text()
        text = base.with_release(text, version, archive, wheels)
        text = base.with_touches(text, touches)
        for path, digest in self.pins.items():
            if digest is None:
                text = base.without_pin(text, path)
            else:
                text = base.with_pin(text, path, digest)
        for it in self.trial.patches:
            if it.new is None and it.old.topic in self.loaded.base.budgets:
                text = base.without_budget(text, it.old.topic)
        found = base.parse(text)
        stated = {pin.path: pin.sha256 for pin in (*found.replaces, *found.removes)}
        wanted = {path: digest for path, digest in self.pins.items() if digest}
        if (
            (found.version, found.sdist, found.touches) != (version, archive, touches)
            or found.wheels != wheels
            or stated != wanted
        ):
            raise StackError(
                f"{base.FILE} is not in the form it came in, so it cannot be "
                "rewritten: put it back into that form (git log -p upstream.toml)"
            )
        return text

    def _prove(self, carried: list[Carried], new_base: base.Base) -> None:
        """The carried patches, applied strictly, must make what the trial made."""
        series = [it.new for it in carried if it.new]
        built = self.history.build(self.trial.releases.new, new_base, series)
        last = carried[-1].new_commit if carried else None
        if last and self.history.tree_of(built.head) != self.history.tree_of(last):
            raise StackError("the new patches do not make the tree: please report this")


def _with_version(text: str, release: str) -> str:
    """The version file for a release; our count starts again at 1."""

    def rewrite(found: re.Match[str]) -> str:
        local = found[1].partition("+")[2]
        name = re.sub(r"\.\d+$", "", local)
        return f'__version__ = "{release}+{name}.1"'

    return re.sub(r'^__version__ = "(.*)"$', rewrite, text, count=1, flags=re.MULTILINE)
