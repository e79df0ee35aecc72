"""autograd Functions that a jet goes through: by their own jvp, and by their forward's code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import jachess_ext as jx
from jachess_ext.jet.adapters import functions
from jachess_ext.jet.engine import autograd_functions
from python_tests.jet.compiling import NEEDS_MODULES_IN_GRAPHS

Formula = Callable[[Tensor], Tensor]
NUMBERS = torch.Generator().manual_seed(3)
X = torch.rand(3, 4, dtype=torch.float64, generator=NUMBERS) + 0.5
U = torch.randn(3, 3, 4, dtype=torch.float64, generator=NUMBERS)
W = torch.randn(4, 4, dtype=torch.float64, generator=NUMBERS)
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def _first(fn: Formula, x: Tensor, u: Tensor) -> Tensor:
    """The oracle: by torch.func, which has nothing of the engine."""
    return torch.func.jvp(fn, (x,), (u,))[1]


def _second(fn: Formula, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return _first(lambda x: _first(fn, x, u), x, v)


# ---- with a jvp of their own -------------------------------------------------------------------


def _exponential(style: str, keep: str) -> Any:
    """Return a Function of exp that keeps for its jvp what ``keep`` says."""

    def keep_it(ctx: Any, x: Tensor, y: Tensor) -> None:
        kept = {"input": x, "output": y, "other": y.clone(), "alias": y.detach()}
        if keep in kept:
            ctx.save_for_forward(kept[keep])
            ctx.save_for_backward(kept[keep])
        elif keep == "attribute":
            ctx.held = [{"y": y}]
        elif keep == "object":
            ctx.held = [{"y": type("Holder", (), {"y": y})()}]

    def slope(ctx: Any) -> Tensor:
        if keep in ("attribute", "object"):
            held = ctx.held[0]["y"]
            return held if isinstance(held, Tensor) else held.y
        (saved,) = ctx.saved_tensors
        return saved.exp() if keep == "input" else saved

    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        keep_it(ctx, x, y)
        return y

    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        keep_it(ctx, inputs[0], output)

    of_style = {
        "context": {"forward": staticmethod(forward)},
        "setup": {
            "forward": staticmethod(lambda x: x.exp()),
            "setup_context": staticmethod(setup_context),
        },
    }
    members = {
        **of_style[style],
        "backward": staticmethod(lambda ctx, gradient: slope(ctx) * gradient),
        "jvp": staticmethod(lambda ctx, tangent: slope(ctx) * tangent),
    }
    return type("Exponential", (torch.autograd.Function,), members)


STYLES = ("context", "setup")
KEPT = ("input", "output", "attribute")


def _net(middle: Formula, weight: Tensor) -> Formula:
    return lambda x: torch.sin(middle(torch.tanh(x @ weight)) @ weight.mT)


@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("style", STYLES)
def test_first_derivatives_and_training_through_them(style: str, keep: str) -> None:
    apply = _exponential(style, keep).apply  # bound before the first pass, as at an import
    x, weight = X.clone().requires_grad_(), W.clone().requires_grad_()
    jet = jx.jet(_net(apply, weight), x, U, order=1)
    plain = _net(torch.exp, weight)
    expected = torch.stack([_first(plain, x, u) for u in U])
    torch.testing.assert_close(jet.primal, plain(x), **CLOSE)
    torch.testing.assert_close(jet.first, expected, **CLOSE)
    mixed = torch.randn(expected.shape, dtype=torch.float64, generator=NUMBERS)
    found = torch.autograd.grad((jet.first * mixed).sum() + jet.primal.sum(), (x, weight))
    wanted = torch.autograd.grad((expected * mixed).sum() + plain(x).sum(), (x, weight))
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("style", STYLES)
def test_jvp(style: str, keep: str, differentiable: bool) -> None:
    net = _net(_exponential(style, keep).apply, W)
    x = X.clone().requires_grad_()
    value, tangent = jx.jvp(net, (x,), (U[0],), differentiable=differentiable)
    plain = _net(torch.exp, W)
    torch.testing.assert_close(tangent, _first(plain, X, U[0]), check_stride=True, **CLOSE)
    assert tangent.requires_grad == differentiable
    (gradient,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(gradient, torch.func.grad(lambda x: plain(x).sum())(X), **CLOSE)


@pytest.mark.parametrize("keep", ["other", "alias", "object"])
@pytest.mark.parametrize("style", STYLES)
def test_what_forward_computed_has_no_graph(style: str, keep: str) -> None:
    """Without gradients it is served, with them refused: they would be lost in silence."""
    apply = _exponential(style, keep).apply
    expected = _first(torch.exp, X, U[0])
    torch.testing.assert_close(jx.jvp(apply, (X,), (U[0],))[1], expected, **CLOSE)
    x = X.clone().requires_grad_()
    with torch.no_grad():
        torch.testing.assert_close(jx.jvp(apply, (x,), (U[0],))[1], expected, **CLOSE)
    found = jx.jvp(apply, (x,), (U[0],), differentiable=False)
    torch.testing.assert_close(found[1], expected, **CLOSE)
    with pytest.raises(RuntimeError, match="neither an input nor an output"):
        jx.jvp(apply, (x,), (U[0],))
    with pytest.raises(RuntimeError, match="neither an input nor an output"):
        jx.jvp(apply, (X,), (U[0].clone().requires_grad_(),))


class _Several(torch.autograd.Function):
    """x ↦ (n x y, round(x), y), of which y has no tangent and the rounded one no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, n: int) -> tuple[Tensor, ...]:
        ctx.save_for_forward(x, y)
        ctx.n = n
        whole = x.round().long()
        ctx.mark_non_differentiable(whole)
        return n * x * y, whole, y.clone()

    @staticmethod
    def jvp(ctx: Any, x_t: Tensor, y_t: Tensor, n_t: None) -> tuple[Tensor | None, ...]:
        assert n_t is None
        x, y = ctx.saved_tensors
        slope = ctx.n * (x_t * y + x * y_t)
        x_t.fill_(torch.nan)  # its own copy
        return slope, None, y_t


