"""Models in a setting and of a type, one of each: what is written, and what a page makes of it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

import jachess_ext as jx
from benchmarks import models


def test_a_cell_works_and_a_wrong_jet_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "29572")
    only = ("checkpointing", "LoRA", "second backward", "varlen", "Functions")
    models.settings(models=("Llama",), only=only, results=tmp_path)
    rows = pd.read_csv(tmp_path / "works_with.csv")
    assert rows.result.tolist() == ["works"] * 5
    assert models.cell("T5 encoder", models.SETTINGS["second backward"]) == "works"
    right = jx.jet
    monkeypatch.setattr(jx, "jet", lambda f, x, d: right(f, x, d * f.model.training))
    assert models.cell("Llama", models.Setting(lambda last: (last.eval(), None))) != "works"


def test_types_go_on_where_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    models.types(only=("bert", "vit"), results=tmp_path)
    torch.set_num_threads(threads)
    rows = pd.read_csv(tmp_path / "model_sweep.csv", keep_default_na=False, dtype=str)
    assert rows.set_index("type").result.to_dict() == {"bert": "right", "vit": "no text"}
    page = models.types_page(rows.assign(result=["right", "raises"], reason=["", "a|b"]))
    assert "2 types tried, 1 right (50.0 %), 0 wrong, 1 refused" in page
    assert "| vit | a/b |" in page and "Right, by differences: 1\n\nbert" in page
