"""Methods over budgets: figures against `select` and the metrics' own formulas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jachess_ext.scaling import select
from jachess_ext.selection_report.history import of_table
from python_tests.selection_report import studies

TABLE = studies.table(5)
TRUTH = TABLE.losses_at(studies.TARGET)


def test_against_the_truth() -> None:
    """Every point is numpy's correlation of the forecasts that `select` gives at that budget."""
    found = of_table(TABLE, "blend", studies.BUDGET, studies.TARGET, TRUTH, tokens=7.0)
    assert found is not None and found.against_truth
    assert [s.budget for s in found.steps["blend"]] == list(TABLE.trained[2:-1])
    for method in ("blend", "ats", "subtuning"):
        for step in found.steps[method]:
            made = select(TABLE, step.budget, studies.TARGET, method)
            expected = 100 * np.corrcoef(made.predicted_losses, TRUTH)[0, 1]
            assert step.pear_corr == pytest.approx(expected)
            chosen = TRUTH[made.scores.argmin()]
            assert step.rel_acc == pytest.approx(100 * (TRUTH.max() - chosen) / np.ptp(TRUTH))
            assert step.share == pytest.approx(made.flops / made.full_flops)
    last = found.steps["subtuning"][-1]
    assert last.share == pytest.approx(0.25)
    for method in ("zeroshot", "modelsize"):
        (step,) = found.steps[method]
        assert (step.budget, step.share) == (0.0, 0.0)


def test_stability_reads_nothing_above_the_budget() -> None:
    found = of_table(TABLE, "blend", studies.BUDGET, studies.TARGET, None)
    assert found is not None and not found.against_truth
    assert found.steps["blend"][-1].pear_corr == pytest.approx(100.0)
    assert found.steps["blend"][-1].budget == studies.BUDGET
    hidden = TABLE.losses.copy()
    hidden[:, TABLE.sizes > studies.BUDGET] = np.nan
    again = of_table(replace(TABLE, losses=hidden), "blend", studies.BUDGET, studies.TARGET, None)
    assert again == found


def test_nothing_to_compare() -> None:
    alike = replace(TABLE, losses=np.ones_like(TABLE.losses))
    assert of_table(alike, "blend", studies.BUDGET, studies.TARGET, None) is None
    few = replace(TABLE, sizes=TABLE.sizes[:3], losses=TABLE.losses[:, :3])
    assert of_table(few, "blend", 1600.0, studies.TARGET, None) is None
