"""Recurrent layers, composed step by step: gates are one linear map of all tokens, then one each.

The formulas are those of torch.nn.LSTM, GRU and RNN; torch's kernels have no second derivative.
A packed sequence is ``[sum of lengths, C]``, step by step, the longest rows first, with the number
of rows that each step still has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import torch_private
from ..registry import built_in, jet_rule
from ..tensor import JetTensor

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
    """``x [T, B, C]`` through one layer: every hidden state ``[T, B, H]``, and the last state.

    Args:
        rows: of every step of a packed x, ``[sum, C]``; the result is packed, too.
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
    """``[T, B, ...]`` to ``[sum of lengths, ...]``, and the rows of every step."""
    packed, rows = torch_private.pack_padded_sequence(
        input.streams.movedim(0, 2), lengths, batch_first
    )
    return input.with_streams(packed.movedim(1, 0)), rows


@jet_rule(built_in("_pad_packed_sequence"))
def pad(
    data: JetTensor, rows: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[JetTensor, Tensor]:
    """The inverse; the padding carries no derivative."""
    padded, settings = torch_private.pad_packed_sequence, (rows, batch_first)
    primal, lengths = padded(data.primal, *settings, padding_value, total_length)
    rest, _ = padded(data.streams[1:].movedim(0, 1), *settings, 0.0, total_length)
    return data.with_streams(torch.cat([primal.unsqueeze(0), rest.movedim(2, 0)])), lengths
