"""torch.func's transforms of passes through operators that only the general rule carries.

The oracles are passes outside of any transform, and their backward.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import jachess_ext as jx
from jachess_ext.jet.engine.errors import MissingJetRule, function_name
from jachess_ext.jet.rules.forward_mode_kept import FORWARD_ONLY, FORWARD_REVERSE

from .operators import Call, calls, operators, quiet

Tensors = tuple[Tensor, ...]
NO_BATCHES = ("as_strided_scatter",)
"""Operators for which torch itself has no vmap. native_group_norm, which has none either and takes
nothing that is not contiguous, is left out."""
QUICK = ("trapezoid", "kron", "lgamma", "linalg.cross")


def names_of(op: Any) -> set[str]:
    return {f"torch.{op.name}", function_name(op.op)}


@cache
def kept() -> list[Any]:
    """Operators that the general rule serves."""
    return [
        op
        for op in operators()
        if op.name != "native_group_norm" and names_of(op) & {*FORWARD_REVERSE, *FORWARD_ONLY}
    ]


def passes(call: Call) -> dict[str, Any]:
    """A pass of order 1 and one of order 2 along fixed directions, as functions of the points."""
    torch.manual_seed(1)
    u, v = (tuple(torch.randn_like(p) for p in call.points) for _ in range(2))
    both = tuple(torch.stack(pair) for pair in zip(u, v, strict=True))

    def first(*points: Tensor) -> Tensors:
        values, tangents = jx.jvp(call, points, u)
        return (*values, *tangents)

    def second(*points: Tensor) -> Tensors:
        return tuple(jet.streams for jet in jx.jet(call, points, both))

    return {"jvp": first, "jet": second}


def total(results: Tensors) -> Tensor:
    return sum((r.sum() * 0.7 + (r * r).sum() * 0.1 for r in results), torch.zeros(()))


def check(call: Call, found: Any, gradients: bool, batches: bool) -> None:
    points = call.points
    with torch.no_grad():
        plain = found(*points)
    if batches:
        twice = [torch.stack([p, p]) for p in points]
        with torch.no_grad():
            for got, value in zip(vmap(found, randomness="same")(*twice), plain, strict=True):
                torch.testing.assert_close(got[1], value, rtol=1e-8, atol=1e-10, equal_nan=True)
    if not gradients:
        return
    leaves = [p.clone().requires_grad_() for p in points]
    expected = torch.autograd.grad(
        total(found(*leaves)), leaves, allow_unused=True, materialize_grads=True
    )
    torch.manual_seed(2)
    steps = tuple(torch.randn_like(p) for p in points)
    scalar = lambda *points: total(found(*points))  # noqa: E731
    for got, value in zip(grad(scalar, (*range(len(points)),))(*points), expected, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-8, atol=1e-10, equal_nan=True)
    slope = sum(((g * s).sum() for g, s in zip(expected, steps, strict=True)), torch.zeros(()))
    got = jvp(scalar, points, steps)[1]
    torch.testing.assert_close(got, slope, rtol=1e-7, atol=1e-9, equal_nan=True)


def check_operator(op: Any) -> int:
    """Check its first samples, and return how many passes there were; others are refused."""
    tried = 0
    with quiet():
        for call in calls(op, 2):
            if not all(p.numel() and p.isfinite().all() for p in call.points):
                continue
            for found in passes(call).values():
                try:
                    with torch.no_grad():
                        found(*call.points)
                except MissingJetRule:
                    continue
                gradients = bool(names_of(op) & set(FORWARD_REVERSE))
                check(call, found, gradients, op.name not in NO_BATCHES)
                tried += 1
    return tried


@pytest.mark.parametrize("name", QUICK)
def test_transforms_of_the_general_rule(name: str) -> None:
    assert sum(check_operator(op) for op in kept() if op.name == name)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_transforms_of_every_operator(part: int) -> None:
    assert sum([check_operator(op) for op in kept()[part::8]])
