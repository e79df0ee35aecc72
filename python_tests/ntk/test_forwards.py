"""Forward passes that do something unusual: the kernel is right, or a sentence says what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jachess_ext as jx

from .oracles import error, kernel


class Net(nn.Module):
    """A small network, and what forward makes of it."""

    def __init__(self, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.net, x)


def inputs(samples: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(samples, 3, generator=generator, dtype=torch.float64)


def _slopes(net: nn.Module, x: Tensor) -> Tensor:
    """By torch.autograd, with a graph, [N, 3]."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(net(x).sum(), x, create_graph=True)[0]


def _laplacian(net: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        rows = [
            torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(3)
        ]
        return torch.stack(rows).sum(0)[:, None]


def _dual(net: nn.Module, x: Tensor) -> Tensor:
    ahead = torch.autograd.forward_ad
    with ahead.dual_level():
        return ahead.unpack_dual(net(ahead.make_dual(x, torch.ones_like(x)))).tangent


# name -> (forward, the same by torch.autograd)
RIGHT: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "jx.jvp": (
        lambda net, x: jx.jvp(net, (x,), (torch.ones_like(x),))[1],
        lambda net, x: _slopes(net, x).sum(1, keepdim=True),
    ),
    "jx.jvp beside the value": (
        lambda net, x: torch.cat(jx.jvp(net, (x,), (torch.ones_like(x),)), 1),
        lambda net, x: torch.cat([net(x), _slopes(net, x).sum(1, keepdim=True)], 1),
    ),
    "jx.laplacian": (lambda net, x: jx.laplacian(net, x)[2], _laplacian),
    "jx.laplacian minus the value": (
        lambda net, x: jx.laplacian(net, x)[2] - net(x).sin(),
        lambda net, x: _laplacian(net, x) - net(x).sin(),
    ),
    "jx.hessian_diagonal": (
        lambda net, x: jx.hessian_diagonal(net, x)[2].sum(0),
        _laplacian,
    ),
    "jx.hvp": (
        lambda net, x: jx.hvp(lambda z: net(z).sum(), (x,), (torch.ones_like(x),))[1][0],
        _slopes,
    ),
    "jx.divergence": (
        lambda net, x: jx.divergence(lambda z: net(z) * z, x)[1][:, None],
        lambda net, x: 3 * net(x) + (_slopes(net, x) * x).sum(1, keepdim=True),
    ),
    "torch.autograd": (_slopes, _slopes),
    "torch.func.jvp": (
        lambda net, x: torch.func.jvp(net, (x,), (torch.ones_like(x),))[1],
        lambda net, x: _slopes(net, x).sum(1, keepdim=True),
    ),
    "dual numbers": (_dual, lambda net, x: _slopes(net, x).sum(1, keepdim=True)),
    "vmap": (lambda net, x: torch.vmap(net)(x), lambda net, x: net(x)),
}


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "jachess_ext.ntk: exact per-sample", RuntimeWarning)
        yield


@pytest.mark.parametrize("method", ["auto", "per_sample"])
@pytest.mark.parametrize("name", RIGHT)
def test_derivatives_within_the_model(name: str, method: Any) -> None:
    forward, plain = RIGHT[name]
    model, x = Net(forward), inputs()
    theta = jx.ntk(model, x, method=method)
    assert error(theta, kernel(model, x, f=lambda x: plain(model.net, x))) < 1e-10


def _backward(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    net(x).sum().backward(create_graph=True)
    assert x.grad is not None
    return x.grad


REFUSED: dict[str, Callable[..., Tensor]] = {
    "torch.autograd": lambda net, x: torch.autograd.grad(
        net(x.requires_grad_()).sum(), x, create_graph=True
    )[0],
    "backward": _backward,
    "torch.func.grad": lambda net, x: torch.vmap(torch.func.grad(lambda z: net(z)[0]))(x),
    "torch.func.vjp": lambda net, x: torch.func.vjp(net, x)[1](x[:, :1])[0],
    "torch.func.jacrev": lambda net, x: torch.vmap(torch.func.jacrev(net))(x)[:, 0],
    "torch.func.hessian": lambda net, x: torch.vmap(torch.func.hessian(lambda z: net(z)[0]))(
        x
    ).diagonal(dim1=1, dim2=2),
}


@pytest.mark.parametrize("method", ["auto", "per_sample"])
@pytest.mark.parametrize("name", REFUSED)
def test_derivatives_that_are_refused(name: str, method: Any) -> None:
    with pytest.raises(RuntimeError, match=r"the model differentiates .* jx\.laplacian, through"):
        jx.ntk(Net(REFUSED[name]), inputs(), method=method)


# ---- tables -----------------------------------------------------------------------------------

IDS = torch.tensor([[1, 2, 3], [4, 4, 6], [0, 0, 0], [6, 5, 1]])


class Words(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(4, 2)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.body(ids)
        return self.head(torch.tanh(x.mean(1) if x.dim() == 3 else x))


class Table(nn.Module):
    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.use = nn.Parameter(torch.randn(7, 4)), use

    def forward(self, ids: Tensor) -> Tensor:
        return self.use(ids, self.weight)


TABLES: dict[str, Callable[[], nn.Module]] = {
    "one hot": lambda: Table(lambda ids, w: F.one_hot(ids, 7).to(w) @ w),
    "one hot, einsum": lambda: Table(
        lambda ids, w: torch.einsum("ntv,vd->ntd", F.one_hot(ids, 7).to(w), w)
    ),
    "one hot of as many as there are": lambda: Table(
        lambda ids, w: torch.einsum("ntv,vd->ntd", F.one_hot(ids).to(w), w[: int(ids.max()) + 1])
    ),
    "index": lambda: Table(lambda ids, w: w[ids]),
    "gather": lambda: Table(lambda ids, w: w.index_select(0, ids.flatten()).view(*ids.shape, 4)),
    "sparse": lambda: nn.Embedding(7, 4, sparse=True),
    "bag": lambda: nn.EmbeddingBag(7, 4),
    "sparse bag": lambda: nn.EmbeddingBag(7, 4, sparse=True, mode="sum"),
    "branches": lambda: Table(lambda ids, w: w[ids] * (2.0 if ids.sum() > 3 else 2)),
}


@pytest.mark.parametrize("method", ["auto", "per_sample"])
@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str, method: Any) -> None:
    torch.manual_seed(1)
    model = Words(TABLES[name]())
    assert error(jx.ntk(model, IDS, method=method), kernel(model, IDS)) < 1e-10


RESCALED: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(7, 4, max_norm=0.5),
    "bag": lambda: nn.EmbeddingBag(7, 4, max_norm=0.5),
    "function": lambda: Table(lambda ids, w: F.embedding(ids, w, max_norm=0.5)),
}


