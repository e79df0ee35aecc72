"""What a notebook shows of a fitted law."""

from __future__ import annotations

import numpy as np
import pytest

from jachess_ext._io import MissingExtra
from jachess_ext.scaling import fit, predictive
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


def test_where_nothing_is_known() -> None:
    power = lines(fit(curves.SIZES[:4], NOISY[1:5], "power"))
    assert power["transition"] == "the law has none"
    assert power["residual"] == "unknown, no degree of freedom is left"
    assert power["intervals"] == "unknown, no degree of freedom is left"
    assert "[" not in power["B"]
    straight = curves.noisy(curves.SIZES**-0.3, np.random.default_rng(0), 0.01)
    found = lines(fit(curves.SIZES, straight, "rectified"))
    assert found["transition"] == "none seen within these sizes"


def test_of_many_curves_the_ranges() -> None:
    flat = np.full(15, 0.5) * np.exp(1e-3 * np.random.default_rng(1).standard_normal(15))
    found = fit(curves.WITH_ZERO, np.stack([NOISY, 2 * NOISY, flat]), "rectified")
    text = lines(found)
    assert text["head"].endswith("through 3 curves at sizes 200 to 1,638,400")
    for name, values in found.params.items():
        assert text[name] == f"{values.min():,.4g} to {values.max():,.4g}"
    assert text["transition"] == "seen in 2 of 3 curves"
    noise = f"{found.noise.min():.2g} to {found.noise.max():.2g}"
    assert text["residual"] == f"{noise} in ln L, degrees of freedom: 11"


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: str) -> None:
        raise MissingExtra("scipy is needed for this and not installed")

    found = [fit(curves.WITH_ZERO, rows, "rectified") for rows in (NOISY, np.tile(NOISY, (2, 1)))]
    monkeypatch.setattr(predictive, "require", missing)
    one, two = map(lines, found)
    assert one["transition"] == "unknown, scipy is not installed"
    assert one["beta"] == f"{found[0].params['beta']:,.4g}"
    assert two["transition"] == "unknown, scipy is not installed"
