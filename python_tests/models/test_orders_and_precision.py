"""One to four directions, both orders, and the half and single precisions."""

from __future__ import annotations

import copy
import statistics
from itertools import combinations

import pytest
import torch
from torch import Tensor

import jachess_ext as jx

from . import oracles
from .zoo import FAMILIES, build_case, case_of


@pytest.mark.parametrize("name, order, count", [("bert", 1, 4), ("bert", 2, 1), ("gemma2", 2, 4)])
def test_every_direction_and_pair(name: str, order: int, count: int) -> None:
    with oracles.Float64Casts():
        case = build_case(name, FAMILIES[name].attentions[-1], padding="left", count=count)
        jets = jx.jet(case.hidden_states, case.x, case.directions, order=order)
        pairs = list(combinations(range(count), 2)) if order == 2 else []
        u = case.directions
        first = [oracles.first_difference(case.hidden_states, case.x, d) for d in u]
        second = [
            oracles.mixed_difference(case.hidden_states, case.x, u[i], u[j]) for i, j in pairs
        ]
    for layer, jet in enumerate(jets):
        assert jet.pairs == pairs
        assert jet.first.shape == (count, *jet.primal.shape)
        assert jet.second.shape == (len(pairs), *jet.primal.shape)
        for i in range(count):
            error = oracles.relative_error(jet.first[i][case.mask], first[i][layer][case.mask])
            assert error < 1e-6
        for p in range(len(pairs) if layer else 0):
            error = oracles.relative_error(jet.second[p][case.mask], second[p][layer][case.mask])
            assert error < 1e-6


FUSED = [(name, family.attentions[-1]) for name, family in FAMILIES.items()]
HALF = ("bert", "modernbert", "gemma2", "mixtral", "t5")  # the others are slow

Row = tuple[int, str, Tensor, Tensor]


def _against_float64(name: str, attention: str, dtype: torch.dtype, seed: int = 0) -> list[Row]:
    """(layer, part of the jet, in ``dtype``, in float64), with the same rounded weights and input.

    Rounding the weights changes the function; what is measured here is the arithmetic alone.
    """
    narrow = build_case(name, attention, dtype=dtype, seed=seed)
    wide = case_of(copy.deepcopy(narrow.model).double(), name)
    wide.x, wide.directions = narrow.x.double(), narrow.directions.double()
    with torch.no_grad():
        low, high = (jx.jet(c.hidden_states, c.x, c.directions) for c in (narrow, wide))
    return [
        (layer, part, getattr(low[layer], part), getattr(high[layer], part))
        for layer in range(1, len(low))
        for part in ("primal", "first", "second")
    ]


@pytest.mark.parametrize("name, attention", FUSED)
def test_float32_agrees_with_float64(name: str, attention: str) -> None:
    for layer, part, low, high in _against_float64(name, attention, torch.float32):
        assert low.dtype == torch.float32
        error = oracles.relative_error(low.double(), high)
        assert error < 1e-4, f"{part} of layer {layer}: {error:.1e}"


@pytest.mark.parametrize(
    "name, attention",
    [pytest.param(*f, marks=() if f[0] in HALF else pytest.mark.slow) for f in FUSED],
)
def test_bfloat16_norms_agree_with_float64(name: str, attention: str) -> None:
    """Layer norms of the jets within 5 %, in the median of five random models.

    bfloat16 rounds by 2⁻⁸ = 0.4 %, some twenty times in a row through two layers; errors of single
    entries average out in a norm over a layer, which is what a regulariser uses.  Single models
    reach 8 % where a token's variance nearly vanishes before a normalisation, which magnifies
    whatever was rounded before it; hence the median.
    """
    deviations: dict[tuple[int, str], list[float]] = {}
    for seed in range(5):
        for layer, part, low, high in _against_float64(name, attention, torch.bfloat16, seed):
            assert low.dtype == torch.bfloat16
            assert torch.isfinite(low).all() and torch.isfinite(high).all()
            ratio = (low.double().norm() / high.norm()).item()
            deviations.setdefault((layer, part), []).append(abs(ratio - 1))
    medians = {key: statistics.median(values) for key, values in deviations.items()}
    assert max(medians.values()) < 0.05, medians
