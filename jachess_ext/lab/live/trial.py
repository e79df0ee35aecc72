"""A run of a live selection: fine-tune a model on a subset, judge it and record its cost."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import TrainerCallback

from ..._io import require, whole_folder, write_text
from ...scaling.predictive import Array, Index
from ...scaling.selection import OPERATIONS
from ...training import with_lora
from ..workbench.metrics import ACCURACY, MATTHEWS, SPEARMAN, brier_score
from ..workbench.models import Encoded, Model, encode, load_model, load_tokenizer
from ..workbench.settings import Recipe
from ..workbench.tasks import Examples, Task, digest
from ..workbench.training import fine_tune, model_outputs
from .language import TextTask, Windows, judge_text, load_language_model, row_length, windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOSS = "loss"
"""Name of the mean negative log-likelihood (nats) or, in a regression, the mean squared error."""
CLASS_SCORES = ("accuracy", "f1", "matthews", "brier")
NUMBER_SCORES = ("mae", "pearson", "spearman")
FORWARD = 2.0
"""FLOPs of a forward pass per parameter and token; gradients with respect to activations, and with
respect to weights, each cost as much."""
_BATCH = 64
_WINDOWS = 16  # rows of text in a batch: few, since logits have the size of the vocabulary
RUN_NAME = "run.txt"  # file in the winner's folder with the name of its run


def training_flops(parameters: int, trained: int, tokens: float, recipe: Recipe) -> float:
    """Return the FLOPs of fine-tuning: 6 N × tokens × epochs if all N parameters are trained.

    Two of the six are for weight gradients, which frozen weights (with LoRA) do not have.  Gradient
    checkpointing runs the forward pass twice.

    Args:
        parameters: number of parameters N.
        trained: number of trained parameters.
        tokens: number of tokens of an epoch.
    """
    # Per parameter and token: 2 forward, 2 for gradients of activations, 2 for those of weights.
    step = OPERATIONS * parameters - FORWARD * (parameters - trained)
    return (step + FORWARD * parameters * recipe.gradient_checkpointing) * tokens * recipe.epochs


@dataclass(frozen=True)
class Trial:
    """A model to fine-tune on a subset, with everything that the run's result depends on.

    Attributes:
        model: the model's path or hub id.
        version: digest or commit, which changes with the model's files.
        task: the task, whose training rows are the subset (none: the model is only judged), and on
            whose dev rows the model is judged; unlabelled rows are not used.
        seed: seed of head, order and dropout.
        recipe: recipe for fine-tuning.
        keep: folder to save the fine-tuned model and its tokenizer in; None: they are not saved.
    """

    model: str
    version: str
    task: Task
    seed: int
    recipe: Recipe
    keep: Path | None = None

    @property
    def size(self) -> int:
        """Number of training rows D."""
        return len(self.task.train)

    @cached_property
    def name(self) -> str:
        """Name of the run and its file: the model's name, size, seed, and a digest of everything
        that the run depends on."""
        identity = [self.model, self.version, digest(self.task), self.seed]
        text = json.dumps([*identity, asdict(self.recipe)])
        key = hashlib.sha256(text.encode()).hexdigest()[:10]
        words = re.sub(r"[^A-Za-z0-9.]+", "-", self.model.rstrip("/"))[-40:].strip("-.")
        return f"{words}-{self.size}-s{self.seed}-{key}"


@dataclass(frozen=True)
class RunRecord:
    """Result of a run: a line of ``records.jsonl``, and a file in the folder ``runs``.

    Attributes:
        run: name of the run.
        model: path or hub id of the candidate.
        size: number of training examples D; 0: the model before fine-tuning, its head drawn by
            `seed`.
        seed: seed of head, order and dropout.
        parameters: number of parameters N of the model with its head.
        tokens: number of tokens of one epoch, without padding (for text, with the first token of
            each row).
        steps: number of optimiser steps.
        dev_loss: mean negative log-likelihood (nats) of the dev rows' labels; in a regression their
            mean squared error; for text, nats per token; None if the run failed.
        scores: scores by name: `CLASS_SCORES`, in a regression `NUMBER_SCORES`, for text
            `language.SCORES`.
        dev_rows: number of dev rows.
        training_flops, judging_flops: FLOPs of training and of judging.
        seconds: wall-clock time of training and judging.
        error: why the run failed; None if it did not.
        lost: whether the failure may be temporary (out of memory, a killed worker): the same
            command then repeats the run.
    """

    run: str
    model: str
    size: int
    seed: int
    parameters: int = 0
    tokens: int = 0
    steps: int = 0
    dev_loss: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    dev_rows: int = 0
    training_flops: float = 0.0
    judging_flops: float = 0.0
    seconds: float = 0.0
    error: str | None = None
    lost: bool = False

    @property
    def flops(self) -> float:
        """FLOPs of training and judging."""
        return self.training_flops + self.judging_flops

    def score(self, name: str) -> float | None:
        """Return the loss or a score by name; None if the run failed."""
        return self.dev_loss if name == LOSS or self.error is not None else self.scores[name]

    def summary(self, name: str) -> str:
        """Return the loss or score as text, or why the run failed."""
        score = self.score(name)
        return str(self.error) if score is None else f"dev {name} {score:.4g}"


def run(trial: Trial) -> RunRecord:
    """Fine-tune a model on a subset and judge it; return the run's record.

    A run that fails for any reason has a record with its `error` and without losses, so that the
    other candidates can continue.
    """
    # The record is filled in during the run: if training fails, it still has the expected cost,
    # so that the search counts the cost of failures, too.
    record = RunRecord(trial.name, trial.model, trial.size, trial.seed)
    task, recipe = trial.task, trial.recipe
    try:
        tokenizer = load_tokenizer(trial.model)
        model = new_model(trial, tokenizer)
        train = encode_rows(task, task.train, model, tokenizer, recipe, is_training=True)
        dev = encode_rows(task, task.dev, model, tokenizer, recipe, is_training=False)
        (parameters, trained), tokens = count_parameters(model), count_tokens(train)
        record = replace(
            record,
            parameters=parameters,
            tokens=tokens,
            training_flops=training_flops(parameters, trained, tokens, recipe),
        )
        start, steps = time.perf_counter(), _StepCounter()
        if trial.size:
            fine_tune(model, train, recipe, seed=trial.seed, callbacks=[steps])
            model.eval()
        loss, scores = _judge(task, model, dev)
        record = replace(
            record,
            steps=steps.count,
            dev_loss=loss,
            scores=scores,
            dev_rows=len(task.dev),
            judging_flops=judging_flops(parameters, count_tokens(dev)),
            seconds=time.perf_counter() - start,
        )
    except FloatingPointError as error:  # a divergence, which the same seed repeats: not "lost"
        return replace(record, error=str(error))
    except Exception as error:  # the code of candidates may raise errors of any type
        return replace(record, error=_failure_reason(error), lost=True)
    if trial.keep is not None:
        with whole_folder(trial.keep) as folder:
            model.save_pretrained(str(folder))
            tokenizer.save_pretrained(folder)
            write_text(folder / RUN_NAME, trial.name)
    return record


def killed(trial: Trial) -> RunRecord:
    """Return the record of a run whose process was killed at every attempt."""
    reason = "its process was killed, perhaps out of memory"
    return RunRecord(trial.name, trial.model, trial.size, trial.seed, error=reason, lost=True)


class _StepCounter(TrainerCallback):
    """Count the optimiser's steps."""

    count = 0

    def on_pre_optimizer_step(self, *args: object, **kwargs: object) -> None:
        self.count += 1


