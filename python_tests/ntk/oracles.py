"""The kernel from per-sample gradients written out: one backward pass a sample and output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Function = Callable[[Any], Tensor]


def logits(model: nn.Module) -> Function:
    """f(batch) = the classifier's logits, [n, C]; labels are not handed on."""

    def f(batch: dict[str, Any]) -> Tensor:
        return model(**{key: value for key, value in batch.items() if key != "labels"}).logits

    return f


def gradients(f: Function, batch: Any, parameters: list[Tensor]) -> Tensor:
    """[N, C, number of parameters]; each sample goes through the model alone."""
    samples = {"": batch} if isinstance(batch, Tensor) else batch
    rows = []
    for n in range(len(next(iter(samples.values())))):
        sample = {key: v[n : n + 1] for key, v in samples.items()}
        found = [
            torch.autograd.grad(one, parameters, retain_graph=True, materialize_grads=True)
            for one in f(sample[""] if isinstance(batch, Tensor) else sample)[0]
        ]
        rows.append(
            torch.stack([torch.cat([g.to_dense().flatten() for g in each]) for each in found])
        )
    return torch.stack(rows)


def kernel(
    model: nn.Module,
    batch: Any,
    other: Any = None,
    *,
    f: Function | None = None,
    parameters: list[Tensor] | None = None,
) -> Tensor:
    """[N, C, M, C] in double, summed over parameters that require gradients.

    Args:
        batch, other: dicts as a collator yields them, or tensors.
        f: None: `logits` of a dict, the model itself of a tensor.
    """
    f = f or (model if isinstance(batch, Tensor) else logits(model))
    parameters = parameters or [p for p in model.parameters() if p.requires_grad]
    left = gradients(f, batch, parameters).double()
    right = left if other is None else gradients(f, other, parameters).double()
    return torch.einsum("ncp,mdp->ncmd", left, right)


def error(theta: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the kernel's largest entry; infinite with a NaN anywhere."""
    assert theta.shape == expected.shape, "a difference would broadcast"
    difference = (theta.double() - expected).abs().max() / expected.abs().max()
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf))
