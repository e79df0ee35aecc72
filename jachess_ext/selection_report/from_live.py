"""The study of a live selection: its folder of runs, kernels and result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..evaluation.report import Table
from ..scaling.fitting import fit
from ..scaling.live import LOSS, RUNS, ranked_loss, read_kernel, read_selection
from ..scaling.predictive import Array
from ..scaling.selection import Selection
from .axes import NONE, cell_text
from .heavy_tails import exponents
from .history import FREE, Scores, over_budgets
from .kernels import kernels_of
from .study import Band, CandidateView, History, Kernels, Spending, Study, short_labels

_STEPS = 6  # sizes between the last subset and the target at which forecasts are drawn
_FINE = 60  # points of a law's curve
_LEVEL = 0.9  # of the intervals


def study_of_folder(folder: Path, truth: Mapping[str, float] | None = None) -> Study:
    """What the page shows of a finished live selection.

    Args:
        folder: of `jachess select-live --out FOLDER`.
        truth: model -> dev loss at the target, measured apart from the selection; None: of runs
            at the target among the folder's runs, where there are some.

    Raises:
        DataError: the selection has not finished, or a file of it is not whole.
    """
    return _Live(folder, truth).study()


class _Live:
    """The folder's content, in the order of the selection's candidates."""

    def __init__(self, folder: Path, truth: Mapping[str, float] | None) -> None:
        self.folder = folder
        self.live = read_selection(folder)
        self.search = self.live.search
        self.records = self.live.records
        self.ranked = self.search.selection()
        self.curves = {
            model: {float(size): loss for size, loss in self.search.curve(model).items()}
            for model in self.search.models
            if model in self.ranked.names
        }
        names = list(self.live.stops)
        self.labels = dict(zip(names, short_labels(names), strict=True))
        self.regression = any("mae" in (record["scores"] or {}) for record in self.records)
        self.exponents = exponents(list(self.curves))
        self.truth = self._full_runs() if truth is None else truth

    def study(self) -> Study:
        live, rank_by = self.live, self.live.rank_by
        lower = rank_by in (LOSS, "brier", "mae")
        return Study(
            title=f"Which model to fine-tune: {live.task}",
            data=f"{live.train_rows:,} training and {live.dev_rows:,} dev rows; the candidates "
            f"were fine-tuned on subsets of up to {100 * live.share:.3g} % of the target.",
            method=self.search.method,
            target=float(self.search.target),
            level=_LEVEL,
            loss=f"dev {rank_by}" if lower else f"1 − dev {rank_by}",
            unit="nats" if rank_by == LOSS and not self.regression else "",
            candidates=self._views(),
            stop=self.search.stop,
            spending=self._spending(),
            history=self._history(),
            kernels=self._kernels(),
            extra=[self._runs(), *self._methods(), *self._untrained()],
            settings=json.dumps(self._settings(), indent=1, ensure_ascii=False),
        )

    def _full_runs(self) -> dict[str, float]:
        """Dev losses of runs at the target that were made the same way and not for the selection.

        They lie among the folder's runs; a file that is not whole is none.
        """
        first, target = self.records[0], self.search.target
        same = ("epochs", "seed", "learning_rate")
        truth = {}
        for path in (self.folder / RUNS).glob(f"*-{target}-*.json"):
            try:
                record = json.loads(path.read_text("utf-8"))
                alike = all(record[name] == first[name] for name in same)
                if alike and record["size"] == target and record["dev_loss"] is not None:
                    truth[record["model"]] = ranked_loss(record, self.live.rank_by)
            except (ValueError, KeyError, TypeError):
                continue
        return truth

    def _views(self) -> list[CandidateView]:
        forecasts, laws = self._forecasts(), self._laws()
        views = []
        for row in self.ranked.to_frame(_LEVEL).to_dict("records"):
            name = row["name"]
            figures = ("predicted", "low", "high", "prob_best")
            views.append(
                CandidateView(
                    name=name,
                    label=self.labels[name],
                    parameters=float((self.search.parameters or {})[name]),
                    sizes=np.array(list(self.curves[name])),
                    losses=np.array(list(self.curves[name].values())),
                    kept_aside=self._kept_aside(name),
                    forecast=forecasts.get(name),
                    law=laws.get(name),
                    truth=self.truth.get(name),
                    stop=self.live.stops[name],
                    score=row["score"],
                    **{key: row[key] if np.isfinite(row[key]) else None for key in figures},
                )
            )
        return views

    def _kept_aside(self, model: str) -> tuple[Array, Array]:
        target = float(self.search.target)
        known = {target: self.truth[model]} if model in self.truth else {}
        return np.array(list(known)), np.array(list(known.values()), dtype=np.float64)

    def _forecasts(self) -> dict[str, Band]:
        """The method's own predictions between the last subset and the target."""
        last = max(size for curve in self.curves.values() for size in curve)
        sizes = np.geomspace(last, self.search.target, _STEPS + 1)[1:-1] if last else []
        try:
            each = [self.search.selection(target=float(size)) for size in sizes]
        except ValueError:
            return {}
        each.append(self.ranked)
        if self.ranked.forecast.predicted is None:
            return {}
        sizes = np.append(sizes, float(self.search.target))
        middle = np.stack([selection.predicted_losses for selection in each], -1)
        if not all(selection.has_intervals for selection in each):
            return {
                name: Band(sizes, row) for name, row in zip(self.ranked.names, middle, strict=True)
            }
        low, high = np.stack([selection.interval_ends(_LEVEL) for selection in each], -1)
        rows = zip(self.ranked.names, middle, low, high, strict=True)
        return {
            name: Band(sizes, m, *(None if not np.isfinite(end).all() else end for end in (a, b)))
            for name, m, a, b in rows
        }

    def _laws(self) -> dict[str, Band]:
        """Eq. 10 with F as it was measured, for models with enough sizes and kernels."""
        bands = {}
        for model, curve in self.curves.items():
            kernel = self.search.measured_kernel(model)
            if kernel is None or not any(curve):
                continue
            sizes = np.geomspace(min(filter(None, curve)), self.search.target, _FINE)
            try:
                law = fit(list(curve), list(curve.values()), "lensllm", **kernel)
                bands[model] = Band(sizes, np.asarray(law.predict(sizes)))
            except ValueError:
                continue
        return bands

    def _history(self) -> History | None:
        names = list(self.curves)
        known = all(name in self.truth for name in names)
        truth = np.array([self.truth[name] for name in names]) if known else None
        budgets = sorted({size for curve in self.curves.values() for size in curve if size > 0})
        if not budgets:
            return None  # nothing was trained
        full = self.live.flops["full_tuning"]

        def score(method: str, budget: float) -> Scores | None:
            if method == "nlpmetrics":
                alphas = np.array([self.exponents.get(name, np.nan) for name in names])
                return None if np.isnan(alphas).any() else (alphas, alphas, 0.0, 0.0)
            if method == "lensllm" and not self.search.kernels:
                return None
            try:
                selection: Selection = self.search.selection(method, rows=budget)
            except ValueError:
                return None
            order = [selection.names.index(name) for name in names if name in selection.names]
            if len(order) < len(names):
                return None
            read = 0.0 if method in FREE else budget
            share = float(selection.costs.sum()) / full
            return selection.forecasts[order], selection.scores[order], read, share

        return over_budgets(score, budgets, truth, self.search.method)

    def _kernels(self) -> Kernels | None:
        points, count = {}, 0
        for model in self.ranked.ranking:
            records = [
                record
                for record in self.records
                if record["model"] == model
                and record["kernel"] is not None
                and record["seed"] == self.search.seed
            ]
            kernels = [read_kernel(self.folder, record) for record in records]
            if kernels:
                points[self.labels[model]] = kernels_of(records, kernels)
                count = len(kernels[0]["eigenvalues"])
        return Kernels(points, count) if points else None

    def _spending(self) -> Sequence[Spending]:
        flops = self.live.flops
        last = f"every model on the largest subset alone ({max(self.search.sizes):,})"
        target = self.search.target
        parts = (
            Spending("trainings of this selection", flops["training"], "every subset that was run"),
            Spending(
                "judging", flops["judging"], f"{self.live.dev_rows:,} dev rows after every run"
            ),
            Spending("kernels", flops["probe"], "Θ of the probe rows after every run"),
            Spending("frozen features", flops["features"], "one pass over labelled rows a model"),
        )
        return (
            *(part for part in parts if part.flops),
            Spending("this selection", flops["spent"], "all of these"),
            Spending("SubTuning", flops["sub_tuning"], last),
            Spending("FullTuning", flops["full_tuning"], f"every model on {target:,} examples"),
        )

    def _untrained(self) -> list[Table]:
        """What is known of the models before any training."""
        if not self.exponents:
            return []
        before = {
            record["model"]: record["dev_loss"] for record in self.records if not record["size"]
        }
        rows = [
            [
                self.labels[model],
                f"{parameters:,}",
                *map(cell_text, (before.get(model), self.exponents.get(model))),
            ]
            for model, parameters in (self.search.parameters or {}).items()
        ]
        text = (
            "Before fine-tuning. Tail exponent (NLPmetrics): mean over the weight matrices of the "
            "exponent of their spectra's tails; lower is taken as better."
        )
        return [Table(text, ["model", "parameters", "dev loss", "tail exponent"], rows)]

    def _runs(self) -> Table:
        header = ["model", "examples", "seed", "steps", "t", "dev loss", "dev score", "s"]
        rows = [
            [
                self.labels[record["model"]],
                f"{record['size']:,}",
                f"{record['seed']}",
                f"{record['steps']:,}",
                f"{record['time']:.4g}",
                *map(cell_text, (record["dev_loss"], record["dev_score"])),
                f"{sum(record['seconds'].values()):.1f}" if record["seconds"] else NONE,
            ]
            for record in self.records
        ]
        metric = self.records[0]["metric"]
        text = f"All runs. t: optimiser steps at the full learning rate; score: {metric}."
        failed = [record for record in self.records if record["error"] is not None]
        if failed:
            text += " Failed: " + "; ".join(
                f"{self.labels[r['model']]} on {r['size']:,}: {r['error']}" for r in failed
            )
        return Table(text, header, rows)

    def _methods(self) -> list[Table]:
        """How every method ranks."""
        said, missing = self.live.selections()
        places = {
            method: {name: rank for rank, name in enumerate(selection.ranking, start=1)}
            for method, selection in said.items()
        }
        if len(places) < 2:
            return []
        text = "Rank of each model by every method."
        if missing:
            text += " Missing: " + "; ".join(f"{method}: {why}" for method, why in missing.items())
        rows = [
            [self.labels[model], *(str(place.get(model, NONE)) for place in places.values())]
            for model in self.ranked.ranking
        ]
        return [Table(text, ["model", *places], rows)]

    def _settings(self) -> dict[str, Any]:
        first = self.records[0]
        state = {k: v for k, v in self.search.state().items() if k not in ("results", "costs")}
        return {
            "task": self.live.task,
            "rank_by": self.live.rank_by,
            "seconds": self.live.seconds,
            **{name: first[name] for name in ("epochs", "learning_rate")},
            **state,
        }
