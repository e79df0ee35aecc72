"""The word attack in a comparison and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jachess_ext._io import DataError
from jachess_ext.lab.compare.finetune import final_jobs, load, run_grid
from jachess_ext.lab.compare.report import sections
from jachess_ext.lab.compare.settings import Conditions

from .conftest import CONDITIONS, MakeGrid


@pytest.fixture
def synonyms(tmp_path: Path) -> Path:
    file = tmp_path / "synonyms.txt"
    file.write_text("good fine bad\nbad awful good\nfilm movie\ngreat terrible\nthe a this\n")
    return file


def attacked(source: Any, **settings: Any) -> dict[str, Any]:
    return {**CONDITIONS, "attack": str(source), "attack_share": 0.5, **settings}


def test_comparison(grid: MakeGrid, synonyms: Path, tmp_path: Path) -> None:
    made = grid(
        methods=("none", f"attack-augment,synonyms={synonyms}"),
        seeds=(0,),
        conditions=attacked(synonyms, attack_rows=12),
    )
    records = run_grid(made, tmp_path / "out")
    for record in records:
        attack = record.attack
        assert record.error is None and attack is not None and attack["of"] == 12
        assert 0 <= attack["attacked"] <= attack["accuracy"] <= 1
        assert record.attack_candidates == str(synonyms)
    (section,) = [s for s in sections(records) if s.title == "Word attack"]
    assert str(synonyms) in section.paragraphs[0]
    assert any("after it" in table.caption for table in section.tables)


def test_names_of_runs(grid: MakeGrid, synonyms: Path) -> None:
    """Without an attack runs keep their names; with one the file's content counts."""
    bare = [job.name for job in final_jobs(load(grid()), {})]
    changed = [
        job.name for job in final_jobs(load(grid(conditions={**CONDITIONS, "attack_tries": 3})), {})
    ]
    assert bare == changed
    names = []
    for text in ("good fine\n", "good fine\n", "good great\n"):
        synonyms.write_text(text)
        names.append([j.name for j in final_jobs(load(grid(conditions=attacked(synonyms))), {})])
    assert names[0] == names[1] != names[2] and names[0] != bare


def test_what_cannot_be_used(grid: MakeGrid, tmp_path: Path) -> None:
    for settings in (
        {"conditions": attacked(tmp_path / "missing")},
        {"methods": (f"attack-augment,synonyms={tmp_path / 'missing'}",)},
    ):
        with pytest.raises(DataError, match="missing cannot be read"):
            load(grid(**settings))
    for name, value in (("attack_share", 0.0), ("attack_tries", 0), ("attack_rows", 0)):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            Conditions(**{name: value})
