"""Language models, encoder-decoders among them, with tied and untied output heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jachess_ext as jx
from jachess_ext.ntk import measure_ntk

from .models import LANGUAGE_MODELS, VOCABULARY, language_batch, language_model
from .oracles import Function, error, kernel

LENGTHS = [7, 4, 5]
CAUSAL = ("gpt2", "opt", "llama")


def _token_logits(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(**batch).logits  # with labels: encoder-decoders make their inputs of them


def _label_logit(model: nn.Module, name: str) -> Function:
    """Mean logit of the label over the tokens that have one, token by token."""

    def f(batch: dict[str, Any]) -> Tensor:
        logits, labels = _token_logits(model, batch), batch["labels"]
        shift = 1 if name in CAUSAL else 0
        rows = []
        for n in range(len(labels)):
            picked = [
                logits[n, t - shift, labels[n, t]]
                for t in range(shift, labels.shape[1])
                if labels[n, t] != -100
            ]
            rows.append(torch.stack(picked).mean())
        return torch.stack(rows)[:, None]

    return f


def _last_logits(model: nn.Module) -> Function:
    def f(batch: dict[str, Any]) -> Tensor:
        logits, labels = _token_logits(model, batch), batch["labels"]
        last = [max(t for t in range(len(row)) if row[t] != -100) for row in labels]
        return torch.stack([logits[n, t] for n, t in enumerate(last)])

    return f


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_label(name: str, tied: bool) -> None:
    model, samples = language_model(name, tied), language_batch(LENGTHS)
    found = measure_ntk(model, samples, outputs="label")
    assert found.theta.shape == (3, 1, 3, 1)
    assert error(found.theta, kernel(model, samples, f=_label_logit(model, name))) < 1e-10
    assert not found.report.fallback


def _two_words(model: nn.Module) -> Function:
    return lambda batch: _token_logits(model, batch)[:, 2, :2]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "bart"])
def test_whole_logits(name: str, tied: bool) -> None:
    """A head read by a callable is a linear layer, and one parameter with the embedding if tied."""
    model, samples = language_model(name, tied), language_batch(LENGTHS)
    found = measure_ntk(model, samples, outputs=lambda out, batch: out.logits[:, 2, :2])
    assert error(found.theta, kernel(model, samples, f=_two_words(model))) < 1e-10
    assert not found.report.fallback
    assert ("tied" in {choice.form for choice in found.report.choices}) == tied


def test_label_without_padding_and_in_float32() -> None:
    exact, samples = language_model("gpt2", True), language_batch([5, 5])
    theta = jx.ntk(language_model("gpt2", True, torch.float32), samples, outputs="label")
    assert error(theta, kernel(exact, samples, f=_label_logit(exact, "gpt2"))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_next_token_logits(name: str) -> None:
    """All logits at the last real token, their sum, and random projections of them."""
    model, samples = language_model(name, True), language_batch(LENGTHS)
    expected = kernel(model, samples, f=_last_logits(model))
    assert error(jx.ntk(model, samples), expected) < 1e-10
    # The sum is differentiated as one output, scaled as it is scaled: transformers' norms round
    # cotangents to float32, so that gradients are linear in them only to 1e-7, even in float64.
    last = _last_logits(model)
    pooled = kernel(
        model, samples, f=lambda batch: last(batch).sum(1, keepdim=True) / VOCABULARY**0.5
    )
    assert error(jx.ntk(model, samples, outputs="sum"), pooled) < 1e-10
    projected = jx.ntk(model, samples, outputs=30)
    assert projected.shape == (3, 30, 3, 30)
    assert _within(torch.einsum("njmj->nm", projected), expected, 30)


def _within(estimate: Tensor, full: Tensor, count: int) -> bool:
    """Six standard deviations around the trace, of the variance stated, (2/k) Σ_{c≠c'} S_cc'²."""
    trace = torch.einsum("ncmc->nm", full)
    symmetric = (full + full.permute(0, 3, 2, 1)) / 2
    off = symmetric * (1 - torch.eye(full.shape[1]))[None, :, None, :]
    deviation = (2 / count * off.square().sum((1, 3))).sqrt()
    return bool(((estimate - trace).abs() <= 6 * deviation).all())


@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_forced_forms_with_tied_weights(name: str) -> None:
    model, samples = language_model(name, True), language_batch(LENGTHS)
    for outputs, f in (
        ("label", _label_logit(model, name)),
        (lambda out, batch: out.logits[:, 2, :2], _two_words(model)),
    ):
        expected = kernel(model, samples, f=f)
        for method in ("gram", "materialise", "per_sample"):
            theta = jx.ntk(model, samples, outputs=outputs, method=method)
            assert error(theta, expected) < 1e-10


def test_unequal_sides_with_tied_weights() -> None:
    model = language_model("gpt2", True)
    left, right = language_batch(LENGTHS), language_batch([3, 4], seed=11)
    expected = kernel(model, left, right, f=_label_logit(model, "gpt2"))
    assert error(jx.ntk(model, left, right, outputs="label"), expected) < 1e-10
    expected = kernel(model, left, right, f=_two_words(model))
    found = jx.ntk(model, left, right, outputs=lambda out, batch: out.logits[:, 2, :2])
    assert error(found, expected) < 1e-10
