"""What a docstring lists under "Args:" are parameters, by their names; its examples are shown."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import jachess_ext

PACKAGE = Path(jachess_ext.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
_ENTRY = re.compile(r"^ {4}\*{0,2}(\w+(?:, \*{0,2}\w+)*): ")


def listed(docstring: str) -> list[str]:
    """The names of the entries below "Args:", as `inspect.cleandoc` indents them."""
    names: list[str] = []
    lines = iter(docstring.splitlines())
    for line in lines:
        if line == "Args:":
            break
    for line in lines:
        if line and not line.startswith(" "):
            break
        if match := _ENTRY.match(line):
            names += re.findall(r"\w+", match[1])
    return names


def parameters(node: ast.AST) -> set[str]:
    """The parameters of a function; of a class those of __init__ and its annotated attributes."""
    if isinstance(node, ast.ClassDef):
        fields = {
            n.target.id
            for n in node.body
            if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
        }
        methods = (
            n
            for n in node.body
            if isinstance(n, ast.FunctionDef) and n.name in ("__init__", "__new__", "__call__")
        )
        return fields.union(*map(parameters, methods))
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    spec = node.args
    every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
    return {a.arg for a in every if a is not None}


def wrong(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            for name in listed(docstring):
                if name not in parameters(node):
                    yield f"line {node.lineno}: {node.name} has no parameter {name}"
            if "Example:" in docstring.splitlines():
                yield f"line {node.lineno}: {node.name} says Example:, not Examples:"


def test_sections_hold_what_they_say() -> None:
    assert not [f"{file}: {fault}" for file in FILES for fault in wrong(file.read_text())]


def test_what_is_wrong_is_found() -> None:
    """mkdocstrings knows `Examples:`; below another word it takes `>>>` for nested quotations."""
    source = 'def f(a, *b, c=1):\n    """Do.\n\n    Args:\n        a, b: x.\n        d: y.\n'
    source += '\n    Example:\n        >>> f()\n    """\n'
    faults = ["has no parameter d", "says Example:, not Examples:"]
    assert [*wrong(source)] == [f"line 1: f {fault}" for fault in faults]
