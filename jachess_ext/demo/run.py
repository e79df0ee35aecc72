"""The demo from start to end: data, model, fine-tuning by every method and seed, judgement."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import datetime, timezone
from typing import Any

import torch

from .._io import DataError, require
from ..compare.judge import judge, layer_norms
from ..compare.models import (
    Encoded,
    check_corruptible,
    check_tokens,
    encode,
    load_model,
    load_tokenizer,
)
from ..compare.tasks import Task, file_task, hub_task
from ..smoothness.corruption import embedding_scale
from .data import ASSETS, docstring_task
from .finetune import Trainer, finetune_in_turns
from .judge import CONDITIONS, DELTAS
from .options import Options
from .results import Outcome, Run

_LARGEST_DEV = 1200  # of the user's own data: the demo ends in minutes


def load_task(options: Options) -> Task:
    """The task the options name.

    Raises:
        DataError: it cannot be had, or the options contradict one another.
    """
    if options.dataset is not None:
        if options.train or options.dev:
            raise DataError("give either --dataset or --train with --dev, not both")
        task = hub_task(options.dataset, options.columns)
        if task.regression:
            raise DataError(
                f"{options.dataset} is a regression task; the demo compares classifiers"
            )
        return _shortened(task, options)
    if options.train is None and options.dev is None:
        return docstring_task(options.train_size, options.unlabelled_size, options.dev_size)
    if options.train is None or options.dev is None:
        raise DataError("--train and --dev go together: one file to train on, one to judge on")
    return _shortened(file_task(options.train, options.dev, options.columns), options)


def _shortened(task: Task, options: Options) -> Task:
    """At most `_LARGEST_DEV` dev examples, fewer in a quick run."""
    quick = options.dev_size < Options.dev_size
    return replace(task, dev=task.dev.part(0, options.dev_size if quick else _LARGEST_DEV))


def run(options: Options, progress: bool = False) -> Outcome:
    """Fine-tunes by every method from every seed and judges each model; writes nothing.

    Raises:
        DataError: the data or the model cannot be used.
        MissingExtra: a library the demo needs is not installed.
    """
    torch.set_num_threads(max(1, options.threads))
    task = load_task(options)
    source = options.model or ASSETS
    tokenizer = load_tokenizer(source)
    check_corruptible(tokenizer, source)
    check_tokens(task, task, tokenizer)
    train, unlabelled, dev = (
        encode(part, tokenizer, options.max_length)
        for part in (task.train, task.unlabelled, task.dev)
    )
    baseline = _naive_bayes_score(task)
    base = load_model(source, len(task.classes), tokenizer, seed=0)
    before, scale = layer_norms(base, dev), embedding_scale(base)
    steps = options.seeds * len(options.methods) * (options.recipe.steps + 1)
    bar = require("tqdm").tqdm(total=steps, unit="step", disable=not progress)
    runs: list[Run] = []
    for seed in range(options.seeds):
        trainers = [
            Trainer(
                load_model(source, len(task.classes), tokenizer, seed),
                *(method, options.recipe, train, unlabelled, seed),
            )
            for method in options.methods
        ]
        bar.set_description(f"fine-tuning, seed {seed + 1} of {options.seeds}")
        logs = finetune_in_turns(trainers, bar.update)
        bar.set_description(f"judging, seed {seed + 1} of {options.seeds}")
        for trainer, log in zip(trainers, logs, strict=True):
            judgement = judge(trainer.model, dev, task.metric, scale, CONDITIONS)
            runs.append(Run(trainer.method, seed, log, judgement))
            bar.update()
    bar.close()
    return Outcome(
        task=task.description,
        score_name=task.metric.name,
        runs=runs,
        before=before,
        naive_bayes=baseline,
        setting=_setting(options, task, train, base, scale),
    )


def _naive_bayes_score(task: Task) -> float | None:
    """A baseline: multinomial naive Bayes on words and word pairs; None for tasks of text pairs."""
    if task.train.pairs is not None:
        return None
    vectoriser = require("sklearn.feature_extraction.text").CountVectorizer(
        ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b"
    )
    counts = vectoriser.fit_transform(task.train.texts)
    classifier = require("sklearn.naive_bayes").MultinomialNB().fit(counts, task.train.labels)
    predictions = classifier.predict(vectoriser.transform(task.dev.texts))
    return task.metric(predictions, task.dev.labels)


def _setting(
    options: Options, task: Task, train: Encoded, model: Any, scale: float
) -> dict[str, Any]:
    """What was run, for the report: enough to run it again."""
    return {
        "task": task.name,
        "classes": list(task.classes),
        "training examples": len(train),
        "unlabelled examples": len(task.unlabelled),
        "dev examples": len(task.dev),
        "model": options.model or "the encoder shipped with the demo",
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": model.config.num_hidden_layers,
        "seeds": options.seeds,
        "recipe": asdict(options.recipe),
        "embedding rms, the unit of δ": scale,
        "deltas": list(DELTAS),
        "torch": torch.__version__,
        "transformers": require("transformers").__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
