"""`select_live`: a `Search` whose runs are done by transformers' Trainer and kept in a folder."""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from .._io import (
    DataError,
    finite,
    from_json,
    read_json,
    require,
    whole_folder,
    write_bytes,
    write_json,
    write_text,
)
from ..compare.finetune import fine_tune
from ..compare.judge import model_outputs
from ..compare.metrics import ACCURACY, MATTHEWS, SPEARMAN, brier_score
from ..compare.models import Encoded, encode, load_model, load_tokenizer, model_version
from ..compare.runs import locked, read_results, run_all, write_results
from ..compare.settings import Columns, Recipe
from ..compare.tasks import Examples, Task, digest, load_task
from ..ntk import Measurement, Spectrum, measure_ntk, ntk_loss
from ..training import with_lora
from .baselines import FEATURE_SCORES
from .predictive import Array
from .search import Ask, Search
from .selection import DEFAULT, METHODS, OPERATIONS, Selection

Record = dict[str, Any]


# A run ------------------------------------------------------------------------------------------

LOSS = "loss"
"""Mean negative log-likelihood (nats), or in a regression the mean squared error."""
CLASS_SCORES = ("accuracy", "f1", "matthews", "brier")
NUMBER_SCORES = ("mae", "pearson", "spearman")
COSTS = ("training_flops", "judging_flops", "probe_flops", "features_flops")
"""Operations in the record of a run."""
_LOWER = (LOSS, "brier", "mae")  # is better; of the others 1 is the best there is
_FORWARD = 2.0
"""Per parameter and token; a backward pass to the inputs costs as much, to the weights too."""
_BATCH = 64
_RUN = "run.txt"  # in the winner's folder: the name of its run


def to_forecast(name: str, value: float, rows: int) -> float:
    """Convert a score to the number that methods extrapolate: lower is better and above 0.

    A loss is itself.  Of a score whose best is 1 it is what is missing, 1 − value; where nothing is
    missing in so many rows, half a row's worth.
    """
    return value if name in _LOWER else max(1.0 - value, 0.5 / rows)


def from_forecast(name: str, value: float) -> float:
    """Return a forecast in the score's own terms."""
    return value if name in _LOWER else 1.0 - value


def ranked_loss(record: Record, rank_by: str) -> float | None:
    """Return the number extrapolated of the score ranked by; None for a failed run."""
    if record["error"] is not None or rank_by == LOSS:
        return record["dev_loss"]
    return to_forecast(rank_by, record["scores"][rank_by], record["dev_rows"])


def training_flops(
    parameters: int, trained: int, tokens: float, epochs: float, checkpointing: bool = False
) -> float:
    """Return 6 N × tokens × epochs where all N parameters are trained.

    Of the six, two are for the gradients of weights, which the weights that are not trained (below
    LoRA's adapters) do not have.  Gradient checkpointing runs the forward pass twice.
    """
    each = OPERATIONS * parameters - _FORWARD * (parameters - trained)
    return (each + _FORWARD * parameters * checkpointing) * tokens * epochs


@dataclass(frozen=True)
class Job:
    """A model to fine-tune on a subset, and everything the run's result depends on.

    Attributes:
        model: path or hub id.
        version: changes with the model's files.
        task: its training rows are the subset (none: the model is only judged), its dev rows those
            to judge on; unlabelled rows play no part.
        probe: the rows Θ is measured on; none: no Θ.
        features: the rows whose frozen features are scored; none but at size 0.
        seed: of head, order and dropout.
        recipe: how to train.
        kernels: folder for the file of Θ.
        keep: folder to save the fine-tuned model and its tokenizer in; None: they are not saved.
    """

    model: str
    version: str
    task: Task
    probe: Examples
    features: Examples
    seed: int
    recipe: Recipe
    kernels: Path
    keep: Path | None = None

    @property
    def size(self) -> int:
        """D."""
        return len(self.task.train)

    @cached_property
    def name(self) -> str:
        """Readable, and with a digest of all the run depends on; serves as a file name."""
        parts = [[p.texts, p.pairs, list(p.labels)] for p in (self.probe, self.features)]
        content = [self.model, self.version, digest(self.task), parts, self.seed]
        text = json.dumps([*content, asdict(self.recipe)])
        key = hashlib.sha256(text.encode()).hexdigest()[:10]
        words = re.sub(r"[^A-Za-z0-9.]+", "-", self.model.rstrip("/"))[-40:].strip("-.")
        return f"{words}-{self.size}-s{self.seed}-{key}"


