"""The report of a comparison: an HTML page with tables and figures, and text for a terminal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
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
    write_html,
)
from . import tables
from .metrics import Reliability
from .records import RunRecord
from .tables import BRIER, OVERALL_NOTE, SCORE, Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure
    from pandas import DataFrame


# --- figures


def forest_figure(differences: DataFrame, x_label: str, styles: Styles) -> MatplotlibFigure:
    """Draw a forest plot of differences from a reference, with a row for each method.

    Args:
        differences: Result of `tables.differences`: "mean" and "±" of each method.
        x_label: Label of the horizontal axis.
        styles: Styles of all methods, in the order of the rows.
    """
    names = [name for name in styles if name in differences.index]
    labels = [break_name(name) for name in names]
    max_lines = 1 + max(label.count("\n") for label in labels)
    figure, (panel,) = panels(width=4.6, height=1.0 + (0.12 + 0.16 * max_lines) * len(names))
    panel.axvline(0, color="#999999", linewidth=1, linestyle="--")
    for row, name in enumerate(names):
        mean, half_width = differences.loc[name, ["mean", "±"]]
        xerr = None if np.isnan(half_width) else [half_width]
        panel.errorbar([mean], [row], xerr=xerr, capsize=3, markersize=6, **styles[name])
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_yticks(range(len(names)), labels)
    panel.locator_params(axis="x", nbins=4)
    figure.supxlabel(x_label, fontsize="medium")  # the panel alone may be narrower than its label
    return figure


def reliability_figure(diagrams: Mapping[str, Reliability], styles: Styles) -> MatplotlibFigure:
    """Draw reliability diagrams, with a panel for each method.

    The line is the accuracy of the predicted class over its mean confidence; bars are the shares of
    the examples in each bin.

    Args:
        diagrams: Method -> its reliability diagram.
        styles: Styles of all methods.
    """
    num_columns = min(2, len(diagrams))  # more would be illegible on a phone
    rows = -(-len(diagrams) // num_columns)
    figure, axes = panels(rows, num_columns, width=3.0 * num_columns, height=3.1 * rows)
    for panel in axes[len(diagrams) :]:
        panel.set_visible(False)
    for panel, (name, diagram) in zip(axes, diagrams.items(), strict=False):
        colour = styles[name]["color"]
        shares, is_nonempty = diagram.counts / diagram.counts.sum(), diagram.counts > 0
        edges, widths = diagram.edges[:-1], np.diff(diagram.edges)
        panel.bar(edges, shares, widths, align="edge", color=colour, alpha=0.2)
        panel.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle="--")
        line = diagram.confidence[is_nonempty], diagram.accuracy[is_nonempty]
        panel.plot(*line, "o-", color=colour, markersize=4)
        panel.set(xlabel="confidence", xlim=(0, 1), ylim=(0, 1))
        panel.set_title(break_name(name), fontsize="medium")
    for panel in axes[::num_columns]:
        panel.set_ylabel("accuracy (line), share (bars)")
    return figure


# --- a grid of runs


def write_report(path: Path, records: Iterable[RunRecord]) -> None:
    """Write the page of a comparison atomically, so that no incomplete file is left.

    Args:
        path: Path of the HTML file.
        records: Records of all runs, see `records.read_records`.
    """
    write_html(path, "Comparison of regularisation methods", sections(records))


def print_report(records: Iterable[RunRecord], width: int | None = None) -> None:
    """Print the answer and every table with its notes, and truncate none on a narrow terminal.

    Args:
        records: Records of all runs.
        width: Width in characters; None for that of the terminal.
    """
    width = width or shutil.get_terminal_size().columns
    for section in sections(records):
        if section.tables or section.paragraphs:
            print_section(section, width)


def sections(records: Iterable[RunRecord]) -> list[Section]:
    """Return the sections of the page of a comparison, that with the answer first."""
    runs = tables.to_frame(records)
    styles = styles_of(tables.methods_of(runs))
    settings = {
        "recipe": runs["recipe"].iloc[0],
        "methods": dict(zip(runs["method"], runs["settings"], strict=True)),
    }
    paired = tables.paired_tables(runs)
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
            Section("Seed by seed", [tables.paired_note(paired)], paired),
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
    """Return paragraphs on the model, the seeds and the numbers of rows of each task."""
    first = runs.iloc[0]
    seeds = ", ".join(map(str, sorted(runs["seed"].unique())))
    row_counts = []
    for task, task_runs in runs.groupby("task", sort=False):
        last = task_runs.iloc[-1]
        text = "{}: {} training, {} unlabelled, {} judged".format(task, *last["rows"])
        if validation := last["validation_rows"]:
            text += f", {validation} for temperature and epoch"
        row_counts.append(text)
    noise = first["label_noise"]
    return [
        f"Model: {first['model']}. Seeds: {seeds}. {'; '.join(row_counts)}.",
        "All methods start from the same weights and see the same labelled rows in the same order; "
        "epochs and learning rate are the same for all.",
        *([f"{100 * noise:.0f} % of the training labels are wrong."] if noise > 0 else []),
    ]


_HEADLINES = (SCORE._replace(digits=1), BRIER._replace(digits=3))
_MAX_NAMED = 4  # if more methods are undecided, only the one with the largest difference is named


def answer(runs: DataFrame) -> list[str]:
    """Return paragraphs on tasks at the level of chance, and on the better and worse methods by
    each figure.

    The list is empty without a pair of runs to compare.
    """
    if not tables.compared_methods(runs):
        return []
    texts = [text for figure in _HEADLINES if (text := _answer_paragraph(runs, figure))]
    return tables.at_chance(runs) + texts


def _answer_paragraph(runs: DataFrame, figure: Figure) -> str | None:
    """Return a paragraph on the methods that are better, worse or undecided by a figure.

    A method is better or worse than the plain model if its interval is on one side of zero.  None
    if no method has a pair of runs to compare.
    """
    tasks = tables.tasks_with(runs, figure.column)
    differences = tables.differences(runs, figure.column) if tasks else runs.iloc[:0]
    differences = differences[differences["seeds"] > 0] if tasks else differences
    if not len(differences):
        return None
    max_seeds = int(differences["seeds"].max())
    groups: dict[str, list[tuple[float, str]]] = {"better": [], "worse": [], "open": []}
    for method, row in differences.iterrows():
        mean, half_width = figure.scale * row["mean"], figure.scale * row["±"]
        group = "open"  # the interval contains zero, or is NaN, as there is only one seed
        if abs(mean) > half_width:  # false for NaN
            group = "better" if mean * figure.better > 0 else "worse"
        mean_text = f"{round(mean, figure.digits) + 0.0:+.{figure.digits}f}"  # never −0
        text = f"{method} ({mean_text.replace('-', '−')}"
        text += "" if np.isnan(half_width) else f" ± {half_width:.{figure.digits}f}"
        text += f", {pluralise(int(row['seeds']), 'seed')}" if row["seeds"] < max_seeds else ""
        groups[group].append((abs(mean), text + ")"))
    scope = f"{len(tasks)} tasks" if len(tasks) > 1 else tasks[0]
    title = tables.title_of(runs, figure, tasks)
    head = f"{title[0].upper()}{title[1:]}, {scope}, {pluralise(max_seeds, 'seed')}: "
    parts = [
        f"{name} than the plain model: {', '.join(text for _, text in groups[name])}"
        for name in ("better", "worse")
        if groups[name]
    ]
    if undecided := groups["open"]:
        listed = ", ".join(text for _, text in undecided)
        if len(undecided) > _MAX_NAMED:
            listed = f"{len(undecided)} methods, the largest difference {max(undecided)[1]}"
        parts.append(f"not told apart from {'it' if parts else 'the plain model'}: {listed}")
    note = (
        " One seed cannot tell a difference from chance."
        if max_seeds < 2
        else " ± is half of a 95 % interval over seeds, not adjusted for the number of methods."
    )
    return head + "; ".join(parts) + "." + note * (figure is _HEADLINES[0])


def forests(runs: DataFrame, styles: Styles) -> list[Picture]:
    """Return forest plots of the differences from the plain model for each task.

    The plots of the score come first, then the plots of the Brier score.

    Args:
        runs: Table of the runs, see `tables.to_frame`.
        styles: Styles of all methods.
    """
    pictures = []
    for figure in _HEADLINES if tables.compared_methods(runs) else ():
        side = "right" if figure.better > 0 else "left"
        for task in tables.tasks_with(runs, figure.column):
            differences = tables.differences(runs, figure.column, tasks=[task])
            differences = figure.scale * differences[differences["seeds"] > 0]
            if len(differences):
                has_interval = differences["±"].notna().any()
                text = "mean and 95 % interval over seeds"
                text = text if has_interval else "the one seed's difference"
                title = tables.title_of(runs, figure, [task])
                caption = f"{task}, {title}: {text}; better to the {side}."
                x_label = f"{title},\ndifference from the plain model"
                draw = partial(forest_figure, differences, x_label, styles)
                pictures.append(Picture(caption, draw))
    return pictures


_RELIABILITY = (
    "Reliability, all tasks and seeds together: accuracy of the predicted class over its "
    "confidence in 8 bins; on the dashed line a model is as sure as it is right. Bars: share of "
    "examples."
)


def _reliability_pictures(runs: DataFrame, styles: Styles) -> list[Picture]:
    """Return the reliability diagrams of the methods, up to four in a picture."""
    by_method = runs[runs["reliability"].notna()].groupby("method", sort=False)["reliability"]
    diagrams = {method: pool_reliability(list(column)) for method, column in by_method}
    names = list(diagrams)
    return [
        Picture(
            _RELIABILITY,
            partial(reliability_figure, {n: diagrams[n] for n in names[i : i + 4]}, styles),
        )
        for i in range(0, len(names), 4)
    ]


def pool_reliability(diagrams: Sequence[Mapping[str, list[float]]]) -> Reliability:
    """Average reliability diagrams with the same bins, weighted by the counts of each bin.

    Args:
        diagrams: Diagrams as in `RunRecord.reliability`.
    """
    # an empty bin has NaN, and 0 · NaN is NaN, so that it is replaced by 0 first
    counts = np.array([diagram["counts"] for diagram in diagrams])

    def mean(name: str) -> np.ndarray:
        values = np.array([diagram[name] for diagram in diagrams], dtype=np.float64)
        total = np.where(counts > 0, counts * values, 0.0).sum(0)
        with np.errstate(invalid="ignore"):
            return total / counts.sum(0)

    edges = np.array(diagrams[0]["edges"], dtype=np.float64)
    return Reliability(edges, mean("confidence"), mean("accuracy"), counts.sum(0))
