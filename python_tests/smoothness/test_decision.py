"""`DecisionPenalty` against finite differences, autograd, statistics of its draws, and by hand."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from jachess_ext.jet.directions import DrawCounter
from jachess_ext.smoothness import DecisionPenalty, Isotropic, Substitution

from .tiny_models import LABELS, VOCABULARY, classifier, token_batch

BATCH = {name: tensor for name, tensor in token_batch([5, 3]).items() if name != "labels"}
LABELLED = BATCH | {"labels": torch.tensor([0, 2])}
SWAPS = Substitution(special=(0, 1), unknown=3, share=0.6)


class Given:
    """A perturbation with constant directions."""

    def __init__(self, directions: Tensor) -> None:
        self.directions = directions

    def __call__(self, model: Any, batch: Any, x: Tensor, mask: Tensor, *rest: Any) -> Tensor:
        return self.directions * mask[..., None]


def embedded(model: Any, batch: dict[str, Any] = BATCH) -> Tensor:
    return model.get_input_embeddings()(batch["input_ids"])


def logits_at(model: Any, embeddings: Tensor, batch: dict[str, Any] = BATCH) -> Tensor:
    """Return the logits with the embedding layer's output replaced."""
    layer = model.get_input_embeddings()
    handle = layer.register_forward_hook(lambda *_: embeddings)
    try:
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    finally:
        handle.remove()


def some_directions(count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    shape = (count, *BATCH["input_ids"].shape, 12)
    u = torch.randn(shape, generator=generator, dtype=torch.float64)
    return u * BATCH["attention_mask"][..., None]


def kl(p: Tensor, q: Tensor) -> Tensor:
    return F.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none").sum(-1)


def kl_second_difference(model: Any, u: Tensor, step: float) -> Tensor:
    """Take ½ d²/dh² KL(p(x) ‖ p(x + h u)) at h = 0 by central differences of the model."""
    x = embedded(model)
    here = logits_at(model, x)
    total = torch.zeros((), dtype=torch.float64)
    for direction in u:
        for sign in (1, -1):
            moved = kl(here, logits_at(model, x + sign * step * direction))
            total = total + moved.mean() / (2 * step**2)
    return total / len(u)


def parameters_of(model: Any) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("name", ["bert", "gpt2", "opt"])
def test_fisher_is_the_second_difference_of_kl(name: str) -> None:
    model = classifier(name, attention="sdpa")  # OPT's eager softmax is float32 in float64 too
    u = some_directions()
    out = DecisionPenalty(model, perturbation=Given(u))(BATCH)
    coarse, fine = (kl_second_difference(model, u, step) for step in (1e-3, 5e-4))
    expected = (4 * fine - coarse) / 3  # the error of a difference is of order step²
    torch.testing.assert_close(out.loss, expected, rtol=1e-7, atol=0)
    got = torch.autograd.grad(out.loss, parameters_of(model), allow_unused=True)
    want = torch.autograd.grad(expected, parameters_of(model), allow_unused=True)
    scale = max(w.abs().max() for w in want if w is not None)
    assert scale > 1e-3
    for g, w in zip(got, want, strict=True):
        if w is not None and w.abs().max() > 0:
            assert g is not None
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6 * float(scale))