@dataclass(frozen=True)
class Seconds:
    """Wall-clock time of the parts of a run."""

    training: float
    judging: float
    probe: float


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
        tokens: of one epoch, without padding.
        metric: name of the task's metric.
        dev_loss: mean negative log-likelihood (nats) of the dev rows' labels; in a regression
            their mean squared error.
        dev_score: the task's metric.
        scores: `CLASS_SCORES`, or in a regression `NUMBER_SCORES`, by name.
        dev_rows: how many were judged.
        kernel_loss: F(Θ, t) = ‖exp(−η Θ t) r‖² (Eq. 9), Θ of the model as this run left it.
        residual_square: ‖r‖², r = f0(X) − y on the probe before fine-tuning.
        probe_square: ‖f(X) − y‖² after it: what Eq. 9 predicts, measured.
        kernel: name of the file of Θ; None where none was asked for.
        training_flops, judging_flops, probe_flops (of Θ), features_flops: operations.
        features: scores of the model's frozen features by name, at size 0 where asked for.
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
    kernel_loss: float | None = None
    residual_square: float | None = None
    probe_square: float | None = None
    kernel: str | None = None
    training_flops: float = 0.0
    judging_flops: float = 0.0
    probe_flops: float = 0.0
    features_flops: float = 0.0
    features: Mapping[str, float] | None = None
    seconds: Seconds | None = None
    error: str | None = None
    lost: bool = False


def run(job: Job) -> Record:
    """Fine-tune a model on a subset and judge it; measure Θ and frozen features where asked for.

    A run that fails, whatever for, is recorded with its `error` and without losses and kernel: the
    other candidates go on without it.

    Returns:
        The fields of a `RunRecord`.
    """
    record = _head(job)
    try:
        tokenizer = load_tokenizer(job.model)
        model = new_model(job, tokenizer)
        rows = {
            name: encode(part, tokenizer, job.recipe.max_length)
            for name, part in (
                ("train", job.task.train),
                ("dev", job.task.dev),
                ("probe", job.probe),
                ("features", job.features),
            )
        }
        parameters, trained = count_parameters(model)
        record |= {"parameters": parameters, "tokens": _tokens(rows["train"])}
        record["training_flops"] = training_flops(
            parameters,
            trained,
            record["tokens"],
            job.recipe.epochs,
            job.recipe.gradient_checkpointing,
        )
        measured = _measured(job, model, rows, parameters)
    except FloatingPointError as error:
        return record | {"error": str(error)}
    except Exception as error:  # a candidate's code raises many kinds; to the others they are one
        return record | {"error": _reason(error), "lost": True}
    if job.keep is not None:
        with whole_folder(job.keep) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            write_text(folder / _RUN, job.name)
    return record | measured


def killed(job: Job) -> Record:
    """Return the record of a run whose process was killed at every attempt."""
    return _head(job) | {"error": "its process was killed, perhaps out of memory", "lost": True}


def _head(job: Job) -> Record:
    """Return the record of a run before anything is measured."""
    record = RunRecord(
        run=job.name,
        model=job.model,
        parameters=0,
        size=job.size,
        epochs=job.recipe.epochs,
        steps=0,
        seed=job.seed,
        learning_rate=job.recipe.learning_rate,
        time=0.0,
        tokens=0,
        metric=job.task.metric.name,
    )
    return asdict(record)


def _reason(error: Exception) -> str:
    words = (str(error).strip() or type(error).__name__).splitlines()[0]
    full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in words
    if full and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return f"out of memory ({words})" if full else f"{type(error).__name__}: {words}"


def new_model(job: Job, tokenizer: Any) -> Any:
    """Return the model before fine-tuning, in evaluation mode, on the GPU where there is one."""
    model = _loaded(job.model, job.task, tokenizer, job.seed, job.recipe)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _loaded(name: str, task: Task, tokenizer: Any, seed: int, recipe: Recipe) -> Any:
    model = load_model(name, task.outputs, tokenizer, seed, regression=task.regression)
    return with_lora(model, seed=seed) if recipe.lora else model


def count_parameters(model: Any) -> tuple[int, int]:
    """Return N, all of the model's with its head's (and adapters'), and how many are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def _tokens(data: Encoded) -> int:
    return sum(len(row["input_ids"]) for row in data.rows)


def _measured(job: Job, model: Any, rows: Mapping[str, Encoded], parameters: int) -> Record:
    """Train and judge a model, and return that part of the record."""
    residual = _residual(model, rows["probe"]) if len(job.probe) else None
    start = time.perf_counter()
    record = _features(job, model, rows["features"], parameters) if len(job.features) else {}
    steps = _Rates()
    if job.size:
        fine_tune(model, rows["train"], job.recipe, seed=job.seed, callbacks=[steps])
        model.eval()
    trained = time.perf_counter()
    record |= _judged(job, model, rows["dev"], parameters)
    t = sum(steps.rates) / job.recipe.learning_rate
    record |= {"steps": len(steps.rates), "time": t}
    judged = time.perf_counter()
    if residual is not None:
        record |= _probed(job, model, rows["probe"], residual, t, parameters)
    record["seconds"] = {
        "training": trained - start,
        "judging": judged - trained,
        "probe": time.perf_counter() - judged,
    }
    return record


class _Rates(TrainerCallback):
    """The learning rates of the optimiser's steps."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.rates.append(float(given["optimizer"].param_groups[0]["lr"]))


