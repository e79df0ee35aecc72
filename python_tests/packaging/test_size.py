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
    "differentiable": 1191,
    "jet": 6367,
    "lab": 4098,
    "ntk": 2018,
    "ops": 2719,
    "scaling": 3679,
    "smoothness": 1176,
    "training": 1699,
    ".": 1005,
}
"""Lines of code of each folder's Python files at most, without imports, declarations for type
checkers, comments, docstrings and empty lines; ".": those beside the folders. A commit may lower a
number; one that raises it says why in its message."""

ANY = {
    "differentiable": 47,
    "jet": 111,
    "lab": 29,
    "ntk": 11,
    "ops": 14,
    "scaling": 10,
    "smoothness": 13,
    "training": 28,
    ".": 22,
}
"""How often each folder says `Any` where a type could stand, at most; a commit may lower it."""
PARTICIPLES = {"given", "found", "known", "own", "each", "kept", "named", "told", "rest"}
"""Names that say what was done to a thing; a variable has the name of what it is."""
NAMED_SO = {
    "differentiable": 2,
    "jet": 0,
    "lab": 0,
    "ntk": 0,
    "ops": 2,
    "scaling": 0,
    "smoothness": 0,
    "training": 0,
    ".": 0,
}
"""How many variables and arguments have one of `PARTICIPLES` for a name, at most."""

ORDER = (
    *("_io", "_text", "torch_private", "ops", "differentiable"),
    *("jet.engine", "jet.rules", "jet.adapters", "jet.passes", "jet.rows", "jet.compiled"),
    *("jet.api", "jet.second_order", "jet.gradient_loss_eager", "jet.gradient_loss_in_graph"),
    *("jet.gradient_loss", "jet", "models", "graphs", "smoothness", "ntk", "scaling", "training"),
    *("lab.attack", "lab.workbench", "lab.compare", "lab.live", "lab.demo", "lab.commands"),
    "lab.cli",
)
"""Parts of the package, bottom first: each imports only those before it.  What stands in `lab` the
library below never imports."""
STRANGERS = [("smoothness", "ntk"), ("lab.compare", "lab.live")]
"""Parts that do not know each other."""


def code_lines(source: str) -> int:
    """Return how many lines of a Python file hold code, without imports and without declarations
    for type checkers alone: overloads, and what stands under TYPE_CHECKING."""
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
    ignored: list[tuple[ast.stmt, ast.stmt]] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt):
            continue
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        is_overload = isinstance(node, ast.FunctionDef) and any(
            isinstance(decorator, ast.Name) and decorator.id == "overload"
            for decorator in node.decorator_list
        )
        if is_docstring or is_import or is_overload:
            ignored.append((node, node))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            ignored.append((node, node.body[-1]))
    for first, last in ignored:
        decorators = getattr(first, "decorator_list", [])
        start = min(node.lineno for node in (first, *decorators))
        lines -= {*range(start, (last.end_lineno or start) + 1)}
    return len(lines)


def test_code_lines_are_those_with_code() -> None:
    source = (
        '"""Say.\n\nMore."""\n\nimport a\nfrom b import (\n    c,\n)\n'
        'X = """a\nb"""  # why\n# alone\n\n\n'
        'def f():\n    "Do."\n    return (\n        X\n    )\n'
        "if TYPE_CHECKING:\n    class A: ...\n    T = int\nelse:\n    A = T = 1\n"
        "@overload\ndef g(x: int) -> int: ...\n@cache\ndef g(x): return x\n"
    )
    # X on two lines, def, and return on three; else and its line; g and its decorator
    assert code_lines(source) == 10


def _sources(folder: str) -> list[str]:
    files = (PACKAGE / folder).glob("*.py" if folder == "." else "**/*.py")
    return [file.read_text(encoding="utf-8") for file in files]


@pytest.mark.parametrize("folder", LINES)
def test_size(folder: str) -> None:
    assert sum(map(code_lines, _sources(folder))) <= LINES[folder]


def count_any(source: str) -> int:
    """Return how often a Python file says `Any`."""
    nodes = ast.walk(ast.parse(source))
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)


def count_participles(source: str) -> int:
    """Return how many variables and arguments of a Python file are named by a participle."""
    names = [
        node.id if isinstance(node, ast.Name) else node.arg
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
    ]
    return sum(name in PARTICIPLES for name in names)


def test_words_are_counted() -> None:
    source = "def f(given: Any, x: dict[str, Any]) -> int:\n    known = x.found\n    return known\n"
    assert (count_any(source), count_participles(source)) == (2, 2)


@pytest.mark.parametrize("folder", LINES)
def test_types_and_names(folder: str) -> None:
    sources = _sources(folder)
    assert sum(map(count_any, sources)) <= ANY[folder]
    assert sum(map(count_participles, sources)) <= NAMED_SO[folder]


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


def _imported(module: str, types: bool = False) -> Iterator[str]:
    """Modules of the package that a module imports, in functions too; for types alone if asked."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types:
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
    """Nor for types; a package's own file, which imports what is public in it, apart."""
    files = [module for module, path in MODULES.items() if path.name != "__init__.py"]
    for graph in (
        {module: set(_imported(module)) - {module} for module in MODULES},
        {module: {*_imported(module, types=True)} & {*files} - {module} for module in files},
    ):
        TopologicalSorter(graph).prepare()  # raises CycleError, which names them


def _part(module: str) -> str:
    """Return the part of `ORDER` that a module is in; its name beside the parts."""
    names = module.split(".")[1:]
    return ".".join(names[: 2 if names[:1] in (["lab"], ["jet"]) else 1])


def test_no_part_imports_one_above_it() -> None:
    pairs = [
        (module, other, _part(module), _part(other))
        for module in MODULES
        for other in _imported(module)
    ]
    upwards = [
        (module, other)
        for module, other, part, below in pairs
        if part in ORDER and below in ORDER and ORDER.index(below) > ORDER.index(part)
    ]
    assert not upwards
    beside = [
        (module, other)
        for module, other, *both in pairs
        if tuple(both) in STRANGERS or tuple(both[::-1]) in STRANGERS
    ]
    assert not beside
    # `python -m jachess_ext` is the command, which is the lab's.
    into = [(m, o) for m, o, p, q in pairs if q.startswith("lab") and not p.startswith("lab")]
    assert into == [("jachess_ext.__main__", "jachess_ext.lab.cli")]


def test_private_names_stay_in_their_file() -> None:
    crossing = [
        (path.name, alias.name)
        for folder in ("jachess_ext", "python_tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and (node.level or (node.module or "").startswith("jac"))
        for alias in node.names
        if alias.name.startswith("_")
        and not alias.name.startswith("__")
        and alias.name not in ("_io", "_text", "_C", "_ops")
    ]
    assert not crossing
