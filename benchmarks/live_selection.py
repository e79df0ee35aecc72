"""Does a measured F(Θ, t) help to choose a model?  The live selection on the zoo and the truth.

    python -m benchmarks.make_zoo --text … --out /tmp/zoo
    python -m benchmarks.live_selection --zoo /tmp/zoo --data /work/shared/data/snips7 --out /tmp/s

Every model of the zoo is fine-tuned on nested subsets (`--sizes`), with Θ and t measured, and on
the target's rows for the truth, from every seed.  Each method then predicts from the sizes up to
each budget, as `jachess select --models` would.  By data set, seed, budget and method: PearCorr and
RelAcc (per cent), root mean square of log loss at the target, coverage of 90 % intervals (per
cent), the model chosen, and what the method pays (`live_selection.cost.paid`: trainings, judging,
and the probes where it reads Θ) as a share of training and judging every model at the target.
With `--probe 0` no Θ is measured, and the two forms of lensllm are left out.

Runs are kept in --out and not repeated.  Rows go to results/live_selection.csv, all losses and F
to results/live_selection_losses.csv.
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

from benchmarks.common.report import RESULTS, commit, write_rows
from jachess_ext.experiment.grid import Recipe
from jachess_ext.experiment.workers import prepare
from jachess_ext.live_selection import Prediction, RunRecord, SelectionFolder, measure
from jachess_ext.live_selection.budget import Budget
from jachess_ext.live_selection.cost import paid
from jachess_ext.live_selection.engine import select_live
from jachess_ext.live_selection.plan import Plan, make_plan
from jachess_ext.live_selection.predict import Curve, make_curve, predict
from jachess_ext.live_selection.settings import LiveSettings
from jachess_ext.progress import BarProgress
from jachess_ext.scaling import coverage, fit, log_rmse, pear_corr, rel_acc
from jachess_ext.scaling.registry import DEFAULT, LIVE, REGISTRY

FREE = "lensllm, F free"
JUDGED = (*LIVE[:2], FREE, *LIVE[2:])
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
    """All runs of one data set and seed: curves of the subsets, and the truth at the target."""

    plan: Plan
    curves: tuple[Curve, ...]
    truth: tuple[RunRecord, ...]

    @property
    def true_losses(self) -> dict[str, float]:
        """Model -> dev loss at the target."""
        return {record.model: float(record.dev_loss or np.nan) for record in self.truth}


def make_runs(settings: LiveSettings, out: Path) -> Runs:
    """The live selection, then every model at the target; finished runs are read."""
    with BarProgress() as progress:
        select_live(settings, out, progress=progress)
    plan, folder = make_plan(settings), SelectionFolder(out)
    prepare(1)
    truth = []
    with folder.locked():
        for candidate in plan.candidates:
            job = plan.job(candidate, plan.target)
            record = folder.finished(job.name)
            if record is None:
                record, kernel = measure.run(job)
                folder.add(record, kernel)
            truth.append(record)
    curves = []
    for candidate in plan.candidates:
        jobs = [plan.job(candidate, size) for size in plan.rounds]
        records = [folder.finished(job.name) for job in jobs]
        curves.append(make_curve([record for record in records if record], folder.kernel))
    return Runs(plan, tuple(curves), tuple(truth))


def judge(runs: Runs, budget: int, method: str) -> Judged | None:
    """A method from the sizes up to the budget; None where these are too few for it."""
    curves = [curve.up_to(budget) for curve in runs.curves]
    law = _law(method)
    needed = REGISTRY[law].fewest_sizes(zero=all(curve.has_zero for curve in curves))
    if min((curve.sizes > 0).sum() for curve in curves) < needed:
        return None
    if method in ("lensllm", FREE) and any(None in curve.kernels for curve in curves):
        return None  # ‖r‖² and Θ are the probe's
    found = _predictions(curves, runs.plan.target, method)
    truth = runs.true_losses
    losses = np.array([truth[one.model] for one in found])
    scores = np.array([one.score for one in found])
    forecasts = np.array([one.score if one.predicted is None else one.predicted for one in found])
    settings = runs.plan.settings
    return Judged(
        settings.train.parent.name,
        settings.seed,
        budget,
        runs.plan.target,
        method,
        pear_corr(forecasts, losses),
        rel_acc(scores, losses),
        _log_rmse(found, losses),
        _coverage(found, losses),
        paid(curves, law) / sum(r.training_flops + r.judging_flops for r in runs.truth),
        Path(found[0].model).name,
        Path(min(truth, key=lambda model: truth[model])).name,
    )


def _law(method: str) -> str:
    """The registered method that reads, and so pays for, the same."""
    return "rectified" if method == FREE else method


def _predictions(curves: Sequence[Curve], target: float, method: str) -> Sequence[Prediction]:
    """Best first.  `FREE`: F is a number fitted within [0, ‖r‖²], and Θ is not read."""
    if method != FREE:
        return predict(curves, target, method)
    made = []
    for curve in curves:
        bound = curve.records[0].residual_square
        fitted = fit(curve.sizes, curve.losses, "lensllm", residual_square=bound)
        predicted = float(np.asarray(fitted.predict(target)))
        made.append(Prediction(curve.model, predicted, predicted))
    return sorted(made, key=lambda one: one.score)


def _log_rmse(found: Sequence[Prediction], losses: np.ndarray) -> float | None:
    predicted = [one.predicted for one in found if one.predicted is not None]
    return log_rmse(predicted, losses) if len(predicted) == len(found) else None


def _coverage(found: Sequence[Prediction], losses: np.ndarray) -> float | None:
    """Of the 90 % intervals; one without an upper end covers all above its lower one."""
    if any(one.low is None for one in found):
        return None
    low = np.array([one.low for one in found])
    high = np.array([np.finfo(np.float64).max if one.high is None else one.high for one in found])
    return coverage(low, high, losses)


def losses_of(runs: Runs) -> list[Loss]:
    """All runs as rows."""
    settings = runs.plan.settings
    records = [record for curve in runs.curves for record in curve.records]
    return [
        Loss(
            *(settings.train.parent.name, settings.seed, Path(r.model).name, r.parameters),
            *(r.size, r.steps, r.time, r.dev_loss, r.dev_score),
            *(r.kernel_loss, r.residual_square, r.probe_square),
            *(r.training_flops, r.probe_flops, r.judging_flops),
            None if r.seconds is None else r.seconds.total,
        )
        for r in [*records, *runs.truth]
    ]


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


def _settings(options: argparse.Namespace, data: Path, seed: int) -> LiveSettings:
    found = {stem: next(iter(sorted(data.glob(f"{stem}.*")))) for stem in ("train", "dev")}
    models = sorted(str(path.parent) for path in options.zoo.glob("*/config.json"))
    return LiveSettings(
        models=tuple(models),
        train=found["train"],
        dev=found["dev"],
        budget=Budget.parse("1"),
        sizes=tuple(options.sizes),
        target=options.target,
        seed=seed,
        data_seed=seed,
        probe=options.probe,
        dev_size=sys.maxsize,  # all of them
        screen=0.999,  # frozen features are scored, and none of so few models is screened out
        recipe=Recipe(epochs=options.epochs, lr=options.lr, max_length=options.max_length),
    )


def main(argv: list[str] | None = None) -> list[Judged]:
    """Run, judge, print, write the two CSVs."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zoo", type=Path, required=True, help="folder of model folders")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders: train, dev")
    parser.add_argument("--out", type=Path, required=True, help="runs are kept here")
    parser.add_argument("--sizes", type=int, nargs="+", default=[25, 50, 100, 200, 400])
    parser.add_argument("--target", type=int, default=1600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epochs", type=float, default=5.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--probe", type=int, default=32)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    stamp: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
    }
    rows: list[Judged] = []
    losses: list[Loss] = []
    for data in options.data:
        for seed in options.seeds:
            runs = make_runs(_settings(options, data, seed), options.out / f"{data.name}-{seed}")
            losses += [replace(row, **stamp) for row in losses_of(runs)]
            for budget in runs.plan.sizes:
                found = [judge(runs, budget, method) for method in JUDGED]
                rows += [replace(row, **stamp) for row in found if row is not None]
    write_rows(rows, options.results / "live_selection.csv")
    write_rows(losses, options.results / "live_selection_losses.csv")
    show(rows)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
