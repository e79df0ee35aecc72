"""`jachess::activation_jet` and `jachess::gated_activation_jet`."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from jachess_ext import ops
from python_tests.ops.cases import (
    ACTIVATIONS,
    DEVICES,
    DTYPES,
    away_from_kink,
    dtype_bounds,
    random_jet,
    relative_error,
)
from python_tests.ops.operator_tests import Case, OperatorTests, requiring


def _case(kind: str, gated: bool) -> Case:
    def leaves(streams: int, *shape: int, **options) -> list[Tensor]:
        x = away_from_kink(random_jet(streams, *shape), kind).to(**options)
        return [x, random_jet(streams, *shape, seed=3).to(**options)][: 1 + gated]

    def of_torch(x: Tensor, u: Tensor | int = 1) -> Tensor:
        return ACTIVATIONS[kind](x) * u

    return Case(
        name="gated_activation_jet" if gated else "activation_jet",
        leaves=leaves,
        of_torch=of_torch,
        shapes=[(3, 173)],  # more elements than a block
        bounds=dict(dtype_bounds(1e-13)),
        operator=lambda q, *jets: (*jets, kind, q),
        settings=lambda x: {"kind": kind},
        fast_gradients=gated,
        registration=(torch.float32, torch.bfloat16) if kind == "gelu" else (),
    )


CASES = {
    f"gated {kind}" if gated else kind: _case(kind, gated)
    for gated in (False, True)
    for kind in ops.ACTIVATION_KINDS
}


ONE_OF_EACH = ("gelu", "gated silu")


@pytest.fixture(params=ONE_OF_EACH)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


class TestActivations(OperatorTests):
    pass


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ONE_OF_EACH])
def test_formulas_of_the_other_kinds(name: str, device: str) -> None:
    """All else does not depend on the kind."""
    tests, case = TestActivations(), CASES[name]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        tests.test_agrees_with_the_reference(case, device, 2, 4, dtype)
    if device == "cpu":
        tests.test_agrees_with_finite_differences(case, 2, 4)
        tests.test_gradients(case, 2, 4)


def test_every_kind_has_an_oracle_and_a_kernel() -> None:
    assert set(ACTIVATIONS) == set(ops.ACTIVATION_KINDS)
    from jachess_ext import _C

    assert _C.activation_kinds() == ops.ACTIVATION_KINDS
    assert not ops.available("activation_jet", "meta")
    assert not ops.available("no_such_operator", "cpu")


@pytest.mark.parametrize("name", ["gelu", "gated gelu"])
def test_third_derivative_through_the_backward_operator(name: str) -> None:
    """Nothing is dropped when the backward's own gradient is differentiated once more."""
    leaves = requiring(CASES[name].leaves(4, 5))

    def third(ending: str) -> Iterator[Tensor]:
        value = CASES[name].results(ending, 2, *leaves)[0]
        for _ in range(3):
            value = torch.stack(
                torch.autograd.grad(value.square().sum(), leaves, create_graph=True)
            )
        return iter(value)

    for got, expected in zip(third(""), third("_reference"), strict=True):
        assert relative_error(got, expected) < 1e-11


