"""Formatting of numbers in tables and reports."""

from __future__ import annotations

import math

DASH = "–"


def number_text(value: float | None) -> str:
    """Return a number as text, such as 0.2500, 1,500 or 20,000; a dash for None, NaN or
    infinity."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"


def percent(probability: float) -> str:
    """Return a probability in per cent, such as "31 %" for 0.314; a dash for NaN."""
    if math.isnan(probability):
        return DASH
    if 0 < probability < 0.001:
        return "< 0.1 %"
    return f"{100 * probability:.{0 if 0.01 <= probability <= 0.99 else 1}f} %"


def scientific_text(value: float) -> str:
    """Return a positive number in scientific notation, such as 1.23 × 10¹⁵."""
    if not (math.isfinite(value) and value > 0):
        return f"{value:g}"
    mantissa, power = f"{value:.2e}".split("e")
    return f"{mantissa} × 10{str(int(power)).translate(_RAISED)}"


_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
