"""Draw the page of a selection: which model to fine-tune, why, how sure that is, and its cost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._io import require
from ..compare.report import Picture, Section, filled, panels, styles_of, write_html
from ..compare.tables import Table
from ..scaling import (
    LossTable,
    Selection,
    TableError,
    coverage,
    log_rmse,
    pear_corr,
    rel_acc,
    select,
)
from ..scaling.advice import number, scientific, share
from ..scaling.predictive import Array
from ..scaling.runs import higher_is_better
from ..scaling.selection import METHODS

if TYPE_CHECKING:
    from pandas import DataFrame

    from .choice import LiveSelection

_FORECAST, _TRUTH = "#0072b2", "#d55e00"


@dataclass(frozen=True)
class SelectionView:
    """What the page shows of a selection, from a table or live.

    Attributes:
        title: Title of the page.
        data: Sentences on the losses.
        level: Probability that an interval holds the loss.
        loss: What is predicted, such as "dev loss" or "accuracy", with its `unit`, which may be "".
        candidates: By name, best first: parameters, score (lower is better), predicted, low, high
            and prob_best at the target, truth (what was measured there, which the selection did not
            read), and stop (why no further size was run); NaN where unknown.
        losses: Columns name, size (0: before fine-tuning), loss, and read (whether the selection
            read it).
        advice: What is tied, and the run that would decide.
        judgement: A sentence on the selection against the measured losses; "" if not all are known.
        costs: Columns what, flops and remark; the last row is FullTuning.
        history: How well a method ranked from sizes up to a budget (0: it reads none): pear_corr
            and rel_acc, per cent, against the truth if all of it is known, else against the last
            prediction; share of FullTuning's FLOPs, NaN if the models' sizes are unknown.
        settings: Settings of the selection.
    """

    title: str
    data: Sequence[str]
    method: str
    target: float
    level: float
    loss: str
    candidates: DataFrame
    losses: DataFrame
    costs: DataFrame
    history: DataFrame
    advice: str
    judgement: str
    unit: str = ""
    higher: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether every candidate's loss at the target is known."""
        return bool(self.candidates["truth"].notna().all())

    @property
    def labels(self) -> dict[str, str]:
        """Each candidate's name without the folder that all lie in, if there is one."""
        parts = [name.split("/") for name in self.candidates.index]
        shared = 0
        while all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
            shared += 1
        return {"/".join(part): "/".join(part[shared:]) for part in parts}

    @property
    def largest(self) -> DataFrame:
        """The largest size read and its loss, by name, best candidate first."""
        read = self.losses[self.losses["read"]].sort_values("size").groupby("name").last()
        return read.reindex(self.candidates.index)


# --- the view of a selection


def view_of_table(
    table: LossTable,
    selection: Selection,
    source: str,
    *,
    level: float = 0.9,
    references: Sequence[str] = (),
    **settings: Any,
) -> SelectionView:
    """Return the view of a selection from a table.

    Args:
        table: All known losses; those beyond the selection's budget are shown as not read, and
            those at the target, if every model has one, as the truth.
        selection: From `select`.
        source: The table's name.
        level: Probability of the intervals.
        references, settings: As they were given to `select`: gamma, tau, tokens, epochs.
    """

    def again(method: str, budget: float) -> Selection:
        return select(table, budget, selection.target, method, **settings)

    truth, costs = None, []
    with suppress(TableError):  # some model's loss at the target is unknown
        truth = dict(zip(table.names, table.losses_at(selection.target), strict=True))
    budget, target = (f"{size:,.0f} examples" for size in (selection.budget, selection.target))
    last = again("subtuning", selection.budget)
    with suppress(TableError):  # the models' sizes are unknown
        costs = [
            (f"this selection ({selection.method})", selection.flops, "all subsets it read"),
            ("SubTuning", last.flops, f"every model on {budget} alone"),
            ("FullTuning", selection.full_flops, f"every model on {target}"),
        ]
    names = ("method", "budget", "target")
    return _view(
        selection,
        table,
        again,
        truth,
        title="Which model to fine-tune",
        data=[
            f"Losses of {len(table.names)} models in {source}, read up to {budget}.",
            *(f"Not ranked: {reason}." for reason in selection.unranked.values()),
        ],
        level=level,
        loss=table.label,
        costs=costs,
        settings={"table": source, **{name: getattr(selection, name) for name in names}}
        | {"references": list(references), **settings},
    )


