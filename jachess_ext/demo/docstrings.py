"""Docstrings of installed packages, read from their sources with `ast`: nothing is imported."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

STDLIB = "python"
"""The name under which the standard library appears among the packages."""

_EXCLUDED_FOLDERS = {
    *("test", "tests", "testing", "site-packages", "dist-packages", "idlelib", "lib2to3"),
    *("turtledemo", "_vendor", "vendor", "_bundled", "externals", "include", "__pycache__"),
}
_DOCUMENTING_CALLS = frozenset({"add_docstr", "add_newdoc", "add_docstr_all"})
_Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def package_root(package: str) -> Path | None:
    """Folder that holds the sources of a top-level `package`, or None when it is not installed.

    `STDLIB` names the standard library. The package is located, not imported.
    """
    if package == STDLIB:
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def source_files(root: Path) -> list[str]:
    """The `.py` files below `root`, without tests: relative paths with forward slashes, sorted."""
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _EXCLUDED_FOLDERS)
        relative = Path(folder).relative_to(root)
        found += [
            (relative / name).as_posix()
            for name in files
            if name.endswith(".py") and not name.startswith("test_")
        ]
    return sorted(found)


def docstrings_of_file(path: Path) -> list[str]:
    """Docstrings of one source file, dedented, in source order.

    Covers modules, classes, functions, and strings handed to `add_docstr`-like calls, which is how
    torch and numpy document their C functions. A file that does not parse has none.
    """
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
        return []
    found = sorted(_documentation(tree), key=lambda item: item[0])
    return [inspect.cleandoc(text) for _, text in found]


def _documentation(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of everything that documents something, in the order of `ast.walk`."""
    for node in ast.walk(tree):
        if isinstance(node, _Documented):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield getattr(node, "lineno", 0), text
        elif isinstance(node, ast.Call) and _called_name(node) in _DOCUMENTING_CALLS:
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def _called_name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