def _judged(job: Job, model: Any, dev: Encoded, parameters: int) -> Record:
    dev = dev.by_length()
    outputs = model_outputs(model, dev.in_order(_BATCH), regression=job.task.regression)
    if job.task.regression:
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
        "dev_score": job.task.metric(said, labels),
        "scores": scores,
        "dev_rows": len(dev),
        "judging_flops": _FORWARD * parameters * _tokens(dev),
    }


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


def _features(job: Job, model: Any, data: Encoded, parameters: int) -> Record:
    features, labels = frozen_features(model, data, _BATCH), np.asarray(data.labels)
    regression = job.task.regression
    names = [name for name in FEATURE_SCORES if not (regression and name == "hscore")]
    return {
        "features": {name: FEATURE_SCORES[name](features, labels, regression) for name in names},
        "features_flops": _FORWARD * parameters * _tokens(data),
    }


@torch.no_grad()
def frozen_features(model: Any, data: Encoded, batch_size: int) -> Array:
    """Return means over the real tokens and all layers' outputs, [n, d], in the rows' order.

    Args:
        model: a classifier or regressor of transformers; put in evaluation mode.
        batch_size: rows at a time.

    Raises:
        DataError: the model gives no hidden states.
    """
    device = next(model.parameters()).device
    model.eval()
    order = sorted(range(len(data)), key=lambda i: len(data.rows[i]["input_ids"]))
    parts = []
    for start in range(0, len(order), batch_size):
        batch = data.batch(order[start : start + batch_size])
        inputs = {name: value.to(device) for name, value in batch.items() if name != "labels"}
        outputs = model(**inputs, output_hidden_states=True)
        states = getattr(outputs, "hidden_states", None)
        if states is None:
            states = getattr(outputs, "encoder_hidden_states", None)
        if states is None:
            raise DataError("the model gives no hidden states, which frozen features are made of")
        # the first is the embedding, no layer's output
        layers = torch.stack([state.double() for state in states[1:] or states]).mean(0)
        mask = inputs["attention_mask"].to(layers.dtype)[..., None]
        parts.append(((layers * mask).sum(1) / mask.sum(1)).cpu().numpy())
    return np.concatenate(parts)[np.argsort(order)]


@torch.no_grad()
def _residual(model: Any, probe: Encoded) -> torch.Tensor:
    """Return f(X) − y: logits minus one-hot labels (or the numbers), [n, C], fp64 on the CPU."""
    batch = _on_device(model, probe)
    labels = batch.pop("labels").cpu()
    logits = model(**batch).logits.double().cpu()
    if labels.is_floating_point():
        return logits - labels[:, None]
    return logits - torch.nn.functional.one_hot(labels, logits.shape[1])


def _on_device(model: Any, probe: Encoded) -> dict[str, torch.Tensor]:
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in probe.batch(range(len(probe))).items()}


def _probed(
    job: Job, model: Any, probe: Encoded, residual: torch.Tensor, t: float, parameters: int
) -> Record:
    """Measure Θ and F, and write the kernel's file.

    The training loss is a mean, so η of Eq. 9 is the rate over the rows n of the probe: gradient
    flow on (1/n) Σ_i ½‖f(x_i) − y_i‖² moves f by −(η/n) Θ (f − y) a step.
    """
    measured = measure_ntk(model, _on_device(model, probe), outputs="logits", progress=False)
    theta = measured.theta.float().cpu()
    spectrum = _spectrum(theta)
    file = io.BytesIO()
    np.savez(
        file,
        theta=theta.numpy(),
        residual=residual.numpy(),
        eigenvalues=spectrum.eigenvalues.numpy(),
        labels=np.asarray(probe.labels),
    )
    write_bytes(job.kernels / f"{job.name}.npz", file.getvalue())
    rate = job.recipe.learning_rate / len(residual)
    return {
        "kernel": f"{job.name}.npz",
        "kernel_loss": float(ntk_loss(spectrum, residual, t, rate)),
        "residual_square": float(residual.square().sum()),
        "probe_square": float(_residual(model, probe).square().sum()),
        "probe_flops": _probe_flops(measured, parameters, _tokens(probe)),
    }


def _spectrum(theta: torch.Tensor) -> Spectrum:
    with warnings.catch_warnings():
        # In single precision a kernel of low rank always has eigenvalues a little below 0.
        warnings.filterwarnings("ignore", "jachess_ext.ntk: .* round-off", RuntimeWarning)
        return Spectrum.of(theta)


def _probe_flops(measured: Measurement, parameters: int, tokens: int) -> float:
    """Count forward passes for r, Θ and the residual after training, a backward pass an output,
    and the contractions."""
    report = measured.report
    passes = _FORWARD * parameters * tokens * (3 + report.outputs)
    counted = (
        choice.cost.gram_flops if choice.form == "A" else choice.cost.materialise_flops
        for choice in report.choices
        if choice.cost is not None  # norms and embeddings are small
    )
    return passes + report.blocks * sum(counted)


