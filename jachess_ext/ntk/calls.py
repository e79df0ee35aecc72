"""Parsers of calls that use a parameter, and each call's contribution to the kernel.

To cover another torch function, add its parser to `_PARSERS` and, for a new kind of call, the
function that computes its contribution to `CONTRIBUTION_RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.func import functional_call, vjp, vmap

from ..jet.engine.types import Args, Function, Named
from ..torch_private import functional as F
from .contract import Contribution, Dense, as_real, make_factors, make_matches
from .outputs import RENORMALISED

Arguments = Mapping[str, Any]  # of a torch function, by name
Names = Mapping[int, str]  # id of a chosen parameter -> its name
Shapes = Mapping[str, torch.Size]


@dataclass
class Call:
    """A call of a torch function or of a module.

    Attributes:
        kind: kind of the function, a key of ``CONTRIBUTION_RULES``.
        roles: role ("weight", "bias") -> name of the parameter.
        inputs: tensor that the parameter is combined with, [n·s, ...] like the output (n samples, s
            rows each); None if the contribution needs no input.
        options: further arguments of the contribution.
        edge: gradient edge of the call's output, set when the call is recorded.
    """

    kind: str
    roles: dict[str, str]
    inputs: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)
    edge: GradientEdge = field(init=False)


def recognise(
    function: Function, args: Args, kwargs: Named, names: Names
) -> tuple[Call | None, set[str]]:
    """Return two results: the call, or None if it is not covered; and the names of the parameters
    among its arguments whose use is not covered."""
    values = flat(args, kwargs)
    parameters = {names[id(value)] for value in values if id(value) in names}
    if not parameters:
        return None, parameters
    call = None
    is_complex = any(isinstance(value, Tensor) and value.is_complex() for value in values)
    if function in _PARSERS and not is_complex:
        order, parse = _PARSERS[function]
        if len(args) <= len(order) and set(kwargs) <= set(order):
            call = parse(dict(zip(order, args, strict=False)) | dict(kwargs), names)
    return call, parameters - (set(call.roles.values()) if call is not None else set())


def flat(args: Args, kwargs: Named) -> list[object]:
    """Return the arguments of a call, with lists and tuples flattened."""
    values: list[object] = []
    for value in (*args, *kwargs.values()):
        values.extend(value) if isinstance(value, (list, tuple)) else values.append(value)
    return values


def _linear(args: Arguments, names: Names) -> Call | None:
    if not _is_matrix_product(args, names):
        return None
    return Call("linear", _roles(args, names), args["input"].detach())


def _addmm(args: Arguments, names: Names) -> Call | None:
    """Parse addmm as the linear layer bias + x W with W [d_in, d_out], transformers' Conv1D."""
    args = {"bias": args["input"], "input": args["mat1"], "weight": args["mat2"]}
    if args["bias"].dim() != 1 or not _is_matrix_product(args, names):
        return None
    return Call("linear", _roles(args, names), args["input"].detach(), {"is_transposed": True})


def _embedding(args: Arguments, names: Names) -> Call | None:
    if args.get("max_norm") is not None:
        raise ValueError(RENORMALISED.format(names.get(id(args["weight"]))))
    if args.get("scale_grad_by_freq") or args.get("sparse"):
        return None
    padding = args.get("padding_idx")
    num_rows = args["weight"].shape[0]
    if padding is not None and padding < 0:
        padding += num_rows
    options = {"padding": padding, "rows": num_rows}
    return Call("embedding", _roles(args, names), args["input"].detach(), options)


def _take(args: Arguments, names: Names) -> Call | None:
    """Parse take as bias[ids], an embedding of width 1."""
    if id(args["input"]) not in names or args["input"].dim() != 1:
        return None
    if bool((args["index"] < 0).any()):
        return None
    options = {"padding": None, "rows": args["input"].shape[0]}
    return Call("take", {"bias": names[id(args["input"])]}, args["index"], options)


def _norm(kind: str, eps: float | None, args: Arguments, names: Names) -> Call | None:
    """Parse a call of layer_norm or rms_norm whose weight or bias is a recorded parameter.

    Args:
        kind: "layer_norm" or "rms_norm".
        eps: the function's default ε, used if the call gives none.
    """
    if id(args["input"]) in names:
        return None
    options = {"shape": list(args["normalized_shape"]), "eps": args.get("eps", eps)}
    return Call(kind, _roles(args, names), args["input"].detach(), options)


def _product(args: Arguments, names: Names) -> Call | None:
    """Parse mul as weight * x, element by element; None unless one of the two is a parameter."""
    values = list(args.values())
    weight_indices = [i for i, value in enumerate(values) if id(value) in names]
    if len(values) != 2 or len(weight_indices) != 1:
        return None
    weight, x = values[weight_indices[0]], values[1 - weight_indices[0]]
    if not isinstance(x, Tensor) or x.dim() < max(1, weight.dim()):
        return None
    if x.dim() == weight.dim() and weight.shape[0] != 1:
        return None  # one weight entry per row of x: its gradient is not a sum over samples
    return Call("product", {"weight": names[id(weight)]}, x.detach())


