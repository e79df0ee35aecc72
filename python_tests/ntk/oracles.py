"""The kernel from per-sample gradients written out: one backward pass a sample and output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Function = Callable[[dict[str, Any]], Tensor]


def logits(model: nn.Module) -> Function:
    """f(batch) = the classifier's logits, [n, C]; labels are not handed on."""

    def f(batch: dict[str, Any]) -> Tensor:
        return model(**{key: value for key, value in batch.items() if key != "labels"}).logits

    return f


def gradients(f: Function, batch: dict[str, Any], parameters: list[Tensor]) -> Tensor:
    """[N, C, number of parameters]; each sample goes through the model alone."""
    rows = []
    for n in range(len(batch["input_ids"])):
        value = f({key: v[n : n + 1] for key, v in batch.items()})[0]
        found = [
            torch.autograd.grad(one, parameters, retain_graph=True, materialize_grads=True)
            for one in value
        ]
        rows.append(torch.stack([torch.cat([g.flatten() for g in each]) for each in found]))
    return torch.stack(rows)


def kernel(
    model: nn.Module,
    batch: dict[str, Any],
    other: dict[str, Any] | None = None,
    *,
    f: Function | None = None,
    parameters: list[Tensor] | None = None,
) -> Tensor:
    """[N, C, M, C] in double, summed over parameters that require gradients."""
    f = f or logits(model)
    parameters = parameters or [p for p in model.parameters() if p.requires_grad]
    left = gradients(f, batch, parameters).double()
    right = left if other is None else gradients(f, other, parameters).double()
    return torch.einsum("ncp,mdp->ncmd", left, right)


def error(theta: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the kernel's largest entry; infinite with a NaN anywhere."""
    assert theta.shape == expected.shape, "a difference would broadcast"
    difference = (theta.double() - expected).abs().max() / expected.abs().max()
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf))
