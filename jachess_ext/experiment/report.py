"""The report of a results file: tables on a terminal, and one HTML page with figures inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..evaluation.calibration import Reliability
from ..evaluation.extras import require
from ..evaluation.figures import SCALE, Styles, reliability_figure, score_curves_figure, styles_of
from ..evaluation.report import Picture, Section, Table, write_html
from .answer import answer, forests
from .association import association_table
from ..compare.runs import Record
from .paired import (
    OVERALL_NOTE,
    PAIRED_NOTE,
    best_control_table,
    cost_table,
    overall_tables,
    paired_tables,
)
from .tables import (
    NOTE,
    Figure,
    Results,
    ablation_tables,
    calibration_tables,
    chosen_table,
    corruption_tables,
    failed_table,
    noise_tables,
    other_score_tables,
    score_table,
    shift_table,
    slope_tables,
    smoothness_tables,
    text_tables,
)

_PANELS = 4  # in one picture


def write_report(path: Path, records: Sequence[Record]) -> None:
    """Writes the page, whole or not at all."""
    write_html(path, "Comparison of regularisation methods", sections(records))


def sections(records: Sequence[Record]) -> list[Section]:
    """What the page holds, the answer first; sections without content are left out."""
    results = Results.of(records)
    styles = styles_of(results.methods)
    paired, overall = paired_tables(results), overall_tables(results)
    made = [
        Section("In short", answer(results), _some(cost_table(results)), forests(results, styles)),
        Section(
            *("Scores", _what_was_run(results)),
            [score_table(results), *other_score_tables(results)],
        ),
        Section(
            "Token corruption",
            tables=corruption_tables(results),
            pictures=_curves(results, "corrupted", "share of tokens replaced", styles),
        ),
        Section("Domain shift", tables=_some(shift_table(results))),
        Section(
            "Calibration",
            tables=calibration_tables(results),
            pictures=_reliability_pictures(results, styles),
        ),
        Section("Seed by seed", [PAIRED_NOTE], paired),
        Section(
            "Over all tasks and seeds",
            [OVERALL_NOTE],
            tables=[*overall, *_some(best_control_table(results))],
        ),
        Section("Changed texts", tables=text_tables(results)),
        Section(
            "Embedding noise",
            tables=noise_tables(results),
            pictures=_curves(results, "noisy", "δ (rms embedding entry of the base model)", styles),
        ),
        Section(
            "Smoothness",
            tables=[
                *slope_tables(results),
                *smoothness_tables(results),
                *_some(association_table(results)),
            ],
        ),
        Section("Ablations", tables=ablation_tables(results)),
        Section("Chosen strengths", tables=_some(chosen_table(results))),
        Section("Failures", tables=_some(failed_table(results))),
        Section("Settings", literal=[_settings(results)]),
    ]
    return [s for s in made if s.tables or s.pictures or s.literal]


def _some(table: Table | None) -> list[Table]:
    return [] if table is None else [table]


def _what_was_run(results: Results) -> list[str]:
    first = results.records[0]
    noise = first.get("label_noise")
    seeds = sorted({r["seed"] for r in results.records})
    rows = {
        r["task"]: "{} training, {} unlabelled, {} judged".format(*r["rows"])
        + f", {r.get('validation_rows')} for temperature and epoch" * bool(r.get("validation_rows"))
        for r in results.records
    }
    return [
        f"Model: {first['model']}. Seeds: {', '.join(map(str, seeds))}. "
        + "; ".join(f"{task}: {text}" for task, text in rows.items())
        + ".",
        "All methods start from the same weights and see the same labelled rows in the same order; "
        "epochs and learning rate are the same for all.",
        *(["Each seed draws training rows of its own."] * bool(first.get("resampled"))),
        *([f"{noise:.0%} of the training labels are wrong."] if noise else []),
    ]


def _settings(results: Results) -> str:
    methods = {r["method"]: r["settings"] for r in results.records}
    content = {"recipe": results.records[0]["recipe"], "methods": methods}
    return json.dumps(content, indent=1, ensure_ascii=False)


def _curves(results: Results, name: str, across: str, styles: Styles) -> list[Picture]:
    """One picture a task: scores over the places of `name`, clean ones first."""
    pictures = []
    for task in results.tasks:
        places = sorted(
            {float(k) for r in results.records if r["task"] == task for k in (r.get(name) or {})}
            | {0.0}
        )
        if len(places) < 2:
            continue
        scores = {}
        for method in results.methods:
            columns = [results.by_seed(method, task, _at(name, place)) for place in places]
            seeds = sorted(set.intersection(*map(set, columns)))
            if seeds:
                scores[method] = np.array([[c[seed] for c in columns] for seed in seeds])
        caption = f"{task}: {results.metric(task)}, mean and spread over seeds."
        png = score_curves_figure(places, scores, across, results.metric(task), styles)
        pictures.append(Picture(caption, png, SCALE))
    return pictures


def _at(name: str, place: float) -> Figure:
    def figure(record: Record) -> float | None:
        found = {float(key): value for key, value in (record.get(name) or {}).items()}
        return found.get(place, record["score"] if place == 0 else None)

    return figure


def _reliability_pictures(results: Results, styles: Styles) -> list[Picture]:
    diagrams = {}
    for method in results.methods:
        found = [
            r["reliability"]
            for r in results.records
            if r["method"] == method and r.get("reliability")
        ]
        if found:
            diagrams[method] = pooled(found)
    names = list(diagrams)
    return [
        Picture(
            "Reliability, all tasks and seeds together: accuracy of the predicted class over its "
            "confidence in 8 bins; on the dashed line a model is as sure as it is right. Bars: "
            "share of examples.",
            reliability_figure({name: diagrams[name] for name in names[i : i + _PANELS]}, styles),
            SCALE,
        )
        for i in range(0, len(names), _PANELS)
    ]


def pooled(found: Sequence[Record]) -> Reliability:
    """One diagram of the examples of several, all with the same bins."""
    counts = np.array([d["counts"] for d in found])

    def mean(name: str) -> np.ndarray:
        values = np.array([d[name] for d in found], dtype=np.float64)
        total = np.where(counts > 0, counts * values, 0.0).sum(0)
        with np.errstate(invalid="ignore"):
            return total / counts.sum(0)

    return Reliability(
        np.array(found[0]["edges"], dtype=np.float64),
        mean("confidence"),
        mean("accuracy"),
        counts.sum(0),
    )


def print_report(records: Sequence[Record], width: int | None = None) -> None:
    """Prints the answer and every table, with rich; nothing is cut where the terminal is narrow."""
    console = require("rich.console").Console(width=width)
    text = require("rich.text").Text
    for number, section in enumerate(sections(records)):
        if section.tables or number == 0:
            console.print(text(f"\n{section.title}", style="bold"))
        for paragraph in section.paragraphs if number == 0 else ():
            console.print(text(paragraph))
        for table in section.tables:
            for part in narrowed(table, console.width):
                console.print(drawn(part))
    for note in (NOTE, PAIRED_NOTE, OVERALL_NOTE):
        console.print(text("\n" + note))


def drawn(table: Table) -> Any:
    """A rich table of it."""
    rich_table, text = require("rich.table").Table, require("rich.text").Text
    made = rich_table(caption=text(table.caption.removesuffix(NOTE).strip()))
    for index, title in enumerate(table.header):
        side: Any = "right" if index and index not in table.prose else "left"
        made.add_column(text(title), justify=side, overflow="fold")
    for row in table.rows:
        made.add_row(*map(text, row))
    return made


def narrowed(table: Table, width: int) -> list[Table]:
    """The table in as many as fit into `width` characters, each with the first column.

    A column of running text, and one too wide by itself, is left to be wrapped.
    """
    widths = [
        max(len(cell) for cell in column) + 3
        for column in zip(table.header, *table.rows, strict=True)
    ]
    if table.prose or sum(widths) < width:
        return [table]
    groups: list[list[int]] = [[]]
    for index in range(1, len(widths)):
        taken = 1 + widths[0] + sum(widths[i] for i in groups[-1])
        if groups[-1] and taken + widths[index] > width:
            groups.append([])
        groups[-1].append(index)
    return [
        Table(
            table.caption if group is groups[-1] else "",
            [table.header[i] for i in (0, *group)],
            [[row[i] for i in (0, *group)] for row in table.rows],
        )
        for group in groups
    ]
