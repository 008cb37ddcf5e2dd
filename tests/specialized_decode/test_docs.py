"""What the pages say of deployments is what the code does, and their links lead
somewhere.
"""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
from vllm.config import KVTransferConfig
from vllm.config.speculative import MTPModelTypes, SpeculativeMethod
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.models.deepseek_v41.nvidia.specialized_decode.deployment import (
    DEVICE_METADATA_REQUIREMENTS,
    HOPPER_REQUIREMENTS,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.key import Eager
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata_readers import (
    SERVED_CONNECTORS,
    reading_connector,
    reading_speculator,
)

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENTS = ROOT / "docs" / "deployments.md"
TESTS = Path(__file__).parent
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "ci").rglob("*.md"),
        *(ROOT / "vllm/vllm/models/deepseek_v41/nvidia/specialized_decode").rglob(
            "*.md"
        ),
    }
)


def sections(page: Path) -> dict[str, str]:
    """The text below each heading of the second level, by heading."""
    _, *texts = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    return dict(text.split("\n", 1) for text in texts)


def rows(heading: str) -> list[list[str]]:
    """The cells of the rows of the table in a section of the page of deployments,
    without its head.
    """
    lines = re.findall(r"^\| (.*) \|$", sections(DEPLOYMENTS)[heading], re.MULTILINE)
    return [line.split(" | ") for line in lines[2:]]


@pytest.mark.parametrize(
    ("heading", "requirements"),
    [
        ("What device metadata need", DEVICE_METADATA_REQUIREMENTS),
        ("What Hopper kernels need", HOPPER_REQUIREMENTS),
    ],
)
def test_every_requirement_has_its_row_and_no_other(heading, requirements):
    reasons = {need: reason for need, reason, *_ in rows(heading)}
    assert reasons.keys() == {each.need for each in requirements}
    for each in requirements:
        if isinstance(each.reason, str):
            assert reasons[each.need].startswith(each.reason)


def test_every_reason_for_an_eager_build_is_there():
    assert all(f"(`{why}`)" in DEPLOYMENTS.read_text() for why in Eager)


def test_connectors_are_listed_as_the_code_serves_them(packages):
    says = {name: steps for name, steps, *_ in rows("KV connectors")}
    worst, unknown = "MultiConnector", "another, or one put in the place of these"
    assert says.pop(worst) == "as its worst member"
    assert says.pop(unknown) == "stock"
    served = {
        name: reading_connector(KVTransferConfig(kv_connector=name, kv_role="kv_both"))
        for name in KVConnectorFactory._registry
        if name != worst
    }
    # Of a package of its own, which names it by module and class.
    assert "umbp.connector.UMBPStoreConnector" in SERVED_CONNECTORS
    served["UMBPStoreConnector"] = None
    assert says == {
        name: "in graph" if why is None else "stock" for name, why in served.items()
    }


def test_speculators_are_listed_as_the_code_serves_them():
    says = {name: steps for name, steps, *_ in rows("Speculative decoding")}
    unknown = says.pop("suffix, custom_class, another")
    # Their methods become mtp.
    of_models = set(get_args(MTPModelTypes)) - {"mtp"}
    methods = set(get_args(SpeculativeMethod)) - of_models
    says |= dict.fromkeys(("suffix", "custom_class"), unknown)
    assert says == {
        method: "in graph" if reading_speculator(method) is None else "stock"
        for method in methods
    }


def test_no_feature_without_a_test():
    """A row of deployments or steps names what shows it."""
    for heading, test in (
        ("GPUs", 3),
        ("What device metadata need", 2),
        ("Parallelism, adapters, memory", 3),
        ("Steps", 3),
        ("Speculative decoding", 3),
    ):
        for row in rows(heading):
            assert "::test_" in row[test], row[0]


def names_in(file: Path) -> set[str]:
    """The names of the tests that pytest collects from ``file``."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}::{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef)
            }
    return names


def test_every_test_that_a_page_names_is_there():
    named = set(re.findall(r"`(test_\w+\.py)::([\w:]+)`", DEPLOYMENTS.read_text()))
    assert len(named) > 20
    for file, test in named:
        assert test in names_in(TESTS / file), f"{file}::{test}"


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of ``page``."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings
    }


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT)).replace("/", "-")
)
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
