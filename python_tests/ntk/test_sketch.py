"""Form C: unbiased, of the stated variance, positive semidefinite, and the same in every block."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

import jachess_ext as jx
from jachess_ext.ntk import measure_ntk
from jachess_ext.ntk import sketch as sketch_module
from jachess_ext.ntk.contributions import Factors
from jachess_ext.ntk.cost import Size
from jachess_ext.ntk.sketch import Sketch, contract_sketched, sketch_flops

from .models import batch, classifier, language_batch, language_model
from .oracles import error, gradients, kernel, logits

C, N, M, T = 2, 3, 2, 4
SIZES = {"inputs wider": (7, 5), "cotangents wider": (5, 7)}


def _factors(samples: int, d: int, e: int, seed: int) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(samples, T, d, dtype=torch.float64, generator=generator)
    delta = torch.randn(C, samples, T, e, dtype=torch.float64, generator=generator)
    return Factors(a, delta)


def _whole(factors: Factors) -> Tensor:
    """G, [C, n, e, d]."""
    return torch.einsum("cntr,ntk->cnrk", factors.cotangents, factors.inputs)


def _stated(x: Tensor, y: Tensor, wider: int, size: int) -> tuple[Tensor, Tensor]:
    """Mean and variance as the module states them, from gradients written out."""
    # S over the wider side: Gᵀ G' (or G G'ᵀ)
    pattern = "cnri,dmrj->cndmij" if wider == 3 else "cnir,dmjr->cndmij"
    product = torch.einsum(pattern, x, y)
    symmetric = (product + product.transpose(-1, -2)) / 2
    mean = symmetric.diagonal(dim1=-2, dim2=-1).sum(-1)
    off = symmetric - torch.diag_embed(symmetric.diagonal(dim1=-2, dim2=-1))
    return mean, 2 / size * off.square().sum((-1, -2))


@pytest.mark.parametrize("sides", ["symmetric", "unequal"])
@pytest.mark.parametrize("widths", SIZES)
def test_exact_mean_and_variance(widths: str, sides: str) -> None:
    """Over all 2^7 signs of each of two columns: the moments themselves, not a sample of them."""
    d, e = SIZES[widths]
    left = _factors(N, d, e, 0)
    right = left if sides == "symmetric" else _factors(M, d, e, 1)
    columns = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 7).double()  # [128, 7]
    single = []
    for column in columns:  # K of one column, through a sketch of two equal ones

        class Fixed(Sketch):
            def signs(self, name: str, width: int, like: Tensor, column: Tensor = column) -> Tensor:
                assert width == len(column)
                return column[:, None].expand(-1, 2)

        found, squared = contract_sketched(
            "w", left, right, sides == "symmetric", Fixed(2, 0), torch.float64
        )
        assert squared == 0
        single.append(found)
    draws = torch.stack(single)
    mean, variance = _stated(_whole(left), _whole(right), 3 if d > e else 2, size=1)
    torch.testing.assert_close(draws.mean(0), mean, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(draws.var(0, correction=0), variance, rtol=1e-10, atol=1e-10)


def test_drawn_signs_give_the_stated_spread() -> None:
    """400 seeds: mean within 5 standard errors, variance and the estimate of it within 30 %."""
    left = _factors(N, 7, 5, 0)
    mean, variance = _stated(_whole(left), _whole(left), 3, size=4)
    draws, squares = [], []
    for seed in range(400):
        found, squared = contract_sketched("w", left, left, True, Sketch(4, seed), torch.float64)
        draws.append(found)
        squares.append(squared)
    values = torch.stack(draws)
    assert ((values.mean(0) - mean).abs() <= 5 * (variance / 400).sqrt()).all()
    total = float(variance.sum())
    assert float(values.var(0).sum()) == pytest.approx(total, rel=0.3)
    assert sum(squares) / 400 == pytest.approx(total, rel=0.3)


def test_signs_are_signs_and_of_a_name_of_their_own() -> None:
    sketch, like = Sketch(64, 5), torch.zeros(1, dtype=torch.float64)
    signs = sketch.signs("a", 300, like) * math.sqrt(32)
    assert torch.equal(signs.abs().round(decimals=12), torch.ones(300, 64, dtype=torch.float64))
    assert signs.mean().abs() < 5 / math.sqrt(300 * 64)
    assert torch.equal(sketch.signs("a", 300, like), sketch.signs("a", 300, like))
    assert not torch.equal(sketch.signs("a", 300, like), sketch.signs("b", 300, like))
    for seed in (6, 5 + 2**32, -5):
        assert not torch.equal(sketch.signs("a", 300, like), Sketch(64, seed).signs("a", 300, like))


# ---- whole models --------------------------------------------------------------------------------


def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sketch every linear layer, also where that saves nothing (as in these tiny models)."""
    monkeypatch.setattr(sketch_module, "sketch_flops", lambda size, columns: 0.0)


