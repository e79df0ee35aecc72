"""`jet` and `reverse` agree in mean with full derivatives from finite differences (2 %).

Rows of a batch do not see each other and draw directions of their own, so many copies of one
sequence are as many independent estimates; each comparison averages over 2,000 directions or more.
Squares are compared as the norms they are squares of.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jachess_ext as jx
from jachess_ext.smoothness.estimators import chi_correction

from . import full_derivatives as full
from .tiny_models import BLOCKS, WIDTH, classifier, token_batch

TOKENS = 3
MODELS = ("bert", "gpt2")


def table(name: str, outputs: str = "blocks") -> full.Full:
    return full.table(name, TOKENS, outputs)


def estimate(name: str, engine: str, directions: int, rows: int, **settings: Any):
    batch = {k: v.expand(rows, *v.shape[1:]) for k, v in token_batch([TOKENS]).items()}
    with torch.no_grad():
        return jx.smoothness(
            classifier(name), batch, engine=engine, directions=directions, **settings
        )


def assert_squares_within(estimates: Tensor, expected: Tensor) -> None:
    assert_within(estimates.sqrt(), expected.sqrt())


def assert_within(estimates: Tensor, expected: Tensor, relative: float = 0.02) -> None:
    error = ((estimates - expected) / expected).abs().max().item()
    assert error < relative, f"{error:.1%} off: {estimates} against {expected}"


SLOW = pytest.mark.slow


@pytest.mark.parametrize("distribution", ["gaussian", "rademacher"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("engine", ["jet", pytest.param("reverse", marks=SLOW)])
def test_squares_per_layer_and_token(name: str, engine: str, distribution: str) -> None:
    settings: dict[str, Any] = {"squared": True, "dimensions": "all", "distribution": distribution}
    result = estimate(name, engine, 8, 1000, seed=1, **settings)
    exact = table(name)
    assert_squares_within(result.jacobian_tokens.mean(1), exact.jacobian.sum(-1))
    assert_squares_within(result.hessian_tokens.mean(1), exact.hessian.sum(-1) * 10 / WIDTH)
    assert_squares_within(result.jacobian, exact.jacobian.sum((-1, -2)))
    assert_squares_within(result.hessian, exact.hessian.sum((-1, -2)) * 10 / WIDTH)


@pytest.mark.parametrize("name", ["bert", pytest.param("gpt2", marks=SLOW)])
def test_jet_norms_per_layer_and_token(name: str) -> None:
    """Roots of means over 25 passes."""
    result = estimate(name, "jet", 100, 320, dimensions="all", seed=2)
    exact = table(name)
    assert_within(result.jacobian_tokens.mean(1), exact.jacobian.sum(-1).sqrt())
    assert_within(result.hessian_tokens.mean(1), exact.hessian.sqrt().sum(-1) * 10 / WIDTH)


@pytest.mark.parametrize("engine, directions, rows", [("jet", 50, 40), ("reverse", 10, 200)])
def test_tensor_norm(engine: str, directions: int, rows: int) -> None:
    settings = {"layers": [1], "scope": "last", "hessian_norm": "tensor", "seed": 3}
    result = estimate("bert", engine, directions, rows, **settings)
    assert_within(result.hessian, table("bert").hessian[1, -1].sum().sqrt()[None])
    squares = estimate("bert", "jet", 8, 1000, squared=True, **settings)
    assert_squares_within(squares.hessian, table("bert").hessian[1, -1].sum()[None])


@pytest.mark.parametrize("scope, positions", [("all", [0, 1, 2]), ("first", [0]), ("last", [2])])
@pytest.mark.parametrize("engine", ["jet", "reverse"])
def test_scopes(engine: str, scope: str, positions: list[int]) -> None:
    result = estimate("gpt2", engine, 8, 1000, scope=scope, squared=True, hessian=False, seed=4)
    out_of_scope = [t for t in range(TOKENS) if t not in positions]
    assert result.hessian is None and result.hessian_tokens is None
    assert result.jacobian_tokens[:, :, out_of_scope].eq(0).all()
    assert result.tokens[:, positions].all() and not result.tokens[:, out_of_scope].any()
    assert_squares_within(result.jacobian, table("gpt2").jacobian[:, positions].sum((-1, -2)))


@pytest.mark.parametrize("engine", ["jet", "reverse"])
def test_a_list_of_layers(engine: str) -> None:
    settings = {"scope": "last", "squared": True, "hessian": False, "seed": 5}
    both = estimate("bert", engine, 2, 3, **settings)
    first = estimate("bert", engine, 2, 3, layers=[0], **settings)
    assert both.jacobian.shape == (BLOCKS,) and first.jacobian.shape == (1,)
    torch.testing.assert_close(first.jacobian[0], both.jacobian[0], rtol=1e-12, atol=0)
    swapped = estimate("bert", engine, 2, 2000, layers=[1, 0], **settings)
    assert_squares_within(swapped.jacobian, table("bert").jacobian[[1, 0], -1].sum(-1))


@pytest.mark.parametrize("engine, name", [("jet", "bert"), ("jet", "gpt2"), ("reverse", "gpt2")])
def test_logits(engine: str, name: str) -> None:
    exact = table(name, "logits")
    result = estimate(name, engine, 8, 1000, layers="logits", squared=True, seed=6)
    assert result.jacobian_tokens.shape == (1, 1000, 1)
    assert_squares_within(result.jacobian[0], exact.jacobian.sum())
    assert_squares_within(result.hessian[0], exact.hessian.sum())


@pytest.mark.parametrize("engine", ["jet", "reverse"])
def test_sampled_dimensions_are_those_of_the_exact_engine(engine: str) -> None:
    """The same seed draws the same D for every engine, so the means agree layer by layer."""
    settings: dict[str, Any] = {"dimensions": 2, "squared": True, "seed": 7, "scope": "last"}
    exact = estimate("bert", "exact", 1, 1, **settings)
    result = estimate("bert", engine, 8, 1000, **settings)
    assert_squares_within(result.hessian, exact.hessian)
    assert_squares_within(result.jacobian, exact.jacobian)


def test_reverse_norm_per_dimension() -> None:
    """Eq. 6's square root of a mean over 40 projections, by fifty rows: 2,000 directions."""
    settings = {"layers": [1], "scope": "last", "dimensions": "all", "seed": 8}
    result = estimate("gpt2", "reverse", 40, 50, **settings)
    exact = table("gpt2")
    assert_within(result.jacobian[0], exact.jacobian[1, -1].sum().sqrt())
    assert_within(result.hessian[0], exact.hessian[1, -1].sqrt().sum() * 10 / WIDTH)


