"""Penalties on the decision through the Trainer, on a linear model and on a tiny one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax

from jachess_ext.smoothness import Isotropic, Substitution

from .runs import SGD, assert_same_parameters, first, furthest, method_trainer
from .test_controls import OTHERS, features, trained, weights
from .test_known_answers import ROWS, LinearModel, word_tokenizer

SWAPPED = torch.tensor([[[2, 2], [3, 1]], [[1, 4], [4, 4]]])  # [q, B, T]
TOKENIZER = {"processing_class": word_tokenizer(["<pad>", "a", "b", "c", "d"])}


@pytest.fixture
def known_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(self: Any, ids: Any, mask: Any, count: int, draw: Any) -> torch.Tensor:
        order = [
            next(i for i, row in enumerate(ROWS) if torch.equal(row["input_ids"], r)) for r in ids
        ]
        return SWAPPED[:count, order]

    monkeypatch.setattr(Substitution, "swap", swap)


class Masked(LinearModel):
    """Takes the mask that a tokenizer's padding brings; no row here is padded."""

    def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> Any:
        return super().forward(input_ids, labels)


def moves(model: LinearModel) -> np.ndarray:
    """[q, B, 3]: how far the sum of a row's embeddings moves."""
    table = model.embeddings.weight.detach().numpy()
    ids = np.stack([row["input_ids"].numpy() for row in ROWS])
    return table[SWAPPED.numpy()].sum(2) - table[ids].sum(1)


def fisher_gradient(p: np.ndarray, d: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of mean F over rows and directions: by D ``[C, 3]`` along u, and by the logits ``[B, C]``."""
    by_weight, by_logits = np.zeros((2, 3)), np.zeros_like(p)
    count = d.shape[0] * d.shape[1]
    for q in range(d.shape[0]):
        for row in range(d.shape[1]):
            centred = d[q, row] - p[row] @ d[q, row]
            by_weight += np.outer(p[row] * centred, u[q, row]) / count
            by_p = centred**2 / 2
            by_logits[row] += p[row] * (by_p - p[row] @ by_p) / count
    return by_weight, by_logits


@pytest.mark.usefixtures("known_swaps")
def test_fisher_of_swaps(tmp_path: Path) -> None:
    model = Masked()
    (weight, bias), x, u = weights(model), features(model), moves(model)
    settings = {"strength": 3.0, "directions": 2}
    made = trained(tmp_path, "fisher", model, method=settings, options=TOKENIZER)
    p = softmax(x @ weight.T + bias, axis=1)
    d = u @ weight.T
    values = [
        (p[b] * (d[q, b] - p[b] @ d[q, b]) ** 2).sum() / 2 for q in range(2) for b in range(2)
    ]
    assert first(made, "jachess/penalty") == pytest.approx(3 * np.mean(values), rel=1e-6)
    by_weight, by_logits = fisher_gradient(p, d, u)
    away = (p - np.eye(2)) / 2 + 3 * by_logits
    moved = weight - SGD["learning_rate"] * (away.T @ x + 3 * by_weight)
    np.testing.assert_allclose(weights(model)[0], moved, rtol=1e-6)
    np.testing.assert_allclose(
        weights(model)[1], bias - SGD["learning_rate"] * away.sum(0), rtol=1e-6
    )


@pytest.mark.usefixtures("known_swaps")
@pytest.mark.parametrize("name", ["fisher", "divergence", "margin"])
def test_every_nth_step(tmp_path: Path, name: str) -> None:
    """The second of two steps is a plain one."""
    runs: dict[Any, Any] = {}
    for every, steps in ((1, 1), (2, 1), (2, 2), (0, 1)):
        model = Masked()
        method = {"every": every, "strength": 0.3} if every else {}
        trained(
            tmp_path / f"{every}{steps}",
            name if every else "none",
            model,
            method=method,
            options=TOKENIZER,
            max_steps=steps,
        )
        runs[every, steps] = weights(model)[0]
    plain, once, twice = runs[0, 1], runs[1, 1], runs[2, 1]
    np.testing.assert_allclose(twice - plain, 2 * (once - plain), rtol=1e-6)
    assert np.abs(once - plain).max() > 1e-4
    assert np.abs(runs[2, 2] - runs[2, 1]).max() > 1e-4


def _tiny_tokenizer() -> Any:
    return word_tokenizer([f"w{i}" for i in range(20)])


@pytest.mark.parametrize("setting", [{}, {"along": "noise"}, {"path": True}])
def test_seeds_repeat_a_run(tmp_path: Path, setting: dict[str, Any]) -> None:
    ends = []
    for name in "ab":
        made = method_trainer(
            tmp_path / name,
            "fisher",
            method={"strength": 0.5} | setting,
            options={"processing_class": _tiny_tokenizer()},
        )
        made.train()
        ends.append(made.model)
    plain = method_trainer(tmp_path / "none", "none")
    plain.train()
    assert_same_parameters(*ends, rtol=0, atol=0)
    assert furthest(ends[0], plain.model) > 1e-6


JOINT: dict[str, Any] = {"mode": "joint", "along": "noise", "strength": 2.0}


def test_joint_penalises_the_unlabelled_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Task loss of the labelled rows, Fisher of the others, written out; labels not looked at."""
    u = np.random.default_rng(0).standard_normal((1, 2, 2, 3))  # [q, B, T, D]

    def known(self: Any, model: Any, batch: Any, x: Any, *rest: Any) -> torch.Tensor:
        assert "labels" not in batch
        order = [next(i for i, row in enumerate(OTHERS) if torch.equal(row, r)) for r in ids(batch)]
        return torch.from_numpy(u[:, order])

    def ids(batch: Any) -> torch.Tensor:
        return batch["input_ids"]

    monkeypatch.setattr(Isotropic, "__call__", known)
    model = Masked()
    (weight, bias), x = weights(model), features(model)
    table = model.embeddings.weight.detach().numpy().copy()
    other = table[torch.stack(OTHERS).numpy()].sum(1)
    made = trained(
        tmp_path,
        "fisher",
        model,
        method=JOINT | {"directions": 1},
        options=TOKENIZER,
        unlabelled=[{"input_ids": row, "labels": torch.tensor(1)} for row in OTHERS],
    )
    p, p_other = (softmax(rows @ weight.T + bias, axis=1) for rows in (x, other))
    moved = u.sum(2)
    d = moved @ weight.T
    by_weight, by_logits = fisher_gradient(p_other, d, moved)
    away = (p - np.eye(2)) / 2
    slope = away.T @ x + 2 * (by_logits.T @ other + by_weight)
    np.testing.assert_allclose(weights(model)[0], weight - SGD["learning_rate"] * slope, rtol=1e-6)
    by_bias = away.sum(0) + 2 * by_logits.sum(0)
    np.testing.assert_allclose(weights(model)[1], bias - SGD["learning_rate"] * by_bias, rtol=1e-6)
    value = np.mean(
        [(p_other[b] * (d[0, b] - p_other[b] @ d[0, b]) ** 2).sum() / 2 for b in range(2)]
    )
    assert first(made, "jachess/penalty") == pytest.approx(2 * value, rel=1e-6)
