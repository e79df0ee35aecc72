"""A tensor with derivatives where a torch function takes a number, such as ``alpha`` or ``p``.

Torch takes no tensor there that requires a gradient, but reads one in its forward mode, as a
constant.  Each number in torch's own samples is replaced by one that moves with the input: the call
is right, by finite differences, or an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import jachess_ext as jx

from .operators import operators, title


class Named(torch.autograd.Function):
    """A Function whose forward's own code is differentiated."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[[Any], Any], t: Any) -> Any:
        return fn(t)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient


def by_forward_code(fn: Callable[[Any], Any], t: Tensor, u: Tensor) -> Any:
    with jx.forward_code(Named):
        return jx.jvp(lambda t: Named.apply(fn, t), (t,), (u,))[1]


WAYS: dict[str, Callable[[Callable[[Any], Any], Tensor, Tensor], Any]] = {
    "jvp": lambda fn, t, u: jx.jvp(fn, (t,), (u,))[1],
    "jet": lambda fn, t, u: jx.jet(fn, t, torch.stack([u, u])).first[0],
    "target": lambda fn, t, u: jx.jvp(fn, (t,), (u,), differentiable=False)[1],
    "forward code": by_forward_code,
}


Call = Callable[[Any], Any]


def calls(op: Any) -> Iterator[tuple[str, Call]]:
    """Yield samples as functions of a tensor of no dimension, which moves one number, and with it
    the first tensor or not."""
    seen = set()
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float64), 6):
        leaves, nest = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        paths = [
            pytree.keystr(path)
            for path, _ in pytree.tree_flatten_with_path(nest.unflatten(leaves))[0]
        ]
        for place, number in enumerate(leaves):
            if type(number) is float and paths[place] not in seen:
                seen.add(paths[place])
                for moves in (False, True):
                    call = partial(_moved, op.op, leaves, nest, place, moves)
                    yield f"{title(op)}{paths[place]}, moves={moves}", call


