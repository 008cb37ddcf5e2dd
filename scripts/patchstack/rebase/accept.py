"""Accepting a rebase: the stack's own files rewritten for the new release.

All or nothing: what is written is proven first, the old files are kept aside
until the tree is applied, and any fault puts them back.
"""

import platform
import shutil
from dataclasses import replace
from pathlib import Path

from ..files import file_sha256, read_text
from ..release import fetch
from ..stack import Stack, load, rewrite, version
from ..stack import base as pins
from ..stack.base import Archive, Base, Pin
from ..stack.rewrite import Files
from ..tree import make, place
from ..tree.make import Wanted
from . import needs
from .trial import Trial
from .work import Status, Work


def accept(work: Work, tried: Trial, offline: bool) -> list[str]:
    """Write the stack for the trial's release and apply it; needs the lock.

    Returns what was done, a line each.
    """
    work.refuse_unready(tried)
    stack = work.stack
    base = _base(stack.base, work.status, offline)
    patches = [it.new for it in tried.patches if it.new]
    files = rewrite.changes(stack, patches, base)
    if base.version != stack.base.version:
        files |= _own_files(stack, tried)
    machine = platform.machine()
    # Before anything is written: it may not be there.
    wheel = fetch.fetch(base.wheel(machine), offline)
    wanted = Wanted(machine, work.status.place, str(wheel), offline)
    write_and_apply(stack, files, wanted)
    shutil.rmtree(work.folder)
    return _done(tried, files, stack)


def write_and_apply(stack: Stack, files: Files, wanted: Wanted) -> None:
    """Write files of the stack and make the tree of it, or do neither."""
    places = stack.places
    with rewrite.rewriting(places, files):
        try:
            make.apply(load(places.repo), wanted)
        finally:
            place.clean(places)


def _base(old: Base, status: Status, offline: bool) -> Base:
    """The pins for the new release."""
    if status.version == old.version:
        return old

    def pinned(entries: tuple[Pin, ...]) -> tuple[Pin, ...]:
        digests = ((it, status.pins[it.path]) for it in entries)
        return tuple(replace(it, sha256=digest) for it, digest in digests if digest)

    name = f"vllm-{status.version}.tar.gz"
    return Base(
        version=status.version,
        sdist=Archive(name, file_sha256(Path(status.place))),
        wheels={
            machine: fetch.find_wheel(status.version, machine, offline)
            for machine in old.wheels
        },
        replaces=pinned(old.replaces),
        removes=pinned(old.removes),
        budgets=old.budgets,
    )


def _own_files(stack: Stack, tried: Trial) -> dict[str, bytes | None]:
    """Own files that state the release."""
    text = read_text(stack.places.tree / version.FILE)
    release = version.for_release(text, tried.releases.new_version)
    files: dict[str, bytes | None] = {f"vllm/{version.FILE}": release.encode()}
    added, removed = tried.needs_added, tried.needs_removed
    if needs.FILE in stack.own and (added or removed):
        project = read_text(stack.places.tree / needs.FILE)
        files[f"vllm/{needs.FILE}"] = needs.rewritten(project, added, removed).encode()
    return files


def _done(tried: Trial, files: Files, stack: Stack) -> list[str]:
    done = []
    if pins.FILE in files:
        done.append(f"{pins.FILE}: vLLM {tried.releases.new_version}")
    if f"vllm/{version.FILE}" in files:
        done.append(f"vllm/{version.FILE}: {version.read(stack.places.tree)}")
    if f"vllm/{needs.FILE}" in files:
        lock = "lock them (ci/requirements/lock.sh)"
        done.append(f"vllm/{needs.FILE}: requirements: {lock}")
    for it in tried.patches:
        outcome = it.outcome if it.new else "taken off the series"
        done.append(f"patches/{it.old.name}: {outcome}")
    return done
