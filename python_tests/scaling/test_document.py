"""The example of docs/live_selection.md, run as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from python_tests.snippets import blocks, run

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "live_selection.md"


def test_any_trainer() -> None:
    code, printed = blocks(DOCUMENT)[0]
    assert printed is not None
    names: dict[str, Any] = {}
    run(code, names, printed)
    losses = [names["train"](name, 1300) for name in names["candidates"]]
    assert losses == pytest.approx([0.42, 0.27, 3.14, 0.31], abs=0.02), "as the text says"
