"""The tables of docs/estimators.md as Markdown, and their place between markers in the file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from benchmarks.estimator_sampling import Statistics


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def percent(value: float | Tensor) -> str:
    """A signed percentage, for biases."""
    return f"{100 * float(value):+.1f} %"


def spread(value: float | Tensor) -> str:
    """A relative standard deviation."""
    return f"{float(value):.3f}"


def mean_bias(found: Statistics) -> str:
    """Mean over layers and tokens, with its standard error (tokens of a draw taken as one)."""
    error = float(found.bias_error.square().mean().sqrt())
    return f"{percent(found.bias.mean())} ± {100 * error:.1f}"


def quadratic_mean(values: Tensor) -> Tensor:
    """Spreads are averaged as variances."""
    return values.square().mean().sqrt()


def range_of(values: Tensor) -> str:
    """Smallest, median and largest."""
    low, middle, high = values.min(), values.median(), values.max()
    return f"{low:.3f} / {middle:.3f} / {high:.3f}"


def replace_section(path: Path, name: str, text: str) -> None:
    """Put ``text`` between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``, all or nothing.

    Raises:
        ValueError: the file lacks the markers.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    old = path.read_text()
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(end) < old.index(begin):
        raise ValueError(f"{path} needs the lines {begin} and {end}, once each and in that order")
    before, rest = old.split(begin)
    new = f"{before}{begin}\n{text}{end}{rest.split(end)[1]}"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(new)
    os.replace(temporary, path)


def layers_table(found: dict[str, Statistics]) -> str:
    """Per layer: relative spread of the sum over tokens, a line per estimator."""
    count = len(next(iter(found.values())).sum_spread)
    header = ["estimator", *(f"layer {k}" for k in range(count))]
    lines = [[name, *(spread(v) for v in each.sum_spread)] for name, each in found.items()]
    return markdown(header, lines)


def tokens_table(found: dict[str, Statistics]) -> str:
    """Per token (min / median / max over tokens and layers): bias and spread."""
    header = [
        "estimator",
        "draws",
        "bias per token",
        "spread per token",
        "spread of the sum over tokens",
    ]
    lines = [
        [
            name,
            str(s.draws),
            range_of(s.bias),
            range_of(s.spread),
            spread(quadratic_mean(s.sum_spread)),
        ]
        for name, s in found.items()
    ]
    return markdown(header, lines)


def scaled(found: Statistics, factor: float) -> Statistics:
    """Statistics of the draws times ``factor``, for example without the c_P correction."""
    return Statistics(
        bias=(found.bias + 1) * factor - 1,
        bias_error=found.bias_error * factor,
        spread=found.spread * factor,
        sum_bias=(found.sum_bias + 1) * factor - 1,
        sum_spread=found.sum_spread * factor,
        draws=found.draws,
    )
