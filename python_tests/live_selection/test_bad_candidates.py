"""A selection with candidates that do not load, are not finite or run out of memory: real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertModel

from jachess_ext.compare.selection import view_of_live, write_selection
from jachess_ext.live_selection import LiveSelection, measure, read_records
from jachess_ext.live_selection.engine import select_live
from jachess_ext.live_selection.jobs import SubsetJob
from python_tests.live_selection.conftest import MakeSettings, save_model

SIZES = (8, 16, 32)


def test_bad_candidates_are_named_and_the_rest_goes_on(
    settings: MakeSettings,
    models: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoiled = save_model(tmp_path / "spoiled", 8, 3)
    weights = BertModel.from_pretrained(spoiled)
    torch.nn.init.constant_(weights.embeddings.word_embeddings.weight, torch.nan)
    weights.save_pretrained(spoiled)
    hungry = str(save_model(tmp_path / "hungry", 8, 4))
    original = measure.fine_tune
    current: list[str] = []

    def new_model(job: SubsetJob, tokenizer: Any) -> Any:
        current[:] = [job.model]
        return made(job, tokenizer)

    def fine_tune(*given: Any, **named: Any) -> Any:
        if current == [hungry]:
            torch.empty(1 << 60)  # what torch raises when memory ends
        return original(*given, **named)

    made = measure.new_model
    monkeypatch.setattr(measure, "new_model", new_model)
    monkeypatch.setattr(measure, "fine_tune", fine_tune)
    given = settings(models=(str(spoiled), models[0], "/nowhere", hungry, models[1]), sizes=SIZES)
    found: LiveSelection = select_live(given, tmp_path / "out")

    assert {one.model for one in found.ranking} == set(models)
    stops = {one.model: one.stop for one in found.candidates}
    assert list(stops) == list(given.models)
    assert stops[str(spoiled)].startswith("failed at 8 rows:") and "finite" in stops[str(spoiled)]
    assert "/nowhere" in stops["/nowhere"]
    assert stops[hungry].startswith("failed at 8 rows: out of memory (")
    for model in models:
        runs = [r for r in read_records(tmp_path / "out") if r.model == model]
        assert [run.size for run in runs] == [*SIZES] and all(run.error is None for run in runs)

    alone = select_live(settings(sizes=SIZES), tmp_path / "alone")
    assert alone.ranking == found.ranking, "the others are as without them"

    page = tmp_path / "page.html"
    write_selection(page, view_of_live(found))
    text = page.read_text("utf-8")
    assert "out of memory" in text and "/nowhere" in text
