"""Blocks of real transformers to compile, and what a compiled graph holds."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

import jachess_ext as jx

WIDTH, HEADS, HEAD_SIZE = 16, 2, 8


class SelfAttention(nn.Module):
    """A norm, attention, a linear layer and a residual: what takes a quarter of a block's time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        heads = self.norm(x).view(*x.shape[:2], HEADS, HEAD_SIZE).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=attention_mask)
        return x + F.gelu(self.attention(attended.transpose(1, 2).reshape(x.shape)))


def bert() -> Any:
    config = BertConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        intermediate_size=24,
        attn_implementation="sdpa",
    )
    return BertLayer(config).eval()


def streams_of(fn: Any, order: int = 2) -> Any:
    """A function of x and directions: the stack of the jet of ``fn``."""

    def streams(x: Tensor, directions: Tensor) -> Tensor:
        return jx.jet(fn, x, directions, order).streams

    return streams


def example(
    block: nn.Module, batch: int = 2, tokens: int = 5, q: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """A point ``[batch, tokens, d]`` and q directions for a block, in the block's dtype."""
    parameter = next(block.parameters())
    generator = torch.Generator().manual_seed(seed)
    shape = (1 + q, batch, tokens, WIDTH)
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
    return values[0], values[1:]


def streams_and_gradients(
    fn: Callable[..., Tensor], module: nn.Module, *tensors: Tensor
) -> dict[str, Tensor]:
    """``fn(*tensors)`` and the gradients of a weighted sum of it, by name."""
    module.zero_grad(set_to_none=True)
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    out = fn(*leaves)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view_as(out)
    (out * weights).sum().backward()
    found = {"out": out.detach()}
    found |= {f"input {i}": leaf.grad for i, leaf in enumerate(leaves) if leaf.grad is not None}
    found |= {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return found


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Every tensor within ``bound`` of the other, relative to the largest gradient or value."""
    assert got.keys() == expected.keys()
    scale = max(float(value.abs().max()) for name, value in expected.items() if name != "out")
    for name, value in expected.items():
        size = float(value.abs().max()) if name == "out" else scale
        error = float((got[name] - value).abs().max()) / size
        assert error < bound, f"{name}: {error:.1e}"


class Recorder:
    """A backend that runs AOT autograd's graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.forward: list[GraphModule] = []
        self.backward: list[GraphModule] = []
        self.backend = aot_autograd(
            fw_compiler=functools.partial(self._keep, self.forward),
            bw_compiler=functools.partial(self._keep, self.backward),
        )

    @staticmethod
    def _keep(kept: list[GraphModule], graph: GraphModule, inputs: Sequence[Any]) -> Any:
        kept.append(graph)
        return make_boxed_func(graph.forward)


def jachess_operators(graph: GraphModule) -> Counter[str]:
    """How often a graph calls each operator of the namespace jachess."""
    names = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    return Counter(name.split(".")[1] for name in names if name.startswith("jachess."))


class OperatorsCalled(TorchDispatchMode):
    """Counts the calls of jachess operators while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "jachess":
            self.counts[func._schema.name.removeprefix("jachess::")] += 1
        return func(*args, **(kwargs or {}))
