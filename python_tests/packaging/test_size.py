"""The package does not grow unnoticed, and its parts import downwards only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "jachess_ext"

LINES = {
    "attack": 699,
    "commands": 786,
    "compare": 4164,
    "demo": 430,
    "jet": 8239,
    "live": 1341,
    "ntk": 2984,
    "ops": 2172,
    "scaling": 5449,
    "smoothness": 1867,
    "training": 2892,
    ".": 1225,
}
"""Lines of each folder's Python files at most; ".": those beside the folders. A commit may lower a
number; one that raises it says why in its message."""

ORDER = (
    *("_io", "_text", "torch_private", "ops", "jet", "models", "smoothness", "ntk", "attack"),
    *("scaling", "training", "compare", "live", "demo"),
)
"""Parts of the package, bottom first: each imports only those before it."""


@pytest.mark.parametrize("folder", LINES)
def test_size(folder: str) -> None:
    files = (PACKAGE / folder).glob("*.py" if folder == "." else "**/*.py")
    assert sum(len(f.read_text(encoding="utf-8").splitlines()) for f in files) <= LINES[folder]


def test_every_folder_has_a_size() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))}
    assert folders | {"."} == set(LINES)


def _modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _imported(module: str) -> Iterator[str]:
    """Modules of the package that a module imports, in functions too; not for types alone."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            source = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                if name in MODULES or source in MODULES:
                    yield name if name in MODULES else source


def test_no_two_files_import_each_other() -> None:
    graph = {module: set(_imported(module)) - {module} for module in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them


def test_no_part_imports_one_above_it() -> None:
    upwards = [
        (module, other)
        for module in MODULES
        for other in _imported(module)
        for own, theirs in [(module.split(".")[1:2], other.split(".")[1:2])]
        if own and theirs and own[0] in ORDER and theirs[0] in ORDER
        if ORDER.index(theirs[0]) > ORDER.index(own[0])
    ]
    assert not upwards
