"""What is decided and refused before any training."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jachess_ext.evaluation.metrics import ACCURACY
from jachess_ext.experiment.grid import Recipe
from jachess_ext.live_selection import measure
from jachess_ext.live_selection.budget import Budget
from jachess_ext.live_selection.candidates import CandidateModel
from jachess_ext.live_selection.engine import select_live
from jachess_ext.live_selection.plan import (
    judged_rows,
    ladder,
    make_plan,
    smallest_rows,
    stratified,
)
from jachess_ext.tasks.examples import DataError, Examples, Task
from jachess_ext.tasks.files import Columns

from .conftest import MakeSettings, write_rows


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


def test_sizes_are_quarters_and_three_where_they_fit(settings: MakeSettings) -> None:
    plan = make_plan(settings())  # a quarter of 256 rows; 16 and more make sense
    assert plan.sizes == plan.rounds == (16, 32, 64) and plan.target == 256
    assert make_plan(settings(probe=4)).rounds == (0, 16, 32, 64)
    assert make_plan(settings(order="algorithm1")).rounds == (64, 32, 16)
    assert make_plan(settings(budget=Budget.parse("1/2"))).sizes == (16, 42, 112), "a third more"
    assert make_plan(settings(budget=Budget.parse("20min"))).sizes == (16, 45, 127)
    made = settings(budget=Budget.parse("1"), target=5000)
    assert make_plan(made).sizes == (16, 64, 256), "no more rows than there are"


@pytest.mark.parametrize(
    ("epochs", "batch", "accumulation", "rows"),
    [(1.0, 2, 1, 16), (5.0, 16, 1, 17), (1.0, 16, 1, 113), (5.0, 16, 2, 33), (8.0, 64, 1, 16)],
)
def test_the_smallest_subset_gives_eight_steps(
    settings: MakeSettings, epochs: float, batch: int, accumulation: int, rows: int
) -> None:
    recipe = Recipe(epochs=epochs, batch_size=batch, gradient_accumulation=accumulation)
    assert smallest_rows(settings(recipe=recipe)) == rows
    if rows > 16:
        steps = [-(-n // (batch * accumulation)) * epochs for n in (rows - 1, rows)]
        assert steps[0] < 8 <= steps[1]


def candidate(tokens: float, dev_tokens: float) -> CandidateModel:
    return CandidateModel("m", "1", 1000, 1000, tokens, dev_tokens)


@pytest.mark.parametrize("dev_tokens", [10.0, 25.0])
@pytest.mark.parametrize("epochs", [3.0, 5.0])
@pytest.mark.parametrize("target", [800, 1000, 1500, 2088, 5000, 12_000, 100_000])
def test_an_eighth_costs_at_most_a_fifth(
    settings: MakeSettings, target: int, epochs: float, dev_tokens: float
) -> None:
    """Training all sizes and judging after each, against training all and judging once."""
    recipe = Recipe(epochs=epochs, batch_size=16 if epochs == 5 else 8)
    given = settings(budget=Budget.parse("1/8"), target=target, recipe=recipe)
    rows = Examples(["a"] * target, None, [0] * target)
    models = (candidate(10.0, dev_tokens), candidate(12.0, dev_tokens))
    sizes = ladder(given, models, Task("t", "", ("a", "b"), rows, rows, rows, ACCURACY), target)
    dev = judged_rows(given, models, target, sizes)  # at most: there may be fewer
    per_row = 6 * epochs * (10 + 12)
    judging = 2 * dev_tokens * 2 * dev
    spent = per_row * sum(sizes) + judging * len(sizes)
    assert len(sizes) >= 3 and target // 12 <= sizes[-1] <= target // 8
    assert dev >= (200 if target >= 5000 and dev_tokens == 10 else 80)
    if spent > 0.2 * (per_row * target + judging):
        assert dev == 80 and dev_tokens == 25 and epochs * target < 5000, "few rows to train on"


def test_dev_rows_are_as_many_as_judging_may_cost(settings: MakeSettings, tmp_path: Path) -> None:
    given = settings(dev=write_rows(tmp_path / "dev.csv", 900, 5))
    plan = make_plan(given)
    assert len(plan.task.dev) == 80, "always"
    ten = make_plan(replace(given, recipe=replace(given.recipe, epochs=10.0)))
    assert len(ten.task.dev) == 10 * 3 * 112 // (3 * 6), "a sixth of training on 16, 32, 64 rows"
    twenty = make_plan(replace(given, recipe=replace(given.recipe, epochs=20.0)))
    assert len(twenty.task.dev) == 200, "at least, where a sixth allows it"
    many = make_plan(replace(given, recipe=replace(given.recipe, epochs=100.0)))
    assert len(many.task.dev) == 384, "0.5 % of 256 rows, 100 epochs, forward and back"
    whole = make_plan(replace(given, dev_size=10_000)).task.dev
    texts = iter(line.rsplit(",", 1)[0] for line in given.dev.read_text().splitlines()[1:])
    assert len(whole) == 900 and all(text in texts for text in plan.task.dev.texts), "in order"


def test_long_dev_rows_are_judged_less(settings: MakeSettings, tmp_path: Path) -> None:
    short = write_rows(tmp_path / "dev.csv", 900, 5)
    head, *lines = short.read_text().splitlines()
    texts = [line.rsplit(",", 1) for line in lines]
    (tmp_path / "long.csv").write_text(
        "\n".join([head, *(f"{text} {text},{label}" for text, label in texts)]) + "\n"
    )
    given = settings(dev=tmp_path / "long.csv")
    recipe = replace(given.recipe, epochs=100.0)
    plan = make_plan(replace(given, recipe=recipe))
    one = plan.candidates[0]
    assert one.tokens == 8 and one.dev_tokens == 14  # two of them mark begin and end
    assert len(plan.task.dev) == 384 * 8 // 14


def test_subsets_are_nested_and_the_same_for_all_models(settings: MakeSettings) -> None:
    plan = make_plan(settings(probe=4))
    small, large = (plan.job(plan.candidates[0], size) for size in (16, 64))
    assert large.task.train.texts[:16] == small.task.train.texts
    assert small.probe.texts == small.task.train.texts[:4] == large.probe.texts
    other = plan.job(plan.candidates[1], 64)
    assert other.task == large.task and other.name != large.name
    rows = make_plan(settings(data_seed=1)).task.train.texts
    assert rows != plan.task.train.texts and sorted(rows) == sorted(plan.task.train.texts)


def test_subsets_have_the_classes_in_proportion() -> None:
    labels = [0] * 60 + [1] * 30 + [2] * 10
    rows = Examples([str(i) for i in range(100)], None, labels)
    order = stratified(rows, 3, regression=False)
    assert sorted(order) == list(range(100)) and order != stratified(rows, 4, regression=False)
    for count in range(1, 101):
        found = np.bincount([labels[i] for i in order[:count]], minlength=3)
        assert np.abs(found - count * np.array([0.6, 0.3, 0.1])).max() <= 1.0
    ones = [i for i in order if labels[i] == 1]
    assert ones != sorted(ones), "within a class the order is drawn"


def test_algorithm_1_within_flops(settings: MakeSettings) -> None:
    """The largest subset is as large as all sizes together may cost."""
    plain = make_plan(settings())
    row = sum(one.training_flops(1, plain.settings.recipe) for one in plain.candidates)
    judging = sum(plain.flops(one, 0) for one in plain.candidates)
    budget = Budget.parse(f"{row * 150 + 3 * judging}flops")
    plan = make_plan(settings(budget=budget, order="algorithm1"))
    spent = sum(plan.flops(one, size) for one in plan.candidates for size in plan.sizes)
    assert 0.8 * budget.amount < spent <= budget.amount and len(plan.sizes) == 3


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sizes": (16, 64, 32)}, "sizes must increase strictly, but 64 is followed by 32"),
    ({"sizes": (16, 16, 32)}, "sizes must increase strictly"),
    ({"sizes": (0, 16, 32)}, "expected numbers of rows from 1 up"),
    ({"sizes": (16, 32, 300)}, "the size 300 is above the data: .* has 256 rows"),
    ({"sizes": (16, 32, 65)}, r"the size 65 is above the budget 1/4 of 256 rows \(64\)"),
    ({"sizes": (16, 32)}, "blend needs 3 sizes or more, and there are 2"),
    ({"sizes": (8, 16, 32), "method": "power"}, "power needs 4 sizes or more"),
    ({"sizes": (8, 16), "method": "lensllm"}, "lensllm needs 3 sizes or more"),
    ({"sizes": (8, 16), "method": "rectified"}, "rectified needs 3 sizes or more"),
    (
        {"sizes": (8, 16, 32), "method": "lensllm", "confidence": 0.9},
        "lensllm needs 4 sizes or more",
    ),
    ({"budget": Budget.parse("1")}, "nothing would be left to predict"),
    ({"budget": Budget.parse("1/100")}, "a subset needs 16 rows or more"),
    ({"budget": Budget.parse("1e15flops")}, "is above the data: training every model"),
    ({"budget": Budget.parse("1flops")}, "does not pay for the 3 sizes"),
    ({"budget": Budget.parse("1flops"), "order": "algorithm1"}, "does not pay for subsets of 16"),
    ({"budget": Budget.parse("1min"), "order": "algorithm1"}, "which minutes do not tell"),
    ({"target": 64, "sizes": (8, 16, 64), "budget": Budget.parse("1")}, "not below the target 64"),
    ({"method": "oracle"}, "unknown method 'oracle'"),
    ({"method": "subtuning", "confidence": 0.9}, "subtuning gives none"),
    ({"drop": 1.5}, "drop is 1.5"),
    ({"gamma": 2}, "gamma is 2"),
    ({"tau": 0.0}, "tau is 0.0"),
    ({"probe": 1000}, "probe is 1000, and .* has 256 rows"),
    ({"probe": -1}, "probe is -1; expected 0 or more"),
    ({"probe": 0, "method": "lensllm"}, "lensllm reads the kernel Θ of every run, and probe is 0"),
    ({"order": "sideways"}, "order is 'sideways'; expected one of growing, promotion"),
    ({"rank_by": "mae"}, "rank_by is 'mae'; expected one of loss, accuracy, f1"),
    ({"screen": 1.5}, "screen is 1.5; expected a share"),
    ({"screen_by": "luck"}, "screen_by is 'luck'; expected one of logme, hscore, knn"),
    ({"keep": "all"}, "keep is 'all'; expected one of winner, None"),
    ({"seeds": 0}, "seeds is 0"),
    ({"rates": (1e-3, 1e-3)}, "the learning rate 0.001 is given twice"),
    ({"rates": (1e-3, -1.0)}, "lr is -1.0"),
    ({"models": ("a",)}, "1 model to choose from"),
    ({"models": ("a", "b", "a")}, "the model 'a' is given twice"),
    (
        {"models": ("/nowhere/a", "/nowhere/b")},
        "0 of 2 models can be used, .*'/nowhere/a' could not be loaded: there is no such folder",
    ),
    ({"columns": Columns(text="words")}, "has no column 'words'"),
    ({"columns": Columns(regression=True)}, "has the label 'bad'; expected a number"),
    (
        {"recipe": Recipe(epochs=1, batch_size=16), "sizes": (16, 32, 64)},
        "is trained on in one step, whose learning rate",
    ),
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
