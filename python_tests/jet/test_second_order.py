"""`jx.laplacian`, `hessian_diagonal`, `divergence` and `hvp`, against torch's own Hessians.

The oracle is `torch.func.hessian` of one row where torch differentiates rightly, and repeated
`torch.autograd.grad` with attention's plain form elsewhere.
"""

from __future__ import annotations

import copy
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import hessian, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import jachess_ext as jx
from jachess_ext import torch_private
from jachess_ext.jet import composed_rules
from python_tests import processes
from python_tests.jet.drawn import randn

D = 4


class Attention(nn.Module):
    """Coordinates as tokens, through fused attention, causal or not, with shared key heads.

    ``written_out``: the layer norm in elementary functions, since the gradient of torch's own
    double backward of it is wrong (torch 2.13).
    """

    written_out = False

    def __init__(self, causal: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.causal, self.heads = causal, 1 if shared else 2
        self.enter, self.leave = nn.Linear(1, 8), nn.Linear(8, 2)
        self.queries, self.keys = nn.Linear(8, 8), nn.Linear(8, 2 * 4 * self.heads)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.enter(x.unsqueeze(-1)))
        q = self.queries(h).unflatten(-1, (2, 4)).transpose(1, 2)
        k, v = self.keys(h).unflatten(-1, (2, self.heads, 4)).permute(2, 0, 3, 1, 4)
        shared = self.heads == 1
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=shared)
        h = h + mixed.transpose(1, 2).flatten(2)
        if self.written_out:
            centred = h - h.mean(-1, keepdim=True)
            h = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        else:
            h = F.layer_norm(h, (8,))
        return self.leave(h).mean(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(1, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x.unsqueeze(-1))[0][:, -1]


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    made: dict[str, Callable[[], nn.Module]] = {
        "mlp": lambda: nn.Sequential(
            nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, 7), nn.GELU(), nn.Linear(7, 2)
        ),
        "convolution": lambda: nn.Sequential(
            *(nn.Unflatten(1, (1, D)), nn.Conv1d(1, 3, 3, padding=1), nn.SiLU()),
            *(nn.GroupNorm(1, 3), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(6, 2)),
        ),
        "attention": Attention,
        "causal": lambda: Attention(causal=True),
        "shared heads": lambda: Attention(shared=True),
        "recurrent": Recurrent,
    }
    return made[name]().double()


NETWORKS = ("mlp", "convolution", "attention", "causal", "shared heads", "recurrent")


def for_torch(f: nn.Module) -> nn.Module:
    """The network with the same parameters, as torch differentiates it rightly."""
    f = copy.copy(f)
    f.written_out = True
    return f