def _failure_reason(error: Exception) -> str:
    """Return the reason of a run's failure; if memory is full, first empty the CUDA cache."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    is_full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in text
    if is_full and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return f"out of memory ({text})" if is_full else f"{type(error).__name__}: {text}"


def new_model(trial: Trial, tokenizer: PreTrainedTokenizerBase) -> Model:
    """Return the model before fine-tuning, in evaluation mode, on the GPU if there is one."""
    model = load_task_model(trial.model, trial.task, tokenizer, trial.seed, trial.recipe)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()  # type: ignore[arg-type]
    return model


def load_task_model(
    name: str, task: Task, tokenizer: PreTrainedTokenizerBase, seed: int, recipe: Recipe
) -> Model:
    """Return a model with a head for the task, and with LoRA's adapters if the recipe has them."""
    if isinstance(task, TextTask):
        model, kind = load_language_model(name, tokenizer, seed), "CAUSAL_LM"
    else:
        model = load_model(name, task.outputs, tokenizer, seed, is_regression=task.is_regression)
        kind = "SEQ_CLS"
    return with_lora(model, seed=seed, task_type=kind) if recipe.lora else model


def encode_rows(
    task: Task,
    rows: Examples,
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    *,
    is_training: bool,
) -> Encoded:
    """Return rows of the task as tokens of the model.

    Args:
        is_training: whether the rows are for training, in which the token that ends a text is
            predicted.
    """
    if isinstance(task, TextTask):
        length = row_length(model, tokenizer, recipe.max_length)
        return windows(rows, tokenizer, length, predicts_end=is_training)
    return encode(rows, tokenizer, recipe.max_length)


