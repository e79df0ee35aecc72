"""The demo's files: results.json, three figures, and report.html, which holds all of it."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .._io import DataError, write_bytes, write_json
from ..compare.report import (
    Picture,
    Section,
    forests,
    norms_figure,
    pooled,
    reliability_figure,
    score_curves_figure,
    styles_of,
    write_html,
)
from ..compare.tables import Table, methods_of
from .judge import DELTAS
from .options import TITLES, Method
from .results import ARROWS, Outcome, Row, Run, in_short, table

_CAPTIONS = {
    "reliability.png": (
        "Reliability, all seeds together: accuracy of the predicted class over its confidence in "
        "8 bins; on the dashed line a model is as sure as it is right. Bars: share of examples."
    ),
    "score_over_noise.png": (
        "Score when the token embeddings are e + δ v, v ~ N(0, I); mean and spread over seeds."
    ),
    "norms.png": (
        "Smoothness of each layer on dev sentences, before and after fine-tuning, means over seeds."
    ),
}


def check_folder(out: Path) -> None:
    """Checks, before the work starts, that results can go to `out`; makes nothing yet.

    Raises:
        DataError: `out`, or the first folder above it that exists, is no folder or not writable.
    """
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise DataError(f"--out {out}: {existing} is a file, not a folder; choose another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise DataError(f"--out {out}: {existing} cannot be written to; choose another folder")


def write_outcome(outcome: Outcome, out: Path) -> list[Path]:
    """Writes every file, each whole or not at all; returns their paths, the report first."""
    rows = table(outcome)
    pictures = draw(outcome)
    for name, figure in pictures.items():
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=200)
        write_bytes(out / name, png.getvalue())
    write_json(out / "results.json", to_json(outcome, rows))
    write_html(out / "report.html", "JacHess demo", sections(outcome, rows, pictures))
    return [out / name for name in ("report.html", "results.json", *pictures)]


def draw(outcome: Outcome) -> dict[str, Any]:
    """The three figures, by file name."""
    runs = {method: outcome.of(method) for method in outcome.methods}
    jacobian = {"before": outcome.before[0]} | _layer_means(runs, "jacobian")
    hessian = {"before": outcome.before[1]} | _layer_means(runs, "hessian")
    noisy = {
        TITLES[m]: [list(run.judgement["noisy"].values()) for run in found]
        for m, found in runs.items()
    }
    diagrams = {
        TITLES[method]: pooled([run.judgement["reliability"] for run in found])
        for method, found in runs.items()
    }
    size = "δ (rms embedding entry of the base model)"
    return {
        "reliability.png": reliability_figure(diagrams),
        "score_over_noise.png": score_curves_figure(DELTAS, noisy, size, outcome.score_name),
        "norms.png": norms_figure(jacobian, hessian, reference="before"),
    }


def _layer_means(runs: Mapping[Method, list[Run]], name: str) -> dict[str, Any]:
    return {
        TITLES[method]: np.mean([run.judgement[name] for run in found], axis=0)
        for method, found in runs.items()
    }


def paragraphs(outcome: Outcome, rows: list[Row]) -> list[str]:
    """The task, the baseline, and what was found."""
    intro = [f"Task: {outcome.task}."]
    if outcome.naive_bayes is not None:
        intro.append(f"Naive Bayes on words: {outcome.score_name} {outcome.naive_bayes:.3f}.")
    return [*intro, *in_short(outcome, rows)]


def sections(outcome: Outcome, rows: list[Row], pictures: Mapping[str, Any]) -> list[Section]:
    """The report: what was found, the tables, the figures, the setting."""
    setting = [f"{key}: {value}" for key, value in outcome.setting.items()]
    found = outcome.results
    compared = _compared_table(outcome, rows)
    return [
        Section(
            "In short",
            paragraphs(outcome, rows),
            pictures=forests(found, styles_of(methods_of(found))),
        ),
        Section("Means over seeds", [_NOTE], [main_table(outcome, rows)]),
        *([Section("Seed by seed", [_COMPARED_NOTE], compared)] if compared else []),
        Section(
            "Figures",
            pictures=[Picture(_CAPTIONS[name], figure) for name, figure in pictures.items()],
        ),
        Section("What was run", literal=["\n".join(setting)]),
    ]


_NOTE = (
    "Mean ± sample standard deviation. ↑ higher is better, ↓ lower is better. All methods start "
    "from the same weights and see the same labelled batches in the same order. They take their "
    "steps in turns; times are medians over steps."
)
_COMPARED_NOTE = (
    "On how many seeds a method is better than no regulariser (norms: lower), and p of the "
    "two-sided Mann–Whitney U test, Holm-adjusted within the row. With n seeds a side no p is "
    "below 2 / C(2n, n): 0.1 for three."
)


def main_table(outcome: Outcome, rows: list[Row], caption: str = "") -> Table:
    """Every figure of every method."""
    lines = [
        [
            row.title + ARROWS[row.better],
            *(row.cell(m) if m in row.values else "" for m in outcome.methods),
        ]
        for row in rows
    ]
    return Table(caption, ["", *(TITLES[m] for m in outcome.methods)], lines)


def _compared_table(outcome: Outcome, rows: list[Row]) -> list[Table]:
    compared = [method for method in outcome.methods if method != "none"]
    lines = [[row.title, *(row.compared(m) for m in compared)] for row in rows if row.p]
    return [Table("", ["", *(TITLES[m] for m in compared)], lines)] if lines else []


def to_json(outcome: Outcome, rows: list[Row]) -> dict[str, Any]:
    """Everything, per seed."""
    return {
        "task": outcome.task,
        "score": outcome.score_name,
        "setting": outcome.setting,
        "naive_bayes": outcome.naive_bayes,
        "before": {"jacobian": outcome.before[0], "hessian": outcome.before[1]},
        "table": [
            {
                "title": row.title,
                "better": row.better,
                "values": row.values,
                "p_holm": row.p,
            }
            for row in rows
        ],
        "runs": [
            {
                "method": run.method,
                "seed": run.seed,
                **run.judgement,
                "losses": run.log.losses,
                "seconds": run.log.seconds,
            }
            for run in outcome.runs
        ],
    }
