"""Drift: each kind of change in what our code takes from upstream, and none else."""

import pytest
from patchstack.drift import compare as drift
from patchstack.drift.symbols import SourceTree
from patchstack.drift.uses import Code
from patchstack.errors import StackError

UPSTREAM = {
    "vllm/__init__.py": "",
    "vllm/config/__init__.py": "from .parts import *\nfrom .parts import Config\n",
    "vllm/config/parts.py": """\
class Parallel:
    size: int = 1

    @property
    def is_split(self) -> bool:
        return self.size > 1


class Config:
    parallel: Parallel
    seed: int | None = None

    def __post_init__(self):
        self.cache = {}
""",
    "vllm/tools.py": '''\
def round_up(x: int, to: int = 8) -> int:
    """Round."""
    # Up.
    return -(-x // to) * to


def get_config() -> "Config":
    return Config()


class Graph:
    shape: int
    name: str = ""

    def replay(self):
        return self.shape


from vllm.config import Config
''',
    "vllm/state.py": """\
from vllm.tools import Graph


class Base:
    def __init__(self, config):
        self.config = config

    def prepare(self, batch):
        return batch

    def finish(self):
        return None


class State(Base):
    def __init__(self, config):
        super().__init__(config)
        self.graph = Graph(1)

    def step(self, batch):
        return self.prepare(batch)
""",
    "vllm/builders.py": """\
class Metadata:
    lens: list


class Builder:
    pass


class MyMetadataBuilder(Builder[Metadata]):
    def build(self):
        return Metadata([])


class Backend:
    @staticmethod
    def get_builder_cls():
        return MyMetadataBuilder
""",
}

OURS = """\
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm.builders import MyMetadataBuilder
from vllm.config import Config
from vllm.state import State
from vllm.tools import Graph, get_config, round_up

RECORDED = {MyMetadataBuilder: 1}


@dataclass
class Need:
    what: str
    met: Callable[[Config], bool]


NEEDS = (Need("one", lambda it: not it.parallel.is_split),)


class OurState(State):
    def __init__(self, config: Config):
        super().__init__(config)
        self._ours = round_up(3)

    def step(self, batch):
        self.finish()
        return self.graph.replay()


def names(graphs: Iterable[Graph]) -> list[str]:
    return [graph.name for graph in graphs]


def fresh():
    return Graph(2), get_config().seed
"""


def compare(*edits, ours=OURS, lines=None, path="vllm/ours.py"):
    """(level, symbol, change) of each finding after edits of upstream."""
    changed = dict(UPSTREAM)
    for file, old, new in edits:
        assert old in changed[file]
        changed[file] = changed[file].replace(old, new)
    code = Code(path, ours, lines, "x.patch" if lines else None)
    found = drift.compare([code], ["vllm/ours.py"], tree(UPSTREAM), tree(changed))
    return [(it.level.value, it.symbol, it.change) for it in found]


def tree(files):
    return SourceTree(lambda path: files[path].encode() if path in files else None)


def test_nothing_has_changed():
    assert compare() == []


def test_what_we_do_not_use_may_change():
    assert (
        compare(
            ("vllm/tools.py", '"""Round."""', '"""Round up."""'),
            ("vllm/tools.py", "# Up.", "# To a multiple."),
            ("vllm/config/parts.py", "self.cache = {}", "self.cache = []"),
            (
                "vllm/config/parts.py",
                "size: int = 1",
                "size: int = 1\n    rank: int = 0",
            ),
        )
        == []
    )