@pytest.mark.parametrize("pairs", [1, 3, 6, 50])
def test_chi_correction_against_monte_carlo(pairs: int) -> None:
    generator = torch.Generator().manual_seed(pairs)
    count = 400_000 if pairs < 50 else 40_000
    draws = torch.randn(count, pairs, generator=generator, dtype=torch.float64)
    roots = draws.square().mean(-1).sqrt()
    error = abs(roots.mean().item() - chi_correction(pairs))
    assert error < 4 * roots.std().item() / math.sqrt(count)


def test_few_pairs_are_corrected_for_the_root() -> None:
    """Given u, uᵀHw is Gaussian: with one pair the mean over w of |uᵀHw|/c_1 is ‖uᵀH‖ in mean."""
    generator = torch.Generator().manual_seed(0)
    hessian = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    u = torch.randn(6, generator=generator, dtype=torch.float64)
    w = torch.randn(200_000, 6, generator=generator, dtype=torch.float64)
    mean = (w @ (hessian.T @ u)).abs().mean() / chi_correction(1)
    assert_within(mean, (hessian.T @ u).norm(), 0.01)


class RankOne(nn.Module):
    """One hidden state of one entry, the square of the input's sum: derivatives of rank one."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(4, 8)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def forward(self, input_ids: Tensor, output_hidden_states: bool = True, **_: Any) -> Any:
        x = self.embeddings(input_ids)
        return SimpleNamespace(hidden_states=(x, (x.sum((1, 2), keepdim=True) ** 2) / 2))


@pytest.mark.parametrize("directions", [1, 2, 3, 4])
@pytest.mark.parametrize("row", ["‖J‖", "‖H_j‖, divided by c_P", "the tensor norm of H"])
def test_the_largest_bias_is_what_the_document_says(row: str, directions: int) -> None:
    lines = (Path(__file__).parents[2] / "docs" / "estimators.md").read_text("utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {row} | "))
    cell = line.split("|")[1 + directions].strip()
    if cell == "–":
        assert directions == 1  # a Hessian's estimate needs two
        return
    torch.manual_seed(1)
    model = RankOne().double()
    with torch.no_grad():
        found = jx.smoothness(
            model,
            {"input_ids": torch.ones(20_000, 1, dtype=torch.long)},
            directions=directions,
            hessian=row != "‖J‖",
            hessian_norm="tensor" if "tensor" in row else "per_dimension",
            dimensions="all",
            seed=0,
        )
        entries = model.embeddings.weight.shape[1]
        # the gradient of s² / 2 is s for every entry, the Hessian all ones
        slope = model.embeddings.weight[1].sum().abs().item() * entries**0.5
    of_tokens = found.jacobian_tokens if row == "‖J‖" else found.hessian_tokens
    assert of_tokens is not None
    bias = of_tokens.mean().item() / (slope if row == "‖J‖" else entries) - 1
    assert bias == pytest.approx(float(cell.removesuffix(" %")) / 100, abs=0.012)
