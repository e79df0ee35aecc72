"""Choosing among the models of tables of losses: what the methods forecast and choose.

    pip download --no-deps lcdb==0.1.0 && tar xf lcdb-0.1.0.tar.gz
    python -m benchmarks.selection budgets flan.csv
    python -m benchmarks.selection families --flan flan.csv --llm llm.csv --lcdb lcdb-0.1.0/lcdb
    python -m benchmarks.selection history --llm llm.csv --lcdb lcdb-0.1.0/lcdb
    python -m benchmarks.selection advice --flan flan.csv --llm llm.csv --lcdb lcdb-0.1.0/lcdb
    python -m benchmarks.selection constants --flan flan.csv --pretraining pretraining.csv
    python -m benchmarks.selection development --flan flan.csv --llm llm.csv \
        --lcdb lcdb-0.1.0/lcdb --pretraining pretraining.csv

budgets (results/selection.csv): every method at budgets of 1/8 … 1/512 of the target: PearCorr of
the predicted losses with the true ones (modelsize, which predicts none: of its scores) and RelAcc
of the choice (per cent), root mean square of log loss at the target, coverage of 90 % intervals
(per cent), FLOPs as a share of training every model on the full data, and seconds.

families (selection_families_A.csv, .md; B): forecast, choice and probabilities on tables of several
kinds, each judged apart:

- ``flan``: 15 language models, budgets of 1/8 to 1/512; ``flan, few``: three to six of them.
- ``lcdb log-loss``, ``accuracy``, ``AUC``: scikit-learn learners on OpenML data sets (PyPI's lcdb
  0.1.0, unpacked), means over its splits, budgets of 1/8 and 1/32.  The target is the largest size
  that eight learners or more were trained up to, 1,024 rows at least.
- ``llm``: accuracies of three 7 to 8B models on 15 tasks, from 500 and 1,000 rows.
- ``--pretraining``: a csv of the columns family, table, model, size and loss, with a table for each
  corpus, optimiser or network; budgets of a half to a sixteenth that leave three sizes.

Scores count as losses 1 − score, 0.001 at least.  Settings of "blend" were chosen on half A: the
even rows of FLAN and data sets of LCDB, every other task of llm; half B (``--half B``)
judges.  By family: what the choice of "blend" is better than that of the others, in points of
RelAcc, and by how much its error of forecasts is smaller, both with 95 % intervals by bootstrap
over tables; for five bins of P(best) what was said and how often it was true; and means of all
figures.  Among these: −ln P(the true best), beside that of all models alike and of a softmax of
−SOFTMAX times the standardised ln forecasts; P(best) of the most probable, said and true; the mean
of −ln density of the forecasts; coverage of 50 and 90 % intervals; and of the fewest models that
hold the best with probability 0.9 their share of all, and how often they held it.

larger (selection_larger_A.md; B): forecasts, or one larger run of each model at the same cost.

advice (selection_advice_A.md; B): on the same cases.  Regret is 100 ln (loss / lowest), which is
per cent where it is small, or points of a score.

- Following the advice, which is to train the shortlist in full and take the best: what that costs
  as a share of training all, and the regret, said and true; beside it the first model alone; the
  fewest models that hold the best with P(best) 0.9, which was the shortlist before; the first of
  the last losses, as many and one to three; and plain halving up to the target at the same cost.
- Whole searches on sizes that double, a row of each model at one price.  "equal": every model on
  the sizes up to the budget, which is the total that the others have: "one each", every model on
  one size; "halving", from the size that the total allows the better half by loss goes on to twice
  the size; "dropping", `Search` with that strategy, on all sizes up to half the target; "dropping,
  same sizes", on those of "equal".  RelAcc and regret of the one model chosen, and the cost as a
  share of that of "equal".

constants (selection_constants.md): the same figures, means over families, with each constant of
`scaling.constants` halved and doubled (or moved, where it is a probability); what they are chosen
by.

development (selection_development.csv): the choice on the tables that its constants are chosen by,
not halved, and with parts of it switched off.  docs/scaling_record.md quotes the rows.  Of LCDB it
takes every fourth even data set, by F1 and AUC; "flan, few A" and "B" are those of `families`.
Families whose tables are not given are left out, also of the means.

- The figures of `families`; "undrawn": of forecasts before their differences are drawn to those of
  the last losses; regret as in `advice`; "last" and "halving": RelAcc of the lowest last loss, and
  of plain halving at the same cost; the share of the models that go on, and how often the best is
  not among them; how often "no further run is needed" is said, and how often that costs more than
  1 % or a point; how often a table is said to tell nothing.
- These are means over the cases of a family, over families ("mean", without FLAN's few), and over
  the cases with as many sizes.  Besides: P(best) said and true by bins, and how often tables of
  coin flips are said to tell nothing.

history (selection_history_A.md; B): what `history=` is worth, on the families with several tables
of the same models: LCDB's data sets, the tasks of llm, and files of the same models (``--tables``).
The histories are 1, 3, 10 and all other tables of the family; "history alone" chooses the model
that stood best in them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pandas as pd
import tyro
from scipy.stats import t as student

from jachess_ext._io import write_text
from jachess_ext.scaling import LossTable, Search, Selection, blend, read_table, select, shapes
from jachess_ext.scaling.blend import forecasts
from jachess_ext.scaling.constants import CONSTANTS
from jachess_ext.scaling.history import History, same_runs

from .common import RESULTS, commit, markdown, stamped, write_frame
from .forecast_scores import coverage, cross_entropy, log_rmse, pear_corr, rel_acc

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

LOWEST_P = 1e-6  # of which a logarithm is taken


def judge(table: LossTable, fraction: int, target: float, name: str) -> dict[str, Any] | None:
    """Return a method's figures at a budget of target / fraction; None: too small a table."""
    budget, truth = target / fraction, table.losses_at(target)
    start = time.perf_counter()
    try:
        selection = select(table, budget, target, **METHODS[name])
    except ValueError as error:
        print(f"{name} at 1/{fraction}: {error}", file=sys.stderr)
        return None
    seconds = time.perf_counter() - start
    predicts = name not in ("modelsize", "zeroshot")
    known = table.parameters is not None
    forecast = selection.scores if name == "modelsize" else selection.predicted_losses
    if name == "blend":  # correlations are of forecasts, which the choice draws to the last losses
        used = selection.table
        forecast = np.exp(forecasts(used.trained, used.trained_losses, [target])[0].extrapolation)
    return {
        "fraction": fraction,
        "method": name,
        "pear_corr": pear_corr(forecast, truth),
        "rel_acc": rel_acc(selection.scores, truth),
        "log_rmse": log_rmse(selection.predicted_losses, truth) if predicts else None,
        "minus_log_p": _minus_log_p(selection, truth),
        "coverage": _coverage(selection, truth),
        "flops_share": selection.flops / selection.full_flops if known else None,
        "seconds": seconds,
    }


