"""Choosing among the models of tables of losses: what the methods forecast and choose.

    pip download --no-deps lcdb==0.1.0 && tar xf lcdb-0.1.0.tar.gz
    python -m benchmarks.selection budgets --table flan.csv
    python -m benchmarks.selection halves --table flan.csv --halves 10
    python -m benchmarks.selection laws --table flan.csv
    python -m benchmarks.selection default_law --flan flan.csv --llm llm.csv --lcdb lcdb-0.1.0/lcdb
    python -m benchmarks.selection families --flan flan.csv --llm llm.csv --lcdb lcdb-0.1.0/lcdb

budgets (results/selection.csv): every method at budgets of 1/8 … 1/512 of the target: PearCorr of
the predicted losses with the true ones (modelsize, which predicts none: of its scores) and RelAcc
of the choice (per cent), root mean square of log loss at the target, coverage of 90 % intervals
(per cent), FLOPs as a share of training every model on the full data, and seconds.  blend has two
more coverages, both on models left out of what was used: ``left out``, a fifth of the models is
removed in turn; mean over the five runs of the coverage on the models that stay: how much the
figure leans on single models; ``referenced``, a fifth of the models is held out in turn; the
others' losses at the target calibrate (`references=`), and only the held-out fifth is judged.

halves (selection_halves.csv): does blend stay ahead of AtS on random halves of the models?  For
every budget, shares of the halves (per cent) in which blend has the higher PearCorr than AtS and
than AtS with τ = 1, the higher and the lower RelAcc than AtS, the lower RMSE of log loss; and the
mean coverage of its 90 % intervals.

laws (law_errors.csv): how far the laws are from the curves, beside LensLLM's Table 2.  Root mean
square of (fitted − measured) loss, × 10, per model: of `rectified` fitted to all sizes and judged
on the same, with and without the loss before fine-tuning, and fitted up to 1/8 of the data and
judged on the three larger sizes, which it did not see; and the same of `power`.  `lensllm` without
a measured F is `rectified`.  The published figures are those of the README of the paper's
repository (github.com/Susan571/LENSLLM); it does not say which sizes were fitted and which judged.

default_law (default_law.csv): the law that `fit` takes where none is named, beside each it chooses
from.  Root mean square and median of |ln error| at the largest size, from 1/8 and 1/32 of it, and
per cent of the curves whose loss there lies in the 50 and 90 % intervals; every curve fitted alone
(default), and one law for all curves of a table.  Halves A and B are those of families; A has 40
synthetic curves each of a power law with a floor and of the rectified law, too, with 1 % of noise.
What was chosen about `fit` was chosen on A (of LCDB, on the numbers that 4 divides).

families (selection_families_A.csv, .md; B): forecast, choice and probabilities on tables of several
kinds, each judged apart:

- ``flan``: 15 language models, budgets of 1/8 to 1/512; ``flan, few``: three to six of them.
- ``lcdb log-loss``, ``accuracy``, ``AUC``: scikit-learn learners on OpenML data sets (PyPI's lcdb
  0.1.0, unpacked), means over its splits, budgets of 1/8 and 1/32.  The target is the largest size
  that eight learners or more were trained up to, 1,024 rows at least.
- ``llm``: accuracies of three 7 to 8B models on 15 tasks, from 500 and 1,000 rows.

Scores count as losses 1 − score, 0.001 at least.  Settings of "blend" were chosen on half A: the
even rows of FLAN and data sets of LCDB, every other task of llm; half B (``--half B``)
judges.  By family: what the choice of "blend" is better than that of the others, in points of
RelAcc, and by how much its error of forecasts is smaller, both with 95 % intervals by bootstrap
over tables; how often its first has the largest P(best); coverage of 50 and 90 % intervals; for
five bins of P(best) what was said and how often it was true; the means of all figures; and what one
run more, the one that is advised, made of P(best) and of the choice.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from jachess_ext._io import write_text
from jachess_ext.scaling import (
    FittedLaw,
    LossTable,
    Selection,
    fit,
    read_table,
    select,
)

from .common import RESULTS, commit, markdown, stamped, write_frame
from .forecast_scores import coverage, log_rmse, pear_corr, rel_acc

METHODS: dict[str, dict[str, Any]] = {
    "blend": {"method": "blend"},
    "ats": {"method": "ats"},
    "ats tau=1": {"method": "ats", "tau": 1.0},
    "rectified": {"method": "rectified"},
    "lensllm": {"method": "lensllm"},
    "power": {"method": "power"},
    "subtuning": {"method": "subtuning"},
    "zeroshot": {"method": "zeroshot"},
    "modelsize": {"method": "modelsize"},
}


# Budgets of one table ---------------------------------------------------------------------------

FOLDS = 5


def judge(table: LossTable, fraction: int, target: float, name: str) -> dict[str, Any] | None:
    """Return a method's figures at a budget of target / fraction; None: too small a table."""
    budget, truth = target / fraction, table.losses_at(target)
    start = time.perf_counter()
    try:
        selection = select(table, budget, target, **METHODS[name])
    except ValueError as error:
        print(f"{name} at 1/{fraction}: {error}", file=sys.stderr)
        return None
    seconds, blend = time.perf_counter() - start, name == "blend"
    predicts = name not in ("modelsize", "zeroshot")
    known = table.parameters is not None
    return {
        "fraction": fraction,
        "method": name,
        "pear_corr": pear_corr(selection.scores, truth),
        "rel_acc": rel_acc(selection.scores, truth),
        "log_rmse": log_rmse(selection.predicted_losses, truth) if predicts else None,
        "coverage": _coverage(selection, truth),
        "coverage_left_out": _left_out(table, budget, target) if blend else None,
        "coverage_referenced": _referenced(table, budget, target) if blend else None,
        "flops_share": selection.flops / selection.full_flops if known else None,
        "seconds": seconds,
    }