@pytest.mark.parametrize(
    "name",
    ["bert", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "llama"))],
)
def test_a_model_is_unbiased(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer against the closed-form variance from per-sample gradients written out."""
    _always(monkeypatch)
    model, samples = classifier(name), batch([5, 4])
    expected = kernel(model, samples)
    draws = [
        measure_ntk(model, samples, method="sketch", sketch_size=8, seed=seed) for seed in range(40)
    ]
    found = draws[0]
    sketched = {n for choice in found.report.choices if choice.form == "C" for n in choice.names}
    assert len(sketched) >= 8
    variance = torch.zeros_like(expected)
    for key in sketched:
        parameter = model.get_parameter(key)
        g = gradients(logits(model), samples, [parameter]).transpose(0, 1)
        g = g.unflatten(2, parameter.shape)
        if name == "gpt2" and "score" not in key:
            g = g.transpose(2, 3)  # Conv1D: [d, e]
        _, part = _stated(g, g, 2 if g.shape[2] > g.shape[3] else 3, size=8)
        variance += part.permute(1, 0, 3, 2)
    values = torch.stack([draw.theta for draw in draws])
    assert ((values.mean(0) - expected).abs() <= 5 * (variance / 40).sqrt() + 1e-12).all()
    spread = float(values.var(0).sum() / variance.sum())
    assert 0.6 < spread < 1.6
    # The report's own figure, from each draw alone: of the right size in the mean of squares.
    stated = float(variance.sum().sqrt() / expected.norm())
    errors = [draw.report.sketch_error for draw in draws]
    assert (sum(e**2 for e in errors) / len(errors)) ** 0.5 == pytest.approx(stated, rel=0.1)


def test_blocks_and_sides_share_their_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    _always(monkeypatch)
    model, left, right = classifier("bert"), batch([7, 4, 5, 3, 6]), batch([4, 3], seed=11)
    settings = {"method": "sketch", "sketch_size": 4, "seed": 3}
    whole = jx.ntk(model, left, **settings)
    with pytest.raises(ValueError, match="too few") as refused:
        jx.ntk(model, left, memory_budget=1, **settings)
    result, pair = map(
        int, re.findall(r"takes (\d+) and a pair of samples (\d+)", str(refused.value))[0]
    )
    small = measure_ntk(model, left, memory_budget=(result + 2 * pair) * 8 // 7 + 8, **settings)
    assert small.report.blocks == 6
    assert error(small.theta, whole) < 1e-12
    values = torch.linalg.eigvalsh(whole.flatten(2).flatten(0, 1))
    assert values[0] > -1e-12 * values[-1]
    cross = jx.ntk(model, left, right, **settings)
    assert error(jx.ntk(model, right, left, **settings).permute(2, 3, 0, 1), cross) < 1e-12


def test_more_columns_than_it_pays_for_are_exact() -> None:
    model, samples = classifier("bert"), batch([5, 4])
    found = measure_ntk(model, samples, method="sketch", sketch_size=4096)
    assert found.report.sketch_error == 0.0
    assert error(found.theta, jx.ntk(model, samples)) < 1e-12


def test_tied_heads_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    _always(monkeypatch)
    model, samples = language_model("gpt2", True), language_batch([5, 4])
    report = measure_ntk(model, samples, outputs=2, method="sketch").report
    assert report.form_of("transformer.wte.weight") == "tied"
    assert report.form_of("transformer.h.0.mlp.c_fc.weight") == "C"
    assert "sketched: relative error about" in str(report)


def test_counted_operations() -> None:
    size = Size(8, 16, 8, 16, 2, 384, 1536, symmetric=False)
    rows, vectors = 2 * 8 * 16, 2 * 8 * 2
    assert sketch_flops(size, 64) == (
        2 * rows * 2 * 1536 * 64  # δ Ω
        + 2 * rows * 2 * 384 * 64  # (δΩ)ᵀ a
        + 2 * 8 * 8 * 4 * 384 * 64  # products of pairs
        + 2 * vectors * 384 * 64  # writing and reading them
    )


@pytest.mark.parametrize(
    "size, sentence", [(0, "is 0; expected an even"), (3, "is 3; .*even"), (2.0, "2.0")]
)
def test_bad_sizes(size: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"sketch_size.*{sentence}"):
        jx.ntk(classifier("bert"), batch([5, 4]), method="sketch", sketch_size=size)  # type: ignore[arg-type]
