"""The examples of docs/scaling.md and docs/live_selection.md, run as they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from python_tests.snippets import blocks, run

DOCS = Path(__file__).resolve().parents[2] / "docs"
SIZES = 200.0 * 2 ** np.arange(9)  # 200 to 51,200


def test_choosing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's first table and its answer; then the lines on files, of curves whose best is
    known, as losses and as accuracies."""
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    (code, printed), (files, _) = blocks(DOCS / "scaling.md")[:2]
    assert printed is not None
    run(code, names, printed)
    first = {name: values[0] for name, values in names["losses"].items()}
    assert min(first, key=first.get) == "D" not in names["selection"].shortlist, "as the text says"

    losses = pd.DataFrame(
        {name: factor * SIZES**-slope for name, factor, slope in
         (("slow", 1.0, 0.05), ("fast", 2.0, 0.2), ("last", 3.0, 0.1))},
        index=[f"{size:g}" for size in SIZES],
    ).T.rename_axis("model")  # fmt: skip
    losses.to_csv("losses.csv")
    (1 - losses / 4).to_csv("scores.csv")
    run(files, names)
    assert names["selection"].ranking == ["fast", "slow", "last"]


def test_a_law_through_a_curve() -> None:
    """The lines on `fit`, of a curve that follows the rectified law."""
    pytest.importorskip("matplotlib").use("agg")
    import jachess_ext as jx

    (code,) = [code for code, _ in blocks(DOCS / "scaling.md") if "jx.scaling.fit(" in code]
    losses = 200 / (46 + SIZES**0.33) + 0.46
    names: dict[str, Any] = {"jx": jx, "sizes": SIZES, "losses": losses}
    run(code, names)
    assert names["curve"].law == "rectified"
    expected = 200 / (46 + 1_638_400**0.33) + 0.46
    assert names["curve"].predict(1_638_400) == pytest.approx(expected, rel=1e-3)


def test_any_trainer() -> None:
    code, printed = blocks(DOCS / "live_selection.md")[0]
    assert printed is not None
    names: dict[str, Any] = {}
    run(code, names, printed)
    losses = [names["train"](name, 1300) for name in names["candidates"]]
    assert losses == pytest.approx([0.42, 0.27, 3.14, 0.31], abs=0.02), "as the text says"
