"""Losses, and two pointwise functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import torch_private
from .formulas import formula, in_place, result_dtype, wide
from .registry import Function

_aten = torch.ops.aten
Lengths = Tensor | Sequence[int] | int


def _nn(name: str) -> Function | None:
    """Return the C++ function that torch's Python function of that name calls."""
    return torch_private.find(f"torch._C._nn.{name}")  # type: ignore[no-any-return]


def _reduced(losses: Tensor, reduction: int) -> Tensor:
    """Reduce by number, as torch's C functions do: not at all, the default; to mean or sum."""
    return (losses, losses.mean, losses.sum)[reduction]() if reduction else losses  # type: ignore[operator]


def _single(x: Tensor) -> Tensor:
    return x.to(result_dtype(x))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1] if x.ndim else 1)


@formula(_nn("hardsigmoid"), refuses="second, mixed")
def hardsigmoid(input: Tensor) -> Tensor:
    """x / 6 + 1 / 2 between −3 and 3."""
    inside = (input > -3) & (input < 3)
    return torch.where(inside, input / 6 + 0.5, (input >= 3).to(input.dtype) + 0 * input.detach())


in_place(_nn("hardsigmoid_"), _nn("hardsigmoid"))


@formula(
    *(_aten.native_dropout_backward, _aten.native_dropout_backward.default),
    refuses="forward, mixed",
)
def native_dropout_backward(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    """A product."""
    return grad_output * mask.to(grad_output.dtype) * scale


@formula(_nn("huber_loss"), refuses="mixed")
def huber_loss(input: Tensor, target: Tensor, reduction: int = 0, delta: float = 1.0) -> Tensor:
    """z² / 2, and δ (|z| − δ / 2) where |z| > δ."""
    size = (_single(input) - _single(target)).abs()
    return _reduced(
        torch.where(size <= delta, 0.5 * size * size, delta * (size - 0.5 * delta)), reduction
    )


@formula(_nn("soft_margin_loss"), refuses="mixed")
def soft_margin_loss(input: Tensor, target: Tensor, reduction: int = 0) -> Tensor:
    """−logsigmoid(x y)."""
    input = _single(input)
    return _reduced(-F.logsigmoid(input * target.to(input.dtype)), reduction)


@formula(_nn("multi_margin_loss"), refuses="forward, second, mixed")
def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    reduction: int = 0,
) -> Tensor:
    """Margins to the gathered score of the class."""
    scores, classes = _rows(_single(input)), target.reshape(-1)
    gap = margin - scores.gather(1, classes.unsqueeze(1)) + scores
    others = torch.arange(scores.shape[1], device=input.device) != classes.unsqueeze(1)
    losses = torch.where((gap > 0) & others, gap if p == 1 else gap * gap, 0 * gap)
    if weight is not None:
        losses = losses * weight[classes].unsqueeze(1)
    return _reduced((losses.sum(1) / scores.shape[1]).reshape(target.shape), reduction)


@formula(_nn("multilabel_margin_loss"), refuses="forward, second, mixed")
def multilabel_margin_loss(input: Tensor, target: Tensor, reduction: int = 0) -> Tensor:
    """Margins of all pairs of a label and another class."""
    scores, classes = _rows(_single(input)), _rows(target)
    valid = (classes >= 0).cummin(1).values  # the labels end at the first −1
    classes = torch.where(valid, classes, 0)
    hits = torch.zeros_like(classes).scatter_add(1, classes, valid.long())
    gap = 1 - scores.gather(1, classes).unsqueeze(2) + scores.unsqueeze(1)
    counted = (gap > 0) & valid.unsqueeze(2) & (hits == 0).unsqueeze(1)
    losses = torch.where(counted, gap, 0 * gap).sum((1, 2)) / scores.shape[1]
    return _reduced(losses.reshape(input.shape[:-1]), reduction)


@formula(torch.ctc_loss, transforms=False, refuses="forward, second, mixed")
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: int = 0,
    zero_infinity: bool = False,
) -> Tensor:
    """The forward recursion, a logsumexp for each step. Of log-probabilities that are not
    normalised torch's first backward is not the derivative; the formula's is."""
    unbatched = log_probs.ndim == 2
    logs = wide(log_probs.unsqueeze(1) if unbatched else log_probs)
    steps, batch, _ = logs.shape
    device = logs.device
    of_input, of_target = (
        torch.as_tensor(lengths, device=device).reshape(-1).long()
        for lengths in (input_lengths, target_lengths)
    )
    longest = int(of_target.max()) if batch else 0
    column = torch.arange(longest, device=device)
    if targets.ndim == 1 and targets.numel() and longest:
        starts = (of_target.cumsum(0) - of_target).unsqueeze(1)
        labels = targets.to(device)[(starts + column).clamp(max=targets.numel() - 1)]
    else:
        labels = targets.to(device).reshape(batch, -1)[:, :longest]
    labels = torch.where(column < of_target.unsqueeze(1), labels.long(), blank)
    # A blank before and after each label; a path may skip one between two labels that differ.
    symbols = labels.new_full((batch, 2 * longest + 1), blank)
    symbols[:, 1::2] = labels
    may_skip = torch.zeros_like(symbols, dtype=torch.bool)
    may_skip[:, 3::2] = labels[:, 1:] != labels[:, :-1]
    low = -1e30  # stands for log 0: a logsumexp of infinities has no derivative
    scores = logs.gather(2, symbols.expand(steps, -1, -1))
    place = torch.arange(2 * longest + 1, device=device)
    paths = torch.where(place < 2, scores[0], low)
    for t in range(1, steps):
        skipped = torch.where(may_skip, F.pad(paths, (2, 0), value=low)[:, :-2], low)
        before = torch.stack([paths, F.pad(paths, (1, 0), value=low)[:, :-1], skipped])
        running = (t < of_input).unsqueeze(1)
        paths = torch.where(running, before.logsumexp(0) + scores[t], paths)
    end = 2 * of_target.unsqueeze(1)
    last = (place == end) | (place == end - 1)
    losses = -torch.where(last, paths, low).logsumexp(1)
    impossible = losses > -low / 2
    losses = torch.where(impossible, 0.0 if zero_infinity else torch.inf, losses)
    if reduction == 1:
        losses = losses / of_target.clamp(min=1)
    losses = losses[0] if unbatched and reduction != 1 else losses
    return _reduced(losses, reduction).to(result_dtype(log_probs))