def by_backward(f: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value, gradients ``[d, N, k]`` and Hessians ``[d, d, N, k]`` of rows, by reverse mode."""
    f = for_torch(f)
    with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
        value = f(x)
        slopes, bends = [], []
        for k in range(value.shape[1]):
            (slope,) = torch.autograd.grad(value[:, k].sum(), x, create_graph=True)
            rows = [
                torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0]
                for i in range(x.shape[1])
            ]
            slopes.append(slope.T)
            bends.append(torch.stack([row.T for row in rows]))
    return value, torch.stack(slopes, -1), torch.stack(bends, -1)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("chunk_size, composed", [(None, False), (3, False), (None, True)], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_values_and_gradients(name: str, chunk_size: int | None, composed: bool) -> None:
    f, x = network(name), randn(3, D).requires_grad_()
    leaves = [x, *f.parameters()]
    value, slope, bends = by_backward(f, x)
    squares = bends.diagonal(dim1=0, dim2=1).movedim(-1, 0)
    weights = torch.tensor([2.0, 0.0, -3.0, 0.5], dtype=torch.float64)
    scale = weights[:, None, None]

    def run(call: Any, **named: Any) -> tuple[Any, ...]:
        if not composed:
            return call(f, x, chunk_size=chunk_size, **named)
        with composed_rules():
            return call(f, x, chunk_size=chunk_size, **named)

    for found, expected in [
        (run(jx.laplacian), squares.sum(0)),
        (run(jx.hessian_diagonal), squares),
        (run(jx.laplacian, weights=weights), (scale * squares).sum(0)),
    ]:
        close(found[0], value)
        close(found[1], slope)
        close(found[2], expected)
        ours, theirs = (
            torch.autograd.grad(
                (part * part.detach().cos()).sum() + value.sum(),
                leaves,
                retain_graph=True,
                materialize_grads=True,
            )
            for part in (found[2], expected)
        )
        for a, b in zip(ours, theirs, strict=True):
            close(a, b)


def test_directions_and_their_gradients() -> None:
    f, x = network("mlp"), randn(3, D)
    bends = vmap(hessian(f))(x)
    for u in (randn(6, D, seed=1), randn(6, 3, D, seed=2)):
        u.requires_grad_()
        each = u.unsqueeze(1).expand(6, 3, D) if u.ndim == 2 else u
        weights = randn(6, seed=3)
        weights[2] = 0  # where the root of a weight has no gradient
        weights.requires_grad_()
        expected = torch.einsum("q,qni,nkij,qnj->nk", weights, each, bends, each)
        found = jx.laplacian(f, x, directions=u, weights=weights)[2]
        close(found, expected)
        for a, b in zip(
            torch.autograd.grad(found.square().sum(), (u, weights)),
            torch.autograd.grad(expected.square().sum(), (u, weights)),
            strict=True,
        ):
            close(a, b)


def test_nests_and_aux() -> None:
    def f(a: Any, b: Any) -> Any:
        y = torch.sin(a["x"]).prod(-1) * b.square().sum((-1, -2))
        return {"y": y, "z": [y.exp()]}, ("kept", y)

    a, b = randn(3, 2), randn(3, 2, 2, seed=1)
    flat = torch.cat([a, b.flatten(1)], 1)

    def of_row(row: Tensor) -> Tensor:
        y = torch.sin(row[:2]).prod() * row[2:].square().sum()
        return torch.stack([y, y.exp()])

    expected = vmap(hessian(of_row))(flat).diagonal(dim1=-2, dim2=-1)
    value, first, total, (word, y) = jx.laplacian(f, ({"x": a}, b), has_aux=True)
    close(total["y"], expected[:, 0].sum(-1))
    close(total["z"][0], expected[:, 1].sum(-1))
    close(first["y"], vmap(jacrev(of_row))(flat)[:, 0].T)
    assert word == "kept" and type(y) is Tensor and torch.equal(y, value["y"])
    close(jx.hessian_diagonal(f, ({"x": a}, b), has_aux=True)[2]["y"], expected[:, 0].T)


def test_divergence() -> None:
    f, x = network("mlp"), randn(3, D)
    field: Any = nn.Sequential(f, nn.Linear(2, D).double())
    jacobian = vmap(jacrev(field))(x)
    expected = jacobian.diagonal(dim1=1, dim2=2).sum(-1)
    for chunk_size in (None, 1, 3):
        value, found = jx.divergence(field, x, chunk_size=chunk_size)
        close(value, field(x))
        close(found, expected)
    probes = randn(5, 3, D, seed=1)
    estimate = torch.einsum("qni,nij,qnj->n", probes, jacobian, probes) / 5
    close(jx.divergence(field, x, directions=probes)[1], estimate)
    close(jx.divergence(field, x, directions=probes, chunk_size=2)[1], estimate)
    gradient = torch.autograd.grad(jx.divergence(field, x)[1].square().sum(), field[0][0].weight)
    wanted = torch.autograd.grad(expected.square().sum(), field[0][0].weight)
    close(gradient[0], wanted[0])
    with pytest.raises(ValueError, match="expected the same shape"):
        jx.divergence(f, x)


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_hvp(name: str) -> None:
    f, x, v = network(name), randn(3, D), randn(3, D, seed=1)

    def loss(x: Tensor, f: nn.Module = f) -> Tensor:
        return f(x).square().sum()

    point = x.clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        (slope,) = torch.autograd.grad(loss(point, for_torch(f)), point, create_graph=True)
        (product,) = torch.autograd.grad((slope * v).sum(), point, create_graph=True)
    value, (gradient,), (found,) = jx.hvp(loss, (x,), (v,))
    close(value, loss(x))
    close(gradient, slope)
    close(found, product)
    weight = next(f.parameters())
    ours, theirs = (
        torch.autograd.grad(p.sum(), weight, retain_graph=True)[0] for p in (found, product)
    )
    close(ours, theirs)
    assert not x.requires_grad
    whole = [tensor.clone().requires_grad_() for tensor in (x, v)]
    third = torch.autograd.grad(jx.hvp(loss, (whole[0],), (whole[1],))[2][0].sum(), whole)
    close(third[0], torch.autograd.grad(product.sum(), point)[0])
    close(third[1], hessian_times_ones(loss, x))
    for kept in (jx.hvp(loss, (x,), (v,), differentiable=False), _without_grad(loss, x, v)):
        close(kept[2][0], product)
        assert not any(t.requires_grad for t in (kept[0], kept[1][0], kept[2][0]))


def hessian_times_ones(loss: Any, x: Tensor) -> Tensor:
    return jx.hvp(loss, (x,), (torch.ones_like(x),))[2][0]


def _without_grad(loss: Any, x: Tensor, v: Tensor) -> Any:
    with torch.no_grad():
        return jx.hvp(loss, (x,), (v,))


def test_hvp_of_nests() -> None:
    a, b = randn(3), randn(2, seed=1)

    def f(a: Tensor, rest: dict) -> Any:
        return (a.square().sum() * rest["b"].exp().sum()), rest["b"] * 2

    _, (by_a, by_rest), (along_a, along_rest), aux = jx.hvp(
        f, (a, {"b": b}), (torch.ones_like(a), {"b": torch.zeros_like(b)}), has_aux=True
    )
    close(by_a, 2 * a * b.exp().sum())
    close(by_rest["b"], a.square().sum() * b.exp())
    close(along_a, torch.full_like(a, 2) * b.exp().sum())
    close(along_rest["b"], 2 * a.sum() * b.exp())
    close(aux, b * 2)


@pytest.mark.parametrize("f", [lambda x: x.round().sum(), lambda x: torch.tensor(3.0).double()])
@pytest.mark.parametrize("differentiable", [True, False])
def test_hvp_of_a_constant(f: Callable[[Tensor], Tensor], differentiable: bool) -> None:
    x = randn(3) + 1e3
    value, *found = jx.hvp(f, (x,), (x,), differentiable=differentiable)
    assert torch.equal(value, f(x))
    assert all(torch.equal(part, torch.zeros_like(x)) for (part,) in found)


class Held(nn.Module):
    """A function that holds a number for each of three rows."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype)[:, None]).square().sum(-1)


def test_a_function_that_holds_something_of_each_row() -> None:
    found = jx.laplacian(Held(), randn(3, D))[2]
    close(found, 2 * D * torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64))
    with pytest.raises(ValueError, match="depend on other rows"):
        jx.laplacian(lambda x: Held()(x) * x.mean(), randn(3, D))


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "sum of all": lambda x: x.sum(0, keepdim=True).expand_as(x).sin(),
    "next row": lambda x: x * x.roll(1, 0),
    "rows before": lambda x: x.cumsum(0),
    "rows behind": lambda x: x.flip(0).cumsum(0).flip(0),
    "no value of it": lambda x: x + x.mean(0) - x.mean(0).detach(),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "the row after next": lambda x: x * x.roll(2, 0),
    "the order of rows": lambda x: x.sort(0)[0] ** 3,
    "from the third row on": lambda x: torch.cat([x[:2], x[2:] * x[2:].mean(0)]),
    "a mean of fours": lambda x: x - x.unflatten(0, (-1, 4)).mean(1).repeat_interleave(4, 0),
}


