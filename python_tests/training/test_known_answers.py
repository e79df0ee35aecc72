"""SAM, TAPT and penalties of logits on problems with an answer in closed form."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2ForSequenceClassification, PreTrainedTokenizerFast

from jachess_ext.training import with_lora
from jachess_ext.training.decision import kl_divergence
from jachess_ext.training.methods.weights import is_masked, language_model, sharpness_aware_gradient

from .runs import SGD, first, method_trainer, tensors

LR = SGD["learning_rate"]
CURVATURE = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
START = torch.tensor([1.0, -2.0], dtype=torch.float64)


class Quadratic(nn.Module):
    """Loss: mean over rows of ½ (θ − x)ᵀ A (θ − x)."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(START.clone())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        away = self.theta - x
        return {"loss": ((away @ CURVATURE) * away).sum(-1).mean() / 2}


def centres(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(2, generator=generator, dtype=torch.float64)} for _ in range(count)]


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_sam_on_a_quadratic(tmp_path: Path, steps: int) -> None:
    """θ ← θ − η A(θ + ρ g/‖g‖ − x̄), however the batch is cut into micro-batches."""
    data = centres(8)
    mean = torch.stack([row["x"] for row in data]).mean(0)
    made = method_trainer(
        tmp_path,
        "sam",
        model=Quadratic(),
        data=data,
        max_steps=1,
        per_device_train_batch_size=8 // steps,
        gradient_accumulation_steps=steps,
    )
    made.train()
    gradient = CURVATURE @ (START - mean)
    climbed = START + made.method.rho * gradient / gradient.norm()
    expected = START - LR * CURVATURE @ (climbed - mean)
    torch.testing.assert_close(made.model.theta.detach(), expected, rtol=1e-12, atol=1e-12)


def test_sam_leaves_the_weights_bit_for_bit() -> None:
    model = Quadratic().float()
    with torch.no_grad():
        model.theta.mul_(1 / 3)
    before = model.theta.detach().clone()
    x = torch.tensor([[0.1, 0.2]])

    def backward() -> None:
        away = model.theta - x
        ((away @ CURVATURE.float()) * away).sum().backward()

    backward()
    norm = sharpness_aware_gradient(model.parameters(), backward, rho=0.05)
    assert torch.equal(model.theta, before) and norm > 0


@pytest.mark.parametrize("gradient", [0.0, float("inf")])
def test_sam_does_not_climb_along_nothing(gradient: float) -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), gradient)

    def never() -> None:
        raise AssertionError("a second pass was made")

    sharpness_aware_gradient([parameter], never, rho=0.05)
    assert parameter.grad.tolist() == [gradient] * 2


class LinearModel(nn.Module):
    """logits = W x + b, x the sum of a row's token embeddings; softmax cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = nn.Embedding(5, 3).double().requires_grad_(False)
        self.linear = nn.Linear(3, 2).double()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.linear(self.embeddings(input_ids).sum(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return Output(loss=loss, logits=logits)


class Output(dict):
    """A dict with attributes, as models return them."""

    __getattr__ = dict.__getitem__


ROWS = [
    {"input_ids": torch.tensor([1, 2]), "labels": torch.tensor(0)},
    {"input_ids": torch.tensor([3, 4]), "labels": torch.tensor(1)},
]


@pytest.mark.parametrize("size", [1e-5, 1.0])
def test_divergence_is_the_sum_of_both_kl(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(4, 3, generator=generator)
    q = p + size * torch.randn(4, 3, generator=generator)
    a, b = p.double().log_softmax(-1), q.double().log_softmax(-1)
    expected = (a.exp() * (a - b) + b.exp() * (b - a)).sum(-1)
    torch.testing.assert_close(
        kl_divergence(p, q, symmetric=True).double(), expected, rtol=0.1, atol=0
    )
    assert kl_divergence(p, p, "regression", symmetric=True).tolist() == [0.0] * 4


class TwoTokens(nn.Module):
    """logits_c = w_c·s + ½ sᵀ A_c s of the sum s of two tokens' embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embeddings = nn.Embedding(5, 3).double().requires_grad_(False)
        self.first = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))
        square = torch.randn(2, 3, 3, dtype=torch.float64)
        self.second = nn.Parameter(square + square.transpose(1, 2))

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> Any:
        x = self.embeddings(input_ids)
        s = x.sum(1)
        curved = [((s @ a) * s).sum(-1) / 2 for a in self.second]
        logits = s @ self.first.T + torch.stack(curved, -1)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return Output(loss=loss, logits=logits, hidden_states=(x, x * 1.0))