def view_of_live(
    result: LiveSelection, truth: Mapping[str, float] | None = None, *, level: float = 0.9
) -> SelectionView:
    """Return the view of a live selection that has ended.

    Args:
        result: From `select_live`.
        truth: By model, the loss measured at the target apart from the selection.
        level: Probability of the intervals.
    """
    search, flops = result.search, result.flops
    selection = search.selection()
    table = selection.table

    def again(method: str, budget: float) -> Selection:
        return search.selection(method, rows=budget)

    costs = [
        ("trainings of this selection", flops["training"], "every subset that was run"),
        ("judging", flops["judging"], f"{result.dev_rows:,} dev rows after every run"),
        ("kernels", flops["probe"], "Θ of the probe rows after every run"),
        ("frozen features", flops["features"], "one pass over labelled rows a model"),
        ("this selection", flops["spent"], "all of these"),
        ("SubTuning", flops["sub_tuning"], "every model on the largest subset alone"),
        ("FullTuning", flops["full_tuning"], f"every model on {search.target:,} examples"),
    ]
    errors = {ask: told.error for ask, told in search.results.items() if told.error}
    failed = [f"{ask.model} on {ask.rows:,}: {error}" for ask, error in errors.items()]
    failed += [f"{model}: {reason}" for model, reason in result.unloadable.items()]
    regression = any("mae" in (record["scores"] or {}) for record in result.records)
    return _view(
        selection,
        table,
        again,
        truth,
        title=f"Which model to fine-tune: {result.task}",
        data=[
            f"{result.train_rows:,} training and {result.dev_rows:,} dev rows; the candidates "
            f"were fine-tuned on subsets of up to {100 * result.share:.3g} % of the target.",
            f"Stopped: {search.stop}.",
            *([f"Failed: {'; '.join(failed)}."] if failed else []),
        ],
        level=level,
        loss=f"dev {table.label}",
        unit="nats" if result.rank_by == "loss" and not regression else "",
        costs=[row for row in costs if row[1]],
        stops=result.stops,
        settings={name: value for name, value in search.state().items() if name != "results"},
    )


def _view(
    selection: Selection,
    table: LossTable,
    again: Callable[[str, float], Selection],
    truth: Mapping[str, float] | None,
    *,
    level: float,
    costs: Sequence[tuple[str, float, str]],
    stops: Mapping[str, str | None] | None = None,
    **facts: Any,
) -> SelectionView:
    """Return the view of a selection, numbers in the table's own terms (`LossTable.shown`).

    Args:
        table: All known losses.
        again: Selects by a method from sizes up to a budget.
        truth: Losses at the target.
    """
    pandas = require("pandas")
    names = list(selection.names)
    parameters = np.nan if table.parameters is None else table.parameters
    candidates = selection.to_frame(level).set_index("name").loc[selection.ranking]
    candidates["parameters"] = pandas.Series(parameters, list(table.names), dtype=float)
    measured = pandas.Series(truth or {}, names, dtype=float)
    candidates["truth"] = table.shown(measured)
    candidates["stop"] = pandas.Series(stops or {}, names, dtype=object)
    losses = pandas.DataFrame(table.shown(table.losses), list(table.names), table.sizes)
    losses = losses.rename_axis("name").rename_axis("size", axis=1).stack().rename("loss")
    losses = losses.dropna().reset_index()
    losses = losses[losses["name"].isin(names)]
    if truth:
        at_target = candidates["truth"].dropna().rename("loss").reset_index()
        losses = pandas.concat([losses, at_target.assign(size=selection.target)])
        losses = losses.drop_duplicates(["name", "size"])
    known = truth is not None and set(names) <= set(truth)
    end = selection.target if known else np.nextafter(selection.budget, np.inf)
    budgets = [float(size) for size in table.trained if size < min(end, selection.target)]
    reference = measured[candidates.index].to_numpy() if known else None
    return SelectionView(
        method=selection.method,
        target=selection.target,
        level=level,
        candidates=candidates,
        losses=losses.assign(read=losses["size"] <= selection.budget),
        costs=pandas.DataFrame(costs, columns=["what", "flops", "remark"]),
        history=_history(again, budgets, list(candidates.index), reference, selection.method),
        advice=selection.advice,
        judgement=judgement(selection, measured.to_numpy(), level) if known else "",
        higher=table.metric is not None and higher_is_better(table.metric),
        **facts,
    )