@pytest.mark.parametrize("mix", MIXING)
def test_rows_that_depend_on_others_are_refused(mix: str) -> None:
    calls = (jx.laplacian, jx.hessian_diagonal, jx.divergence)
    for call in calls if mix in ("mean", "no value of it") else calls[:1]:
        with pytest.raises(ValueError, match="depend on other rows"):
            call(MIXING[mix], randn(8, 3))


def test_a_slope_that_is_infinite_says_nothing_of_other_rows() -> None:
    """Where 0 times infinity is NaN, as in torch's forward mode."""
    x = randn(4, 3).abs()
    x[1, 2] = 0.0
    first, second = jx.laplacian(lambda x: x.sqrt().sum(-1), x)[1:]
    close(second[[0, 2, 3]], -0.25 * (x[[0, 2, 3]] ** -1.5).sum(-1))
    assert first[2, 1].isinf() and not second[1].isfinite()


def test_refusals() -> None:
    x, f = randn(3, D), network("mlp")
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (f, {"weights": [1.0, 2.0]}, r"expected \[4\]"),
        (f, {"weights": [1.0, float("nan"), 1.0, 1.0]}, "finite"),
        (f, {"directions": randn(2, 3)}, "directions have shape"),
        (f, {"chunk_size": 0}, "chunk_size is 0"),
        (lambda x: x.sum(), {}, "a result for each row"),
    ]
    for fn, named, said in refused:
        with pytest.raises(ValueError, match=said):
            jx.laplacian(fn, x, **named)
    with pytest.raises(ValueError, match="same number of rows"):
        jx.laplacian(lambda a, b: a, (x, x[:2]))
    with pytest.raises(TypeError, match="aux"):
        jx.laplacian(f, x, has_aux=True)
    for other in (lambda x: 3.0, lambda x: (f(x), 3.0)):
        with pytest.raises(TypeError, match="fn returned a float, which has no tangent"):
            jx.laplacian(other, x)
    assert jx.laplacian(lambda x: {"y": f(x), "none": None}, x)[2]["none"] is None
    with pytest.raises(jx.MissingJetRule):
        jx.laplacian(torch.poisson, x.abs())
    with pytest.raises(jx.MissingJetRule, match="running statistics"):
        jx.laplacian(nn.BatchNorm1d(D).double(), x)
    with pytest.raises(ValueError, match="one number"):
        jx.hvp(f, (x,), (x,))