def test_several_inputs_and_outputs() -> None:
    y = U[2]
    value, whole, constant, same = jx.jet(
        lambda x: (*_Several.apply(x, y, 3), x + 0), X, U, order=1
    )
    torch.testing.assert_close(value.first, 3 * U * y, **CLOSE)
    assert torch.equal(same.first, U)
    assert torch.equal(whole, X.round().long())
    assert torch.equal(constant.primal, y) and not constant.first.any()
    value, _, square = jx.jet(lambda x: _Several.apply(x, x * x, 1), X, U, order=1)
    torch.testing.assert_close(value.first, 3 * X**2 * U, **CLOSE)
    torch.testing.assert_close(square.first, 2 * X * U, **CLOSE)


class _Turned(torch.autograd.Function):
    """A view of its input, with the tangent turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return -tangent


@pytest.mark.parametrize("differentiable", [True, False])
def test_a_view_takes_no_writes(differentiable: bool) -> None:
    kind = {"differentiable": differentiable}
    for x in (X, X.mT):
        _, tangent = jx.jvp(lambda x: _Turned.apply(x * 1) * 2, (x,), (x,), **kind)
        torch.testing.assert_close(tangent, -2 * x)
    with (
        torch.no_grad(),
        pytest.raises(jx.MissingJetRule, match=r"a write in place|it writes into"),
    ):
        jx.jvp(lambda x: _Turned.apply(x * 1).mul_(2), (X,), (U[0],), **kind)


def _class(**members: Callable) -> Any:
    statics = {name: staticmethod(member) for name, member in members.items()}
    return type("Custom", (torch.autograd.Function,), statics)


def _dirty(ctx: Any, x: Tensor) -> Tensor:
    ctx.mark_dirty(x)
    return x.mul_(2)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (_class(forward=_dirty, jvp=lambda ctx, t: t), "writes into its arguments"),
        (_class(forward=lambda ctx, x: x * 2, jvp=lambda ctx, t: t[0]), "tangents do not fit"),
        (_class(forward=lambda ctx, x: x * 2, jvp=lambda ctx, t: t.float()), "tangents do not fit"),
    ],
)
def test_what_a_jvp_may_not_do(function: Any, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        jx.jvp(lambda x: function.apply(x * 1), (X,), (U[0],))


@pytest.mark.parametrize("second", ["pairs", "squares", "sum"])
def test_second_derivatives_by_a_jvp_are_refused(second: str) -> None:
    apply = _exponential("setup", "input").apply
    says = r"first derivatives alone.*jx\.forward_code\(Exponential\)"
    with pytest.raises(RuntimeError, match=says):
        jx.jet(apply, X, U, second=second)
    with pytest.raises(RuntimeError, match=says):
        jx.laplacian(lambda x: apply(x).sum(-1), X)


def test_a_jet_in_a_list_is_still_refused() -> None:
    function = _class(forward=lambda ctx, x, more: x * more[0], jvp=lambda ctx, t, m: t)
    with pytest.raises(RuntimeError, match=r"a jet went into the torch\.autograd\.Function"):
        jx.jvp(lambda x: function.apply(x * 1, [x]), (X,), (U[0],))


def test_one_draw_for_the_value_and_its_tangent() -> None:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = torch.rand_like(x)
        return x * ctx.mask

    function = _class(forward=forward, jvp=lambda ctx, t: t * ctx.mask)
    for differentiable in (True, False):
        kind = {"differentiable": differentiable}
        value, tangent = jx.jvp(function.apply, (X,), (X.clone(),), **kind)
        torch.testing.assert_close(value, tangent, **CLOSE)
        assert not torch.equal(value, jx.jvp(function.apply, (X,), (X,), **kind)[0])


def test_a_jvp_that_deletes_what_it_used() -> None:
    """One context serves every direction."""

    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x, ctx.calls = x, 0
        return x * x

    def jvp(ctx: Any, t: Tensor) -> Tensor:
        x = ctx.x
        del ctx.x
        ctx.calls += 1
        return 2 * x * t / ctx.calls

    jet = jx.jet(_class(forward=forward, jvp=jvp).apply, X, U, order=1)
    torch.testing.assert_close(jet.first, 2 * X * U, **CLOSE)


@pytest.mark.parametrize("named", [False, True])
def test_within_a_checkpoint(named: bool) -> None:
    """It runs again in the backward, after the pass and the context have ended."""
    function = _Cube if named else _exponential("context", "output")
    plain = _cube if named else torch.exp
    x = X.clone().requires_grad_()

    def net(x: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.sin(function.apply(x * 1)), x, use_reentrant=False)

    with jx.forward_code(_Cube) if named else nullcontext():
        _, tangent = jx.jvp(net, (x,), (U[0],))
    expected = _first(lambda x: torch.sin(plain(x)), x, U[0])
    found, wanted = (torch.autograd.grad(t.square().sum(), x) for t in (tangent, expected))
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_plain_tensors_reach_a_function_as_ever() -> None:
    function = _exponential("setup", "output")
    inside: list[Tensor] = []

    def other_thread() -> None:
        x = X.clone().requires_grad_()
        inside.extend(torch.autograd.grad(function.apply(x).sum(), x))

    def net(x: Tensor) -> Tensor:
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        return function.apply(x)

    jx.jvp(net, (X,), (U[0],))
    torch.testing.assert_close(inside[0], X.exp())
    torch.testing.assert_close(_first(function.apply, X, U[0]), X.exp() * U[0])
    with torch.autograd.forward_ad.dual_level():
        dual = function.apply(torch.autograd.forward_ad.make_dual(X, U[0]))
        torch.testing.assert_close(
            torch.autograd.forward_ad.unpack_dual(dual).tangent, X.exp() * U[0]
        )
    with pytest.raises(TypeError, match="missing a required argument"):
        function.apply()


class _Holder:
    def __init__(self, apply: Any) -> None:
        self.apply = apply


def _closure(apply: Any) -> Formula:
    return lambda x: apply(x)


HOLDERS: dict[str, Callable[[Any], Formula]] = {
    "module": lambda apply: partial(_call_in, vars(_module(apply)), "apply"),
    "object": lambda apply: partial(_call_attribute, _Holder(apply)),
    "class": lambda apply: partial(_call_attribute, type("Holder", (), {"apply": apply})),
    "dict": lambda apply: partial(_call_in, {"exp": apply}, "exp"),
    "list": lambda apply: partial(_call_in, [apply], 0),
    "closure": _closure,
    "tuple": lambda apply: partial(_call_in, (apply,), 0),
    "partial": partial,
}


def _module(apply: Any) -> ModuleType:
    module = ModuleType("library")
    module.__dict__["apply"] = apply
    return module


def _call_in(holder: Any, name: object, x: Tensor) -> Tensor:
    return holder[name](x)


def _call_attribute(holder: Any, x: Tensor) -> Tensor:
    return holder.apply(x)


@pytest.mark.skipif(not autograd_functions.APPLY_IS_C, reason="asks, whenever it was bound")
@pytest.mark.parametrize("holder", HOLDERS)
def test_bound_before_the_package_was_used(holder: str) -> None:
    """Torch's own method, as a library binds it that is imported first."""
    function = _exponential("setup", "output")
    fn = HOLDERS[holder](vars(torch._C._FunctionBase)["apply"].__get__(None, function))
    torch.testing.assert_close(fn(X), X.exp())
    functions._rebind_early_methods()
    torch.testing.assert_close(fn(X), X.exp())
    if holder in ("tuple", "partial"):
        with pytest.raises(RuntimeError, match=r"import jachess_ext\.jet before"):
            jx.jvp(fn, (X,), (U[0],))
    else:
        torch.testing.assert_close(jx.jvp(fn, (X,), (U[0],))[1], X.exp() * U[0], **CLOSE)


