"""Judge a fine-tuned model: score, calibration, robustness, smoothness, other tasks' rows."""

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
    """Return the figures of a model on a task, see `judge`, and on the clean rows of other tasks.

    Args:
        scale: embedding noise of δ = 1, in the units of the embedding's entries.
        shift: the other tasks.
        conditions: how the model is judged, under an attack as well.
        max_length: tokens that texts are cut to.
    """

    def encoded(examples: Examples) -> Encoded:
        return encode(examples, tokenizer, max_length)

    def on(target: Task) -> dict[str, float | None]:
        rows, bare = encoded(target.dev), conditions.clean_only
        figures = judge(model, rows, target.metric, scale, bare, regression=target.regression)
        return {"score": figures.score, "brier": figures.brier, "ece": figures.ece}

    figures = judge(
        model,
        encoded(task.dev),
        task.metric,
        scale,
        conditions,
        regression=task.regression,
        validation=None if task.validation is None else encoded(task.validation),
        perturbed={
            noise: encoded(add_text_noise(task.dev, noise, conditions.text_share))
            for noise in conditions.texts
        },
    )
    figures = replace(figures, shift={target.name: on(target) for target in shift})
    if conditions.attack is None:
        return figures
    candidates = candidates_from(conditions.attack, model, tokenizer)
    done = attack_figures(model, tokenizer, task.dev, candidates, conditions, max_length)
    return replace(figures, attack=finite(done), attack_candidates=candidates.source)


