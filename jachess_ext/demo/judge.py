"""Judging one fine-tuned classifier: score, calibration, robustness, smoothness."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..evaluation.calibration import (
    Reliability,
    brier_score,
    expected_calibration_error,
    reliability,
)
from ..evaluation.metrics import Metric
from ..evaluation.robustness import corrupt_tokens, perturbed_embeddings, unknown_token_id
from ..smoothness import smoothness
from .batches import Batch, Encoded

CORRUPTION = (0.1, 0.2)
"""Shares of tokens replaced by the unknown token."""

DELTAS = (0.0, 0.5, 1.0, 2.0)
"""Sizes of the embedding noise, in units of the base model's root mean square embedding entry."""

HEADLINE_DELTA = 1.0
"""The δ whose score stands in the table."""

_DRAWS = 1  # random corruptions and noises averaged, the same for every model
_BATCH = 64
_SMOOTHNESS_SEED = 20_000


@dataclass(frozen=True)
class Judgement:
    """Figures of one model on the dev data.

    `corrupted[i]` is the score at `CORRUPTION[i]`; `noisy[i]` at `DELTAS[i]`; `jacobian` and
    `hessian` are [K], mean norms per layer over the sequences measured; `probabilities` [N, C],
    `labels` [N].
    """

    score: float
    brier: float
    ece: float
    corrupted: list[float]
    noisy: list[float]
    jacobian: list[float]
    hessian: list[float]
    probabilities: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]
    diagram: Reliability


@torch.no_grad()
def class_probabilities(model: Any, batches: Iterable[Batch]) -> npt.NDArray[np.float64]:
    """Softmax of the logits in evaluation mode, [N, C] in float64; the mode is put back after."""
    was_training = model.training
    model.eval()
    try:
        logits = [
            model(**{key: value for key, value in batch.items() if key != "labels"}).logits
            for batch in batches
        ]
    finally:
        model.train(was_training)
    return torch.cat(logits).double().softmax(-1).cpu().numpy()


def judge(model: Any, dev: Encoded, metric: Metric, scale: float) -> Judgement:
    """All figures of `Judgement`; corruption and noise are the same draws for every model.

    Args:
        model: a sequence classifier.
        dev: data to judge on.
        metric: the task's score.
        scale: what δ = 1 means, in the units of the embedding's entries.
    """
    clean = list(dev.in_order(_BATCH))
    labels = np.asarray(dev.labels)
    probabilities = class_probabilities(model, clean)
    jacobian, hessian = layer_norms(model, dev)

    def score(found: npt.NDArray[np.float64]) -> float:
        return metric(found.argmax(1), labels)

    base = score(probabilities)
    return Judgement(
        score=base,
        brier=brier_score(probabilities, labels),
        ece=expected_calibration_error(probabilities, labels),
        corrupted=[
            _mean(
                score(class_probabilities(model, _corrupted(clean, dev.tokenizer, share, draw)))
                for draw in range(_DRAWS)
            )
            for share in CORRUPTION
        ],
        noisy=[
            base
            if delta == 0
            else _mean(score(_noisy(model, clean, delta * scale, draw)) for draw in range(_DRAWS))
            for delta in DELTAS
        ],
        jacobian=jacobian,
        hessian=hessian,
        probabilities=probabilities,
        labels=labels,
        diagram=reliability(probabilities, labels),
    )


@torch.no_grad()
def layer_norms(model: Any, data: Encoded, sequences: int = 32) -> tuple[list[float], list[float]]:
    """‖J‖ and ‖H‖ of each layer, means over the first `sequences` examples; the same directions."""
    was_training = model.training
    model.eval()
    count = min(sequences, len(data))
    batch = data.batch(list(range(count)))
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    try:
        found = smoothness(model, inputs, seed=_SMOOTHNESS_SEED)
    finally:
        model.train(was_training)
    assert found.hessian is not None  # hessian=True is the default
    return found.jacobian.tolist(), found.hessian.tolist()


def _corrupted(batches: Sequence[Batch], tokenizer: Any, share: float, draw: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1000 + draw)
    special = torch.tensor(tokenizer.all_special_ids)
    unknown = unknown_token_id(tokenizer)
    return [
        {
            **batch,
            "input_ids": corrupt_tokens(
                batch["input_ids"],
                batch["attention_mask"],
                share,
                unknown=unknown,
                special=special,
                generator=generator,
            ),
        }
        for batch in batches
    ]


def _noisy(
    model: Any, batches: Sequence[Batch], delta: float, draw: int
) -> npt.NDArray[np.float64]:
    generator = torch.Generator().manual_seed(2000 + draw)
    with perturbed_embeddings(model, delta, generator):
        return class_probabilities(model, batches)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
