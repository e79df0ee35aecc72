"""The page of a comparison and its figures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..workbench.page import (
    Picture,
    Section,
    Styles,
    break_name,
    nonempty,
    panels,
    pluralise,
    print_section,
    styles_of,
    wrap,
    write_html,
)
from . import tables
from .metrics import Reliability
from .records import RunRecord
from .tables import BRIER, OVERALL_NOTE, PAIRED_NOTE, SCORE, Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure
    from pandas import DataFrame


# --- figures


def forest_figure(apart: DataFrame, across: str, styles: Styles) -> MatplotlibFigure:
    """Draw differences from a reference, a row for each method, and a line at zero.

    Args:
        apart: By method "mean" and "±", as `tables.differences` has them.
        across: Label of the horizontal axis.
        styles: Styles of all methods, in the order of the rows.
    """
    names = [name for name in styles if name in apart.index]
    labels = [break_name(name) for name in names]
    lines = 1 + max(label.count("\n") for label in labels)
    figure, (panel,) = panels(width=4.6, height=0.8 + (0.12 + 0.16 * lines) * len(names))
    panel.axvline(0, color="#999999", linewidth=1, linestyle="--")
    for row, name in enumerate(names):
        mean, half = apart.loc[name, ["mean", "±"]]
        width = None if np.isnan(half) else [half]
        panel.errorbar([mean], [row], xerr=width, capsize=3, markersize=6, **styles[name])
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_yticks(range(len(names)), labels)
    panel.locator_params(axis="x", nbins=4)
    figure.supxlabel(across, fontsize="medium")  # the panel alone may be narrower than its label
    return figure


def reliability_figure(diagrams: Mapping[str, Reliability], styles: Styles) -> MatplotlibFigure:
    """Draw a panel for each method: accuracy of the predicted class over its mean confidence.

    Bars show the share of the examples in each bin.
    """
    columns = min(2, len(diagrams))  # more could not be read on a phone
    rows = -(-len(diagrams) // columns)
    figure, axes = panels(rows, columns, width=3.0 * columns, height=3.1 * rows)
    for panel in axes[len(diagrams) :]:
        panel.set_visible(False)
    for panel, (name, diagram) in zip(axes, diagrams.items(), strict=False):
        colour = styles[name]["color"]
        share, full = diagram.counts / diagram.counts.sum(), diagram.counts > 0
        edges, widths = diagram.edges[:-1], np.diff(diagram.edges)
        panel.bar(edges, share, widths, align="edge", color=colour, alpha=0.2)
        panel.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle="--")
        line = diagram.confidence[full], diagram.accuracy[full]
        panel.plot(*line, "o-", color=colour, markersize=4)
        panel.set(xlabel="confidence", xlim=(0, 1), ylim=(0, 1))
        panel.set_title(break_name(name), fontsize="medium")
    for panel in axes[::columns]:
        panel.set_ylabel("accuracy (line), share (bars)")
    return figure


# --- a grid of runs


def write_report(path: Path, records: Iterable[RunRecord]) -> None:
    """Write the page of a comparison, whole or not at all.

    Args:
        records: Of all runs, see `records.read_records`.
    """
    write_html(path, "Comparison of regularisation methods", sections(records))


def print_report(records: Iterable[RunRecord], width: int | None = None) -> None:
    """Print the answer and every table, whole also on a narrow terminal.

    Args:
        width: In characters; None: the terminal's.
    """
    width = width or shutil.get_terminal_size().columns
    first, *others = sections(records)
    print_section(first, width)
    for section in others:
        if section.tables:
            print_section(replace(section, paragraphs=()), width)
    for note in (PAIRED_NOTE, OVERALL_NOTE):
        print(wrap(note, width) + "\n")


def sections(records: Iterable[RunRecord]) -> list[Section]:
    """Return the sections of a comparison's page, the answer first."""
    runs = tables.to_frame(records)
    styles = styles_of(tables.methods_of(runs))
    settings = {
        "recipe": runs["recipe"].iloc[0],
        "methods": dict(zip(runs["method"], runs["settings"], strict=True)),
    }
    overall = [*tables.overall_tables(runs), *tables.best_control_tables(runs)]
    return nonempty(
        [
            Section("In short", answer(runs), tables.cost_tables(runs), forests(runs, styles)),
            Section("Scores", _run_summary(runs), tables.score_tables(runs)),
            Section("Token corruption", tables=tables.condition_tables(runs, "corruption")),
            Section("Word attack", _attack_note(runs), tables.task_tables(runs, tables.ATTACK)),
            Section("Domain shift", tables=tables.shift_tables(runs)),
            Section(
                "Calibration",
                tables=tables.task_tables(runs, tables.CALIBRATION),
                pictures=_reliability_pictures(runs, styles),
            ),
            Section("Seed by seed", [PAIRED_NOTE], tables.paired_tables(runs)),
            Section("Over all tasks and seeds", [OVERALL_NOTE], overall),
            Section("Changed texts", tables=tables.condition_tables(runs, "texts")),
            Section("Embedding noise", tables=tables.condition_tables(runs, "noise")),
            Section("Smoothness", tables=tables.task_tables(runs, tables.SMOOTHNESS)),
            Section("Failures", tables=tables.failed_tables(runs)),
            Section("Settings", literal=[json.dumps(settings, indent=1, ensure_ascii=False)]),
        ]
    )


