"""Rules composed of torch functions that have rules: torch's Python code, losses, recurrent
layers."""

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


# The rules of these C++ functions are formulas of `jachess_ext.differentiable`; the Python
# functions of the same names call the C++ functions.
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
    """Compute the loss of every stream, since it is linear in the log-probabilities."""
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
    denominator = product.clamp_min(1e-12)
    slope = (x - target) / denominator
    # Where the denominator is clamped, a constant, the slope is linear in x.
    curvature = (1 - slope * (1 - 2 * x) * (product > 1e-12)) / denominator
    losses: Tensor = push_forward(input, (value, slope, curvature))
    return _reduce(losses if weight is None else losses * weight, reduction)


@composed_rule(F.gumbel_softmax)
def gumbel_softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    """Compute the softmax of the logits plus noise, which is constant.

    With ``hard``, the value is one-hot, and the derivatives are those of the softmax, as in torch's
    backward.
    """
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
    """Compute the loss without ``options``: they only set chunk sizes, and torch has no forward
    mode for them."""
    rule = general_rule(F.linear_cross_entropy, "")
    return rule(input, linear_weight, target, **kwargs | {"options": None})


linear_cross_entropy.under_autocast = True  # type: ignore[attr-defined]


# ---- recurrent layers ------------------------------------------------------------------------
#
# The formulas of torch.nn.LSTM, GRU and RNN, step by step, since torch's kernels have no second
# derivative.  A packed sequence is ``[sum of lengths, C]``: the rows of all sequences at the first
# step, longest sequence first, then those at the second step, and so on; ``rows`` holds the number
# of rows of each step.


State: TypeAlias = tuple[Tensor, ...]
"""The hidden state ``[B, H]``; for an LSTM, also the cell state, and the weight of a projection if
it has one."""
Step: TypeAlias = Callable[[Tensor, State, Tensor, "Tensor | None"], State]
"""Maps the input's contribution to the gates ``[B, n H]``, the state, and the weight and bias of
the hidden state to the next state."""


def _lstm_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    hidden, cell, *projection = state
    i, f, g, o = (gates + F.linear(hidden, weight, bias)).chunk(4, -1)
    cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
    hidden = torch.sigmoid(o) * torch.tanh(cell)
    hidden = F.linear(hidden, *projection) if projection else hidden
    return hidden, cell, *projection


def _gru_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    (hidden,) = state
    # The contributions are not simply added, as in an LSTM: r scales the hidden state's one to n.
    r, z, n = gates.chunk(3, -1)
    hr, hz, hn = F.linear(hidden, weight, bias).chunk(3, -1)
    update = torch.sigmoid(z + hz)
    candidate = torch.tanh(n + torch.sigmoid(r + hr) * hn)
    return (candidate + update * (hidden - candidate),)


def _tanh_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    return (torch.tanh(gates + F.linear(state[0], weight, bias)),)


def _relu_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    return (torch.relu(gates + F.linear(state[0], weight, bias)),)


def _run_direction(
    step: Step,
    x: Tensor,
    state: State,
    params: Sequence[Tensor],
    is_reversed: bool,
    rows: Sequence[int] | None,
) -> tuple[Tensor, State]:
    """Run x ``[T, B, C]`` through one layer in one direction; return all hidden states
    ``[T, B, H]``, and the last state.

    Args:
        state: the initial state.
        params: the weights of the input and of the hidden state, then their two biases, if any,
            then the weight of a projection, if any.
        rows: the number of rows of each step if x is packed, ``[sum of lengths, C]``; the result is
            then packed, too.  None: x is not packed.
    """
    w_ih, w_hh, *optional = params
    b_ih, b_hh = optional[:2] if len(optional) > 1 else (None, None)
    projection = optional[2:] if len(optional) > 1 else optional
    all_gates = F.linear(x, w_ih, b_ih)
    gates = all_gates.unbind(0) if rows is None else all_gates.split(list(rows))
    order = range(len(gates))
    hidden_states = []
    for t in reversed(order) if is_reversed else order:
        # If x is packed, only the first rows take the step.  The idle rows keep their state: their
        # sequences have ended (forwards), or have not begun (backwards).
        count = len(gates[t])
        idle_state = [tensor[count:] for tensor in state]
        active_state = tuple(tensor[:count] for tensor in state) if len(idle_state[0]) else state
        next_state = step(gates[t], (*active_state, *projection), w_hh, b_hh)[: len(state)]
        hidden_states.append(next_state[0])
        if len(idle_state[0]):
            next_state = tuple(map(torch.cat, zip(next_state, idle_state, strict=True)))
        state = next_state
    hidden_states = hidden_states[::-1] if is_reversed else hidden_states
    return torch.stack(hidden_states) if rows is None else torch.cat(hidden_states), state


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
    """Run x through all layers; return the hidden states of the last layer, and the last states of
    all layers and directions, ``[layers · directions, B, H]`` each.

    Args:
        hx: the initial states, of the same shape.
        params: the parameters of all layers and directions, concatenated.
        has_biases, num_layers, dropout, train, bidirectional, batch_first: as for torch's function.
        rows: as for `_run_direction`.
    """
    x = x.transpose(0, 1) if batch_first else x
    num_directions = 2 if bidirectional else 1
    params_per_direction = len(params) // (num_layers * num_directions)
    last_states: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(num_directions):
            number = layer * num_directions + direction
            start = tuple(h[number] for h in hx)
            weights = params[number * params_per_direction : (number + 1) * params_per_direction]
            output, state = _run_direction(step, x, start, weights, direction == 1, rows)
            outputs.append(output)
            last_states.append(state)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if train and dropout and layer < num_layers - 1:
            x = F.dropout(x, dropout)
    stacked_states = map(torch.stack, zip(*last_states, strict=True))
    return (x.transpose(0, 1) if batch_first else x, *stacked_states)


def register_recurrent(name: str, step: Step) -> None:
    """Register a recurrent layer and its cell."""

    @composed_rule(getattr(torch, name))
    def layers(input: Tensor, hx: Tensor | State, *args: Any) -> tuple[Tensor, ...]:
        if isinstance(hx, Tensor) and not hx.is_floating_point():
            # A packed sequence: the number of rows of each step precedes the state.
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
    """Pack sequences ``[T, B, ...]`` into ``[sum of lengths, ...]``; also return the number of rows
    of each step."""
    packed, rows = torch_private.pack_padded_sequence(
        input.streams.movedim(0, 2), lengths, batch_first
    )
    return input.with_streams(packed.movedim(1, 0)), rows


@composed_rule(built_in_functions("_pad_packed_sequence"))
def pad_sequence(
    data: JetTensor, rows: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[JetTensor, Tensor]:
    """Invert `pack_sequence`; the padding has zero derivatives."""
    pad, settings = torch_private.pad_packed_sequence, (rows, batch_first)
    primal, lengths = pad(data.primal, *settings, padding_value, total_length)
    tangents, _ = pad(data.streams[1:].movedim(0, 1), *settings, 0.0, total_length)
    return data.with_streams(torch.cat([primal.unsqueeze(0), tangents.movedim(2, 0)])), lengths
