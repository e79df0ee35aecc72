"""A live selection from start to end: rounds of runs, stops, result; goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..experiment.workers import Workers
from ..progress import Progress
from ..scaling.loglinear import accept_then_stop
from ..tasks.examples import DataError
from . import measure
from .candidates import CandidateModel
from .jobs import SubsetJob
from .plan import Plan, make_plan
from .predict import METHODS, Curve, fewest_sizes, make_curve, predict
from .records import Kernel, RunRecord
from .result import Candidate, Flops, LiveSelection, Prediction
from .settings import LiveSettings
from .store import SelectionFolder

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
            workers.run_all(jobs, measure.run, done)

        return _Engine(plan, folder, runner or run_here, progress).run()


class _Engine:
    """One selection while it runs.

    Attributes:
        stops: model -> why no further size is run of it.
    """

    def __init__(
        self, plan: Plan, folder: SelectionFolder, runner: Runner, progress: Progress
    ) -> None:
        self.plan, self.folder, self.runner, self.progress = plan, folder, runner, progress
        self.settings = plan.settings
        self.stops: dict[str, str] = {}
        self._records: dict[str, dict[int, RunRecord]] = {one.model: {} for one in plan.candidates}
        self._kernels: dict[str, Kernel] = {}

    def run(self) -> LiveSelection:
        """All rounds, until something stops them."""
        self.progress.total(len(self.plan.candidates) * len(self.plan.rounds))
        stop = next((reason for size in self.plan.rounds if (reason := self._step(size))), None)
        found = self._result(stop or "every planned size was run")
        self.folder.write_selection(found)
        return found

    def _step(self, size: int) -> str | None:
        """One round; why it was the last one, or why it was not begun."""
        active = [one for one in self.plan.candidates if one.model not in self.stops]
        if not active:
            return "every model was stopped"
        if self._above_budget(active, size):
            return f"the budget {self.settings.budget.text} does not pay for the next size, {size}"
        with self.progress.stage(f"{size} rows" if size else "before fine-tuning"):
            self._run_round(active, size)
        self._stop_failed()
        if size == 0:
            return None
        if self.settings.order == "halving":
            self._stop_off_line()
        return self._decided(active)

    # Runs ---------------------------------------------------------------------------------------

    def _run_round(self, active: Sequence[CandidateModel], size: int) -> None:
        jobs = [self.plan.job(candidate, size) for candidate in active]
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
        self._records[record.model][record.size] = record
        self.folder.assemble(self._in_order())
        self.progress.advance()

    def _in_order(self) -> list[RunRecord]:
        """Round by round, the models of a round in the order given."""
        return [
            found[size]
            for size in self.plan.rounds
            for found in self._records.values()
            if size in found
        ]

    def _curves(self) -> list[Curve]:
        """Of the models none of whose runs failed."""
        return [
            make_curve(list(found.values()), self._kernel)
            for found in self._records.values()
            if all(record.error is None for record in found.values())
        ]

    def _kernel(self, record: RunRecord) -> Kernel:
        if record.run not in self._kernels:
            self._kernels[record.run] = self.folder.kernel(record)
        return self._kernels[record.run]

    # Stops --------------------------------------------------------------------------------------

    def _above_budget(self, active: Sequence[CandidateModel], size: int) -> bool:
        """Whether this round would take more than is left (a share of the data bounds sizes)."""
        budget = self.settings.budget
        if budget.unit == "share" or size == 0:
            return False
        cost = self._flops_of if budget.unit == "flops" else self._seconds_of
        return self._spent() + sum(cost(one, size) for one in active) > budget.amount

    def _spent(self) -> float:
        """FLOPs or seconds of all runs so far."""
        records = self._in_order()
        if self.settings.budget.unit == "flops":
            return sum(record.flops for record in records)
        return sum(record.seconds.total for record in records if record.seconds is not None)

    def _flops_of(self, candidate: CandidateModel, size: int) -> float:
        """Expected of a run: its training, and a probe as dear as the one before fine-tuning."""
        probe = self._records[candidate.model][0].probe_flops
        return self.plan.training_flops(candidate, size) + probe

    def _seconds_of(self, candidate: CandidateModel, size: int) -> float:
        """Expected of a run: training in proportion to the last size, the rest as then."""
        last = list(self._records[candidate.model].values())[-1]
        if last.seconds is None:
            return 0.0
        growth = size / last.size if last.size else 0.0
        return last.seconds.total + (growth - 1) * last.seconds.training

    def _stop_failed(self) -> None:
        for model, found in self._records.items():
            errors = [record for record in found.values() if record.error is not None]
            if errors:
                self.stops.setdefault(model, f"failed at {errors[0].size} rows: {errors[0].error}")

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
        curves = self._curves()
        needed = fewest_sizes(settings.method, distribution=True)
        if not curves or any((curve.sizes > 0).sum() < needed for curve in curves):
            return None
        found = self._predictions(settings.method, curves)
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

    def _predictions(self, method: str, curves: Sequence[Curve]) -> tuple[Prediction, ...]:
        settings = self.settings
        levels = {"level": settings.level, "gamma": settings.gamma, "tau": settings.tau}
        return predict(curves, self.plan.target, method, **levels)  # type: ignore[arg-type]

    def _result(self, stop: str) -> LiveSelection:
        curves, settings, plan = self._curves(), self.settings, self.plan
        if not curves:
            raise DataError(f"no model could be trained; {next(iter(self.stops.values()))}")
        predictions, missing = {}, {}
        for method in METHODS:
            try:
                predictions[method] = self._predictions(method, curves)
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
            sizes=plan.sizes,
            candidates=tuple(self._candidate(one, stop) for one in plan.candidates),
            predictions=predictions,
            missing=missing,
            stop=stop,
            flops=self._flops(records),
            seconds=sum(r.seconds.total for r in records if r.seconds is not None),
        )

    def _candidate(self, one: CandidateModel, stop: str) -> Candidate:
        sizes = tuple(sorted(self._records[one.model]))
        return Candidate(one.model, one.parameters, sizes, self.stops.get(one.model, stop))

    def _flops(self, records: Sequence[RunRecord]) -> Flops:
        plan = self.plan
        largest = max(record.size for record in records)
        return Flops(
            training=sum(record.training_flops for record in records),
            probe=sum(record.probe_flops for record in records),
            judging=sum(record.judging_flops for record in records),
            full_tuning=sum(plan.training_flops(one, plan.target) for one in plan.candidates),
            sub_tuning=sum(plan.training_flops(one, largest) for one in plan.candidates),
        )
