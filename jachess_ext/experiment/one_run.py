"""One run: fine-tune a model by one method from one seed, and judge it."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..evaluation.files import whole_folder
from ..evaluation.judge import Judgement, judge
from ..evaluation.report import finite
from ..evaluation.robustness import embedding_scale
from ..tasks.batches import Encoded, encode
from ..tasks.examples import Examples
from ..tasks.models import load_model, load_tokenizer
from ..training import with_lora
from .fine_tune import fine_tune
from .jobs import Job, Record


def run(job: Job, models: Path | None = None) -> tuple[Record, dict[str, float]]:
    """The record of a run, the same on every call; and its seconds, which are not.

    A run whose loss is not finite is recorded with its `error` and without figures.

    Args:
        models: folder to save the fine-tuned model in, below the run's name; None: not saved.
    """
    tokenizer = load_tokenizer(job.model)
    model = load_model(
        *(job.model, job.task.outputs, tokenizer, job.seed), regression=job.task.regression
    )
    scale = embedding_scale(model)
    if job.recipe.lora:
        model = with_lora(model, seed=job.seed)
    start = time.perf_counter()
    record = _head(job)
    try:
        _train(job, model, tokenizer)
        trained = time.perf_counter()
        record |= finite(_figures(job, model, tokenizer, scale))
    except FloatingPointError as error:
        return record | {"error": str(error)}, {}
    seconds = {"training": trained - start, "judging": time.perf_counter() - trained}
    if models is not None:
        with whole_folder(models / job.name) as folder:
            _with_all_weights(model, job).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    return record, seconds


def _with_all_weights(model: Any, job: Job) -> Any:
    """What has to be saved: TAPT changes the weights below LoRA's adapters, too."""
    return model.merge_and_unload() if job.recipe.lora and job.arguments.method == "tapt" else model


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
        "settings": asdict(job.arguments),
        "recipe": asdict(job.recipe),
        "score": None,
        "brier": None,
        "ece": None,
        "error": None,
    }


def _train(job: Job, model: Any, tokenizer: Any) -> None:
    train, unlabelled = (
        encode(part, tokenizer, job.recipe.max_length)
        for part in (job.task.train, job.task.unlabelled)
    )
    fine_tune(
        *(model, train, job.recipe),
        seed=job.seed,
        method=job.arguments,
        unlabelled=unlabelled,
    )


def _figures(job: Job, model: Any, tokenizer: Any, scale: float) -> Record:
    def encoded(examples: Examples) -> Encoded:
        return encode(examples, tokenizer, job.recipe.max_length)

    regression = job.task.regression
    found = judge(
        model,
        encoded(job.task.dev),
        job.task.metric,
        scale,
        job.conditions,
        regression=regression,
    )
    return figures_of(found, job.conditions) | {
        "shift": {
            target.name: _shift_figures(job, model, encoded(target.dev), target)
            for target in job.shift
        }
    }


def _shift_figures(job: Job, model: Any, dev: Encoded, target: Any) -> Record:
    bare = replace(job.conditions, corruption=(), deltas=(), sequences=0)
    found = judge(model, dev, target.metric, 1.0, bare, regression=target.regression)
    return {"score": found.score, "brier": found.brier, "ece": found.ece}


def figures_of(found: Judgement, conditions: Any) -> Record:
    """A judgement as plain numbers; the bins of its reliability diagram stand for its outputs."""
    diagram = found.diagram
    return {
        "score": found.score,
        "brier": found.brier,
        "ece": found.ece,
        "corrupted": dict(zip(map(str, conditions.corruption), found.corrupted, strict=True)),
        "noisy": dict(zip(map(str, conditions.deltas), found.noisy, strict=True)),
        "jacobian": found.jacobian,
        "hessian": found.hessian,
        "reliability": None
        if diagram is None
        else {
            "edges": diagram.edges,
            "confidence": diagram.confidence,
            "accuracy": diagram.accuracy,
            "counts": diagram.counts,
        },
    }
