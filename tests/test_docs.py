"""What README.md and docs/ point at is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import markdown
from tests.test_imports import MAY_IMPORT, PACKAGES, is_module

ARCHITECTURE = markdown.ROOT / "docs" / "architecture.md"


@pytest.mark.parametrize("path", markdown.FILES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    local = [link for link in markdown.links(path) if not re.match(r"\w+:", link)]
    assert not [link for link in local if not (path.parent / link).exists()]


@pytest.mark.parametrize("path", markdown.FILES, ids=lambda path: path.name)
def test_paths_in_code_style_exist(path: Path) -> None:
    tops = "|".join([*PACKAGES, "tests", "scripts", "docs"])
    named = re.findall(rf"`((?:{tops})/[\w./]*)`", path.read_text())
    assert not [name for name in named if not (markdown.ROOT / name).exists()]


def test_architecture_walks_through_the_whole_engine() -> None:
    engine = {path.name for path in (markdown.ROOT / "jaxinfer" / "engine").glob("*.py")} - {"__init__.py"}
    linked = {Path(link).name for link in markdown.links(ARCHITECTURE)}
    assert engine <= linked


def test_architecture_states_the_rule_that_is_enforced() -> None:
    section = ARCHITECTURE.read_text().split("## The import rule")[1]
    rows = dict(re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE))
    named = {module for cell in rows for module in re.findall(r"`([\w.]+)`", cell)}
    assert named == {module for module in MAY_IMPORT if module != "convert.__main__"} | {"tests", "scripts"}
    for module in ("jaxinfer.parameters", "convert"):
        allowed = {name for name in MAY_IMPORT[module] if is_module(name)}
        assert set(re.findall(r"`([\w.]+)`", rows[f"`{module}`"])) == allowed
