"""Recurrent layers, composed step by step: gates are one linear map of all tokens, then one each.

The formulas are those of torch.nn.LSTM, GRU and RNN; torch's kernels have no second derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import jet_rule, missing_rule

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
    step: Step, x: Any, state: State, weights: Sequence[Any], backwards: bool
) -> tuple[Any, State]:
    """``x [T, B, C]`` through one layer: every hidden state ``[T, B, H]``, and the last state."""
    w_ih, w_hh, b_ih, b_hh = weights[:4]
    state = (*state, *weights[4:])
    gates = F.linear(x, w_ih, b_ih)
    order = range(len(x))
    hidden = []
    for t in reversed(order) if backwards else order:
        state = step(gates[t], state, w_hh, b_hh)
        hidden.append(state[0])
    return torch.stack(hidden[::-1] if backwards else hidden), state


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
            output, state = _one_direction(step, x, start, weights, direction == 1)
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
        if isinstance(params, Tensor):
            raise missing_rule(function, "a packed sequence; pass a padded one")
        hx = hx if isinstance(hx, list | tuple) else (hx,)
        return _layers(step, states, input, hx, params, *settings)


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