def _coverage(selection: Selection, truth: np.ndarray, level: float = 0.9) -> float | None:
    if not selection.has_intervals:
        return None
    return coverage(*selection.interval_ends(level), truth)


def folds(table: LossTable) -> list[np.ndarray]:
    """Return the places of the models in five random parts."""
    order = np.random.default_rng(0).permutation(len(table.names))
    return [np.sort(order[place::FOLDS]) for place in range(FOLDS)]


def _left_out(table: LossTable, budget: float, target: float) -> float:
    shares = []
    for fold in folds(table):
        kept = table.rows(np.setdiff1d(np.arange(len(table.names)), fold))
        shares.append(_coverage(select(kept, budget, target), kept.losses_at(target)))
    return float(np.mean(shares))


def _referenced(table: LossTable, budget: float, target: float) -> float:
    truth, inside = table.losses_at(target), np.zeros(len(table.names), dtype=bool)
    for fold in folds(table):
        others = [name for place, name in enumerate(table.names) if place not in fold]
        low, high = select(table, budget, target, references=others).interval_ends(0.9)
        inside[fold] = ((low <= truth) & (truth <= high))[fold]
    return float(100 * inside.mean())


def budgets(options: argparse.Namespace) -> pd.DataFrame:
    """Judge every method at every budget, print a block a figure, write."""
    table = read_table(options.table)
    target = options.target or float(table.sizes[-1])
    judged = [judge(table, f, target, name) for f in options.fractions for name in options.methods]
    frame = pd.DataFrame([row for row in judged if row is not None])
    frame.insert(0, "table", options.table.name)
    frame = frame.assign(**stamped())
    write_frame(frame, options.results / "selection.csv")
    for figure in frame.columns[3:-2]:
        if frame[figure].notna().any():
            wide = frame.pivot_table(figure, "method", "fraction", sort=False).assign(
                mean=lambda wide: wide.mean(axis=1)
            )
            print(f"\n{figure}\n{wide.to_string(float_format=lambda x: f'{x:.3f}', na_rep='')}")
    return frame


# Random halves ----------------------------------------------------------------------------------


def compare(half: LossTable, budget: float, target: float) -> dict[str, float]:
    """Return the figures of one half at one budget, 0 or 100 each but the last."""
    truth = half.losses_at(target)
    ours = select(half, budget, target)
    ats = select(half, budget, target, "ats")
    steep = select(half, budget, target, "ats", tau=1.0)
    corr, steep_corr, ats_corr = (pear_corr(each.scores, truth) for each in (ours, steep, ats))
    chosen, ats_chosen = (rel_acc(each.scores, truth) for each in (ours, ats))
    error, ats_error = (log_rmse(each.predicted_losses, truth) for each in (ours, ats))
    return {
        "PearCorr above AtS": 100.0 * (corr > ats_corr),
        "PearCorr above AtS tau=1": 100.0 * (corr > steep_corr),
        "RelAcc above AtS": 100.0 * (chosen > ats_chosen),
        "RelAcc below AtS": 100.0 * (chosen < ats_chosen),
        "RMSE below AtS": 100.0 * (error < ats_error),
        "coverage": coverage(*ours.interval_ends(0.9), truth),
    }


