"""What the package says of itself in several places is the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomllib

import jachess_ext as jx
from jachess_ext._io import _DISTRIBUTIONS, NEEDS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def in_extra(name: str) -> set[str]:
    """Return the distributions of an extra, and of those that it names."""
    names: set[str] = set()
    for requirement in PROJECT["optional-dependencies"][name]:
        inner = re.fullmatch(r"jachess-ext\[(\w+)\]", requirement)
        names |= in_extra(inner[1]) if inner else {re.split(r"[><=~\[ ]", requirement)[0]}
    return names


@pytest.mark.parametrize("part", NEEDS)
def test_what_a_part_needs_is_in_the_extra(part: str) -> None:
    names = {_DISTRIBUTIONS.get(module, module) for module in NEEDS[part]}
    assert names <= in_extra("demo")


def test_one_version() -> None:
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {jx.__version__}\n" in citation


def test_dir_is_what_is_promised() -> None:
    assert [name for name in dir(jx) if not name.startswith("__")] == sorted(jx.__all__)