def _sum(args: Arguments, names: Names) -> Call | None:
    """Parse add as bias + x, element by element; None unless one of the two is a parameter."""
    call = _product(args, names)
    return None if call is None else Call("sum", {"bias": call.roles["weight"]}, None)


def _is_matrix_product(args: Arguments, names: Names) -> bool:
    """Return whether the input is not a parameter and the weight is a matrix."""
    return id(args["input"]) not in names and args["weight"].dim() == 2


def _roles(args: Arguments, names: Names) -> dict[str, str]:
    roles = {role: names.get(id(args.get(role))) for role in ("weight", "bias")}
    return {role: name for role, name in roles.items() if name is not None}


_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
_PAIR = ("input", "other")

# Function -> the order of its arguments, and the parser of its calls.
_PARSERS: dict[Function, tuple[tuple[str, ...], Callable[[Arguments, Names], Call | None]]] = {
    F.linear: (("input", "weight", "bias"), _linear),
    torch.addmm: (("input", "mat1", "mat2"), _addmm),
    F.embedding: ((*_EMBEDDING, "sparse"), _embedding),
    torch.take: (("input", "index"), _take),
    F.layer_norm: (
        ("input", "normalized_shape", "weight", "bias", "eps"),
        partial(_norm, "layer_norm", 1e-5),
    ),
    F.rms_norm: (("input", "normalized_shape", "weight", "eps"), partial(_norm, "rms_norm", None)),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), (_PAIR, _product)),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), (_PAIR, _sum)),
}


# Contributions of a call, by parameter name, from the cotangents [C, n·s, ...] of its output for n
# samples.


def _linear_contribution(
    call: Call, delta: Tensor, shapes: Shapes, num_samples: int
) -> dict[str, Contribution]:
    a = _input_rows(call, num_samples, delta.shape[1])
    terms: dict[str, Contribution] = {}
    delta = delta.reshape(delta.shape[0], num_samples, -1, delta.shape[-1])
    if "bias" in call.roles:
        terms[call.roles["bias"]] = Dense(delta.sum(2))
    if "weight" in call.roles:
        a = a.reshape(num_samples, -1, a.shape[-1])
        assert call.inputs is not None
        source = (call.inputs.data_ptr(), call.inputs._version, *call.inputs.shape)
        is_transposed = call.options.get("is_transposed", False)
        terms[call.roles["weight"]] = make_factors(a, delta, is_transposed, source)
    return terms


def _embedding_contribution(
    call: Call, delta: Tensor, shapes: Shapes, num_samples: int
) -> dict[str, Contribution]:
    """Return the contribution of a call of embedding, or of take (an embedding of width 1)."""
    ids = _input_rows(call, num_samples, delta.shape[1]).reshape(num_samples, -1)
    padding = call.options["padding"]
    keep = torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding
    width = 1 if call.kind == "take" else delta.shape[-1]
    delta = delta.reshape(delta.shape[0], num_samples, -1, width)
    (name,) = call.roles.values()
    return {name: make_matches(ids, delta, keep, call.options["rows"])}


def _elementwise_contribution(
    call: Call, delta: Tensor, shapes: Shapes, num_samples: int
) -> dict[str, Contribution]:
    """Return the contributions of weight * x, bias + x, and norms, which normalise x first."""
    terms: dict[str, Contribution] = {}
    for role, name in call.roles.items():
        values = delta
        if role == "weight":
            x = cast(Tensor, call.inputs)
            if call.kind != "product":
                x = getattr(F, call.kind)(x, call.options["shape"], eps=call.options["eps"])
            values = delta * x
        terms[name] = _sum_broadcast(values, shapes[name], num_samples)
    return terms


def _sum_broadcast(values: Tensor, shape: torch.Size, num_samples: int) -> Dense:
    """Return values, [C, n·s, ...], summed over the s rows of each sample and over every dimension
    along which a parameter of shape ``shape`` was broadcast."""
    num_outputs, features = values.shape[0], values.shape[2:]
    if len(shape) > len(features):  # the parameter's first dimension, of size 1, is along the rows
        shape = shape[1:]
    summed = values.reshape(num_outputs, num_samples, -1, *features).sum(2)
    if len(features) > len(shape):
        summed = summed.sum(tuple(range(2, 2 + len(features) - len(shape))))
    broadcast_dims = tuple(2 + i for i, size in enumerate(shape) if size == 1)
    if broadcast_dims:
        summed = summed.sum(broadcast_dims, keepdim=True)
    return Dense(summed.reshape(num_outputs, num_samples, -1))


