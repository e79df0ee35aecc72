"""The estimator study's statistics against closed forms."""

import pytest
import torch

from benchmarks import estimators
from benchmarks.estimators import Estimator, compare, draw, tiny


def test_statistics_of_known_draws() -> None:
    reference = torch.tensor([[[2.0, 4.0, 0.0]]])  # the last token does not count
    drawn = torch.tensor([[[1.0, 4.0, 0.0]], [[3.0, 6.0, 0.0]]])
    statistics = compare(drawn, reference)
    assert statistics.bias.tolist() == [[0.0, 0.25]]
    assert statistics.spread[0].tolist() == pytest.approx([2**0.5 / 2, 2**0.5 / 4])
    assert statistics.sum_bias.item() == pytest.approx(7 / 6 - 1)
    assert statistics.sum_spread.item() == pytest.approx(2**0.5 * 2 / 6)
    assert statistics.scaled(0.5).bias.tolist() == [[-0.5, -0.375]]


def test_squares_are_unbiased_against_exact_norms() -> None:
    model, row = tiny(width=6, tokens=2)
    drawn = draw(model, row, Estimator("jet", 2), copies=2_000, calls=1, squared=True)
    exact = draw(model, row, Estimator("exact", 1), copies=1, calls=1, squared=True)
    for name in ("jacobian", "hessian"):
        found = compare(getattr(drawn, name), getattr(exact, name))
        # 4 figures (2 layers, 2 tokens), fixed seed: 4 standard errors
        assert (found.bias.abs() < 4 * found.bias_error).all(), name
        assert found.bias_error.max() < 0.1
    # |D| = 6 of 6 is all of them: Σ over D · 10/6, against all scaled by 6/6 (width below 10)
    whole = draw(model, row, Estimator("jet", 2), copies=3, calls=1)
    parts = draw(model, row, Estimator("jet", 2, dimensions=6), copies=3, calls=1)
    assert parts.hessian == pytest.approx(whole.hessian * 10 / 6, rel=1e-9)


def test_a_quick_run_gives_ratios() -> None:
    given = "--quick --threads 1 --repeats 1 --parts spread --scopes first --draws 2"
    rows = estimators.main(given.split())
    assert [row.figure.split(":")[0] for row in rows] == list(estimators.OURS)
    assert all(row.ratio > 0 for row in rows)