# ---- by their forward's code -------------------------------------------------------------------


class _LogDet(torch.autograd.Function):
    """log |Σ_k w_k det a_k det b_k|, by the largest: matrices ``[n, k, m, m]``, weights ``[k]``."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        signs_a, logs_a = torch.linalg.slogdet(a)
        signs_b, logs_b = torch.linalg.slogdet(b)
        logs = logs_a + logs_b
        largest = logs.detach().amax(-1, keepdim=True)
        total = (signs_a * signs_b * torch.exp(logs - largest)) @ w
        ctx.save_for_backward(a, b, w, total.detach())
        sign = total.sign()
        ctx.mark_non_differentiable(sign)
        return total.abs().log() + largest.squeeze(-1), sign

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        raise AssertionError("no backward of its own is asked")


def _cube(x: Tensor) -> Tensor:
    return x**3


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, power: int = 3) -> Tensor:
        with torch.no_grad():
            return x.detach().clone() ** power

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:1])
        ctx.set_materialize_grads(False)
        ctx.power = inputs[1]


def _matrices(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    one = torch.eye(3, dtype=x.dtype)
    a = torch.stack([torch.outer(row, row) + one for row in x[:, :3]])
    b = torch.sin(a) + 2 * one
    return a[None], b[None], x.sum(1)


def _det(a: Tensor) -> Tensor:
    """Expand along the first row: torch's nested forward mode of determinants is wrong."""
    if a.shape[-1] == 1:
        return a[..., 0, 0]
    columns = range(a.shape[-1])
    minors = [_det(a[..., 1:, [c for c in columns if c != column]]) for column in columns]
    return sum((-1) ** column * a[..., 0, column] * minors[column] for column in columns)


