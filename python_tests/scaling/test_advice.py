"""The advice of a selection: by drawing, and its words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jachess_ext._text import scientific
from jachess_ext.scaling import LossTable, select
from python_tests.scaling import tables


def table_of(*losses: list[float]) -> LossTable:
    names = tuple("abcdef"[: len(losses)])
    sizes = 100.0 * 2.0 ** np.arange(len(losses[0]))
    return LossTable(names, sizes, np.array(losses), np.full(len(names), 1e8))


def test_a_clear_choice_needs_no_run() -> None:
    found = select(table_of([2.0, 1.0, 0.5, 0.25], [2.0, 1.99, 1.98, 1.97]), target=1600)
    assert found.best_probabilities.max() > 0.9
    assert found.advice.startswith("a is the best with probability")
    assert found.advice.endswith("no further run is needed.")


def test_the_fewest_models_that_hold_the_best_are_named_with_their_cost() -> None:
    table, _ = tables.population(0, models=12)
    found = select(replace(table, parameters=np.full(12, 1e9)), 6400, 102400, tokens=128)
    chances = dict(zip(found.names, found.best_probabilities, strict=True))
    expected: list[str] = []
    while sum(chances[name] for name in expected) < 0.9:
        expected.append(max(chances.keys() - set(expected), key=chances.__getitem__))
    assert found.shortlist == expected and 4 < len(expected) < 12
    held = sum(chances[name] for name in expected)
    named = f"{', '.join(expected[:4])} and {len(expected) - 4} more"
    cost = scientific(len(expected) * 6 * 1e9 * 102400 * 128)
    assert found.advice == (
        f"The best is among {named} with probability {100 * held:.0f} %; the other "
        f"{12 - len(expected)} are out. Training these {len(expected)} in full ({cost} FLOPs)"
        " would decide."
    )


def test_where_no_model_is_out_it_is_said() -> None:
    found = select(table_of([2.0, 1.6, 1.3, 1.1], [1.9, 1.6, 1.3, 1.1]), target=1600)
    assert len(found.shortlist) == 2
    assert found.advice.startswith("No model is out; ")


def test_a_method_without_probabilities_says_so() -> None:
    found = select(tables.population(2, models=3)[0], 6400, 102400, "subtuning")
    assert found.advice == "subtuning gives no probabilities here; it says nothing of what is out."
    assert found.advice in repr(found)


def test_costs_are_in_the_unit_that_is_asked_for() -> None:
    table = table_of([2.0, 1.6, 1.3, 1.1], [1.9, 1.7, 1.55, 1.45])
    flops = select(table, target=1600, tokens=100)
    assert flops.unit == "FLOPs"
    spent = 6 * 1e8 * 1500 * 100
    assert flops.to_frame().cost.tolist() == [pytest.approx(spent)] * 2
    assert flops.to_frame().full_cost[0] == pytest.approx(6e8 * 1600 * 100)
    assert flops.cost_text(1.234e15) == "1.23 × 10¹⁵ FLOPs"
    assert "cost" not in repr(select(replace(table, parameters=None), target=1600))