def _coverage(selection: Selection, truth: np.ndarray, level: float = 0.9) -> float | None:
    if not selection.has_intervals:
        return None
    return coverage(*selection.interval_ends(level), truth)


def _minus_log_p(selection: Selection, truth: np.ndarray) -> float | None:
    """Return −ln P(best) of the models that were the best, in the mean where several were."""
    if not selection.has_intervals:
        return None
    best = (truth == truth.min()).astype(float)
    chances = np.maximum(selection.best_probabilities, LOWEST_P)
    return cross_entropy(np.log(chances), best / best.sum())


def budgets(
    table: tyro.conf.Positional[Path],
    target: float | None = None,
    fractions: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512),
    methods: tuple[str, ...] = tuple(METHODS),
    results: Path = RESULTS,
) -> pd.DataFrame:
    """Judge every method at every budget, print a block a figure, write.

    Args:
        table: csv of losses: config name, then a column a training size.
        target: default: the table's largest size.
        fractions: budgets, as parts of the target.
        methods: those judged, by their names in `METHODS`.
        results: folder of the csv.
    """
    losses = read_table(table)
    size = target or float(losses.sizes[-1])
    judged = [judge(losses, f, size, name) for f in fractions for name in methods]
    frame = pd.DataFrame([row for row in judged if row is not None])
    frame.insert(0, "table", table.name)
    frame = frame.assign(**stamped())
    write_frame(frame, results / "selection.csv")
    for figure in frame.columns[3:-2]:
        if frame[figure].notna().any():
            wide = frame.pivot_table(figure, "method", "fraction", sort=False).assign(
                mean=lambda wide: wide.mean(axis=1)
            )
            print(f"\n{figure}\n{wide.to_string(float_format=lambda x: f'{x:.3f}', na_rep='')}")
    return frame


# Families of tables -----------------------------------------------------------------------------

LOWEST = 1e-3  # a score of 1 has no logarithm of its loss
BINS = np.linspace(0, 1, 6)
DRAWS = 2000  # of the bootstrap
FEW_TABLES = 24
SOFTMAX = 2.4
"""Of (ln forecast − least) / standard deviation: one constant suits tables of any spread best."""
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
    folder: Path,
    half: str,
    most: int | None,
    measures: Sequence[str] = MEASURES,
    every: int = 1,
) -> Iterator[Case]:
    """Yield every even (A) or odd (B) data set with eight learners up to 1,024 rows or more.

    Args:
        half: A or B.
        most: data sets a measure; None: all.
        measures: log-loss and scores, by the names of their files.
        every: every how many-th of the data sets, with eight learners or not, is looked at.
    """
    columns = ["openmlid", "learner", "size_train", "score_test"]
    for measure in measures:
        frame = pd.read_csv(folder / f"database-{measure}.csv", usecols=columns)
        frame = frame[frame.openmlid % 2 == "AB".index(half)]
        means = frame.groupby(["openmlid", "learner", "size_train"]).score_test.mean().reset_index()
        count = 0
        for number, rows in islice(means.groupby("openmlid"), None, None, every):
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


