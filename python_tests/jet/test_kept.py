"""What is kept from a pass that has ended, and what a pass that failed leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jachess_ext as jx
from jachess_ext.jet import composed_rules

from ..smoothness import tiny_models

X, U = torch.rand(3) + 0.5, torch.rand(3)


def take(kind: str, function: Any) -> Any:
    """A pass through ``function``."""
    if kind == "jet":
        return jx.jet(function, X, U.unsqueeze(0))
    return jx.jvp(function, (X,), (U,), differentiable=kind == "jvp")


KINDS = pytest.mark.parametrize("kind", ["jet", "jvp", "target"])


def kept_by(kind: str) -> Any:
    """A tensor of a pass that has ended."""
    kept = []

    def function(x: Any) -> Any:
        kept.append(x * x)
        return kept[0].sum()

    take(kind, function)
    return kept[0]


@KINDS
@pytest.mark.parametrize("use", ["alone", "computed with", "with another", "in a nest"])
def test_a_tensor_of_an_earlier_pass_is_refused(kind: str, use: str) -> None:
    kept = kept_by(kind)
    functions = {
        "alone": lambda x: kept,
        "computed with": lambda x: kept.exp(),
        "with another": lambda x: x * kept,
        "in a nest": lambda x: {"y": x * 2, "z": [kept]},
    }
    with pytest.raises((RuntimeError, ValueError), match=r"earlier pass|another pass|two calls"):
        take(kind, functions[use])


@KINDS
@pytest.mark.parametrize("name", ["exp", "mul_", "__getitem__"])
def test_functions_refuse_what_was_kept(kind: str, name: str) -> None:
    arguments = {"mul_": (2,), "__getitem__": (0,)}.get(name, ())
    with pytest.raises(RuntimeError, match=r"kept from an earlier pass .* detach"):
        getattr(kept_by(kind), name)(*arguments)


@KINDS
def test_a_module_that_keeps_what_it_computes_is_told(kind: str) -> None:
    class Averaging(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: Any) -> Any:
            self.mean = 0.9 * self.mean + x
            return self.mean.sum()

    module = Averaging()
    take(kind, module)
    with pytest.raises(RuntimeError, match="If a module keeps it"):
        module(X)


@KINDS
def test_the_value_of_what_was_kept_can_be_looked_at(kind: str) -> None:
    torch.testing.assert_close(kept_by(kind).detach(), X * X)
    assert "shape=(3,)" in repr(kept_by(kind))


def test_a_penalty_ends_its_pass() -> None:
    model = tiny_models.classifier("bert")
    kept = []
    block = next(m for name, m in model.named_modules() if name.endswith("layer.0"))
    block.register_forward_hook(lambda m, a, y: kept.append(y[0] if isinstance(y, tuple) else y))
    batch = {"input_ids": torch.tensor([[1, 2, 3]])}
    jx.smoothness(model.eval(), batch, seed=0)
    with pytest.raises(RuntimeError, match="kept from an earlier pass"):
        kept[0].exp()


@pytest.mark.parametrize("later", ["jet", "composed"])
def test_a_pass_that_failed_leaves_nothing_behind(later: str) -> None:
    """Its traceback keeps its tensors, among them deferred jets that read a weight."""
    weight = nn.Parameter(torch.ones(3))
    seen: list[Any] = []

    def fails(x: Any) -> Any:
        seen.append(weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)))
        seen.append(torch.nn.functional.silu(x))
        raise KeyError("stop")

    with pytest.raises(KeyError):
        take("jet", fails)
    with torch.no_grad():
        weight.mul_(2)

    def writes(x: Any) -> Any:
        return (x * 2).mul_(3)

    if later == "composed":
        with composed_rules():
            jet = take("jet", writes)
    else:
        jet = take("jet", writes)
    torch.testing.assert_close(jet.first[0], 6 * U)