def attack_figures(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    candidates: Candidates,
    conditions: Conditions,
    max_length: int,
) -> dict[str, float | None]:
    """Return the figures of a word attack on the rows that the conditions name.

    These are `Attacked.figures`, and ``of``, the number of rows they are of.
    """
    # at even distances, since files are often sorted by class
    count = min(conditions.attack_rows or len(examples), len(examples))
    rows = examples.take([i * len(examples) // count for i in range(count)])
    done = attack_words(
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
    return {"of": float(count), **done.figures}


def judge(
    model: Model,
    dev: Encoded,
    metric: Metric,
    scale: float,
    conditions: Conditions = Conditions(),  # noqa: B008  frozen
    *,
    regression: bool = False,
    validation: Encoded | None = None,
    perturbed: Mapping[str, Encoded] | None = None,
) -> Figures:
    """Return the figures of a model on dev rows, all but ``shift`` and ``attack``.

    Args:
        model: a sequence classifier or regressor.
        dev: rows to judge on.
        metric: the task's score.
        scale: embedding noise of δ = 1, in the units of the embedding's entries.
        conditions: how the model is judged.
        regression: whether the model predicts a number.
        validation: rows neither trained nor judged on, for the temperature.
        perturbed: the rows of `dev` with changed texts, by the change.

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
    # Every model is judged on the same batches with the same draws: rows in one order, seeds by the
    # draw's number alone.  A difference between two methods is then theirs, not the noise's.
    dev = dev.by_length()
    clean = list(dev.in_order(conditions.batch))
    labels = np.asarray(dev.labels)
    accuracies: dict[str, float] = {}

    def score(drawn: list[Floats], condition: str = "", rows: Labels = labels) -> float:
        """Return the mean score over draws, and keep a condition's mean accuracy."""
        classes = [p[:, 0] if regression else p.argmax(1) for p in drawn]
        if condition and not regression:
            accuracies[condition] = float(np.mean([(c == rows).mean() for c in classes]))
        return float(np.mean([metric(c, rows) for c in classes]))

    def outputs_of(batches: Iterable[Batch]) -> Floats:
        device = next(model.parameters()).device.type
        with torch.autocast(device, torch.bfloat16, enabled=conditions.bf16):
            return model_outputs(model, batches, regression)

    def corrupted(share: float) -> float:
        drawn = (corrupt_batches(clean, dev.tokenizer, share, d) for d in range(conditions.draws))
        return score([outputs_of(batches) for batches in drawn], f"corrupted {share}")

    def noisy(delta: float) -> float:
        drawn = []
        for draw in range(conditions.draws):
            generator = torch.Generator().manual_seed(2000 + draw)
            with perturbed_embeddings(model, delta * scale, generator):
                drawn.append(outputs_of(clean))
        return score(drawn, f"noisy {delta}")

    def changed(noise: str, rows: Encoded) -> float:
        rows = rows.by_length()
        outputs = outputs_of(rows.in_order(conditions.batch))
        return score([outputs], noise, np.asarray(rows.labels))

    outputs = model_outputs(model, clean, regression)  # never under autocast
    base = score([outputs])
    scaled = None
    if validation is not None and not regression:
        # the temperature comes from rows that are not judged on: fitted on these it would hide what
        # calibration is to measure
        rows = validation.by_length()
        probabilities = model_outputs(model, rows.in_order(conditions.batch), False)
        temperature = fit_temperature(probabilities, np.asarray(rows.labels))
        at_fitted = class_figures(apply_temperature(outputs, temperature), labels)
        scaled = {"temperature": temperature, **at_fitted}
    norms = layer_norms(model, dev, conditions.sequences) if conditions.layers else ([], [])
    figures = {
        "score": base,
        **({} if regression else class_figures(outputs, labels)),
        "scaled": scaled,
        "corrupted": {str(share): corrupted(share) for share in conditions.corruption},
        "noisy": {str(delta): noisy(delta) if delta else base for delta in conditions.deltas},
        "perturbed": {noise: changed(noise, rows) for noise, rows in (perturbed or {}).items()},
        "accuracies": accuracies,
        "jacobian": norms[0],
        "hessian": norms[1],
        "slopes": slopes(model, dev, 0 if regression else conditions.sequences),
        "reliability": None if regression else vars(reliability(outputs, labels)),
    }
    return Figures(**finite(figures))


def corrupt_batches(
    batches: Sequence[Batch], tokenizer: PreTrainedTokenizerBase, share: float, draw: int
) -> list[Batch]:
    generator = torch.Generator().manual_seed(1000 + draw)
    special = torch.tensor(tokenizer.all_special_ids)
    unknown = unknown_token_id(tokenizer)
    assert unknown is not None  # `finetune.load` refuses the grid otherwise

    def corrupted(batch: Batch) -> torch.Tensor:
        return corrupt_tokens(
            batch["input_ids"],
            batch["attention_mask"],
            share,
            unknown=unknown,
            special=special,
            generator=generator,
            padding=tokenizer.pad_token_id,
        )

    return [{**batch, "input_ids": corrupted(batch)} for batch in batches]


def slopes(model: Model, data: Encoded, sequences: int = 32) -> dict[str, float]:
    """Return `decision_slopes` of the model on rows at even distances; {} for 0 sequences."""
    batch = _sample(model, data, sequences)
    return {} if batch is None else decision_slopes(model, batch)


@torch.no_grad()
def layer_norms(
    model: Model, data: Encoded, sequences: int = 32
) -> tuple[list[float], list[float]]:
    """Return ‖J‖ and ‖H‖ of each layer, means over `sequences` rows, with fixed directions."""
    batch = _sample(model, data, sequences)
    if batch is None:
        return [], []
    with in_mode(model, training=False):
        norms = smoothness(model, without_labels(batch), seed=_SMOOTHNESS_SEED)
    assert norms.hessian is not None  # hessian=True is the default
    return norms.jacobian.tolist(), norms.hessian.tolist()


def _sample(model: Model, data: Encoded, sequences: int) -> Batch | None:
    """Return a batch of rows at even distances, which in sorted data have all lengths."""
    count = min(sequences, len(data))
    if count == 0:
        return None
    return on_device_of(model, data.batch([i * len(data) // count for i in range(count)]))
