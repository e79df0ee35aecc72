"""The methods of examples/controls.py on problems with an answer in closed form."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, log_softmax, softmax
from torch import Tensor
from torch.nn import functional as F

from jachess_ext.training import METHODS, with_lora
from jachess_ext.training.methods import base
from python_tests.smoothness.tiny_models import classifier

from .runs import (
    assert_same_parameters,
    examples,
    first,
    method_trainer,
    parameters,
    tensors,
)
from .test_architectures import ARCHITECTURES, rows_of
from .test_controls import LR, features, logits_that_are_equal, trained, weights
from .test_known_answers import CURVATURE, ROWS, START, LinearModel, Output, Quadratic, centres
from .test_same_run import Models
from .test_same_run import made as one_with_trials


@pytest.fixture(autouse=True)
def controls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Register the example's methods for one test alone."""
    monkeypatch.setattr(base, "METHODS", dict(METHODS))
    return importlib.reload(importlib.import_module("examples.controls"))


class Masked(LinearModel):
    """With dropout on the features; records the ids it was called with and the masks it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[tuple[Tensor, Tensor]] = []

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        x = self.embeddings(input_ids).sum(1)
        mask = (torch.rand(x.shape) < 0.5).to(x) if self.training else torch.ones_like(x)
        self.passes.append((input_ids, mask))
        logits = self.linear(x * mask)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return Output(loss=loss, logits=logits)


def test_r_drop(tmp_path: Path) -> None:
    """½ (CE₁ + CE₂) + s · ½ (KL + KL), of the masks drawn; the first is the plain run's."""
    model, plain = Masked(), Masked()
    made = trained(tmp_path, "r-drop", model, method={"strength": 3.0})
    trained(tmp_path, "none", plain)
    (ids, one), (again, two) = model.passes
    assert torch.equal(ids, again) and torch.equal(one, plain.passes[0][1])
    assert not torch.equal(one, two)
    fresh = Masked()
    x = fresh.embeddings(ids).sum(1)
    labels = (ids[:, 0] == 3).long()
    p, q = (fresh.linear(x * mask) for mask in (one, two))
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    divergence = sum(
        F.kl_div(a, b, log_target=True, reduction="batchmean")
        for a, b in ((log_p, log_q), (log_q, log_p))
    )
    task = (F.cross_entropy(p, labels) + F.cross_entropy(q, labels)) / 2
    assert first(made, "jachess/penalty") == pytest.approx(1.5 * divergence.item(), rel=1e-6)
    assert first(made, "jachess/task_loss") == pytest.approx(task.item(), rel=1e-6)
    (task + 3.0 * divergence / 2).backward()
    expected = fresh.linear.weight - LR * fresh.linear.weight.grad
    torch.testing.assert_close(model.linear.weight.detach(), expected.detach(), rtol=1e-8, atol=0)


def test_neftune_is_uniform_noise_on_the_embeddings(tmp_path: Path) -> None:
    """Of T = 2 tokens and d = 3 entries: a row's sum moves by less than 2 α / √6."""
    model, sums = LinearModel(), []
    handle = model.linear.register_forward_pre_hook(lambda _, inputs: sums.append(inputs[0]))
    made = trained(tmp_path, "neftune", model, method={"alpha": 0.5}, learning_rate=1e-9)
    noisy, clean = sums[0].numpy(), features(model)
    nearest = np.abs(noisy[:, None] - clean[None]).sum(-1).argmin(1)
    moved = noisy - clean[nearest]
    assert set(nearest) == {0, 1} and 0.1 < np.abs(moved).max() / (2 * 0.5 / 6**0.5) < 1
    assert moved.min() < 0 < moved.max()
    handle.remove()
    plain = model.eval()(tensors(ROWS)["input_ids"]).logits.detach().numpy()
    np.testing.assert_allclose(made.predict(ROWS).predictions, plain, rtol=1e-12)


@pytest.mark.parametrize("radius", [0.0, 0.25])
def test_freelb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, radius: float) -> None:
    """Both tokens of a row have the gradient Wᵀ (p − y): δ grows by lr · that over √2 ‖·‖."""
    monkeypatch.setattr(
        "jachess_ext.training.methods.noise.draw_noise", lambda shape, *_: torch.ones(shape)
    )
    model = LinearModel()
    (weight, bias), x = weights(model), features(model)
    settings = {"adv_steps": 3, "adv_lr": 0.2, "adv_start": 0.1, "adv_radius": radius}
    made = trained(tmp_path, "freelb", model, method=settings)
    token = np.full((2, 3), 0.1 / 6**0.5)  # δ of either token of each row
    gradient, loss = np.zeros((2, 3)), 0.0
    for _ in range(3):
        noisy = x + 2 * token
        logits = noisy @ weight.T + bias
        error = softmax(logits, -1) - np.eye(2)
        gradient += error.T @ noisy / 2 / 3
        loss -= np.diag(log_softmax(logits, -1)).mean() / 3
        slope = error @ weight
        token = token + 0.2 * slope / np.linalg.norm(slope, axis=1, keepdims=True) / 2**0.5
        norm = 2**0.5 * np.linalg.norm(token, axis=1, keepdims=True)
        if radius:
            token = token * np.minimum(1, radius / norm)
    np.testing.assert_allclose(weights(model)[0], weight - LR * gradient, rtol=1e-7)
    assert first(made, "loss") == pytest.approx(loss, rel=1e-4)


