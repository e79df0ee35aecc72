"""`RunRecord`: the settings and results of a run, as stored in the results file."""

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
    """Figures of a model, measured by `judge.judge_task`; None or empty if not measured.

    Attributes:
        score: value of the task's metric.
        constant: the highest value that it has for one answer to all rows.
        accuracy, auc, nll, brier, brier_binary, ece: figures of a classifier, see
            `metrics.class_figures`.
        scaled: the figures of a classifier after temperature scaling, with the ``temperature``
            fitted on validation rows.
        corrupted: share of unknown tokens -> score.
        noisy: δ of the noise on the embeddings -> score.
        perturbed: kind of change of the texts -> score.
        accuracies: accuracy under each of these conditions ("corrupted 0.2", "noisy 1.0", "typos").
        jacobian, hessian: mean norms over rows of the derivatives of each of K layers, [K].
        slopes: result of `smoothness.decision_slopes`.
        reliability: reliability diagram: ``edges`` [bins + 1]; ``confidence``, ``accuracy`` and
            ``counts`` [bins].
        shift: name of another task -> score, Brier score and ECE on its rows.
        attack: figures of the word attack, see `judge.attack_figures`.
        attack_candidates: source of the candidates of the attack.

    Raises:
        ValueError: a share or δ is not a number, or the lengths of a reliability diagram do not
            match.
    """

    score: float | None = None
    constant: float | None = None
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
        # the keys may come from a file, and tables sort and print them as numbers
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
        """Σ‖J‖ over the layers; None if a norm was not measured or not finite."""
        return _sum(self.jacobian)

    @property
    def hessian_sum(self) -> float | None:
        """Σ‖H‖ over the layers; None if a norm was not measured or not finite."""
        return _sum(self.hessian)

    @property
    def most_corrupted(self) -> float | None:
        """Accuracy at the largest share of unknown tokens, or the score without an accuracy."""
        if not self.corrupted:
            return None
        share = max(self.corrupted, key=float)
        return self.accuracies.get(f"corrupted {share}", self.corrupted[share])


def _sum(norms: list[float | None]) -> float | None:
    """Return the sum of norms; None if there are none, or one is None."""
    numbers = [norm for norm in norms if norm is not None]
    return sum(numbers) if numbers and len(numbers) == len(norms) else None


@dataclass(frozen=True, kw_only=True)
class RunRecord(Figures):
    """The settings of a run of a comparison, and its figures.

    Attributes:
        run: name of the run, `finetune.Job.name`.
        kind: "tuning" for runs that choose a hyperparameter, "final" for those that are reported.
        task: name of the task.
        method: the method's text in the grid.
        control: whether the method is a control or a placebo, a baseline for the other methods.
        value: value of the method's hyperparameter (knob); None for the method's own.
        seed: seed of the run.
        model: path or hub id of the model.
        metric: name of the metric of the score.
        rows: numbers of training, unlabelled and dev rows.
        validation_rows: number of validation rows, neither trained nor evaluated on.
        label_noise: share of the training labels that are wrong.
        settings, recipe: settings of the method and of the fine-tuning.
        error: why the run failed, and has no figures; None if it did not.
        embedding_growth: root mean square entry of the embedding table after training, divided by
            that before.
        best_epoch: for the plain model, the ``epoch`` with the best score on validation rows, and
            ``score``, ``nll``, ``brier`` and ``brier_scaled`` of the dev rows after it.
        seconds: wall-clock seconds of ``training`` and ``judging``, and the ``processor`` seconds
            of training, which depend less on other work on the machine.

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
    """Read the records of a results file, or of the results file in a folder.

    Raises:
        DataError: there is no results file, a line is not the record of a run, or the reliability
            diagrams of the records have different bins.
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
