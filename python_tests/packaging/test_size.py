"""The package's code does not grow unnoticed, and its parts import downwards only."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "jachess_ext"

LINES = {
    "attack": 407,
    "commands": 535,
    "compare": 2678,
    "demo": 312,
    "jet": 5369,
    "live": 853,
    "ntk": 1919,
    "ops": 1251,
    "scaling": 3389,
    "smoothness": 1112,
    "training": 1800,
    ".": 822,
}
"""Lines of code of each folder's Python files at most, without comments, docstrings and empty
lines; ".": those beside the folders. A commit may lower a number; one that raises it says why in
its message."""

ORDER = (
    *("_io", "_text", "torch_private", "ops", "jet", "models", "smoothness", "ntk", "attack"),
    *("scaling", "training", "compare", "live", "demo"),
)
"""Parts of the package, bottom first: each imports only those before it."""


def code_lines(source: str) -> int:
    """Return how many lines of a Python file hold code."""
    skipped = {
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
        tokenize.ENDMARKER,
    }
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in skipped
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):  # a string that stands as a statement: a docstring
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines)


def test_code_lines_are_those_with_code() -> None:
    source = (
        '"""Say.\n\nMore."""\n\nX = """a\nb"""  # why\n# alone\n\n\n'
        'def f():\n    "Do."\n    return (\n        X\n    )\n'
    )
    assert code_lines(source) == 6  # X on two lines, def, and return on three


@pytest.mark.parametrize("folder", LINES)
def test_size(folder: str) -> None:
    files = (PACKAGE / folder).glob("*.py" if folder == "." else "**/*.py")
    assert sum(code_lines(f.read_text(encoding="utf-8")) for f in files) <= LINES[folder]


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
