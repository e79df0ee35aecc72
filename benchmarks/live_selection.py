"""Does a measured F(Θ, t) help to choose a model?  The live selection on the zoo and the truth.

    python -m benchmarks.make_zoo --text … --out /tmp/zoo
    python -m benchmarks.live_selection --zoo /tmp/zoo --data snips7 --out /tmp/s

Every model of the zoo is fine-tuned on nested subsets (`--sizes`), with Θ and t measured, and on
the target's rows for the truth, from every seed.  Each method then predicts from the sizes up to
each budget, as `jachess select --models` would.  By data set, seed, budget and method: PearCorr and
RelAcc (per cent), root mean square of log loss at the target, coverage of 90 % intervals (per
cent), the model chosen, and what the method pays (`live_selection.cost.paid`: trainings, judging,
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
from jachess_ext.experiment.grid import Recipe
from jachess_ext.experiment.workers import prepare
from jachess_ext.live_selection import Prediction, RunRecord, SelectionFolder, measure
from jachess_ext.live_selection.budget import Budget
from jachess_ext.live_selection.cost import paid
from jachess_ext.live_selection.engine import select_live
from jachess_ext.live_selection.plan import make_plan
from jachess_ext.live_selection.predict import Curve, make_curve, predict
from jachess_ext.live_selection.settings import LiveSettings
from jachess_ext.progress import BarProgress
from jachess_ext.scaling import coverage, fit, log_rmse, pear_corr, rel_acc
from jachess_ext.scaling.registry import DEFAULT, FEATURES, LIVE, REGISTRY

FREE = "lensllm, F free"
CONTROL = "lensllm, F = r²/(1 + c t)"
JUDGED = (*LIVE[:2], FREE, CONTROL, *LIVE[2:])
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
    """All runs of one data set and seed: curves of the subsets, and the truth at the target."""

    data: str
    seed: int
    curves: tuple[Curve, ...]
    truth: tuple[RunRecord, ...]

    @property
    def target(self) -> int:
        """Rows of the truth."""
        return self.truth[0].size

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
    return Runs(settings.train.parent.name, settings.seed, tuple(curves), tuple(truth))


def judge(runs: Runs, budget: int, method: str) -> Judged | None:
    """A method from the sizes up to the budget; None where these are too few for it."""
    curves = [curve.up_to(budget) for curve in runs.curves]
    law = _law(method)
    needed = REGISTRY[law].fewest_sizes(zero=all(curve.has_zero for curve in curves))
    if min((curve.sizes > 0).sum() for curve in curves) < needed:
        return None
    if method in _PROBED and curves[0].records[0].residual_square is None:
        return None
    if method == "lensllm" and any(None in curve.kernels for curve in curves):
        return None
    if method in FEATURES and curves[0].records[0].features is None:
        return None
    found = _predictions(curves, runs.target, method)
    truth = runs.true_losses
    losses = np.array([truth[one.model] for one in found])
    scores = np.array([one.score for one in found])
    forecasts = np.array([one.score if one.predicted is None else one.predicted for one in found])
    return Judged(
        *(runs.data, runs.seed, budget, runs.target, method),
        pear_corr(forecasts, losses),
        rel_acc(scores, losses),
        _log_rmse(found, losses),
        _coverage(found, losses),
        _share(runs, budget, method),
        Path(found[0].model).name,
        Path(min(truth, key=lambda model: truth[model])).name,
    )


def _share(runs: Runs, budget: float, method: str) -> float:
    """What the method pays, as a share of training and judging every model at the target."""
    full = sum(record.training_flops + record.judging_flops for record in runs.truth)
    return paid([curve.up_to(budget) for curve in runs.curves], _law(method)) / full


def _law(method: str) -> str:
    """The registered method that reads, and so pays for, the same."""
    return "rectified" if method in (FREE, CONTROL) else method


def _predictions(curves: Sequence[Curve], target: float, method: str) -> Sequence[Prediction]:
    """Best first."""
    if method not in (FREE, CONTROL):
        return predict(curves, target, method)
    forecast = _free if method == FREE else _control
    made = [(curve.model, forecast(curve, target)) for curve in curves]
    return sorted((Prediction(model, loss, loss) for model, loss in made), key=lambda o: o.score)


def _free(curve: Curve, target: float) -> float:
    """F is a number fitted within [0, ‖r‖²]."""
    bound = curve.records[0].residual_square
    fitted = fit(curve.sizes, curve.losses, "lensllm", residual_square=bound)
    return float(np.asarray(fitted.predict(target)))


def _control(curve: Curve, target: float) -> float:
    """F = ‖r‖²/(1 + c t): falls from ‖r‖² with training as Eq. 9's does, and reads no kernel.

    Eq. 10 with B, β, E and c fitted to ln L from several starts; t at the target is continued as a
    straight line in ln t over ln D, as for the measured F.
    """
    sizes, y = curve.sizes, np.log(curve.losses)
    square = float(curve.records[0].residual_square or np.nan)
    t = np.array([record.time for record in curve.records])
    trained = sizes > 0
    slope, level = np.polyfit(np.log(sizes[trained]), np.log(t[trained]), 1)
    at_target = float(np.exp(level + slope * np.log(target)))
    lowest = float(curve.losses.min())

    def loss(p: np.ndarray, d: Any, steps: Any) -> Any:
        log_b, beta, floor, log_c = p
        fall = square / (1 + np.exp(log_c) * steps)
        return np.exp(log_b) / (fall + d**beta) + floor * lowest

    def errors(p: np.ndarray) -> np.ndarray:
        return np.log(loss(p, sizes, t)) - y

    found = [
        least_squares(
            errors,
            (np.log(curve.losses[0] * square), beta, floor, np.log(c)),
            bounds=((-20, 0.01, 0, -15), (30, 3, 0.999, 15)),
        )
        for beta, floor, c in _STARTS
    ]
    return float(loss(min(found, key=lambda one: one.cost).x, target, at_target))


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
    records = [record for curve in runs.curves for record in curve.records]
    return [
        Loss(
            *(runs.data, runs.seed, Path(r.model).name, r.parameters),
            *(r.size, r.steps, r.time, r.dev_loss, r.dev_score),
            *(r.kernel_loss, r.residual_square, r.probe_square),
            *(r.training_flops, r.probe_flops, r.judging_flops),
            None if r.seconds is None else r.seconds.total,
        )
        for r in [*records, *runs.truth]
    ]


def runs_of(losses: Sequence[Loss]) -> Runs:
    """The runs of one data set and seed as they were written, without kernels."""
    models: dict[str, list[RunRecord]] = {}
    for row in losses:
        record = RunRecord(
            *(f"{row.model}-{row.size}", row.model, row.parameters, row.size, 0.0, row.steps),
            *(row.seed, 1.0, row.t, 0, "accuracy", row.dev_loss, row.dev_score),
            residual_square=row.residual_square,
            training_flops=row.training_flops,
            probe_flops=row.probe_flops,
            judging_flops=row.judging_flops,
        )
        models.setdefault(row.model, []).append(record)
    curves, truth = [], []
    for found in models.values():
        *below, last = sorted(found, key=lambda record: record.size)
        curves.append(Curve(tuple(below), (None,) * len(below)))
        truth.append(last)
    return Runs(losses[0].data, losses[0].seed, tuple(curves), tuple(truth))


def redraw(results: Path) -> list[Judged]:
    """Judges the recorded runs anew; rows of what reads kernels or features stay."""
    losses = read_rows(results / "live_selection_losses.csv", Loss)
    before = read_rows(results / "live_selection.csv", Judged)
    old = {(row.data, row.seed, row.budget, row.method): row for row in before}
    stamp = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "commit": commit()}
    rows: list[Judged] = []
    for key in dict.fromkeys((row.data, row.seed) for row in losses):
        runs = runs_of([row for row in losses if (row.data, row.seed) == key])
        for budget in [size for size in runs.curves[0].sizes if size > 0]:
            for method in JUDGED:
                row = judge(runs, int(budget), method)
                if row is not None:
                    rows.append(replace(row, **stamp))
                elif (kept := old.get((*key, int(budget), method))) is not None:
                    known = method not in FEATURES
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
            runs = make_runs(_settings(options, data, seed), options.out / f"{data.name}-{seed}")
            losses += [replace(row, **stamp) for row in losses_of(runs)]
            for budget in options.sizes:
                found = [judge(runs, budget, method) for method in JUDGED]
                rows += [replace(row, **stamp) for row in found if row is not None]
    write_rows(rows, options.results / "live_selection.csv")
    write_rows(losses, options.results / "live_selection_losses.csv")
    show(rows)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