def pretraining_cases(path: Path) -> Iterator[Case]:
    """Yield the tables of every family of a csv of pretraining losses."""
    frame = pd.read_csv(path)
    for (family, name), rows in frame.groupby(["family", "table"]):
        wide = rows.pivot_table(index="model", columns="size", values="loss").dropna()
        sizes = np.array(wide.columns, float)
        table = LossTable(tuple(map(str, wide.index)), sizes, wide.to_numpy(float), None)
        shares = [sizes[-1] / share for share in (2, 4, 8, 16)]
        budgets = tuple(budget for budget in shares if sizes[2] <= budget)
        yield Case(str(family), f"{family}, {name}", table, budgets[-2:])


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
            "PearCorr": pear_corr(selection.predicted_losses, truth),  # NaN: all alike
            "RelAcc": rel_acc(selection.scores, truth),
            "RMSE ln L": log_rmse(selection.predicted_losses, truth),
        }
        if selection.has_intervals:
            chances = selection.best_probabilities
            own = selection.forecast.predictive
            assert own is not None
            density = student.logpdf(np.log(truth), own.dof, own.location, own.scale)
            shares, order = best / best.sum(), np.argsort(-chances)
            held = np.searchsorted(np.cumsum(chances[order]), 0.9) + 1
            logs = np.log(selection.predicted_losses)
            softmax = -SOFTMAX * (logs - logs.min()) / max(logs.std(), 1e-12)
            row |= {
                "−ln P": _minus_log_p(selection, truth),
                "alike": np.log(len(truth)),
                "softmax": cross_entropy(softmax, shares),
                "top said": chances.max(),
                "top true": shares[chances.argmax()],
                "softmax top": 1 / np.exp(softmax - softmax.max()).sum(),
                "log score": -density.mean(),
                "50 %": _coverage(selection, truth, 0.5),
                "90 %": _coverage(selection, truth, 0.9),
                "kept": 100.0 * held / len(truth),
                "kept true": 100.0 * shares[order[:held]].sum(),
                "said": chances.tolist(),
                "true": shares.tolist(),
            }
        yield row


def family_means(judged: pd.DataFrame) -> pd.DataFrame:
    """Return means of the figures of every family and method, as text."""
    digits = {"PearCorr": 1, "RelAcc": 1, "RMSE ln L": 3, "−ln P": 3, "alike": 3}
    digits |= {
        "softmax": 3,
        "top said": 2,
        "top true": 2,
        "softmax top": 2,
        "log score": 3,
    }
    digits |= {"50 %": 0, "90 %": 0, "kept": 0, "kept true": 0}
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


def compared(
    judged: pd.DataFrame,
    ours: str = "blend",
    figures: Sequence[tuple[str, int]] = (("RelAcc", 1), ("RMSE ln L", 3)),
) -> pd.DataFrame:
    """Return what a method has more of than each other method, by family and over the families.

    Points of RelAcc of the choice (more is better), and RMSE of ln loss (less is better), with 95 %
    intervals by bootstrap over tables, the three measures of an LCDB data set drawn together.  Over
    all, families count alike.
    """
    rows = []
    for figure, digits in figures:
        wide = judged.assign(kind=judged.family.map(_kind)).pivot(
            index=["kind", "family", "source", "budget"], columns="method", values=figure
        )
        for method in wide.columns.drop(ours):
            less = (wide[ours] - wide[method]).dropna()
            row, everything = {"figure": figure, "less that of": method}, []
            for kind in dict.fromkeys(map(_kind, judged.family)):
                means, tables = _drawn(less[less.index.get_level_values("kind") == kind])
                row[kind] = _with_interval(means, digits, tables)
                everything.append(means)
            row["all"] = _with_interval(np.mean(everything, 0), digits, tables=2)
            rows.append(row)
    return pd.DataFrame(rows)


def _drawn(values: pd.Series) -> tuple[np.ndarray, int]:
    """Return the mean and those of bootstrap draws of whole sources, and how many these are."""
    sums = values.groupby("source").agg(["sum", "count"]).to_numpy()
    generator = np.random.default_rng(0)
    drawn = sums[generator.integers(len(sums), size=(DRAWS, len(sums)))].sum(1)
    return np.append(sums[:, 0].sum() / sums[:, 1].sum(), drawn[:, 0] / drawn[:, 1]), len(sums)


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


def _cases(
    flan: Path | None,
    llm: Path | None,
    lcdb: Path | None,
    half: str,
    most: int | None,
    pretraining: Path | None = None,
) -> list[Case]:
    cases: list[Case] = []
    if flan is not None:
        cases += flan_cases(flan, half)
    if llm is not None:
        cases += llm_cases(llm, half)
    if lcdb is not None:
        cases += lcdb_cases(lcdb, half, most)
    if pretraining is not None:
        cases += pretraining_cases(pretraining)
    if not cases:
        raise SystemExit("selection: no tables; give --flan, --llm, --lcdb or --pretraining")
    return cases


