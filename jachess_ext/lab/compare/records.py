"""The record of a run: one class, from the run to the results file and to the tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..._io import DataError, from_json
from ..workbench.runs import read_results

RESULTS = "results.jsonl"
Numbers = Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of a model, as `judge.judge_task` measures them; None or empty: not measured.

    Attributes:
        score: in the task's metric.
        accuracy, auc, nll, brier, brier_binary, ece: of a classifier, see `metrics.class_figures`.
        scaled: the same at the ``temperature`` fitted on validation rows.
        corrupted, noisy, perturbed: score by the share of unknown tokens, by the δ of noise on the
            embeddings, and by the change of the texts.
        accuracies: accuracy under each of these conditions ("corrupted 0.2", "noisy 1.0", "typos").
        jacobian, hessian: norms of the derivatives of each layer [K], means over rows.
        slopes: those of `smoothness.decision_slopes`.
        reliability: ``edges`` [bins + 1]; ``confidence``, ``accuracy`` and ``counts`` [bins].
        shift: score, Brier score and ECE on other tasks' rows, by the task's name.
        attack: figures of the word attack, see `judge.attack_figures`.
        attack_candidates: where its candidates come from.

    Raises:
        ValueError: a share or δ that is no number, or a diagram whose parts do not fit.
    """

    score: float | None = None
    accuracy: float | None = None
    auc: float | None = None
    nll: float | None = None
    brier: float | None = None
    brier_binary: float | None = None
    ece: float | None = None
    scaled: Numbers | None = None
    corrupted: Numbers = field(default_factory=dict)
    noisy: Numbers = field(default_factory=dict)
    perturbed: Numbers = field(default_factory=dict)
    accuracies: Numbers = field(default_factory=dict)
    jacobian: list[float | None] = field(default_factory=list)
    hessian: list[float | None] = field(default_factory=list)
    slopes: Numbers = field(default_factory=dict)
    reliability: Mapping[str, list[float | None]] | None = None
    shift: Mapping[str, Numbers] = field(default_factory=dict)
    attack: Numbers | None = None
    attack_candidates: str | None = None

    def __post_init__(self) -> None:
        # keys come from a file, and tables sort and print them as numbers
        for condition in (*self.corrupted, *self.noisy):
            if not math.isfinite(float(condition)):
                raise ValueError(f"a run is judged under {condition!r}; expected a finite number")
        if self.reliability is not None:
            sizes = {name: len(values) for name, values in self.reliability.items()}
            bins = sizes.get("edges", 0) - 1
            if sizes != {"edges": bins + 1, "confidence": bins, "accuracy": bins, "counts": bins}:
                raise ValueError(f"a reliability diagram has {sizes}, which do not fit")
            if any(count is None or count < 0 for count in self.reliability["counts"]):
                raise ValueError("a reliability diagram has a bin with fewer than no example")

    @property
    def jacobian_sum(self) -> float | None:
        """Σ‖J‖ over the layers; None where a norm was not measured, or not finite."""
        return _sum(self.jacobian)

    @property
    def hessian_sum(self) -> float | None:
        """Σ‖H‖ over the layers, as `jacobian_sum`."""
        return _sum(self.hessian)

    @property
    def most_corrupted(self) -> float | None:
        """Accuracy at the largest share of unknown tokens; where none is known, the score."""
        if not self.corrupted:
            return None
        share = max(self.corrupted, key=float)
        return self.accuracies.get(f"corrupted {share}", self.corrupted[share])


def _sum(norms: list[float | None]) -> float | None:
    numbers = [norm for norm in norms if norm is not None]
    return sum(numbers) if numbers and len(numbers) == len(norms) else None


@dataclass(frozen=True, kw_only=True)
class RunRecord(Figures):
    """A run of a comparison: what was run, and its figures.

    Attributes:
        run: name of its `finetune.Job`.
        kind: tuning runs choose a strength; final runs are reported.
        method: its text in the grid.
        control: whether it is a control or a placebo, which the other methods have to beat.
        value: of the method's knob; None: as the method has it.
        metric: name of the score.
        rows: trained on, unlabelled, and judged on.
        validation_rows: rows neither trained nor judged on.
        label_noise: share of the training labels that are wrong.
        settings, recipe: of the method and of the fine-tuning.
        error: why a run that failed has no figures.
        embedding_growth: root mean square entry of the embedding table, after over before.
        best_epoch: of the plain model, the ``epoch`` with the best score on validation rows, and
            the dev rows' ``score``, ``nll``, ``brier`` and ``brier_scaled`` after it.
        seconds: of ``training`` and ``judging``, and the ``processor`` seconds of training, which
            depend less on other work on the machine.

    Examples:
        >>> run = RunRecord(run="a", task="cola", method="sam", control=True, value=None, seed=0,
        ...                 model="m", metric="accuracy", rows=(8, 8, 4), settings={}, recipe={},
        ...                 score=0.5, corrupted={"0.05": 0.5, "0.2": 0.25})
        >>> run.most_corrupted
        0.25
    """

    run: str
    kind: Literal["tuning", "final"] = "final"
    task: str
    method: str
    control: bool
    value: float | None
    seed: int
    model: str
    metric: str
    rows: tuple[int, ...]
    validation_rows: int = 0
    label_noise: float = 0.0
    settings: Mapping[str, Any]
    recipe: Mapping[str, Any]
    error: str | None = None
    embedding_growth: float | None = None
    best_epoch: Numbers | None = None
    seconds: Numbers | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.rows) != 3:
            raise ValueError(f"a run's rows are {list(self.rows)}; expected three numbers")


def read_records(path: Path) -> list[RunRecord]:
    """Return the records of a results file, or of the results file in a folder.

    Raises:
        DataError: there is none, a line is not the record of a run, or the records have reliability
            diagrams of different bins, which cannot be drawn together.
    """
    path = path / RESULTS if path.is_dir() else path
    records: list[RunRecord] = [
        from_json(line, RunRecord, f"{path}: line {number}")
        for number, line in enumerate(read_results(path), start=1)
    ]
    edges = [r.reliability["edges"] for r in records if r.reliability is not None]
    if any(bins != edges[0] for bins in edges):
        raise DataError(f"{path} has records with reliability diagrams of different bins")
    return records
