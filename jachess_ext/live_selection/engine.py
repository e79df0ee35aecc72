"""A live selection from start to end: rounds of runs, stops, result; goes on where it stopped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..experiment.workers import Workers
from ..progress import Progress
from ..scaling.loglinear import accept_then_stop
from ..scaling.registry import LIVE, REGISTRY
from ..tasks.examples import DataError
from . import measure
from .candidates import CandidateModel
from .jobs import SubsetJob
from .plan import Plan, make_plan
from .predict import Curve, make_curve, predict
from .records import Kernel, RunRecord
from .result import Candidate, Flops, LiveSelection, Prediction
from .settings import LiveSettings
from .store import SelectionFolder

_DECIDED = 0.9  # probability of being the best that leaves nothing open
_RIVAL = 0.1  # and one that leaves a model in question

Done = Callable[[SubsetJob, tuple[RunRecord, Kernel | None]], None]
Runner = Callable[[Sequence[SubsetJob], Done], None]
"""Runs jobs, in whatever order and wherever, and calls back in this process as each ends."""


def select_live(
    settings: LiveSettings,
    out: Path,
    *,
    processes: int = 1,
    threads: int = 1,
    runner: Runner | None = None,
    progress: Progress | None = None,
) -> LiveSelection:
    """Fine-tunes the candidates on subsets and ranks them by the loss they will have in full.

    Runs that `out` has are not made again.

    Args:
        settings: candidates, data, budget, stops.
        out: folder of records, kernels and result.
        processes, threads: of this machine.
        runner: runs the jobs of a round elsewhere (`ray_jobs.ray_runner`).
        progress: told of every run.

    Returns:
        The selection, written to `out` as well.

    Raises:
        DataError: what was given cannot be used, and nothing was trained; or the budget ended (or
            models diverged) before the method had sizes enough, and the runs are kept.
        MissingExtra: transformers or scipy is not installed.
    """
    progress = progress or Progress()
    with progress.stage("reading data and models"):
        plan = make_plan(settings)
    folder = SelectionFolder(out)
    with folder.locked(), Workers(processes, threads) as workers:

        def run_here(jobs: Sequence[SubsetJob], done: Done) -> None:
            workers.run_all(jobs, measure.run, done, killed=measure.killed)

        return _Engine(plan, folder, runner or run_here, progress).run()


class _Engine:
    """One selection while it runs.

    Attributes:
        stops: model -> why no further size is run of it.
        failed: those of them whose runs failed; they are not ranked.
        rates: model -> learning rates that are still tried.
    """

    def __init__(
        self, plan: Plan, folder: SelectionFolder, runner: Runner, progress: Progress
    ) -> None:
        self.plan, self.folder, self.runner, self.progress = plan, folder, runner, progress
        self.settings = plan.settings
        self.stops: dict[str, str] = {}
        self.failed: set[str] = set()
        self.rates = {one.model: list(self.settings.rates) for one in plan.candidates}
        self._loaded = {one.model: one for one in plan.candidates}
        self._records: dict[str, list[RunRecord]] = {model: [] for model in self._loaded}
        self._kernels: dict[str, Kernel] = {}

    def run(self) -> LiveSelection:
        """All rounds, until something stops them."""
        self.progress.total(len(self.plan.candidates) * len(self.plan.rounds))
        stop = next((reason for size in self.plan.rounds if (reason := self._step(size))), None)
        found = self._result(stop or "every planned size was run")
        self.folder.write_selection(found)
        if self.settings.keep == "winner":
            with self.progress.stage(f"{self.plan.target} rows of the winner"):
                found = replace(found, winner=self._train_winner(found))
            self.folder.write_selection(found)
        return found

    def _step(self, size: int) -> str | None:
        """One round; why it was the last one, or why it was not begun."""
        active = self._active()
        if not active:
            return "every model was stopped"
        if len(active) == 1 and self.settings.order == "promotion":
            return f"only {active[0].model} is left"
        jobs = [
            self.plan.job(one, size, rate)
            for one in active
            for rate in (self.rates[one.model] if size else self.settings.rates[:1])
        ]
        if self._above_budget(jobs):
            return f"the budget {self.settings.budget.text} does not pay for the next size, {size}"
        with self.progress.stage(f"{size} rows" if size else "before fine-tuning"):
            self._run_all(jobs)
            self._stop_failed(size)
            if size:
                self._narrow_rates(size)
                self._more_seeds(size)
        if size == 0:
            self._screen()
            return None
        if self.settings.order == "algorithm1":
            self._stop_off_line()
        return self._decided(active) or self._promote(size)

    # Runs ---------------------------------------------------------------------------------------

    def _active(self) -> list[CandidateModel]:
        return [one for one in self.plan.candidates if one.model not in self.stops]

    def _run_all(self, jobs: Sequence[SubsetJob]) -> None:
        """Makes the runs that the folder has not."""
        missing = []
        for job in jobs:
            record = self.folder.finished(job.name)
            if record is None:
                missing.append(job)
            else:
                self._keep(record)

        def done(job: SubsetJob, found: tuple[RunRecord, Kernel | None]) -> None:
            self.folder.add(*found)
            self._keep(found[0])

        self.runner(missing, done)

    def _keep(self, record: RunRecord) -> None:
        self._records[record.model].append(record)
        self.folder.assemble(self._in_order())
        self.progress.advance()

    def _in_order(self) -> list[RunRecord]:
        """Round by round, the models of a round in the order given, then by rate and seed."""
        places = {size: place for place, size in enumerate(self.plan.rounds)}
        rates = {rate: place for place, rate in enumerate(self.settings.rates)}
        models = {model: place for place, model in enumerate(self._records)}

        def place(record: RunRecord) -> tuple[int, ...]:
            rate = rates.get(record.learning_rate, 0)
            return places[record.size], models[record.model], rate, record.seed

        return sorted((r for found in self._records.values() for r in found), key=place)

    def _curves(self, trained: bool = True) -> list[Curve]:
        """Of the models that have not failed; `trained`: without those that were screened out."""
        return [
            make_curve(found, self._kernel, self.settings.rank_by)
            for model, found in self._records.items()
            if model not in self.failed and any(r.size or not trained for r in found)
        ]

    def _kernel(self, record: RunRecord) -> Kernel:
        if record.run not in self._kernels:
            self._kernels[record.run] = self.folder.kernel(record)
        return self._kernels[record.run]

    # Learning rates and seeds -------------------------------------------------------------------

    def _narrow_rates(self, size: int) -> None:
        """The better half of each model's learning rates at this size is kept."""
        for curve in self._curves():
            runs = [r for r in self._records[curve.model] if r.size == size and r.error is None]
            if runs:
                height = {r.learning_rate: r.to_rank_by(self.settings.rank_by) for r in runs}
                best = sorted(height, key=lambda rate: height[rate])
                self.rates[curve.model] = best[: math.ceil(len(best) / 2)]

    def _more_seeds(self, size: int) -> None:
        """Further seeds of the models among which the ranking is open, as long as it is."""
        for extra in range(1, self.settings.seeds):
            found = self._forecasts() if self.settings.seeds > 1 else None
            chances = {one.model: one.prob_best or 0.0 for one in found or ()}
            if not chances or max(chances.values()) >= _DECIDED:
                return
            rivals = [one for one in self._active() if chances.get(one.model, 0.0) >= _RIVAL]
            jobs = [self.plan.job(one, size, self.rates[one.model][0], extra) for one in rivals]
            if self._above_budget(jobs):
                return
            self._run_all(jobs)

    # Stops --------------------------------------------------------------------------------------

    def _above_budget(self, jobs: Sequence[SubsetJob]) -> bool:
        """Whether these runs would take more than is left (a share of the data bounds sizes)."""
        budget = self.settings.budget
        if budget.unit == "share" or not any(job.size for job in jobs):
            return False
        cost = self._flops_of if budget.unit == "flops" else self._seconds_of
        return self._spent() + sum(map(cost, jobs)) > budget.amount

    def _spent(self) -> float:
        """FLOPs or seconds of all runs so far."""
        records = self._in_order()
        if self.settings.budget.unit == "flops":
            return sum(record.flops for record in records)
        return sum(record.seconds.total for record in records if record.seconds is not None)

    def _flops_of(self, job: SubsetJob) -> float:
        """Expected of a run: training, judging, and a probe as dear as the one before."""
        probe = next((r.probe_flops for r in self._records[job.model]), 0.0)
        return self.plan.flops(self._loaded[job.model], job.size) + probe

    def _seconds_of(self, job: SubsetJob) -> float:
        """Expected of a run: training in proportion to the last size, the rest as then."""
        timed = [r for r in self._records[job.model] if r.seconds is not None]
        if not timed:
            return 0.0
        last = timed[-1]
        growth = job.size / last.size if last.size else 0.0
        return last.seconds.total + (growth - 1) * last.seconds.training  # type: ignore[union-attr]

    def _stop_failed(self, size: int) -> None:
        """Rates whose run failed are given up, and models that have none left."""
        for model, found in self._records.items():
            errors = {r.learning_rate: r.error for r in found if r.size == size and r.error}
            rates = [rate for rate in self.rates[model] if rate not in errors]
            if errors and (size == 0 or not rates):
                self.failed.add(model)
                reason = next(iter(errors.values()))
                self.stops.setdefault(model, f"failed at {size} rows: {reason}")
            else:
                self.rates[model] = rates

    def _screen(self) -> None:
        """Keeps the models whose frozen features score best."""
        share = self.settings.screen
        if share is None:
            return
        name = self.settings.screen_by
        ranking = [one.model for one in predict(self._curves(False), self.plan.target, name)]
        kept = _kept(len(ranking), share)
        for rank, model in enumerate(ranking[kept:], start=kept + 1):
            self.stops[model] = f"screened out: {rank} of {len(ranking)} by {name}, untrained"

    def _promote(self, size: int) -> str | None:
        """Successive halving: the models with the best forecasts go on to the next size."""
        if self.settings.order != "promotion" or size == self.plan.rounds[-1]:
            return None
        found = self._forecasts()
        if found is None:
            return None  # too few sizes yet
        active = {one.model for one in self._active()}
        ranking = [one.model for one in found if one.model in active]
        kept = _kept(len(ranking), self.settings.promote)
        for rank, model in enumerate(ranking[kept:], start=kept + 1):
            self.stops[model] = (
                f"not promoted beyond {size} rows: {rank} of {len(ranking)} by its forecast"
            )
        return None

    def _stop_off_line(self) -> None:
        """Algorithm 1: a model stops at the first loss that leaves the line of the larger sizes."""
        for curve in self._curves():
            trained = curve.sizes > 0
            x, y = np.log(curve.sizes[trained]), np.log(curve.losses[trained])
            if len(x) <= self.settings.gamma or curve.model in self.stops:
                continue
            if accept_then_stop(x, y[None], self.settings.gamma, self.settings.tau).stopped[0]:
                self.stops[curve.model] = (
                    f"the loss at {curve.sizes[trained][0]:.0f} rows left the line of the "
                    f"{len(x) - 1} larger sizes by more than {self.settings.tau:g} deviations"
                )

    def _decided(self, active: Sequence[CandidateModel]) -> str | None:
        """Whether one model is best with the wanted probability; drops those clearly out."""
        settings = self.settings
        if settings.confidence is None and settings.drop is None:
            return None
        found = self._forecasts(distribution=True)
        if found is None:
            return None
        best = max(found, key=lambda one: one.prob_best or 0.0)
        probability = best.prob_best
        if probability is None:
            return None
        if settings.confidence is not None and probability >= settings.confidence:
            return (
                f"decided: {best.model} is the best with probability {probability:.3f}, and "
                f"{settings.confidence:g} was asked for"
            )
        if settings.drop is not None:
            for one in found:
                if one is not best and one.prob_best is not None and one.prob_best < settings.drop:
                    self.stops.setdefault(
                        one.model,
                        f"dropped: the best with probability {one.prob_best:.2g} only, below "
                        f"{settings.drop:g}",
                    )
        left = [one for one in active if one.model not in self.stops]
        return f"all but {left[0].model} were dropped" if len(left) == 1 else None

    # Result -------------------------------------------------------------------------------------

    def _forecasts(self, distribution: bool = False) -> tuple[Prediction, ...] | None:
        """By the selection's method; None as long as some model has too few sizes for it."""
        curves, method = self._curves(), self.settings.method
        zero = 0 in self.plan.rounds
        needed = REGISTRY[method].fewest_sizes(zero=zero, distribution=distribution)
        if not curves or any((curve.sizes > 0).sum() < needed for curve in curves):
            return None
        return self._predictions(method)

    def _predictions(self, method: str) -> tuple[Prediction, ...]:
        settings = self.settings
        curves = self._curves(trained=REGISTRY[method].trains != "none")
        walk: dict[str, Any] = {"gamma": settings.gamma, "tau": settings.tau}
        return predict(curves, self.plan.target, method, level=settings.level, **walk)

    def _result(self, stop: str) -> LiveSelection:
        settings, plan = self.settings, self.plan
        if len(self.failed) == len(plan.candidates):
            raise DataError(f"no model could be trained; {next(iter(self.stops.values()))}")
        predictions, missing = {}, {}
        for method in LIVE:
            try:
                predictions[method] = self._predictions(method)
            except ValueError as error:
                missing[method] = str(error)
        if settings.method not in predictions:
            raise DataError(
                f"no ranking yet ({stop}): {missing[settings.method]}; the runs are kept, and the "
                "same command with a larger budget goes on from them"
            )
        records = self._in_order()
        return LiveSelection(
            task=plan.task.name,
            train_rows=len(plan.task.train),
            dev_rows=len(plan.task.dev),
            method=settings.method,
            target=plan.target,
            level=settings.level,
            order=settings.order,
            budget=settings.budget.text,
            sizes=tuple(sorted(set(plan.rounds) - {0})),
            candidates=tuple(self._candidate(model, stop) for model in settings.models),
            predictions=predictions,
            missing=missing,
            stop=stop,
            flops=self._flops(records),
            seconds=sum(r.seconds.total for r in records if r.seconds is not None),
            rank_by=settings.rank_by,
        )

    def _candidate(self, model: str, stop: str) -> Candidate:
        if model in self.plan.unloadable:
            return Candidate(model, 0, (), self.plan.unloadable[model])
        runs, rate = self._records[model], None
        if any(run.size and run.error is None for run in runs):
            curve = make_curve(runs, self._kernel, self.settings.rank_by)
            rate = curve.records[-1].learning_rate
        sizes = tuple(sorted({run.size for run in runs}))
        parameters = self._loaded[model].parameters
        return Candidate(model, parameters, sizes, self.stops.get(model, stop), rate)

    def _train_winner(self, found: LiveSelection) -> RunRecord:
        """The best model on the target's rows, at the rate that was best for it, saved."""
        rate = next(one.rate for one in found.candidates if one.model == found.best)
        job = self.plan.job(self._loaded[found.best], self.plan.target, rate)
        record = self.folder.finished(job.name)
        if record is None or not self.folder.holds_winner(record):
            record, kernel = measure.run(job, keep=self.folder.winner)
            self.folder.add(record, kernel)
        return record

    def _flops(self, records: Sequence[RunRecord]) -> Flops:
        plan = self.plan
        largest = max(record.size for record in records)
        parts = ("training", "probe", "judging", "features")
        return Flops(
            **{name: sum(getattr(r, f"{name}_flops") for r in records) for name in parts},
            full_tuning=sum(plan.flops(one, plan.target) for one in plan.candidates),
            sub_tuning=sum(plan.flops(one, largest) for one in plan.candidates),
        )


def _kept(count: int, share: float) -> int:
    """How many of so many models go on: the share, rounded up, and two at least."""
    return max(2, math.ceil(share * count - 1e-9))
