"""Rules that call torch functions with rules: torch's Python code, losses, recurrent layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ... import torch_private
from ...differentiable import distances, linalg, segments
from ...differentiable import losses as losses_formulas
from ...torch_private import functional as F
from ..engine.errors import missing_rule
from ..engine.registry import built_in_functions, general_rule, jet_rule
from ..engine.tensor import JetTensor, primal_of
from .pointwise import push_forward

composed_rule = functools.partial(jet_rule, kind="composed")

_PYTHON_FUNCTIONS = (
    *("multi_head_attention_forward", "gaussian_nll_loss", "multilabel_soft_margin_loss"),
    *("triplet_margin_with_distance_loss", "tanhshrink", "softmin", "lp_pool1d", "lp_pool2d"),
    *("lp_pool3d", "local_response_norm"),
)
for _name in _PYTHON_FUNCTIONS:
    composed_rule(getattr(F, _name))(torch_private.copy_without_override_check(getattr(F, _name)))


# Formulas of `jachess_ext.differentiable`, for the C++ functions; the Python functions of the same
# names call those.
for _function, _formula in (
    (F.pdist, distances.pdist),
    (torch.ctc_loss, losses_formulas.ctc_loss),
    (torch.embedding_bag, segments.embedding_bag),
    (torch.segment_reduce, segments.segment_reduce),
    ("index_reduce", segments.index_reduce),
    ("ormqr", linalg.ormqr),
    *(
        ("orgqr", linalg.householder_product),
        (torch.linalg.householder_product, linalg.householder_product),
    ),
):
    composed_rule(_function)(_formula)
_LOSSES = ("huber_loss", "multi_margin_loss", "multilabel_margin_loss", "soft_margin_loss")
for _name in _LOSSES:
    composed_rule(built_in_functions(_name))(getattr(losses_formulas, _name))
for _name in ("ctc_loss", "embedding_bag", *_LOSSES):
    composed_rule(getattr(F, _name))(torch_private.copy_without_override_check(getattr(F, _name)))


# ---- losses ----------------------------------------------------------------------------------


@composed_rule(F.nll_loss)
def nll_loss(
    input: JetTensor, target: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any
) -> JetTensor:
    """Apply the loss, which is linear in the log-probabilities, to every stream."""
    losses = [F.nll_loss(stream, target, weight, *args, **kwargs) for stream in input.streams]
    return input.with_streams(torch.stack(losses))


@composed_rule(F.cross_entropy)
def cross_entropy(
    input: JetTensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **kwargs: object,
) -> Tensor:
    if target.is_floating_point() or label_smoothing or set(kwargs.values()) - {None}:
        rule = general_rule(F.cross_entropy, "class probabilities, label smoothing")
        kwargs |= {"ignore_index": ignore_index, "reduction": reduction}
        return rule(input, target, weight, label_smoothing=label_smoothing, **kwargs)
    logs = F.log_softmax(input, dim=0 if input.ndim == 1 else 1)
    return F.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction)


def _reduce(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


@composed_rule(F.mse_loss)
def mse_loss(
    input: Tensor, target: Tensor, *args: object, reduction: str = "mean", **kwargs: object
) -> Tensor:
    if {*args, *kwargs.values()} - {None}:
        raise missing_rule(F.mse_loss, "weight, size_average and reduce are not covered")
    difference = input - target
    return _reduce(difference * difference, reduction)


@composed_rule(F.binary_cross_entropy)
def binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Compute −t ln x − (1 − t) ln(1 − x), whose slope is (x − t) / max(x (1 − x), 1e-12)."""
    if size_average is not None or reduce is not None:
        raise missing_rule(F.binary_cross_entropy, "size_average and reduce; use reduction")
    if isinstance(target, JetTensor) or not isinstance(input, JetTensor):
        rule = general_rule(F.binary_cross_entropy, "a target that depends on the input")
        return rule(input, target, weight, reduction=reduction)
    x = input.primal
    value = F.binary_cross_entropy(x, target, reduction="none")
    product = x * (1 - x)
    spread = product.clamp_min(1e-12)
    slope = (x - target) / spread
    # Where the denominator is the bound, a constant, the slope is linear in x.
    curvature = (1 - slope * (1 - 2 * x) * (product > 1e-12)) / spread
    losses: Tensor = push_forward(input, (value, slope, curvature))
    return _reduce(losses if weight is None else losses * weight, reduction)


@composed_rule(F.gumbel_softmax)
def gumbel_softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    """Compute the softmax with one draw of noise for all streams; with ``hard``, the value is
    one-hot and the derivatives are those of the softmax, as in torch's backward."""
    noise = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    soft = F.softmax((logits - noise.exponential_().log()) / tau, dim)
    if not hard:
        return soft
    value = primal_of(soft).detach()
    one_hot = torch.zeros_like(value).scatter_(dim, value.argmax(dim, keepdim=True), 1.0)
    return one_hot - value + soft


gumbel_softmax.under_autocast = True  # type: ignore[attr-defined]


@composed_rule(*([F.linear_cross_entropy] if hasattr(F, "linear_cross_entropy") else []))
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, **kwargs: object
) -> Tensor:
    """Compute it without ``options``, which only set chunk sizes: those have no forward mode."""
    rule = general_rule(F.linear_cross_entropy, "")
    return rule(input, linear_weight, target, **kwargs | {"options": None})


linear_cross_entropy.under_autocast = True  # type: ignore[attr-defined]


# ---- recurrent layers ------------------------------------------------------------------------
#
# The formulas of torch.nn.LSTM, GRU and RNN, step by step, since torch's kernels have no second
# derivative.  A packed sequence is ``[sum of lengths, C]``: the rows of the first step, the longest
# sequence first, then those of the second, and so on; ``rows`` holds the number of rows per step.


