"""Does a measured F(Θ, t) help to choose a model?  The live selection on the zoo and the truth.

    python -m benchmarks.make_zoo --text … --out /tmp/zoo
    python -m benchmarks.live_selection --zoo /tmp/zoo --data snips7 --out /tmp/s

Every model of the zoo is fine-tuned on nested subsets (`--sizes`), with Θ and t measured, and on
the target's rows for the truth, from every seed.  Each method then predicts from the sizes up to
each budget, as `jachess select-live` would.  By data set, seed, budget and method: PearCorr and
RelAcc (per cent), root mean square of log loss at the target, coverage of 90 % intervals (per
cent), the model chosen, and what the method pays (`Search.paid`: trainings, judging, and the probes
where it reads Θ) as a share of training and judging every model at the target.  With `--probe 0` no
Θ is measured, and the two forms of lensllm are left out.

Two controls read no Θ: F a free number up to ‖r‖², and F = ‖r‖²/(1 + c t) with c fitted in place of
a kernel.

Runs are kept in --out and not repeated.  Rows go to results/live_selection.csv, all losses and F
to results/live_selection_losses.csv.  Without --data both are read and judged anew; rows of methods
that read kernels or features, which the files have not, are kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from jachess_ext.compare.runs import run_all
from jachess_ext.compare.settings import Recipe
from jachess_ext.live import read_selection, select_live
from jachess_ext.live.choice import RUNS
from jachess_ext.live.plan import make_plan
from jachess_ext.live.trial import run
from jachess_ext.scaling import (
    Ask,
    Search,
    coverage,
    fit,
    log_rmse,
    pear_corr,
    rel_acc,
)
from jachess_ext.scaling.baselines import FEATURE_SCORES
from jachess_ext.scaling.selection import DEFAULT, METHODS

from .common import RESULTS, stamped, write_frame

FREE = "lensllm, F free"
CONTROL = "lensllm, F = r²/(1 + c t)"
_METHODS = [name for name in METHODS if name != "nlpmetrics"]
JUDGED = (*_METHODS[:2], FREE, CONTROL, *_METHODS[2:])
_PROBED = ("lensllm", FREE, CONTROL)
_STARTS = [(beta, floor, c) for beta in (0.3, 1.0) for floor in (0.05, 0.5, 0.9) for c in (0.01, 1)]
_LAWS = (DEFAULT, "lensllm", "rectified")
_MEASURED = ["dev_loss", "dev_score", "kernel_loss", "residual_square", "probe_square"]
_FLOPS = ["training_flops", "probe_flops", "judging_flops"]


@dataclass(frozen=True)
class Runs:
    """All runs of one data set and seed.

    Attributes:
        search: with every run of a subset told, and its kernel where it is known.
        losses: the rows of all runs, those at the target among them.
    """

    search: Search
    losses: pd.DataFrame

    @property
    def truth(self) -> pd.DataFrame:
        """The runs at the target, by model."""
        return self.losses[self.losses["size"] == self.search.target].set_index("model")


def make_runs(arguments: dict[str, Any], out: Path) -> Runs:
    """Make the live selection, then every model at the target; finished runs are read."""
    select_live(out=out, progress=lambda text: print(text, file=sys.stderr), **arguments)
    selection, plan = read_selection(out), make_plan(**arguments)
    target, seed = plan.search.target, plan.search.seed
    jobs = [plan.trial(Ask(model, target, seed), out) for model in plan.search.models]
    truth = [record for _, record in run_all(jobs, run, out / RUNS)]
    rows = [
        {
            "data": Path(arguments["task"].partition(":")[0]).parent.name,
            "seed": record["seed"],
            "model": record["model"],
            "parameters": record["parameters"],
            "size": record["size"],
            "steps": record["steps"],
            "t": record["time"],
            **{name: record[name] for name in [*_MEASURED, *_FLOPS]},
            "seconds": sum(record["seconds"].values()) if record["seconds"] else None,
        }
        for record in [*selection.records, *truth]
    ]
    features = {
        r["model"]: (r["features"], r["features_flops"]) for r in selection.records if not r["size"]
    }
    losses = pd.DataFrame(rows)
    return Runs(search_of(losses, features, selection.search.kernels), losses)


def search_of(
    losses: pd.DataFrame, features: Mapping[str, Any] = {}, kernels: Mapping[Ask, Any] = {}
) -> Search:
    """Return the search that the runs below the largest size are told to."""
    *sizes, target = sorted({int(size) for size in losses["size"] if size})
    rows = losses.set_index(["model", "size"])
    whole = rows.xs(target, level="size")
    search = Search(
        list(whole.index),
        sizes,
        target,
        zero=True,
        seed=int(losses.seed.iloc[0]),
        parameters={str(model): int(n) for model, n in whole.parameters.items()},
    )
    while ask := search.ask():
        row = rows.loc[(ask.model, ask.rows)]
        scores, price = features.get(ask.model, (None, 0.0)) if ask.rows == 0 else (None, 0.0)
        search.tell(
            ask,
            float(row.dev_loss),
            cost=row.training_flops + row.judging_flops,
            kernel_cost=row.probe_flops,
            features=scores,
            features_cost=price,
        )
    search.kernels = dict(kernels)
    return search


def judge(runs: Runs, budget: int, method: str) -> dict[str, Any] | None:
    """Judge a method from the sizes up to the budget; None where these are too few for it."""
    search, law = runs.search, _law(method)
    if method in _PROBED and runs.losses.residual_square.isna().any():
        return None
    if method == "lensllm" and not search.kernels:
        return None
    try:
        selection = search.selection(law, rows=budget)
    except ValueError:
        return None
    names, scores, forecasts = list(selection.names), selection.scores, selection.forecasts
    predicts, intervals = selection.forecast.predicted is not None, selection.has_intervals
    if method in (FREE, CONTROL):
        forecast = free_forecast if method == FREE else control_forecast
        scores = forecasts = np.array([forecast(runs, name, budget) for name in names])
        predicts, intervals = True, False
    losses = runs.truth.dev_loss[names].to_numpy()
    return {
        "data": runs.losses.data.iloc[0],
        "seed": runs.losses.seed.iloc[0],
        "budget": budget,
        "target": search.target,
        "method": method,
        "pear_corr": pear_corr(forecasts, losses),
        "rel_acc": rel_acc(scores, losses),
        "log_rmse": log_rmse(forecasts, losses) if predicts else None,
        "coverage": coverage(*selection.interval_ends(0.9), losses) if intervals else None,
        "flops_share": share(runs, budget, method),
        "chosen": Path(names[int(np.argmin(scores))]).name,
        "best": Path(names[int(np.argmin(losses))]).name,
    }


def share(runs: Runs, budget: float, method: str) -> float:
    """Return what the method pays, as a share of training and judging all at the target."""
    full = (runs.truth.training_flops + runs.truth.judging_flops).sum()
    return sum(runs.search.paid(name, _law(method), budget) for name in runs.search.models) / full


def _law(method: str) -> str:
    """Return the registered method that reads, and so pays for, the same."""
    return "rectified" if method in (FREE, CONTROL) else method


def free_forecast(runs: Runs, model: str, budget: float) -> float:
    """Return the loss at the target by lensllm with F a number fitted within [0, ‖r‖²]."""
    curve = runs.search.curve(model, budget)
    bound = float(runs.losses[runs.losses.model == model].residual_square.iloc[0])
    fitted = fit(list(curve), list(curve.values()), "lensllm", residual_square=bound)
    return float(np.asarray(fitted.predict(runs.search.target)))


def control_forecast(runs: Runs, model: str, budget: float) -> float:
    """Return the same with F = ‖r‖²/(1 + c t), which falls as Eq. 9's does and reads no kernel.

    Eq. 10 with B, β, E and c fitted to ln L from several starts; t at the target is continued as a
    straight line in ln t over ln D, as for the measured F.
    """
    known = runs.losses[(runs.losses.model == model) & (runs.losses["size"] <= budget)]
    known = known.sort_values("size")
    sizes, losses, t = (known[name].to_numpy(float) for name in ("size", "dev_loss", "t"))
    square, trained, lowest = float(known.residual_square.iloc[0]), sizes > 0, float(losses.min())
    slope, level = np.polyfit(np.log(sizes[trained]), np.log(t[trained]), 1)
    at_target = float(np.exp(level + slope * np.log(runs.search.target)))

    def loss(p: np.ndarray, d: Any, steps: Any) -> Any:
        log_b, beta, floor, log_c = p
        fall = square / (1 + np.exp(log_c) * steps)
        return np.exp(log_b) / (fall + d**beta) + floor * lowest

    fits = [
        least_squares(
            lambda p: np.log(loss(p, sizes, t)) - np.log(losses),
            (np.log(losses[0] * square), beta, floor, np.log(c)),
            bounds=((-20, 0.01, 0, -15), (30, 3, 0.999, 15)),
        )
        for beta, floor, c in _STARTS
    ]
    best = min(fits, key=lambda solution: solution.cost)
    return float(loss(best.x, runs.search.target, at_target))


def redraw(results: Path) -> pd.DataFrame:
    """Judge the recorded runs anew; rows of what reads kernels or features stay."""
    losses = pd.read_csv(results / "live_selection_losses.csv")
    before = pd.read_csv(results / "live_selection.csv")
    rows: list[dict[str, Any]] = []
    for (data, seed), mine in losses.groupby(["data", "seed"], sort=False):
        runs = Runs(search_of(mine), mine)
        old = before[(before.data == data) & (before.seed == seed)]
        for budget in runs.search.sizes:
            for method in JUDGED:
                row = judge(runs, int(budget), method)
                kept = old[(old.budget == budget) & (old.method == method)].to_dict("records")
                if row is not None:
                    rows.append(row | stamped())
                elif kept and method in FEATURE_SCORES:
                    rows += kept
                elif kept:
                    rows.append(kept[0] | {"flops_share": share(runs, budget, method)})
    return written(pd.DataFrame(rows), results)


def written(rows: pd.DataFrame, results: Path) -> pd.DataFrame:
    """Write the rows; print means over the seeds and budgets that the laws have."""
    write_frame(rows, results / "live_selection.csv")
    case = rows[["data", "seed", "budget"]].apply(tuple, axis=1)
    by_law = [set(case[rows.method == law]) for law in _LAWS]
    common = set.intersection(*(cases for cases in by_law if cases))
    shown = rows[case.isin(common)]
    shown = shown.assign(best_chosen=100.0 * (shown.chosen == shown.best))
    figures = ["pear_corr", "rel_acc", "log_rmse", "coverage", "flops_share", "best_chosen"]
    groups = shown.groupby(["data", "method"])
    means = groups[figures].mean().assign(cases=groups.size())
    order = [key for key in ((d, m) for d in shown.data.unique() for m in JUDGED) if key in means.T]
    print(means.loc[order].to_string(float_format=lambda x: f"{x:.3g}", na_rep=""))
    return rows


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


def main(argv: Sequence[str] | None = None) -> pd.DataFrame:
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
    rows: list[dict[str, Any]] = []
    losses: list[pd.DataFrame] = []
    for data in options.data:
        for seed in options.seeds:
            runs = make_runs(_arguments(options, data, seed), options.out / f"{data.name}-{seed}")
            names = [Path(model).name for model in runs.losses.model]
            losses.append(runs.losses.assign(model=names, **stamped()))
            judged = [judge(runs, size, method) for size in options.sizes for method in JUDGED]
            rows += [row | stamped() for row in judged if row is not None]
    write_frame(pd.concat(losses), options.results / "live_selection_losses.csv")
    return written(pd.DataFrame(rows), options.results)


if __name__ == "__main__":
    main(sys.argv[1:])
