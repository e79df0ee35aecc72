"""Curvature along the fine-tuning direction: against exact Hessians and their eigenvalues."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from jachess_ext.scaling import pac_bayes_bound
from jachess_ext.scaling.bound import layer_name, positive_curvature


def symmetric(n: int, seed: int) -> Tensor:
    half = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return half + half.T


def positive_part(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0)) @ vectors.T


@given(n=st.integers(1, 25), seed=st.integers(0, 100))
@settings(deadline=None, max_examples=30)
def test_quadrature_is_exact_at_the_end(n: int, seed: int) -> None:
    matrix, v = symmetric(n, seed), symmetric(n, seed + 1)[0]
    value, uncertainty = positive_curvature(lambda u: matrix @ u, v, 100)
    assert value == pytest.approx(float(v @ positive_part(matrix) @ v), rel=1e-8, abs=1e-10)
    assert uncertainty == 0


def test_quadrature_converges_early_and_says_so() -> None:
    generator = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(300, 300, dtype=torch.float64, generator=generator))
    values = torch.cat([torch.logspace(1, -4, 150), -0.01 * torch.ones(150)]).double()
    matrix = (q * values) @ q.T
    v = torch.randn(300, dtype=torch.float64, generator=generator)
    expected = float(v @ positive_part(matrix) @ v)
    errors = []
    for steps in (5, 10, 40):
        value, uncertainty = positive_curvature(lambda u: matrix @ u, v, steps)
        errors.append(abs(value - expected))
        assert errors[-1] < uncertainty
    assert errors[2] < 1e-3 * expected < errors[0]
    assert uncertainty < 0.1 * expected


def test_a_zero_vector_and_an_invariant_space() -> None:
    assert positive_curvature(lambda u: u, torch.zeros(4), 5) == (0.0, 0.0)
    value, uncertainty = positive_curvature(lambda u: 3 * u, torch.ones(50), 5)
    assert value == pytest.approx(150.0) and uncertainty == 0
    assert positive_curvature(lambda u: -3 * u, torch.ones(50), 5)[0] == 0


class Encoder(nn.Module):
    """Attention, a hidden layer and a head over three tokens; the attention is fused or not."""

    def __init__(self, seed: int, is_fused: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.is_fused = is_fused
        self.attention, self.hidden = nn.Linear(4, 12), nn.Linear(4, 3)
        self.head = nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (2, 2)) for part in self.attention(x).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in heads)
        if self.is_fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.mT / math.sqrt(2)).softmax(-1) @ v
        return self.head(self.hidden(mixed.transpose(1, 2).flatten(2)).tanh().mean(1))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(1, 3, 4, dtype=torch.float64, generator=generator), torch.tensor([k % 2]))
        for k in range(count)
    ]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def exact(model: nn.Module, before: nn.Module, batch: tuple[Tensor, Tensor], layer: str) -> float:
    """vᵀ H⁺ v with the dense Hessian of a layer, through attention written out."""
    written = Encoder(0, is_fused=False)
    written.load_state_dict(model.state_dict())
    names = [name for name, _ in model.named_parameters() if name.startswith(layer + ".")]
    parameters = dict(written.named_parameters())
    flat = torch.cat([parameters[name].detach().reshape(-1) for name in names])
    old = torch.cat([before.get_parameter(name).detach().reshape(-1) for name in names])

    def loss(vector: Tensor) -> Tensor:
        pieces = vector.split([parameters[name].numel() for name in names])
        swapped = {n: p.view_as(parameters[n]) for n, p in zip(names, pieces, strict=True)}
        logits = torch.func.functional_call(written, swapped, (batch[0],))
        return nn.functional.cross_entropy(logits, batch[1])

    hessian = torch.func.hessian(loss)(flat)
    change = (flat - old).detach()
    return float(change @ positive_part(hessian.detach()) @ change)


def test_every_layer_against_its_dense_hessian() -> None:
    model, before = Encoder(0), Encoder(1)
    examples = batches(4)
    found = pac_bayes_bound(model, before, examples, 500, steps=80, loss=cross_entropy, epsilon=0.2)
    assert [layer.name for layer in found.layers] == ["attention", "hidden", "head"]
    assert [layer.parameters for layer in found.layers] == [60, 15, 8]
    roots = 0.0
    for layer in found.layers:
        values = [exact(model, before, batch, layer.name) for batch in examples]
        assert layer.curvature == pytest.approx(max(values), rel=1e-7)
        assert layer.mean_curvature == pytest.approx(sum(values) / 4, rel=1e-7)
        assert layer.uncertainty == 0
        module, old = model.get_submodule(layer.name), before.get_submodule(layer.name)
        moved = sum(
            float((p - q).square().sum())
            for p, q in zip(module.parameters(), old.parameters(), strict=True)
        )
        assert layer.distance == pytest.approx(math.sqrt(moved))
        roots += math.sqrt(max(values))
    losses = [float(cross_entropy(model, batch).detach()) for batch in examples]
    assert found.train_loss == pytest.approx(sum(losses) / 4)
    assert found.empirical == pytest.approx(1.2 * sum(losses) / 4)
    assert found.loss_bound == pytest.approx(max(losses))
    assert found.curvature == pytest.approx(1.2 * math.sqrt(max(losses)) * roots / math.sqrt(500))
    assert found.remainder == pytest.approx(500**-0.75)
    assert found.total == pytest.approx(found.empirical + found.curvature + found.remainder)


def test_products_go_through_fused_attention() -> None:
    """No backend is forced, and no operator of attention written out by torch runs."""
    states = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        cuda = torch.backends.cuda
        states.append((cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()))
        return cross_entropy(model, batch)

    with torch.profiler.profile() as profile:
        pac_bayes_bound(Encoder(0), Encoder(1), batches(1), 10, steps=2, loss=loss)
    names = {event.key for event in profile.key_averages()}
    assert states == [(True, True)] * 7  # the loss, and two products of each layer
    assert any("jachess" in name and "attention" in name for name in names), names
    assert not any("attention_math" in name for name in names)


def test_terms_over_the_number_of_samples() -> None:
    model, before = Encoder(0), Encoder(0)
    for parameter in model.parameters():
        parameter.data.add_(0.01)
    (batch,) = batches(1)
    few = pac_bayes_bound(model, before, [batch], 1, loss=cross_entropy)
    many = pac_bayes_bound(model, before, [batch], 10**12, loss=cross_entropy)
    assert few.phase == "pre-power" and many.phase == "power"
    same = pac_bayes_bound(before, before.state_dict(), [batch], 10, loss=cross_entropy)
    assert same.curvature == 0


def test_a_transformer_with_a_new_head() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=30, intermediate_size=32, max_position_embeddings=16, **size)
    model = BertForSequenceClassification(config).double().eval()
    old = {
        name: value + 0.01 for name, value in model.state_dict().items() if "classifier" not in name
    }
    ids = torch.randint(0, 30, (2, 6))
    batch = {"input_ids": ids, "labels": torch.tensor([0, 1])}
    found = pac_bayes_bound(model, old, [batch], 100, steps=8)
    names = [layer.name for layer in found.layers]
    assert names == [
        "bert.embeddings",
        "bert.encoder.layer.0",
        "bert.encoder.layer.1",
        "bert.pooler",
    ]
    assert found.new_parameters == ("classifier.weight", "classifier.bias")
    assert all(layer.curvature > 0 for layer in found.layers)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.11.mlp.up_proj.weight", "model.layers.11"),
        ("0.weight", "0"),
        ("scale", "scale"),
    ],
)
def test_layers_of_names(name: str, layer: str) -> None:
    assert layer_name(name) == layer


def bad(**change: object) -> object:
    model = Encoder(0)
    given = {
        "model": model,
        "pretrained": Encoder(1),
        "batches": batches(1),
        "samples": 10,
        "loss": cross_entropy,
    }
    return pac_bayes_bound(**(given | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batches": []}, "batches is empty"),
        ({"samples": 0}, "samples is 0"),
        ({"epsilon": -1.0}, "epsilon is -1.0"),
        ({"pretrained": {}}, "no trainable parameter"),
        ({"pretrained": {"head.weight": torch.ones(2, 2)}}, "expected the same architecture"),
        ({"loss_bound": 1e-9}, "loss_bound is 1e-09"),
        ({"batches": [(torch.full((1, 3, 4), torch.nan).double(), torch.tensor([0]))]}, "is nan"),
    ],
)
def test_bad_input(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bad(**change)