State: TypeAlias = tuple[Tensor, ...]
"""Hidden state ``[B, H]``; of an LSTM also the cell's, and the weight of a projection, if any."""
Step: TypeAlias = Callable[[Tensor, State, Tensor, "Tensor | None"], State]
"""Maps the input's term of the gates ``[B, n H]``, the state, and the hidden state's weight and
bias to the next state."""


def _lstm_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    hidden, cell, *projection = state
    i, f, g, o = (gates + F.linear(hidden, weight, bias)).chunk(4, -1)
    cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
    hidden = torch.sigmoid(o) * torch.tanh(cell)
    hidden = F.linear(hidden, *projection) if projection else hidden
    return hidden, cell, *projection


def _gru_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    (hidden,) = state
    # Not of the sum, as in an LSTM: r scales the hidden state's term of n alone.
    r, z, n = gates.chunk(3, -1)
    hr, hz, hn = F.linear(hidden, weight, bias).chunk(3, -1)
    update = torch.sigmoid(z + hz)
    new = torch.tanh(n + torch.sigmoid(r + hr) * hn)
    return (new + update * (hidden - new),)


def _tanh_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    return (torch.tanh(gates + F.linear(state[0], weight, bias)),)


def _relu_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    return (torch.relu(gates + F.linear(state[0], weight, bias)),)


def _run_direction(
    step: Step,
    x: Tensor,
    state: State,
    params: Sequence[Tensor],
    backwards: bool,
    rows: Sequence[int] | None,
) -> tuple[Tensor, State]:
    """Run ``x [T, B, C]`` through one layer; return all hidden states ``[T, B, H]``, and the last
    state.

    Args:
        params: weights of the input and the hidden state; their biases, or none; the weight of a
            projection, or none.
        rows: number of rows of every step of a packed x, ``[sum, C]``; the result is packed, too.
    """
    w_ih, w_hh, *others = params
    b_ih, b_hh = others[:2] if len(others) > 1 else (None, None)
    projection = others[2:] if len(others) > 1 else others
    all_gates = F.linear(x, w_ih, b_ih)
    gates = all_gates.unbind(0) if rows is None else all_gates.split(list(rows))
    order = range(len(gates))
    hidden = []
    for t in reversed(order) if backwards else order:
        # Of a packed x the first rows take the step.  The others keep their state: of a sequence
        # that has ended (forwards), or has not begun (backwards).
        count = len(gates[t])
        idle = [part[count:] for part in state]
        active = tuple(part[:count] for part in state) if len(idle[0]) else state
        new = step(gates[t], (*active, *projection), w_hh, b_hh)[: len(state)]
        hidden.append(new[0])
        if len(idle[0]):
            new = tuple(torch.cat(parts) for parts in zip(new, idle, strict=True))
        state = new
    hidden = hidden[::-1] if backwards else hidden
    return torch.stack(hidden) if rows is None else torch.cat(hidden), state


def _run_layers(
    step: Step,
    x: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    rows: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    x = x.transpose(0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    count = len(params) // (num_layers * directions)
    last: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            start = tuple(h[number] for h in hx)
            weights = params[number * count : (number + 1) * count]
            output, state = _run_direction(step, x, start, weights, direction == 1, rows)
            outputs.append(output)
            last.append(state)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if train and dropout and layer < num_layers - 1:
            x = F.dropout(x, dropout)
    ends = map(torch.stack, zip(*last, strict=True))  # ``[layers · directions, B, H]`` each
    return (x.transpose(0, 1) if batch_first else x, *ends)


def register_recurrent(name: str, step: Step) -> None:
    """Register a recurrent layer and its cell."""

    @composed_rule(getattr(torch, name))
    def layers(input: Tensor, hx: Tensor | State, *args: Any) -> tuple[Tensor, ...]:
        if isinstance(hx, Tensor) and not hx.is_floating_point():
            # A packed sequence: the argument before the state holds the numbers of rows.
            rows = hx.tolist()
            hx, args = args[0], (*args[1:], False, rows)
        return _run_layers(step, input, (hx,) if isinstance(hx, Tensor) else hx, *args)

    @composed_rule(getattr(torch, f"{name}_cell"))
    def cell(
        input: Tensor,
        hx: Tensor | State,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor | State:
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        out = step(F.linear(input, w_ih, b_ih), state, w_hh, b_hh)
        return out[0] if isinstance(hx, Tensor) else out


register_recurrent("lstm", _lstm_step)
register_recurrent("gru", _gru_step)
register_recurrent("rnn_tanh", _tanh_step)
register_recurrent("rnn_relu", _relu_step)


@composed_rule(built_in_functions("_pack_padded_sequence"))
def pack_sequence(input: JetTensor, lengths: Tensor, batch_first: bool) -> tuple[JetTensor, Tensor]:
    """Pack ``[T, B, ...]`` into ``[sum of lengths, ...]``; also return the number of rows per
    step."""
    packed, rows = torch_private.pack_padded_sequence(
        input.streams.movedim(0, 2), lengths, batch_first
    )
    return input.with_streams(packed.movedim(1, 0)), rows


@composed_rule(built_in_functions("_pad_packed_sequence"))
def pad_sequence(
    data: JetTensor, rows: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[JetTensor, Tensor]:
    """Invert `pack_sequence`; the padding carries no derivative."""
    padded, settings = torch_private.pad_packed_sequence, (rows, batch_first)
    primal, lengths = padded(data.primal, *settings, padding_value, total_length)
    tangents, _ = padded(data.streams[1:].movedim(0, 1), *settings, 0.0, total_length)
    return data.with_streams(torch.cat([primal.unsqueeze(0), tangents.movedim(2, 0)])), lengths
