"""Exponents of heavy tails, against samples of known ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jachess_ext.scaling import mean_tail_exponent
from jachess_ext.scaling.tails import tail_exponent


def test_tail_exponent_of_a_pareto_sample() -> None:
    """Eigenvalues drawn from λ^−α: the estimate's standard error is (α − 1)/√n."""
    generator = np.random.default_rng(0)
    for alpha in (2.0, 3.5):
        values = np.sort((1 - generator.uniform(size=4000)) ** (-1 / (alpha - 1)))
        assert tail_exponent(values) == pytest.approx(alpha, rel=0.1)


def test_tail_starts_where_the_power_law_does() -> None:
    generator = np.random.default_rng(1)
    tail = (1 - generator.uniform(size=3000)) ** (-1 / 1.5)
    body = generator.uniform(0.2, 1.0, 3000)
    assert tail_exponent(np.sort(np.append(tail, body))) == pytest.approx(2.5, rel=0.1)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": torch.ones(4, 4)}, "no weight matrix"),
        ({"a": torch.ones(20), "b": torch.full((20, 20), torch.nan)}, "b holds NaN"),
        ({"a": torch.eye(20)}, "that differ"),
    ],
)
def test_bad_weights(weights, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        mean_tail_exponent(weights)


def test_heavy_tails_are_ordered() -> None:
    generator = torch.Generator().manual_seed(0)
    found = []
    for place in range(20):
        left, _ = torch.linalg.qr(torch.randn(80, 80, generator=generator))
        right, _ = torch.linalg.qr(torch.randn(80, 80, generator=generator))
        # Singular values whose squares have the tail exponent 2 + place / 10.
        values = (torch.arange(1, 81) / 81.0) ** (-0.5 / (1 + place / 10))
        weight = left @ torch.diag(values) @ right
        found.append(mean_tail_exponent({"layer.weight": weight, "bias": torch.ones(80)}))
    assert found == sorted(found)
    np.testing.assert_allclose(found, 2 + np.arange(20) / 10, rtol=0.06)