def halves(options: argparse.Namespace) -> pd.DataFrame:
    """Compare on random halves; a row a budget, and their mean last."""
    table = read_table(options.table)
    target = options.target or float(table.sizes[-1])
    generator, count = np.random.default_rng(0), len(table.names)
    rows = []
    for _ in range(options.halves):
        half = table.rows(np.sort(generator.permutation(count)[: count // 2]))
        for fraction in options.fractions:
            figures = compare(half, target / fraction, target)
            rows.append({"budget": f"1/{fraction}"} | figures)
    means = pd.DataFrame(rows).groupby("budget", sort=False).mean()
    means.loc["mean"] = means.mean()
    frame = means.reset_index()
    for place, (name, value) in enumerate(
        (("table", options.table.name), ("halves", options.halves), ("commit", commit()))
    ):
        frame.insert(place, name, value)
    write_frame(frame, options.results / "selection_halves.csv", digits=4)
    print(means.to_string())
    return frame


# Laws on curves ---------------------------------------------------------------------------------

PUBLISHED = {
    "facebook/opt-350m": (0.32, 1.50),
    "facebook/opt-1.3b": (0.32, 1.20),
    "facebook/opt-6.7b": (0.26, 1.31),
    "t5-small": (0.28, 1.30),
    "t5-base": (0.26, 1.26),
    "cerebras/Cerebras-GPT-256M": (0.22, 1.10),
    "cerebras/Cerebras-GPT-1.3B": (0.32, 1.00),
    "google/mt5-base": (0.32, 1.22),
    "google/mt5-large": (0.32, 1.07),
    "facebook/bart-base": (0.30, 0.96),
    "facebook/bart-large": (0.28, 0.87),
    "gpt2": (0.30, 1.23),
    "MBZUAI/LaMini-GPT-124M": (0.35, 1.00),
    "MBZUAI/LaMini-GPT-774M": (0.28, 1.13),
}
"""LensLLM's and the rectified law's RMSE × 10 on FLAN, by the models' names in the table."""


def law_errors(table: LossTable, law: str, zero: bool, budget: float | None = None) -> np.ndarray:
    """Return ten times the RMSE of every model, [n].

    Args:
        zero: whether the law is told the losses before fine-tuning.
        budget: it is fitted up to this and judged above it; None: fitted and judged on all sizes.
    """
    sizes, losses = (table.sizes, table.losses) if zero else (table.trained, table.trained_losses)
    fitted = sizes <= (np.inf if budget is None else budget)
    judged = fitted if budget is None else ~fitted
    predicted = np.asarray(fit(sizes[fitted], losses[:, fitted], law).predict(sizes[judged]))
    return 10 * np.sqrt(np.mean((predicted - losses[:, judged]) ** 2, -1))


def laws(options: argparse.Namespace) -> pd.DataFrame:
    """Fit and judge the laws; the mean of the models that the paper has last."""
    table = read_table(options.table)
    budget = float(table.sizes[-1]) / 8
    published = np.array([PUBLISHED.get(name, (np.nan, np.nan)) for name in table.names])
    frame = pd.DataFrame(
        {
            "model": table.names,
            "published_lensllm": published[:, 0],
            "published_rectified": published[:, 1],
            "rectified": law_errors(table, "rectified", zero=True),
            "rectified_without_zero": law_errors(table, "rectified", zero=False),
            "rectified_ahead": law_errors(table, "rectified", zero=True, budget=budget),
            "power": law_errors(table, "power", zero=False),
            "power_ahead": law_errors(table, "power", zero=False, budget=budget),
        }
    )
    shared = frame.dropna()
    if len(shared):
        mean = shared.mean(numeric_only=True).to_dict()
        frame.loc[len(frame)] = {"model": f"mean of {len(shared)}"} | mean
    frame["commit"] = commit()
    print(frame.drop(columns="commit").to_string(float_format=lambda x: f"{x:.2f}", na_rep=""))
    write_frame(frame, options.results / "law_errors.csv")
    return frame


# The law that fit chooses -----------------------------------------------------------------------

FRACTIONS = (8, 32)
NAMED = ("ats", "power", "rectified")


def synthetic_curves() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield name, sizes and losses of curves that follow a law up to their noise."""
    draw, sizes = np.random.default_rng(0), 200.0 * 2.0 ** np.arange(14)
    beta, floor = draw.uniform(0.2, 0.8, (40, 1)), draw.uniform(0.05, 1, (40, 1))
    noise = np.exp(0.01 * draw.standard_normal((40, 14)))
    yield "power law", sizes, (draw.uniform(2, 30, (40, 1)) * sizes**-beta + floor) * noise
    transition = np.exp(draw.uniform(np.log(1e3), np.log(3e4), (40, 1)))
    flat = draw.uniform(1, 5, (40, 1)) / (1 + (sizes / transition) ** beta)
    yield "rectified law", sizes, (flat + floor) * noise


def law_tables(options: argparse.Namespace) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """Yield family, half, sizes and losses of every table of the halves."""
    for half in options.half:
        if half == "A":
            for name, sizes, losses in synthetic_curves():
                yield name, half, sizes, losses
        cases: list[Case] = []
        if options.flan is not None:
            table = read_table(options.flan)
            yield "flan", half, table.sizes, table.losses["AB".index(half) :: 2]
        if options.llm is not None:
            cases += llm_cases(options.llm, half)
        if options.lcdb is not None:
            cases += lcdb_cases(options.lcdb, half, options.most, MEASURES[:2])
        for case in cases:
            yield case.family, half, case.table.sizes, case.table.losses


def forecast_errors(law: str, sizes: np.ndarray, losses: np.ndarray, budget: float) -> pd.DataFrame:
    """Return of every curve |ln error| at the last size, the law fitted, and a level, [n] rows.

    The level is that of the smallest central interval with the loss in it; NaN: there is no width.
    """
    known = (sizes <= budget) & ((sizes > 0) | (law != "power"))
    x, y = sizes[known], losses[:, known]
    if law == "default":
        fits = [fit(x, row) for row in y]
    else:
        fits = [fit(x, y, None if law == "default, one for all" else law)] * len(y)
    truth = np.log(losses[:, -1:])
    if law == "default":
        parts = [
            _error_and_level(*pair, sizes[-1]) for pair in zip(fits, truth[:, None], strict=True)
        ]
        errors, levels = map(np.concatenate, zip(*parts, strict=True))
    else:
        errors, levels = _error_and_level(fits[0], truth, sizes[-1])
    return pd.DataFrame({"error": errors, "level": levels, "fitted": [each.law for each in fits]})


def _error_and_level(fitted: FittedLaw, truth: np.ndarray, size: float) -> tuple[Any, Any]:
    error = np.abs(np.log(np.ravel(fitted.predict(size))) - truth[:, 0])
    if not fitted.has_width:
        return error, np.full(len(truth), np.nan)
    return error, np.abs(2 * fitted.predictive(size).cdf(truth)[:, 0] - 1)


def default_law(options: argparse.Namespace) -> pd.DataFrame:
    """Judge the law that fit chooses."""
    found = []
    for family, half, sizes, losses in law_tables(options):
        for fraction in FRACTIONS:
            budget = sizes[-1] / fraction
            if ((sizes > 0) & (sizes <= budget)).sum() < 4:
                continue  # power and rectified have four parameters
            for law in (*NAMED, "default", "default, one for all"):
                each = forecast_errors(law, sizes, losses, budget)
                found.append(each.assign(family=family, half=half, fraction=fraction, law=law))
    rows = []
    keys = ["family", "half", "fraction", "law"]
    for values, group in pd.concat(found).groupby(keys, sort=False):
        row = dict(zip(keys, values, strict=True))
        row |= {"curves": len(group), "rms": np.sqrt((group.error**2).mean())}
        row |= {"median": group.error.median()}
        level = group.level.dropna()
        row |= {f"{share} %": 100 * (level < share / 100).mean() for share in (50, 90)}
        rows.append(row | {f"took {name}": int((group.fitted == name).sum()) for name in NAMED})
    frame = pd.DataFrame(rows).assign(commit=commit())
    print(frame.drop(columns="commit").to_string(float_format=lambda x: f"{x:.3f}"))
    write_frame(frame, options.results / "default_law.csv", digits=4)
    return frame


# Families of tables -----------------------------------------------------------------------------

LOWEST = 1e-3  # a score of 1 has no logarithm of its loss
BINS = np.linspace(0, 1, 6)
DRAWS = 2000  # of the bootstrap
FEW_TABLES = 24
MEASURES = ("logloss", "accuracy", "auc")
SO_FAR = "best so far"
FAMILY_METHODS = ("blend", "subtuning", SO_FAR, "ats", "rectified")


@dataclass(frozen=True)
class Case:
    """One table and its budgets; the target is its largest size.

    Tables of one `source` (a data set) are drawn together in the bootstrap.
    """

    family: str
    source: str
    table: LossTable
    budgets: tuple[float, ...]


def flan_cases(path: Path, half: str) -> Iterator[Case]:
    """Yield the table of the even (A) or odd (B) rows, and of random few of them."""
    whole = read_table(path)
    rows = np.arange("AB".index(half), len(whole.names), 2)
    target = float(whole.sizes[-1])
    yield Case("flan", "flan", whole.rows(rows), tuple(target / 2**k for k in range(3, 10)))
    generator = np.random.default_rng(0)
    draws: dict[str, list[np.ndarray]] = {"A": [], "B": []}
    for first, drawn in enumerate(draws.values()):
        of_half = np.arange(first, len(whole.names), 2)
        drawn += [generator.permutation(of_half)[: 3 + n % 4] for n in range(FEW_TABLES)]
    for number, chosen in enumerate(map(np.sort, draws[half])):
        sizes = tuple(target / fraction for fraction in (8, 32, 128, 512))
        yield Case("flan, few", str(number), whole.rows(chosen), sizes)


def lcdb_cases(
    folder: Path, half: str, most: int | None, measures: Sequence[str] = MEASURES
) -> Iterator[Case]:
    """Yield every even (A) or odd (B) data set with eight learners up to 1,024 rows or more.

    Args:
        half: A or B.
        most: data sets a measure; None: all.
    """
    columns = ["openmlid", "learner", "size_train", "score_test"]
    for measure in measures:
        frame = pd.read_csv(folder / f"database-{measure}.csv", usecols=columns)
        frame = frame[frame.openmlid % 2 == "AB".index(half)]
        means = frame.groupby(["openmlid", "learner", "size_train"]).score_test.mean().reset_index()
        count = 0
        for number, rows in means.groupby("openmlid"):
            table = _lcdb_table(rows, measure)
            if table is None or (most is not None and count >= most):
                continue
            count += 1
            target = float(table.sizes[-1])
            yield Case(f"lcdb {measure}", str(number), table, (target / 8, target / 32))


def _lcdb_table(rows: pd.DataFrame, measure: str) -> LossTable | None:
    wide = rows.pivot(index="learner", columns="size_train", values="score_test")
    whole = wide.dropna(axis=0)
    while len(whole) < 8 and len(wide.columns) > 1:
        wide = wide.iloc[:, :-1]
        whole = wide.dropna(axis=0)
    values = whole.to_numpy(float)
    if len(whole) < 8 or whole.columns[-1] < 1024:
        return None
    losses = values if measure == "logloss" else 1 - values
    if np.ptp(losses[:, -1]) == 0 or (losses <= 0).mean() > 0.3:
        return None  # nothing to choose between, or solved by most learners
    sizes = np.array(whole.columns, dtype=float)
    return LossTable(tuple(whole.index), sizes, np.maximum(losses, LOWEST), None)


def llm_cases(path: Path, half: str) -> Iterator[Case]:
    """Yield a table a task (every other one), of the sizes that all three models have."""
    frame = pd.read_csv(path)
    numbers = [name for name in frame.columns if name.isdigit()]
    for place, (task, rows) in enumerate(frame.groupby("task")):
        if place % 2 != "AB".index(half):
            continue
        known = rows[numbers].dropna(axis=1)
        losses = np.maximum(1 - known.to_numpy(float), LOWEST)
        sizes = np.array(known.columns, dtype=float)
        table = LossTable(tuple(rows.model), sizes, losses, None)
        yield Case("llm", task, table, (500.0, 1000.0))


def judge_case(case: Case, method: str) -> Iterator[dict[str, Any]]:
    """Yield the figures of a method at every budget that leaves it sizes enough.

    `said` and `true` are lists over the models: P(best), and the share of the best place.
    """
    target = float(case.table.sizes[-1])
    truth = case.table.losses_at(target)
    best = truth == truth.min()
    for budget in case.budgets:
        row = {"family": case.family, "source": case.source, "budget": budget, "method": method}
        if method == SO_FAR:
            lowest = case.table.up_to(budget).trained_losses.min(1)
            yield row | {"RelAcc": rel_acc(lowest, truth), "RMSE ln L": log_rmse(lowest, truth)}
            continue
        try:
            selection = select(case.table, budget, target, **METHODS[method])
        except ValueError:
            continue  # fewer sizes than parameters
        row |= {
            "PearCorr": pear_corr(selection.scores, truth),  # NaN: all alike
            "RelAcc": rel_acc(selection.scores, truth),
            "RMSE ln L": log_rmse(selection.predicted_losses, truth),
        }
        if selection.has_intervals:
            chances = selection.best_probabilities
            row |= {
                "50 %": _coverage(selection, truth, 0.5),
                "90 %": _coverage(selection, truth, 0.9),
                "first": 100.0 * (chances[selection.scores.argmin()] == chances.max()),
                "said": chances.tolist(),
                "true": (best / best.sum()).tolist(),
            }
        yield row | (_after_one_run(selection, case.table, best) if method == "blend" else {})


def _after_one_run(selection: Selection, table: LossTable, best: np.ndarray) -> dict[str, float]:
    """Return P(the choice is right) before and after the run that is advised, said and found.

    The run is done where the table has its size, in per cent; nothing where it has not.
    """
    run = selection.next_run
    assert run is not None
    place = np.flatnonzero(np.isclose(table.sizes, run.rows, rtol=0.02))
    if not len(place) or run.rows >= selection.target:
        return {}
    kept = (table.sizes <= selection.budget) | (table.sizes == table.sizes[place[0]])
    known = table.columns(kept)
    known.losses[np.array(table.names) != run.model, -1] = np.nan
    again = select(known, target=selection.target, method=selection.method)
    return {
        "run: P before": 100 * run.now,
        "run: P after": 100 * run.after,
        "run: P found": 100 * again.best_probabilities.max(),
        "run: right before": 100.0 * best[selection.scores.argmin()],
        "run: right after": 100.0 * best[again.scores.argmin()],
    }


def family_means(judged: pd.DataFrame) -> pd.DataFrame:
    """Return means of the figures of every family and method, as text."""
    digits = {"PearCorr": 1, "RelAcc": 1, "RMSE ln L": 3, "50 %": 0, "90 %": 0, "first": 0}
    digits |= {name: 0 for name in judged.columns if name.startswith("run: ")}
    rows = []
    for (family, method), group in judged.groupby(["family", "method"], sort=False):
        row = {"family": family, "method": method, "cases": str(len(group))}
        means = group.reindex(columns=list(digits)).astype(float).mean()
        rows.append(row | {n: _number(means[n], places) for n, places in digits.items()})
    return pd.DataFrame(rows)


def _number(value: float, digits: int) -> str:
    return "" if np.isnan(value) else f"{value:.{digits}f}"


def _kind(family: str) -> str:
    return "lcdb" if family.startswith("lcdb") else family


def compared(judged: pd.DataFrame) -> pd.DataFrame:
    """Return what "blend" has more of than each other method, by family and over the families.

    Points of RelAcc of the choice (more is better), and RMSE of ln loss (less is better), with 95 %
    intervals by bootstrap over tables, the three measures of an LCDB data set drawn together.  Over
    all, families count alike.
    """
    rows = []
    for figure, digits in (("RelAcc", 1), ("RMSE ln L", 3)):
        wide = judged.assign(kind=judged.family.map(_kind)).pivot(
            index=["kind", "family", "source", "budget"], columns="method", values=figure
        )
        for method in wide.columns.drop("blend"):
            less = (wide["blend"] - wide[method]).dropna()
            row, everything = {"figure": figure, "less that of": method}, []
            for kind in dict.fromkeys(map(_kind, judged.family)):
                sums = less[less.index.get_level_values("kind") == kind]
                sums = sums.groupby("source").agg(["sum", "count"]).to_numpy()
                generator = np.random.default_rng(0)
                drawn = sums[generator.integers(len(sums), size=(DRAWS, len(sums)))].sum(1)
                means = np.append(sums[:, 0].sum() / sums[:, 1].sum(), drawn[:, 0] / drawn[:, 1])
                row[kind] = _with_interval(means, digits, tables=len(sums))
                everything.append(means)
            row["all"] = _with_interval(np.mean(everything, 0), digits, tables=2)
            rows.append(row)
    return pd.DataFrame(rows)


def _with_interval(means: np.ndarray, digits: int, tables: int) -> str:
    """Return the first of the means, and where 95 % of the others lie unless it is one table's."""
    text = f"{means[0]:+.{digits}f}"
    if tables == 1:
        return text
    low, high = np.quantile(means[1:], [0.025, 0.975])
    return f"{text} [{low:+.{digits}f}, {high:+.{digits}f}]"


def best_bins(judged: pd.DataFrame) -> pd.DataFrame:
    """Return P(best) said and true in five bins, per family and of all."""
    each = judged[["family", "method", "said", "true"]].explode(["said", "true"]).dropna()
    each = each.astype({"said": float, "true": float})
    groups = pd.concat([each.assign(family="all"), each])
    place = np.clip(np.digitize(groups.said, BINS) - 1, 0, 4)
    rows = []
    for (method, family), group in groups.assign(bin=place).groupby(["method", "family"]):
        row = {"method": method, "family": family}
        for number, (low, high) in enumerate(pairwise(BINS)):
            inside, text = group[group.bin == number], ""
            if len(inside):
                text = f"{inside.said.mean():.2f} {inside.true.mean():.2f} ({len(inside)})"
            row[f"{low:.1f} to {high:.1f}"] = text
        rows.append(row)
    return pd.DataFrame(rows)


def families(options: argparse.Namespace) -> pd.DataFrame:
    """Judge all cases of a half, print, write the tables as Markdown and the means as csv."""
    cases: list[Case] = []
    if options.flan is not None:
        cases += flan_cases(options.flan, options.half)
    if options.llm is not None:
        cases += llm_cases(options.llm, options.half)
    if options.lcdb is not None:
        cases += lcdb_cases(options.lcdb, options.half, options.most)
    judged = pd.DataFrame(
        [row for name in options.methods for case in cases for row in judge_case(case, name)]
    )
    means = family_means(judged)
    most = "all" if options.most is None else f"at most {options.most} a measure"
    text = (
        f"Half {options.half}, commit {commit()}; LCDB data sets: {most}.\n\n"
        f"blend less the others:\n\n{markdown(compared(judged))}\n"
        f"All figures:\n\n{markdown(means)}\n"
        "P(best) said, how often true, and of how many, by bin of what was said:\n\n"
        f"{markdown(best_bins(judged))}"
    )
    print(text)
    name = f"selection_families_{options.half}"
    write_text(options.results / f"{name}.md", text)
    write_frame(means.assign(half=options.half), options.results / f"{name}.csv")
    return judged


# The command ------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> pd.DataFrame:
    """Judge, print, write; what was judged."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True)

    def part(function: Any) -> argparse.ArgumentParser:
        options = parts.add_parser(function.__name__, help=function.__doc__)
        options.add_argument("--results", type=Path, default=RESULTS)
        options.set_defaults(run=function)
        return options

    for function in (budgets, halves, laws):
        options = part(function)
        options.add_argument(
            "--table", type=Path, required=True, help="config name,0,200,…: losses by training size"
        )
        if function in (budgets, halves):
            options.add_argument("--target", type=float, help="default: the table's largest size")
            fractions = [2**k for k in range(3, 10)]
            options.add_argument("--fractions", type=int, nargs="+", default=fractions)
        if function is budgets:
            options.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
        if function is halves:
            options.add_argument("--halves", type=int, default=20)
    for function in (families, default_law):
        options = part(function)
        options.add_argument("--lcdb", type=Path, help="folder with database-accuracy.csv …")
        options.add_argument("--most", type=int, help="LCDB data sets a measure and half")
        if function is families:
            options.add_argument("--half", choices=("A", "B"), default="A")
        options.add_argument("--flan", type=Path, help="losses of 30 models (Lin et al. 2024)")
        options.add_argument("--llm", type=Path, help="model,task,metric,50,…: accuracies")
        if function is default_law:
            options.add_argument("--half", choices=("A", "B"), nargs="+", default=["A", "B"])
        else:
            options.add_argument(
                "--methods", nargs="+", choices=FAMILY_METHODS, default=FAMILY_METHODS
            )
    given = parser.parse_args(argv)
    if given.run is families and not (given.flan or given.llm or given.lcdb):
        parser.error("no tables: give --flan, --llm or --lcdb")
    return given.run(given)


if __name__ == "__main__":
    main(sys.argv[1:])
