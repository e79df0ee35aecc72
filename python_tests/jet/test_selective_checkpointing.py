"""Selective checkpointing: any operator of a pass may be kept, and the others computed again.

A dispatch mode keeps what an operator returned, and hands it out in place of the second call.  So
no result of an operator may change in place once a mode has seen it, and both runs must call the
same operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import jachess_ext as jx
from jachess_ext.jet.engine import strides
from python_tests.jet.test_checkpointing import SHAPES, _kept, _streams_and_gradients

WIDTH = 4


class Function(nn.Module):
    """A function of the input and a weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Bilinear(nn.Bilinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x.cos())


class Positions(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return x * super().forward(torch.arange(x.shape[-2]) % self.num_embeddings)


class Adapter(nn.Linear):
    """LoRA, as peft computes it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x)) * 0.5


class Dequantised(Tensor):
    """A weight that is dequantised for each product, as torchao's."""

    @staticmethod
    def __new__(cls, plain: Tensor) -> Dequantised:
        made = torch.Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype)
        made.plain = plain
        return made

    def dequantize(self) -> Tensor:
        return self.plain.sin()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = Dequantised(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix, self.bias)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    heads = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in (query, key, value))
    return F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2)


def _channels_last(x: Tensor, weight: Tensor) -> Tensor:
    image = x.reshape(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    return F.conv2d(image, weight[:3, :3, None, None], weight[0, :3]).flatten(1)


def _written(x: Tensor, weight: Tensor) -> Tensor:
    y = x @ weight
    y[..., 0] = x[..., 1]
    return y


def _bias_in_place(x: Tensor, weight: Tensor) -> Tensor:
    y = x @ weight
    y += weight[0]
    return y


def _written_into_a_view(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.matmul(x, weight)
    first, second = y.chunk(2, -1)
    first.mul_(2)
    return first + second * y[..., :2]


def _written_into_what_was_detached(x: Tensor, weight: Tensor) -> Tensor:
    y = x @ weight
    shown = y.detach()
    y += weight[0]
    return y * shown


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, 3),
    "adapter": Adapter,
    "quantised": Quantised,
    "bilinear": lambda: Bilinear(WIDTH, WIDTH, 3),
    "conv2d": lambda: nn.Sequential(nn.Unflatten(-1, (2, 2)), nn.Conv2d(3, 5, 2)),
    "attention": Attention,
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 5, 0.0, batch_first=True),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(3).eval(),
    "gelu": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()),
    "positions": lambda: Positions(3, WIDTH),
    "gru": lambda: Recurrent(nn.GRU),
    "addmm": lambda: Function(lambda x, w: torch.addmm(w[0], x[0], w)),
    "baddbmm": lambda: Function(lambda x, w: torch.baddbmm(w[0], x, x.mT @ x, alpha=0.5)),
    "product of two": lambda: Function(lambda x, w: (x @ w) @ (x * w[0]).mT),
    "einsum": lambda: Function(lambda x, w: torch.einsum("bij,jk->bki", x, w)),
    "strided": lambda: Function(lambda x, w: (x.mT.reshape(3, -1) @ w[:2].reshape(-1, 1)).sin()),
    "softmax": lambda: Function(lambda x, w: (x @ w).softmax(-1)),
    "gate": lambda: Function(lambda x, w: (F.silu(x @ w) * (x @ w.mT)) @ w),
    "masked": lambda: Function(lambda x, w: _attend(x @ w, x, x + w[0])),
    "max pool": lambda: nn.Sequential(nn.Conv1d(3, 5, 1), nn.MaxPool1d(2)),
    "channels last": lambda: Function(_channels_last),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3)),
    "two inputs": lambda: Function(lambda x, w: F.linear(x, w + x[0, :1].mT @ x[0, :1])),
    "conv with a bias of the input": lambda: Function(
        lambda x, w: F.conv1d(x, w[:2, :3].unsqueeze(-1), x[0, 0, :2])
    ),
    "written": lambda: Function(_written),
    "bias in place": lambda: Function(_bias_in_place),
    "written into a view": lambda: Function(_written_into_a_view),
    "written into what was detached": lambda: Function(_written_into_what_was_detached),
    "activation in place": lambda: Function(lambda x, w: F.elu(x @ w, inplace=True) + w[0]),
    "masked in place": lambda: Function(lambda x, w: (x @ w).masked_fill_(x > 0, 0.5)),
    "added at indices": lambda: Function(
        lambda x, w: (x @ w).index_add_(1, torch.tensor([0, 0, 2]), x)
    ),
}
WRITES = list(LAYERS)[list(LAYERS).index("written") :]
# Operators whose results are written into, by torch's own forward mode or by the model, which torch
# refuses to keep.
FILLED = ("aten.copy_", "aten._new_zeros_with_same_feature_meta")
WRITTEN = dict.fromkeys(("bilinear", "max pool"), FILLED)
WRITTEN |= dict.fromkeys(WRITES, ("aten.clone",))


