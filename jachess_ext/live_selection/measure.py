"""One run: fine-tune a model on a subset and judge it; Θ and frozen features where asked for."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from ..evaluation.files import whole_folder, write_atomically
from ..evaluation.judge import model_outputs
from ..experiment.fine_tune import fine_tune
from ..ntk import Measurement, measure_ntk, ntk_loss
from ..tasks.batches import Batch, Encoded, encode
from ..tasks.models import load_model, load_tokenizer
from ..training import with_lora
from .cost import FORWARD, training_flops
from .features import frozen_features
from .jobs import SubsetJob
from .records import Kernel, RunRecord, Seconds
from .scores import class_scores, number_scores
from .store import RUN
from .transferability import SCORES

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


def run(job: SubsetJob, keep: Path | None = None) -> tuple[RunRecord, Kernel | None]:
    """The record of a run and its kernel, the same on every call but for the seconds.

    A run that fails, whatever for, is recorded with its `error` and without losses and kernel: the
    other candidates go on without it.

    Args:
        keep: folder to save the fine-tuned model and its tokenizer in; None: they are not saved.
    """
    record = _head(job)
    try:
        tokenizer = load_tokenizer(job.model)
        model = new_model(job, tokenizer)
        rows = {
            name: encode(part, tokenizer, job.recipe.max_length)
            for name, part in (
                *(("train", job.task.train), ("dev", job.task.dev)),
                *(("probe", job.probe), ("features", job.features)),
            )
        }
        parameters, trained = count_parameters(model)
        tokens, recipe = _tokens(rows["train"]), job.recipe
        flops = training_flops(
            *(parameters, trained, tokens, recipe.epochs, recipe.gradient_checkpointing)
        )
        record = replace(record, parameters=parameters, tokens=tokens, training_flops=flops)
        found = _run(record, job, model, rows)
    except FloatingPointError as error:
        return replace(record, error=str(error)), None
    except Exception as error:  # a candidate's code raises many kinds; to the others they are one
        return replace(record, error=_reason(error), lost=True), None
    if keep is not None:
        with whole_folder(keep) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            write_atomically(folder / RUN, job.name)
    return found


def killed(job: SubsetJob) -> tuple[RunRecord, None]:
    """What is kept of a run whose process was killed every time."""
    return replace(
        _head(job), error="its process was killed, perhaps out of memory", lost=True
    ), None


def new_model(job: SubsetJob, tokenizer: Any) -> Any:
    """The model before fine-tuning, in evaluation mode, on the GPU where there is one."""
    outputs, regression = job.task.outputs, job.task.regression
    model = load_model(job.model, outputs, tokenizer, job.seed, regression=regression)
    if job.recipe.lora:
        model = with_lora(model, seed=job.seed)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _reason(error: Exception) -> str:
    words = (str(error).strip() or type(error).__name__).splitlines()[0]
    full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in words
    if full and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return f"out of memory ({words})" if full else f"{type(error).__name__}: {words}"


def _run(
    record: RunRecord, job: SubsetJob, model: Any, rows: dict[str, Encoded]
) -> tuple[RunRecord, Kernel | None]:
    residual = _residual(model, rows["probe"]) if len(job.probe) else None
    start = time.perf_counter()
    if len(job.features):
        record = _with_features(record, job, model, rows["features"])
    rates = LearningRates()
    if job.size:
        fine_tune(model, rows["train"], job.recipe, seed=job.seed, callbacks=[rates])
        model.eval()
    trained = time.perf_counter()
    peak = job.recipe.learning_rate
    record = replace(record, steps=rates.steps, time=rates.total / peak)
    kernel = None
    record = _judged(record, job, model, rows["dev"])
    judged = time.perf_counter()
    if residual is not None:
        record, kernel = _probed(record, model, rows["probe"], residual)
    seconds = Seconds(trained - start, judged - trained, time.perf_counter() - judged)
    return replace(record, seconds=seconds), kernel


def _head(job: SubsetJob) -> RunRecord:
    return RunRecord(
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


def count_parameters(model: Any) -> tuple[int, int]:
    """N, all of the model's with its head's (and LoRA's adapters), and those that are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def _tokens(data: Encoded) -> int:
    return sum(len(row["input_ids"]) for row in data.rows)


# Losses -----------------------------------------------------------------------------------------


def _judged(record: RunRecord, job: SubsetJob, model: Any, dev: Encoded) -> RunRecord:
    dev = dev.by_length()
    found = model_outputs(model, dev.in_order(_BATCH), regression=job.task.regression)
    if job.task.regression:
        labels, said = np.asarray(dev.labels, dtype=np.float64), found[:, 0]
        loss, scores = float(((said - labels) ** 2).mean()), number_scores(said, labels)
    else:
        labels, said = np.asarray(dev.labels, dtype=np.int64), found.argmax(1)
        chosen = found[np.arange(len(labels)), labels]
        # a probability that underflows counts as the smallest number
        loss = float(-np.log(np.maximum(chosen, np.finfo(np.float64).tiny)).mean())
        scores = class_scores(found, labels)
    return replace(
        record,
        dev_loss=loss,
        dev_score=job.task.metric(said, labels),
        scores=scores,
        dev_rows=len(dev),
        judging_flops=FORWARD * record.parameters * _tokens(dev),
    )


def _with_features(record: RunRecord, job: SubsetJob, model: Any, data: Encoded) -> RunRecord:
    found, labels = frozen_features(model, data, _BATCH), np.asarray(data.labels)
    regression = job.task.regression
    names = [name for name in SCORES if not (regression and name == "hscore")]
    return replace(
        record,
        features={name: SCORES[name](found, labels, regression) for name in names},
        features_flops=FORWARD * record.parameters * _tokens(data),
    )


# The probe --------------------------------------------------------------------------------------


@torch.no_grad()
def _residual(model: Any, probe: Encoded) -> Tensor:
    """f(X) − y: logits minus one-hot labels (or the numbers), [n, C], in fp64 on the CPU."""
    batch = _on_device(model, probe)
    labels = batch.pop("labels").cpu()
    logits = model(**batch).logits.double().cpu()
    if labels.is_floating_point():
        return logits - labels[:, None]
    return logits - torch.nn.functional.one_hot(labels, logits.shape[1])


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
        labels=np.asarray(probe.labels),
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
    """Forward passes for r, Θ and the residual after training; a backward pass an output; and the
    contractions."""
    report = found.report
    passes = FORWARD * parameters * tokens * (3 + report.outputs)
    counted = (
        choice.cost.gram_flops if choice.form == "A" else choice.cost.materialise_flops
        for choice in report.choices
        if choice.cost is not None  # norms and embeddings are small
    )
    return passes + report.blocks * sum(counted)