def read_kernel(folder: Path, record: Record) -> dict[str, Array]:
    """Read what a run left of Θ in the folder of a live selection.

    Returns:
        theta: Θ as `jx.ntk` gives it, [n, C, n, C], float32.  residual: r, [n, C], float64.
        eigenvalues: of Θ, ascending, [n·C], float64.  labels: [n].

    Raises:
        DataError: the run has none, or its file is missing or not whole.
    """
    if record["kernel"] is None:
        raise DataError(f"the run {record['run']} has no kernel: none was asked for")
    path = folder / KERNELS / record["kernel"]
    try:
        with np.load(path, allow_pickle=False) as arrays:
            kernel = {name: arrays[name] for name in arrays.files}
        n, c = kernel["residual"].shape
        if kernel["theta"].shape != (n, c, n, c) or kernel["eigenvalues"].shape != (n * c,):
            raise ValueError(f"a kernel of shape {list(kernel['theta'].shape)}")
        return kernel
    except Exception as error:  # zipfile and numpy raise many kinds
        raise DataError(f"its kernel {path} cannot be read ({error})") from error


# Data, sizes, candidates -----------------------------------------------------------------------

SMALLEST = 16
"""Rows of the smallest subset, at least, where no sizes are given."""
_STEPS = 8  # optimiser steps on it, at least
_RATIO = 4.0  # of one size to the next, at most
_FEWEST = 3  # sizes, as long as the ratio stays at 2 or more
_TRAINING = 4 / 3  # rows of all sizes together, as a share of those of the largest, at most
_JUDGING = 0.005  # cost of judging a model once, as a share of training it on the target's rows
_MOST_JUDGING = 1 / 6  # and of judging after all sizes, as a share of training on them, at most
_FEWEST_JUDGED = 200  # rows, where that allows it
_ALWAYS_JUDGED = 80
_COUNTED = 1000  # rows whose tokens are counted


@dataclass(frozen=True)
class Candidate:
    """A model that loads.

    Attributes:
        model: as given.
        version: digest of its files, or the hub's commit.
        parameters: N, with a head for the task (and LoRA's adapters).
        trained: those that the recipe trains.
        tokens, dev_tokens: a training row and a dev row, on average over the first thousand.
    """

    model: str
    version: str
    parameters: int
    trained: int
    tokens: float
    dev_tokens: float

    def training_flops(self, rows: float, recipe: Recipe) -> float:
        """Return the expected cost of fine-tuning on so many rows."""
        return training_flops(
            self.parameters,
            self.trained,
            self.tokens * rows,
            recipe.epochs,
            recipe.gradient_checkpointing,
        )

    def judging_flops(self, rows: float) -> float:
        """Return the expected cost of judging so many dev rows."""
        return _FORWARD * self.parameters * self.dev_tokens * rows


@dataclass(frozen=True)
class Plan:
    """A live selection that can be run.

    Attributes:
        search: of the models that load, with nothing told.
        task: its training rows in the order they are taken in, and the dev rows judged on.
        candidates: the models that load, in the order given.
        unloadable: the other models, and why.
        rank_by: the score forecast.
        probe: how many training rows Θ is measured on, the first of the order.
        scored: how many training rows' frozen features are scored, the first.
        recipe: how every model is fine-tuned.
    """

    search: Search
    task: Task
    candidates: tuple[Candidate, ...]
    unloadable: Mapping[str, str]
    rank_by: str
    probe: int
    scored: int
    recipe: Recipe

    def job(self, ask: Ask, folder: Path, keep: Path | None = None) -> Job:
        """Return the job of a run; `folder` is the selection's."""
        rows = self.task.train
        candidate = next(c for c in self.candidates if c.model == ask.model)
        return Job(
            model=candidate.model,
            version=candidate.version,
            task=replace(self.task, train=rows.part(0, ask.rows), unlabelled=rows.part(0, 0)),
            probe=rows.part(0, self.probe),
            features=rows.part(0, 0 if ask.rows else self.scored),
            seed=ask.seed,
            recipe=self.recipe,
            kernels=folder / KERNELS,
            keep=keep,
        )


