"""What the package says of itself in several places is the same."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

import jachess_ext as jx
from jachess_ext._io import DISTRIBUTIONS, TRAINING
from jachess_ext.lab import cli
from jachess_ext.ops.library import NAMESPACE
from python_tests.snippets import blocks

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def in_extra(name: str) -> set[str]:
    """Return the distributions of an extra, and of those that it names."""
    names: set[str] = set()
    for requirement in PROJECT["optional-dependencies"][name]:
        inner = re.fullmatch(r"jachess-ext\[(\w+)\]", requirement)
        names |= in_extra(inner[1]) if inner else {re.split(r"[><=~\[ ]", requirement)[0]}
    return names


def test_the_extra_has_what_commands_and_training_need() -> None:
    modules = {
        *TRAINING,
        *(module for needed in cli.modules_needed().values() for module in needed),
    }
    assert {DISTRIBUTIONS.get(module, module) for module in modules} <= in_extra("demo")


@pytest.mark.parametrize("name", sorted((ROOT / "docs" / "tutorials").glob("*.md")), ids=str)
def test_tutorials_name_what_they_need_before_their_first_block(name: Path) -> None:
    """The extra that has a library, or the command that installs it."""
    head = name.read_text(encoding="utf-8").partition("```python")[0]
    named = {*re.findall(r"pip install (\w+)`", head)}
    for extra in re.findall(r"the extra `(\w+)`", head):
        named |= in_extra(extra)
    needed = {
        module.partition(".")[0]
        for code, _ in blocks(name)
        for module in re.findall(r"^ *(?:import|from) ([\w.]+)", code, re.MULTILINE)
    }
    optional = needed - {"jachess_ext", "torch", "numpy"} - {*sys.stdlib_module_names}
    assert optional <= named


def test_one_version() -> None:
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {jx.__version__}\n" in citation
    for name in ("install.md", "embedding.md"):
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        named = re.findall(r"\d+\.\d+\.\d+\.dev\d+", page)
        assert named and {*named} == {jx.__version__}


def _strings(tree: ast.AST) -> Iterator[str]:
    """Yield the string constants of a file, without its docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_namespace_of_the_operators_stands_once() -> None:
    whole, parts = [], []
    for path in (ROOT / "jachess_ext").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        strings = [*_strings(tree)]
        parts += [path for text in strings if text.startswith("jachess::")]
        parts += [
            path
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops.jachess"
        ]
        whole += [path.name for text in strings if path.parent.name == "ops" and text == NAMESPACE]
    assert not parts and whole == ["library.py"]
    registered = {
        name
        for path in (ROOT / "csrc").rglob("*.cpp")
        for name in re.findall(
            r"TORCH_LIBRARY(?:_IMPL)?\((\w+), ", path.read_text(encoding="utf-8")
        )
    }
    assert registered == {NAMESPACE}


def test_dir_is_what_is_promised() -> None:
    assert [name for name in dir(jx) if not name.startswith("__")] == sorted(jx.__all__)


ON_PAGES = sorted(
    entry
    for page in (ROOT / "docs" / "reference").glob("*.md")
    for entry in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
)


def _listed() -> list[object]:
    """Return what the reference's pages list, Lightning's callback apart, which is optional."""
    places = (entry.rpartition(".") for entry in ON_PAGES if "lightning" not in entry)
    return [getattr(importlib.import_module(module), name) for module, _, name in places]


@pytest.mark.parametrize("module", ["", "ops", "scaling", "training"])
def test_promised_names_are_on_the_reference_pages(module: str) -> None:
    package = importlib.import_module(f"jachess_ext.{module}".rstrip("."))
    listed = _listed()
    missing = [
        name
        for name in package.__all__
        if name not in (*jx._MODULES, "LightningSmoothnessMonitor")
        and not name.endswith("_reference")  # said of all of them at the head of the page
        and not any(getattr(package, name) is value for value in listed)
    ]
    assert not missing


def test_the_reference_shows_functions_and_not_folders_of_their_name() -> None:
    """The site reads the source, where `jachess_ext.ntk` is the folder and not the function."""
    folders = [entry for entry in ON_PAGES if (ROOT / entry.replace(".", "/")).is_dir()]
    assert not folders


def test_the_reference_lists_nothing_twice() -> None:
    assert len(set(ON_PAGES)) == len(ON_PAGES) > 60
