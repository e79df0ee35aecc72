"""Empirical NTKs of a classifier as one would write them with torch.func."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

Batch = dict[str, Any]
_PAIRED = 2  # samples a side of the block that NTK-vector products are measured on


@dataclass(frozen=True)
class Method:
    """A kernel, or a block of its first samples: ``step`` gives [n, C, m, C].

    Attributes:
        scale: what the step's time is to be multiplied by for the whole kernel.
    """

    step: Callable[[], Tensor]
    scale: float = 1.0


def _eager(model: nn.Module) -> nn.Module:
    """With attention written out: the fused kernel has neither a batching rule for vmap, which then
    loops over samples, nor a forward mode."""
    model = deepcopy(model)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    return model


def _parts(model: nn.Module) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
    """Parameters, and one sample's logits [C] as a function of them and its rows."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: b.detach() for name, b in model.named_buffers()}

    def logits(parameters: dict[str, Tensor], *rows: Tensor) -> Tensor:
        inputs = dict(zip(_KEYS, (row[None] for row in rows), strict=True))
        return functional_call(model, (parameters, buffers), (), inputs).logits[0]

    return parameters, logits


_KEYS = ("input_ids",)  # no row is padded: the mask would only hold ones


def jacobian_contraction(model: nn.Module, batch: Batch) -> Method:
    """Every sample's Jacobian by vmap of jacrev, then products parameter by parameter."""
    parameters, logits = _parts(_eager(model))
    rows = tuple(batch[key] for key in _KEYS)
    each = vmap(jacrev(logits), (None, *([0] * len(rows))))

    def step() -> Tensor:
        jacobians = each(parameters, *rows)
        return _contracted([j.flatten(2) for j in jacobians.values()])

    return Method(step)


def per_sample_gradients(model: nn.Module, batch: Batch) -> Method:
    """vmap of grad, an output at a time; then products parameter by parameter."""
    parameters, logits = _parts(_eager(model))
    rows = tuple(batch[key] for key in _KEYS)

    def step() -> Tensor:
        outputs = model.config.num_labels
        found: list[dict[str, Tensor]] = []
        for c in range(outputs):

            def one(parameters: dict[str, Tensor], *rows: Tensor, c: int = c) -> Tensor:
                return logits(parameters, *rows)[c]

            found.append(vmap(grad(one), (None, *([0] * len(rows))))(parameters, *rows))
        kernel: Any = 0
        for name in parameters:
            stacked = torch.stack([gradients.pop(name).flatten(1) for gradients in found], 1)
            kernel = kernel + _contracted([stacked])
        return kernel

    return Method(step)


def _contracted(jacobians: list[Tensor]) -> Tensor:
    """Σ over parameters of J Jᵀ, [N, C, N, C]; J [N, C, size]."""
    kernel: Any = 0
    for j in jacobians:
        flat = j.flatten(0, 1)
        kernel = kernel + flat @ flat.T
    count, outputs = jacobians[0].shape[:2]
    return kernel.view(count, outputs, count, outputs)


def ntk_vector_products(model: nn.Module, batch: Batch) -> Method:
    """J_n J_mᵀ e_c by a vjp and a jvp for every pair and output; measured on the first samples and
    scaled by the number of pairs."""
    parameters, logits = _parts(_eager(model))
    rows = tuple(batch[key] for key in _KEYS)
    count = min(_PAIRED, len(rows[0]))
    some = tuple(row[:count] for row in rows)
    basis = torch.eye(model.config.num_labels)

    def pair(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> Tensor:
        def forward(rows: tuple[Tensor, ...]) -> Callable[..., Tensor]:
            return lambda parameters: logits(parameters, *rows)

        _, pull = vjp(forward(theirs), parameters)

        def column(vector: Tensor) -> Tensor:
            return jvp(forward(mine), (parameters,), pull(vector))[1]

        return vmap(column, out_dims=1)(basis)

    def step() -> Tensor:
        with torch.no_grad():
            blocks = [
                [pair(tuple(r[n] for r in some), tuple(r[m] for r in some)) for m in range(count)]
                for n in range(count)
            ]
        return torch.stack([torch.stack(line, 1) for line in blocks])

    return Method(step, scale=(len(rows[0]) / count) ** 2)


METHODS: dict[str, Callable[[nn.Module, Batch], Method]] = {
    "jacobian": jacobian_contraction,
    "vmap-grad": per_sample_gradients,
    "ntk-vector": ntk_vector_products,
}