def test_freelb_leaves_padding_and_random_numbers_alone(tmp_path: Path, controls: Any) -> None:
    """Its noise is on real tokens; all passes of a step have the plain run's dropout masks."""
    data = examples(8, 3)
    for row in data:
        row["attention_mask"][2] = 0
    states: dict[str, list[Tensor]] = {"none": [], "freelb": []}
    for name, states_of in states.items():
        model = classifier("bert", dropout=0.3)
        model.classifier.register_forward_pre_hook(
            lambda *_, states_of=states_of: states_of.append(torch.get_rng_state())
        )
        made = method_trainer(tmp_path, name, model=model, data=data, learning_rate=1e-12)
        made.train()
    assert [len(x) for x in states.values()] == [2, 6]
    for number, state in enumerate(states["freelb"]):
        assert torch.equal(state, states["none"][number // 3])
    real = torch.stack([row["attention_mask"] for row in data]).bool()
    noise = controls.row_noise(torch.zeros(8, 3, 12), real, 1.0, made.method.generator())
    assert (noise[:, 2] == 0).all() and (noise[:, :2] != 0).all()
    assert 0.9 < noise.abs().max() * 24**0.5 < 1


def test_an_encoder_decoder_has_noise_in_both_stacks(controls: Any) -> None:
    """Each stack keeps its own, of which the second pass has what the ascent made."""
    model = ARCHITECTURES["bart"]().double().eval()
    batch = tensors(rows_of("bart", (6, 6)))
    adversary = controls.AdversarialNoise(lambda x, real: torch.zeros_like(x))
    losses = []
    for _ in range(2):
        with adversary.added(model, batch) as noisy:
            losses.append(model(**noisy).loss)
        gradients = torch.autograd.grad(losses[-1], adversary.noise)
        adversary.ascend(lambda noise, gradient: noise + gradient, gradients)
    assert len(adversary.noise) == 2 and losses[1] > losses[0]
    assert all(noise.abs().max() > 0 for noise in adversary.noise)


def test_smart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two classes: the divergence is (σ(s) − σ(t)) (s − t), rising along ± (w₁ − w₀)."""
    z = 0.05
    monkeypatch.setattr(
        "jachess_ext.training.methods.noise.draw_noise", lambda shape, *_: torch.full(shape, z)
    )
    model = LinearModel()
    (weight, bias), x = weights(model), features(model)
    table = model.embeddings.weight.numpy()
    unit = np.sqrt((table**2).mean())
    settings = {"strength": 2.0, "adv_steps": 2, "adv_lr": 0.3, "adv_radius": 0.5, "adv_start": 1.0}
    made = trained(tmp_path, "smart", model, method=settings)
    line, offset = weight[1] - weight[0], bias[1] - bias[0]
    s = x @ line + offset
    token = np.full((2, 3), z)
    for _ in range(2):
        t = (x + 2 * token) @ line + offset
        slope = -expit(t) * (1 - expit(t)) * (s - t) - (expit(s) - expit(t))
        step = np.sign(slope)[:, None] * line / np.abs(line).max()
        token = np.clip(token + 0.3 * unit * step, -0.5 * unit, 0.5 * unit)
    t = (x + 2 * token) @ line + offset
    expected = 2.0 * ((expit(s) - expit(t)) * (s - t)).mean()
    assert first(made, "jachess/penalty") == pytest.approx(expected, rel=1e-6)
    assert all(p.requires_grad for p in model.linear.parameters())


@pytest.mark.parametrize("name", ["r-drop", "smart"])
def test_several_labels_are_no_choice_among_them(tmp_path: Path, name: str) -> None:
    logits_that_are_equal(tmp_path, name, {"adv_start": 0.3} if name == "smart" else {})


def test_l2_sp_pulls_towards_the_start(tmp_path: Path) -> None:
    """θ ← θ − η (A (θ − x̄) + s (θ − θ₀)), three times."""
    data = centres(4)
    mean = torch.stack([row["x"] for row in data]).mean(0)
    made = trained(tmp_path, "l2-sp", Quadratic(), data=data, max_steps=3, method={"strength": 2.0})
    theta = START.clone()
    for _ in range(3):
        theta -= LR * (CURVATURE @ (theta - mean) + 2.0 * (theta - START))
    torch.testing.assert_close(made.model.theta.detach(), theta, rtol=1e-9, atol=1e-9)


def test_wise_ft_interpolates_all_but_the_new_head(tmp_path: Path) -> None:
    model, plain = classifier("bert"), classifier("bert")
    model.drawn_modules = ("classifier",)
    start = parameters(model)
    for name, one, method in (("wise-ft", model, {"mix": 0.3}), ("none", plain, {})):
        trained(tmp_path, name, one, data=examples(8), max_steps=3, method=method)
    for name, now in parameters(model).items():
        end = parameters(plain)[name]
        share = 1.0 if name.startswith("classifier") else 0.3
        torch.testing.assert_close(now, (1 - share) * start[name] + share * end, rtol=1e-9, atol=0)


def test_a_model_without_pretrained_weights_is_refused(tmp_path: Path) -> None:
    """All are new, or nothing tells which are, or adapters leave them as they are."""
    new, adapted = LinearModel(), with_lora(classifier("bert", dtype=torch.float32))
    new.drawn_modules = ("linear",)
    for model in (new, adapted):
        with pytest.raises(ValueError, match="needs pretrained weights that are trained"):
            method_trainer(tmp_path, "wise-ft", model=model)
    made = method_trainer(tmp_path, "wise-ft")
    del made.model.drawn_modules
    with pytest.raises(ValueError, match="needs pretrained weights that are trained"):
        made.method.prepare()


def test_each_trial_starts_from_its_own_weights(tmp_path: Path) -> None:
    """A trainer with model_init binds its method anew to the model of each trial."""
    ends = []
    for seeds in ((0, 1, 2), (2, 2)):
        made = one_with_trials(tmp_path, "l2-sp,strength=2", model_init=Models(*seeds))
        for _ in seeds[1:]:
            made.train()
        ends.append(made.model)
    assert_same_parameters(*ends, rtol=0, atol=0)
