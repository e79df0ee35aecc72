"""Judging one fine-tuned model: score, calibration, robustness, smoothness."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..smoothness import smoothness
from ..tasks.batches import Batch, Encoded
from .calibration import Reliability, brier_score, expected_calibration_error, reliability
from .metrics import Metric
from .robustness import corrupt_tokens, perturbed_embeddings, unknown_token_id

_SMOOTHNESS_SEED = 20_000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Conditions:
    """How a model is made to struggle; the same draws for every model.

    Attributes:
        corruption: shares of tokens replaced by the unknown token (the paper's); see
            `robustness.corrupt_tokens` for tokenizers whose unknown token is the padding.
        deltas: sizes of the embedding noise; what 1 means is said where it is used.
        draws: random corruptions and noises averaged.
        sequences: how many examples the norms are measured on; 0: no norms.
        batch: examples at a time.

    Raises:
        ValueError: one of them is out of range; the message names it.
    """

    corruption: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2)
    deltas: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)
    draws: int = 1
    sequences: int = 32
    batch: int = 64

    def __post_init__(self) -> None:
        for share in self.corruption:
            if not 0 <= share <= 1:
                raise ValueError(f"corruption has {share}; expected shares from 0 to 1")
        for delta in self.deltas:
            if not 0 <= delta < float("inf"):
                raise ValueError(f"deltas has {delta}; expected finite numbers from 0 up")
        for name, least in (("draws", 1), ("sequences", 0), ("batch", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; expected a number from {least} up"
                )


@dataclass(frozen=True)
class Judgement:
    """Figures of one model on the dev data.

    `corrupted[i]` is the score at `Conditions.corruption[i]`, `noisy[i]` at `deltas[i]`; `jacobian`
    and `hessian` are [K], mean norms per layer over the sequences measured; `probabilities` [N, C]
    and `labels` [N], in one order. A regression task has no calibration (`brier`, `ece`, `diagram`
    are None), and its `probabilities` are predictions [N, 1].
    """

    score: float
    brier: float | None
    ece: float | None
    corrupted: list[float]
    noisy: list[float]
    jacobian: list[float]
    hessian: list[float]
    probabilities: Floats
    labels: npt.NDArray[Any]
    diagram: Reliability | None


@torch.no_grad()
def model_outputs(model: Any, batches: Iterable[Batch], regression: bool) -> Floats:
    """Class probabilities [N, C], or predictions [N, 1], in evaluation mode; float64.

    The model's mode is put back afterwards.

    Raises:
        FloatingPointError: some output is not finite.
    """
    was_training = model.training
    device = next(model.parameters()).device
    model.eval()
    try:
        logits = [
            model(**{k: v.to(device) for k, v in batch.items() if k != "labels"}).logits
            for batch in batches
        ]
    finally:
        model.train(was_training)
    found = torch.cat(logits).double()
    if not torch.isfinite(found).all():
        raise FloatingPointError(
            "the model's outputs are not finite: training diverged; lower the learning rate"
        )
    return (found if regression else found.softmax(-1)).cpu().numpy()


def judge(
    model: Any,
    dev: Encoded,
    metric: Metric,
    scale: float,
    conditions: Conditions = Conditions(),
    *,
    regression: bool = False,
) -> Judgement:
    """All figures of `Judgement`.

    Args:
        model: a sequence classifier or regressor.
        dev: data to judge on.
        metric: the task's score.
        scale: what δ = 1 means, in the units of the embedding's entries.
    """
    dev = dev.by_length()
    clean = list(dev.in_order(conditions.batch))
    labels = np.asarray(dev.labels)

    def score(found: Floats) -> float:
        return metric(found[:, 0] if regression else found.argmax(1), labels)

    def mean_score(outputs: Callable[[int], Floats]) -> float:
        return float(np.mean([score(outputs(draw)) for draw in range(conditions.draws)]))

    def corrupted(share: float) -> Callable[[int], Floats]:
        return lambda draw: model_outputs(
            model, _corrupted(clean, dev.tokenizer, share, draw), regression
        )

    def noisy(delta: float) -> Callable[[int], Floats]:
        return lambda draw: _noisy(model, clean, delta * scale, draw, regression)

    outputs = model_outputs(model, clean, regression)
    base = score(outputs)
    jacobian, hessian = layer_norms(model, dev, conditions.sequences)
    return Judgement(
        score=base,
        brier=None if regression else brier_score(outputs, labels),
        ece=None if regression else expected_calibration_error(outputs, labels),
        corrupted=[mean_score(corrupted(share)) for share in conditions.corruption],
        noisy=[mean_score(noisy(delta)) if delta else base for delta in conditions.deltas],
        jacobian=jacobian,
        hessian=hessian,
        probabilities=outputs,
        labels=labels,
        diagram=None if regression else reliability(outputs, labels),
    )


@torch.no_grad()
def layer_norms(model: Any, data: Encoded, sequences: int = 32) -> tuple[list[float], list[float]]:
    """‖J‖ and ‖H‖ of each layer, means over `sequences` examples; the same directions.

    The examples are taken at even distances, so that sorted data gives all lengths.
    """
    count = min(sequences, len(data))
    if count == 0:
        return [], []
    was_training = model.training
    model.eval()
    batch = data.batch([i * len(data) // count for i in range(count)])
    device = next(model.parameters()).device
    inputs = {key: value.to(device) for key, value in batch.items() if key != "labels"}
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
                padding=tokenizer.pad_token_id,
            ),
        }
        for batch in batches
    ]


def _noisy(
    model: Any, batches: Sequence[Batch], delta: float, draw: int, regression: bool
) -> Floats:
    generator = torch.Generator().manual_seed(2000 + draw)
    with perturbed_embeddings(model, delta, generator):
        return model_outputs(model, batches, regression)
