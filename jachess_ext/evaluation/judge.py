"""Judging one fine-tuned model: score, calibration, robustness, smoothness."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..smoothness import decision_slopes, smoothness
from ..smoothness.estimators import in_mode, on_device_of, without_labels
from ..tasks.batches import Batch, Encoded
from .calibration import Reliability, reliability
from .classification import at_temperature, class_figures, fitted_temperature
from .metrics import Metric
from .robustness import corrupt_tokens, perturbed_embeddings, unknown_token_id
from .text_noise import KINDS

_SMOOTHNESS_SEED = 20_000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Conditions:
    """How a model is made to struggle; the same draws for every model.

    Attributes:
        corruption: shares of tokens replaced by the unknown token (the paper's); see
            `robustness.corrupt_tokens` for tokenizers whose unknown token is the padding.
        deltas: sizes of the embedding noise; what 1 means is said where it is used.
        texts: kinds of `text_noise` the texts are given.
        text_share: of the words these change.
        draws: random corruptions and noises averaged (of `texts` there is one).
        sequences: how many examples the norms are measured on; 0: no norms.
        layers: whether norms of all layers are measured, beside the logits'.
        batch: examples at a time.
        bf16: whether corrupted and noisy rows are judged under bf16 autocast; clean ones never are.

    Raises:
        ValueError: one of them is out of range; the message names it.
    """

    corruption: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2)
    deltas: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)
    texts: tuple[str, ...] = ()
    text_share: float = 0.2
    draws: int = 1
    sequences: int = 32
    layers: bool = True
    batch: int = 64
    bf16: bool = False

    def __post_init__(self) -> None:
        for share in self.corruption:
            if not 0 <= share <= 1:
                raise ValueError(f"corruption has {share}; expected shares from 0 to 1")
        for delta in self.deltas:
            if not 0 <= delta < float("inf"):
                raise ValueError(f"deltas has {delta}; expected finite numbers from 0 up")
        for kind in self.texts:
            if kind not in KINDS:
                raise ValueError(f"texts has {kind!r}; expected some of {', '.join(KINDS)}")
        if not 0 <= self.text_share <= 1:
            raise ValueError(f"text_share is {self.text_share}; expected a share from 0 to 1")
        for name, least in (("draws", 1), ("sequences", 0), ("batch", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; expected a number from {least} up"
                )

    @property
    def bare(self) -> Conditions:
        """The clean rows alone."""
        return replace(self, corruption=(), deltas=(), texts=(), sequences=0)


@dataclass(frozen=True)
class Judgement:
    """Figures of one model on the dev data.

    `corrupted[i]` is the score at `Conditions.corruption[i]`, `noisy[i]` at `deltas[i]`, and
    `perturbed` by kind of text noise; `accuracies` has the same conditions' accuracy by their name
    ("corrupted 0.2"). `figures` are those of `class_figures`, `scaled` the same at the
    ``temperature`` it has as well, fitted on validation rows (None without any). `jacobian` and
    `hessian` are [K], mean norms per layer over the sequences measured; `slopes` are of
    `decision_slopes`; `probabilities` [N, C] and `labels` [N], in one order. A regression task has
    no `figures`, and its `probabilities` are predictions [N, 1].
    """

    score: float
    figures: Mapping[str, float | None]
    scaled: Mapping[str, float | None] | None
    corrupted: list[float]
    noisy: list[float]
    perturbed: Mapping[str, float]
    accuracies: Mapping[str, float]
    jacobian: list[float]
    hessian: list[float]
    slopes: Mapping[str, float | None]
    probabilities: Floats
    labels: npt.NDArray[Any]
    diagram: Reliability | None

    @property
    def brier(self) -> float | None:
        """Σ over classes, from 0 to 2."""
        return self.figures.get("brier")

    @property
    def ece(self) -> float | None:
        """Of the predicted class, 8 bins."""
        return self.figures.get("ece")


def figures_of(found: Judgement, conditions: Conditions) -> dict[str, Any]:
    """A judgement by name; the bins of its reliability diagram stand for its outputs."""
    return {
        "score": found.score,
        **dict.fromkeys(("brier", "ece")),
        **found.figures,
        "scaled": found.scaled,
        "perturbed": found.perturbed,
        "accuracies": found.accuracies,
        "slopes": found.slopes,
        "corrupted": dict(zip(map(str, conditions.corruption), found.corrupted, strict=True)),
        "noisy": dict(zip(map(str, conditions.deltas), found.noisy, strict=True)),
        "jacobian": found.jacobian,
        "hessian": found.hessian,
        "reliability": None if found.diagram is None else vars(found.diagram),
    }


@torch.no_grad()
def model_outputs(model: Any, batches: Iterable[Batch], regression: bool) -> Floats:
    """Class probabilities [N, C], or predictions [N, 1], in evaluation mode; float64.

    The model's mode is put back afterwards.

    Raises:
        FloatingPointError: some output is not finite.
    """
    with in_mode(model, training=False):
        logits = [model(**on_device_of(model, without_labels(b))).logits for b in batches]
    found = torch.cat([part.double() for part in logits])
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
    validation: Encoded | None = None,
    perturbed: Mapping[str, Encoded] | None = None,
) -> Judgement:
    """All figures of `Judgement`.

    Args:
        model: a sequence classifier or regressor.
        dev: data to judge on.
        metric: the task's score.
        scale: what δ = 1 means, in the units of the embedding's entries.
        validation: rows neither trained nor judged on, for the temperature.
        perturbed: the rows of `dev` with their texts changed, by kind.
    """
    dev = dev.by_length()
    clean = list(dev.in_order(conditions.batch))
    labels = np.asarray(dev.labels)
    accuracies: dict[str, float] = {}

    def score(found: list[Floats], name: str = "", rows: npt.NDArray[Any] = labels) -> float:
        """The mean over draws; the mean accuracy stands under a condition's name."""
        classes = [p[:, 0] if regression else p.argmax(1) for p in found]
        if name and not regression:
            accuracies[name] = float(np.mean([(c == rows).mean() for c in classes]))
        return float(np.mean([metric(c, rows) for c in classes]))

    def outputs_of(batches: Iterable[Batch]) -> Floats:
        with _autocast(model, conditions.bf16):
            return model_outputs(model, batches, regression)

    def corrupted(share: float) -> float:
        made = (_corrupted(clean, dev.tokenizer, share, d) for d in range(conditions.draws))
        return score([outputs_of(batches) for batches in made], f"corrupted {share}")

    def noisy(delta: float) -> float:
        found = []
        for draw in range(conditions.draws):
            generator = torch.Generator().manual_seed(2000 + draw)
            with perturbed_embeddings(model, delta * scale, generator):
                found.append(outputs_of(clean))
        return score(found, f"noisy {delta}")

    def of_texts(kind: str, rows: Encoded) -> float:
        rows = rows.by_length()
        found = outputs_of(rows.in_order(conditions.batch))
        return score([found], kind, np.asarray(rows.labels))

    outputs = model_outputs(model, clean, regression)
    base = score([outputs])
    wide = layer_norms(model, dev, conditions.sequences) if conditions.layers else ([], [])
    return Judgement(
        score=base,
        figures={} if regression else class_figures(outputs, labels),
        scaled=None
        if regression or validation is None
        else _scaled(model, outputs, labels, validation, conditions.batch),
        corrupted=[corrupted(share) for share in conditions.corruption],
        noisy=[noisy(delta) if delta else base for delta in conditions.deltas],
        perturbed={kind: of_texts(kind, rows) for kind, rows in (perturbed or {}).items()},
        accuracies=accuracies,
        jacobian=wide[0],
        hessian=wide[1],
        slopes=slopes(model, dev, 0 if regression else conditions.sequences),
        probabilities=outputs,
        labels=labels,
        diagram=None if regression else reliability(outputs, labels),
    )


@contextmanager
def _autocast(model: Any, bf16: bool) -> Iterator[None]:
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=bf16):
        yield