@pytest.mark.parametrize("kind", ops.ACTIVATION_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_and_missing_values(kind: str, dtype: torch.dtype) -> None:
    """Saturated inputs give the limits, not NaN; NaN stays NaN in every stream."""
    points = torch.tensor([-1e30, -1e8, -300.0, -40.0, 0.0, 40.0, 300.0, 1e8, 1e30], dtype=dtype)
    if kind == "exp":  # the limit there is infinity
        points = points.clamp(max=40)
    x = torch.stack([points, *[torch.ones_like(points)] * 3])
    ones = torch.ones_like(x)
    expected = ACTIVATIONS[kind](points.double().clamp(-1e10, 1e10))
    inside = points.abs() <= 1e8
    for f in (torch.ops.jachess.activation_jet, ops.activation_jet_reference):
        y = f(x, kind, 2)
        assert torch.isfinite(y).all()
        torch.testing.assert_close(y[0].double()[inside], expected[inside], rtol=2e-6, atol=1e-7)
    assert torch.isfinite(torch.ops.jachess.activation_jet_backward(ones, x, kind, 2)).all()
    few = x[:, :-1]
    assert torch.isfinite(ops.gated_activation_jet(few, ones[:, :-1], kind, 2)).all()
    backward = torch.ops.jachess.gated_activation_jet_backward
    for gradient in backward(ones[:, :-1], few, ones[:, :-1], kind, 2):
        assert torch.isfinite(gradient).all()
    x[0, 3] = float("nan")
    y = ops.activation_jet(x, kind, 2)
    assert torch.isnan(y[0, 3])
    assert torch.isfinite(y[:, [0, 1, 2, 4, 5]]).all()


@pytest.mark.parametrize("kind", ["sin", "cos"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_waves_of_large_arguments(kind: str, dtype: torch.dtype) -> None:
    """Beyond what the kernel reduces, beside arguments that it does, torch's values."""
    x = torch.tensor([1.0, -999_999.0, 1_000_001.0, -1e7, 1e15, 3e38, 2.0], dtype=dtype)
    if dtype == torch.float64:
        x = torch.cat([x, x.new_tensor([1e300])])
    sin, cos = x.double().sin(), x.double().cos()
    f0, f1 = (sin, cos) if kind == "sin" else (cos, -sin)
    ones, error = torch.ones_like(x), 1e-15 if dtype == torch.float64 else 1e-7
    jet = torch.stack([x, ones, ones, 0 * ones])
    y = ops.activation_jet(jet, kind, 2)
    torch.testing.assert_close(y.double(), torch.stack([f0, f1, f1, -f0]), rtol=0, atol=error)
    gy = torch.stack([0 * ones, 0 * ones, 0 * ones, ones])  # of y_12, whose gradient is -f1
    gx = torch.ops.jachess.activation_jet_backward(gy, jet, kind, 2)
    torch.testing.assert_close(gx[0].double(), -f1, rtol=0, atol=error)
    jet[0, 0] = torch.inf
    y = ops.activation_jet(jet, kind, 2)
    assert y[:, 0].isnan().all()
    assert y[:, 1:].isfinite().all()


def _softplus(x: Tensor) -> list[Tensor]:
    s, rest, line = x.sigmoid(), (-x).sigmoid(), x > 20  # as torch has it
    bent = [s * rest, s * rest * (rest - s)]
    value, slope = torch.where(line, x, x.exp().log1p()), torch.where(line, 1, s)
    return [value, slope, *(part.masked_fill(line, 0) for part in bent)]


def _elu(x: Tensor) -> list[Tensor]:
    e = x.clamp(max=0).exp()
    bent = e.masked_fill(x > 0, 0)
    return [torch.where(x > 0, x, x.clamp(max=0).expm1()), e, bent, bent]


EDGES = {
    "softplus": (_softplus, [-700.0, -30.0, -3.0, 19.999, 20.0, 20.001, 25.0, 500.0]),
    "elu": (_elu, [-700.0, -30.0, -1e-300, -0.0, 0.0, 1e-300, 5.0]),
    "exp": (lambda x: [x.exp()] * 4, [-745.0, -700.0, -30.0, 0.0, 100.0, 700.0, 709.7]),
}


@pytest.mark.parametrize("kind", EDGES)
def test_edges(kind: str) -> None:
    """Where a kind changes its formula, and far out: each derivative to the last places."""
    formula, points = EDGES[kind]
    x = torch.tensor(points, dtype=torch.float64)
    f0, f1, f2, f3 = formula(x)
    ones = torch.ones_like(x)
    jet = torch.stack([x, ones, ones, 0 * ones])
    y = ops.activation_jet(jet, kind, 2)
    torch.testing.assert_close(y, torch.stack([f0, f1, f1, f2]), rtol=1e-13, atol=1e-320)
    gy = torch.stack([0 * ones, 0 * ones, 0 * ones, ones])  # of y_12, whose gradient is f3
    gx = torch.ops.jachess.activation_jet_backward(gy, jet, kind, 2)
    torch.testing.assert_close(gx, torch.stack([f3, f2, f2, f1]), rtol=1e-13, atol=1e-320)


def test_sixteen_bit_rounding_is_torchs() -> None:
    """relu's primal is x itself: every finite half and bfloat16 comes back bit for bit."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = bits.view(dtype)
        x = x[torch.isfinite(x) & (x >= 0)]
        y = ops.activation_jet(torch.stack([x, x]), "relu", 1)
        assert torch.equal(y[0], x)
        # and the product is rounded to nearest even from fp32, subnormals and overflow included
        silu = ops.activation_jet(torch.stack([-x, x]), "silu", 1)
        exact = ops.activation_jet(torch.stack([-x.float(), x.float()]), "silu", 1)
        assert torch.equal(silu, exact.to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 300])
def test_halves_of_one_tensor(device: str, dtype: torch.dtype, width: int) -> None:
    """What a fused gate-and-up projection gives; bit for bit what dense copies give."""
    both = random_jet(4, 3, 2, 2 * width, dtype=dtype, device=device)
    gy = random_jet(4, 3, 2, width, dtype=dtype, device=device, seed=1)
    g, u = both.chunk(2, -1)
    dense = [g.contiguous(), u.contiguous()]
    for left, right in ((g, u), (dense[0], u), (g, dense[1])):
        _check_against_dense(left, right, gy)


def test_opcheck_of_strided_jets() -> None:
    halves = random_jet(4, 3, 10).requires_grad_().chunk(2, -1)
    torch.library.opcheck(torch.ops.jachess.gated_activation_jet, (*halves, "silu", 2))
    x = random_jet(4, 3, 5).requires_grad_().transpose(1, 2)
    torch.library.opcheck(torch.ops.jachess.activation_jet, (x, "silu", 2))
    torch.library.opcheck(torch.ops.jachess.activation_jet_backward, (x, x, "silu", 2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_of_gates(device: str, dtype: torch.dtype) -> None:
    x = random_jet(8, 6, 7, 6, dtype=dtype, device=device)
    for g in (
        x[:4].transpose(2, 3),
        x[:4, ::2],
        x[:4, :, ::2],
        x[:4, :, :, ::2],
        x[:4, :1].expand(4, 6, 7, 6),
        x[:4, :, :1].expand(4, 6, 7, 6),
        x[:4, 0, :, :1],
        x[:4, 0, 0, 0],
        x[:4, 0, 0, ::3],
    ):
        _check_against_dense(g, g.flip(0), g.contiguous().flip(0))
        _check_against_dense(g.contiguous(), g, g.contiguous())


def _check_against_dense(g: Tensor, u: Tensor, gy: Tensor) -> None:
    dense = (g.contiguous(), u.contiguous())
    got = ops.gated_activation_jet(g, u, "silu", 2)
    assert got.is_contiguous()
    assert torch.equal(got, ops.gated_activation_jet(*dense, "silu", 2))
    backward = torch.ops.jachess.gated_activation_jet_backward
    pairs = zip(backward(gy, g, u, "silu", 2), backward(gy, *dense, "silu", 2), strict=True)
    for a, b in pairs:
        assert a.is_contiguous()
        assert torch.equal(a, b)