@pytest.mark.parametrize("nothing", [None, (), {}, {"y": None}])
def test_a_function_that_returns_nothing_is_refused(nothing: Any) -> None:
    x = randn(3, D)
    for call in (jx.laplacian, jx.divergence):
        with pytest.raises(TypeError, match="which holds no tensor"):
            call(lambda x: nothing, x)
        with pytest.raises(TypeError, match="which holds no tensor"):
            call(lambda x: (nothing, x), x, has_aux=True)


def test_numbers_as_rows() -> None:
    x = randn(5)
    for chunk_size in (None, 1):
        close(jx.laplacian(torch.sin, x, chunk_size=chunk_size)[2], -x.sin())
        close(jx.hessian_diagonal(torch.sin, x, chunk_size=chunk_size)[2][0], -x.sin())
        close(jx.divergence(torch.sin, x, chunk_size=chunk_size)[1], x.cos())
    u = randn(3, 5, seed=1)
    close(jx.divergence(torch.sin, x, directions=u)[1], (u.square() * x.cos()).mean(0))
    close(
        jx.divergence(lambda a, b: (a**2, b**3), (x, randn(5, 2)))[1][0],
        2 * x[0] + (3 * randn(5, 2)[0] ** 2).sum(),
    )


@pytest.mark.parametrize("differentiable", [True, False])
def test_hvp_in_inference_mode(differentiable: bool) -> None:
    f, x, v = network("mlp"), randn(3, D), randn(3, D, seed=1)
    expected = jx.hvp(lambda x: f(x).square().sum(), (x,), (v,), differentiable=False)
    with torch.inference_mode():
        inside = x.clone()
        for point in (x, inside):
            result = jx.hvp(
                lambda x: (f(x).square().sum(), x),
                (point,),
                (v,),
                has_aux=True,
                differentiable=differentiable,
            )
            close(result.value, expected.value)
            close(result.gradient, expected.gradient)
            close(result.product, expected.product)
        close(jx.laplacian(f, inside).laplacian, jx.laplacian(f, x).laplacian)
        close(jx.laplacian(f, inside).laplacian, jx.laplacian(f, x).laplacian)


