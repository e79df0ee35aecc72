"""Losses, and three pointwise functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import torch_private
from ..ops.library import wide
from .formulas import formula, in_place, result_dtype
from .registry import Function
from .segments import ragged_table

_aten = torch.ops.aten
Lengths = Tensor | Sequence[int] | int


def _native(name: str) -> Function | None:
    """Return the C++ function that torch's Python function ``name`` calls; None if there is
    none."""
    return torch_private.find(f"torch._C._nn.{name}")  # type: ignore[no-any-return]


def _reduce(losses: Tensor, reduction: int) -> Tensor:
    """Return losses reduced as torch's integer code says: 0 none, 1 mean, 2 sum."""
    return (losses, losses.mean, losses.sum)[reduction]() if reduction else losses  # type: ignore[operator]


def _widen(x: Tensor) -> Tensor:
    """Return x in the dtype in which torch computes a loss: float32 under autocast."""
    return x.to(result_dtype(x))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1] if x.ndim else 1)


@formula(_native("hardsigmoid"), refuses="second, mixed")
def hardsigmoid(input: Tensor) -> Tensor:
    """Compute x / 6 + 1 / 2 between −3 and 3, and 0 or 1 beyond."""
    in_range = (input > -3) & (input < 3)
    return torch.where(in_range, input / 6 + 0.5, (input.detach() / 6 + 0.5).clamp(0, 1))


in_place(_native("hardsigmoid_"), _native("hardsigmoid"))


@formula(_native("glu"), refuses="forward (twice, and in 16 bits), mixed")
def glu(input: Tensor, dim: int = -1) -> Tensor:
    """Multiply one half of the input by the sigmoid of the other."""
    value, gate = input.chunk(2, dim)
    return value * gate.sigmoid()


@formula(
    *(_aten.native_dropout_backward, _aten.native_dropout_backward.default),
    refuses="forward, mixed",
)
def native_dropout_backward(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Multiply the gradient by the mask and its scale."""
    return grad_output * mask.to(grad_output.dtype) * scale


@formula(_native("huber_loss"), refuses="mixed")
def huber_loss(input: Tensor, target: Tensor, reduction: int = 0, delta: float = 1.0) -> Tensor:
    """Compute z² / 2, and δ (|z| − δ / 2) where |z| > δ, for z = input − target."""
    # z², not |z|², whose second derivative at z = 0 is 0 in torch.
    z = _widen(input) - _widen(target)
    gap = z.abs()
    near = torch.where(gap < delta, z, 0)  # an infinite z times a gradient of 0 would be NaN
    return _reduce(torch.where(gap < delta, near * near / 2, delta * (gap - delta / 2)), reduction)


@formula(_native("soft_margin_loss"), refuses="mixed")
def soft_margin_loss(input: Tensor, target: Tensor, reduction: int = 0) -> Tensor:
    """Compute −logsigmoid(x y) of input x and target y."""
    input = _widen(input)
    return _reduce(-F.logsigmoid(input * target.to(input.dtype)), reduction)


@formula(_native("multi_margin_loss"), refuses="forward, second, mixed")
def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    reduction: int = 0,
) -> Tensor:
    """Compute the margins between each score and the score of the class."""
    scores, classes = _rows(_widen(input)), target.reshape(-1)
    gap = margin - scores.gather(1, classes.unsqueeze(1)) + scores
    is_wrong_class = torch.arange(scores.shape[1], device=input.device) != classes.unsqueeze(1)
    losses = torch.where((gap > 0) & is_wrong_class, gap, 0) ** p
    if weight is not None:
        losses = losses * weight[classes].unsqueeze(1)
    return _reduce((losses.sum(1) / scores.shape[1]).reshape(target.shape), reduction)


@formula(_native("multilabel_margin_loss"), refuses="forward, second, mixed")
def multilabel_margin_loss(input: Tensor, target: Tensor, reduction: int = 0) -> Tensor:
    """Compute the margins of all pairs of a label and another class."""
    scores, classes = _rows(_widen(input)), _rows(target)
    is_label = (classes >= 0).cummin(1).values  # the labels end at the first −1
    classes = torch.where(is_label, classes, 0)
    hits = torch.zeros_like(classes).scatter_add(1, classes, is_label.long())
    gap = 1 - scores.gather(1, classes).unsqueeze(2) + scores.unsqueeze(1)
    counted = (gap > 0) & is_label.unsqueeze(2) & (hits == 0).unsqueeze(1)
    losses = torch.where(counted, gap, 0).sum((1, 2)) / scores.shape[1]
    return _reduce(losses.reshape(input.shape[:-1]), reduction)


@formula(torch.ctc_loss, is_nestable=False, refuses="forward, second, mixed")
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: int = 0,
    zero_infinity: bool = False,
) -> Tensor:
    """Run the forward recursion, with a logsumexp for each step.  For log-probabilities that are
    not normalised torch's first backward is wrong, and the formula's is right."""
    is_unbatched = log_probs.ndim == 2
    logs = wide(log_probs.unsqueeze(1) if is_unbatched else log_probs)
    steps, batch, _ = logs.shape
    device = logs.device
    input_sizes, target_sizes = (
        torch.as_tensor(lengths, device=device).reshape(-1).long()
        for lengths in (input_lengths, target_lengths)
    )
    indices, is_valid = ragged_table(target_sizes.cumsum(0) - target_sizes, target_sizes)
    longest = is_valid.shape[1]
    if targets.ndim == 1 and targets.numel() and longest:
        labels = targets.to(device)[indices]
    else:
        labels = targets.to(device).reshape(batch, -1)[:, :longest]
    labels = torch.where(is_valid, labels.long(), blank)
    # A blank before and after each label; a path may skip one between two labels that differ.
    symbols = labels.new_full((batch, 2 * longest + 1), blank)
    symbols[:, 1::2] = labels
    may_skip = torch.zeros_like(symbols, dtype=torch.bool)
    may_skip[:, 3::2] = labels[:, 1:] != labels[:, :-1]
    low = -1e30  # stands for log 0: a logsumexp of infinities has no derivative
    scores = logs.gather(2, symbols.expand(steps, -1, -1))
    position = torch.arange(2 * longest + 1, device=device)
    paths = torch.where(position < 2, scores[0], low)
    for t in range(1, steps):
        skipped = torch.where(may_skip, F.pad(paths, (2, 0), value=low)[:, :-2], low)
        previous = torch.stack([paths, F.pad(paths, (1, 0), value=low)[:, :-1], skipped])
        paths = torch.where((t < input_sizes)[:, None], previous.logsumexp(0) + scores[t], paths)
    end = 2 * target_sizes.unsqueeze(1)
    is_last = (position == end) | (position == end - 1)
    losses = -torch.where(is_last, paths, low).logsumexp(1)
    # Without a step only the empty target is possible.
    losses = torch.where(input_sizes == 0, torch.where(target_sizes == 0, 0, -low), losses)
    losses = torch.where(losses > -low / 2, 0.0 if zero_infinity else torch.inf, losses)
    if reduction == 1:
        losses = losses / target_sizes.clamp(min=1)
    losses = losses[0] if is_unbatched and reduction != 1 else losses
    return _reduce(losses, reduction).to(result_dtype(log_probs))
