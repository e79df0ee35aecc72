"""The page: what was chosen and why, as sections of one HTML file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..evaluation.report import Picture, Section, Table, write_html
from ..scaling import coverage, log_rmse, pear_corr, rel_acc
from . import figures
from .axes import NONE, cell_text, share_text, size_text
from .study import CandidateView, Study

_CLEAR = 0.5  # probability of being the best


def write_page(path: Path, study: Study) -> None:
    """Writes one file that needs nothing else, whole or not at all.

    Raises:
        MissingExtra: matplotlib is not installed.
        OSError: it cannot be written.
    """
    write_html(path, study.title, sections(study))


def sections(study: Study) -> list[Section]:
    """What the page holds; sections without content are left out."""
    made = [
        Section(
            "Answer",
            [answer(study), *advice(study), study.data]
            + ([f"Stopped: {study.stop}."] if study.stop else []),
            [ranking_table(study)],
        ),
        Section("Predictions", pictures=_forecast(study)),
        Section("Curves", pictures=_curves(study)),
        Section(
            "Ranking quality and cost" if _knows(study) else "How early the ranking settled",
            tables=[*_judged(study), *_history_table(study)],
            pictures=_history(study),
        ),
        Section("Cost", tables=_cost(study)),
        Section("Kernels", tables=_kernel_table(study), pictures=_kernels(study)),
        Section("Why each model's runs ended", tables=_stops(study)),
        Section("More", tables=study.extra),
        Section("Settings", literal=[study.settings] if study.settings else []),
    ]
    return [s for s in made if s.tables or s.pictures or s.literal]


def answer(study: Study) -> str:
    """The choice in one or two sentences."""
    best, *others = study.candidates
    unit = f" {study.unit}" if study.unit else ""
    text = f"{best.label} is the model to fine-tune on {study.target:,.0f} examples"
    if best.predicted is not None:
        text += f": predicted {study.loss} {cell_text(best.predicted)}{unit}"
        if best.low is not None and best.high is not None:
            ends = f"{cell_text(best.low)} to {cell_text(best.high)}"
            text += f" ({100 * study.level:g} % interval {ends})"
    text += f", by the method {study.method}."
    if best.prob_best is not None:
        text += f" It is the best of the {len(study.candidates)} with probability "
        text += f"{_share(best.prob_best)}"
        others.sort(key=lambda one: -(one.prob_best or 0.0))
        rivals = [one for one in others if (one.prob_best or 0.0) >= 0.05]
        named = ", ".join(f"{one.label} ({_share(one.prob_best)})" for one in rivals[:4])
        text += f"; also in question: {named}." if rivals else "."
    if best.truth is not None:
        lowest = min(study.candidates, key=lambda one: math.inf if one.truth is None else one.truth)
        text += (
            " Measured in full, it is the best."
            if lowest is best
            else f" Measured in full, {lowest.label} is the best ({cell_text(lowest.truth)}; "
            f"{best.label} {cell_text(best.truth)})."
        )
    return text


def advice(study: Study) -> list[str]:
    """What to make of the choice: what it hangs on, whether it is clear, what it cost."""
    best = study.candidates[0]
    size = max(one.sizes[-1] for one in study.candidates)
    reached = [one for one in study.candidates if one.sizes[-1] == size > 0]
    made = []
    if best.predicted is not None and best in reached:
        ahead = min(reached, key=lambda one: one.losses[-1])
        made.append(
            f"It has the lowest {study.loss} on the largest subset, too: the choice does not hang "
            "on the forecasts."
            if ahead is best
            else f"On the largest subset {ahead.label} is ahead: the choice hangs on the forecasts."
        )
    if best.prob_best is not None and best.prob_best < _CLEAR:
        made.append(
            "No model is clearly the best: of those in question take the one that suits you in "
            "other ways, or fine-tune two of them in full."
        )
    if study.stop is not None and best.low is not None:
        made.append(
            "The interval is a rough guide: from three or four small subsets, 90 % intervals held "
            "little more than half of the measured values in our trial."
        )
    spent = [one.flops for one in study.spending if one.what.startswith("this selection")]
    if spent:
        share = 100 * spent[0] / study.spending[-1].flops
        made.append(f"This cost {share:.3g} % of fine-tuning every model in full.")
    return [" ".join(made)] if made else []


def ranking_table(study: Study) -> Table:
    """Best first, with what the method gives."""
    rows = study.candidates
    level = f"{100 * study.level:g} % interval"
    columns: list[tuple[str, list[str]]] = [
        ("model", [f"{rank}. {one.label}" for rank, one in enumerate(rows, start=1)]),
    ]
    if any(one.parameters for one in rows):
        columns.append(("parameters", [size_text(one.parameters or math.nan) for one in rows]))
    columns.append(("largest subset", [f"{one.sizes[-1]:,.0f}" for one in rows]))
    columns.append(("loss there", [cell_text(one.losses[-1]) for one in rows]))
    if rows[0].predicted is None:
        columns.append(("score", [cell_text(one.score) for one in rows]))
    else:
        columns.append((f"at {study.target:,.0f}", [cell_text(one.predicted) for one in rows]))
    if rows[0].low is not None:
        columns.append((level, [f"{cell_text(one.low)} … {cell_text(one.high)}" for one in rows]))
    if rows[0].prob_best is not None:
        columns.append(("P(best)", [_share(one.prob_best) for one in rows]))
    if any(one.truth is not None for one in rows):
        columns.append(("measured", [cell_text(one.truth) for one in rows]))
    return Table(
        f"Ranking by {study.method}; {study.loss} predicted at {study.target:,.0f} examples. "
        "P(best): probability of the lowest loss of all." + _caution(rows),
        [head for head, _ in columns],
        [list(row) for row in zip(*(cells for _, cells in columns), strict=True)],
    )


def _caution(rows: Sequence[CandidateView]) -> str:
    losses = [one.predicted for one in rows if one.predicted is not None]
    if losses == sorted(losses):
        return ""
    return (
        " The ranking and P(best) trust a predicted catch-up less than the predictions do, so that "
        "a lower prediction can rank behind a higher one."
    )


def _forecast(study: Study) -> list[Picture]:
    if study.candidates[0].predicted is None:
        return []
    text = f"Predicted {study.loss} at {study.target:,.0f} examples, best on top."
    if study.candidates[0].low is not None:
        text += (
            f" Bars: where {study.method} expects a measured loss with probability "
            f"{study.level:g}; models whose bars overlap widely are not told apart yet."
        )
    if _knows(study):
        text += " Crosses: the loss measured there, which the selection did not read."
    return [Picture(text, figures.forecast_figure(study), figures.SCALE)]


def _curves(study: Study) -> list[Picture]:
    text = f"{study.up} over training examples, both logarithmic and alike in every panel."
    text = text[0].upper() + text[1:]
    if any(one.forecast is not None for one in study.candidates):
        text += f" Blue: what {study.method} expects beyond the last subset"
        wide = any(one.forecast and one.forecast.low is not None for one in study.candidates)
        text += f", with {100 * study.level:g} % bands." if wide else "."
    if any(one.law is not None for one in study.candidates):
        text += " Dashed: LensLLM's law (Eq. 10) fitted to the losses read."
    if any(len(one.kept_aside[0]) for one in study.candidates):
        text += " Open circles: known losses that the selection did not read."
    if any((one.sizes == 0).any() for one in study.candidates):
        text += " At 0: before fine-tuning (a triangle where that is above the axis)."
    made = figures.curves_figures(study)
    count = f" ({{}} of {len(made)})" if len(made) > 1 else ""
    return [
        Picture(text + count.format(number), png, figures.SCALE)
        for number, png in enumerate(made, start=1)
    ]


def _knows(study: Study) -> bool:
    return all(one.truth is not None for one in study.candidates)


def _judged(study: Study) -> list[Table]:
    """The selection against the truth."""
    score, forecast, low, high, truth = (  # NaN where there is none
        np.array([getattr(one, name) for one in study.candidates], dtype=np.float64)
        for name in ("score", "predicted", "low", "high", "truth")
    )
    if not _knows(study) or len(truth) < 2 or np.ptp(truth) == 0:
        return []
    predicts = not np.isnan(forecast).any()
    header = ["method", "PearCorr, %", "RelAcc, %"]
    correlation = _minus(f"{pear_corr(forecast if predicts else score, truth):.1f}")
    row = [study.method, correlation, f"{rel_acc(score, truth):.1f}"]
    if predicts:
        header.append("RMSE of ln loss")
        row.append(f"{log_rmse(forecast, truth):.3f}")
    if not np.isnan([low, high]).any():
        header.append(f"inside their {100 * study.level:g} % intervals")
        row.append(f"{coverage(low, high, truth):.0f} %")
    return [Table("The selection against the measured losses.", header, [row])]


def _history(study: Study) -> list[Picture]:
    if study.history is None:
        return []
    if study.history.against_truth:
        text = (
            "Pareto curve: how well predicted losses (or scores, of methods that predict none) "
            "correlate with the measured full-data losses (PearCorr), over the FLOPs they took. Up "
            "and left is better; a point is a budget."
        )
    else:
        text = (
            f"The full-data losses are not known, so this shows stability instead: how well "
            f"predictions from smaller budgets agree with {study.method}'s last (PearCorr "
            "of the two; its own last point is 100 by definition). A line that is still moving "
            "says that more data may change the ranking."
        )
    return [Picture(text, figures.history_figure(study.history, study.method), figures.SCALE)]


def _history_table(study: Study) -> list[Table]:
    if study.history is None:
        return []
    against = "measured losses" if study.history.against_truth else "the last prediction"
    budgets = sorted({s.budget for steps in study.history.steps.values() for s in steps} - {0.0})
    header = ["method", *(size_text(budget) for budget in budgets)]
    rows = []
    for name, steps in study.history.steps.items():
        cells = {
            step.budget: _minus(f"{step.pear_corr:.1f} ({step.rel_acc:.0f})") for step in steps
        }
        free = cells.get(0.0)  # the same at every budget
        rows.append([name, *(free or cells.get(budget, NONE) for budget in budgets)])
    return [
        Table(
            f"PearCorr (RelAcc) in % against {against}, by the largest subset read.", header, rows
        )
    ]


def _cost(study: Study) -> list[Table]:
    if not study.spending:
        return []
    full = study.spending[-1].flops
    rows = [
        [one.what, scientific(one.flops), f"{100 * one.flops / full:.3g} %", one.remark]
        for one in study.spending
    ]
    text = "Floating-point operations, 6 × parameters × tokens an epoch."
    return [Table(text, ["", "FLOPs", "of FullTuning", ""], rows, prose=frozenset({3}))]


def _kernels(study: Study) -> list[Picture]:
    if study.kernels is None:
        return []
    text = (
        f"The neural tangent kernel Θ on the probe rows ({study.kernels.rows} rows of Θ), after "
        "training on each subset. Effective rank: (Σλ)² / Σλ². Drift: how far Θ is from the one "
        "before fine-tuning (0 there); Eq. 9 takes it as fixed. Last panel, as shares of ‖r‖² "
        "before fine-tuning: F(Θ, t) of Eq. 9 (line) and the squared residual measured (open). "
        "Training lowers cross entropy, which drives logits past the one-hot labels, so the "
        "measured share may pass 1."
    )
    return [Picture(text, figures.kernels_figure(study.kernels), figures.SCALE)]


def _kernel_table(study: Study) -> list[Table]:
    if study.kernels is None:
        return []
    text = "Θ after the largest subset of each model."
    head = ["model", "examples", "‖Θ‖", "effective rank", "drift", "F / ‖r‖²", "measured / ‖r‖²"]
    rows = []
    for label, points in study.kernels.points.items():
        last = points[-1]
        cells = map(cell_text, (last.norm, last.rank, last.drift, last.predicted, last.measured))
        rows.append([label, f"{last.size:,.0f}", *cells])
    return [Table(text, head, rows)]


def _stops(study: Study) -> list[Table]:
    rows = [
        [one.label, ", ".join(f"{size:,.0f}" for size in one.sizes), one.stop]
        for one in study.candidates
        if one.stop
    ]
    text, head = "Subsets run, and why there were no more.", ["model", "examples", ""]
    return [Table(text, head, rows, prose=frozenset({2}))] if rows else []


def scientific(value: float) -> str:
    """1.23 × 10¹⁵."""
    if not (math.isfinite(value) and value > 0):
        return f"{value:g}"
    mantissa, power = f"{value:.2e}".split("e")
    return f"{mantissa} × 10{str(int(power)).translate(_RAISED)}"


_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def _share(probability: float | None) -> str:
    return NONE if probability is None else share_text(probability)


def _minus(text: str) -> str:
    return text.replace("-", "−")
