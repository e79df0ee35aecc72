"""Places where a derivative is easily wrong in silence."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jachess_ext as jx
from jachess_ext.jet import composed_rules

INF = torch.inf


def _point(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(*shape).double(), torch.randn(2, *shape).double()


# ---- attention ---------------------------------------------------------------------------------


def _hidden_row(kind: str) -> torch.Tensor:
    """A mask that hides every key from query 0, and key 2 from query 1."""
    mask = torch.tensor([[False, False, False], [True, True, False], [True, True, True]])
    return mask if kind == "boolean" else torch.zeros(3, 3).double().masked_fill(~mask, -INF)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("composed", [False, True])
def test_rows_without_any_key(kind: str, composed: bool) -> None:
    """Zero output, zero derivatives, and zero (not NaN) gradients; other rows are unharmed."""
    x, u = _point(3, 4)
    x.requires_grad_()
    mask = _hidden_row(kind)

    def attend(x: Any) -> Any:
        return F.scaled_dot_product_attention(x, x * 2, x * x, attn_mask=mask)

    if composed:
        with composed_rules():
            jet = jx.jet(attend, x, u)
    else:
        jet = jx.jet(attend, x, u)
    assert torch.isfinite(jet.streams).all()
    assert not jet.streams[:, 0].any()
    torch.testing.assert_close(jet.primal, attend(x), rtol=1e-13, atol=1e-13)
    jet.streams.square().sum().backward()
    assert torch.isfinite(x.grad).all()
    # Query 0 sees no key, but its embedding is a key of queries 1 and 2.
    assert x.grad[0].any()


def test_softmax_of_a_row_of_minus_infinity_is_nan_as_in_torch() -> None:
    x, u = _point(2, 3)
    jet = jx.jet(
        lambda x: F.softmax(x.masked_fill(torch.tensor([[True], [False]]), -INF), -1), x, u
    )
    assert jet.streams[:, 0].isnan().all()
    assert torch.isfinite(jet.streams[:, 1]).all()


def test_a_single_visible_key_has_no_derivative_in_its_weight() -> None:
    x, u = _point(2, 3)
    hide = torch.tensor([[False, True, True], [True, True, False]])
    jet = jx.jet(lambda x: F.softmax(x.masked_fill(hide, -INF), -1), x, u)
    assert torch.equal(jet.primal, (~hide).double())
    assert not jet.first.any() and not jet.second.any()


def test_scores_of_a_thousand_stay_finite() -> None:
    x, u = _point(4, 8)
    jet = jx.jet(lambda x: F.scaled_dot_product_attention(100 * x, 100 * x, x), x, u)
    assert torch.isfinite(jet.streams).all()


# ---- formulas at their edges -------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gelu", "gelu tanh", "silu", "mish", "softplus", "sigmoid", "tanh", "logsigmoid"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_activations(name: str, dtype: torch.dtype) -> None:
    """Far out every activation is a line: finite, no curvature, and its gradient finite."""
    function = {
        "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
    }.get(name) or getattr(F, name)
    x = torch.tensor([0.0, 40.0, -40.0, 1e4, -1e4], dtype=dtype, requires_grad=True)
    jet = jx.jet(function, x, torch.ones(2, 5, dtype=dtype))
    assert torch.isfinite(jet.streams).all()
    assert jet.second[:, 1:].abs().max() < 1e-6
    slopes = jet.first[0, 1:]
    torch.testing.assert_close(slopes, slopes.round(), rtol=0, atol=1e-6)
    (gradient,) = torch.autograd.grad(jet.streams.sum(), x)
    assert torch.isfinite(gradient).all()


def test_powers_of_zero() -> None:
    x, u = torch.zeros(1).double(), torch.ones(2, 1).double()
    for n, first, second in ((0, 0, 0), (1, 1, 0), (2, 0, 2), (3, 0, 0)):
        for exponent in (n, torch.tensor(float(n)), torch.tensor([float(n)]).double()):
            jet = jx.jet(lambda x, n=exponent: x**n, x, u)
            assert jet.primal.item() == (n == 0)
            assert jet.first[0].item() == first
            assert jet.second.item() == second


@pytest.mark.parametrize("n", [0.0, 1.0, 2.0, 3.0])
def test_powers_of_zero_whose_exponent_moves(n: float) -> None:
    """∂²(x^n)/∂x∂n = x^(n−1) (1 + n ln x) diverges at 0 where n is 0 or 1; nothing else does."""
    at, one, both = (
        torch.tensor([0.0, n]).double(),
        torch.eye(2).double(),
        torch.ones(2, 2).double(),
    )
    for power in (torch.pow, torch.float_power, lambda x, n: x**n):
        f = lambda z, power=power: power(z[0], z[1])  # noqa: E731
        for given, kind in ((one, "pairs"), (both, "squares"), (both, "sum")):
            second = jx.jet(f, at, given, second=kind).second
            expected = torch.full_like(second, torch.nan) if n < 2 else second
            torch.testing.assert_close(second, expected, equal_nan=True)
            assert n < 2 or second.isfinite().all()
        apart = jx.jet(f, at, one, second="squares")
        assert apart.streams.isfinite().all()
        assert apart.first.tolist() == [float(n == 1), 0]
        assert apart.second.tolist() == [2 * float(n == 2), 0]


def test_constant_rows_through_layer_norm() -> None:
    """Zero variance: ε alone keeps the statistics finite."""
    x, u = torch.ones(2, 4).double(), _point(2, 4)[1]
    jet = jx.jet(lambda x: F.layer_norm(x, (4,), eps=1e-2), x, u)
    centred = u - u.mean(-1, keepdim=True)
    torch.testing.assert_close(jet.first, centred / 0.1)
    assert not jet.primal.any()
    torch.testing.assert_close(jet.second, torch.zeros(1, 2, 4).double())


AT_ZERO: dict[str, Any] = {
    "normalize": lambda x: F.normalize(x, dim=-1, eps=0.5),
    "norm": lambda x: x.norm(dim=-1),
    "norm of all": lambda x: x.norm(),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "linalg.norm": lambda x: torch.linalg.norm(x, dim=-1),
    "std": lambda x: x.std(-1),
    "std_mean": lambda x: torch.std_mean(x, -1, correction=0)[0],
}


def _second_by_reverse_mode(function: Any, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """D²f[u_0, u_1] of every entry of f; NaN where a double backward gives NaN."""
    flat = function(x).flatten()
    found = [
        u[0].flatten()
        @ torch.autograd.functional.hessian(
            lambda x, entry=entry: function(x).flatten()[entry], x
        ).reshape(x.numel(), -1)
        @ u[1].flatten()
        for entry in range(len(flat))
    ]
    return torch.stack(found)


@pytest.mark.parametrize("level", [0.0, 2.0])
@pytest.mark.parametrize("name", AT_ZERO)
def test_norms_of_a_row_of_equal_entries(name: str, level: float) -> None:
    """Of zeros a norm has no derivative, of equal entries a standard deviation has none: torch's
    autograd takes 0 for the first one, and the second is NaN, since that of a smooth function of
    either would be wrong with any number.
    """
    function = AT_ZERO[name]
    x, u = _point(1, 4)
    x = torch.full_like(x, level, requires_grad=True)
    jet = jx.jet(function, x, u)
    assert torch.equal(jet.primal, function(x))
    jacobian = torch.autograd.functional.jacobian(function, x).reshape(-1, x.numel())
    first = (u.reshape(2, -1) @ jacobian.T).reshape(jet.first.shape)
    torch.testing.assert_close(jet.first, first, rtol=1e-13, atol=1e-14)
    if name == "normalize":  # by a constant at 0
        expected = _second_by_reverse_mode(function, x, u).nan_to_num().reshape(jet.second.shape)
        torch.testing.assert_close(jet.second, expected, rtol=1e-12, atol=1e-13)
        (gradient,) = torch.autograd.grad(jet.streams.square().sum(), x)
        assert torch.isfinite(gradient).all()
    else:
        differs = level == 0.0 or name.startswith("std")
        expected = _second_by_reverse_mode(function, x, u).reshape(jet.second.shape)
        expected = torch.full_like(expected, torch.nan) if differs else expected
        torch.testing.assert_close(jet.second, expected, rtol=1e-12, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("size", [1e-13, 1e-18, 1e-30])
def test_normalising_a_tiny_row_divides_it_by_a_constant(size: float) -> None:
    x, u = (t.float() for t in _point(1, 4))
    x = (x * size).requires_grad_()
    jet = jx.jet(F.normalize, x, u)
    assert torch.equal(jet.primal, F.normalize(x))
    torch.testing.assert_close(jet.first, u / 1e-12)
    assert not jet.second.any()
    (gradient,) = torch.autograd.grad(jet.streams.sum(), x)
    torch.testing.assert_close(gradient, torch.full_like(x, 1e12))


@pytest.mark.parametrize("name", [name for name in AT_ZERO if name != "norm of all"])
def test_rows_beside_a_row_of_zeros_are_unharmed(name: str) -> None:
    function = AT_ZERO[name]
    x, u = _point(3, 4)
    x[1] = 0
    x.requires_grad_()
    streams = jx.jet(function, x, u).streams
    alone = jx.jet(function, x[::2], u[:, ::2]).streams
    torch.testing.assert_close(streams[:, ::2], alone, rtol=1e-13, atol=1e-13)
    (gradient,) = torch.autograd.grad(streams.square().sum(), x)
    (expected,) = torch.autograd.grad(alone.square().sum(), x)
    torch.testing.assert_close(gradient[::2], expected[::2], rtol=1e-12, atol=1e-12)


def test_an_unused_direction_costs_no_accuracy() -> None:
    x, u = _point(3)
    u[1] = 0
    jet = jx.jet(lambda x: torch.exp(x).sum() * x, x, u)
    assert jet.first[0].any()
    assert not jet.first[1].any() and not jet.second.any()


def test_a_jet_and_itself() -> None:
    """x · x: the same tensor on both sides, and as its own condition."""
    x, u = _point(3)
    jet = jx.jet(lambda x: torch.where(x > 0, x * x, -(x * x)), x, u)
    torch.testing.assert_close(jet.first, 2 * x.abs() * u)
    torch.testing.assert_close(jet.second, 2 * x.sign() * u[:1] * u[1:])


def test_a_value_made_constant_half_way() -> None:
    """detach is a stop-gradient: d(x · stop(x)) = stop(x) dx, as under autograd."""
    x, u = _point(3)
    jet = jx.jet(lambda x: x * x.detach(), x, u)
    assert torch.equal(jet.first, x * u)
    assert not jet.second.any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    x, u = _point(3, 4)
    with mode():
        jet = jx.jet(lambda x: F.layer_norm(F.gelu(x), (4,)) @ x.T, x, u)
        y = jx.jet(lambda x: _assign(x.clone()), x, u)
    reference = jx.jet(lambda x: F.layer_norm(F.gelu(x), (4,)) @ x.T, x, u)
    torch.testing.assert_close(jet.streams, reference.streams)
    assert not jet.streams.requires_grad
    assert torch.equal(y.first[:, 0], u[:, 1])


def _assign(y: Any) -> Any:
    y[0] = y[1]
    return y


class _Doubled(torch.autograd.Function):
    """A Function of somebody's own; with a context, and in torch's newer form."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class _Passed(torch.autograd.Function):
    """Returns what it is given, as FSDP2's does to be told when gradients are there."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@pytest.mark.parametrize("function", [_Doubled, _Passed])
@pytest.mark.parametrize("gradients", [True, False])
def test_autograd_functions_are_refused(function: type, gradients: bool) -> None:
    """Autograd does not see the stack in a jet: what a Function returns would have no gradient."""
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with (
        torch.set_grad_enabled(gradients),
        pytest.raises(RuntimeError, match=r"autograd\.Function"),
    ):
        jx.jet(function.apply, x, torch.randn(2, 3, dtype=torch.float64))


# ---- derivatives inside, as torch.func refuses them ----------------------------------------------


def _cube(y: Any) -> Any:
    return y**3


def _energy(y: Any) -> Any:
    return (y**3).sum()


def _score_of(detached: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The gradient of an energy by what stands for x, as an energy model takes its score."""

    def score(x: Any) -> Any:
        y = detached(x)
        return torch.autograd.grad(_energy(y), y)[0]

    return score