def _input_rows(call: Call, num_samples: int, num_rows: int) -> Tensor:
    """Return a call's inputs with ``num_rows`` rows; inputs without a batch dimension are repeated
    for each sample."""
    values = call.inputs
    assert values is not None
    if values.shape[0] == num_rows:
        return values
    return values.expand(num_samples, *values.shape).flatten(0, 1)


# Childless modules of any other type (a norm with weight 1 + w, a convolution): their forward is
# differentiated, sample by sample, from recorded inputs; the rest of the model is not run again.


def local_call(
    module: nn.Module, roles: Mapping[str, str], args: Args, kwargs: Named, output: object
) -> Call | None:
    """Return the call of a childless module; None if its input tensors and its output do not have
    the same number of rows."""
    values = [v.detach() if isinstance(v, Tensor) else v for v in (*args, *kwargs.values())]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not isinstance(output, Tensor) or not output.dim() or not tensors:
        return None
    if any(not tensor.dim() or tensor.shape[0] != output.shape[0] for tensor in tensors):
        return None
    options = {"module": module, "values": values, "keywords": tuple(kwargs)}
    return Call("local", dict(roles), None, options)


def _local_contribution(
    call: Call, cotangents: Tensor, shapes: Shapes, num_samples: int
) -> dict[str, Contribution]:
    """Return the per-sample gradients of a module's parameters, [C, n, numel] each."""
    module, keywords = call.options["module"], call.options["keywords"]
    parameters = {key: module._parameters[key].detach() for key in call.roles}
    values = tuple(_split_samples(value, num_samples) for value in call.options["values"])
    dims = tuple(0 if isinstance(value, Tensor) else None for value in values)
    num_positional = len(values) - len(keywords)

    def sample_gradients(values: Args, delta: Tensor) -> dict[str, Tensor]:
        kwargs = dict(zip(keywords, values[num_positional:], strict=True))

        def forward(parameters: dict[str, Tensor]) -> Tensor:
            return functional_call(module, parameters, values[:num_positional], kwargs)

        pull = vjp(forward, parameters)[1]
        return vmap(lambda d: pull(d)[0])(delta)

    delta = cotangents.unflatten(1, (num_samples, -1))
    with torch.enable_grad():
        gradients = vmap(sample_gradients, in_dims=(dims, 1), out_dims=1)(values, delta)
    # [C, n, numel]; a parameter may have no dimension.
    return {
        name: Dense(as_real(gradients[key]).unsqueeze(-1).flatten(2))
        for key, name in call.roles.items()
    }


def _split_samples(value: object, num_samples: int) -> object:
    """Return a tensor [n·s, ...] as [n, s, ...], a single row repeated for every sample; any other
    value unchanged."""
    if not isinstance(value, Tensor):
        return value
    if value.shape[0] == 1 and num_samples > 1:
        value = value.expand(num_samples, *value.shape[1:])
    return value.unflatten(0, (num_samples, -1))


CONTRIBUTION_RULES: dict[str, Callable[[Call, Tensor, Shapes, int], dict[str, Contribution]]] = {
    "linear": _linear_contribution,
    "embedding": _embedding_contribution,
    "take": _embedding_contribution,
    **dict.fromkeys(("layer_norm", "rms_norm", "product", "sum"), _elementwise_contribution),
    "local": _local_contribution,
}


# ---- outputs without a dimension of samples that get one later --------------------------------
#
# T5's relative position bias is an embedding [T, T, heads], permuted, then broadcast to all samples
# by ``unsqueeze(0)``.  The call's output is followed through operations that only rearrange entries
# (a chain).  Where a first dimension of size 1 is inserted, it is expanded to one row a sample, so
# that the samples' cotangents are not summed; these are then propagated back to the call's output
# through the backward of the same operations.

FOLLOWED = ("linear", "embedding")  # kinds of calls
MOVES = {
    Tensor.permute,
    Tensor.transpose,
    Tensor.contiguous,
    Tensor.view,
    Tensor.reshape,
    torch.permute,
    torch.transpose,
}
INSERTS = {Tensor.unsqueeze, torch.unsqueeze}


def chain_start(call: Call, cotangents: Tensor) -> tuple[Call, Tensor]:
    """Return the call at the start of a chain and the cotangents of its output, [C, n·s, ...].

    Args:
        call: the chain.
        cotangents: cotangents of the chain's end, [C, n, ...].
    """
    end, start = call.options["end"], call.options["call"]
    num_outputs, num_samples = cotangents.shape[:2]
    grads = cotangents.flatten(0, 1)[:, None]  # [C n, 1, ...]: each one cotangent of the end
    (start_cotangents,) = torch.autograd.grad(
        end, [start.edge], grads, retain_graph=True, is_grads_batched=True
    )
    return start, start_cotangents.unflatten(0, (num_outputs, num_samples)).flatten(1, 2)