def _scaled(
    model: Any, outputs: Floats, labels: npt.NDArray[Any], validation: Encoded, batch: int
) -> dict[str, float | None]:
    rows = validation.by_length()
    known = model_outputs(model, rows.in_order(batch), False)
    temperature = fitted_temperature(known, np.asarray(rows.labels))
    return {
        "temperature": temperature,
        **class_figures(at_temperature(outputs, temperature), labels),
    }


def slopes(model: Any, data: Encoded, sequences: int = 32) -> dict[str, float]:
    """`decision_slopes` of the model on rows taken at even distances; none of no sequences."""
    batch = _sample(model, data, sequences)
    return {} if batch is None else decision_slopes(model, batch)


def _sample(model: Any, data: Encoded, sequences: int) -> Batch | None:
    """Rows at even distances, so that sorted data gives all lengths, on the model's device."""
    count = min(sequences, len(data))
    if count == 0:
        return None
    return on_device_of(model, data.batch([i * len(data) // count for i in range(count)]))


@torch.no_grad()
def layer_norms(model: Any, data: Encoded, sequences: int = 32) -> tuple[list[float], list[float]]:
    """‖J‖ and ‖H‖ of each layer, means over `sequences` examples; the same directions."""
    batch = _sample(model, data, sequences)
    if batch is None:
        return [], []
    with in_mode(model, training=False):
        found = smoothness(model, without_labels(batch), seed=_SMOOTHNESS_SEED)
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