def _moved(function: Any, leaves: list[Any], nest: Any, place: int, moves: bool, t: Any) -> Any:
    leaves = list(leaves)
    leaves[place] = t + leaves[place]
    first = next(n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    if moves and leaves[first].is_floating_point():
        leaves[first] = leaves[first] * (1 + t)
    torch.manual_seed(0)
    args, kwargs = nest.unflatten(leaves)
    out = function(*args, **kwargs)
    return out[0] if isinstance(out, list | tuple) else out


def wrong(call: Call) -> list[str]:
    """Return the ways that are neither right nor an error."""
    t, u = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    try:  # by tensors that require no gradient, of which torch reads the number
        coarse, fine = ((call(t + h) - call(t - h)) / (2 * h) for h in (2e-5, 1e-5))
    except Exception:  # a shape that depends on it, or torch reads no tensor there
        coarse = fine = torch.tensor(math.nan)
    smooth = torch.allclose(coarse, fine, rtol=1e-4, atol=1e-4)
    found = []
    for way, run in WAYS.items():
        try:
            tangent = run(call, t, u)
        except (TypeError, RuntimeError):
            continue
        if smooth and not torch.allclose(tangent, fine, rtol=1e-4, atol=1e-4):
            found.append(way)
    return found


@pytest.mark.slow
def test_torchs_own_samples() -> None:
    results = {name: wrong(call) for op in operators() for name, call in calls(op)}
    assert len(results) > 150
    assert not any(results.values()), {name: ways for name, ways in results.items() if ways}


X = torch.tensor([[0.3, -1.2, 2.1], [0.7, 0.1, -0.4]], dtype=torch.float64)
Y = X.flip(1).cos()
HEADS = X[None, None]
TABLE: dict[str, Callable[[Any, Any], Any]] = {
    "add alpha": lambda x, n: torch.add(x, Y, alpha=n),
    "add, plain": lambda x, n: x + torch.add(Y, Y, alpha=n),
    "addcmul": lambda x, n: torch.addcmul(x, Y, Y, value=n),
    "softshrink": lambda x, n: F.softshrink(x, n.abs()),
    "hardshrink": lambda x, n: F.hardshrink(x, n),
    "threshold": lambda x, n: F.threshold(x, 0.2, n),
    "softplus": lambda x, n: F.softplus(x, n + 0.5),
    "elu": lambda x, n: F.elu(x, n),
    "leaky_relu": lambda x, n: F.leaky_relu(x, n),
    "hardtanh": lambda x, n: F.hardtanh(x, -1.0, n + 0.05),
    "clamp": lambda x, n: x.clamp(-n - 0.05, n + 0.05),
    "smooth_l1": lambda x, n: F.smooth_l1_loss(x, Y, beta=n.abs()),
    "huber": lambda x, n: F.huber_loss(x, Y, delta=n + 0.5),
    "cross_entropy": lambda x, n: F.cross_entropy(x, torch.tensor([0, 2]), label_smoothing=n / 4),
    "gaussian_nll": lambda x, n: F.gaussian_nll_loss(x, Y, Y.square(), eps=n + 0.5),
    "poisson_nll": lambda x, n: F.poisson_nll_loss(x.abs(), Y.abs(), log_input=False, eps=n + 0.5),
    "triplet": lambda x, n: F.triplet_margin_loss(x, Y, Y + 1, margin=n),
    "norm": lambda x, n: torch.norm(x, n),
    "vector_norm": lambda x, n: torch.linalg.vector_norm(x, n),
    "normalize": lambda x, n: F.normalize(x, p=n + 0.5),
    "cdist": lambda x, n: torch.cdist(x, Y, p=n + 0.5),
    "pdist": lambda x, n: F.pdist(x, p=n + 0.5),
    "dist": lambda x, n: torch.dist(x, Y, p=n + 0.5),
    "renorm": lambda x, n: torch.renorm(x, 2, 0, n + 0.5),
    "lp_pool1d": lambda x, n: F.lp_pool1d(x.abs(), n + 0.5, 2),
    "local_response_norm": lambda x, n: F.local_response_norm(x[None], 2, alpha=n),
    "layer_norm": lambda x, n: F.layer_norm(x, (3,), eps=n + 0.05),
    "rms_norm": lambda x, n: F.rms_norm(x, (3,), eps=n + 0.05),
    "group_norm": lambda x, n: F.group_norm(x[None], 1, eps=n + 0.05),
    "attention": lambda x, n: F.scaled_dot_product_attention(*[x[None, None]] * 3, scale=n),
    "attention, plain": lambda x, n: x + F.scaled_dot_product_attention(*[HEADS] * 3, scale=n),
    "pad": lambda x, n: F.pad(x, (1, 1), value=n),
    "dropout": lambda x, n: F.dropout(x, n / 4),
    "gumbel_softmax": lambda x, n: F.gumbel_softmax(x, n + 0.5),
    "full": lambda x, n: x * torch.full((3,), n),
    "arange": lambda x, n: x * torch.arange(0, n + 3, dtype=torch.float64)[:3] * n,
    "linspace": lambda x, n: x * torch.linspace(0, n, 3, dtype=torch.float64),
    "masked_fill": lambda x, n: x.masked_fill(Y > 0, n),
    "nan_to_num": lambda x, n: torch.where(Y > 0, x, math.nan).nan_to_num(n),
    "lerp": lambda x, n: torch.lerp(x, Y, n),
    "power": lambda x, n: x.abs() ** n,
    "index_fill": lambda x, n: x.index_fill(1, torch.tensor([0]), n),
    "threshold_": lambda x, n: F.threshold_(x.clone(), 0.2, n),
    "celu": lambda x, n: F.celu(x, n + 0.5),
    "pairwise_distance": lambda x, n: F.pairwise_distance(x, Y, p=n + 0.5),
    "full_like": lambda x, n: x * torch.full_like(x, n),
    "new_full": lambda x, n: x * x.new_full((3,), n),
}


@pytest.mark.parametrize("name", TABLE)
def test_functions_of_a_number(name: str) -> None:
    def call(number: float, t: Any) -> Any:
        torch.manual_seed(0)
        return TABLE[name](X * (1 + t), number + t)

    # Of 0, 1 and 2 a function may compute something else, in which the number no longer stands.
    found = {number: wrong(partial(call, number)) for number in (0.0, 1.0, 2.0, 0.3)}
    assert not any(found.values()), found


def test_a_compiled_call() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return F.smooth_l1_loss(x, Y, beta=x.abs().mean())

    net = torch.compile(lambda x: jx.jvp(Net(), (x,), (Y,))[1], backend="aot_eager")
    with pytest.raises((RuntimeError, TypeError)):
        net(X)


@pytest.mark.parametrize("read", [lambda n: float(f"{n:.3f}"), lambda n: float(format(n))])
def test_a_number_that_is_printed_in_a_named_forward(read: Callable[[Any], float]) -> None:
    with pytest.raises(RuntimeError, match="reads a number out of a jet"):
        by_forward_code(lambda t: t * read(t), X[0, 0], Y[0, 0])


@pytest.mark.parametrize("read", [Tensor.item, float, lambda n: float(f"{n:.17f}")])
def test_a_number_that_is_read_elsewhere_is_a_constant(read: Callable[[Any], float]) -> None:
    for way in ("jvp", "jet", "target"):
        tangent = WAYS[way](lambda t: t * read(t), X[0, 0], Y[0, 0])
        torch.testing.assert_close(tangent, X[0, 0] * Y[0, 0])