INSIDE: dict[str, Callable[[Any], Any]] = {
    **{
        name: lambda x, name=name: getattr(torch.autograd.functional, name)(
            _cube if name in ("jacobian", "vjp", "jvp") else _energy, x, *_vectors(name, x)
        )
        for name in ("jacobian", "hessian", "hvp", "vhp", "vjp", "jvp")
    },
    "detach": _score_of(lambda x: x.detach().requires_grad_()),
    "detach, clone": _score_of(lambda x: x.detach().clone().requires_grad_(True)),
    "data": _score_of(lambda x: x.data.requires_grad_()),
    "numpy": _score_of(lambda x: torch.from_numpy(x.detach().numpy().copy()).requires_grad_()),
    "after a function": _score_of(lambda x: x.sin().detach().requires_grad_()),
    "of x itself": lambda x: torch.autograd.grad(_energy(x), x)[0],
    "of a clone": _score_of(lambda x: x.clone().requires_grad_()),
    "backward": lambda x: _energy(x.detach().requires_grad_()).backward(),
}


def _vectors(name: str, x: Any) -> list[Tensor]:
    return [] if name in ("jacobian", "hessian") else [torch.ones(3, dtype=torch.float64)]


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("inside", INSIDE)
def test_a_derivative_inside_that_torch_func_refuses_is_refused(
    inside: str, differentiable: bool
) -> None:
    """Its tangent would be 0 without a word."""
    x, t = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        torch.func.jvp(INSIDE[inside], (x,), (t,))
    with pytest.raises(RuntimeError, match=r"requires_grad_\(\) was called|no jet rule for"):
        jx.jvp(INSIDE[inside], (x,), (t,), differentiable=differentiable)
    with pytest.raises(RuntimeError, match=r"requires_grad_\(\) was called|no jet rule for"):
        jx.jet(INSIDE[inside], x, torch.stack([t, t]))
    assert x.requires_grad_() is x and "requires_grad_" not in vars(torch.Tensor)