def families(
    flan: Path | None = None,
    llm: Path | None = None,
    lcdb: Path | None = None,
    pretraining: Path | None = None,
    half: Literal["A", "B"] = "A",
    methods: tuple[str, ...] = FAMILY_METHODS,
    most: int | None = None,
    results: Path = RESULTS,
) -> pd.DataFrame:
    """Judge all cases of a half, print, write the tables as Markdown and the means as csv.

    Args:
        flan: csv of losses of 30 models (Lin et al. 2024).
        llm: csv of accuracies: model, task, metric, then a column a size.
        lcdb: folder with database-accuracy.csv and its like.
        pretraining: csv of family, table, model, size and loss; not halved.
        methods: blend and those it is compared with.
        most: LCDB data sets a measure; default: all.
        results: folder of the files written.

    Raises:
        SystemExit: no tables are given.
    """
    cases = _cases(flan, llm, lcdb, half, most, pretraining)
    judged = pd.DataFrame(
        [row for name in methods for case in cases for row in judge_case(case, name)]
    )
    means = family_means(judged)
    sets = "all" if most is None else f"at most {most} a measure"
    text = (
        f"Half {half}, commit {commit()}; LCDB data sets: {sets}.\n\n"
        f"blend less the others:\n\n{markdown(compared(judged))}\n"
        f"All figures:\n\n{markdown(means)}\n"
        "P(best) said, how often true, and of how many, by bin of what was said:\n\n"
        f"{markdown(best_bins(judged))}"
    )
    print(text)
    write_text(results / f"selection_families_{half}.md", text)
    write_frame(means.assign(half=half), results / f"selection_families_{half}.csv")
    return judged


# Constants --------------------------------------------------------------------------------------

_SHOWN = ("RelAcc", "−ln P", "RMSE ln L", "50 %", "90 %")


@contextmanager
def _changed(name: str, value: float) -> Iterator[None]:
    """Set a constant of the choice within the block."""
    before = getattr(CONSTANTS, name)
    object.__setattr__(CONSTANTS, name, value)
    try:
        yield
    finally:
        object.__setattr__(CONSTANTS, name, before)


def constants(
    flan: Path | None = None,
    llm: Path | None = None,
    lcdb: Path | None = None,
    pretraining: Path | None = None,
    names: tuple[str, ...] = (),
    most: int | None = None,
    results: Path = RESULTS,
) -> pd.DataFrame:
    """Judge the choice with each constant changed, print, write Markdown.

    Args:
        flan, llm, lcdb, pretraining, most, results: as for `families`; half A.
        names: constants to change; default: all.
    """
    cases = _cases(flan, llm, lcdb, "A", most, pretraining)
    rows = []
    for name in (None, *(names or vars(CONSTANTS))):
        value = 0.0 if name is None else getattr(CONSTANTS, name)
        odds = value / (1 - value) if 0 < value < 1 else value
        for factor in (1,) if name is None else (0.5, 2):
            changed = odds * factor / (1 + odds * factor) if 0 < value < 1 else value * factor
            with _changed(name, changed) if name is not None else nullcontext():
                judged = pd.DataFrame([row for case in cases for row in judge_case(case, "blend")])
            means = judged.groupby("family")[list(_SHOWN)].mean().mean()
            texts = {figure: f"{means[figure]:.3f}" for figure in _SHOWN}
            rows.append(
                {"constant": name or "as they are", "value": f"{changed:.3g}" * bool(name)} | texts
            )
            print(rows[-1], flush=True)
    frame = pd.DataFrame(rows)
    text = f"Half A, commit {commit()}; means over families.\n\n{markdown(frame)}"
    write_text(results / "selection_constants.md", text)
    return frame


# Advice -----------------------------------------------------------------------------------------

SCORES = ("llm", "lcdb accuracy", "lcdb auc", "lcdb f1")  # families whose regret is in points
SURE = 0.9


def regrets(losses: np.ndarray, truth: np.ndarray, family: str) -> np.ndarray:
    """Return what losses are above the lowest, in points of a score or 100 ln (loss / lowest)."""
    best = truth.min()
    return 100 * (losses - best if family in SCORES else np.log(losses / best))


