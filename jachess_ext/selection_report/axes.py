"""Axes that read as numbers, not as powers: sizes across, losses up; labels as they were given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..evaluation.extras import require

NONE = "–"
_LONGEST = 28
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def letters(text: str, longest: int = _LONGEST) -> str:
    """A user's text in a figure: nothing between dollar signs is mathematics; long ones are cut."""
    if len(text) > longest:
        kept = longest - 1
        text = text[: kept // 2] + "…" + text[-(kept - kept // 2) :]
    return text.replace("$", r"\$")


def size_text(size: float) -> str:
    """1500 as 1.5k."""
    for unit, letter in _UNITS:
        if size >= unit:
            return f"{size / unit:.3g}{letter}"
    return f"{size:.3g}"


def number_text(value: float) -> str:
    """0.25, 1500, 20k."""
    return size_text(value) if value >= 1e4 else f"{value:.4g}"


def cell_text(value: float | None) -> str:
    """0.2500, 1,500, 20,000; a dash where there is no number."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"


def share_text(probability: float) -> str:
    """0.314 as 31 %."""
    if 0 < probability < 0.001:
        return "< 0.1 %"
    return f"{100 * probability:.{0 if 0.01 <= probability <= 0.99 else 1}f} %"


def spread_of(values: Sequence[float]) -> tuple[float, float]:
    """Limits of a logarithmic axis: a little beyond the positive values."""
    kept = np.array([v for v in values if np.isfinite(v) and v > 0])
    if not len(kept):
        return 0.5, 2.0
    low, high = float(kept.min()), float(kept.max())
    room = max((high / low) ** 0.06, 1.02)
    return low / room, high * room


def plain_log_axis(panel: Any, which: str, limits: tuple[float, float]) -> None:
    """Makes the axis "x" or "y" logarithmic, with a few round numbers on it and no others."""
    ticker = require("matplotlib.ticker")
    panel.set(**{f"{which}scale": "log"})
    panel.set(**{f"{which}lim": limits})
    axis = getattr(panel, f"{which}axis")
    axis.set_major_locator(ticker.FixedLocator(round_numbers(*limits)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: number_text(value)))
    axis.set_minor_locator(ticker.NullLocator())


def round_numbers(low: float, high: float) -> list[float]:
    """Round numbers between positive limits, three to seven of them."""
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        found = _multiples(low, high, steps)
        if len(found) >= 3:
            return found[:: -(-len(found) // 7)]
    ticks = require("matplotlib.ticker").MaxNLocator(5).tick_values(low, high)
    return [float(tick) for tick in ticks if low <= tick <= high]


def _multiples(low: float, high: float, steps: Sequence[float]) -> list[float]:
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    every = (step * 10.0**power for power in powers for step in steps)
    return [value for value in every if low <= value <= high]


def log_size_axis(panel: Any, smallest: float, largest: float, zero: bool) -> None:
    """Training examples across, size 0 (where there is one) at half the smallest."""
    ticker = require("matplotlib.ticker")
    panel.set_xscale("log")
    panel.set_xlim(smallest / (2.6 if zero else 1.3), largest * 1.3)
    ticks = _size_ticks(smallest, largest, 4 if zero else 5)
    names = [size_text(tick) for tick in ticks]
    if zero:
        ticks, names = [smallest / 2, *ticks], ["0", *names]
    panel.xaxis.set_major_locator(ticker.FixedLocator(ticks))
    panel.xaxis.set_major_formatter(ticker.FixedFormatter(names))
    panel.xaxis.set_minor_locator(ticker.NullLocator())


def _size_ticks(smallest: float, largest: float, most: int) -> list[float]:
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = _multiples(smallest, largest, steps)
        if len(found) <= most:
            break
    if len(found) < 2:
        return [smallest, largest]
    return found[:: -(-len(found) // most)]