def judging_flops(parameters: int, tokens: float) -> float:
    """Return the FLOPs of judging, 2 N × tokens for a forward pass."""
    return FORWARD * parameters * tokens


def count_parameters(model: Model) -> tuple[int, int]:
    """Return the number of parameters, with head and adapters, and the number of trained ones."""
    parameters = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in parameters), sum(size for size, trained in parameters if trained)


def count_tokens(data: Encoded) -> int:
    """Return the number of tokens in the rows, without padding."""
    return sum(len(row["input_ids"]) for row in data.rows)


def _judge(task: Task, model: Model, dev: Encoded) -> tuple[float, dict[str, float]]:
    """Return the loss of the dev rows, and their scores by name."""
    if isinstance(dev, Windows):
        return judge_text(model, task.dev, dev, _WINDOWS)
    dev = dev.by_length()
    outputs = model_outputs(model, dev.in_order(_BATCH), is_regression=task.is_regression)
    if task.is_regression:
        numbers, predictions = np.asarray(dev.labels, dtype=np.float64), outputs[:, 0]
        loss = float(((predictions - numbers) ** 2).mean())
        return loss, regression_scores(predictions, numbers)
    labels: Index = np.asarray(dev.labels, dtype=np.intp)
    label_probability = outputs[np.arange(len(labels)), labels]  # [N]
    # A probability that underflows is replaced by the smallest positive number.
    loss = -np.log(np.maximum(label_probability, np.finfo(np.float64).tiny)).mean()
    return float(loss), class_scores(outputs, labels)


def class_scores(probabilities: Array, labels: Index) -> dict[str, float]:
    """Return `CLASS_SCORES` by name, of probabilities [n, C] and labels [n]; f1 is the mean over
    classes."""
    predictions = probabilities.argmax(1)
    f1 = require("sklearn.metrics").f1_score
    return {
        "accuracy": ACCURACY(predictions, labels),
        "f1": float(f1(labels, predictions, average="macro", zero_division=0.0)),
        "matthews": MATTHEWS(predictions, labels),
        "brier": float(brier_score(probabilities, labels)),
    }


def regression_scores(predictions: Array, labels: Array) -> dict[str, float]:
    """Return `NUMBER_SCORES` by name, of predictions and labels [n]; correlations are 0 if either
    is constant."""
    is_constant = np.ptp(predictions) == 0 or np.ptp(labels) == 0
    return {
        "mae": float(np.abs(predictions - labels).mean()),
        "pearson": 0.0 if is_constant else float(np.corrcoef(predictions, labels)[0, 1]),
        "spearman": SPEARMAN(predictions, labels),
    }