def logit_derivatives(model: Any, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return z, D_u ``[q, B, C]`` and D²z[u, u] by reverse-mode autograd, output by output."""
    x = embedded(model).detach().requires_grad_()
    z = logits_at(model, x)
    first, second = [], []
    for direction in u:
        of_first, of_second = [], []
        for c in range(z.shape[-1]):
            g = torch.autograd.grad(z[:, c].sum(), x, create_graph=True)[0]
            along = (g * direction).sum((1, 2))
            h = torch.autograd.grad(along.sum(), x, retain_graph=True)[0]
            of_first.append(along.detach())
            of_second.append((h * direction).sum((1, 2)).detach())
        first.append(torch.stack(of_first, -1))
        second.append(torch.stack(of_second, -1))
    return z.detach(), torch.stack(first), torch.stack(second)


@pytest.mark.parametrize("order", [1, 2])
def test_divergence_of_the_expansion(order: int) -> None:
    model = classifier("bert")
    u = some_directions(1)
    out = DecisionPenalty(
        model, form="divergence", order=order, directions=1, perturbation=Given(u)
    )(BATCH)
    z, first, second = logit_derivatives(model, u)
    moved = z + first[0] + (second[0] / 2 if order == 2 else 0)
    torch.testing.assert_close(out.loss.detach(), kl(z, moved).mean(), rtol=1e-10, atol=0)


def test_margin_over_slope_by_autograd() -> None:
    model = classifier("bert")
    u = some_directions()
    batch = BATCH | {"labels": torch.tensor([0, 2])}
    z, first, _ = logit_derivatives(model, u)
    batch["labels"][0] = z[0].argmax()  # one row right, one wrong
    batch["labels"][1] = z[1].argmin()
    expected = 0.0
    for row, label in enumerate(batch["labels"].tolist()):
        others = [c for c in range(LABELS) if c != label]
        rival = max(others, key=lambda c: z[row, c].item())
        gap = (z[row, label] - z[row, rival]).item()
        if gap > 0:
            squares = [(d[row, label] - d[row, rival]).item() ** 2 for d in first]
            expected += math.log(math.sqrt(sum(squares) / 2 + 1e-6)) - math.log(gap + 0.1)
    out = DecisionPenalty(model, form="margin", perturbation=Given(u))(batch)
    assert expected != 0
    assert out.loss.item() == pytest.approx(expected / 2, rel=1e-9)


def test_on_the_way_to_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """With path the model and its derivatives are at x + s u, s another number in every row."""
    shares = torch.tensor([0.25, 0.8], dtype=torch.float64)[:, None, None]
    module = sys.modules[DecisionPenalty.__module__]
    monkeypatch.setattr(module, "_shares", lambda rows, draw: shares)
    model = classifier("bert")
    u = some_directions()
    penalty = DecisionPenalty(model, path=True, perturbation=Given(u))
    out = penalty(BATCH)
    moved = embedded(model) + shares * u[0]
    here = logits_at(model, moved)
    torch.testing.assert_close(out.model_output.logits, here, rtol=1e-10, atol=1e-12)
    total = 0.0
    for direction in u:
        for sign in (1, -1):
            there = logits_at(model, moved + sign * 1e-4 * direction)
            total += kl(here, there).mean().item() / (2 * 1e-8) / len(u)
    assert out.loss.item() == pytest.approx(total, rel=1e-5)


def test_shares_of_the_way_are_uniform() -> None:
    model = classifier("bert")
    seen = []
    x = embedded(model)

    class Recorded(Given):
        def __call__(self, model: Any, batch: Any, x: Tensor, mask: Tensor, *rest: Any) -> Tensor:
            return torch.ones(1, *x.shape, dtype=x.dtype)

    layer = model.bert.embeddings.LayerNorm  # sees x + s + positions and types
    rest = (
        (model.bert.embeddings.position_embeddings.weight[:5])[None]
        + (model.bert.embeddings.token_type_embeddings.weight[0])
    )
    layer.register_forward_hook(
        lambda module, inputs, output: (
            seen.append(inputs[0].streams[0] - rest - x) if hasattr(inputs[0], "streams") else None
        )
    )
    penalty = DecisionPenalty(model, path=True, directions=1, perturbation=Recorded(x), seed=0)
    for _ in range(300):
        penalty(BATCH)
    moved = torch.stack(seen)  # [300, B, T, d], the same number in all of a row
    assert (moved - moved[:, :, :1, :1]).abs().max() < 1e-12
    shares = moved[:, :, 0, 0].flatten().sort().values
    even = (torch.arange(600, dtype=torch.float64) + 0.5) / 600
    assert (shares - even).abs().max() < 0.07  # Kolmogorov and Smirnov, p = .006


def test_forms_of_a_regression_and_of_many_labels() -> None:
    u = some_directions()
    for kind in ("regression", "multi_label_classification"):
        model = classifier("bert")
        model.config.problem_type = kind
        z, first, _ = logit_derivatives(model, u)
        weight = torch.ones_like(z)
        if kind != "regression":
            weight = z.sigmoid() * (1 - z.sigmoid())
        expected = (weight * first.square()).sum(-1).mean() / 2
        out = DecisionPenalty(model, perturbation=Given(u))(BATCH)
        torch.testing.assert_close(out.loss.detach(), expected, rtol=1e-9, atol=0)
        with pytest.raises(ValueError, match="form='margin' needs one of several classes"):
            DecisionPenalty(model, form="margin", perturbation=Given(u))(BATCH)


def language_model(causal: bool) -> Any:
    if causal:
        return classifier("gpt2", head=AutoModelForCausalLM)
    return classifier("bert", head=AutoModelForMaskedLM)


@pytest.mark.parametrize("causal", [True, False])
def test_language_models_decide_at_labelled_positions(causal: bool) -> None:
    model = language_model(causal)
    u = some_directions()
    labels = torch.full_like(BATCH["input_ids"], -100)
    labels[0, 2], labels[1, 1] = 4, 5
    x = embedded(model).detach()
    step, total = 1e-4, 0.0
    for row, position in ((0, 2), (1, 1)):
        at = position - 1 if causal else position  # a causal model's token is told one before it
        here = logits_at(model, x)[row, at]
        for direction in u:
            for sign in (1, -1):
                moved = logits_at(model, x + sign * step * direction)[row, at]
                total += kl(here, moved).item() / (2 * step**2) / len(u) / 2
    out = DecisionPenalty(model, perturbation=Given(u))(BATCH | {"labels": labels})
    assert out.loss.item() == pytest.approx(total, rel=1e-5)
    everywhere = DecisionPenalty(model, perturbation=Given(u))(BATCH)
    assert everywhere.loss.item() > 0 and everywhere.loss.item() != pytest.approx(total, rel=1e-3)


def test_the_model_output_and_its_loss_are_the_plain_ones() -> None:
    model = classifier("bert")
    plain = model(**LABELLED)
    out = DecisionPenalty(model, strength=0.3, perturbation=SWAPS, seed=1)(LABELLED)
    torch.testing.assert_close(out.model_output.logits, plain.logits, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(out.total - out.loss, plain.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.loss.detach(), 0.3 * out.figures["penalty"], rtol=1e-15, atol=0)


# Directions --------------------------------------------------------------------------------------


def test_swapped_tokens_have_the_statistics_asked_for() -> None:
    ids = torch.tensor([[1, 5, 5, 5, 6, 7, 2, 0], [1, 5, 8, 2, 0, 0, 0, 0]]).repeat(400, 1)
    mask = ids != 0
    swaps = Substitution(special=(0, 1, 2), unknown=3, share=0.2, unknown_share=0.25)
    new = swaps.swap(ids, mask, 3, DrawCounter(7))
    free = mask & ~torch.isin(ids, torch.tensor([0, 1, 2]))
    assert new.shape == (3, *ids.shape)
    assert torch.equal(new[:, ~free], ids.expand(3, *ids.shape)[:, ~free])
    drawn = torch.ones(3, 1, 1, dtype=torch.bool) & free
    unknown = (new == 3)[drawn].double().mean().item()
    assert unknown == pytest.approx(0.2 * 0.25, abs=4 * math.sqrt(0.05 * 0.95 / drawn.sum()))
    # Of the tokens that become another one of the batch, a share as large as in the batch.
    frequency = {token: (ids[free] == token).double().mean().item() for token in (5, 6, 7, 8)}
    for token, share in frequency.items():
        others = drawn & (ids != token)
        seen = (new == token)[others].double().mean().item()
        expected = 0.2 * 0.75 * share
        error = 4 * math.sqrt(expected / int(others.sum()))
        assert seen == pytest.approx(expected, abs=error), token
    assert not torch.equal(new[0], new[1])


def test_swaps_are_the_same_with_more_padding() -> None:
    ids, mask = BATCH["input_ids"], BATCH["attention_mask"].bool()
    wider = F.pad(ids, (2, 3)), F.pad(mask, (2, 3))
    few = SWAPS.swap(ids, mask, 2, DrawCounter(5))
    many = SWAPS.swap(*wider, 2, DrawCounter(5))
    assert torch.equal(few[:, mask], many[:, wider[1]])


def test_a_swap_is_the_difference_of_two_embeddings() -> None:
    model = classifier("bert")
    ids, mask = BATCH["input_ids"], BATCH["attention_mask"].bool()
    x = embedded(model)
    u = SWAPS(model, BATCH, x, mask, 2, DrawCounter(5))
    table = model.get_input_embeddings().weight
    new = SWAPS.swap(ids, mask, 2, DrawCounter(5))
    assert (new != ids).any()
    torch.testing.assert_close(u, table[new] - table[ids], rtol=0, atol=0)


@pytest.mark.parametrize("perturbation", [Isotropic(0.7), SWAPS])
@pytest.mark.parametrize("form", ["fisher", "divergence", "margin"])
def test_a_larger_table_is_no_gain(form: str, perturbation: Any) -> None:
    """BERT normalises its embeddings: scaling all of them changes neither output nor penalty."""
    model = classifier("bert")
    model.bert.embeddings.LayerNorm.eps = 1e-30
    tables = [
        getattr(model.bert.embeddings, f"{kind}_embeddings").weight
        for kind in ("word", "position", "token_type")
    ]
    penalty = DecisionPenalty(model, form=form, perturbation=perturbation, seed=2)
    loss = penalty(BATCH).loss
    gradients = torch.autograd.grad(loss, tables)
    along = sum((g * t).sum() for g, t in zip(gradients, tables, strict=True))
    size = sum((g * t).abs().sum() for g, t in zip(gradients, tables, strict=True))
    assert abs(along) < 1e-8 * size
    with torch.no_grad():
        for table in tables:
            table *= 3
    penalty.step = 0
    torch.testing.assert_close(penalty(BATCH).loss, loss, rtol=1e-9, atol=0)


def test_isotropic_noise_has_the_embeddings_size() -> None:
    model = classifier("bert")
    batch = token_batch([20] * 20)
    x, mask = embedded(model, batch), batch["attention_mask"].bool()
    u = Isotropic(0.5)(model, batch, x, mask, 4, DrawCounter(1))
    assert u.std().item() == pytest.approx(0.5 * x.square().mean().sqrt().item(), rel=0.02)


# Strength ----------------------------------------------------------------------------------------


class Line(nn.Module):
    """z = w · mean(x), whose task loss wants w to be 10."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 4).double()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        logits = self.w * self.table(input_ids).mean((1, 2))[:, None]
        return {"logits": logits, "loss": (self.w - 10).square()}


@pytest.mark.parametrize("target", [4.0, 25.0])
def test_the_dual_variable_reaches_its_target(target: float) -> None:
    """The penalty is proportional to w², so that a target of 4 means w = 2."""
    torch.manual_seed(0)
    model = Line()
    penalty = DecisionPenalty(model, target=target, directions=4, seed=0)
    penalty.calibrate([BATCH] * 100)
    optimizer = torch.optim.Adam([model.w], lr=0.02)
    reached = []
    for _ in range(3000):
        optimizer.zero_grad()
        out = penalty(BATCH)
        (out.loss + out.model_output["loss"]).backward()
        optimizer.step()
        reached.append(model.w.item())
    assert sum(reached[-1000:]) / 1000 == pytest.approx(math.sqrt(target), rel=0.1)
    assert max(reached) < 9.5  # where the task alone would have taken it


def test_a_lazy_penalty_acts_in_every_nth_step() -> None:
    model = classifier("bert")
    lazy = DecisionPenalty(model, every=3, strength=0.5, seed=4)
    eager = DecisionPenalty(model, strength=1.5, seed=4)
    for number in range(7):
        out = lazy(LABELLED)
        eager.step = number
        if number % 3:
            assert out.loss.item() == 0
            torch.testing.assert_close(out.total, model(**LABELLED).loss, rtol=1e-14, atol=0)
        else:
            torch.testing.assert_close(out.loss, eager(LABELLED).loss, rtol=1e-14, atol=0)


# State and errors --------------------------------------------------------------------------------


def test_seeds_and_state() -> None:
    model = classifier("bert")
    first = DecisionPenalty(model, perturbation=SWAPS, seed=3, target=2.0, strength=0.2)
    first.calibrate([BATCH])
    losses = [first(BATCH).loss.item() for _ in range(3)]
    assert len(set(losses)) == 3
    state = first.state_dict()
    ahead = first(BATCH).loss.item()
    second = DecisionPenalty(model, perturbation=SWAPS, target=2.0, strength=0.2)
    second.load_state_dict(state)
    assert second(BATCH).loss.item() == ahead
    with pytest.raises(ValueError, match="the penalty's state"):
        second.load_state_dict({"step": 1})


def test_calibrating_leaves_the_model_as_it_was() -> None:
    model = classifier("bert", dropout=0.5).train()
    model.bert.pooler.eval()
    penalty = DecisionPenalty(model, target=1.0, seed=0)
    assert penalty.calibrate([BATCH]) == penalty.calibrate(BATCH)
    assert model.training and not model.bert.pooler.training


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"form": "slope"}, "form is 'slope'; expected one of fisher, divergence, margin"),
        ({"order": 2}, "order is 2; expected 1, or 2 with form='divergence'"),
        ({"directions": 5}, "directions is 5; expected 1 to 4"),
        ({"strength": float("nan")}, "strength is nan; expected a finite number"),
        ({"target": -1.0}, "target is -1.0; expected a number above 0"),
        ({"target": 1.0, "strength": 0}, "strength is 0; expected a number above 0"),
        ({"every": 0}, "every is 0; expected a number of steps from 1 up"),
        ({"on_nonfinite": "stop"}, "on_nonfinite is 'stop'; expected one of 'raise', 'skip'"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecisionPenalty(classifier("bert"), **settings)


def test_bad_calls() -> None:
    model = classifier("bert")
    with pytest.raises(ValueError, match=r"call calibrate\(batches\)"):
        DecisionPenalty(model, target=1.0)(BATCH)
    with pytest.raises(ValueError, match="there is no batch"):
        DecisionPenalty(model, target=1.0).calibrate([])
    vectors = {"inputs_embeds": embedded(model), "attention_mask": BATCH["attention_mask"]}
    with pytest.raises(ValueError, match="swapping tokens needs input_ids"):
        DecisionPenalty(model, perturbation=SWAPS)(vectors)
    labels = torch.full_like(BATCH["input_ids"], -100)
    with pytest.raises(ValueError, match="no token of the batch has a label"):
        DecisionPenalty(language_model(False))(BATCH | {"labels": labels})
    with pytest.raises(ValueError, match="returned no logits that depend on its embeddings"):
        DecisionPenalty(model.bert)(BATCH)
    with pytest.raises(ValueError, match="needs 'labels' in the batch"):
        _ = DecisionPenalty(model)(BATCH).total


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_penalty_that_is_not_finite(bad: float) -> None:
    model = classifier("bert")
    u = some_directions()
    u[0, 0, 0] = bad
    with pytest.raises(FloatingPointError, match="step 0: the penalty is not finite"):
        DecisionPenalty(model, perturbation=Given(u))(BATCH)
    penalty = DecisionPenalty(model, perturbation=Given(u), on_nonfinite="skip", target=1.0)
    penalty.base = 1.0
    out = penalty(BATCH)
    assert out.skipped == 0 and out.total.item() == 0 and penalty.strength == 1.0
