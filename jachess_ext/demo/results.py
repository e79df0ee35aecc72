"""What a run of the demo found: every figure of every seed, and the rows of its one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..compare.report import answer
from ..compare.tables import REFERENCE, adjusted_p, to_frame
from .finetune import Log
from .judge import CORRUPTION, HEADLINE_DELTA
from .options import TITLES, Method

if TYPE_CHECKING:
    from pandas import DataFrame

Figures = dict[str, Any]
"""Of `compare.judge.judge`."""

ARROWS = {"higher": " ↑", "lower": " ↓", "": ""}
"""Marks of which direction is better, for the titles of rows."""

RATIO = "ratio to plain"
"""The row of what a step costs."""

_WARM_UP = 3  # steps whose times do not count


@dataclass(frozen=True)
class Run:
    """One model fine-tuned: by which method, from which seed, its steps, and its judgement."""

    method: Method
    seed: int
    log: Log
    judgement: Figures


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

    @property
    def results(self) -> DataFrame:
        """Score and Brier score as a comparison's runs."""
        return to_frame(
            {
                "task": self.setting.get("task", "the task"),
                "method": REFERENCE if run.method == "none" else TITLES[run.method],
                "seed": run.seed,
                "score": run.judgement["score"],
                "brier": run.judgement["brier"],
            }
            for run in self.runs
        )

    def of(self, method: Method) -> list[Run]:
        """The runs of one method, by seed."""
        return sorted((run for run in self.runs if run.method == method), key=lambda run: run.seed)


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure for every method, over seeds.

    `values[method]` holds one number a seed; `p` Holm-adjusted p-values against no regulariser
    (over the comparisons of this row), for the regularised methods; none where none are compared.
    """

    title: str
    better: Literal["higher", "lower", ""]
    values: dict[Method, list[float]]
    p: dict[str, float]
    digits: int

    def cell(self, method: Method) -> str:
        """Mean ± spread over seeds."""
        values, digits = self.values[method], self.digits
        mean = f"{np.mean(values):,.{digits}f}"
        return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):,.{digits}f}"

    def compared(self, method: Method) -> str:
        """On how many seeds a method is to the better (of norms: lower), and p."""
        differences = np.subtract(self.values[method], self.values["none"])
        wins = (differences > 0) if self.better == "higher" else (differences < 0)
        p = f", p {self.p[method]:.2f}" if len(wins) > 1 else ""
        return f"{wins.sum()} of {len(wins)}{p}"


def table(outcome: Outcome) -> list[Row]:
    """The rows score and calibration first, then robustness, norms and time."""
    name = outcome.score_name
    judged: list[tuple[str, Literal["higher", "lower", ""], int, Callable[[Figures], Any]]] = [
        (name, "higher", 3, lambda j: j["score"]),
        ("Brier score", "lower", 3, lambda j: j["brier"]),
        ("ECE, 8 bins", "lower", 3, lambda j: j["ece"]),
        *(
            (
                f"{name}, {share:.0%} tokens unknown",
                "higher",
                3,
                lambda j, at=share: j["corrupted"][str(at)],
            )  # type: ignore[misc]
            for share in CORRUPTION
        ),
        (
            f"{name}, noise δ = {HEADLINE_DELTA:g} rms",
            "higher",
            3,
            lambda j: j["noisy"][str(HEADLINE_DELTA)],
        ),
    ]
    rows = [_row(outcome, title, better, digits, get) for title, better, digits, get in judged]
    for symbol, before, get in (
        ("‖J‖", outcome.before[0], lambda j: sum(j["jacobian"])),
        ("‖H‖", outcome.before[1], lambda j: sum(j["hessian"])),
    ):
        title = f"Σ{symbol}, before {sum(before):,.0f}"
        rows.append(_row(outcome, title, "", 0, get))
    return rows + _time_rows(outcome)


def in_short(outcome: Outcome, rows: Sequence[Row]) -> list[str]:
    """What the demo found and what it cost, in sentences; nothing without runs to compare with.

    Args:
        rows: the outcome's `table`.
    """
    found = answer(outcome.results)
    ratios = next((row.values for row in rows if row.title == RATIO), {})
    costs = {m: float(np.mean(v)) for m, v in ratios.items()}
    listed = ", ".join(f"{cost:.1f} ({TITLES[m]})" for m, cost in costs.items() if m != "none")
    return [*found, f"A step took {listed} times as long as a plain one."] if listed else found


def _row(
    outcome: Outcome,
    title: str,
    better: Literal["higher", "lower", ""],
    digits: int,
    get: Callable[[Figures], float],
) -> Row:
    values: dict[Any, list[float]] = {
        m: [get(run.judgement) for run in outcome.of(m)] for m in outcome.methods
    }
    return Row(title, better, values, adjusted_p(values), digits)


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
    rows = [Row("seconds per step", "", seconds, {}, 4)]
    return rows + [Row(RATIO, "", ratios, {}, 2)] if ratios else rows


def _warm(run: Run) -> int:
    return _WARM_UP if len(run.log.seconds) > 2 * _WARM_UP else 0
