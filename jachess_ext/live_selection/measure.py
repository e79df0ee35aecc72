"""One run: fine-tune a model on a subset, judge it, and measure its kernel on the probe."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from ..evaluation.judge import model_outputs
from ..experiment.fine_tune import fine_tune
from ..ntk import Measurement, measure_ntk, ntk_loss
from ..ntk.contraction import Choice
from ..scaling.cost import OPERATIONS
from ..tasks.batches import Batch, Encoded, encode
from ..tasks.models import load_model, load_tokenizer
from .jobs import SubsetJob
from .records import Floats, Kernel, RunRecord, Seconds

TRAIN_ROWS = 256
"""Rows of the subset that the training loss is measured on after training, at most."""

_FORWARD = 2.0  # operations per parameter and token; a backward pass to the inputs costs as much
_BATCH = 64


class LearningRates(transformers.TrainerCallback):
    """Sums the learning rates of the optimiser's steps.

    Attributes:
        steps: how many there were.
        total: Σ_s η_s.
    """

    def __init__(self) -> None:
        self.steps, self.total = 0, 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The rate this step is about to use."""
        self.steps += 1
        self.total += float(kwargs["optimizer"].param_groups[0]["lr"])


def run(job: SubsetJob) -> tuple[RunRecord, Kernel | None]:
    """The record of a run and its kernel, the same on every call but for the seconds.

    A run whose loss is not finite is recorded with its `error` and without losses and kernel.
    """
    tokenizer = load_tokenizer(job.model)
    model = load_model(job.model, job.task.outputs, tokenizer, job.seed)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    train, dev, probe = (
        encode(part, tokenizer, job.recipe.max_length)
        for part in (job.task.train, job.task.dev, job.probe)
    )
    start = time.perf_counter()
    residual = _residual(model, probe)
    rates = LearningRates()
    record = _head(job, model, train)
    try:
        if job.size:
            fine_tune(model, train, job.recipe, seed=job.seed, callbacks=[rates])
            model.eval()
        trained = time.perf_counter()
        peak = job.recipe.learning_rate
        record = replace(record, steps=rates.steps, time=rates.total / peak)
        record = _judged(record, job, model, train, dev)
        judged = time.perf_counter()
        record, kernel = _probed(record, model, probe, residual)
    except FloatingPointError as error:
        return replace(_head(job, model, train), error=str(error)), None
    seconds = Seconds(trained - start, judged - trained, time.perf_counter() - judged)
    return replace(record, seconds=seconds), kernel


def _head(job: SubsetJob, model: Any, train: Encoded) -> RunRecord:
    parameters, tokens = count_parameters(model), _tokens(train)
    return RunRecord(
        run=job.name,
        model=job.model,
        parameters=parameters,
        size=job.size,
        epochs=job.recipe.epochs,
        steps=0,
        seed=job.seed,
        learning_rate=job.recipe.learning_rate,
        time=0.0,
        tokens=tokens,
        metric=job.task.metric.name,
        training_flops=OPERATIONS * parameters * tokens * job.recipe.epochs,
    )


def count_parameters(model: Any) -> int:
    """N: all of the model's, its head's too."""
    return sum(parameter.numel() for parameter in model.parameters())


def _tokens(data: Encoded) -> int:
    return sum(len(row["input_ids"]) for row in data.rows)


# Losses -----------------------------------------------------------------------------------------


def _judged(
    record: RunRecord, job: SubsetJob, model: Any, train: Encoded, dev: Encoded
) -> RunRecord:
    probabilities, labels = _outputs(model, dev)
    few = Encoded(train.rows[:TRAIN_ROWS], train.labels[:TRAIN_ROWS], train.tokenizer)
    return replace(
        record,
        dev_loss=_likelihood_loss(probabilities, labels),
        dev_score=job.task.metric(probabilities.argmax(1), labels),
        train_loss=_likelihood_loss(*_outputs(model, few)) if job.size else None,
        judging_flops=_FORWARD * record.parameters * (_tokens(dev) + _tokens(few)),
    )


def _outputs(model: Any, data: Encoded) -> tuple[Floats, Floats]:
    """Class probabilities [n, C] and labels [n], shortest rows first."""
    data = data.by_length()
    found = model_outputs(model, data.in_order(_BATCH), regression=False)
    return found, np.asarray(data.labels, dtype=np.int64)


def _likelihood_loss(probabilities: Floats, labels: Floats) -> float:
    """−mean ln p(label); a probability that underflows counts as the smallest number."""
    chosen = probabilities[np.arange(len(labels)), labels]
    return float(-np.log(np.maximum(chosen, np.finfo(np.float64).tiny)).mean())


# The probe --------------------------------------------------------------------------------------


@torch.no_grad()
def _residual(model: Any, probe: Encoded) -> Tensor:
    """f(X) − y: logits minus one-hot labels, [n, C], in double precision on the CPU."""
    batch = _on_device(model, probe)
    labels = batch.pop("labels")
    logits = model(**batch).logits.double().cpu()
    return logits - torch.nn.functional.one_hot(labels.cpu(), logits.shape[1])


def _on_device(model: Any, probe: Encoded) -> Batch:
    device = next(model.parameters()).device
    batch = probe.batch(list(range(len(probe))))
    return {name: value.to(device) for name, value in batch.items()}


def _probed(
    record: RunRecord, model: Any, probe: Encoded, residual: Tensor
) -> tuple[RunRecord, Kernel]:
    """Θ and F; the training loss is a mean, so η of Eq. 9 is the rate over the rows n of the probe.

    Gradient flow on (1/n) Σ_i ½‖f(x_i) − y_i‖² moves f by −(η/n) Θ (f − y) a step.
    """
    found = measure_ntk(model, _on_device(model, probe), outputs="logits", progress=False)
    rows, outputs = residual.shape
    kernel = Kernel(
        theta=found.theta.float().cpu().numpy(),
        residual=residual.numpy(),
        eigenvalues=np.zeros(rows * outputs),
        labels=np.asarray(probe.labels, dtype=np.int64),
    )
    spectrum = kernel.spectrum()
    made = replace(
        record,
        kernel=f"{record.run}.npz",
        kernel_loss=float(ntk_loss(spectrum, residual, record.time, flow_rate(record, rows))),
        residual_square=float(residual.square().sum()),
        probe_square=float(_residual(model, probe).square().sum()),
        probe_flops=_probe_flops(found, record.parameters, _tokens(probe)),
    )
    return made, replace(kernel, eigenvalues=spectrum.eigenvalues.numpy())


def flow_rate(record: RunRecord, rows: int) -> float:
    """η of Eq. 9 for a kernel of so many rows: the learning rate over them."""
    return record.learning_rate / rows


def _probe_flops(found: Measurement, parameters: int, tokens: int) -> float:
    """A forward pass, a backward pass to the inputs for every output, and the contractions."""
    report = found.report
    passes = _FORWARD * parameters * tokens * (1 + report.outputs)
    return passes + report.blocks * sum(map(_contraction_flops, report.choices))


def _contraction_flops(choice: Choice) -> float:
    """Of the form chosen; the others (norms, embeddings) are small and not counted."""
    if choice.cost is None:
        return 0.0
    return choice.cost.gram_flops if choice.form == "A" else choice.cost.materialise_flops
