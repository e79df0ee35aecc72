"""The exact engine against finite differences."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

import jachess_ext as jx

from . import full_derivatives as full
from .tiny_models import WIDTH, classifier, token_batch


def _exact(name: str, tokens: int, **settings: Any) -> jx.Smoothness:
    with torch.no_grad():
        return jx.smoothness(classifier(name), token_batch([tokens]), engine="exact", **settings)


@pytest.mark.parametrize("name", [pytest.param("bert", marks=pytest.mark.slow), "gpt2"])
def test_every_layer_and_token(name: str) -> None:
    table, tolerance = full.table(name, 2), 1e-6
    result = _exact(name, 2, dimensions="all")
    jacobian = table.jacobian.sum(-1).sqrt()
    hessian = table.hessian.sqrt().sum(-1) * 10 / WIDTH
    torch.testing.assert_close(result.jacobian_tokens[:, 0], jacobian, rtol=tolerance, atol=0)
    torch.testing.assert_close(result.hessian_tokens[:, 0], hessian, rtol=tolerance, atol=0)
    torch.testing.assert_close(result.jacobian, jacobian.sum(-1), rtol=tolerance, atol=0)
    torch.testing.assert_close(result.hessian, hessian.sum(-1), rtol=tolerance, atol=0)


@pytest.mark.parametrize("hessian_norm, squared", [("per_dimension", True), ("tensor", False)])
def test_norms_on_one_token(hessian_norm: str, squared: bool) -> None:
    squares = full.table("gpt2", 2).hessian[1, -1]
    expected = squares.sum() * 10 / WIDTH if squared else squares.sum().sqrt()
    settings = {"layers": [-1], "scope": "last", "dimensions": "all", "squared": squared}
    result = _exact("gpt2", 2, hessian_norm=hessian_norm, **settings)
    assert result.hessian_tokens.shape == (1, 1, 2)
    assert result.hessian_tokens[0, 0, 0] == 0
    torch.testing.assert_close(result.hessian[0], expected, rtol=1e-6, atol=0)


def test_sampled_dimensions_are_a_subset_of_ten() -> None:
    squares = full.table("bert", 3).hessian[0, 0]
    result = _exact("bert", 3, layers=[0], scope="first", dimensions=10, seed=3, squared=True)
    left_out = (squares.sum() - result.hessian[0]).item()
    pairs = torch.tensor([squares[list(pair)].sum() for pair in combinations(range(WIDTH), 2)])
    fits = (pairs - left_out).abs() < 1e-6 * squares.sum()
    assert fits.sum() == 1, "D must be ten of the twelve dimensions, each counted once"


def test_logits_of_a_classifier() -> None:
    table = full.table("bert", 3, "logits")
    result = _exact("bert", 3, layers="logits", dimensions="all")
    assert result.jacobian_tokens.shape == (1, 1, 1)
    jacobian, hessian = table.jacobian.sum().sqrt(), table.hessian.sqrt().sum()
    torch.testing.assert_close(result.jacobian[0], jacobian, rtol=1e-6, atol=0)
    torch.testing.assert_close(result.hessian[0], hessian, rtol=1e-6, atol=0)