def test_results_have_names() -> None:
    f, x = network("mlp"), randn(3, D)
    fields = {
        "laplacian": ("value", "gradient", "laplacian"),
        "hessian_diagonal": ("value", "gradient", "diagonal"),
        "divergence": ("value", "divergence"),
        "hvp": ("value", "gradient", "product"),
    }
    for call, names in fields.items():
        for has_aux in (False, True):
            if call == "hvp":
                g = lambda x, a=has_aux: (x.sin().sum(), "aux") if a else x.sin().sum()  # noqa: E731
                result = jx.hvp(g, (x,), (x,), has_aux=has_aux)
            else:
                g = lambda x, a=has_aux: (x.sin(), "aux") if a else x.sin()  # noqa: E731
                result = getattr(jx, call)(g, x, has_aux=has_aux)
            assert result._fields == (names + ("aux",) if has_aux else names)
            assert all(getattr(result, name) is part for name, part in result._asdict().items())
            assert not has_aux or result.aux == "aux"
    mapped = vmap(lambda x: jx.laplacian(f, x))(randn(2, 3, D))
    assert mapped.laplacian.shape == (2, 3, 2)


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_weights_of_each_row(chunk_size: int | None) -> None:
    f, x, u = network("mlp"), randn(3, D), randn(6, D, seed=1)
    weights = randn(6, 3, seed=3)
    weights[2] = 0
    weights.requires_grad_()
    expected = torch.einsum("qn,qi,nkij,qj->nk", weights, u, vmap(hessian(f))(x), u)
    for w in (weights, weights.detach()):
        result = jx.laplacian(f, x, directions=u, weights=w, chunk_size=chunk_size)
        close(result.laplacian, expected)
        close(result.gradient, jx.hessian_diagonal(f, x, directions=u).gradient)
    one, two = (
        torch.autograd.grad(part.square().sum(), weights)
        for part in (jx.laplacian(f, x, directions=u, weights=weights).laplacian, expected)
    )
    close(one[0], two[0])
    with pytest.raises(ValueError, match=r"expected \[6\], .* or \[6, 3\]"):
        jx.laplacian(f, x, directions=u, weights=weights.T)


