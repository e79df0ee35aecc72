"""The forms of a linear layer's kernel alone, and the choice between them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jachess_ext.ntk.contract import Factors, Settings, Size, contract, count_cost
from jachess_ext.ops import ntk_gram

C, N, M, T, U, D = 2, 5, 3, 4, 6, 7  # outputs, samples, positions left and right, inputs
WIDTHS = (3, 8)


def _side(samples: int, positions: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return normal(samples, positions, D), [normal(C, samples, positions, e) for e in WIDTHS]


def _expected(left: tuple, right: tuple) -> Tensor:
    """From every gradient Σ_t δ aᵀ written out."""

    def rows(side: tuple) -> Tensor:
        return torch.cat(
            [torch.einsum("cntr,ntk->cnrk", delta, side[0]).flatten(2) for delta in side[1]], -1
        )

    return torch.einsum("cnp,dmp->cndm", rows(left), rows(right))


@pytest.mark.parametrize("sides", ["symmetric", "unequal"])
@pytest.mark.parametrize("form", ["A", "B"])
def test_layers_that_share_inputs(form: str, sides: str) -> None:
    """One call for all of them; dtypes may differ."""
    left, right = _side(N, T, 0), _side(M, U, 1)
    right = left if sides == "symmetric" else right

    def layers(side: tuple[Tensor, list[Tensor]]) -> dict[str, Factors]:
        first, second = side[1]
        return {
            "query": Factors(side[0], first, source=(1,)),
            "key": Factors(side[0], second.float(), source=(1,)),
        }

    chosen = Settings(form, 10**9, torch.float64)  # type: ignore[arg-type]
    mine = layers(left)
    theirs = mine if sides == "symmetric" else layers(right)
    (choice, found), *others = contract(mine, theirs, sides == "symmetric", chosen)
    assert not others and choice.names == ("query", "key") and choice.form == form
    rounded = [(a, [d[0], d[1].float().double()]) for a, d in (left, right)]
    torch.testing.assert_close(found, _expected(*rounded), rtol=1e-11, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gram_of_narrow_types_is_computed_in_single(dtype: torch.dtype) -> None:
    a, deltas = _side(N, T, 0)
    narrow = (a.to(dtype), [delta.to(dtype) for delta in deltas])
    found = ntk_gram(*narrow)
    rounded = (narrow[0].double(), [delta.double() for delta in narrow[1]])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), _expected(rounded, rounded), rtol=1e-5, atol=1e-4)


def test_gram_of_nothing_and_of_strided_inputs() -> None:
    a, deltas = _side(N, T, 0)
    assert not ntk_gram(a[:, :0], [delta[:, :, :0] for delta in deltas]).any()
    strided = a.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(ntk_gram(strided, deltas), ntk_gram(a, deltas))


def test_counted_cost() -> None:
    """The formulas of docs/ntk.md, and the choices they must lead to."""
    size = Size(8, 16, 8, 16, 2, 384, 384, is_symmetric=False)
    cost = count_cost(size)
    assert cost.gram_flops == 2 * (8 * 16) ** 2 * (384 + 4 * 384)
    assert cost.materialise_flops == 2 * (8 + 8) * 16 * 2 * 384**2 + 2 * 16**2 * 384**2
    one_token = count_cost(Size(64, 1, 64, 1, 2, 384, 384, is_symmetric=True))
    long = count_cost(Size(64, 512, 64, 512, 2, 384, 384, is_symmetric=True))
    assert (one_token.form, long.form) == ("A", "B")
    wide = count_cost(Size(8, 16, 8, 16, 1, 8192, 50000, is_symmetric=True))
    assert wide.form == "A"


def test_bytes_of_the_forms() -> None:
    """A packs each side's numbers once per tile of 256 x 128; B writes and reads each gradient."""
    size = Size(32, 16, 32, 16, 2, 384, 768, is_symmetric=False)
    tiles = (32 * 16 / 256) * (32 * 16 / 128)
    per_tile = (256 + 128) * (384 + 4 * 768) * 4
    cost = count_cost(size)
    assert cost.gram_bytes == tiles * per_tile
    assert cost.materialise_bytes == 2 * (32 + 32) * 2 * 384 * 768 * 4
