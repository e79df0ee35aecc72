"""Draws of an estimator of ‖J‖ and ‖H‖, and their bias and spread against a reference.

A batch of equal rows gives independent draws at once, since rows draw their own directions; the
sampled dimensions D, however, are shared by a call's rows, so forms that sample D take several
calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import jachess_ext as jx
from benchmarks.common.models import Batch


@dataclass(frozen=True)
class Estimator:
    """One form of `jx.smoothness`.

    Attributes:
        directions: q of the jet, or p projections of the reverse form.
        dimensions: |D|, or "all".
    """

    engine: str
    directions: int
    distribution: str = "gaussian"
    dimensions: int | str = "all"

    @property
    def name(self) -> str:
        letter = "q" if self.engine == "jet" else "p"
        return f"{self.engine} {letter}={self.directions} {self.distribution} |D|={self.dimensions}"

    @property
    def pairs(self) -> int:
        """Pairs of directions behind a Hessian of the jet; 0 for the reverse form."""
        return self.directions * (self.directions - 1) // 2 if self.engine == "jet" else 0

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "directions": self.directions,
            "distribution": self.distribution,
            "dimensions": self.dimensions,
        }


@dataclass(frozen=True)
class Norms:
    """``[N, K, T]`` each: N draws (1 for a reference) of the norms of one sequence."""

    jacobian: Tensor
    hessian: Tensor


@dataclass(frozen=True)
class Statistics:
    """Per layer and token ``[K, T]``, and of the sum over tokens ``[K]``, relative to a reference.

    Attributes:
        bias: mean of the draws / reference − 1.
        bias_error: its standard error.
        spread: standard deviation of the draws / reference.
    """

    bias: Tensor
    bias_error: Tensor
    spread: Tensor
    sum_bias: Tensor
    sum_spread: Tensor
    draws: int


def draw(
    model: nn.Module, row: Batch, estimator: Estimator, *, copies: int, calls: int, **settings: Any
) -> Norms:
    """``copies * calls`` draws; a |D| other than 10 is rescaled to what |D| = 10 sums to.

    Args:
        row: a batch of one sequence, unpadded.
        settings: further arguments of `jx.smoothness` (scope, squared, hessian_norm).
    """
    batch = {name: value.expand(copies, -1).contiguous() for name, value in row.items()}
    drawn = []
    for call in range(calls):
        with torch.no_grad():
            found = jx.smoothness(model, batch, seed=call + 1, **(estimator.settings | settings))
        drawn.append(found)
    jacobian = torch.cat([found.jacobian_tokens for found in drawn], 1).movedim(0, 1)
    hessian = torch.cat([_hessian(found) for found in drawn], 1).movedim(0, 1)
    if estimator.dimensions != "all" and settings.get("hessian_norm") != "tensor":
        hessian = hessian * (10 / float(estimator.dimensions))
    return Norms(jacobian.double(), hessian.double())


def _hessian(found: jx.Smoothness) -> Tensor:
    if found.hessian_tokens is None:
        raise ValueError("these draws have no Hessian; call with hessian=True")
    return found.hessian_tokens


def compare(drawn: Tensor, reference: Tensor) -> Statistics:
    """Statistics of draws ``[N, K, T]`` against ``[1, K, T]``; tokens whose norm is 0 are left out.

    Raises:
        ValueError: fewer than two draws.
    """
    count = len(drawn)
    if count < 2:
        raise ValueError(f"{count} draw was given; a spread needs two or more")
    counted = reference[0].ne(0).any(0)
    drawn, reference = drawn[..., counted], reference[..., counted]
    relative = drawn / reference
    sums = drawn.sum(-1) / reference.sum(-1)
    spread = relative.std(0)
    return Statistics(
        bias=relative.mean(0) - 1,
        bias_error=spread / count**0.5,
        spread=spread,
        sum_bias=sums.mean(0) - 1,
        sum_spread=sums.std(0),
        draws=count,
    )