def _log_det_formula(x: Tensor) -> Tensor:
    a, b, w = _matrices(x)
    return (_det(a) * _det(b) * w).sum(-1).abs().log()


NAMED = {
    "determinants": (_LogDet, lambda x: _LogDet.apply(*_matrices(x))[0], _log_det_formula),
    "setup": (_Cube, lambda x: _Cube.apply(x), _cube),
    "keyword": (_Cube, lambda x: _Cube.apply(x, power=3), _cube),
}
try:
    _Cube.apply(X, power=3)
except TypeError:  # torch 2.10 takes no keywords
    del NAMED["keyword"]


@pytest.mark.parametrize("name", NAMED)
def test_second_derivatives_and_training_by_forward_code(name: str) -> None:
    function, fn, plain = NAMED[name]
    x = X.clone().requires_grad_()
    with jx.forward_code(function):
        jet = jx.jet(lambda x: fn(x) * 1, x, U)
    expected = [plain(x), *(_first(plain, x, u) for u in U)]
    expected += [_second(plain, x, U[i], U[j]) for i, j in jet.pairs]
    torch.testing.assert_close(jet.streams, torch.stack(expected), rtol=1e-9, atol=1e-10)
    mixed = torch.randn(jet.streams.shape, dtype=torch.float64, generator=NUMBERS)
    found = torch.autograd.grad((jet.streams * mixed).sum(), x)
    wanted = torch.autograd.grad((torch.stack(expected) * mixed).sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("around", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("name", NAMED)
def test_jvp_by_forward_code(name: str, differentiable: bool, around: Any) -> None:
    function, fn, plain = NAMED[name]
    expected = _first(plain, X, U[0])
    with around(), jx.forward_code(function):
        value, tangent = jx.jvp(fn, (X,), (U[0],), differentiable=differentiable)
    torch.testing.assert_close(value, plain(X), rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(tangent, expected, rtol=1e-10, atol=1e-11)


def test_inference_mode_inside_a_pass() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return _Cube.apply(torch.sin(x))

    with jx.forward_code(_Cube):
        value, tangent = jx.jvp(fn, (X,), (U[0],))
    torch.testing.assert_close(value.clone(), X.sin() ** 3)
    torch.testing.assert_close(tangent.clone(), 3 * X.sin() ** 2 * X.cos() * U[0])


def test_a_context_and_a_decorator() -> None:
    @jx.forward_code(_Cube)
    def slope(x: Tensor) -> Tensor:
        return jx.jvp(_Cube.apply, (x,), (torch.ones_like(x),))[1]

    torch.testing.assert_close(slope(X), 3 * X**2)
    with jx.forward_code(_LogDet), jx.forward_code(_Cube):
        torch.testing.assert_close(slope(X), 3 * X**2)
        jx.jvp(NAMED["determinants"][1], (X,), (U[0],))

    def inside(x: Tensor) -> Tensor:
        with jx.forward_code(_Cube):
            return _Cube.apply(x)

    torch.testing.assert_close(jx.jvp(inside, (X,), (U[0],))[1], 3 * X**2 * U[0])
    with pytest.raises(RuntimeError, match=r"jx\.forward_code\(_Cube\)"):
        jx.jvp(_Cube.apply, (X,), (U[0],))
    for wrong in (_Cube.apply, torch.exp, "Cube"):
        with pytest.raises(TypeError, match=r"subclasses of torch\.autograd\.Function"):
            jx.forward_code(wrong).__enter__()


def test_within_vmap() -> None:
    with jx.forward_code(_Cube):
        found = torch.func.vmap(lambda x: jx.jvp(_Cube.apply, (x,), (x,))[1])(X)
    torch.testing.assert_close(found, 3 * X**3, **CLOSE)
    function = _exponential("setup", "input")
    with pytest.raises(RuntimeError, match="inside a transform of"):
        torch.func.vmap(lambda x: jx.jvp(function.apply, (x,), (x,))[1])(X)


def test_an_unnamed_straight_through_estimator_is_refused_and_a_named_one_rounds() -> None:
    function = _class(forward=lambda ctx, x: x.round(), backward=lambda ctx, g: g)
    with pytest.raises(RuntimeError, match=r"a jet went into the torch\.autograd\.Function"):
        jx.jvp(function.apply, (X,), (U[0],))
    with jx.forward_code(function):
        assert not jx.jvp(function.apply, (X,), (U[0],))[1].any()


@pytest.mark.parametrize("named", [False, True])
def test_an_output_that_is_marked_has_no_derivative(named: bool) -> None:
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y, z = x * x, x * 2
        ctx.mark_non_differentiable(z)
        ctx.x = x
        return y, z

    function = _class(forward=forward, jvp=lambda ctx, t: (2 * ctx.x * t, 2 * t))
    with jx.forward_code(*[function] * named):
        y, z = jx.jet(function.apply, X, U, order=1)
    torch.testing.assert_close(y.first, 2 * X * U)
    torch.testing.assert_close(z.primal, 2 * X)
    assert not z.first.any()


def test_writes_in_place() -> None:
    function = _class(forward=_dirty)
    with jx.forward_code(function):
        found = jx.jet(lambda x: (y := x * x, function.apply(y), y)[2], X, U)
    torch.testing.assert_close(found.second[0], 4 * U[0] * U[1])


def _number(ctx: Any, x: Tensor) -> Tensor:
    return x * x.abs().max().item()


def _inference(ctx: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x * 2


def _own_graph(ctx: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        return torch.autograd.grad(torch.tanh(z).sum(), z)[0]


def _saved(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return ctx.saved_tensors[0] * 2


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (_number, r"reads a number out of a jet \(item\)"),
        (lambda ctx, x: torch.from_numpy(x.numpy()), r"reads a number out of a jet \(numpy\)"),
        (lambda ctx, x: torch.tensor([[x[0, 0]]]), r"reads a number out of a jet \(tensor\)"),
        (lambda ctx, x: x.new_tensor([x.sum()]), r"reads a number out of a jet \(new_tensor\)"),
        (lambda ctx, x: torch.asarray(obj=[*x[0]]), r"reads a number out of a jet \(asarray\)"),
        (_inference, "changes the inference mode"),
        (_own_graph, "no jet rule for"),
        (_saved, "saved_tensors"),
    ],
)
def test_what_a_forward_may_not_do(forward: Callable, says: str, differentiable: bool) -> None:
    function = _class(forward=forward)
    with jx.forward_code(function), pytest.raises(Exception, match=says):
        jx.jvp(lambda x: function.apply(x * 1), (X,), (U[0],), differentiable=differentiable)


def test_a_function_inside_a_named_one_has_to_be_named_too() -> None:
    outer = _class(forward=lambda ctx, x: _Cube.apply(x) * 2)
    with torch.inference_mode(), jx.forward_code(outer):
        with pytest.raises(RuntimeError, match=r"Function [\w.]+\._Cube"):
            jx.jvp(outer.apply, (X,), (U[0],))
        with jx.forward_code(_Cube):
            found = jx.jvp(outer.apply, (X,), (U[0],))[1]
    torch.testing.assert_close(found.clone(), 6 * X**2 * U[0])


@pytest.mark.parametrize("named", [False, True])
def test_autocast_inside_a_forward(named: bool) -> None:
    """It stays on, as torch leaves it on."""
    function = _class(forward=lambda ctx, x: F.linear(x, x), jvp=lambda ctx, t: t @ t.mT)
    x = X.float()
    with torch.autocast("cpu", torch.bfloat16), jx.forward_code(*[function] * named):
        value, tangent = jx.jvp(function.apply, (x,), (x,))
        expected = F.linear(x, x)
    assert value.dtype == tangent.dtype == torch.bfloat16
    torch.testing.assert_close(value, expected)


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(W.clone())

    def forward(self, x: Tensor) -> Tensor:
        return _Cube.apply(_Compiled.apply(x @ self.weight))


_Compiled = _exponential("setup", "output")


@NEEDS_MODULES_IN_GRAPHS
def test_in_a_graph() -> None:
    layer = _Layer()

    def tangent(x: Tensor, u: Tensor) -> Tensor:
        return jx.jvp(layer, (x,), (u,))[1]

    with jx.forward_code(_Cube):
        found = torch.compile(tangent, backend="aot_eager", fullgraph=True)(X, U[0])
    plain = _first(lambda x: (x @ layer.weight).exp() ** 3, X, U[0])
    torch.testing.assert_close(found, plain, **CLOSE)
    gradients = [torch.autograd.grad(t.sin().sum(), layer.weight) for t in (found, plain)]
    torch.testing.assert_close(*gradients, **CLOSE)


# ---- complex numbers -----------------------------------------------------------------------------


class _ComplexSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        ctx.save_for_forward(z)
        return z * z

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0].conj()


class _WithAComplexJvp(_ComplexSquare):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return 2 * ctx.saved_for_forward[0] * tangent


@pytest.mark.parametrize("differentiable", [True, False])
def test_complex_numbers(differentiable: bool) -> None:
    z, t = torch.randn(2, 3, dtype=torch.complex128)
    z.requires_grad_()

    def check(function: Any) -> None:
        out, tangent = jx.jvp(function.apply, (z,), (t,), differentiable=differentiable)
        pairs = [(out, z * z), (tangent, 2 * z * t)][: 1 + differentiable]
        torch.testing.assert_close(tangent.detach(), (2 * z * t).detach())
        ours, expected = (sum(y.abs().square().sum() for y in side) for side in zip(*pairs))  # noqa: B905
        torch.testing.assert_close(torch.autograd.grad(ours, z), torch.autograd.grad(expected, z))

    check(_WithAComplexJvp)
    with jx.forward_code(_ComplexSquare):
        check(_ComplexSquare)
    with pytest.raises(RuntimeError, match=r"a jet went into .*_ComplexSquare"):
        check(_ComplexSquare)