def test_a_function_of_one_row_under_vmap_is_told_what_to_write() -> None:
    f = lambda row: row.sin().prod()  # noqa: E731
    x = randn(5, D)
    for fn in (vmap(f), lambda x: vmap(f)(x)):
        with pytest.raises(jx.MissingJetRule, match=r"write torch\.vmap") as raised:
            jx.laplacian(fn, x)
    call = str(raised.value).split("f), write ")[1].removesuffix(".")
    close(eval(call, {"torch": torch, "jx": jx, "f": f, "x": x}), -D * x.sin().prod(-1))


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "laplacian": lambda f, x: jx.laplacian(f, x, weights=[2.0, 0.0, -3.0, 0.5])[2],
    "hessian_diagonal": lambda f, x: jx.hessian_diagonal(f, x, chunk_size=3)[2],
    "divergence": lambda f, x: jx.divergence(lambda x: x * f(x), x)[1],
    "hvp": lambda f, x: jx.hvp(
        lambda x: (f(x).sum(), {"aux": x * 2}), (x,), (x.cos(),), has_aux=True
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_within_transforms(call: str) -> None:
    """An ensemble by `torch.func.vmap`, and derivatives of derivatives, against plain calls."""

    def run(scale: Tensor, x: Tensor) -> Any:
        return CALLS[call](lambda x: torch.sin(x * scale).exp().sum(-1, keepdim=True), x)

    scales, x = randn(3), randn(3, 2, D, seed=1)
    found = vmap(run)(scales, x)
    wanted = [run(scale, point) for scale, point in zip(scales, x, strict=True)]
    torch.testing.assert_close(
        torch_private.pytree.tree_leaves(found),
        [
            torch.stack(parts)
            for parts in zip(*map(torch_private.pytree.tree_leaves, wanted), strict=True)
        ],
    )
    total = lambda s: sum(p.sum() for p in torch_private.pytree.tree_leaves(run(s, x[0])))  # noqa: E731
    scale = scales[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(total(scale), scale)
    for transform in (torch.func.grad, torch.func.jacfwd):
        close(transform(total)(scales[0]), slope)


def test_rows_that_depend_on_others_in_one_function_of_an_ensemble() -> None:
    x, shares = randn(3, D), torch.tensor([0.0, 1.0], dtype=torch.float64)
    mixes = vmap(lambda share: jx.laplacian(lambda x: x.sin() + share * x.mean(0), x)[2])
    with pytest.raises(ValueError, match="depend on other rows"):
        mixes(shares)


@pytest.mark.parametrize("container", [torch.clone, list])
def test_weights_within_transforms(container: Callable[[Tensor], Any]) -> None:
    """Where a weight is 0 its root has no derivative, and of several sets the signs differ."""
    f, x, weights = network("mlp"), randn(3, D), torch.tensor([2.0, 0.0, -3.0, 0.5]).double()

    def run(weights: Tensor) -> Tensor:
        return jx.laplacian(f, x, weights=container(weights))[2]

    squares = jx.hessian_diagonal(f, x)[2]
    for transform in (jacrev, torch.func.jacfwd):
        close(transform(run)(weights), squares.movedim(0, -1))
    with forward_ad.dual_level():
        along = run(forward_ad.make_dual(weights, torch.ones_like(weights)))
        close(forward_ad.unpack_dual(along).tangent, squares.sum(0))
    several = torch.stack([weights, -weights])
    close(vmap(run)(several), torch.stack([run(w) for w in several]))
    with pytest.raises(ValueError, match="finite"):
        vmap(run)(several * torch.tensor([[1.0], [torch.nan]]))


def test_kinds_of_weights() -> None:
    f, x, w = network("mlp"), randn(3, D), torch.tensor(0.5).double().requires_grad_()
    squares = jx.hessian_diagonal(f, x)[2]
    for first, other in (([w] * 3, [1.0] * 3), (w.expand(3), 1.0)):
        found = jx.laplacian(f, x, weights=[first, *[other] * (D - 1)])[2]
        close(torch.autograd.grad(found.sum(), w)[0], squares[0].sum())
        close(found, w * squares[0] + squares[1:].sum(0))
    half = x.half()  # in which 1e-8 is 0
    close(*(jx.laplacian(torch.exp, half, weights=[w, 1, 0, 0])[2] for w in (1e-8, 0)))
    for weights, error in ((torch.ones(D) * 1j, TypeError), (2.0, ValueError)):
        with pytest.raises(error, match="expected"):
            jx.laplacian(f, x, weights=weights)


def test_no_direction() -> None:
    f = lambda x: x.sum(-1, keepdim=True) + 1  # noqa: E731
    for x, u in ((randn(3, 0), None), (randn(3, D), randn(0, D)), (randn(3, D), randn(0, 3, D))):
        for weights in (None, []):
            value, first, total = jx.laplacian(f, x, directions=u, weights=weights)
            close(value, f(x))
            assert first.shape == (0, 3, 1) and torch.equal(total, torch.zeros_like(value))
        assert jx.hessian_diagonal(f, x, directions=u, chunk_size=2)[2].shape == (0, 3, 1)
    assert torch.equal(jx.divergence(torch.sin, randn(3, 0))[1], torch.zeros(3).double())
    with pytest.raises(ValueError, match="no probe"):
        jx.divergence(f, x, directions=u)


def test_no_row_and_one_row() -> None:
    f = network("mlp")
    assert jx.laplacian(f, randn(0, D))[2].shape == (0, 2)
    one = randn(1, D)
    close(jx.laplacian(f, one)[2], jx.laplacian(f, torch.cat([one, one]))[2][:1])


def test_a_function_runs_once_a_chunk() -> None:
    class Counted(nn.Module):
        rows: list[int] = []  # noqa: RUF012

        def forward(self, x: Tensor) -> Tensor:
            self.rows.append(len(x))
            return x.sin()

    f, x = Counted(), randn(8, D)
    jx.laplacian(f, x)
    assert f.rows == [8]
    jx.divergence(f.eval(), x, chunk_size=3)
    assert f.rows == [8, 8, 8]


_FAULTS = """
import resource, torch, jachess_ext as jx
from torch import nn
hidden = nn.Linear(50, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh()
net = nn.Sequential(*hidden, nn.Linear(128, 1))
x = torch.randn(64, 50)
faults = []
with torch.no_grad():
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        jx.laplacian(net, x)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(faults)[10])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_malloc_keeps_what_a_pass_frees() -> None:
    """In a new process: a stack here has 400 pages, which each pass would fault anew."""
    done = processes.run([sys.executable, "-c", _FAULTS], cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[-1]) < 40


@pytest.mark.parametrize(
    "call",
    [
        lambda x: jx.laplacian(torch.sin, x),
        lambda x: jx.laplacian(torch.sin, x, chunk_size=1),
        lambda x: jx.laplacian(torch.sin, x, weights=[1.0, 2.0, -1.0]),
        lambda x: jx.hessian_diagonal(torch.sin, x),
        lambda x: jx.divergence(torch.sin, x),
        lambda x: jx.hvp(lambda z: z.sin().sum(), (x,), (x,)),
        lambda x: jx.jvp(torch.sin, (x,), (x,)),
        lambda x: [jx.jet(torch.sin, x, x[None]).streams],
    ],
    ids=["laplacian", "chunks", "weights", "diagonal", "divergence", "hvp", "jvp", "jet"],
)
def test_another_default_device(call: Callable[[Tensor], Sequence[Any]]) -> None:
    """What a pass makes for itself lies where its input is."""
    x = torch.randn(4, 3)
    expected = call(x)
    torch.set_default_device("meta")
    try:
        result = call(x)
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", ["grad", "backward"])
def test_a_function_that_differentiates_itself(name: str) -> None:
    """The error names a way, which is taken here: the derivative around `jx.jvp`."""
    energy = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    x, step = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3)

    def slope(x: Tensor) -> Tensor:
        total = energy(x).sum()
        if name == "grad":
            return torch.autograd.grad(total, x, create_graph=True)[0]
        total.backward(create_graph=True)
        return x.grad

    for call in (lambda: jx.laplacian(slope, x), lambda: jx.jvp(slope, (x,), (step,))):
        with pytest.raises(jx.MissingJetRule, match="differentiates itself"):
            call()
    tangent = jx.jvp(energy, (x,), (step,))[1]
    (product,) = torch.autograd.grad(tangent.sum(), x, create_graph=True)
    expected = torch.autograd.functional.hvp(lambda x: energy(x).sum(), x.detach(), step)[1]
    torch.testing.assert_close(product, expected)
