"""One run: fine-tune a model by one method from one seed, and judge it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from ..evaluation.files import whole_folder, write_atomically
from ..evaluation.judge import Conditions, figures_of, judge
from ..evaluation.report import finite
from ..evaluation.robustness import embedding_scale
from ..evaluation.text_noise import noisy_texts
from ..tasks.batches import Encoded, encode
from ..tasks.examples import Examples, Task
from ..tasks.models import load_model, load_tokenizer
from ..training import with_lora
from .fine_tune import fine_tune, in_own_precision
from .jobs import Job, Record
from .tracking import RunLog, Tracking


def run(
    job: Job, models: Path | None = None, tracking: Tracking | None = None
) -> tuple[Record, dict[str, float]]:
    """The record of a run, the same on every call; and its seconds, which are not.

    A run whose loss is not finite is recorded with its `error` and without figures.

    Args:
        models: folder to save the fine-tuned model in, below the run's name; None: not saved.
        tracking: where to log losses and figures; the record is the same.

    Returns:
        The record; seconds of ``training`` and ``judging``, and ``processor`` seconds of training,
        which other work on the machine prolongs less.
    """
    with nullcontext() if tracking is None else tracking.of(job.name) as log:
        return _run(job, models, log)


def _run(job: Job, models: Path | None, log: RunLog | None) -> tuple[Record, dict[str, float]]:
    tokenizer = load_tokenizer(job.model)
    model = load_model(
        *(job.model, job.task.outputs, tokenizer, job.seed), regression=job.task.regression
    )
    scale = embedding_scale(model)
    if job.recipe.lora:
        model = with_lora(model, seed=job.seed)
    curve = Curve(job, tokenizer, log) if job.curve else None
    start = _now()
    record = _head(job)
    try:
        train, unlabelled = (
            encode(part, tokenizer, job.recipe.max_length)
            for part in (job.task.train, job.task.unlabelled)
        )
        fine_tune(
            *(model, train, job.recipe),
            seed=job.seed,
            method=job.arguments,
            unlabelled=unlabelled,
            callbacks=[each for each in (log, curve) if each is not None],
            log_as=None if log is None else job.name,
        )
        trained = _now()
        figures = task_figures(
            *(model, tokenizer, scale, job.task, job.shift, job.conditions, job.recipe.max_length)
        )
        figures = finite(figures | {"embedding_growth": embedding_scale(model) / scale})
    except FloatingPointError as error:
        return record | {"error": str(error)}, {}
    aside = np.zeros(2) if curve is None else curve.seconds
    training, processor = (trained - start - aside).tolist()
    judging = float((_now() - trained + aside)[0])
    seconds = {"training": training, "processor": processor, "judging": judging}
    record |= figures
    if log is not None:
        log.figures(figures)
    if curve is not None:
        record["curve"] = finite(curve.points)
    if models is not None:
        with whole_folder(models / job.name) as folder:
            # TAPT changes the weights below LoRA's adapters, too
            below = job.recipe.lora and job.arguments.name == "tapt"
            whole = model.merge_and_unload() if below else model
            whole.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            from ..compare.report import model_card  # needs pandas

            card = model_card(job.name, record, adapters=job.recipe.lora and whole is model)
            write_atomically(folder / "README.md", str(card))  # in place of peft's
    return record, seconds


def _now() -> np.ndarray:
    """Seconds: on the wall, and of this process on all its processors."""
    return np.array([time.perf_counter(), time.process_time()])


class Curve(TrainerCallback):
    """Judges the model after the job's epochs, on validation rows as well, and changes nothing.

    Attributes:
        points: one an epoch: ``epoch``, the clean figures and ``scaled`` ones of the dev rows, and
            the ``validation`` rows' score and NLL.
        seconds: spent, on the wall and on processors.
    """

    def __init__(self, job: Job, tokenizer: Any, log: RunLog | None = None) -> None:
        self.points: list[Record] = []
        self.seconds = np.zeros(2)
        self._job, self._log = job, log
        assert job.task.validation is not None  # the grid sees to it
        self._dev, self._validation = (
            encode(part, tokenizer, job.recipe.max_length)
            for part in (job.task.dev, job.task.validation)
        )

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Judges where the epoch is one of the job's."""
        epoch = round(state.epoch)
        if epoch not in self._job.curve:
            return
        start = _now()
        with in_own_precision(kwargs["model"]) as model:
            point = self._point(model)
        self.points.append({"epoch": epoch, **point})
        if self._log is not None:
            self._log.figures(point)
        self.seconds = self.seconds + _now() - start

    def _point(self, model: Any) -> Record:
        task, conditions = self._job.task, self._job.conditions.bare
        found = judge(
            *(model, self._dev, task.metric, 1.0, conditions),
            regression=task.regression,
            validation=self._validation,
        )
        other = judge(
            *(model, self._validation, task.metric, 1.0, conditions), regression=task.regression
        )
        return {
            "score": found.score,
            **found.figures,
            "scaled": found.scaled,
            "validation": {"score": other.score, "nll": other.figures.get("nll")},
        }


def _head(job: Job) -> Record:
    """What the run was; figures that may be missing are None."""
    return {
        "kind": job.kind,
        "task": job.task.name,
        "method": job.method,
        "value": job.value,
        "seed": job.seed,
        "model": job.model,
        "metric": job.task.metric.name,
        "rows": [len(job.task.train), len(job.task.unlabelled), len(job.task.dev)],
        "validation_rows": len(job.task.validation or ()),
        "label_noise": job.label_noise,
        "resampled": job.resampled,
        "settings": {"method": job.arguments.name, **job.arguments.settings},
        "recipe": asdict(job.recipe),
        "score": None,
        "brier": None,
        "ece": None,
        "error": None,
    }


def task_figures(
    model: Any,
    tokenizer: Any,
    scale: float,
    task: Task,
    shift: Sequence[Task],
    conditions: Conditions,
    max_length: int,
) -> Record:
    """The model judged on a task under all conditions, and on the clean rows of other tasks.

    Args:
        scale: what δ = 1 means, in the units of the embedding's entries.
    """

    def encoded(examples: Examples) -> Encoded:
        return encode(examples, tokenizer, max_length)

    found = judge(
        *(model, encoded(task.dev), task.metric, scale, conditions),
        regression=task.regression,
        validation=None if task.validation is None else encoded(task.validation),
        perturbed={
            kind: encoded(_noisy_examples(task.dev, kind, conditions.text_share))
            for kind in conditions.texts
        },
    )
    return figures_of(found, conditions) | {
        "shift": {
            target.name: _shift_figures(conditions, model, encoded(target.dev), target)
            for target in shift
        },
    }


def _noisy_examples(examples: Examples, kind: str, share: float) -> Examples:
    """The same rows with their texts changed, pairs apart from first texts."""
    pairs = examples.pairs
    return replace(
        examples,
        texts=noisy_texts(examples.texts, kind, share, 0),
        pairs=None if pairs is None else noisy_texts(pairs, kind, share, 1),
    )


def _shift_figures(conditions: Conditions, model: Any, dev: Encoded, target: Any) -> Record:
    """Score, Brier score and ECE on the clean rows of another task."""
    found = judge(model, dev, target.metric, 1.0, conditions.bare, regression=target.regression)
    return {"score": found.score, "brier": found.brier, "ece": found.ece}