def make_plan(
    models: Sequence[str],
    task: Task | str,
    *,
    columns: Columns = Columns(),  # noqa: B008  frozen
    sizes: Sequence[int] | None = None,
    budget: float = 1 / 8,
    flops: float | None = None,
    target: int | None = None,
    rank_by: str = LOSS,
    probe: int | None = None,
    screen_rows: int = 512,
    dev_size: int | None = None,
    data_seed: int = 0,
    recipe: Recipe = Recipe(),  # noqa: B008  frozen
    **search: Any,
) -> Plan:
    """Read the data, load every model once, and decide on the sizes.

    Args:
        models: candidates, hub ids or paths; any sequence classifier that transformers loads.
        task: as `compare.tasks.load_task` takes it: a folder, ``train.csv:dev.csv``, ``glue/cola``.
        columns: of the files.
        sizes: subsets, increasing; None: from the largest that the budget allows down, see
            `size_ladder`.
        budget: the largest subset as a share of the target, at most.
        flops: limit of all runs' operations together: a round that would exceed it is not begun.
        target: training examples to predict for; None: all training rows.
        rank_by: "loss", or a score of `CLASS_SCORES` (`NUMBER_SCORES` in a regression).
        probe: training rows that Θ is measured on, 0: none; None: 32 with lensllm, else 0.
        screen_rows: training rows whose frozen features are scored where something reads that.
        dev_size: dev rows judged on; None: as many as keep judging cheap, see `judged_rows`.
        data_seed: of the order the training rows are taken in.
        recipe: how every model is fine-tuned.
        search: further settings of `Search`: method, strategy, seeds, seed, confidence, drop,
            screen, screen_by, gamma, tau.

    Raises:
        DataError: data, models, sizes or settings that cannot be used; nothing was trained.
        MissingExtra: transformers is not installed.
    """
    if isinstance(task, str):
        task = load_task(task, columns)
    if task.train == task.dev:
        raise DataError("the dev rows are the training rows; losses must be measured on other rows")
    rows = len(task.train)
    target = rows if target is None else target
    method = search.get("method", DEFAULT)
    if probe is None:
        probe = 32 if method == "lensllm" else 0
    _check_numbers(task, target, rank_by, probe, screen_rows, dev_size)
    if method == "lensllm" and not probe:
        raise DataError(
            "lensllm reads the kernel Θ of every run, and probe is 0; give it rows to measure Θ "
            "on, or take rectified, which is the same law with F free"
        )
    largest = max(sizes or (0,))
    if largest > rows:
        raise DataError(f"the size {largest} is above the data: there are {rows} training rows")
    if not 0 < budget <= 1 or largest > budget * target:
        raise DataError(
            f"the budget is {budget:g}, a share of the target's {target} rows"
            + (f"; the size {largest} is above it" if largest > budget * target else "")
            + "; expected a share up to 1, and sizes within it"
        )
    if sizes is None:
        sizes = size_ladder(rows, target, budget, recipe)
    scores = search.get("screen") is not None or method in FEATURE_SCORES
    settings: dict[str, Any] = {
        "sizes": sizes,
        "target": target,
        "budget": flops,
        "zero": True if probe or scores else None,
        **search,
    }
    Search(models, **settings)  # refuses what cannot be used before models are loaded
    order = stratified(task.dev, data_seed, task.regression)
    train = task.train.chosen(stratified(task.train, data_seed, task.regression))
    task = replace(task, train=train, dev=task.dev.chosen(order))
    _check_smallest(min(sizes), task, recipe)
    candidates, unloadable = _candidates(models, task, search.get("seed", 0), recipe)
    judged = dev_size or judged_rows(candidates, recipe, target, sizes)
    places = sorted(range(len(order)), key=order.__getitem__)
    task = replace(task, dev=task.dev.chosen([place for place in places if place < judged]))
    return Plan(
        search=Search(
            [candidate.model for candidate in candidates],
            costs={
                candidate.model: (
                    candidate.judging_flops(len(task.dev)),
                    candidate.training_flops(1, recipe),
                )
                for candidate in candidates
            },
            parameters={candidate.model: candidate.parameters for candidate in candidates},
            **settings,
        ),
        task=task,
        candidates=candidates,
        unloadable=unloadable,
        rank_by=rank_by,
        probe=probe,
        scored=screen_rows if scores else 0,
        recipe=recipe,
    )


def _check_numbers(
    task: Task, target: int, rank_by: str, probe: int, screen_rows: int, dev_size: int | None
) -> None:
    for name, value, least in (
        ("probe", probe, 0),
        ("dev_size", dev_size, 1),
        ("target", target, 1),
        ("screen_rows", screen_rows, 8),
    ):
        if value is not None and value < least:
            raise DataError(f"{name} is {value}; expected {least} or more")
    if probe > len(task.train):
        raise DataError(f"probe is {probe}, and there are {len(task.train)} training rows")
    scores = (LOSS, *(NUMBER_SCORES if task.regression else CLASS_SCORES))
    if rank_by not in scores:
        raise DataError(f"rank_by is {rank_by!r}; expected one of {', '.join(scores)}")


def _check_smallest(smallest: int, task: Task, recipe: Recipe) -> None:
    if len(set(task.train.part(0, smallest).labels)) < 2:
        what = "label" if task.regression else "class"
        raise DataError(
            f"the smallest subset, {smallest} rows, holds one {what} only; begin with more rows, "
            "or draw others with another data seed"
        )
    # A single step is the warm-up's first, whose learning rate is 0: nothing would be trained.
    batches = math.ceil(smallest / (recipe.batch_size * recipe.gradient_accumulation))
    if recipe.epochs * batches <= 1:
        raise DataError(
            f"the smallest subset, {smallest} rows, is trained on in one step, whose learning rate "
            "is 0 (warm-up); take more rows, more epochs or smaller batches"
        )


