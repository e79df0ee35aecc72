"""What a notebook shows of a fitted law."""

from __future__ import annotations

import numpy as np
import pytest

from jachess_ext.scaling import fit
from python_tests.scaling import curves

NOISY = curves.noisy(
    curves.rectified(curves.WITH_ZERO, 90.0, 30.0, 0.4, 0.5), np.random.default_rng(0), 0.01
)


def lines(fitted: object) -> dict[str, str]:
    """Return the text behind each label, and the first line as "head"."""
    first, *rows = repr(fitted).split("\n")
    found = {"head": first}
    for row in rows:
        label, text = row.split(maxsplit=1)
        found[label] = text
    return found


def test_one_curve() -> None:
    found = fit(curves.WITH_ZERO, NOISY, "rectified")
    text = lines(found)
    assert text["head"] == (
        "rectified law, L = B / (D_l + D^beta) + E, through sizes 200 to 1,638,400"
    )
    for name, value in found.params.items():
        low, high = found.parameter_intervals()[name]
        shown, ends = text[name].split(maxsplit=1)
        assert float(shown.replace(",", "")) == pytest.approx(value, rel=1e-3)
        assert ends == f"[{low:,.4g}, {high:,.4g}]"
    transition = found.transition
    assert float(text["transition"].split()[0].replace(",", "")) == pytest.approx(
        transition.size, rel=1e-2
    )
    assert text["residual"] == f"{found.noise[0]:.2g} in ln L, degrees of freedom: 11"
    assert text["backtest"] == "none, the law was named"
    assert "as exact" in text["intervals"]
    assert "select" in text["forecasts"]


def test_what_was_chosen_and_why() -> None:
    found = fit(curves.WITH_ZERO, NOISY)
    text = lines(found)
    said = [part.split() for part in text["backtest"].split(": ")[1].split(", ")]
    assert [law for law, _ in said] == sorted(found.backtest, key=found.backtest.__getitem__)
    assert [error for _, error in said] == [f"{found.backtest[law]:.2g}" for law, _ in said]
    assert "backtest's errors" in text["intervals"]
    few = lines(fit(curves.SIZES[:4], NOISY[1:5]))
    assert few["backtest"] == "none, too few sizes; the simplest law"
    assert few["intervals"] == "of losses widen beyond the largest size, by the slope there"
