"""A run of a live selection: fine-tune a model on a subset, judge it, and record what it cost."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from .._io import require, whole_folder, write_text
from ..compare.finetune import fine_tune
from ..compare.judge import model_outputs
from ..compare.metrics import ACCURACY, MATTHEWS, SPEARMAN, brier_score
from ..compare.models import Encoded, encode, load_model, load_tokenizer
from ..compare.settings import Recipe
from ..compare.tasks import Examples, Task, digest
from ..scaling.predictive import Array
from ..scaling.selection import OPERATIONS
from ..training import with_lora
from .language import (
    TextTask,
    Windows,
    judge_text,
    load_language_model,
    longest,
    windows,
)

Record = dict[str, Any]

LOSS = "loss"
"""Mean negative log-likelihood (nats), or in a regression the mean squared error."""
CLASS_SCORES = ("accuracy", "f1", "matthews", "brier")
NUMBER_SCORES = ("mae", "pearson", "spearman")
COSTS = ("training_flops", "judging_flops")
"""Operations in the record of a run."""
FORWARD = 2.0
"""Operations per parameter and token; a backward pass to the inputs costs as much, to the weights
too."""
_BATCH = 64
_WINDOWS = 16  # at a time: their logits have the whole vocabulary
RUN_NAME = "run.txt"  # in the winner's folder: the name of its run


def score_of(record: Record, name: str) -> float | None:
    """Return the loss of a run's record, or a score by name; None for a failed run."""
    if record["error"] is not None or name == LOSS:
        return record["dev_loss"]  # type: ignore[no-any-return]
    return record["scores"][name]  # type: ignore[no-any-return]


def training_flops(
    parameters: int, trained: int, tokens: float, epochs: float, checkpointing: bool = False
) -> float:
    """Return 6 N × tokens × epochs where all N parameters are trained.

    Of the six, two are for the gradients of weights, which the weights that are not trained (below
    LoRA's adapters) do not have.  Gradient checkpointing runs the forward pass twice.
    """
    each = OPERATIONS * parameters - FORWARD * (parameters - trained)
    return (each + FORWARD * parameters * checkpointing) * tokens * epochs