@pytest.mark.parametrize("mode, engine", [("train", "exact"), ("joint", "exact"), ("train", "jet")])
@pytest.mark.parametrize("name", ["jacobian", "cross-holder"])
def test_logit_derivatives_of_two_tokens(tmp_path: Path, name: str, mode: str, engine: str) -> None:
    """∂logit_c/∂x_t = w_c + A_c s for both tokens, and H_c is A_c four times over.

    So ‖J‖_F = √2 ‖W + A s‖_F and ‖H_c‖_F = 2 ‖A_c‖_F; squares of both are what jets estimate
    without bias.
    """
    exact = engine == "exact"
    settings = {"engine": engine, "normalize": False, "strength": 0.1, "squared": not exact}
    if not exact:
        settings |= {"directions": 100}
    made = method_trainer(
        tmp_path,
        f"{name}-{mode}",
        model=TwoTokens(),
        data=ROWS,
        unlabelled=ROWS,
        method=settings,
        max_steps=1,
    )
    model = TwoTokens()
    made.train()
    ids, labels = tensors(ROWS).values()
    s = model.embeddings(ids).sum(1)
    curvature = (model.second + model.second.transpose(1, 2)) / 2
    slopes = model.first + torch.einsum("cij,bj->bci", curvature, s)
    jacobian = 2 * slopes.square().sum((1, 2))
    hessian = 4 * curvature.square().sum((1, 2))
    if exact:
        jacobian, hessian = jacobian.sqrt(), hessian.sqrt()
    penalty = 0.1 * (jacobian.mean() + (hessian.sum() if name == "cross-holder" else 0.0))
    logged = first(made, "jachess/penalty")
    assert logged == pytest.approx(penalty.item(), rel=1e-6 if exact else 0.15)
    if exact:
        (model(ids, labels=labels).loss + penalty).backward()
        for after, before in zip(
            [made.model.first, made.model.second], [model.first, model.second], strict=True
        ):
            expected = before.detach() - LR * before.grad
            torch.testing.assert_close(after.detach(), expected, rtol=1e-6, atol=1e-7)


FLIP = 0.25


def chain(rows: int, tokens: int) -> list[dict[str, Tensor]]:
    """A Markov chain of two tokens (1 and 2) that changes with probability `FLIP`."""
    generator = torch.Generator().manual_seed(0)
    flips = torch.rand(rows, tokens, generator=generator) < FLIP
    ids = 1 + flips.cumsum(1) % 2
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]


def two_token_model() -> GPT2ForSequenceClassification:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=3,
        n_embd=8,
        n_layer=1,
        n_head=1,
        n_positions=16,
        num_labels=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2ForSequenceClassification(config)


def word_tokenizer(words: list[str], **special: str) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=words[0], **special)


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tapt_learns_the_chain_of_two_tokens(tmp_path: Path, lora: bool) -> None:
    """The best next-token probabilities are the chain's own: ¾ to stay, ¼ to change."""
    model = two_token_model()
    head = model.score.weight.detach().clone()
    if lora:
        model = with_lora(model)
    before = {n: p.requires_grad for n, p in model.named_parameters()}
    made = method_trainer(
        tmp_path,
        "tapt",
        model=model,
        data=[row | {"labels": torch.tensor(0)} for row in chain(4, 6)],
        unlabelled=chain(256, 12),
        method={"tapt_epochs": 5.0, "tapt_lr": 0.02},
        options={"processing_class": word_tokenizer(["<pad>", "a", "b"])},
        per_device_train_batch_size=16,
        learning_rate=1e-12,
        max_steps=1,
    )
    made.train()
    inner = model.get_base_model() if lora else model
    trained = language_model(inner)  # its head is tied: the one that was trained
    with torch.no_grad():
        p = trained(torch.tensor([[1, 1, 1, 2, 2]])).logits.softmax(-1)[0]
    for place, stay in ((2, 1), (4, 2)):
        assert p[place, stay].item() == pytest.approx(1 - FLIP, abs=0.05)
        assert p[place, 3 - stay].item() == pytest.approx(FLIP, abs=0.05)
    entropy = -(FLIP * math.log(FLIP) + (1 - FLIP) * math.log(1 - FLIP))
    logged = first(made, "jachess/tapt_loss")
    assert entropy - 0.02 < logged < math.log(3)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == before
    score = inner.score.original_module if lora else inner.score
    assert torch.allclose(score.weight, head, rtol=0, atol=1e-9), "the head is not TAPT's affair"


def test_tapt_masks_tokens_of_encoders(tmp_path: Path) -> None:
    from python_tests.smoothness.tiny_models import VOCABULARY, classifier

    words = ["<pad>", "<mask>", *(f"w{n}" for n in range(VOCABULARY - 2))]
    model = classifier("bert", dtype=torch.float32)
    before = model.bert.encoder.layer[0].attention.self.query.weight.detach().clone()
    rows = [
        {"input_ids": torch.full((6,), 3 + n % 2), "attention_mask": torch.ones(6).long()}
        for n in range(64)
    ]
    made = method_trainer(
        tmp_path,
        "tapt",
        model=model,
        unlabelled=rows,
        method={"tapt_epochs": 6.0, "tapt_lr": 0.02},
        options={"processing_class": word_tokenizer(words, mask_token="<mask>")},
        learning_rate=1e-12,
        max_steps=1,
    )
    made.train()
    assert not torch.allclose(model.bert.encoder.layer[0].attention.self.query.weight, before)
    logged = first(made, "jachess/tapt_loss")
    assert logged < 0.5 * math.log(VOCABULARY), "rows of one word leave nothing to guess"


def test_families_without_a_language_model() -> None:
    with pytest.raises(ValueError, match=r"family 'vision'.* has none"):
        is_masked(SimpleNamespace(model_type="vision"))