def _history(
    again: Callable[[str, float], Selection],
    budgets: Sequence[float],
    names: list[str],
    truth: Array | None,
    method: str,
) -> DataFrame:
    """Return how well every method ranks at every budget; no rows if nothing can be compared.

    Args:
        names: Candidates to compare [n].
        truth: Losses at the target [n]; None: the last prediction of `method` takes their place.
    """
    pandas = require("pandas")

    def ranked(method: str, budget: float) -> tuple[Array, Array, float] | None:
        try:
            of = again(method, budget)
            both = pandas.DataFrame({"loss": of.forecasts, "score": of.scores}, of.names).loc[names]
        except (ValueError, KeyError):
            return None  # too few sizes, no size 0, or losses missing there
        try:
            share = of.flops / of.full_flops
        except TableError:  # the models' sizes are unknown
            share = math.nan
        return both["loss"].to_numpy(), both["score"].to_numpy(), share

    last = ranked(method, budgets[-1]) if budgets and truth is None else None
    reference = truth if last is None else last[0]
    rows = []
    if reference is not None and len(reference) > 1 and np.ptp(reference) > 0:
        for name, entry in METHODS.items():
            for budget in budgets:
                ranking = ranked(name, budget)
                if ranking is not None and np.ptp(ranking[0]) > 0:
                    read = 0.0 if entry.trains == "none" else budget
                    quality = pear_corr(ranking[0], reference), rel_acc(ranking[1], reference)
                    rows.append((name, read, ranking[2], *quality))
    columns = ["method", "budget", "share", "pear_corr", "rel_acc"]
    return pandas.DataFrame(rows, columns=columns).drop_duplicates(
        ["method", "budget"], keep="last"
    )


# --- the page


def write_selection(path: Path, view: SelectionView) -> None:
    """Write the page of a selection, whole or not at all.

    Raises:
        MissingExtra: matplotlib, pandas or jinja2 is not installed.
        OSError: The file cannot be written.
    """
    write_html(path, view.title, selection_sections(view))


def selection_sections(view: SelectionView) -> list[Section]:
    """Return the sections of a selection's page."""
    up = f"{view.loss} ({view.unit})" if view.unit else view.loss
    at_target = f"at {view.target:,.0f} examples"
    predicted, intervals = view.candidates.iloc[0][["predicted", "low"]].notna()
    forecast = f"Predicted {view.loss} {at_target}, best on top."
    if intervals:
        forecast += (
            f" Bars: where {view.method} expects a measured loss with probability {view.level:g}; "
            "models whose bars overlap widely are not told apart yet."
        )
    if view.known:
        forecast += " Crosses: the loss measured there, which the selection did not read."
    curves = "Losses read over training examples; at the end the prediction with its interval."
    if not view.losses["read"].all():
        curves += " Open: losses that are known and that the selection did not read."
    settled = (
        "Pareto curve: how well predicted losses (or scores, of methods that predict none) "
        "correlate with the measured full-data losses (PearCorr), over the FLOPs they took. Up "
        "and left is better; a point is a budget."
        if view.known
        else "The full-data losses are not known, so this shows stability instead: how well "
        f"predictions from smaller budgets agree with {view.method}'s last (PearCorr "
        "of the two; its own last point is 100 by definition). A line that is still moving "
        "says that more data may change the ranking."
    )
    figures = [Picture(curves, partial(curves_figure, view, up))]
    if predicted:
        given = view.candidates, f"{up} {at_target}", view.level, view.labels
        figures.insert(0, Picture(forecast, partial(forecast_figure, *given)))
    history = Picture(settled, partial(history_figure, view.history, view.method))
    return filled(
        [
            Section(
                "Answer", [answer(view), *advice(view), *view.data], [ranking_table(view)], figures
            ),
            Section(
                "Ranking quality and cost" if view.known else "How early the ranking settled",
                [view.judgement] if view.judgement else [],
                pictures=[history] if len(view.history) else [],
            ),
            Section("Cost", tables=_cost_tables(view)),
            Section("Why each model's runs ended", tables=_stop_tables(view)),
            Section("Settings", literal=[json.dumps(view.settings, indent=1, ensure_ascii=False)]),
        ]
    )


