"""Functions composed of others' rules: torch's Python code, losses, recurrent layers."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import torch_private
from ..registry import built_in, general_rule, jet_rule, missing_rule
from ..tensor import JetTensor
from .pointwise import push_forward

_NEVER = {
    name: lambda *tensors: False
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
}


def opened(function: Callable) -> Callable:
    """Copy a Python function of torch's without its check for tensors that override it."""
    function = getattr(function, "__wrapped__", function)
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **_NEVER},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_NAMES = (
    *("multi_head_attention_forward", "gaussian_nll_loss", "multilabel_soft_margin_loss"),
    *("triplet_margin_with_distance_loss", "tanhshrink", "softmin", "lp_pool1d", "lp_pool2d"),
    *("lp_pool3d", "local_response_norm"),
)
for _name in _NAMES:
    jet_rule(getattr(F, _name))(opened(getattr(F, _name)))


# ---- losses ----------------------------------------------------------------------------------


@jet_rule(F.nll_loss)
def nll_loss(
    input: JetTensor, target: Tensor, weight: Tensor | None = None, *args: Any, **named: Any
) -> JetTensor:
    """Apply it to every stream: it is linear in the log-probabilities."""
    losses = [F.nll_loss(stream, target, weight, *args, **named) for stream in input.streams]
    return input.with_streams(torch.stack(losses))


@jet_rule(F.cross_entropy)
def cross_entropy(
    input: JetTensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **named: Any,
) -> Any:
    if target.is_floating_point() or label_smoothing or set(named.values()) - {None}:
        rule = general_rule(F.cross_entropy, "class probabilities, label smoothing")
        named |= {"ignore_index": ignore_index, "reduction": reduction}
        return rule(input, target, weight, label_smoothing=label_smoothing, **named)
    logs = F.log_softmax(input, dim=0 if input.ndim == 1 else 1)
    return F.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction)


def _reduced(losses: Any, reduction: str) -> Any:
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


@jet_rule(F.mse_loss)
def mse_loss(input: Any, target: Any, *args: Any, reduction: str = "mean", **named: Any) -> Any:
    if {*args, *named.values()} - {None}:
        raise missing_rule(F.mse_loss, "weight, size_average and reduce are not covered")
    difference = input - target
    return _reduced(difference * difference, reduction)


@jet_rule(F.huber_loss)
def huber_loss(
    input: Any, target: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None
) -> Any:
    """Compute z² / 2 of z = input − target, and δ (|z| − δ / 2) where |z| > δ."""
    difference = input - target
    z = difference.primal
    value = F.huber_loss(z, torch.zeros_like(z), "none", delta)
    triple = value, z.clamp(-delta, delta), (z.abs() < delta).to(z.dtype)
    losses = push_forward(difference, triple)
    return _reduced(losses if weight is None else losses * weight, reduction)


@jet_rule(F.binary_cross_entropy)
def binary_cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
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
    curvature = (1 - slope * (1 - 2 * x) * (product > 1e-12)) / spread
    losses = push_forward(input, (value, slope, curvature))
    return _reduced(losses if weight is None else losses * weight, reduction)


@jet_rule(F.soft_margin_loss)
def soft_margin_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> Any:
    """Compute ln(1 + exp(−y x)) = −ln σ(y x), which does not overflow."""
    if size_average is not None or reduce is not None:
        raise missing_rule(F.soft_margin_loss, "size_average and reduce; use reduction")
    return _reduced(-F.logsigmoid(target * input), reduction)