@dataclass(frozen=True)
class Trial:
    """A model to fine-tune on a subset, and everything the run's result depends on.

    Attributes:
        model: path or hub id.
        version: changes with the model's files.
        task: its training rows are the subset (none: the model is only judged), its dev rows those
            to judge on; unlabelled rows play no part.
        seed: of head, order and dropout.
        recipe: how to train.
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
        """D."""
        return len(self.task.train)

    @cached_property
    def name(self) -> str:
        """Readable, and with a digest of all the run depends on; serves as a file name."""
        content = [self.model, self.version, digest(self.task), self.seed]
        text = json.dumps([*content, asdict(self.recipe)])
        key = hashlib.sha256(text.encode()).hexdigest()[:10]
        words = re.sub(r"[^A-Za-z0-9.]+", "-", self.model.rstrip("/"))[-40:].strip("-.")
        return f"{words}-{self.size}-s{self.seed}-{key}"


@dataclass(frozen=True)
class Seconds:
    """Wall-clock time of the parts of a run."""

    training: float
    judging: float


@dataclass(frozen=True)
class RunRecord:
    """What a file below ``runs`` and a line of ``records.jsonl`` hold of a run.

    Attributes:
        run: its name.
        model: the candidate, as it was given.
        parameters: N, all of the model with its head.
        size: training examples D; 0 is the model before fine-tuning, its head drawn from `seed`.
        epochs: passes over the subset.
        steps: of the optimiser.
        seed: of head, order and dropout.
        learning_rate: η, the highest rate of the schedule.
        time: t = Σ_s η_s / η over the steps s, so that η t = Σ_s η_s; 0 at size 0.
        tokens: of one epoch, without padding (of text, with the token each row begins with).
        metric: name of the task's metric.
        dev_loss: mean negative log-likelihood (nats) of the dev rows' labels; in a regression
            their mean squared error; of text, nats a token.
        dev_score: the task's metric.
        scores: `CLASS_SCORES`, in a regression `NUMBER_SCORES`, of text `language.SCORES`, by name.
        dev_rows: how many were judged.
        training_flops, judging_flops: operations.
        seconds: wall-clock time; None where the run failed.
        error: why there are no losses.
        lost: whether the reason may pass (memory, a worker that was killed): the same command then
            repeats the run.
    """

    run: str
    model: str
    parameters: int
    size: int
    epochs: float
    steps: int
    seed: int
    learning_rate: float
    time: float
    tokens: int
    metric: str
    dev_loss: float | None = None
    dev_score: float | None = None
    scores: Mapping[str, float] | None = None
    dev_rows: int = 0
    training_flops: float = 0.0
    judging_flops: float = 0.0
    seconds: Seconds | None = None
    error: str | None = None
    lost: bool = False


def run(trial: Trial) -> Record:
    """Fine-tune a model on a subset and judge it.

    A run that fails, whatever for, is recorded with its `error` and without losses: the other
    candidates go on without it.

    Returns:
        The fields of a `RunRecord`.
    """
    record = _head(trial)
    try:
        tokenizer = load_tokenizer(trial.model)
        model = new_model(trial, tokenizer)
        rows = {
            name: encoded(trial.task, part, model, tokenizer, trial.recipe, trained=name == "train")
            for name, part in (
                ("train", trial.task.train),
                ("dev", trial.task.dev),
            )
        }
        parameters, trained = count_parameters(model)
        record |= {"parameters": parameters, "tokens": count_tokens(rows["train"])}
        record["training_flops"] = training_flops(
            parameters,
            trained,
            record["tokens"],
            trial.recipe.epochs,
            trial.recipe.gradient_checkpointing,
        )
        figures = _figures(trial, model, rows, parameters)
    except FloatingPointError as error:
        return record | {"error": str(error)}
    except Exception as error:  # a candidate's code raises many kinds; to the others they are one
        return record | {"error": _reason(error), "lost": True}
    if trial.keep is not None:
        with whole_folder(trial.keep) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            write_text(folder / RUN_NAME, trial.name)
    return record | figures


def killed(trial: Trial) -> Record:
    """Return the record of a run whose process was killed at every attempt."""
    return _head(trial) | {"error": "its process was killed, perhaps out of memory", "lost": True}


def _head(trial: Trial) -> Record:
    """Return the record of a run before anything is measured."""
    record = RunRecord(
        run=trial.name,
        model=trial.model,
        parameters=0,
        size=trial.size,
        epochs=trial.recipe.epochs,
        steps=0,
        seed=trial.seed,
        learning_rate=trial.recipe.learning_rate,
        time=0.0,
        tokens=0,
        metric=trial.task.metric.name,
    )
    return asdict(record)


def _reason(error: Exception) -> str:
    words = (str(error).strip() or type(error).__name__).splitlines()[0]
    full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in words
    if full and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return f"out of memory ({words})" if full else f"{type(error).__name__}: {words}"


def new_model(trial: Trial, tokenizer: Any) -> Any:
    """Return the model before fine-tuning, in evaluation mode, on the GPU where there is one."""
    model = load_for(trial.model, trial.task, tokenizer, trial.seed, trial.recipe)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def load_for(name: str, task: Task, tokenizer: Any, seed: int, recipe: Recipe) -> Any:
    """Return a model with a head for the task, and with adapters where the recipe has them."""
    if isinstance(task, TextTask):
        model, kind = load_language_model(name, tokenizer, seed), "CAUSAL_LM"
    else:
        model = load_model(name, task.outputs, tokenizer, seed, regression=task.regression)
        kind = "SEQ_CLS"
    return with_lora(model, seed=seed, task_type=kind) if recipe.lora else model


def encoded(
    task: Task,
    part: Examples,
    model: Any,
    tokenizer: Any,
    recipe: Recipe,
    *,
    trained: bool,
) -> Encoded:
    """Return a part of the task's rows as the model reads them.

    Args:
        trained: whether they are trained on: the ends of texts are learnt, and not judged.
    """
    if isinstance(task, TextTask):
        length = longest(model, tokenizer, recipe.max_length)
        return windows(part, tokenizer, length, end=trained)
    return encode(part, tokenizer, recipe.max_length)


def judging_flops(parameters: int, tokens: float) -> float:
    """Return 2 N × tokens, the operations of a forward pass."""
    return FORWARD * parameters * tokens


def count_parameters(model: Any) -> tuple[int, int]:
    """Return N, all of the model's with its head's (and adapters'), and how many are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def count_tokens(data: Encoded) -> int:
    """Return how many tokens the rows have, without padding."""
    return sum(len(row["input_ids"]) for row in data.rows)


def _figures(trial: Trial, model: Any, rows: Mapping[str, Encoded], parameters: int) -> Record:
    """Train and judge a model, and return that part of the record."""
    start = time.perf_counter()
    steps = _Rates()
    if trial.size:
        fine_tune(model, rows["train"], trial.recipe, seed=trial.seed, callbacks=[steps])
        model.eval()
    trained = time.perf_counter()
    record = _judged(trial, model, rows["dev"], parameters)
    t = sum(steps.rates) / trial.recipe.learning_rate
    record |= {"steps": len(steps.rates), "time": t}
    judged = time.perf_counter()
    record["seconds"] = {
        "training": trained - start,
        "judging": judged - trained,
    }
    return record


class _Rates(TrainerCallback):
    """The learning rates of the optimiser's steps."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.rates.append(float(given["optimizer"].param_groups[0]["lr"]))


def _judged(trial: Trial, model: Any, dev: Encoded, parameters: int) -> Record:
    costs = {
        "dev_rows": len(trial.task.dev),
        "judging_flops": judging_flops(parameters, count_tokens(dev)),
    }
    if isinstance(dev, Windows):
        return judge_text(model, trial.task.dev, dev, _WINDOWS) | costs
    dev = dev.by_length()
    outputs = model_outputs(model, dev.in_order(_BATCH), regression=trial.task.regression)
    if trial.task.regression:
        labels, said = np.asarray(dev.labels, dtype=np.float64), outputs[:, 0]
        loss, scores = float(((said - labels) ** 2).mean()), number_scores(said, labels)
    else:
        labels, said = np.asarray(dev.labels, dtype=np.int64), outputs.argmax(1)
        chosen = outputs[np.arange(len(labels)), labels]
        # a probability that underflows counts as the smallest number
        loss = float(-np.log(np.maximum(chosen, np.finfo(np.float64).tiny)).mean())
        scores = class_scores(outputs, labels)
    return {
        "dev_loss": loss,
        "dev_score": trial.task.metric(said, labels),
        "scores": scores,
    } | costs


def class_scores(probabilities: Array, labels: Array) -> dict[str, float]:
    """Return `CLASS_SCORES` of probabilities [n, C] and labels [n]; f1 is the classes' mean."""
    chosen = probabilities.argmax(1)
    f1 = require("sklearn.metrics").f1_score
    return {
        "accuracy": ACCURACY(chosen, labels),
        "f1": float(f1(labels, chosen, average="macro", zero_division=0.0)),
        "matthews": MATTHEWS(chosen, labels),
        "brier": float(brier_score(probabilities, labels)),
    }


def number_scores(predictions: Array, labels: Array) -> dict[str, float]:
    """Return `NUMBER_SCORES` of predictions and labels, [n]; constants correlate by 0."""
    flat = np.ptp(predictions) == 0 or np.ptp(labels) == 0
    return {
        "mae": float(np.abs(predictions - labels).mean()),
        "pearson": 0.0 if flat else float(np.corrcoef(predictions, labels)[0, 1]),
        "spearman": SPEARMAN(predictions, labels),
    }