def answer(view: SelectionView) -> str:
    """Return the choice in one or two sentences."""
    rows, labels = view.candidates, view.labels
    best, known = rows.iloc[0], rows.iloc[0].notna()
    label, unit = labels[best.name], f" {view.unit}" if view.unit else ""
    text = f"{label} is the model to fine-tune on {view.target:,.0f} examples"
    if known["predicted"]:
        text += f": predicted {view.loss} {number(best['predicted'])}{unit}"
    if known["low"] and known["high"]:
        ends = f"{number(best['low'])} to {number(best['high'])}"
        text += f" ({100 * view.level:g} % interval {ends})"
    text += f", by the method {view.method}."
    if known["prob_best"]:
        chances = rows["prob_best"].iloc[1:].sort_values(ascending=False, kind="stable")
        rivals = chances[chances >= 0.05].iloc[:4]
        named = ", ".join(f"{labels[name]} ({share(p)})" for name, p in rivals.items())
        text += f" It is the best of the {len(rows)} with probability {share(best['prob_best'])}"
        text += f"; also in question: {named}." if named else "."
    if known["truth"]:
        lowest = _leader(rows["truth"].astype(float), view)
        text += (
            " Measured in full, it is the best."
            if lowest == best.name
            else f" Measured in full, {labels[lowest]} is the best "
            f"({number(rows['truth'][lowest])}; {label} {number(best['truth'])})."
        )
    return text


def advice(view: SelectionView) -> list[str]:
    """Return advice on the choice: what it hangs on, whether it is clear, and its cost."""
    best, largest = view.candidates.iloc[0], view.largest
    reached = largest[largest["size"] == largest["size"].max()]
    sentences = []
    if best.notna()["predicted"] and best.name in reached.index and reached["size"].max() > 0:
        ahead = _leader(reached["loss"], view)
        sentences.append(
            "It is ahead on the largest subset, too: the choice does not hang on the forecasts."
            if ahead == best.name
            else f"On the largest subset {view.labels[ahead]} is ahead: the choice hangs on the "
            "forecasts."
        )
    sentences.append(view.advice)
    if best.notna()["stop"] and best.notna()["low"]:
        sentences.append(
            "The interval is a rough guide: from three or four small subsets, 90 % intervals held "
            "little more than half of the measured values in our trial."
        )
    spent = view.costs.loc[view.costs["what"].str.startswith("this selection"), "flops"]
    if len(spent):
        part = 100 * spent.iloc[0] / view.costs["flops"].iloc[-1]
        sentences.append(f"This cost {part:.3g} % of fine-tuning every model in full.")
    return [" ".join(sentences)]


def _leader(values: Any, view: SelectionView) -> str:
    """Return the name with the best of some values, a Series."""
    return values.idxmax() if view.higher else values.idxmin()


