"""Reductions that are not linear: extreme values and norms."""

from __future__ import annotations

from typing import Any

import torch

from ..registry import jet_rule, missing_rule
from ..tensor import JetTensor


def _extreme(name: str, pick: str) -> None:
    """The entry at the extreme index carries its own derivative (apart from ties)."""

    @jet_rule(name)
    def rule(input: Any, dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
        if isinstance(dim, JetTensor | torch.Tensor):
            return getattr(torch, f"{name}imum")(input, dim)
        if dim is None:
            flat = input.flatten()
            return flat[getattr(flat.primal, pick)()]
        index = getattr(input.primal, pick)(dim, keepdim=True)
        values = torch.gather(input, dim, index)
        if not keepdim:
            values, index = values.squeeze(dim), index.squeeze(dim)
        return getattr(torch.return_types, name)((values, index))


for _name, _pick in (("max", "argmax"), ("min", "argmin")):
    _extreme(_name, _pick)


def _extreme_value(name: str, pick: str) -> None:
    @jet_rule(name)
    def rule(input: Any, dim: Any = (), keepdim: bool = False) -> Any:
        dims = [dim] if isinstance(dim, int) else list(dim)
        if len(dims) != 1:
            raise missing_rule(getattr(torch, name), "exactly one dimension is covered")
        values = torch.gather(input, dims[0], getattr(input.primal, pick)(dims[0], keepdim=True))
        return values if keepdim else values.squeeze(dims[0])  # type: ignore[attr-defined]


for _name, _pick in (("amax", "argmax"), ("amin", "argmin")):
    _extreme_value(_name, _pick)


@jet_rule("norm")
def norm(input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
    """Euclidean norm."""
    if p not in ("fro", 2, 2.0, None):
        raise missing_rule(torch.norm, f"p={p!r} is not covered, only the Euclidean norm")
    return torch.sqrt((input * input).sum(dim, keepdim))
