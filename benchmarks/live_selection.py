"""Does a measured F(Θ, t) help to choose a model?  The live selection on the zoo and the truth.

    python -m benchmarks.make_zoo --text … --out /tmp/zoo
    python -m benchmarks.live_selection --zoo /tmp/zoo --data snips7 --out /tmp/s

Every model of the zoo is fine-tuned on nested subsets (`--sizes`), with Θ and t measured, and on
the target's rows for the truth, from every seed.  Each method then predicts from the sizes up to
each budget, as `jachess select-live` would.  By data set, seed, budget and method: PearCorr and
RelAcc (per cent), root mean square of log loss at the target, coverage of 90 % intervals (per
cent), the model chosen, and what the method pays (`Selection.costs`: trainings, judging,
and the probes where it reads Θ) as a share of training and judging every model at the target.
With `--probe 0` no Θ is measured, and the two forms of lensllm are left out.

Two controls read no Θ: F a free number up to ‖r‖², and F = ‖r‖²/(1 + c t) with c fitted in place of
a kernel.

Runs are kept in --out and not repeated.  Rows go to results/live_selection.csv, all losses and F
to results/live_selection_losses.csv.  Without --data both are read and judged anew; rows of methods
that read kernels or features, which the files have not, are kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.common.report import RESULTS, commit, read_rows, write_rows
from jachess_ext.compare.finetune import Recipe
from jachess_ext.compare.runs import run_all
from jachess_ext.scaling import (
    Ask,
    Search,
    coverage,
    fit,
    log_rmse,
    pear_corr,
    read_selection,
    rel_acc,
    select_live,
)
from jachess_ext.scaling import live as live_runs
from jachess_ext.scaling.baselines import FEATURE_SCORES
from jachess_ext.scaling.selection import DEFAULT, METHODS, Selection

FREE = "lensllm, F free"
CONTROL = "lensllm, F = r²/(1 + c t)"
_METHODS = [name for name in METHODS if name != "nlpmetrics"]
JUDGED = (*_METHODS[:2], FREE, CONTROL, *_METHODS[2:])
_PROBED = ("lensllm", FREE, CONTROL)
_STARTS = [(beta, floor, c) for beta in (0.3, 1.0) for floor in (0.05, 0.5, 0.9) for c in (0.01, 1)]
_LAWS = (DEFAULT, "lensllm", "rectified")


@dataclass
class Judged:
    """One method at one budget; None where the method has no such figure."""

    data: str
    seed: int
    budget: int
    target: int
    method: str
    pear_corr: float
    rel_acc: float
    log_rmse: float | None
    coverage: float | None
    flops_share: float
    chosen: str
    best: str
    date: str = ""
    commit: str = ""


@dataclass
class Loss:
    """One run."""

    data: str
    seed: int
    model: str
    parameters: int
    size: int
    steps: int
    t: float
    dev_loss: float | None
    dev_score: float | None
    kernel_loss: float | None
    residual_square: float | None
    probe_square: float | None
    training_flops: float
    probe_flops: float
    judging_flops: float
    seconds: float | None
    date: str = ""
    commit: str = ""


@dataclass(frozen=True)
class Runs:
    """All runs of one data set and seed: those of the subsets as a search, and all as rows.

    Attributes:
        search: with every run of a subset told, and its kernel where it is known.
        losses: of all runs, those at the target among them.
    """

    search: Search
    losses: Sequence[Loss]

    @property
    def target(self) -> int:
        """Rows of the truth."""
        return self.search.target

    @property
    def truth(self) -> dict[str, Loss]:
        """Model -> its run at the target."""
        return {row.model: row for row in self.losses if row.size == self.target}


def make_runs(arguments: dict[str, Any], out: Path) -> Runs:
    """The live selection, then every model at the target; finished runs are read."""
    select_live(out=out, progress=lambda text: print(text, file=sys.stderr), **arguments)
    live, plan = read_selection(out), live_runs.make_plan(**arguments)
    seed = plan.search.seed
    jobs = [plan.job(Ask(model, plan.search.target, seed), out) for model in plan.search.models]
    truth = [record for _, record in run_all(jobs, live_runs.run, out / live_runs.RUNS)]
    data = Path(arguments["task"].partition(":")[0]).parent.name
    losses = [_row(data, record) for record in [*live.records, *truth]]
    features = {
        r["model"]: (r["features"], r["features_flops"]) for r in live.records if not r["size"]
    }
    return Runs(_search(losses, features, live.search.kernels), losses)


def _row(data: str, record: dict[str, Any]) -> Loss:
    names = set(Loss.__dataclass_fields__) & set(record) - {"seconds"}
    seconds = record["seconds"]
    return Loss(
        data=data,
        t=record["time"],
        seconds=None if seconds is None else sum(seconds.values()),
        **{name: record[name] for name in names},
    )


def _search(losses: Sequence[Loss], features: dict[str, Any], kernels: dict[Ask, Any]) -> Search:
    """The search that the runs below the largest size are told to."""
    rows = {(row.model, row.size): row for row in losses}
    *sizes, target = sorted({row.size for row in losses if row.size})
    search = Search(
        [row.model for row in losses if row.size == target],
        sizes,
        target,
        zero=True,
        seed=losses[0].seed,
        parameters={row.model: row.parameters for row in losses},
    )
    while ask := search.ask():
        row = rows[ask.model, ask.rows]
        scores, price = features.get(ask.model, (None, 0.0)) if ask.rows == 0 else (None, 0.0)
        search.tell(
            ask,
            row.dev_loss,
            cost=row.training_flops + row.judging_flops,
            kernel_cost=row.probe_flops,
            features=scores,
            features_cost=price,
        )
    search.kernels = dict(kernels)
    return search


def judge(runs: Runs, budget: int, method: str) -> Judged | None:
    """A method from the sizes up to the budget; None where these are too few for it."""
    search, law = runs.search, _law(method)
    if method in _PROBED and runs.losses[0].residual_square is None:
        return None
    if method == "lensllm" and not search.kernels:
        return None
    try:
        selection = search.selection(law, rows=budget)
    except ValueError:
        return None
    names, scores, forecasts = selection.names, selection.scores, selection.forecasts
    if method in (FREE, CONTROL):
        forecast = _free if method == FREE else _control
        scores = forecasts = np.array([forecast(runs, name, budget) for name in names])
    truth = {name: float(runs.truth[name].dev_loss or np.nan) for name in names}
    losses = np.array(list(truth.values()))
    predicts = method in (FREE, CONTROL) or selection.forecast.predicted is not None
    return Judged(
        data=runs.losses[0].data,
        seed=runs.losses[0].seed,
        budget=budget,
        target=runs.target,
        method=method,
        pear_corr=pear_corr(forecasts, losses),
        rel_acc=rel_acc(scores, losses),
        log_rmse=log_rmse(forecasts, losses) if predicts else None,
        coverage=None if method in (FREE, CONTROL) else _coverage(selection, losses),
        flops_share=_share(runs, budget, method),
        chosen=Path(names[int(np.argmin(scores))]).name,
        best=Path(min(truth, key=lambda model: truth[model])).name,
    )


def _share(runs: Runs, budget: float, method: str) -> float:
    """What the method pays, as a share of training and judging every model at the target."""
    full = sum(row.training_flops + row.judging_flops for row in runs.truth.values())
    return sum(runs.search.paid(name, _law(method), budget) for name in runs.search.models) / full


def _law(method: str) -> str:
    """The registered method that reads, and so pays for, the same."""
    return "rectified" if method in (FREE, CONTROL) else method


def _free(runs: Runs, model: str, budget: float) -> float:
    """F is a number fitted within [0, ‖r‖²]."""
    curve = runs.search.curve(model, budget)
    bound = next(row.residual_square for row in runs.losses if row.model == model)
    fitted = fit(list(curve), list(curve.values()), "lensllm", residual_square=bound)
    return float(np.asarray(fitted.predict(runs.target)))


def _control(runs: Runs, model: str, budget: float) -> float:
    """F = ‖r‖²/(1 + c t): falls from ‖r‖² with training as Eq. 9's does, and reads no kernel.

    Eq. 10 with B, β, E and c fitted to ln L from several starts; t at the target is continued as a
    straight line in ln t over ln D, as for the measured F.
    """
    rows = sorted((r for r in runs.losses if r.model == model and r.size <= budget), key=_size)
    sizes = np.array([row.size for row in rows], dtype=float)
    losses = np.array([row.dev_loss for row in rows], dtype=float)
    y, square = np.log(losses), float(rows[0].residual_square or np.nan)
    t = np.array([row.t for row in rows])
    trained = sizes > 0
    slope, level = np.polyfit(np.log(sizes[trained]), np.log(t[trained]), 1)
    at_target = float(np.exp(level + slope * np.log(runs.target)))
    lowest = float(losses.min())

    def loss(p: np.ndarray, d: Any, steps: Any) -> Any:
        log_b, beta, floor, log_c = p
        fall = square / (1 + np.exp(log_c) * steps)
        return np.exp(log_b) / (fall + d**beta) + floor * lowest

    def errors(p: np.ndarray) -> np.ndarray:
        return np.log(loss(p, sizes, t)) - y

    fits = [
        least_squares(
            errors,
            (np.log(losses[0] * square), beta, floor, np.log(c)),
            bounds=((-20, 0.01, 0, -15), (30, 3, 0.999, 15)),
        )
        for beta, floor, c in _STARTS
    ]
    return float(loss(min(fits, key=lambda solution: solution.cost).x, runs.target, at_target))


def _size(row: Loss) -> int:
    return row.size


def _coverage(selection: Selection, losses: np.ndarray) -> float | None:
    """Of the 90 % intervals, where the method gives some."""
    return coverage(*selection.interval_ends(0.9), losses) if selection.has_intervals else None


def redraw(results: Path) -> list[Judged]:
    """Judges the recorded runs anew; rows of what reads kernels or features stay."""
    losses = read_rows(results / "live_selection_losses.csv", Loss)
    before = read_rows(results / "live_selection.csv", Judged)
    old = {(row.data, row.seed, row.budget, row.method): row for row in before}
    stamp = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "commit": commit()}
    rows: list[Judged] = []
    for key in dict.fromkeys((row.data, row.seed) for row in losses):
        mine = [row for row in losses if (row.data, row.seed) == key]
        runs = Runs(_search(mine, {}, {}), mine)
        for budget in runs.search.sizes:
            for method in JUDGED:
                row = judge(runs, int(budget), method)
                if row is not None:
                    rows.append(replace(row, **stamp))
                elif (kept := old.get((*key, int(budget), method))) is not None:
                    known = method not in FEATURE_SCORES
                    share = _share(runs, budget, method) if known else kept.flops_share
                    rows.append(replace(kept, flops_share=share))
    write_rows(rows, results / "live_selection.csv")
    show(rows)
    return rows


def show(rows: Sequence[Judged]) -> None:
    """One block a data set: methods down; means over the seeds and budgets that the laws have."""
    cases = {law: {(r.data, r.seed, r.budget) for r in rows if r.method == law} for law in _LAWS}
    common = set.intersection(*(found for found in cases.values() if found))
    rows = [row for row in rows if (row.data, row.seed, row.budget) in common]
    head = ("PearCorr", "RelAcc", "RMSE ln L", "coverage", "FLOPs/full", "best chosen", "cases")
    for data in dict.fromkeys(row.data for row in rows):
        print(f"\n{data:17s}" + "".join(f"{title:>13s}" for title in head))
        for method in JUDGED:
            mine = [row for row in rows if (row.data, row.method) == (data, method)]
            if not mine:
                continue
            figures = ("pear_corr", "rel_acc", "log_rmse", "coverage", "flops_share")
            cells = [_mean([getattr(row, name) for row in mine]) for name in figures]
            cells += [f"{100 * np.mean([r.chosen == r.best for r in mine]):.0f} %", str(len(mine))]
            print(f"  {method:15s}" + "".join(f"{cell:>13s}" for cell in cells))


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{np.mean(known):.3g}" if known else ""


def _arguments(options: argparse.Namespace, data: Path, seed: int) -> dict[str, Any]:
    files = [next(iter(sorted(data.glob(f"{stem}.*")))) for stem in ("train", "dev")]
    return {
        "models": sorted(str(path.parent) for path in options.zoo.glob("*/config.json")),
        "task": ":".join(map(str, files)),
        "budget": 1.0,
        "sizes": options.sizes,
        "target": options.target,
        "seed": seed,
        "data_seed": seed,
        "probe": options.probe,
        "dev_size": sys.maxsize,  # all of them
        "screen": 0.999,  # frozen features are scored, and none of so few models is screened out
        "recipe": Recipe(epochs=options.epochs, lr=options.lr, max_length=options.max_length),
    }


def main(argv: list[str] | None = None) -> list[Judged]:
    """Run, judge, print, write the two CSVs."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zoo", type=Path, help="folder of model folders")
    parser.add_argument("--data", type=Path, nargs="+", help="folders: train, dev")
    parser.add_argument("--out", type=Path, help="runs are kept here")
    parser.add_argument("--sizes", type=int, nargs="+", default=[25, 50, 100, 200, 400])
    parser.add_argument("--target", type=int, default=1600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epochs", type=float, default=5.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--probe", type=int, default=32)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    if options.data is None:
        return redraw(options.results)
    stamp: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
    }
    rows: list[Judged] = []
    losses: list[Loss] = []
    for data in options.data:
        for seed in options.seeds:
            runs = make_runs(_arguments(options, data, seed), options.out / f"{data.name}-{seed}")
            losses += [replace(row, model=Path(row.model).name, **stamp) for row in runs.losses]
            for budget in options.sizes:
                found = [judge(runs, budget, method) for method in JUDGED]
                rows += [replace(row, **stamp) for row in found if row is not None]
    write_rows(rows, options.results / "live_selection.csv")
    write_rows(losses, options.results / "live_selection_losses.csv")
    show(rows)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