@jet_rule(F.gumbel_softmax)
def gumbel_softmax(
    logits: Any, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Any:
    """Draw once for all streams; with ``hard``, the derivatives are those of the softmax, as in
    torch's backward."""
    noise = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    soft: Any = F.softmax((logits - noise.exponential_().log()) / tau, dim)
    if not hard:
        return soft
    value = soft.primal.detach()
    chosen = torch.zeros_like(value).scatter_(dim, value.argmax(dim, keepdim=True), 1.0)
    return chosen - value + soft


gumbel_softmax.under_autocast = True  # type: ignore[attr-defined]


@jet_rule(*([F.linear_cross_entropy] if hasattr(F, "linear_cross_entropy") else []))
def linear_cross_entropy(input: Any, linear_weight: Any, target: Tensor, **named: Any) -> Any:
    """Drop ``options``, which only ask for chunks: torch has no forward mode of those."""
    rule = general_rule(F.linear_cross_entropy, "")
    return rule(input, linear_weight, target, **named | {"options": None})


linear_cross_entropy.under_autocast = True  # type: ignore[attr-defined]


# ---- recurrent layers ------------------------------------------------------------------------
#
# Formulas of torch.nn.LSTM, GRU and RNN, step by step, since torch's kernels have no second
# derivative.  A packed sequence is ``[sum of lengths, C]``: all rows of the first step, the longest
# sequence first, then those of the next; ``rows`` holds the number of rows of every step.


State = tuple[Any, ...]
Step = Callable[[Any, State, Any, Any], State]


def _lstm_step(gates: Any, state: State, weight: Any, bias: Any) -> State:
    hidden, cell, *projection = state  # a weight, where the hidden state is projected
    i, f, g, o = (gates + F.linear(hidden, weight, bias)).chunk(4, -1)
    cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
    hidden = torch.sigmoid(o) * torch.tanh(cell)
    hidden = F.linear(hidden, *projection) if projection else hidden
    return hidden, cell, *projection


def _gru_step(gates: Any, state: State, weight: Any, bias: Any) -> State:
    (hidden,) = state
    r, z, n = gates.chunk(3, -1)
    hr, hz, hn = F.linear(hidden, weight, bias).chunk(3, -1)
    update = torch.sigmoid(z + hz)
    new = torch.tanh(n + torch.sigmoid(r + hr) * hn)
    return (new + update * (hidden - new),)


def _tanh_step(gates: Any, state: State, weight: Any, bias: Any) -> State:
    return (torch.tanh(gates + F.linear(state[0], weight, bias)),)


def _relu_step(gates: Any, state: State, weight: Any, bias: Any) -> State:
    return (torch.relu(gates + F.linear(state[0], weight, bias)),)


def _one_direction(
    step: Step,
    x: Any,
    state: State,
    weights: Sequence[Any],
    backwards: bool,
    rows: Sequence[int] | None,
) -> tuple[Any, State]:
    """Run ``x [T, B, C]`` through one layer; return all hidden states ``[T, B, H]``, and the last.

    Args:
        rows: number of rows of every step of a packed x, ``[sum, C]``; the result is packed, too.
    """
    w_ih, w_hh, b_ih, b_hh = weights[:4]
    projection = tuple(weights[4:])
    whole = F.linear(x, w_ih, b_ih)
    gates = whole.unbind(0) if rows is None else whole.split(list(rows))
    order = range(len(gates))
    hidden = []
    for t in reversed(order) if backwards else order:
        count = len(gates[t])
        ended = [part[count:] for part in state]
        now = tuple(part[:count] for part in state) if len(ended[0]) else state
        new = step(gates[t], (*now, *projection), w_hh, b_hh)[: len(state)]
        hidden.append(new[0])
        if len(ended[0]):
            new = tuple(torch.cat(parts) for parts in zip(new, ended, strict=True))
        state = new
    hidden = hidden[::-1] if backwards else hidden
    return torch.stack(hidden) if rows is None else torch.cat(hidden), state


def _layers(
    step: Step,
    states: int,
    x: Any,
    hx: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    rows: Sequence[int] | None = None,
) -> tuple[Any, ...]:
    x = x.transpose(0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    last: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            weights = list(params[place * each : (place + 1) * each])
            if not has_biases:
                weights[2:2] = [None, None]
            start = tuple(h[place] for h in hx)
            output, state = _one_direction(step, x, start, weights, direction == 1, rows)
            outputs.append(output)
            last.append(state)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if train and dropout and layer < num_layers - 1:
            x = F.dropout(x, dropout)
    ends = [torch.stack([state[n] for state in last]) for n in range(states)]
    return (x.transpose(0, 1) if batch_first else x, *ends)


def _register(name: str, step: Step, states: int) -> None:
    function: Callable = getattr(torch, name)

    @jet_rule(function)
    def rule(input: Any, hx: Any, params: Any, *settings: Any) -> tuple[Any, ...]:
        given: list[Any] = [hx, params, *settings]
        if isinstance(hx, Tensor) and not hx.is_floating_point():  # the sizes of a packed sequence
            given = [*given[1:], False, hx.tolist()]
        start = given[0] if isinstance(given[0], list | tuple) else (given[0],)
        return _layers(step, states, input, start, *given[1:])


def _register_cell(name: str, step: Step, states: int) -> None:
    @jet_rule(getattr(torch, name))
    def rule(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        state = tuple(hx) if isinstance(hx, list | tuple) else (hx,)
        out = step(F.linear(input, w_ih, b_ih), state, w_hh, b_hh)
        return out if states > 1 else out[0]


for _name, _step, _states in (
    ("lstm", _lstm_step, 2),
    ("gru", _gru_step, 1),
    ("rnn_tanh", _tanh_step, 1),
    ("rnn_relu", _relu_step, 1),
):
    _register(_name, _step, _states)
    _register_cell(f"{_name}_cell", _step, _states)


@jet_rule(built_in("_pack_padded_sequence"))
def pack(input: JetTensor, lengths: Tensor, batch_first: bool) -> tuple[JetTensor, Tensor]:
    """Pack ``[T, B, ...]`` into ``[sum of lengths, ...]``; also return the rows of every step."""
    packed, rows = torch_private.pack_padded_sequence(
        input.streams.movedim(0, 2), lengths, batch_first
    )
    return input.with_streams(packed.movedim(1, 0)), rows


@jet_rule(built_in("_pad_packed_sequence"))
def pad(
    data: JetTensor, rows: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[JetTensor, Tensor]:
    """Invert `pack`; the padding carries no derivative."""
    padded, settings = torch_private.pad_packed_sequence, (rows, batch_first)
    primal, lengths = padded(data.primal, *settings, padding_value, total_length)
    rest, _ = padded(data.streams[1:].movedim(0, 1), *settings, 0.0, total_length)
    return data.with_streams(torch.cat([primal.unsqueeze(0), rest.movedim(2, 0)])), lengths
