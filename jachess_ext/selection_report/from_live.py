"""The study of a live selection: its folder of runs, kernels and result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..evaluation.report import Table
from ..live_selection import (
    Candidate,
    LiveSelection,
    Prediction,
    RunRecord,
    SelectionFolder,
    read_records,
    read_selection,
)
from ..live_selection.cost import paid
from ..live_selection.predict import Curve, fit_measured, make_curve, predict
from ..live_selection.scores import LOSS, title
from ..scaling.predictive import Array
from .axes import NONE, cell_text
from .heavy_tails import exponents
from .history import FREE, Scores, over_budgets
from .kernels import kernels_of
from .study import Band, CandidateView, History, Kernels, Spending, Study, short_labels

_STEPS = 6  # sizes between the last subset and the target at which forecasts are drawn
_FINE = 60  # points of a law's curve


def study_of_folder(
    folder: Path,
    truth: Mapping[str, float] | None = None,
    *,
    gamma: int = 3,
    tau: float = 5.0,
) -> Study:
    """What the page shows of a finished live selection.

    Args:
        folder: of `jachess select --models … --out FOLDER`.
        truth: model -> dev loss at the target, measured apart from the selection; None: of runs
            at the target among the folder's runs, where there are some.
        gamma, tau: of ats, as they were given.

    Raises:
        DataError: the selection has not finished, or a file of it is not whole.
    """
    return _Live(folder, truth, gamma, tau).study()


class _Live:
    """The folder's content, in the order of the selection's candidates."""

    def __init__(
        self, folder: Path, truth: Mapping[str, float] | None, gamma: int, tau: float
    ) -> None:
        self.found: LiveSelection = read_selection(folder)
        self.records = read_records(folder)
        store = SelectionFolder(folder)
        ranked = {one.model for one in self.found.ranking}
        self.curves = [
            make_curve(
                [r for r in self.records if r.model == one.model and r.size in one.sizes],
                store.kernel,
                self.found.rank_by,
            )
            for one in self.found.candidates
            if one.model in ranked
        ]
        names = [candidate.model for candidate in self.found.candidates]
        self.labels = dict(zip(names, short_labels(names), strict=True))
        self.gamma, self.tau = gamma, tau
        self.regression = any("mae" in (record.scores or {}) for record in self.records)
        self.exponents = exponents([curve.model for curve in self.curves])
        self.truth = self._full_runs(store) if truth is None else truth

    def study(self) -> Study:
        found = self.found
        return Study(
            title=f"Which model to fine-tune: {found.task}",
            data=f"{found.train_rows:,} training and {found.dev_rows:,} dev rows; the candidates "
            f"were fine-tuned on subsets of up to {100 * found.share:.3g} % of the target.",
            method=found.method,
            target=float(found.target),
            level=found.level,
            loss=title(found.rank_by),
            unit="nats" if found.rank_by == LOSS and not self.regression else "",
            candidates=self._views(),
            stop=found.stop,
            spending=self._spending(),
            history=self._history(),
            kernels=self._kernels(),
            extra=[self._runs(), *self._methods(), *self._untrained()],
            settings=json.dumps(self._settings(), indent=1, ensure_ascii=False),
        )

    def _full_runs(self, store: SelectionFolder) -> dict[str, float]:
        """Dev losses of runs at the target that were made the same way and not for the selection.

        They lie among the folder's runs; a file that is not whole is none.
        """
        first = self.records[0]
        rates = {one.model: one.rate for one in self.found.candidates}
        found = {}
        for path in store.runs.glob(f"*-{self.found.target}-*.json"):
            try:
                record = RunRecord.from_dict(json.loads(path.read_text("utf-8"))["record"])
            except (ValueError, KeyError, TypeError):
                continue
            how = (record.epochs, record.seed, record.learning_rate, record.size)
            same = how == (first.epochs, first.seed, rates.get(record.model), self.found.target)
            if same and record.dev_loss is not None:
                found[record.model] = record.to_rank_by(self.found.rank_by)
        return found

    def _views(self) -> list[CandidateView]:
        forecasts, laws = self._forecasts(), self._laws()
        candidates = {one.model: one for one in self.found.candidates}
        curves = {curve.model: curve for curve in self.curves}
        views = []
        for one in self.found.ranking:
            figures = dict(vars(one))  # the score, and what the method predicts
            name = figures.pop("model")
            views.append(
                CandidateView(
                    name=name,
                    label=self.labels[name],
                    parameters=float(candidates[name].parameters),
                    sizes=curves[name].sizes,
                    losses=curves[name].losses,
                    kept_aside=self._kept_aside(candidates[name]),
                    forecast=forecasts.get(name),
                    law=laws.get(name),
                    truth=self.truth.get(name),
                    stop=candidates[name].stop,
                    **figures,
                )
            )
        return views

    def _kept_aside(self, candidate: Candidate) -> tuple[Array, Array]:
        later = {
            float(record.size): record.to_rank_by(self.found.rank_by)
            for record in self.records
            if record.model == candidate.model
            and record.size not in candidate.sizes
            and record.dev_loss is not None
        }
        if candidate.model in self.truth:
            later[float(self.found.target)] = self.truth[candidate.model]
        sizes = sorted(later)
        return np.array(sizes), np.array([later[size] for size in sizes], dtype=np.float64)

    def _forecasts(self) -> dict[str, Band]:
        """The method's own predictions between the last subset and the target."""
        last = max(curve.sizes[-1] for curve in self.curves)
        sizes = np.geomspace(last, self.found.target, _STEPS + 1)[1:-1]
        try:
            made = [self._predict(self.curves, float(size), self.found.method) for size in sizes]
        except ValueError:
            return {}
        sizes = np.append(sizes, float(self.found.target))
        bands = {}
        for model in (curve.model for curve in self.curves):
            ones = [
                one for some in (*made, self.found.ranking) for one in some if one.model == model
            ]
            columns = [
                [getattr(one, name) for one in ones] for name in ("predicted", "low", "high")
            ]
            middle, low, high = (None if None in column else np.array(column) for column in columns)
            if middle is not None:
                bands[model] = Band(sizes, middle, low, high)
        return bands

    def _predict(
        self, curves: Sequence[Curve], target: float, method: str
    ) -> tuple[Prediction, ...]:
        with np.errstate(over="ignore"):  # intervals without an upper end
            return predict(
                curves, target, method, level=self.found.level, gamma=self.gamma, tau=self.tau
            )

    def _laws(self) -> dict[str, Band]:
        """Eq. 10 with F as it was measured, for models with enough sizes and kernels."""
        bands = {}
        for curve in self.curves:
            sizes = np.geomspace(curve.sizes[curve.sizes > 0].min(), self.found.target, _FINE)
            try:
                bands[curve.model] = Band(sizes, np.asarray(fit_measured(curve).predict(sizes)))
            except (ValueError, IndexError):
                continue
        return bands

    def _history(self) -> History | None:
        names = [curve.model for curve in self.curves]
        known = all(name in self.truth for name in names)
        truth = np.array([self.truth[name] for name in names]) if known else None
        budgets = sorted({size for curve in self.curves for size in curve.sizes if size > 0})
        if not budgets:
            return None  # nothing was trained

        def score(method: str, budget: float) -> Scores | None:
            if method == "nlpmetrics":
                alphas = [self.exponents.get(name, np.nan) for name in names]
                found = np.array(alphas)
                return None if np.isnan(found).any() else (found, found, 0.0, 0.0)
            curves = [curve.up_to(budget) for curve in self.curves]
            try:
                made = self._predict(curves, float(self.found.target), method)
            except ValueError:
                return None
            ordered = sorted(made, key=lambda one: names.index(one.model))
            scores = np.array([one.score for one in ordered])
            forecasts = [one.score if one.predicted is None else one.predicted for one in ordered]
            read = 0.0 if method in FREE else budget
            share = paid(curves, method) / self.found.flops.full_tuning
            return np.array(forecasts), scores, read, share

        return over_budgets(score, budgets, truth, self.found.method)

    def _kernels(self) -> Kernels | None:
        curves = {curve.model: curve for curve in self.curves}
        points = {self.labels[o.model]: kernels_of(curves[o.model]) for o in self.found.ranking}
        points = {label: found for label, found in points.items() if found}
        if not points:
            return None
        first = next(k for curve in self.curves for k in curve.kernels if k is not None)
        return Kernels(points, len(first.eigenvalues))

    def _spending(self) -> Sequence[Spending]:
        flops = self.found.flops
        last = f"every model on the largest subset alone ({max(self.found.sizes):,})"
        parts = (
            Spending("trainings of this selection", flops.training, "every subset that was run"),
            Spending("judging", flops.judging, f"{self.found.dev_rows:,} dev rows after every run"),
            Spending("kernels", flops.probe, "Θ of the probe rows after every run"),
            Spending("frozen features", flops.features, "one pass over labelled rows a model"),
        )
        return (
            *(part for part in parts if part.flops),
            Spending("this selection", flops.spent, "all of these"),
            Spending("SubTuning", flops.sub_tuning, last),
            Spending(
                "FullTuning", flops.full_tuning, f"every model on {self.found.target:,} examples"
            ),
        )

    def _untrained(self) -> list[Table]:
        """What is known of the models before any training."""
        if not self.exponents:
            return []
        before = {record.model: record.dev_loss for record in self.records if record.size == 0}
        rows = [
            [
                self.labels[one.model],
                f"{one.parameters:,}",
                *map(cell_text, (before.get(one.model), self.exponents.get(one.model))),
            ]
            for one in self.found.candidates
        ]
        text = (
            "Before fine-tuning. Tail exponent (NLPmetrics): mean over the weight matrices of the "
            "exponent of their spectra's tails; lower is taken as better."
        )
        return [Table(text, ["model", "parameters", "dev loss", "tail exponent"], rows)]

    def _runs(self) -> Table:
        header = ["model", "examples", "rate", "seed", "steps", "t", "dev loss", "dev score", "s"]
        rows = [
            [
                self.labels.get(record.model, record.model),
                f"{record.size:,}",
                f"{record.learning_rate:g}",
                f"{record.seed}",
                f"{record.steps:,}",
                f"{record.time:.4g}",
                *map(cell_text, (record.dev_loss, record.dev_score)),
                NONE if record.seconds is None else f"{record.seconds.total:.1f}",
            ]
            for record in self.records
        ]
        metric = self.records[0].metric
        text = f"All runs. t: optimiser steps at the full learning rate; score: {metric}."
        failed = [record for record in self.records if record.error is not None]
        if failed:
            text += " Failed: " + "; ".join(
                f"{self.labels.get(r.model, r.model)} on {r.size:,}: {r.error}" for r in failed
            )
        return Table(text, header, rows)

    def _methods(self) -> list[Table]:
        """How every method ranks."""
        places = {
            method: {one.model: rank for rank, one in enumerate(ranking, start=1)}
            for method, ranking in self.found.predictions.items()
        }
        if len(places) < 2:
            return []
        text = "Rank of each model by every method."
        if self.found.missing:
            text += " Missing: " + "; ".join(
                f"{method}: {why}" for method, why in self.found.missing.items()
            )
        rows = [
            [self.labels[model], *(str(place.get(model, NONE)) for place in places.values())]
            for model in (one.model for one in self.found.ranking)
        ]
        return [Table(text, ["model", *places], rows)]

    def _settings(self) -> dict[str, object]:
        found = self.found
        names = ("method", "rank_by", "target", "level", "order", "budget", "sizes", "seconds")
        first = self.records[0]
        return {
            **{name: getattr(found, name) for name in ("task", *names)},
            "models": list(self.labels),
            **{name: getattr(first, name) for name in ("epochs", "seed", "learning_rate")},
        }
