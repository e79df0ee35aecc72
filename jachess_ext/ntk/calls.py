"""Calls of torch functions that use a parameter, and what each gives to per-sample gradients.

`recognise` says which role each parameter plays in a call; `contributions` turns the call's inputs
and its output's cotangents into contributions.  A call that is not recognised here, or a parameter
in a role that is not, is reported as such, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from .contributions import Contribution, Dense, make_factors, make_matches


@dataclass
class Call:
    """One call.

    Attributes:
        kind: of the function, a key of ``_CONTRIBUTE``.
        roles: role ("weight", "bias") -> the parameter's name.
        inputs: the data the parameter meets: [n·s, ...] like the output; None where there is none.
        options: what else the contribution needs.
    """

    kind: str
    roles: dict[str, str]
    inputs: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)


def recognise(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Mapping[int, str]
) -> tuple[Call | None, set[str]]:
    """(the call, parameters in it that play no known role).

    Args:
        names: id of a chosen parameter -> its name.
    """
    touched = {names[id(value)] for value in _flat(args, kwargs) if id(value) in names}
    if not touched:
        return None, touched
    order, reader = _READERS.get(function, ((), None))
    given = _bind(order, args, kwargs)
    call = None if reader is None or given is None else reader(given, names)
    return call, touched - (set(call.roles.values()) if call is not None else set())


def contributions(
    call: Call, cotangents: Tensor, shapes: Mapping[str, torch.Size], samples: int
) -> dict[str, Contribution]:
    """Contribution of each parameter of a call.

    Args:
        cotangents: [C, n·s, ...], of the call's output.
        shapes: of the parameters.
        samples: n.
    """
    return _CONTRIBUTE[call.kind](call, cotangents, shapes, samples)


def _flat(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    flat: list[Any] = []
    for value in (*args, *kwargs.values()):
        flat.extend(value) if isinstance(value, (list, tuple)) else flat.append(value)
    return flat


# ---- recognising -----------------------------------------------------------------------------

Given = Mapping[str, Any]
Names = Mapping[int, str]
Reader = Callable[[Given, Names], "Call | None"]


def _linear(given: Given, names: Names) -> Call | None:
    if not _plain_weight(given, names):
        return None
    return Call("linear", _roles(given, names), given["input"].detach())


def _addmm(given: Given, names: Names) -> Call | None:
    """bias + x W, W [d_in, d_out]: transformers' Conv1D."""
    given = {"bias": given["input"], "input": given["mat1"], "weight": given["mat2"]}
    if given["bias"].dim() != 1 or not _plain_weight(given, names):
        return None
    return Call("linear", _roles(given, names), given["input"].detach(), {"transposed": True})


def _embedding(given: Given, names: Names) -> Call | None:
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
        return None
    padding = given.get("padding_idx")
    rows = given["weight"].shape[0]
    if padding is not None and padding < 0:
        padding += rows
    options = {"padding": padding, "rows": rows}
    return Call("embedding", _roles(given, names), given["input"].detach(), options)


def _take(given: Given, names: Names) -> Call | None:
    """bias[ids]: an embedding of numbers."""
    if id(given["input"]) not in names or given["input"].dim() != 1:
        return None
    if bool((given["index"] < 0).any()):
        return None
    options = {"padding": None, "rows": given["input"].shape[0]}
    return Call("take", {"bias": names[id(given["input"])]}, given["index"], options)


def _norm(kind: str, eps: float | None, given: Given, names: Names) -> Call | None:
    """`eps`: the function's default."""
    if id(given["input"]) in names:
        return None
    options = {"shape": list(given["normalized_shape"]), "eps": given.get("eps", eps)}
    return Call(kind, _roles(given, names), given["input"].detach(), options)


def _product(given: Given, names: Names) -> Call | None:
    """weight * x, elementwise."""
    values = list(given.values())
    weights = [i for i, value in enumerate(values) if id(value) in names]
    if len(values) != 2 or len(weights) != 1:
        return None
    weight, other = values[weights[0]], values[1 - weights[0]]
    if not isinstance(other, Tensor) or other.dim() < max(1, weight.dim()):
        return None
    if other.dim() == weight.dim() and weight.shape[0] != 1:
        return None  # the parameter has a number for every row: no sample owns one
    return Call("product", {"weight": names[id(weight)]}, other.detach())


def _sum(given: Given, names: Names) -> Call | None:
    """bias + x, elementwise."""
    call = _product(given, names)
    return None if call is None else Call("sum", {"bias": call.roles["weight"]}, None)