def test_a_constant_may_require_a_gradient_before_anything_is_detached() -> None:
    """As gradient checkpointing has hidden states of token ids require one."""

    def fn(x: Any) -> Any:
        return x * torch.full((3,), 2.0).requires_grad_()

    x = torch.ones(3)
    assert torch.equal(jx.jvp(fn, (x,), (x,))[1], 2 * x)


# ---- constants and points of other kinds ---------------------------------------------------------

SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda matrix: matrix.to_sparse_bsr((2, 2)),
}
PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "@ vector": lambda m, x: m @ x[:, 0],
    "mv": lambda m, x: torch.mv(m, x[:, 0]),
    "@ matrix": lambda m, x: m @ x,
    "mm": lambda m, x: torch.mm(m, x.sin()),
    "linear": lambda m, x: F.linear(x.mT, m),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_constant_sparse_matrix(kind: str, product: str) -> None:
    """Against the dense one."""
    dense = torch.randn(4, 4).double()
    sparse, multiply = SPARSE[kind](dense), PRODUCTS[product]
    x, u = _point(4, 3)
    expected = jx.jet(lambda x: multiply(dense, x) ** 2, x, u).streams
    found = jx.jet(lambda x: multiply(sparse, x) ** 2, x, u).streams
    torch.testing.assert_close(found, expected)
    for differentiable in (True, False):
        _, tangent = jx.jvp(
            lambda x: multiply(sparse, x) ** 2, (x,), (u[0],), differentiable=differentiable
        )
        torch.testing.assert_close(tangent, expected[1])