def halving(
    losses: np.ndarray, sizes: np.ndarray, prices: np.ndarray, total: float
) -> tuple[int, float]:
    """Return what plain halving chooses, and its cost: the better half goes on to twice the size.

    It begins at the largest size from which all its runs cost no more than the total together, at
    the smallest where none does.

    Args:
        losses: [n, m].
        sizes: ascending, [m].
        prices: of a row of each model, [n].
    """
    choice = int(losses[:, 0].argmin()), float(prices.sum() * sizes[0])
    for start in range(len(sizes)):
        places, rows, cost = doubling(sizes[start:]) + start, np.arange(len(losses)), 0.0
        for place in places:
            cost += prices[rows].sum() * sizes[place]
            rows = rows[np.argsort(losses[rows, place], kind="stable")]
            if len(rows) < 4 or place == places[-1]:
                break
            rows = np.sort(rows[: len(rows) // 2])
        if cost <= total * (1 + 1e-9):
            choice = int(rows[0]), float(cost)
    return choice


def doubling(sizes: np.ndarray) -> np.ndarray:
    """Return the places of sizes of which each is about twice the one before, or more."""
    places = [0]
    for place in range(1, len(sizes)):
        if sizes[place] >= 1.9 * sizes[places[-1]]:
            places.append(place)
    return np.array(places)


def follow(case: Case, budget: float) -> dict[str, Any] | None:
    """Return what following the advice costs and loses; None: too few sizes."""
    table, target = case.table, float(case.table.sizes[-1])
    table = replace(table, metric="accuracy" if case.family in SCORES else None)
    try:
        found = select(table, budget, target)
    except ValueError:
        return None
    truth, places = table.losses_at(target), np.argsort(found.scores, kind="stable")
    full = found.full_costs if np.isfinite(found.full_costs).all() else np.ones(len(truth))
    prices, count = full / full.sum() / target, len(found.shortlist)
    sure = np.argsort(-found.best_probabilities, kind="stable")
    held = np.searchsorted(np.cumsum(found.best_probabilities[sure]), SURE) + 1
    within = found.table
    last = np.argsort(within.trained_losses[:, -1], kind="stable")
    cost = full[places[:count]].sum() / full.sum()
    total = cost + prices.sum() * within.trained.sum()
    halved, _ = halving(table.trained_losses, table.trained, prices, total)
    said = 100 * found.expected_regret

    def lost(rows: np.ndarray) -> float:
        return float(regrets(truth[rows].min(keepdims=True), truth, case.family)[0])

    return {
        "family": case.family,
        "source": case.source,
        "budget": budget,
        "models": len(truth),
        "first said": said[0],
        "first true": lost(places[:1]),
        "named": count,
        "cost": cost,
        "said": said[count - 1],
        "true": lost(places[:count]),
        "held": 100.0 * (lost(places[:count]) <= 1),
        "0.9 cost": full[sure[:held]].sum() / full.sum(),
        "0.9 true": lost(sure[:held]),
        "last, as many": lost(last[:count]),
        **{f"last {k}": lost(last[:k]) for k in (1, 2, 3)},
        "halving": lost(np.array([halved])),
    }


def search_all(case: Case, budget: float) -> Iterator[dict[str, Any]]:
    """Yield what whole searches of one total choose; nothing of fewer than three sizes."""
    target, truth = float(case.table.sizes[-1]), case.table.losses_at(case.table.sizes[-1])
    below = case.table.trained <= target / 1.9
    sizes, losses = case.table.trained[below], case.table.trained_losses[:, below]
    places = doubling(sizes)
    ladder, curves = sizes[places], losses[:, places]
    equal = ladder <= budget
    if equal.sum() < 3:
        return
    count = len(truth)
    total = count * ladder[equal].sum()

    def searched(strategy: str, sizes: np.ndarray) -> tuple[int, float]:
        names = [str(place) for place in range(count)]
        search = Search(
            names, [*map(int, sizes)], int(target), strategy=strategy, budget=total, costs=one_price
        )
        while ask := search.ask():
            loss = curves[int(ask.model), ladder == ask.rows][0]
            search.tell(ask, float(loss), cost=float(ask.rows))
        return int(search.best()), sum(result.cost for result in search.results.values())

    one_price = {str(place): (0.0, 1.0) for place in range(count)}
    each = sizes <= total / count
    choices = {
        "equal": searched("growing", ladder[equal]),
        "one each": (int(losses[:, each][:, -1].argmin()), count * sizes[each][-1]),
        "halving": halving(losses, sizes, np.ones(count), total),
        "dropping": searched("dropping", ladder),
        "dropping, same sizes": searched("dropping", ladder[equal]),
    }
    for method, (choice, cost) in choices.items():
        yield {
            "family": case.family,
            "source": case.source,
            "budget": budget,
            "method": method,
            "RelAcc": 100 * (truth.max() - truth[choice]) / np.ptp(truth),
            "regret": regrets(truth[[choice]], truth, case.family)[0],
            "cost": cost / total,
        }


def advice(
    flan: Path | None = None,
    llm: Path | None = None,
    lcdb: Path | None = None,
    half: Literal["A", "B"] = "A",
    most: int | None = None,
    results: Path = RESULTS,
) -> pd.DataFrame:
    """Follow the advice and search on all cases of a half, print, write the tables as Markdown.

    Args:
        flan, llm, lcdb, half, most, results: as for `families`.

    Returns:
        The whole searches.

    Raises:
        SystemExit: no tables are given.
    """
    pairs = [(case, b) for case in _cases(flan, llm, lcdb, half, most) for b in case.budgets]
    followed = pd.DataFrame([row for pair in pairs if (row := follow(*pair)) is not None])
    searched = pd.DataFrame([row for pair in pairs for row in search_all(*pair)])
    means = followed.drop(columns=["source", "budget"]).groupby("family", sort=False).mean()
    wide = searched.groupby(["family", "method"], sort=False)[["RelAcc", "regret", "cost"]].mean()
    figures = (("RelAcc", 2), ("regret", 2))
    sets = "all" if most is None else f"at most {most} a measure"
    text = (
        f"Half {half}, commit {commit()}; LCDB data sets: {sets}.\n\n"
        f"Following the advice:\n\n{markdown(means.round(3).reset_index().astype(str))}\n"
        f"Whole searches:\n\n{markdown(wide.round(3).reset_index().astype(str))}\n"
        "dropping less the others:\n\n"
        f"{markdown(compared(searched, 'dropping', figures))}"
    )
    print(text)
    write_text(results / f"selection_advice_{half}.md", text)
    return searched


# Development ------------------------------------------------------------------------------------

FEW = ("flan, few A", "flan, few B")
"""Families of the development that count in no mean."""
_SHARES = {
    **{"flan": tuple(2**k for k in range(3, 10)), "llm": (4, 10, 20)},
    **{"corpora": (4, 16), "adam settings": (4, 8), "lr and batch": (2,)},
    **{"lcdb f1": (8, 32), "lcdb auc": (8, 32)},
}
"""By family, the parts of the target that are its budgets."""
SIZES = {"3 sizes": (3, 3), "4 sizes": (4, 4), "5 or 6 sizes": (5, 6), "7 or more": (7, 99)}
COINS = ((2, 3), (3, 4), (3, 6), (10, 4))
"""Models and sizes of tables of coin flips."""
COIN_TABLES = 60
_FLIPS = 80
VARIANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "as it is": nullcontext,
    "no draw to the last losses": lambda: _changed("draw", 0.0),
    "no grid of shapes": lambda: patch.object(blend, "FEWEST_SIZES", 99),
    "no shared prior of shapes": lambda: patch.object(shapes, "PRIOR_MODELS", 1e9),
}
"""Parts of the choice that are switched off, by what is then said of it."""


def development_cases(
    flan: Path | None, llm: Path | None, lcdb: Path | None, pretraining: Path | None
) -> list[Case]:
    """Return the cases whose budgets leave three sizes below the target."""
    cases: list[Case] = []
    if flan is not None:
        cases.append(Case("flan", "flan", read_table(flan), ()))
    if llm is not None:
        cases += [*llm_cases(llm, "A"), *llm_cases(llm, "B")]
    if pretraining is not None:
        cases += pretraining_cases(pretraining)
    if lcdb is not None:
        cases += lcdb_cases(lcdb, "A", None, ("f1", "auc"), every=4)
    if not cases:
        raise SystemExit("selection: no tables; give --flan, --llm, --lcdb or --pretraining")
    cases = [replace(case, budgets=_budgets(case.table, _SHARES[case.family])) for case in cases]
    if flan is not None:
        for name, half in zip(FEW, "AB", strict=True):
            few = [case for case in flan_cases(flan, half) if case.family == "flan, few"]
            cases += [replace(case, family=name) for case in few]
    return [case for case in cases if np.ptp(case.table.losses[:, -1]) > 0]


def _budgets(table: LossTable, shares: Sequence[float]) -> tuple[float, ...]:
    below = [table.trained[:-1][table.trained[:-1] <= table.sizes[-1] / s * 1.0001] for s in shares]
    return tuple(float(sizes[-1]) for sizes in below if len(sizes) >= 3)


def develop(case: Case, budget: float) -> dict[str, Any]:
    """Return the figures of the choice on a case; see the module's docstring."""
    target, is_score = float(case.table.sizes[-1]), case.family in SCORES
    table = replace(case.table, metric="accuracy" if is_score else None)
    selection, truth = select(table, budget, target), table.losses_at(target)
    used, count, is_best = selection.table, len(truth), truth == truth.min()
    (forecast,) = forecasts(used.trained, used.trained_losses, [target])
    undrawn = np.exp(forecast.extrapolation)
    halved, _ = halving(
        table.trained_losses, table.trained, np.ones(count), count * used.trained.sum()
    )
    going = [selection.names.index(name) for name in selection.survivors]
    true = float(regrets(truth, truth, case.family)[selection.scores.argmin()])
    return {
        **{"family": case.family, "source": case.source, "sizes": len(used.trained)},
        **_choice_figures(selection, truth),
        "RMSE, undrawn": log_rmse(undrawn, truth),
        "PearCorr": pear_corr(selection.predicted_losses, truth),
        "PearCorr, undrawn": pear_corr(undrawn, truth),
        "last": rel_acc(used.trained_losses[:, -1], truth),
        "halving": rel_acc(np.arange(count) != halved, truth),
        "regret said": 100 * float(selection.expected_regret[0]),
        "regret true": true,
        "50 %": _coverage(selection, truth, 0.5),
        "90 %": _coverage(selection, truth, 0.9),
        "go on": 100 * len(going) / count,
        "best is out": 100.0 * (not is_best[going].any()),
        "decided": 100.0 * selection.is_decided,
        "decided, wrongly": 100.0 * (selection.is_decided and true > 1),
        "no signal": 100.0 * (not selection.has_signal),
        "P said": selection.best_probabilities.tolist(),
        "P true": (is_best / is_best.sum()).tolist(),
    }


def flip_coins() -> Iterator[dict[str, Any]]:
    """Yield how often tables of coin flips are said to tell nothing, and one to be the best."""
    generator = np.random.default_rng(0)
    for models, count in COINS:
        sizes, selections = 100.0 * 2 ** np.arange(count), []
        for _ in range(COIN_TABLES):
            losses = 1 - generator.binomial(_FLIPS, 0.5, (models, count)) / _FLIPS
            names = tuple(map(str, range(models)))
            table = LossTable(names, sizes, losses, None, "accuracy")
            selections.append(select(table, sizes[-1], 8 * sizes[-1]))
        yield {
            "group": f"coins, {models} models, {count} sizes",
            "cases": COIN_TABLES,
            "no signal": 100 * np.mean([not selection.has_signal for selection in selections]),
            "decided": 100 * np.mean([selection.is_decided for selection in selections]),
        }


def _development_rows(cases: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the means over the cases of every family, of all families, and by numbers of sizes."""
    figures = list(cases.select_dtypes("number").columns.drop("sizes"))
    means = []
    for family, group in cases.groupby("family", sort=False):
        row = {"cases": len(group), **group[figures].mean()}
        for other in ("last", "halving"):
            less = (group["RelAcc"] - group[other]).set_axis(group.source).rename_axis("source")
            drawn = _drawn(less)[0]
            row[f"less {other}, high"] = np.quantile(drawn[1:], 0.975)
        means += [row] * (family not in FEW)
        yield {"group": family} | row
    counted = cases[~cases.family.isin(FEW)]
    yield {"group": "mean", "cases": len(counted), **pd.DataFrame(means)[figures].mean()}
    for name, (least, most) in SIZES.items():
        group = counted[counted.sizes.between(least, most)]
        yield {"group": name, "cases": len(group), **group[figures].mean()}


def _bin_rows(cases: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield P(best) said and true in bins of a fifth."""
    counted = cases[~cases.family.isin(FEW)]
    said, true = (np.concatenate(list(counted[name])) for name in ("P said", "P true"))
    place = np.clip(np.digitize(said, BINS) - 1, 0, len(BINS) - 2)
    for number, (low, high) in enumerate(pairwise(BINS)):
        inside = place == number
        yield {
            **{"group": f"P(best) {low:.1f} to {high:.1f}", "cases": int(inside.sum())},
            **{"P said": said[inside].mean(), "P true": true[inside].mean()},
        }


def development(
    flan: Path | None = None,
    llm: Path | None = None,
    lcdb: Path | None = None,
    pretraining: Path | None = None,
    variants: tuple[str, ...] = tuple(VARIANTS),
    results: Path = RESULTS,
) -> pd.DataFrame:
    """Judge the choice on the development tables, as it is and with parts switched off.

    Args:
        flan, llm, lcdb, pretraining: as for `families`.
        variants: parts to switch off, by their names in `VARIANTS`; the first of these as it is.
        results: folder of the csv.

    Raises:
        SystemExit: no tables are given.
    """
    cases = development_cases(flan, llm, lcdb, pretraining)
    paths = {"--flan": flan, "--llm": llm, "--lcdb": lcdb, "--pretraining": pretraining}
    if missing := [option for option, path in paths.items() if path is None]:
        print(f"without the families of {', '.join(missing)}", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for variant in variants:
        with VARIANTS[variant]():
            judged = pd.DataFrame([develop(case, b) for case in cases for b in case.budgets])
        groups = list(_development_rows(judged))
        if variant == "as it is":
            groups += [*_bin_rows(judged), *flip_coins()]
        rows += [{"variant": variant} | row for row in groups]
    frame = pd.DataFrame(rows)
    print(frame.dropna(axis=1, how="all").to_string(float_format=lambda x: f"{x:.3f}", na_rep=""))
    write_frame(frame.assign(**stamped()), results / "selection_development.csv")
    return frame


# One larger run each ----------------------------------------------------------------------------

_COSTS_MORE = 1.1  # at most: of sizes that double the next costs as much as all before it


def larger(
    flan: Path | None = None,
    lcdb: Path | None = None,
    half: Literal["A", "B"] = "A",
    most: int | None = None,
    results: Path = RESULTS,
) -> pd.DataFrame:
    """Judge forecasts against one larger run of each model at the same cost, print and write.

    A choice of "blend" from all sizes up to a budget costs each model the rows of them all.  One
    run on the largest size that costs a tenth more at most is the other use of these rows: of two,
    the one whose last loss or forecast is lowest is chosen.  RelAcc of both, with 95 % intervals of
    the difference by bootstrap over tables.

    Args:
        flan, lcdb, half, most, results: as for `families`.
    """
    cases = _cases(flan, None, lcdb, half, most)
    rows = []
    for case in cases:
        target = float(case.table.sizes[-1])
        truth, sizes = case.table.losses_at(target), case.table.trained
        for budget in case.budgets:
            rows_spent = sizes[sizes <= budget].sum()
            size = sizes[(sizes <= _COSTS_MORE * rows_spent) & (sizes < target)][-1]
            if size <= budget or (sizes <= budget).sum() < 3:
                continue
            selection = select(case.table, budget, target)
            forecast = rel_acc(selection.scores, truth)
            run = rel_acc(case.table.losses_at(size), truth)
            rows.append(
                {
                    **{"family": case.family, "source": case.source, "size": size / budget},
                    **{"cost": size / rows_spent, "forecast": forecast, "one run": run},
                }
            )
    frame = pd.DataFrame(rows)
    lines = []
    for family, group in frame.groupby("family", sort=False):
        less = group.set_index("source")
        means, tables = _drawn(less["one run"] - less.forecast)
        shown = {name: f"{group[name].mean():.1f}" for name in ("forecast", "one run")}
        lines.append(
            {
                **{"family": family, "cases": str(len(group)), **shown},
                "one run less forecast": _with_interval(means, 1, tables),
                "size": f"{group['size'].mean():.2f}",
                "cost": f"{group.cost.mean():.2f}",
            }
        )
    text = f"Half {half}, commit {commit()}.\n\n{markdown(pd.DataFrame(lines))}"
    print(text)
    write_text(results / f"selection_larger_{half}.md", text)
    return frame


# History ----------------------------------------------------------------------------------------

TABLES = (1, 3, 10)  # of a history; and all


def _shared_cases(paths: Sequence[Path]) -> Iterator[Case]:
    """Yield whole tables of the same models."""
    for path in paths:
        table = read_table(path)
        target = float(table.sizes[-1])
        yield Case("tables", path.stem, table, tuple(target / 2**k for k in range(3, 10)))


def judge_history(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield the figures without and with a history of other sources' tables, drawn at random.

    The tables are of one family, so that a case's `source` names it; "alone" is the choice of the
    best mean standing on the history's tables, which looks at nothing of the table itself.
    """
    generator = np.random.default_rng(0)
    for case in cases:
        # Two of LCDB's data sets are one under two numbers: `select` refuses such a history.
        others = [
            other.table
            for other in cases
            if other.source != case.source and not same_runs(case.table, other.table)
        ]
        target = float(case.table.sizes[-1])
        truth = case.table.losses_at(target)
        for budget in case.budgets:
            try:
                today = select(case.table, budget, target)
            except ValueError:
                continue  # too few sizes
            before = _choice_figures(today, truth)
            for count in dict.fromkeys((*TABLES, len(others))):
                if count > len(others):
                    continue
                tables = [others[n] for n in generator.permutation(len(others))[:count]]
                history = History({f"{n}": t for n, t in enumerate(tables)})
                moved, _ = history.adjust(today.forecast, today.names, case.table)
                row = {"family": case.family, "source": case.source, "budget": budget}
                row["tables"] = "all" if count == len(others) else str(count)
                row |= {f"{name}, today": value for name, value in before.items()}
                row |= _choice_figures(replace(today, forecast=moved), truth)
                yield row | {"RelAcc, alone": rel_acc(_mean_standing(case.table, tables), truth)}


def _choice_figures(selection: Selection, truth: np.ndarray) -> dict[str, float | None]:
    return {
        "RelAcc": rel_acc(selection.scores, truth),
        "−ln P": _minus_log_p(selection, truth),
        "RMSE ln L": log_rmse(selection.predicted_losses, truth),
    }


def _mean_standing(table: LossTable, others: Sequence[LossTable]) -> np.ndarray:
    standing = pd.DataFrame(
        {place: pd.Series(np.log(t.losses[:, -1]), t.names) for place, t in enumerate(others)}
    ).reindex(table.names)
    standing = (standing - standing.mean()) / standing.std()
    return (standing.sum(axis=1) / (standing.count(axis=1) + 5)).to_numpy()


def history(
    lcdb: Path | None = None,
    llm: Path | None = None,
    tables: tuple[Path, ...] = (),
    half: Literal["A", "B"] = "A",
    most: int | None = None,
    results: Path = RESULTS,
) -> pd.DataFrame:
    """Judge what a history of other tables of the same models is worth, print, write Markdown.

    Args:
        lcdb, llm, half, most: as for families.
        tables: csv files of the same models, each a table and the others' history.
        results: folder of the file written.
    """
    families: list[list[Case]] = [list(_shared_cases(tables))]
    if llm is not None:
        families.append(list(llm_cases(llm, half)))
    if lcdb is not None:
        cases = list(lcdb_cases(lcdb, half, most))
        families += [[c for c in cases if c.family == f"lcdb {name}"] for name in MEASURES]
    judged = pd.DataFrame([row for cases in families for row in judge_history(cases)])
    rows = []
    for (family, number), group in judged.groupby(["family", "tables"], sort=False):
        row = {"family": family, "tables": number, "cases": str(len(group))}
        for name, digits in (("RelAcc", 1), ("−ln P", 3), ("RMSE ln L", 3)):
            today = f"{name}, today"
            row[today] = _number(group[today].mean(), digits)
            less = group.set_index("source")[name] - group.set_index("source")[today]
            means, count = _drawn(less)
            row[f"{name}, with history less today"] = _with_interval(means, digits, count)
        row["RelAcc, history alone"] = _number(group["RelAcc, alone"].mean(), 1)
        rows.append(row)
    text = (
        f"Half {half}, commit {commit()}; histories are drawn from the family's other tables.\n\n"
        f"{markdown(pd.DataFrame(rows))}"
    )
    print(text)
    write_text(results / f"selection_history_{half}.md", text)
    return judged


def main(argv: Sequence[str] | None = None) -> pd.DataFrame:
    """Judge, print, write; what was judged."""
    parts: dict[str, Callable[..., pd.DataFrame]] = {
        **{"budgets": budgets, "families": families, "advice": advice, "larger": larger},
        **{"history": history, "constants": constants, "development": development},
    }
    return tyro.extras.subcommand_cli_from_dict(parts, args=argv, description=__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
