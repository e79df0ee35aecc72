"""What is decided and refused before any training."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jachess_ext.experiment.grid import Recipe
from jachess_ext.live_selection import measure
from jachess_ext.live_selection.budget import Budget
from jachess_ext.live_selection.engine import select_live
from jachess_ext.live_selection.plan import make_plan
from jachess_ext.tasks.examples import DataError
from jachess_ext.tasks.files import Columns

from .conftest import MakeSettings


@pytest.mark.parametrize(
    ("text", "unit", "amount"),
    [
        ("1/8", "share", 0.125),
        ("0.25", "share", 0.25),
        (" 12.5% ", "share", 0.125),
        ("1", "share", 1.0),
        ("3e15flops", "flops", 3e15),
        ("2.5 FLOPs", "flops", 2.5),
        ("90s", "seconds", 90.0),
        ("1.5min", "seconds", 90.0),
        ("2h", "seconds", 7200.0),
    ],
)
def test_budgets(text: str, unit: str, amount: float) -> None:
    found = Budget.parse(text)
    assert (found.unit, found.amount) == (unit, pytest.approx(amount))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2", "is above the data"),
        ("9/8", "is above the data"),
        ("110%", "is above the data"),
        ("0", "is not a positive number"),
        ("1/0", "is not a positive number"),
        ("0min", "is not a positive number"),
        ("-1", "is not understood"),
        ("much", "is not understood"),
        ("3 weeks", "is not understood"),
    ],
)
def test_bad_budgets(text: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Budget.parse(text)


def test_sizes_are_halvings_of_the_largest(settings: MakeSettings) -> None:
    plan = make_plan(settings())  # a quarter of 256 rows
    assert plan.sizes == (16, 32, 64) and plan.target == 256
    assert plan.rounds == (0, 16, 32, 64)
    assert make_plan(settings(order="halving")).rounds == (0, 64, 32, 16)
    assert make_plan(settings(budget=Budget.parse("20min"))).sizes == (31, 63, 127)


def test_subsets_are_nested_and_the_same_for_all_models(settings: MakeSettings) -> None:
    plan = make_plan(settings())
    small, large = (plan.job(plan.candidates[0], size) for size in (16, 64))
    assert large.task.train.texts[:16] == small.task.train.texts
    assert small.probe.texts == small.task.train.texts[:4] == large.probe.texts
    other = plan.job(plan.candidates[1], 64)
    assert other.task == large.task and other.name != large.name
    rows = make_plan(settings(data_seed=1)).task.train.texts
    assert rows != plan.task.train.texts and sorted(rows) == sorted(plan.task.train.texts)


def test_a_halving_within_flops(settings: MakeSettings) -> None:
    """The largest subset is as large as all halvings together may cost."""
    plain = make_plan(settings())
    row = sum(plain.training_flops(one, 1) for one in plain.candidates)
    plan = make_plan(settings(budget=Budget.parse(f"{row * 240}flops"), order="halving"))
    assert sum(plan.sizes) <= 240 < sum(plan.sizes) * 10 / 9 + 2 and len(plan.sizes) == 3
    growing = make_plan(settings(budget=Budget.parse(f"{row * 240}flops")))
    assert growing.sizes == (31, 63, 127)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sizes": (16, 64, 32)}, "sizes must increase strictly, but 64 is followed by 32"),
    ({"sizes": (16, 16, 32)}, "sizes must increase strictly"),
    ({"sizes": (0, 16, 32)}, "expected numbers of rows from 1 up"),
    ({"sizes": (16, 32, 300)}, "the size 300 is above the data: .* has 256 rows"),
    ({"sizes": (16, 32, 65)}, r"the size 65 is above the budget 1/4 of 256 rows \(64\)"),
    ({"sizes": (16, 32)}, "bayes needs 3 sizes or more, and there are 2"),
    ({"sizes": (8, 16, 32), "method": "power"}, "power needs 4 sizes or more"),
    ({"sizes": (8, 16), "method": "lensllm"}, "lensllm needs 3 sizes or more"),
    (
        {"sizes": (8, 16, 32), "method": "lensllm", "confidence": 0.9},
        "lensllm needs 4 sizes or more",
    ),
    ({"budget": Budget.parse("1")}, "nothing would be left to predict"),
    ({"budget": Budget.parse("1/100")}, "halving begins at 16 rows"),
    ({"budget": Budget.parse("1e15flops")}, "is above the data: training every model"),
    ({"budget": Budget.parse("1flops")}, "does not pay for the 3 sizes"),
    ({"budget": Budget.parse("1flops"), "order": "halving"}, "does not pay for subsets of 16"),
    ({"budget": Budget.parse("1min"), "order": "halving"}, "which minutes do not tell"),
    ({"target": 64, "sizes": (8, 16, 64), "budget": Budget.parse("1")}, "not below the target 64"),
    ({"method": "oracle"}, "unknown method 'oracle'"),
    ({"method": "subtuning", "confidence": 0.9}, "subtuning gives none"),
    ({"drop": 1.5}, "drop is 1.5"),
    ({"gamma": 2}, "gamma is 2"),
    ({"tau": 0.0}, "tau is 0.0"),
    ({"probe": 1000}, "probe is 1000, and .* has 256 rows"),
    ({"probe": 0}, "probe is 0"),
    ({"models": ("a",)}, "1 model to choose from"),
    ({"models": ("a", "b", "a")}, "the model 'a' is given twice"),
    (
        {"models": ("/nowhere/a", "/nowhere/b")},
        "'/nowhere/a' could not be loaded: there is no such folder",
    ),
    ({"columns": Columns(text="words")}, "has no column 'words'"),
    ({"columns": Columns(regression=True)}, "labels must be classes"),
    ({"recipe": Recipe(lora=True)}, "leave lora out"),
    ({"recipe": Recipe(epochs=1, batch_size=16)}, "is trained on in one step, whose learning rate"),
]


@pytest.mark.parametrize(("given", "words"), BAD)
def test_refused_before_any_training(
    settings: MakeSettings,
    given: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "run", lambda job: pytest.fail("something was trained"))
    with pytest.raises(DataError, match=words):
        select_live(settings(**given), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_dev_rows_that_are_the_training_rows(settings: MakeSettings, tmp_path: Path) -> None:
    made = settings()
    with pytest.raises(DataError, match="is the training file"):
        make_plan(replace(made, dev=made.train))
    copy = shutil.copy(made.train, tmp_path / "copy.csv")
    with pytest.raises(DataError, match="holds the rows of"):
        make_plan(replace(made, dev=Path(copy)))


def test_one_class(settings: MakeSettings, tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("text,label\n" + "the film,good\n" * 64)
    with pytest.raises(DataError, match="needs at least two classes"):
        make_plan(settings(train=path))
    path.write_text("text,label\n" + "the film,good\n" * 255 + "the book,bad\n")
    with pytest.raises(DataError, match="the smallest subset, 16 rows, holds one class only"):
        make_plan(settings(train=path))


def test_a_model_whose_files_changed_is_another(
    settings: MakeSettings, models: tuple[str, str], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(models[0], tmp_path / "copy"))
    made = settings(models=(models[0], str(copy)))
    before = make_plan(made).candidates
    assert before[0].version == before[1].version
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert make_plan(made).candidates[1].version != before[1].version
