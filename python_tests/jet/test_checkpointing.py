"""What the engine defers does not cross the border of a checkpoint.

A checkpoint runs its function a second time, and autograd compares what both runs saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import jachess_ext as jx
from jachess_ext import ops
from jachess_ext.jet import composed_rules

pytestmark = pytest.mark.skipif(
    not ops.available("rms_norm_jet", "cpu"), reason="the compiled operators are missing"
)
WIDTH = 6
X = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
U = torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

Call = Callable[..., Any]


def _kept(function: Call, *args: Any) -> Any:
    return function(*args)


def _recomputed(function: Call, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


def _inverse_rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1)


def _linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, WIDTH).double()


class Blocks(nn.Module):
    """Two blocks; the first one's result is deferred and looked at within the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _linear(2), _linear(3)

    def activations(self, call: Call, x: Tensor) -> Tensor:
        def block(layer: nn.Linear) -> nn.Module:
            return nn.Sequential(layer, nn.GELU())

        return call(block(self.second), call(block(self.first), x))

    def gate(self, call: Call, x: Tensor) -> Tensor:
        """Deferred in one block, swallowed by a product in the next."""
        gate = call(lambda x: F.silu(self.first(x)), x)
        return call(lambda g, x: g * self.second(x), gate, x)

    def sums(self, call: Call, x: Tensor) -> Tensor:
        def block(layer: nn.Linear) -> Call:
            return lambda x: x + F.rms_norm(layer(F.rms_norm(x, (WIDTH,))), (WIDTH,))

        return call(block(self.second), call(block(self.first), x))

    def deferred_outside(self, call: Call, x: Tensor) -> Tensor:
        h = F.silu(self.first(x))
        return call(lambda h, x: F.layer_norm(self.second(x) + h, (WIDTH,)), h, x) * h

    def norm_in_pieces(self, call: Call, x: Tensor) -> Tensor:
        """The inverse root is read outside only after the checkpoint has used it."""
        h = self.first(x)
        root = _inverse_rms(h)
        return call(lambda h, r: self.second(torch.tanh(h * r)), h, root) * root

    def used_once_more_after(self, call: Call, x: Tensor) -> Tensor:
        """What the block deferred is looked at outside of any, by a fused norm."""
        total = call(lambda x: x + self.first(x), x)
        return F.layer_norm(total, (WIDTH,)) + self.second(total)

    def written_into(self, call: Call, x: Tensor) -> Tensor:
        """A write in place makes what is pending, the deferred jet from outside, too."""
        h = F.silu(self.first(x))

        def block(x: Tensor) -> Tensor:
            y = self.second(x)
            y *= 2
            return F.gelu(y)

        return call(block, x) * h


SHAPES = [
    *("activations", "gate", "sums", "deferred_outside", "norm_in_pieces"),
    *("used_once_more_after", "written_into"),
]


def _streams_and_gradients(name: str, call: Call) -> tuple[Tensor, list[Tensor]]:
    blocks = Blocks()
    x = X.clone().requires_grad_()
    streams = jx.jet(lambda x: getattr(blocks, name)(call, x), x, U).streams
    weights = torch.linspace(-1, 1, streams.numel(), dtype=X.dtype).reshape(streams.shape)
    loss = (streams * weights).sum()
    return streams.detach(), list(torch.autograd.grad(loss, [x, *blocks.parameters()]))


@pytest.mark.parametrize("name", SHAPES)
def test_checkpoints_change_nothing(name: str) -> None:
    streams, gradients = _streams_and_gradients(name, _recomputed)
    expected, expected_gradients = _streams_and_gradients(name, _kept)
    torch.testing.assert_close(streams, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_first_derivatives_are_autograds(name: str) -> None:
    """The oracle shares no code: reverse mode twice, without a jet, of u · J(x) v."""
    blocks, x = Blocks(), X.clone().requires_grad_()
    jet = jx.jet(lambda x: getattr(blocks, name)(_recomputed, x), x, U)
    (gradient,) = torch.autograd.grad((jet.first[0] * U[1]).sum(), x)
    plain = getattr(blocks, name)(_kept, x)
    (reverse,) = torch.autograd.grad((plain * U[1]).sum(), x, create_graph=True)
    projected = (reverse * U[0]).sum()
    torch.testing.assert_close((jet.first[0] * U[1]).sum(), projected, rtol=1e-11, atol=1e-12)
    (expected,) = torch.autograd.grad(projected, x)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-11)


