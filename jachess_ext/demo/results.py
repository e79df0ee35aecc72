"""What a run of the demo found: every figure of every seed, and the rows of its one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..evaluation.judge import Judgement
from ..evaluation.statistics import Summary, holm_bonferroni, mann_whitney, summarise
from .finetune import TITLES, Log, Method
from .judge import CORRUPTION, DELTAS, HEADLINE_DELTA

ARROWS = {"higher": " ↑", "lower": " ↓", "": ""}
"""Marks of which direction is better, for the titles of rows."""

_WARM_UP = 3  # steps whose times do not count


@dataclass(frozen=True)
class Run:
    """One model fine-tuned: by which method, from which seed, its steps, and its judgement."""

    method: Method
    seed: int
    log: Log
    judgement: Judgement


@dataclass(frozen=True)
class Outcome:
    """Everything the demo reports.

    `before`: norms per layer (‖J‖, ‖H‖) of the model before fine-tuning. `naive_bayes`: score of
    that baseline, or None for text pairs. `setting`: what was run, in words and numbers.
    """

    task: str
    score_name: str
    runs: list[Run]
    before: tuple[list[float], list[float]]
    naive_bayes: float | None
    setting: dict[str, Any]

    @property
    def methods(self) -> list[Method]:
        """The methods run, in the order of `TITLES`."""
        present = {run.method for run in self.runs}
        return [method for method in TITLES if method in present]

    def of(self, method: Method) -> list[Run]:
        """The runs of one method, by seed."""
        return sorted((run for run in self.runs if run.method == method), key=lambda run: run.seed)


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure for every method, over seeds, and what to make of it.

    `values[method]` holds one number a seed; `p` Holm-adjusted p-values against no regulariser
    (over the comparisons of this row), for the regularised methods.
    """

    title: str
    better: Literal["higher", "lower", ""]
    values: dict[Method, list[float]]
    p: dict[Method, float]
    sentence: str
    digits: int

    def cell(self, method: Method) -> str:
        """Mean ± spread over seeds."""
        return _number(summarise(self.values[method]), self.digits)


def table(outcome: Outcome) -> list[Row]:
    """The rows score and calibration first, then robustness, norms and time."""
    name = outcome.score_name
    judged: list[tuple[str, Literal["higher", "lower", ""], int, Callable[[Judgement], Any]]] = [
        (name, "higher", 3, lambda j: j.score),
        ("Brier score", "lower", 3, lambda j: j.brier),
        ("ECE, 8 bins", "lower", 3, lambda j: j.ece),
        *(
            (f"{name}, {share:.0%} tokens unknown", "higher", 3, _corrupted(index))  # type: ignore[list-item]
            for index, share in enumerate(CORRUPTION)
        ),
        (f"{name}, noise δ = {HEADLINE_DELTA:g} rms", "higher", 3, _noise_score),
    ]
    rows = [_row(outcome, title, better, digits, get) for title, better, digits, get in judged]
    for symbol, before, get in (
        ("‖J‖", outcome.before[0], lambda j: sum(j.jacobian)),
        ("‖H‖", outcome.before[1], lambda j: sum(j.hessian)),
    ):
        title = f"Σ{symbol}, before {sum(before):,.0f}"
        rows.append(_row(outcome, title, "", 0, get))
    return rows + _time_rows(outcome)


def _corrupted(index: int) -> Callable[[Judgement], float]:
    return lambda judgement: judgement.corrupted[index]


def _noise_score(judgement: Judgement) -> float:
    return judgement.noisy[DELTAS.index(HEADLINE_DELTA)]


def _row(
    outcome: Outcome,
    title: str,
    better: Literal["higher", "lower", ""],
    digits: int,
    get: Callable[[Judgement], float],
) -> Row:
    values = {m: [get(run.judgement) for run in outcome.of(m)] for m in outcome.methods}
    compared: list[Method] = [m for m in outcome.methods if m != "none" and "none" in values]
    raw = [mann_whitney(values[m], values["none"]) for m in compared]
    adjusted = dict(zip(compared, holm_bonferroni(raw), strict=True))
    clauses = [compare(TITLES[m], values[m], values["none"], better) for m in compared]
    return Row(title, better, values, adjusted, "; ".join(clauses) + "." if clauses else "", digits)


def compare(
    title: str,
    values: Sequence[float],
    plain: Sequence[float],
    better: Literal["higher", "lower", ""],
) -> str:
    """A neutral clause: in how many seeds a method is above or below no regulariser.

    Says better or worse only where all seeds agree, and more than one was run.
    """
    differences = np.asarray(values) - np.asarray(plain)
    up, down, total = int((differences > 0).sum()), int((differences < 0).sum()), len(differences)
    if total == 1:
        word = "higher" if up else "lower" if down else "equal"
        return f"{title} {word} in the one seed"
    if up == total or down == total:
        word = "higher" if up else "lower"
        verdict = "" if not better else ", better" if word == better else ", worse"
        return f"{title} {word} in all {total} seeds{verdict}"
    return f"{title} without clear difference (higher in {up}, lower in {down} of {total} seeds)"


def _time_rows(outcome: Outcome) -> list[Row]:
    """Median seconds per step, and the median ratio to the plain step taken in the same turn."""
    seconds: dict[Method, list[float]] = {}
    ratios: dict[Method, list[float]] = {}
    for method in outcome.methods:
        runs = outcome.of(method)
        seconds[method] = [float(np.median(run.log.seconds[_warm(run) :])) for run in runs]
        if "none" in outcome.methods:
            ratios[method] = [
                float(np.median(np.divide(run.log.seconds, plain.log.seconds)[_warm(run) :]))
                for run, plain in zip(runs, outcome.of("none"), strict=True)
            ]
    note = "Median over steps; the methods took their steps in turns."
    rows = [Row("seconds per step", "", seconds, {}, note, 4)]
    if ratios:
        ratio = "Median over turns of the ratio to the plain step of the same turn."
        rows.append(Row("ratio to plain", "", ratios, {}, ratio, 2))
    return rows


def _warm(run: Run) -> int:
    return _WARM_UP if len(run.log.seconds) > 2 * _WARM_UP else 0


def _number(summary: Summary, digits: int) -> str:
    mean = f"{summary.mean:,.{digits}f}"
    return mean if summary.n == 1 else f"{mean} ± {summary.spread:,.{digits}f}"