def _candidates(
    models: Sequence[str], task: Task, seed: int, recipe: Recipe
) -> tuple[tuple[Candidate, ...], dict[str, str]]:
    """Return the candidates that load, and why the others do not."""
    loaded: list[Candidate] = []
    unloadable: dict[str, str] = {}
    for model in models:
        try:
            loaded.append(_load_candidate(model, task, seed, recipe))
        except DataError as error:
            unloadable[model] = str(error)
        except (MemoryError, RuntimeError, ValueError) as error:  # of peft, or too large a model
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            unloadable[model] = f"the model {model!r} could not be loaded: {reason}"
    if len(loaded) < 2:
        raise DataError(
            f"{len(loaded)} of {len(models)} models can be used, and a choice needs two: "
            + "; ".join(unloadable.values())
        )
    return tuple(loaded), unloadable


def _load_candidate(model: str, task: Task, seed: int, recipe: Recipe) -> Candidate:
    tokenizer = load_tokenizer(model)
    version = model_version(model)
    parameters, trained = count_parameters(_loaded(model, task, tokenizer, seed, recipe))

    def tokens(rows: Examples) -> float:
        counted = encode(rows.part(0, _COUNTED), tokenizer, recipe.max_length)
        return _tokens(counted) / len(counted)

    return Candidate(model, version, parameters, trained, tokens(task.train), tokens(task.dev))