def test_within_a_checkpoint_the_operators_still_fuse() -> None:
    layer = _linear(2)

    def block(x: Tensor) -> Tensor:
        total = x + torch.sin(x)
        return layer(F.silu(x) * F.layer_norm(total, (WIDTH,)))

    with (
        mock.patch.object(ops, "add_layer_norm_jet", wraps=ops.add_layer_norm_jet) as norm,
        mock.patch.object(ops, "gated_activation_jet", wraps=ops.gated_activation_jet) as gate,
    ):
        jet = jx.jet(lambda x: _recomputed(block, x), X.clone().requires_grad_(), U)
        assert (norm.call_count, gate.call_count) == (1, 1)
        jet.streams.sum().backward()
    assert (norm.call_count, gate.call_count) == (2, 2)


def _everything(x: Tensor) -> Tensor:
    """Each operator that a rule may use: norms, softmax, attention, a gate, an activation."""
    h = F.layer_norm(x + torch.sin(x), (WIDTH,)) + F.rms_norm(x, (WIDTH,)).softmax(-1)
    h = F.silu(h) * torch.cos(h) + F.gelu(h)
    return F.scaled_dot_product_attention(h[None, None], x[None, None], h[None, None])[0, 0]


def _backward_here(loss: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, x)
    return gradient


def _backward_on_a_thread(loss: Tensor, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_backward_here, loss, x).result(60)


@pytest.mark.parametrize("backward", [_backward_here, _backward_on_a_thread])
@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("composed", [True, False])
def test_the_switch_belongs_to_the_pass(composed: bool, within: bool, backward: Call) -> None:
    """A checkpoint runs its function again where backward is called: in the context or after it,
    on this thread or on another; a pass begun without the context, and recomputed within one, too.
    """

    def streams(call: Call, x: Tensor) -> Tensor:
        return jx.jet(lambda x: call(_everything, x), x, U).streams

    weights = torch.linspace(-1, 1, 4 * X.numel(), dtype=X.dtype).reshape(4, *X.shape)
    x = X.clone().requires_grad_()
    expected = _backward_here((streams(_kept, x) * weights).sum(), x)
    with composed_rules() if composed else nullcontext(), _operator_calls() as calls:
        loss = (streams(_recomputed, x) * weights).sum()
        forward = sum(call.call_count for call in calls)
        found = backward(loss, x) if within else None
    with nullcontext() if composed else composed_rules(), _operator_calls() as later:
        found = backward(loss, x) if found is None else found
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)
    assert forward == (0 if composed else 8)
    assert sum(call.call_count for call in (*calls, *later)) == 2 * forward


@contextmanager
def _operator_calls() -> Iterator[list[mock.MagicMock]]:
    names = ["add_layer_norm_jet", "rms_norm_jet", "softmax_jet", "attention_jet"]
    names += ["gated_activation_jet", "activation_jet"]
    with ExitStack() as stack:
        patches = [mock.patch.object(ops, name, wraps=getattr(ops, name)) for name in names]
        yield [stack.enter_context(patch) for patch in patches]


def test_a_write_over_what_a_deferred_jet_saved() -> None:
    """Made within a checkpoint; what it saved keeps its memory."""

    def overwritten(x: Tensor, times: int) -> Tensor:
        h = x * 2
        activated = F.silu(h)
        out = _recomputed(lambda a: torch.sin(a), activated)
        for _ in range(times):
            h.mul_(3)
        return out

    streams = {}
    gradients = {}
    for times in (0, 1):
        x = X.clone().requires_grad_()
        streams[times] = jx.jet(lambda x, n=times: overwritten(x, n), x, U).streams
        (gradients[times],) = torch.autograd.grad(streams[times].sum(), x)
    torch.testing.assert_close(streams[1], streams[0], rtol=0, atol=0)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
