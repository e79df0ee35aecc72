"""Childless modules of any other type (a norm with weight 1 + w, a convolution): their own forward
is differentiated, sample by sample, from recorded inputs; the rest of the model is not run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from .calls import Call
from .contributions import Contribution, Dense


def local_call(
    module: nn.Module, roles: Mapping[str, str], args: Any, kwargs: Any, output: Any
) -> Call | None:
    """The call of a module; None unless it maps tensors of some rows to one tensor of as many."""
    values = [*args, *kwargs.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not isinstance(output, Tensor) or not output.dim() or not tensors:
        return None
    if any(not tensor.dim() or tensor.shape[0] != output.shape[0] for tensor in tensors):
        return None
    options = {"module": module, "args": _detached(args), "kwargs": _detached(kwargs)}
    return Call("local", dict(roles), None, options)


def local_contributions(call: Call, cotangents: Tensor, samples: int) -> dict[str, Contribution]:
    """Per-sample vector-Jacobian products of the module, [C, n, numel] for each parameter."""
    module = call.options["module"]
    parameters = {key: module._parameters[key].detach() for key in call.roles}
    args, kwargs = _split(call.options["args"], samples), _split(call.options["kwargs"], samples)
    # A batch-less input has one row, whose samples are all the same.
    dims = (_dimensions(args), _dimensions(kwargs))
    delta = cotangents.unflatten(1, (samples, -1))

    def one(args: Any, kwargs: Any, delta: Tensor) -> dict[str, Tensor]:
        def forward(parameters: dict[str, Tensor]) -> Tensor:
            return functional_call(module, parameters, tuple(args), dict(kwargs))

        pull = vjp(forward, parameters)[1]
        return vmap(lambda d: pull(d)[0])(delta)

    with torch.enable_grad():
        found = vmap(one, in_dims=(*dims, 1), out_dims=1)(args, kwargs, delta)
    return {name: Dense(found[key].flatten(2)) for key, name in call.roles.items()}


def _map(values: Any, apply: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: apply(value) for key, value in values.items()}
    return tuple(apply(value) for value in values)


def _detached(values: Any) -> Any:
    return _map(values, lambda v: v.detach() if isinstance(v, Tensor) else v)


def _split(values: Any, samples: int) -> Any:
    """Tensors as [n, rows a sample, ...]."""

    def split(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.shape[0] == 1 and samples > 1:
            value = value.expand(samples, *value.shape[1:])
        return value.unflatten(0, (samples, -1))

    return _map(values, split)


def _dimensions(values: Any) -> Any:
    return _map(values, lambda v: 0 if isinstance(v, Tensor) else None)