def stratified(rows: Examples, seed: int, regression: bool) -> list[int]:
    """Return an order of the rows in which the classes of any first few are in proportion.

    Of rows in an order drawn by the seed the k-th (from 0) of a class with n rows comes at
    (k + ½)/n.  Numbers to predict have no classes: there it is the order drawn.
    """
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).numpy()
    if regression:
        return order.tolist()
    labels = np.asarray(rows.labels)[order]
    places = np.empty(len(labels))
    for label in np.unique(labels):
        mine = np.flatnonzero(labels == label)
        places[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
    return order[np.argsort(places, kind="stable")].tolist()


def size_ladder(rows: int, target: int, budget: float, recipe: Recipe) -> tuple[int, ...]:
    """Return subsets from the largest that the budget allows down, each a quarter of the next.

    Quarters and not halves: all sizes together then cost a third more than the largest, and not
    twice as much.  Where that leaves fewer than three sizes above the smallest that makes sense
    (`smallest_rows`), the ratio is less, 2 at least; the largest is then less as well, so that all
    together cost no more, as long as three sizes are left.

    Raises:
        DataError: the budget is less than the smallest subset.
    """
    least, largest = smallest_rows(recipe), min(int(budget * target), rows)
    if largest < least:
        raise DataError(
            f"the budget {budget:g} of {target} rows is {largest}; a subset needs {least} rows or "
            "more: take a larger budget, or give the sizes"
        )
    fits = (_down_from(top, least) for top in range(largest, least - 1, -1))
    sizes = next(sizes for sizes in fits if sum(sizes) <= _TRAINING * largest)
    return sizes if len(sizes) >= _FEWEST else _down_from(largest, least)


def smallest_rows(recipe: Recipe) -> int:
    """Return how many rows an optimiser takes eight steps on, 16 at least."""
    batches = math.ceil(_STEPS / recipe.epochs)
    return max(SMALLEST, (batches - 1) * recipe.batch_size * recipe.gradient_accumulation + 1)


def _down_from(largest: int, least: int) -> tuple[int, ...]:
    span = largest / least
    ratio = min(_RATIO, max(2.0, span ** (1 / (_FEWEST - 1))))
    count = 1 + int(math.log(span) / math.log(ratio) + 1e-9)
    return tuple(round(largest / ratio**step) for step in reversed(range(count)))


def judged_rows(
    candidates: Sequence[Candidate], recipe: Recipe, target: int, sizes: Sequence[int]
) -> int:
    """Return how many dev rows are judged on, where no number is given.

    So many that judging a model once costs 0.5 % of training it on the target's rows, and 200 at
    least; but judging after all sizes costs a sixth of training on them at most, down to 80 rows.
    """
    training = sum(candidate.training_flops(1, recipe) for candidate in candidates)
    ratio = training / sum(candidate.judging_flops(1) for candidate in candidates)  # of a row
    rows = max(_FEWEST_JUDGED, int(_JUDGING * ratio * target))
    most = int(_MOST_JUDGING * ratio * sum(sizes) / len(sizes))
    return min(rows, max(most, _ALWAYS_JUDGED))


# The selection ----------------------------------------------------------------------------------

RUNS = "runs"  # in a live selection's folder: a file for each run
KERNELS = "kernels"  # files of Θ
RECORDS = "records.jsonl"  # the records of all runs, one a line
RESULT = "selection.json"
WINNER = "winner"  # the best model, fine-tuned on the target's rows


@dataclass(frozen=True)
class LiveSelection:
    """A live selection that has ended.

    Attributes:
        task: name of the data.
        train_rows, dev_rows: in the training data, and judged on.
        rank_by: the score forecast, "loss" or a name of `CLASS_SCORES` or `NUMBER_SCORES`.
        unloadable: model -> why it could not be loaded.
        search: settings, results and stops; `search.selection(method)` is what a method says.
            records: of all runs, see `RunRecord`; by size in the order run, then model, then seed.
        winner: record of the best model's run on the target's rows, where it was asked for; its
            cost is not in `flops`: it is what the choice was for.

    Example:
        >>> import jachess_ext as jx
        >>> live = jx.scaling.read_selection("runs")
        >>> sorted({record["size"] for record in live.records})
        [8, 16, 31]
    """

    task: str
    train_rows: int
    dev_rows: int
    rank_by: str
    unloadable: Mapping[str, str]
    search: Search
    records: list[dict[str, Any]]
    winner: dict[str, Any] | None = None

    @property
    def best(self) -> str:
        """The model to fine-tune."""
        return self.search.best()

    @property
    def share(self) -> float:
        """The largest subset that was run, as a share of the target."""
        return max(record["size"] for record in self.records) / self.search.target

    @property
    def stops(self) -> dict[str, str]:
        """Candidate -> why no further size of it was run."""
        search = self.search
        loaded = {model: search.stops.get(model, search.stop or "") for model in search.models}
        return loaded | dict(self.unloadable)

    @property
    def flops(self) -> dict[str, float]:
        """Operations by what they went into: training, judging, probe, features; spent: their sum.

        Beside them full_tuning, of training every candidate on the target's data and judging it
        once, and sub_tuning, the same on the largest subset.
        """
        parts = {
            name.removesuffix("_flops"): sum(record[name] for record in self.records)
            for name in COSTS
        }
        largest = max(record["size"] for record in self.records)
        each = (self.search.costs or {}).values()
        return parts | {
            "spent": sum(parts.values()),
            "full_tuning": sum(judging + row * self.search.target for judging, row in each),
            "sub_tuning": sum(judging + row * largest for judging, row in each),
        }

    @property
    def seconds(self) -> float:
        """Wall-clock time of all runs."""
        return sum(sum((record["seconds"] or {}).values()) for record in self.records)

    def selections(self) -> tuple[dict[str, Selection], dict[str, str]]:
        """Return the selection of every method that can rank, and for the others the reason."""
        said: dict[str, Selection] = {}
        missing: dict[str, str] = {}
        for method in METHODS:
            if method == "lensllm" and not self.search.kernels:
                missing[method] = "no kernel Θ was measured, which it reads; give --probe 32"
                continue
            try:
                said[method] = self.search.selection(method)
            except ValueError as error:
                missing[method] = str(error)
        return said, missing

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row for each run.

        Columns: candidate, size, seed, loss (what is extrapolated of `rank_by`), dev_loss,
        dev_score, cost (all FLOPs), steps, time (t), seconds, error.

        Raises:
            MissingExtra: pandas is not installed.
        """
        rows = [
            {
                "candidate": record["model"],
                "size": record["size"],
                "seed": record["seed"],
                "loss": ranked_loss(record, self.rank_by),
                "dev_loss": record["dev_loss"],
                "dev_score": record["dev_score"],
                "cost": sum(record[name] for name in COSTS),
                "steps": record["steps"],
                "time": record["time"],
                "seconds": sum((record["seconds"] or {}).values()),
                "error": record["error"],
            }
            for record in self.records
        ]
        return require("pandas").DataFrame(rows)

    def to_dict(self) -> Record:
        """Return the content of `selection.json`: choice, reasons, cost and state."""
        said, missing = self.selections()
        ranking = said[self.search.method].to_frame()
        return finite(
            {
                "best": self.best,
                "ranking": ranking.to_dict("records"),
                "ranks": {method: selection.ranking for method, selection in said.items()},
                "missing": missing,
                "stops": self.stops,
                "stop": self.search.stop,
                "share": self.share,
                "flops": self.flops,
                "seconds": self.seconds,
                "state": {
                    "task": self.task,
                    "train_rows": self.train_rows,
                    "dev_rows": self.dev_rows,
                    "rank_by": self.rank_by,
                    "unloadable": dict(self.unloadable),
                    "search": self.search.state(),
                    "winner": self.winner,
                },
            }
        )


def select_live(
    models: Sequence[str],
    task: Task | str,
    out: Path | str,
    *,
    keep_winner: bool = False,
    processes: int = 1,
    threads: int = 1,
    backend: str = "loky",
    progress: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> LiveSelection:
    """Fine-tune the candidates on subsets and rank them by the loss they will have in full.

    Runs that `out` has are not repeated: after a kill the same call goes on, to equal records.

    Args:
        models, task: as for `make_plan`.
        out: folder of records, kernels and result.
        keep_winner: whether the best model is fine-tuned on the target's rows and saved.
        processes, threads, backend: as for `compare.runs.run_all`.
        progress: told of every run, in a line of text.
        settings: further arguments of `make_plan`, those of `Search` among them.

    Returns:
        The selection, written to `out` as well.

    Raises:
        DataError: what was given cannot be used, and nothing was trained; or the runs ended before
            the method had sizes enough, and are kept.
        MissingExtra: transformers, scipy or another library is not installed.

    Example:
        >>> import jachess_ext as jx
        >>> live = jx.scaling.select_live(models, "train.csv:dev.csv", "runs", sizes=[8, 16, 31])
        >>> live.best in models
        True
    """
    for library in ("transformers", "accelerate", "scipy.stats", "sklearn", "pandas"):
        require(library)  # before hours of training, not after
    out = Path(out)
    progress("reading data and models")
    plan = make_plan(models, task, **settings)
    search = plan.search
    records: dict[Ask, Record] = {}

    def in_order() -> list[Record]:
        def place(ask: Ask) -> tuple[int, int, int]:
            return search.rounds.index(ask.rows), search.models.index(ask.model), ask.seed

        return [records[ask] for ask in sorted(records, key=place)]

    def usable(job: Job, record: Record) -> bool:
        from_json(record, RunRecord, "the record")
        if record["kernel"] is not None:
            read_kernel(out, record)
        return not record["lost"]

    def run_jobs(jobs: Sequence[Job]) -> Iterator[tuple[Job, Record]]:
        return run_all(
            jobs,
            run,
            out / RUNS,
            processes=processes,
            threads=threads,
            backend=backend,
            usable=usable,
            killed=killed,
        )

    with locked(out):
        while asks := search.open_runs():
            jobs = {plan.job(ask, out).name: (plan.job(ask, out), ask) for ask in asks}
            for job, record in run_jobs([job for job, _ in jobs.values()]):
                ask = jobs[job.name][1]
                records[ask] = record
                _tell(search, ask, record, plan.rank_by, out)
                write_results(out / RECORDS, in_order())
                progress(
                    f"{ask.model} on {ask.rows} rows: "
                    + (record["error"] or f"dev loss {record['dev_loss']:.4g}")
                )
        if len(search.failed) == len(search.models):
            raise DataError(f"no model could be trained; {next(iter(search.stops.values()))}")
        selection = LiveSelection(
            task=plan.task.name,
            train_rows=len(plan.task.train),
            dev_rows=len(plan.task.dev),
            rank_by=plan.rank_by,
            unloadable=plan.unloadable,
            search=search,
            records=in_order(),
        )
        try:
            search.selection()
        except ValueError as error:
            raise DataError(
                f"no ranking yet ({search.stop}): {error}; the runs are kept, and the same command "
                "with a larger budget goes on from them"
            ) from error
        write_json(out / RESULT, selection.to_dict())
        if keep_winner:
            progress(f"{selection.best} on {search.target} rows, to keep")
            selection = replace(selection, winner=_winner(plan, selection.best, out, run_jobs))
            write_json(out / RESULT, selection.to_dict())
    return selection


def _tell(search: Search, ask: Ask, record: Record, rank_by: str, folder: Path) -> None:
    if record["kernel"] is not None:
        search.kernels[ask] = _kernel(folder, record)
    search.tell(
        ask,
        ranked_loss(record, rank_by),
        cost=record["training_flops"] + record["judging_flops"],
        features=record["features"],
        features_cost=record["features_flops"],
        kernel_cost=record["probe_flops"],
        error=record["error"],
    )


def _kernel(folder: Path, record: Record) -> dict[str, Any]:
    """Return the kernel of a run as `Search.kernels` has it."""
    kernel = read_kernel(folder, record)
    return {
        "theta": _spectrum(torch.from_numpy(kernel["theta"])),
        "residual": torch.from_numpy(kernel["residual"]),
        "t": record["time"],
        "lr": record["learning_rate"] / len(kernel["labels"]),
    }


def _winner(
    plan: Plan,
    best: str,
    out: Path,
    run_jobs: Callable[[Sequence[Job]], Iterator[tuple[Job, Record]]],
) -> Record:
    """Return the record of the best model on the target's rows, and save that model."""
    job = plan.job(Ask(best, plan.search.target, plan.search.seed), out, keep=out / WINNER)
    try:
        kept = (out / WINNER / _RUN).read_text(encoding="utf-8") == job.name
    except OSError:
        kept = False
    if not kept:  # its record alone is not enough
        (out / RUNS / f"{job.name}.json").unlink(missing_ok=True)
    ((_, record),) = run_jobs([job])
    return record


def read_selection(folder: Path | str) -> LiveSelection:
    """Read a finished live selection from its folder.

    Raises:
        DataError: it has not finished, or a file is not whole.

    Example:
        >>> import jachess_ext as jx
        >>> len(jx.scaling.read_selection("runs").records)
        6
    """
    folder = Path(folder)
    path = folder / RESULT
    if not path.exists():
        raise DataError(
            f"{path} is not there; the selection may not have finished: run it again, and it goes "
            "on where it was stopped"
        )
    state = from_json(read_json(path), dict[str, Any], str(path)).get("state")
    state = dict(from_json(state, dict[str, Any], f"{path}: the state"))
    state["search"] = search = Search.from_state(state.get("search"))
    state["records"] = [
        asdict(from_json(record, RunRecord, f"{folder / RECORDS}: a record"))
        for record in read_results(folder / RECORDS)
    ]
    selection: LiveSelection = from_json(state, LiveSelection, f"{path}: the state")
    for record in selection.records:
        if record["kernel"] is not None:
            ask = Ask(record["model"], record["size"], record["seed"])
            search.kernels[ask] = _kernel(folder, record)
    return selection
