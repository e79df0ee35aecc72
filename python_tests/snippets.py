"""The examples of a document, run in order as they stand, and what they say they print."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

_BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def blocks(document: Path) -> list[tuple[str, str | None]]:
    """Each Python block, and the text block right after it, where there is one."""
    return [(found[1], found[2]) for found in _BLOCK.finditer(document.read_text(encoding="utf-8"))]


def run(code: str, names: dict[str, Any], printed: str | None = None) -> None:
    """Runs a block; where the last lines it prints are given, they are compared."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "<document>", "exec"), names)
    if printed is not None:
        lines = output.getvalue().splitlines()[-len(printed.splitlines()) :]
        assert_printed("\n".join(lines), printed)


def assert_printed(found: str, expected: str) -> None:
    """The same words, and numbers to 2 % (what rounding another machine's sums may move)."""
    assert _NUMBER.sub("#", found).split() == _NUMBER.sub("#", expected).split(), found
    numbers = [[float(text) for text in _NUMBER.findall(part)] for part in (found, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.02), found
