"""The page of a selection, from a table or live: its advice, ranking, curves and costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..._text import percent, scientific_text
from ...scaling.selection import Selection
from ..workbench.page import Picture, Section, Table, nonempty, panels, write_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .choice import LiveSelection


def answer(selection: Selection) -> str:
    """Return one sentence: which model is the best, or that this is not known."""
    best, task = selection.ranking[0], f"on {selection.target:,.0f} examples"
    if selection.is_decided:
        return f"{best} is the model to fine-tune {task}, by the method {selection.method}."
    if not selection.has_signal:
        return f"No model is known to be better than another {task}."
    if selection.has_intervals:
        chance = percent(float(selection.best_probabilities.max()))
        by = f"by the method {selection.method}"
        return f"{best} is most likely the best {task} ({chance}, {by}); this is not decided."
    return f"{best} comes first for fine-tuning {task}, by the method {selection.method}."


def write_selection(
    path: Path,
    selection: Selection,
    title: str,
    notes: Sequence[str],
    *,
    costs: Sequence[tuple[str, float]] = (),
    in_flops: bool = True,
    stops: Mapping[str, str] | None = None,
    settings: Mapping[str, object],
) -> None:
    """Write the HTML page of a selection, atomically.

    Args:
        path: the .html file.
        selection: the result of `select` or `Search.selection`.
        title: title of the page.
        notes: sentences about the losses, for the page.
        costs: (name, cost) of each expense; the last is training all models in full.
        in_flops: whether the costs are FLOPs; if not, only their shares are shown.
        stops: model -> why no larger subset was run; None: not shown.
        settings: settings to show as JSON.

    Raises:
        MissingExtra: matplotlib, pandas or jinja2 is not installed.
        OSError: the file cannot be written.
    """
    header, *rows = selection.cells()
    ranking = Table(f"Ranking by {selection.method}.", header, rows)
    interval = ", with its 90 % interval" * selection.has_intervals
    curves = Picture(
        f"{selection.table.label[0].upper()}{selection.table.label[1:]} over training examples; at "
        f"the end, side by side, what is predicted{interval}.",
        partial(_curves, selection),
    )
    plots = [curves] if selection.forecast.predicted is not None else []
    cost_rows = [[n, scientific_text(c), f"{100 * c / costs[-1][1]:.3g} %"] for n, c in costs]
    cost = Table("", ["", "FLOPs", "of training all in full"], cost_rows)
    if not in_flops:
        cost = Table("", ["", "of training all in full"], [[r[0], r[2]] for r in cost_rows])
    stop = Table("", ["model", ""], list(map(list, (stops or {}).items())), frozenset({1}))
    texts = [answer(selection), selection.advice, *selection.notes, *notes]
    literal = json.dumps(settings, indent=1, ensure_ascii=False)
    sections = [
        Section("Answer", texts, [ranking], plots),
        Section("Cost", tables=[cost] if cost_rows else []),
        Section("Why each model's runs ended", tables=[stop] if stops else []),
        Section("Settings", literal=[literal]),
    ]
    write_html(path, title, nonempty(sections))


def write_live_selection(path: Path, live: LiveSelection) -> None:
    """Write the HTML page of a finished live selection; for errors see `write_selection`."""
    search, flops = live.search, live.flops
    parts = {
        "trainings": flops["training"],
        f"judging on {search.test_rows:,} dev rows after every run": flops["judging"],
        "this selection": flops["spent"],
        "training every model on the largest subset alone": flops["sub_tuning"],
        "training every model in full": flops["full_tuning"],
    }
    write_selection(
        path,
        search.selection(),
        f"Which model to fine-tune: {live.task}",
        [
            f"{live.train_rows:,} training and {search.test_rows:,} dev rows; the candidates were "
            f"fine-tuned on subsets of up to {100 * live.share:.3g} % of the target.",
            f"Stopped: {search.stop}.",
        ],
        costs=[(what, cost) for what, cost in parts.items() if cost],
        stops=live.stops,
        settings={name: value for name, value in search.state().items() if name != "results"},
    )


def _curves(selection: Selection) -> Figure:
    """Return a figure of `Selection.plot` with the legend below, in as many columns as fit."""
    figure, (panel,) = panels(width=6.4, height=4.4)
    selection.plot(panel)
    handles, names = panel.get_legend_handles_labels()
    if legend := panel.get_legend():
        legend.remove()
    names = [_letters(name) for name in names]
    columns = max(1, min(4, int(83 // (max(map(len, names)) + 8))))
    figure.legend(
        handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
    return figure


def _letters(text: str, longest: int = 28) -> str:
    """Return a user's text for a figure: with $ escaped, and shortened in the middle if it is
    long."""
    if len(text) > longest:
        letters = longest - 1
        text = text[: letters // 2] + "…" + text[-(letters - letters // 2) :]
    return text.replace("$", r"\$")