def _bind(
    order: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Arguments by name; None where there is one that ``order`` does not know."""
    if len(args) > len(order) or not set(kwargs) <= set(order):
        return None
    return dict(zip(order, args, strict=False)) | dict(kwargs)


def _plain_weight(given: Given, names: Names) -> bool:
    """Whether the data input is no parameter, and weight and data are matrices."""
    return id(given["input"]) not in names and given["weight"].dim() == 2


def _roles(given: Given, names: Names) -> dict[str, str]:
    roles = {role: names.get(id(given.get(role))) for role in ("weight", "bias")}
    return {role: name for role, name in roles.items() if name is not None}


_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
_PAIR = ("input", "other")

# The order of a function's arguments, and what makes a call of them.
_READERS: dict[Any, tuple[tuple[str, ...], Reader | None]] = {
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


# ---- contributing ----------------------------------------------------------------------------

Shapes = Mapping[str, torch.Size]


def _from_linear(
    call: Call, delta: Tensor, shapes: Shapes, samples: int
) -> dict[str, Contribution]:
    a = _rows(call, samples, delta.shape[1])
    found: dict[str, Contribution] = {}
    delta = delta.reshape(delta.shape[0], samples, -1, delta.shape[-1])
    if "bias" in call.roles:
        found[call.roles["bias"]] = Dense(delta.sum(2))
    if "weight" in call.roles:
        a = a.reshape(samples, -1, a.shape[-1])
        assert call.inputs is not None
        source = (call.inputs.data_ptr(), call.inputs._version, *call.inputs.shape)
        transposed = call.options.get("transposed", False)
        found[call.roles["weight"]] = make_factors(a, delta, transposed=transposed, source=source)
    return found


def _from_rows(call: Call, delta: Tensor, shapes: Shapes, samples: int) -> dict[str, Contribution]:
    """Of an embedding; `take` is one of numbers."""
    ids = _rows(call, samples, delta.shape[1]).reshape(samples, -1)
    padding = call.options["padding"]
    keep = torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding
    width = 1 if call.kind == "take" else delta.shape[-1]
    delta = delta.reshape(delta.shape[0], samples, -1, width)
    (name,) = call.roles.values()
    return {name: make_matches(ids, delta, keep, call.options["rows"])}


def _from_elementwise(
    call: Call, delta: Tensor, shapes: Shapes, samples: int
) -> dict[str, Contribution]:
    """Of weight * x and bias + x, and of norms, where x is normalised first."""
    found: dict[str, Contribution] = {}
    for role, name in call.roles.items():
        values = delta
        if role == "weight":
            x: Any = call.inputs
            if call.kind != "product":
                x = getattr(F, call.kind)(x, call.options["shape"], eps=call.options["eps"])
            values = delta * x
        found[name] = _summed(values, shapes[name], samples)
    return found


def _summed(values: Tensor, shape: torch.Size, samples: int) -> Dense:
    """[C, n·s, ...] summed over every dimension the parameter was broadcast along."""
    outputs, rest = values.shape[0], values.shape[2:]  # rest: what follows the dimension of rows
    if len(shape) > len(rest):  # the parameter's own first dimension, of size 1, meets the rows
        shape = shape[1:]
    summed = values.reshape(outputs, samples, -1, *rest).sum(2)
    if len(rest) > len(shape):
        summed = summed.sum(tuple(range(2, 2 + len(rest) - len(shape))))
    single = tuple(2 + i for i, size in enumerate(shape) if size == 1)
    if single:
        summed = summed.sum(single, keepdim=True)
    return Dense(summed.reshape(outputs, samples, -1))


def _rows(call: Call, samples: int, rows: int) -> Tensor:
    """The inputs with as many rows as the output; a batch-less input serves every sample."""
    values = call.inputs
    assert values is not None
    if values.shape[0] == rows:
        return values
    return values.expand(samples, *values.shape).flatten(0, 1)


# Childless modules of any other type (a norm with weight 1 + w, a convolution): their own forward
# is differentiated, sample by sample, from recorded inputs; the rest of the model is not run again.


def local_call(
    module: nn.Module, roles: Mapping[str, str], args: Any, kwargs: Any, output: Any
) -> Call | None:
    """The call of a module; None unless it maps tensors of some rows to one tensor of as many."""
    values = [v.detach() if isinstance(v, Tensor) else v for v in (*args, *kwargs.values())]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not isinstance(output, Tensor) or not output.dim() or not tensors:
        return None
    if any(not tensor.dim() or tensor.shape[0] != output.shape[0] for tensor in tensors):
        return None
    options = {"module": module, "values": values, "keywords": tuple(kwargs)}
    return Call("local", dict(roles), None, options)


def _from_local(
    call: Call, cotangents: Tensor, shapes: Shapes, samples: int
) -> dict[str, Contribution]:
    """Per-sample vector-Jacobian products of the module, [C, n, numel] for each parameter."""
    module, keywords = call.options["module"], call.options["keywords"]
    parameters = {key: module._parameters[key].detach() for key in call.roles}
    values = tuple(_split(value, samples) for value in call.options["values"])
    dims = tuple(0 if isinstance(value, Tensor) else None for value in values)
    plain = len(values) - len(keywords)

    def one(values: tuple[Any, ...], delta: Tensor) -> dict[str, Tensor]:
        named = dict(zip(keywords, values[plain:], strict=True))

        def forward(parameters: dict[str, Tensor]) -> Tensor:
            return functional_call(module, parameters, values[:plain], named)

        pull = vjp(forward, parameters)[1]
        return vmap(lambda d: pull(d)[0])(delta)

    delta = cotangents.unflatten(1, (samples, -1))
    with torch.enable_grad():
        found = vmap(one, in_dims=(dims, 1), out_dims=1)(values, delta)
    # [C, n, numel]; a parameter may have no dimension.
    return {name: Dense(found[key].unsqueeze(-1).flatten(2)) for key, name in call.roles.items()}


def _split(value: Any, samples: int) -> Any:
    """A tensor as [n, rows a sample, ...]; a batch-less one's only row serves every sample."""
    if not isinstance(value, Tensor):
        return value
    if value.shape[0] == 1 and samples > 1:
        value = value.expand(samples, *value.shape[1:])
    return value.unflatten(0, (samples, -1))


_CONTRIBUTE: dict[str, Callable[[Call, Tensor, Shapes, int], dict[str, Contribution]]] = {
    "linear": _from_linear,
    "embedding": _from_rows,
    "take": _from_rows,
    **dict.fromkeys(("layer_norm", "rms_norm", "product", "sum"), _from_elementwise),
    "local": _from_local,
}
