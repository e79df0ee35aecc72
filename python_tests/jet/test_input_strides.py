"""Inputs of a pass lie in memory as the user's tensors do; a refused batch norm changes nothing.

The oracle is the same program on plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jachess_ext as jx


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


INPUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: _drawn(6, 4).t(),
    "columns": lambda: _drawn(4, 12)[:, 1:7],
    "every other row": lambda: _drawn(8, 6)[::2],
    "columns of transposed": lambda: _drawn(12, 4)[1:7].t(),
}
EXPANDED: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: _drawn(1, 6).expand(4, 6),
    "columns": lambda: _drawn(4, 1).expand(4, 6),
}
U = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def flat(x: Any) -> Any:
    y = x.flatten()
    y.mul_(2)
    return torch.cat([x.flatten(), y])


def flat_transposed(x: Any) -> Any:
    y = x.t().flatten()
    y.mul_(2)
    return torch.cat([x.flatten(), y])


def flat_of_a_product(x: Any) -> Any:
    z = x * 1
    y = z.flatten()
    y.mul_(2)
    return torch.cat([z.flatten(), y])


def a_row(x: Any) -> Any:
    x[0].mul_(2)
    return x * 1


def an_entry(x: Any) -> Any:
    x[0, 1] = 5.0
    return x * 1


def activated(x: Any) -> Any:
    torch.nn.functional.relu(x, inplace=True)
    return x * 1


PROGRAMS = [flat, flat_transposed, flat_of_a_product, a_row, an_entry, activated]
MODES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "jet": lambda f, x: jx.jet(f, x, U).primal,
    "jvp": lambda f, x: jx.jvp(f, (x,), (U[0],))[0],
    "target": lambda f, x: jx.jvp(f, (x.detach().requires_grad_(),), (U[0],), differentiable=False)[
        0
    ],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", INPUTS)
def test_writes_reach_what_they_reach_in_torch(name: str, program: Any, mode: str) -> None:
    x = INPUTS[name]()
    found = MODES[mode](program, x)
    assert torch.equal(x, INPUTS[name]())
    torch.testing.assert_close(found.detach(), program(INPUTS[name]()), rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", INPUTS)
def test_strides_of_an_input(name: str) -> None:
    """And its gradient is that of the same numbers, contiguous."""
    x = INPUTS[name]()
    seen: list[Any] = []
    jx.jet(lambda x: seen.append(x.stride()) or x, x, U)
    jx.jvp(
        lambda x: seen.append(x.primal.stride()) or x,
        (x.requires_grad_(),),
        (U[0],),
        differentiable=False,
    )
    assert seen == [x.stride(), x.stride()]
    found = []
    for point in (INPUTS[name](), INPUTS[name]().contiguous()):
        point.requires_grad_()
        (gradient,) = torch.autograd.grad(jx.jet(torch.sin, point, U).streams.sum(), point)
        found.append(gradient)
    torch.testing.assert_close(found[0], found[1], rtol=1e-14, atol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", [flat, a_row, an_entry, activated])
@pytest.mark.parametrize("name", EXPANDED)
def test_writes_into_an_expanded_input_are_refused(name: str, program: Any, mode: str) -> None:
    with pytest.raises(jx.MissingJetRule, match="expanded"):
        MODES[mode](program, EXPANDED[name]())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EXPANDED)
def test_an_expanded_input_that_is_only_read(name: str, mode: str) -> None:
    found = MODES[mode](flat_of_a_product, EXPANDED[name]())
    torch.testing.assert_close(found.detach(), flat_of_a_product(EXPANDED[name]()))


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_norm_that_is_refused_has_changed_nothing(mode: str) -> None:
    norm = nn.BatchNorm1d(6).double()
    before = {key: value.clone() for key, value in norm.state_dict().items()}
    with pytest.raises(jx.MissingJetRule, match="running statistics"):
        MODES[mode](norm, _drawn(4, 6))
    for key, value in norm.state_dict().items():
        assert torch.equal(value, before[key]), key