def ranking_table(view: SelectionView) -> Table:
    """Return the table of the candidates, best first, with the method's figures."""
    rows, largest, known = view.candidates, view.largest, view.candidates.notna()
    places = enumerate(rows.index, start=1)
    columns = {"model": [f"{place}. {view.labels[name]}" for place, name in places]}
    if known["parameters"].any():
        columns["parameters"] = [size_text(size) for size in rows["parameters"]]
    columns["largest subset"] = [f"{size:,.0f}" for size in largest["size"]]
    columns[f"{view.loss} there"] = [number(loss) for loss in largest["loss"]]
    predicts = known["predicted"].iloc[0]
    title, column = (f"at {view.target:,.0f}", "predicted") if predicts else ("score", "score")
    columns[title] = [number(value) for value in rows[column]]
    if known["low"].iloc[0]:
        ends = [map(number, pair) for pair in zip(rows["low"], rows["high"], strict=True)]
        columns[f"{100 * view.level:g} % interval"] = [" … ".join(pair) for pair in ends]
    if known["prob_best"].iloc[0]:
        columns["P(best)"] = [share(chance) for chance in rows["prob_best"]]
    if known["truth"].any():
        columns["measured"] = [number(loss) for loss in rows["truth"]]
    caption = (
        f"Ranking by {view.method}; {view.loss} predicted at {view.target:,.0f} examples. "
        "P(best): probability of being the best of all."
    )
    return Table(caption, list(columns), list(map(list, zip(*columns.values(), strict=True))))


def judgement(selection: Selection, truth: Array, level: float) -> str:
    """Return a sentence on a selection against the losses measured at its target, [n].

    Args:
        level: Probability of the intervals.
    """
    if np.ptp(truth) == 0:
        return ""
    text = (
        f"{selection.method} against the measured losses: PearCorr "
        f"{pear_corr(selection.forecasts, truth):.1f} %, "
        f"RelAcc {rel_acc(selection.scores, truth):.1f} %"
    )
    if selection.forecast.predicted is not None:
        error = log_rmse(selection.predicted_losses, truth)
        text += f", root mean square error of ln loss {error:.3f}"
    if selection.has_intervals:
        inside = coverage(*selection.interval_ends(level), truth)
        text += f", {inside:.0f} % inside their {100 * level:g} % intervals"
    return text.replace("-", "−") + "."


def _cost_tables(view: SelectionView) -> list[Table]:
    full = view.costs["flops"].iloc[-1:].sum()
    rows = [
        [what, scientific(flops), f"{100 * flops / full:.3g} %", remark]
        for what, flops, remark in view.costs.itertuples(index=False)
    ]
    caption = "Floating-point operations, 6 × parameters × tokens an epoch."
    header = ["", "FLOPs", "of FullTuning", ""]
    return [Table(caption, header, rows, frozenset({3}))] if rows else []


def _stop_tables(view: SelectionView) -> list[Table]:
    sizes = view.losses[view.losses["read"]].groupby("name")["size"]
    rows = [
        [view.labels[name], ", ".join(f"{size:,.0f}" for size in sizes.get_group(name)), why]
        for name, why in view.candidates["stop"].dropna().items()
    ]
    caption, header = "Subsets run, and why there were no more.", ["model", "examples", ""]
    return [Table(caption, header, rows, frozenset({2}))] if rows else []


# --- figures


def forecast_figure(
    candidates: DataFrame, across: str, level: float, labels: Mapping[str, str]
) -> Any:
    """Draw predicted losses at the target with their intervals, a row a model, best on top.

    Args:
        candidates: By name, best first: predicted, low, high, and truth where it is known.
        across: Label of the horizontal axis.
        level: Probability of the intervals.
        labels: Labels of the rows by name.
    """
    rows = candidates.reindex(columns=["predicted", "low", "high", "truth"]).astype(float)
    rows = rows.where(np.isfinite(rows))
    places = range(len(rows))
    figure, (panel,) = panels(width=6.4, height=1.1 + 0.3 * len(rows))
    if rows["low"].notna().any():
        bar = {"color": _FORECAST, "linewidth": 5, "alpha": 0.35}
        panel.hlines(places, rows["low"], rows["high"], label=f"{100 * level:g} % interval", **bar)
    panel.plot(rows["predicted"], places, "o", color=_FORECAST, markersize=6, label="predicted")
    if rows["truth"].notna().any():
        cross = {"color": _TRUTH, "markersize": 7, "markeredgewidth": 2}
        panel.plot(rows["truth"], places, "x", label="measured", **cross)
    panel.set_yticks(places, [letters(labels[name]) for name in rows.index])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.grid(axis="x", color="#dddddd")
    panel.set_axisbelow(True)
    panel.set_xlabel(across)
    _legend_below(figure)
    return figure


