"""Earlier tables are read by themselves, and told from the table to choose from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jachess_ext.scaling import LossTable, TableError, select
from jachess_ext.scaling.history import History
from python_tests.scaling.test_history import BUDGET, EARLIER, TABLE, TARGET, frame


@pytest.mark.parametrize("metric", ["accuracy", "loss", "f1", "ppl"])
def test_a_wide_table_of_losses_is_read_by_itself(metric: str) -> None:
    """Whatever the table to choose from holds; the standings are those of losses."""
    losses = frame(TABLE)
    today = {"ppl": np.exp(losses), "loss": losses}.get(metric, 1 - losses / 10)
    below_one = frame(EARLIER[0]) / 10  # as an accuracy has
    result = select(today, BUDGET, TARGET, metric=metric, history=below_one)
    same = select(today, BUDGET, TARGET, metric=metric, history=EARLIER[0])
    np.testing.assert_allclose(result.scores, same.scores, rtol=1e-9)
    with pytest.raises(TableError, match=r"table 1: .* rise with size.*\(by a pair"):
        select(today, BUDGET, TARGET, metric=metric, history=1 - below_one)


@pytest.mark.parametrize("rows", [None, 80])
@pytest.mark.parametrize("learnt", [0, 1, 3])
def test_tables_at_the_level_of_guessing_are_not_the_same_runs(
    learnt: int, rows: int | None
) -> None:
    """Up to some size, alike in all models and tasks; the runs themselves are still recognised."""
    draw = np.random.default_rng(0)
    earlier = []
    for _ in range(3):
        guesses = np.full((8, 6), np.log(2)) * (1 + draw.normal(0, 2e-4, (8, 6)))
        if rows is not None:
            guesses = 1 - draw.binomial(rows, 0.5, (8, 6)) / rows
        if learnt:
            guesses[:, -learnt:] = draw.uniform(0.1, 0.5, (8, learnt))
        sizes = 100.0 * 2 ** np.arange(6)
        earlier.append(LossTable(tuple("abcdefgh"), sizes, guesses, None))
    assert len(History.read(earlier).tables) == 3
    if learnt:
        with pytest.raises(TableError, match="table 2 and table 4 hold the same runs"):
            History.read([*earlier, earlier[1].rows(np.array([3, 1, 5]))])


def test_runs_of_many_models_are_recognised() -> None:
    """However close together losses are, and if one run alone is common."""
    losses = np.random.default_rng(0).uniform(0.5, 2.0, (3000, 5))
    sizes = 100.0 * 2 ** np.arange(5)
    many = LossTable(tuple(map(str, range(3000))), sizes, losses, None)
    for some in (many.rows(np.arange(0, 3000, 2)), many.rows(np.array([7])).up_to(100)):
        with pytest.raises(TableError, match="table 1 and table 2 hold the same runs"):
            History.read([many, some])
    other = replace(many, losses=losses[::-1])
    assert len(History.read([many, other]).tables) == 2