def _attack_note(runs: DataFrame) -> list[str]:
    """Return a paragraph on the attack and the source of its candidates."""
    sources = ", ".join(sorted(runs["attack_candidates"].dropna().unique()))
    return [
        "Words of rows that the model has right are replaced, one after the other, until its "
        f"answer is wrong. Candidates: {sources}."
    ]


def _run_summary(runs: DataFrame) -> list[str]:
    first = runs.iloc[0]
    seeds = ", ".join(map(str, sorted(runs["seed"].unique())))
    rows = []
    for task, of in runs.groupby("task", sort=False):
        last = of.iloc[-1]
        text = "{}: {} training, {} unlabelled, {} judged".format(task, *last["rows"])
        validation = last["validation_rows"]
        more = f", {validation} for temperature and epoch" if validation else ""
        rows.append(text + more)
    noise = first["label_noise"]
    return [
        f"Model: {first['model']}. Seeds: {seeds}. {'; '.join(rows)}.",
        "All methods start from the same weights and see the same labelled rows in the same order; "
        "epochs and learning rate are the same for all.",
        *([f"{100 * noise:.0f} % of the training labels are wrong."] if noise > 0 else []),
    ]


_HEADLINES = (SCORE._replace(digits=1), BRIER._replace(digits=3))
_MAX_NAMED = 4  # undecided methods; of more, only the one with the largest difference is named


def answer(runs: DataFrame) -> list[str]:
    """Return paragraphs on the better and worse methods by each figure, and on their cost.

    There are none without a pair of runs to compare.
    """
    if not tables.compared_methods(runs):
        return []
    texts = [text for figure in _HEADLINES if (text := _answer_paragraph(runs, figure))]
    cost = {m: ratio for m, ratio in tables.costs(runs).items() if m != tables.REFERENCE}
    if texts and cost:
        low, high = min(cost, key=cost.__getitem__), max(cost, key=cost.__getitem__)
        texts.append(
            f"Training took {cost[low]:.1f} ({low}) to {cost[high]:.1f} ({high}) times the plain "
            "one's processor time."
            if len(cost) > 1
            else f"Training took {cost[low]:.1f} times the plain one's processor time ({low})."
        )
    return texts