def curves_figure(view: SelectionView, up: str) -> Any:
    """Draw every candidate's losses over training examples, and its prediction at the target."""
    figure, (panel,) = panels(width=6.4, height=4.4)
    looks = styles_of(list(view.candidates.index))
    trained = view.losses[view.losses["size"] > 0].sort_values("size")
    for name, row in view.candidates.iterrows():
        losses, look = trained[trained["name"] == name], {**looks[name], "markersize": 4}
        read, aside = losses[losses["read"]], losses[~losses["read"]]
        panel.plot(read["size"], read["loss"], label=letters(view.labels[name]), **look)
        hollow = {**look, "markerfacecolor": "white", "linestyle": "None"}
        panel.plot(aside["size"], aside["loss"], **hollow)
        if row.notna()["predicted"] and len(read):
            ends = [row["low"], row["high"]]
            line = {"color": looks[name]["color"], "linewidth": 1, "linestyle": "--"}
            joined = [read["loss"].iloc[-1], row["predicted"]]
            panel.plot([read["size"].iloc[-1], view.target], joined, **line)
            if np.isfinite(np.array(ends, dtype=np.float64)).all():
                panel.plot([view.target] * 2, ends, color=looks[name]["color"], alpha=0.5)
    _sizes_across(panel)
    panel.set(xlabel="training examples", ylabel=up)
    _legend_below(figure)
    return figure


def history_figure(history: DataFrame, method: str) -> Any:
    """Draw PearCorr over the cost, a line a method, level for methods without training.

    Args:
        history: As in `SelectionView`.
        method: The method of the selection, which is drawn wide.
    """
    figure, (panel,) = panels(width=6.4, height=4.4)
    priced = bool(np.isfinite(history["share"]).all())
    across = 100 * history["share"] if priced else history["budget"]
    looks = styles_of(list(history["method"].unique()))
    for name, steps in history.groupby("method", sort=False):
        if (steps["budget"] == 0).all():
            level = {"color": looks[name]["color"], "linewidth": 1.3, "linestyle": ":"}
            panel.axhline(steps["pear_corr"].iloc[0], label=f"{name} (free)", **level)
            continue
        wide = 2.6 if name == method else 1.3
        line = {**looks[name], "markersize": 5, "linewidth": wide, "zorder": wide}
        panel.plot(across[steps.index], steps["pear_corr"], label=name, **line)
    _sizes_across(panel)
    panel.set_xlabel(
        "FLOPs, % of FullTuning" if priced else "training examples of the largest subset"
    )
    panel.set_ylabel("PearCorr, %")
    panel.grid(color="#eeeeee")
    _legend_below(figure)
    return figure


def _sizes_across(panel: Any) -> None:
    """Make the horizontal axis logarithmic, labelled with sizes such as 1.5k."""
    ticker = require("matplotlib.ticker")
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=9))
    panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda size, _: size_text(size)))
    panel.xaxis.set_minor_locator(ticker.NullLocator())


def _legend_below(figure: Any) -> None:
    """Add a legend below the panel, in as many columns as the names leave room for."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    columns = max(1, min(4, int(13 * figure.get_figwidth() // (max(map(len, names)) + 8))))
    place = {"loc": "outside lower center", "ncols": columns, "frameon": False, "fontsize": 9}
    figure.legend(handles, names, **place)


# --- texts


def letters(text: str, longest: int = 28) -> str:
    """Return a user's text for a figure: with $ escaped, and long texts cut in the middle."""
    if len(text) > longest:
        kept = longest - 1
        text = text[: kept // 2] + "…" + text[-(kept - kept // 2) :]
    return text.replace("$", r"\$")


def size_text(size: float) -> str:
    """Return 1500 as 1.5k."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{size / unit:.3g}{letter}"
    return f"{size:.3g}"
