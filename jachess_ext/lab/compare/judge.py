"""Evaluate a fine-tuned model: score, calibration, robustness, smoothness, domain shift."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..._io import finite
from ...models import in_mode, on_device_of, without_labels
from ...smoothness import decision_slopes, smoothness
from ...training.corruption import corrupt_tokens, perturbed_embeddings, unknown_token_id
from ..attack import Candidates, attack_words, candidates_from
from ..workbench.metrics import Floats, Metric
from ..workbench.models import Batch, Encoded, Model, encode
from ..workbench.tasks import Examples, Task
from ..workbench.training import model_outputs
from .metrics import Labels, apply_temperature, class_figures, fit_temperature, reliability
from .noise import add_text_noise
from .records import Figures
from .settings import Conditions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SMOOTHNESS_SEED = 20_000


def judge_task(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    scale: float,
    task: Task,
    shift: Sequence[Task],
    conditions: Conditions,
    max_length: int,
) -> Figures:
    """Evaluate a model on a task, on other tasks, and under a word attack.

    Args:
        model: a sequence classifier or regressor.
        tokenizer: tokenizer of the model.
        scale: standard deviation of the embedding noise for δ = 1.
        task: the task.
        shift: other tasks, on whose dev rows the model is evaluated without noise.
        conditions: conditions of the evaluation, including the attack.
        max_length: number of tokens that texts are truncated to.
    """

    def encode_rows(examples: Examples) -> Encoded:
        return encode(examples, tokenizer, max_length)

    def judge_shift(target: Task) -> dict[str, float | None]:
        rows, clean = encode_rows(target.dev), conditions.clean_only
        judged = judge(model, rows, target.metric, scale, clean, is_regression=target.is_regression)
        return {"score": judged.score, "brier": judged.brier, "ece": judged.ece}

    figures = judge(
        model,
        encode_rows(task.dev),
        task.metric,
        scale,
        conditions,
        is_regression=task.is_regression,
        validation=None if task.validation is None else encode_rows(task.validation),
        perturbed={
            noise: encode_rows(add_text_noise(task.dev, noise, conditions.text_share))
            for noise in conditions.texts
        },
    )
    figures = replace(figures, shift={target.name: judge_shift(target) for target in shift})
    if conditions.attack is None:
        return figures
    candidates = candidates_from(conditions.attack, model, tokenizer)
    attack = attack_figures(model, tokenizer, task.dev, candidates, conditions, max_length)
    return replace(figures, attack=finite(attack), attack_candidates=candidates.source)


def attack_figures(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    candidates: Candidates,
    conditions: Conditions,
    max_length: int,
) -> dict[str, float | None]:
    """Attack `conditions.attack_rows` of the examples; return figures of the attack.

    Args:
        model: a sequence classifier.
        tokenizer: tokenizer of the model.
        examples: rows to choose from, evenly spaced.
        candidates: candidates of the replacement of words.
        conditions: settings of the attack.
        max_length: number of tokens that texts are truncated to.

    Returns:
        `Attacked.figures`, and ``of``, the number of rows chosen.
    """
    # evenly spaced, as files are often sorted by class
    num_rows = min(conditions.attack_rows or len(examples), len(examples))
    rows = examples.take([i * len(examples) // num_rows for i in range(num_rows)])
    attacked = attack_words(
        model,
        tokenizer,
        rows.rows,
        [int(label) for label in rows.labels],
        candidates,
        share=conditions.attack_share,
        tries=conditions.attack_tries,
        max_length=max_length,
        batch=conditions.batch,
    )
    return {"of": float(num_rows), **attacked.figures}


def judge(
    model: Model,
    dev: Encoded,
    metric: Metric,
    scale: float,
    conditions: Conditions = Conditions(),  # noqa: B008  frozen
    is_regression: bool = False,
    *,
    validation: Encoded | None = None,
    perturbed: Mapping[str, Encoded] | None = None,
) -> Figures:
    """Evaluate a model on dev rows; return all figures except ``shift`` and ``attack``.

    Args:
        model: a sequence classifier or regressor.
        dev: rows to evaluate on.
        metric: metric of the score.
        scale: standard deviation of the embedding noise for δ = 1.
        conditions: conditions of the evaluation.
        is_regression: whether the model predicts a number.
        validation: rows to fit the temperature to; None for no temperature scaling.
        perturbed: kind of change of the texts -> the rows of `dev` with changed texts.

    Examples:
        >>> from jachess_ext.lab.workbench.metrics import ACCURACY
        >>> from jachess_ext.lab.workbench.models import load_model, load_tokenizer
        >>> from jachess_ext.lab.demo import ASSETS
        >>> tokenizer = load_tokenizer(ASSETS)
        >>> model = load_model(ASSETS, 2, tokenizer, seed=0)
        >>> films = encode(Examples(["a good film", "a bad film"], None, [1, 0]), tokenizer, 16)
        >>> figures = judge(model, films, ACCURACY, 1.0, Conditions(corruption=(0.2,), deltas=()))
        >>> list(figures.corrupted), len(figures.jacobian) == model.config.num_hidden_layers
        (['0.2'], True)
    """
    # Every model is evaluated on the same batches with the same random draws: seeds depend only on
    # the number of the draw.  So differences between methods are not due to different noise.
    dev = dev.by_length()
    clean = list(dev.in_order(conditions.batch))
    labels = np.asarray(dev.labels)
    accuracies: dict[str, float] = {}

    def score(draws: list[Floats], condition: str = "", labels: Labels = labels) -> float:
        """Return the mean score over draws of outputs, and store the accuracy of the condition."""
        predictions = [p[:, 0] if is_regression else p.argmax(1) for p in draws]
        if condition and not is_regression:
            accuracies[condition] = float(np.mean([(p == labels).mean() for p in predictions]))
        return float(np.mean([metric(p, labels) for p in predictions]))

    def outputs_of(batches: Iterable[Batch]) -> Floats:
        device = next(model.parameters()).device.type
        with torch.autocast(device, torch.bfloat16, enabled=conditions.bf16):
            return model_outputs(model, batches, is_regression)

    def corrupted_score(share: float) -> float:
        draws = (corrupt_batches(clean, dev.tokenizer, share, d) for d in range(conditions.draws))
        return score([outputs_of(batches) for batches in draws], f"corrupted {share}")

    def noisy_score(delta: float) -> float:
        draws = []
        for draw in range(conditions.draws):
            generator = torch.Generator().manual_seed(2000 + draw)
            with perturbed_embeddings(model, delta * scale, generator):
                draws.append(outputs_of(clean))
        return score(draws, f"noisy {delta}")

    def perturbed_score(noise: str, rows: Encoded) -> float:
        rows = rows.by_length()
        outputs = outputs_of(rows.in_order(conditions.batch))
        return score([outputs], noise, np.asarray(rows.labels))

    outputs = model_outputs(model, clean, is_regression)  # never under autocast
    clean_score = score([outputs])
    scaled = None
    if validation is not None and not is_regression:
        # the temperature is fitted to other rows: fitted to the dev rows, it would hide some of
        # their miscalibration
        rows = validation.by_length()
        probabilities = model_outputs(model, rows.in_order(conditions.batch), False)
        temperature = fit_temperature(probabilities, np.asarray(rows.labels))
        scaled_figures = class_figures(apply_temperature(outputs, temperature), labels)
        scaled = {"temperature": temperature, **scaled_figures}
    norms = layer_norms(model, dev, conditions.sequences) if conditions.layers else ([], [])
    answers = [labels.mean()] if is_regression else np.unique(labels)
    figures = {
        "score": clean_score,
        "constant": max(metric(np.full(len(labels), value), labels) for value in answers),
        **({} if is_regression else class_figures(outputs, labels)),
        "scaled": scaled,
        "corrupted": {str(share): corrupted_score(share) for share in conditions.corruption},
        "noisy": {str(d): noisy_score(d) if d else clean_score for d in conditions.deltas},
        "perturbed": {k: perturbed_score(k, rows) for k, rows in (perturbed or {}).items()},
        "accuracies": accuracies,
        "jacobian": norms[0],
        "hessian": norms[1],
        "slopes": slopes(model, dev, 0 if is_regression else conditions.sequences),
        "reliability": None if is_regression else vars(reliability(outputs, labels)),
    }
    return Figures(**finite(figures))


def corrupt_batches(
    batches: Sequence[Batch], tokenizer: PreTrainedTokenizerBase, share: float, draw: int
) -> list[Batch]:
    """Replace a share of the tokens of batches by the unknown token; `draw` gives the seed."""
    generator = torch.Generator().manual_seed(1000 + draw)
    special = torch.tensor(tokenizer.all_special_ids)
    unknown = unknown_token_id(tokenizer)
    assert unknown is not None  # `finetune.load` refuses the grid otherwise

    def corrupt_ids(batch: Batch) -> torch.Tensor:
        return corrupt_tokens(
            batch["input_ids"],
            batch["attention_mask"],
            share,
            unknown=unknown,
            special_ids=special,
            generator=generator,
            padding=tokenizer.pad_token_id,
        )

    return [{**batch, "input_ids": corrupt_ids(batch)} for batch in batches]


def slopes(model: Model, rows: Encoded, sequences: int = 32) -> dict[str, float]:
    """Return `decision_slopes` on `sequences` evenly spaced rows; {} for 0 sequences."""
    batch = _sample(model, rows, sequences)
    return {} if batch is None else decision_slopes(model, batch)


@torch.no_grad()
def layer_norms(model: Model, rows: Encoded, num_rows: int = 32) -> tuple[list[float], list[float]]:
    """Return the mean ‖J‖ and ‖H‖ of each of K layers, [K] each, over evenly spaced rows.

    Args:
        model: the model.
        rows: rows to choose from.
        num_rows: number of rows; 0 returns empty lists.
    """
    batch = _sample(model, rows, num_rows)
    if batch is None:
        return [], []
    with in_mode(model, training=False):
        norms = smoothness(model, without_labels(batch), seed=_SMOOTHNESS_SEED)
    assert norms.hessian is not None  # hessian=True is the default
    return norms.jacobian.tolist(), norms.hessian.tolist()


def _sample(model: Model, rows: Encoded, num_rows: int) -> Batch | None:
    """Return a batch of evenly spaced rows (of all lengths, if sorted); None for 0 rows."""
    count = min(num_rows, len(rows))
    if count == 0:
        return None
    return on_device_of(model, rows.batch([i * len(rows) // count for i in range(count)]))