@pytest.mark.parametrize("name", RESCALED)
def test_tables_that_are_rescaled_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"parameter 'body\.weight' is a table that max_norm"):
        jx.ntk(Words(RESCALED[name]()), IDS)


# ---- what is no plain module, or holds no numbers ----------------------------------------------


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def _offloaded() -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    model = _layers()
    accelerate.cpu_offload(model, execution_device="cpu")
    return model


MODELS: dict[str, tuple[Callable[[], Any], type, str]] = {
    "on meta": (
        lambda: _layers().to("meta"),
        ValueError,
        r"parameter '0\.weight' is on the meta device.*remove_hook_from_submodules",
    ),
    "offloaded": (_offloaded, ValueError, r"on the meta device.*remove_hook_from_submodules"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_models_that_are_refused(name: str) -> None:
    make, kind, sentence = MODELS[name]
    with pytest.raises(kind, match=sentence):
        jx.ntk(make(), inputs())


def test_offloaded_weights_come_back_as_the_sentence_says() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = _offloaded()
    hooks.remove_hook_from_submodules(model)
    plain = _layers()
    assert error(jx.ntk(model, inputs()), kernel(plain, inputs())) < 1e-10


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["traced", "symbolic"])
def test_modules_with_their_operations_are_answered(name: str) -> None:
    plain, x = _layers(), inputs()
    expected = kernel(plain, x)
    traced = torch.jit.trace(plain, x) if name == "traced" else torch.fx.symbolic_trace(plain)
    assert error(jx.ntk(traced, x), expected) < 1e-10


@pytest.mark.parametrize("outputs", ["logits", "sum", 2])
def test_no_tensor_is_made_on_the_default_device(outputs: Any) -> None:
    """Which may be a GPU, while the model is on the CPU; here one that holds no numbers."""
    model, x = _layers(), inputs()
    expected = jx.ntk(model, x, outputs=outputs)
    with torch.device("meta"):
        assert error(jx.ntk(model, x, outputs=outputs), expected) < 1e-12
        assert error(jx.ntk(model, x, outputs=outputs, memory_budget=5000), expected) < 1e-12


# ---- nested tensors ------------------------------------------------------------------------


class Jagged(nn.Module):
    def __init__(self, gather: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.gather = nn.Linear(8, 2), gather

    def forward(self, x: Tensor) -> Tensor:
        rows = [row[: 2 + n % 2] for n, row in enumerate(x)]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return self.gather(self.inner(nested))


JAGGED: dict[str, Callable[[Tensor], Tensor]] = {
    "padded": lambda y: torch.nested.to_padded_tensor(y, 0.0).mean(1),
    "row by row": lambda y: torch.stack([row.sum(0) for row in y.unbind()]),
    "through a function": lambda y: torch.nested.to_padded_tensor(y.sin(), 0.0).mean(1),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", ["auto", "per_sample"])
@pytest.mark.parametrize("name", JAGGED)
def test_nested_tensors_are_refused(name: str, method: Any) -> None:
    with pytest.raises(TypeError, match=r"nested \(jagged\) tensors.*to_padded_tensor"):
        jx.ntk(Jagged(JAGGED[name]), torch.randn(3, 4, 8), method=method)
    nested = torch.nested.as_nested_tensor(
        [torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged
    )
    for samples in (nested, {"x": nested}):
        with pytest.raises((TypeError, RuntimeError)):
            jx.ntk(nn.Linear(8, 2), samples)