STATE = "vllm.state.State"
CHANGES = {
    "a function is gone": (
        ("vllm/tools.py", "def round_up", "def ceil_to"),
        ("breaking", "vllm.tools.round_up", "gone; ceil_to has its body"),
    ),
    "an argument": (
        ("vllm/tools.py", "to: int = 8)", "to: int)"),
        (
            "breaking",
            "vllm.tools.round_up",
            "was (x: int, to: int=8) -> int, is (x: int, to: int) -> int",
        ),
    ),
    "a body": (
        ("vllm/tools.py", "-(-x // to) * to", "(x + to - 1) // to * to"),
        ("changed", "vllm.tools.round_up", "its body changed"),
    ),
    "a decorator": (
        ("vllm/tools.py", "def round_up", "@cache\ndef round_up"),
        ("breaking", "vllm.tools.round_up", "its decorators were none, are cache"),
    ),
    "a kind": (
        (
            "vllm/tools.py",
            "def round_up(x: int, to: int = 8) -> int:",
            "class round_up:",
        ),
        ("breaking", "vllm.tools.round_up", "was a function, is a class"),
    ),
    "a method we override": (
        ("vllm/state.py", "def step(self, batch)", "def step(self, batch, dry)"),
        ("breaking", f"{STATE}.step", "was (self, batch), is (self, batch, dry)"),
    ),
    "a method we override is renamed": (
        ("vllm/state.py", "def step", "def run"),
        ("breaking", f"{STATE}.step", "gone; run has its body"),
        ("changed", STATE, "new: run"),
    ),
    "an inherited method we call": (
        ("vllm/state.py", "return None", "return 1"),
        ("changed", f"{STATE}.finish", "its body changed"),
    ),
    "a base class": (
        ("vllm/state.py", "class State(Base)", "class State(Base, Mixin)"),
        ("breaking", STATE, "its base classes were Base, are Base, Mixin"),
    ),
    "an inherited method we do not name": (
        ("vllm/state.py", "return batch\n", "return batch[:]\n"),
        ("changed", STATE, "changed inside: prepare"),
    ),
    "an attribute in our way": (
        (
            "vllm/state.py",
            "self.graph = Graph(1)",
            "self.graph = Graph(1)\n        self._ours = 0",
        ),
        (
            "breaking",
            f"{STATE}._ours",
            "new, and our OurState defines it too",
        ),
        ("changed", f"{STATE}.__init__", "its body changed"),
    ),
    "a property behind two attributes, in a lambda": (
        ("vllm/config/parts.py", "self.size > 1", "self.size >= 1"),
        ("changed", "vllm.config.parts.Parallel.is_split", "its body changed"),
    ),
    "a field of what a function returns": (
        ("vllm/config/parts.py", "seed: int | None = None", "seed: int = 0"),
        (
            "breaking",
            "vllm.config.parts.Config.seed",
            "was : int | None, is : int",
        ),
        ("changed", "vllm.config.parts.Config.seed", "its value changed"),
    ),
    "a field that a loop reads": (
        ("vllm/tools.py", 'name: str = ""', 'label: str = ""'),
        ("breaking", "vllm.tools.Graph.name", "gone"),
        (
            "breaking",
            "vllm.tools.Graph",
            "its constructor was (shape: int, name: str = ''), "
            "is (shape: int, label: str = '')",
        ),
    ),
    "a constructor that we call": (
        ("vllm/tools.py", "shape: int\n", "shape: int\n    pool: int\n"),
        (
            "breaking",
            "vllm.tools.Graph",
            "its constructor was (shape: int, name: str = ''), "
            "is (shape: int, pool: int, name: str = '')",
        ),
    ),
    "a method of an attribute that is inherited": (
        ("vllm/tools.py", "return self.shape", "return -self.shape"),
        ("changed", "vllm.tools.Graph.replay", "its body changed"),
    ),
    "a recorded build": (
        ("vllm/builders.py", "Metadata([])", "Metadata([0])"),
        ("changed", "vllm.builders.MyMetadataBuilder", "changed inside: build"),
    ),
    "a new builder": (
        ("vllm/builders.py", "return MyMetadataBuilder", "return OtherMetadataBuilder"),
        (
            "breaking",
            "vllm.builders.OtherMetadataBuilder",
            "a new builder, with no declaration",
        ),
    ),
    "a new metadata field": (
        ("vllm/builders.py", "lens: list", "lens: list\n    rows: int"),
        ("changed", "vllm.builders.Metadata.rows", "a new metadata field, rows: int"),
    ),
    "a metadata field is gone": (
        ("vllm/builders.py", "lens: list", "pass"),
        ("breaking", "vllm.builders.Metadata.lens", "the metadata field is gone"),
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change(case):
    edit, *findings = CHANGES[case]
    assert sorted(compare(edit)) == sorted(findings)


def test_a_module_is_gone():
    without = {path: it for path, it in UPSTREAM.items() if path != "vllm/state.py"}
    found = drift.compare(
        [Code("vllm/ours.py", OURS)], ["vllm/ours.py"], tree(UPSTREAM), tree(without)
    )
    assert [(it.symbol, it.change) for it in found] == [
        ("vllm.state", "the module is gone")
    ]


def test_a_definition_may_move_behind_its_import():
    moved = dict(UPSTREAM)
    moved["vllm/config/new.py"] = moved["vllm/config/parts.py"]
    moved["vllm/config/__init__.py"] = "from .new import *\nfrom .new import Config\n"
    ours = "from vllm.config import Config, Parallel\n"
    code = Code("vllm/ours.py", ours)
    assert drift.compare([code], ["vllm/ours.py"], tree(UPSTREAM), tree(moved)) == []


def test_modules_of_ours_are_not_upstreams():
    ours = "from vllm.ours import thing\n"
    assert compare(("vllm/tools.py", "def round_up", "def up"), ours=ours) == []


PATCHED = UPSTREAM["vllm/state.py"].replace(
    "        return self.prepare(batch)",
    "        self.finish()\n        return self.prepare(batch)",
)


def test_only_the_lines_that_a_patch_adds_count():
    added = {1 + PATCHED.splitlines().index("        self.finish()")}
    options = {"ours": PATCHED, "lines": added, "path": "vllm/state.py"}
    assert compare(("vllm/state.py", "return None", "return 1"), **options) == [
        ("changed", f"{STATE}.finish", "its body changed")
    ]
    assert compare(("vllm/state.py", "return batch\n", "return 1\n"), **options) == []
    edit = ("vllm/state.py", "return self.prepare(batch)", "return batch")
    assert compare(edit, **options) == [
        ("changed", f"{STATE}.step", "its body around our lines changed")
    ]


@pytest.mark.parametrize(
    "imported",
    ["import vllm.tools as tools", "from vllm import tools", "from . import tools"],
)
def test_a_name_that_is_taken_from_a_module(imported):
    ours = f"{imported}\n\n\ndef up():\n    return tools.round_up(3)\n"
    edit = ("vllm/tools.py", "def round_up", "def up")
    assert compare(edit, ours=ours) == [
        ("breaking", "vllm.tools.round_up", "gone; up has its body")
    ]


def test_own_code_that_is_broken():
    with pytest.raises(StackError) as fault:
        compare(ours="def (:\n")
    assert str(fault.value) == (
        "vllm/vllm/ours.py is not valid Python at line 1: mend it"
    )


def test_findings_name_every_place_of_use():
    code = Code("vllm/ours.py", OURS)
    gone = dict(UPSTREAM)
    gone["vllm/tools.py"] = gone["vllm/tools.py"].replace("def round_up", "def up")
    found = drift.compare([code], ["vllm/ours.py"], tree(UPSTREAM), tree(gone))
    assert found[0].used_by == (
        "vllm/ours.py: OurState.__init__",
        "vllm/ours.py: top level",
    )


def test_what_this_python_cannot_read_is_no_finding():
    broken = UPSTREAM | {"vllm/tools.py": "def (:\n"}
    code = Code("vllm/ours.py", "from vllm.tools import round_up\n")
    assert drift.compare([code], ["vllm/ours.py"], tree(broken), tree(broken)) == []
