"""A fitted law in words: what a notebook shows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .._io import MissingExtra

if TYPE_CHECKING:
    from .fitting import FittedLaw, Transition

_MOST_CURVES = 10
_LABELS = 12  # characters of the first column


def describe(fitted: FittedLaw) -> str:
    """Return the law, its parameters, transition, residual, and what intervals and choice rest on.

    One curve comes with 90 % intervals of its parameters, several as a row each.
    """
    first, last = fitted.measured[:, 0].min(), fitted.measured[:, 1].max()
    curves = len(fitted.measured)
    through = "" if curves == 1 else f"{curves} curves at "
    sizes = f"{_size(first, 6)} to {_size(last, 6)}"
    head = f"{fitted.law} law, {fitted.formula}, through {through}sizes {sizes}"
    rows = _one_curve(fitted) if curves == 1 else _many_curves(fitted)
    if fitted.backtest:
        order = sorted(fitted.backtest, key=fitted.backtest.__getitem__)
        errors = ", ".join(f"{law} {fitted.backtest[law]:.2g}" for law in order)
        chosen = f"median |ln error| of larger sizes forecast from smaller ones: {errors}"
    elif fitted.drift is not None:
        chosen = "none, too few sizes; the simplest law"
    else:
        chosen = "none, the law was named"
    if not fitted.has_width:
        width = "none, no degree of freedom is left"
    elif fitted.drift is None:
        width = "of losses take the law as exact, and are too narrow where it is not"
    else:
        told = "the backtest's errors and " if fitted.backtest else ""
        width = f"of losses widen beyond the largest size, by {told}the slope there"
    rows += [
        _row("backtest", chosen),
        _row("intervals", width),
        _row("forecasts", "of this law alone; select's, by default, are of many shapes and curves"),
    ]
    return "\n".join([head, *rows])


def _row(label: str, text: str) -> str:
    return f"  {label:<{_LABELS}}{text}"


def _size(value: float, digits: int = 3) -> str:
    """Return a size to so many digits, with commas, and as a power of ten where that is shorter."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if 100 <= rounded < 1e12 else f"{rounded:.{digits}g}"


def _one_curve(fitted: FittedLaw) -> list[str]:
    rows = []
    try:
        intervals = fitted.parameter_intervals() if fitted.has_width else {}
        transition = _transition_text(fitted)
    except MissingExtra:
        intervals, transition = {}, "unknown, scipy is not installed"
    for name, value in fitted.params.items():
        text = f"{np.ravel(value)[0]:,.4g}"
        if name in intervals:
            low, high = (f"{np.ravel(end)[0]:,.4g}" for end in intervals[name])
            text = f"{text:<12}[{low}, {high}]"
        rows.append(_row(name, text))
    rows.append(_row("transition", transition))
    if fitted.has_width:
        residual = f"{fitted.noise[0]:.2g} in ln L, degrees of freedom: {fitted.dof[0]:.3g}"
    else:
        residual = "unknown, no degree of freedom is left"
    return [*rows, _row("residual", residual)]


def _transition_text(fitted: FittedLaw) -> str:
    (transition,) = _transitions(fitted)
    if transition is not None:
        return f"{_size(transition.size):<12}[{_size(transition.low)}, {_size(transition.high)}]"
    return "none seen within these sizes" if fitted.has_transition else "the law has none"


def _transitions(fitted: FittedLaw) -> list[Transition | None]:
    found = fitted.transition
    return found if isinstance(found, list) else [found]


def _many_curves(fitted: FittedLaw) -> list[str]:
    numbers = {name: np.ravel(value) for name, value in fitted.params.items()}
    numbers["residual"] = fitted.noise
    columns = {
        name: ["unknown" if np.isnan(value) else f"{value:,.4g}" for value in values]
        for name, values in numbers.items()
    }
    if fitted.has_transition:
        try:
            found = [
                "none seen" if each is None else _size(each.size) for each in _transitions(fitted)
            ]
        except MissingExtra:
            found = ["unknown"] * len(fitted.measured)
        columns["transition"] = found
    rows = [_row("curve", "".join(f"{name:<12}" for name in columns).rstrip())]
    for number, texts in enumerate(zip(*columns.values(), strict=True)):
        if number == _MOST_CURVES:
            rows.append(_row("…", f"{len(fitted.measured) - _MOST_CURVES} more"))
            break
        rows.append(_row(str(number), "".join(f"{text:<12}" for text in texts).rstrip()))
    return rows