@pytest.mark.parametrize(
    ("point", "words"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.ones(2, device="meta"), "on the device meta"),
        (lambda: torch.ones(2).to(torch.float8_e4m3fn), "float8"),
        (lambda: torch.eye(2).to_sparse(), "sparse"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_point_of_another_kind_is_refused(point: Callable[[], Tensor], words: str) -> None:
    with pytest.raises(TypeError, match=f"{words}.*pass a dense tensor"):
        jx.jvp(lambda x: x * 2, (point(),), (point(),))


def test_a_full_backward_hook_is_named() -> None:
    module = torch.nn.Linear(2, 2)
    module.register_full_backward_hook(lambda *given: None)
    with pytest.raises(RuntimeError, match="full backward hook"):
        jx.jvp(module, (torch.ones(2),), (torch.ones(2),))


STEPS: dict[str, Any] = {
    "floor_divide": lambda x: torch.floor_divide(x, 0.3),
    "floordiv": lambda x: x // 0.3,
    "rfloordiv": lambda x: 3.0 // x,
    "by a jet": lambda x: x // x.cos(),
    "of a constant by a jet": lambda x: torch.floor_divide(torch.ones(4).double(), x),
    "round_": lambda x: (x * 5).round_(),
    "floor_": lambda x: (x * 5).floor_(),
    "ceil_": lambda x: (x * 5).ceil_(),
    "ifloordiv": lambda x: operator.ifloordiv(x * 1, 0.3),
    "floor_divide_": lambda x: (x * 1).floor_divide_(0.3),
}


@pytest.mark.parametrize("second", ["pairs", "squares", "sum"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_constant_between_jumps(name: str, second: Any) -> None:
    step = STEPS[name]
    x, u = _point(3, 4)
    constant = step(x)
    x.requires_grad_()
    stepped = jx.jet(lambda x: step(x) * x.sin(), x, u, second=second).streams
    expected = jx.jet(lambda x: constant * x.sin(), x, u, second=second).streams
    assert torch.equal(stepped, expected)
    gradients = [torch.autograd.grad(s.cos().sum(), x)[0] for s in (stepped, expected)]
    assert torch.equal(*gradients)