def _jvp(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return jx.jvp(fn, (x,), (x.cos(),))[1]


def _jet(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return jx.jet(fn, x, torch.stack([x.cos(), x.sin()])).streams


def _laplacian(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return jx.jet(fn, x, torch.stack([x.cos(), x.sin()]), second="sum").streams


CALLS = [_jvp, _jet, _laplacian]


class Operators(TorchDispatchMode):
    """Records which operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: dict[Any, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        self.called[func] = None
        return func(*args, **(kwargs or {}))


def _point_and_layer(name: str) -> tuple[Tensor, nn.Module]:
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True), layer


def _forget() -> None:
    strides._LAYOUTS.clear()
    strides._MATCHED_CALLS.clear()


def _gradients(call: Any, layer: Callable, parameters: list[Tensor], x: Tensor) -> list[Tensor]:
    _forget()
    loss = call(layer, x).square().sum()
    return list(torch.autograd.grad(loss, [x, *parameters], allow_unused=True))


EVERY_CALL = ("linear", "quantised", "strided", "bias in place")
BY_JETS = (
    *("conv2d", "encoder", "batch norm", "gru", "baddbmm", "product of two", "einsum", "gate"),
    *("masked", "max pool", "channels last", "two inputs", "written into a view"),
    *("written into what was detached", "activation in place", "added at indices"),
)


def _case(name: str, call: Any) -> Any:
    quick = name in EVERY_CALL or (call is _jet and name in BY_JETS)
    return pytest.param(name, call, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("name, call", [_case(name, call) for name in LAYERS for call in CALLS])
def test_any_operator_may_be_kept(name: str, call: Any) -> None:
    """Gradients are those without a checkpoint, or, of a write of the model's own over what was
    kept, torch says so."""
    x, layer = _point_and_layer(name)
    parameters = list(layer.parameters())

    def block(x: Tensor) -> Tensor:
        return layer(x.sin()).square().tanh()

    expected = _gradients(call, block, parameters, x)
    _forget()
    with Operators() as operators:
        call(block, x)
    assert operators.called
    wrong = []
    for operator in operators.called:
        if name in WRITES and any(result.alias_info for result in operator._schema.returns):
            continue  # torch itself loses what is written into a view that was kept
        contexts = lambda op=operator: create_selective_checkpoint_contexts([op])  # noqa: E731
        kept = lambda z, c=contexts: checkpoint(block, z, use_reentrant=False, context_fn=c)  # noqa: E731
        try:
            found = _gradients(call, kept, parameters, x)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        except RuntimeError as error:
            if str(operator).rpartition(".")[0] not in WRITTEN.get(name, ()):
                wrong.append(f"{operator}: {error}"[:150])
        except AssertionError as error:
            wrong.append(f"{operator}: {error}"[:150])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_deferred_across_a_border_is_no_ones(name: str) -> None:
    """A jet deferred outside is computed within the first run alone, unseen by the mode."""
    _, expected = _streams_and_gradients(name, _kept)
    with Operators() as operators:
        _streams_and_gradients(name, _kept)
    for operator in operators.called:
        if any(result.alias_info for result in operator._schema.returns):
            continue

        def call(function: Any, *args: Any, op: Any = operator) -> Any:
            contexts = lambda: create_selective_checkpoint_contexts([op])  # noqa: E731
            return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)

        _, gradients = _streams_and_gradients(name, call)
        torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-12)