def _answer_paragraph(runs: DataFrame, figure: Figure) -> str | None:
    """Return a paragraph on the methods whose intervals lie on one side of zero."""
    tasks = tables.tasks_with(runs, figure.column)
    apart = tables.differences(runs, figure.column) if tasks else runs.iloc[:0]
    apart = apart[apart["seeds"] > 0] if tasks else apart
    if not len(apart):
        return None
    seeds = int(apart["seeds"].max())
    groups: dict[str, list[tuple[float, str]]] = {"better": [], "worse": [], "open": []}
    for method, row in apart.iterrows():
        mean, half = figure.scale * row["mean"], figure.scale * row["±"]
        place = "open"  # the interval has zero in it, or there is none (NaN, of one seed)
        if abs(mean) > half:  # not of NaN
            place = "better" if mean * figure.better > 0 else "worse"
        signed = f"{round(mean, figure.digits) + 0.0:+.{figure.digits}f}"  # no minus before a zero
        text = f"{method} ({signed.replace('-', '−')}"
        text += "" if np.isnan(half) else f" ± {half:.{figure.digits}f}"
        text += f", {pluralise(int(row['seeds']), 'seed')}" if row["seeds"] < seeds else ""
        groups[place].append((abs(mean), text + ")"))
    over = f"{len(tasks)} tasks" if len(tasks) > 1 else tasks[0]
    where = f"{figure.title[0].upper()}{figure.title[1:]}, {over}, {pluralise(seeds, 'seed')}: "
    parts = [
        f"{name} than the plain model: {', '.join(text for _, text in groups[name])}"
        for name in ("better", "worse")
        if groups[name]
    ]
    if few := groups["open"]:
        listed = ", ".join(text for _, text in few)
        if len(few) > _MAX_NAMED:
            listed = f"{len(few)} methods, the largest difference {max(few)[1]}"
        parts.append(f"not told apart from {'it' if parts else 'the plain model'}: {listed}")
    note = (
        " One seed cannot tell a difference from chance."
        if seeds < 2
        else " ± is half of a 95 % interval over seeds, not adjusted for the number of methods."
    )
    return where + "; ".join(parts) + "." + note * (figure is _HEADLINES[0])


def forests(runs: DataFrame, styles: Styles) -> list[Picture]:
    """Draw differences from the plain model for each task: of the score, then the Brier score."""
    pictures = []
    for figure in _HEADLINES if tables.compared_methods(runs) else ():
        side = "right" if figure.better > 0 else "left"
        for task in tables.tasks_with(runs, figure.column):
            apart = tables.differences(runs, figure.column, tasks=[task])
            apart = figure.scale * apart[apart["seeds"] > 0]
            if len(apart):
                across = f"{figure.title}, difference from the plain model"
                several = apart["±"].notna().any()
                shown = (
                    "mean and 95 % interval over seeds" if several else "the one seed's difference"
                )
                caption = f"{task}, {figure.title}: {shown}; better to the {side}."
                pictures.append(Picture(caption, partial(forest_figure, apart, across, styles)))
    return pictures


_RELIABILITY = (
    "Reliability, all tasks and seeds together: accuracy of the predicted class over its "
    "confidence in 8 bins; on the dashed line a model is as sure as it is right. Bars: share of "
    "examples."
)


def _reliability_pictures(runs: DataFrame, styles: Styles) -> list[Picture]:
    """Draw the methods' reliability diagrams, four in a picture."""
    judged = runs[runs["reliability"].notna()].groupby("method", sort=False)["reliability"]
    diagrams = {method: pool_reliability(list(of)) for method, of in judged}
    names = list(diagrams)
    return [
        Picture(
            _RELIABILITY,
            partial(reliability_figure, {n: diagrams[n] for n in names[i : i + 4]}, styles),
        )
        for i in range(0, len(names), 4)
    ]


def pool_reliability(diagrams: Sequence[Mapping[str, list[float]]]) -> Reliability:
    """Average reliability diagrams of the same bins, weighted by the counts."""
    # Bins with few examples must not weigh as much as full ones; an empty bin has NaN, and 0 · NaN
    # is NaN, so that it is left out before it is weighed.
    counts = np.array([diagram["counts"] for diagram in diagrams])

    def mean(name: str) -> np.ndarray:
        values = np.array([diagram[name] for diagram in diagrams], dtype=np.float64)
        total = np.where(counts > 0, counts * values, 0.0).sum(0)
        with np.errstate(invalid="ignore"):
            return total / counts.sum(0)

    edges = np.array(diagrams[0]["edges"], dtype=np.float64)
    return Reliability(edges, mean("confidence"), mean("accuracy"), counts.sum(0))
