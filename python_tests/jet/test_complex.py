"""Through complex numbers and back: right, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import jachess_ext as jx
from jachess_ext.jet.engine import complex_rules
from jachess_ext.jet.engine.errors import MissingJetRule, last_name
from jachess_ext.jet.engine.registry import registered_functions

from ..models import oracles
from .calls import Call, make_call
from .queries import QUERIES
from .rule_table import Row, is_complex
from .test_rules import ONE_OF_EACH_RULE

STEP = 3e-4
QUESTIONS = {function for query in QUERIES for function in query.functions()}


def _as_complex(x: Any) -> Any:
    return torch.view_as_complex(x.reshape(-1, 2))


def _complex_call(function: Any, row: Row) -> Call:
    call = make_call(function, row, torch.complex128)
    for key, value in call.constants.items():
        noise = torch.randn(value.shape, dtype=torch.float64)
        call.constants[key] = torch.complex(value.real, noise)
    return call


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        return [real] if real.is_floating_point() else []
    if isinstance(value, list | tuple) or hasattr(value, "__next__"):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def check(function: Any, x: Tensor) -> None:
    """Both orders and a gradient of a function of a real vector, against central differences."""
    torch.manual_seed(1)
    directions = torch.randn(2, len(x), dtype=torch.float64)

    def bent(y: Any) -> list:  # second streams of its own, from the square
        found = _tensors(function(y + (y - x).square() / 3))
        return [tensor.masked_fill(tensor == -torch.inf, 0) for tensor in found]

    jets = jx.jet(bent, x, directions)
    assert jets
    differences = oracles.jet_differences(bent, x, directions, STEP)
    for jet, primal, right in zip(jets, bent(x), differences, strict=True):
        torch.testing.assert_close(jet.primal, primal, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(jet.first, right.first, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(jet.second, right.pairs, rtol=1e-6, atol=1e-6)

    def penalty(point: Tensor) -> Tensor:
        found = [jet.streams for jet in jx.jet(bent, point, directions)]
        return sum((streams * streams.sin()).sum() for streams in found)

    point = x.clone().requires_grad_()
    value = penalty(point)
    u, h = directions[0], 1e-5
    with torch.no_grad():
        expected = (penalty(x + h * u) - penalty(x - h * u)) / (2 * h)
    gradient = torch.zeros_like(x)
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value, point)
    torch.testing.assert_close((gradient * u).sum(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function, row", ONE_OF_EACH_RULE)
def test_every_rule_is_right_or_refuses(function: Any, row: Row) -> None:
    """Of complex points, and of real points beside complex constants."""
    call = _complex_call(function, row)
    x = torch.view_as_real(call.x).flatten()
    x[1::2] = torch.randn(len(x) // 2, dtype=torch.float64)
    if not _is_right(lambda x: call.raw(_as_complex(x)), x):
        assert not complex_rules.takes_complex(function), "it is said to be covered"
    if call.constants:
        constants = _complex_call(function, row)
        constants.x = constants.x.real
        _is_right(constants.raw, constants.x.clone())


def _is_right(function: Any, x: Tensor) -> bool:
    """Check derivatives where torch computes outputs; False where `jx.jet` has no rule."""
    try:
        outputs = _tensors(function(x))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return True  # nor does torch take complex numbers there
    try:
        if outputs:
            check(function, x)
    except MissingJetRule:
        return False
    return True


FUNCTIONS = {
    "rotary": lambda x: torch.view_as_real(
        _as_complex(x) * torch.polar(torch.ones(4), torch.arange(4.0)).to(torch.complex128)
    ),
    "to": lambda x: (x.reshape(2, 4).to(torch.complex128) * (1 + 2j)).real.sin(),
    "cdouble": lambda x: (x.cdouble() * (1 - 2j)).imag * x,
    "matmul of two": lambda x: torch.bmm(
        _as_complex(x).reshape(1, 2, 2), _as_complex(x.sin()).reshape(1, 2, 2)
    ),
    "matmul": lambda x: _as_complex(x).reshape(2, 2) @ (torch.ones(2, 2) + 1j).to(torch.complex128),
    "complex": lambda x: torch.real(torch.complex(x[:4], x[4:]) ** 2).real,
    "complex of a constant": lambda x: torch.complex(x, torch.ones(8).double()) ** 2,
    "polar": lambda x: torch.polar(x[:4], x[4:]).exp(),
    "abs": lambda x: _as_complex(x).abs(),
    "real part of a square": lambda x: (_as_complex(x) * _as_complex(x).conj()).real,
    "modulus by mH": lambda x: _as_complex(x).reshape(2, 2).mH @ _as_complex(x).reshape(2, 2),
    "H": lambda x: _as_complex(x).reshape(2, 2).H * _as_complex(x).reshape(2, 2),
    "adjoint": lambda x: torch.adjoint(_as_complex(x).reshape(2, 2)),
    "imag": lambda x: torch.imag(_as_complex(x).conj()).exp(),
    "resolved": lambda x: _as_complex(x).conj().resolve_conj().resolve_neg().conj_physical(),
    "fnet": lambda x: torch.fft.fftn(x.reshape(1, 2, 4), dim=(1, 2)).real,
    "spectrum": lambda x: torch.fft.irfft(torch.fft.rfft(x.reshape(2, 4), norm="ortho") ** 2, 4),
    "two dimensions": lambda x: torch.fft.ifft2(torch.fft.fft2(x.reshape(1, 2, 4)) ** 2),
    "all dimensions": lambda x: torch.fft.fftshift(torch.fft.rfftn(x.reshape(2, 4))) ** 2,
    "sizes": lambda x: torch.fft.ifftshift(torch.fft.fftn(x.reshape(2, 2, 2), (3, 3)), dim=-1) ** 2,
    "real plane": lambda x: torch.fft.irfft2(torch.fft.rfft2(x.reshape(1, 2, 4)) ** 2),
    "real space": lambda x: torch.fft.irfftn(torch.fft.ifftn(x.reshape(1, 2, 4)) ** 2),
    "inverse": lambda x: torch.fft.ifft(torch.fft.fft(x.reshape(2, 4)) ** 2, dim=0),
    "hfft": lambda x: torch.fft.hfft(_as_complex(x), 5) ** 2,
    "hfft2": lambda x: torch.fft.ihfft2(torch.fft.hfft2(_as_complex(x).reshape(2, 2))) ** 2,
    "hfftn": lambda x: torch.fft.ihfftn(torch.fft.hfftn(_as_complex(x).reshape(2, 2))) ** 2,
    "casts": lambda x: torch.complex(x, x).cdouble().to(torch.complex128).absolute(),
    "angle": lambda x: torch.angle(_as_complex(x)),
    "angle of a square": lambda x: (_as_complex(x) ** 2).angle(),
    "det": lambda x: torch.linalg.det(_as_complex(x).reshape(2, 2)),
    "det of one": lambda x: _as_complex(x).reshape(4, 1, 1).det(),
    "sign of slogdet": lambda x: torch.linalg.slogdet(_as_complex(x).reshape(2, 2))[0],
    "size of slogdet": lambda x: _as_complex(x).reshape(2, 2).slogdet()[1],
    "logdet": lambda x: _as_complex(x).reshape(2, 2).logdet(),
    "ihfft": lambda x: torch.fft.ihfft(x.reshape(2, 4), dim=0) ** 2,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_there_and_back(name: str) -> None:
    check(FUNCTIONS[name], torch.randn(8, generator=torch.Generator().manual_seed(0)).double())


@pytest.mark.parametrize(
    "function",
    [
        lambda z: torch.linalg.vector_norm(z),
        lambda z: z.norm(),
        lambda z: F.normalize(z, dim=0),
        lambda z: z.var(),
        lambda z: z.std(),
        lambda z: F.silu(z),
        lambda z: torch.linalg.norm(z),
    ],
)
def test_what_is_no_function_of_z_squared_is_refused(function: Any) -> None:
    x, u = torch.randn(8).double(), torch.randn(1, 8).double()
    with pytest.raises(MissingJetRule, match="complex numbers"):
        jx.jet(lambda x: function(_as_complex(x)), x, u)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jvp_with_a_tangent_as_a_target(name: str) -> None:
    x, u = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).double()
    torch.manual_seed(0)
    function = FUNCTIONS[name]
    output, tangent = jx.jvp(function, (x.requires_grad_(),), (u,), differentiable=False)
    assert torch.equal(output, function(x))
    expected = oracles.differences_along(lambda x: (function(x),), x.detach(), u, STEP)[0]
    torch.testing.assert_close([tangent], expected, rtol=1e-8, atol=1e-8)


class _Met(TorchFunctionMode):
    """Which functions are called."""

    def __init__(self) -> None:
        self.functions: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.add(func)
        return func(*args, **(kwargs or {}))


def test_every_function_of_complex_numbers_is_tried() -> None:
    x = torch.randn(8).double()
    with _Met() as met:
        for function in FUNCTIONS.values():
            function(x)
    names = {last_name(function) for function in met.functions}
    tried = names | {"cfloat"}
    assert not {last_name(f) for f in registered_functions() if is_complex(f)} - tried


def test_a_cast_to_single_precision() -> None:
    x, *u = torch.tensor([[0.5, 1.0, -2.0], [1.0, 2.0, 0.5], [3.0, -1.0, 1.0]]).double()
    x.requires_grad_()
    jet = jx.jet(lambda x: torch.complex(x, x * x).cfloat(), x, torch.stack(u))
    expected = [x + 1j * x * x, *(v + 2j * x * v for v in u), 2j * u[0] * u[1]]
    assert torch.equal(jet.streams, torch.stack(expected).to(torch.complex64))
    (gradient,) = torch.autograd.grad(jet.primal.imag.sum(), x)
    assert torch.equal(gradient, (2 * x).detach())


def test_a_complex_constant_has_zero_derivatives() -> None:
    x, z = torch.randn(3), torch.ones(2) * 1j
    jet = jx.jet(lambda x: z, x, torch.randn(1, 3))
    assert torch.equal(jet.primal, z) and not jet.first.any()


@pytest.mark.parametrize("differentiable", [True, False])
def test_complex_primals(differentiable: bool) -> None:
    z, t = torch.randn(2, 3, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))

    def amplitude(z: Tensor, x: Tensor) -> Tensor:
        return torch.logsumexp(z @ z.mH + x * z.sinh(), -1) * z.abs().sum(-1)

    given = (z.requires_grad_(), t.real), (t, t.imag)
    output, tangent = jx.jvp(amplitude, *given, differentiable=differentiable)
    expected = torch.func.jvp(amplitude, *given)
    torch.testing.assert_close((output, tangent), expected, rtol=1e-12, atol=1e-12)
    (found,) = torch.autograd.grad((tangent * output).abs().sum(), z)
    other = expected[1] if differentiable else expected[1].detach()
    (wanted,) = torch.autograd.grad((other * expected[0]).abs().sum(), z)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_hessian_of_complex_primals() -> None:
    z, t = torch.randn(2, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))

    def energy(z: Tensor) -> Tensor:
        return (z.sin() * z.conj().exp()).real.sum()

    x, v = torch.view_as_real(z), torch.view_as_real(t)
    of_reals = lambda x: energy(torch.view_as_complex(x))  # noqa: E731
    found = [torch.view_as_real(part) for (part,) in jx.hvp(energy, (z,), (t,))[1:]]
    wanted = torch.func.jvp(torch.func.grad(of_reals), (x,), (v,))
    torch.testing.assert_close(tuple(found), wanted, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match="view_as_real"):
        jx.laplacian(torch.sin, torch.ones(2, 3, dtype=torch.complex64))


def test_the_laplacian_of_a_complex_amplitude() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def amplitude(x: Tensor) -> Tensor:
        return torch.polar((-x.square().sum(-1)).exp(), x.sin().sum(-1))

    parts = torch.func.vmap(torch.func.hessian(lambda x: torch.view_as_real(amplitude(x))))(x)
    wanted = torch.view_as_complex(parts.diagonal(dim1=-2, dim2=-1).sum(-1))
    torch.testing.assert_close(jx.laplacian(amplitude, x)[2], wanted, rtol=1e-12, atol=1e-12)


def test_a_real_jet_to_a_complex_power() -> None:
    x, u = torch.tensor([0.5, 2.0], dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)
    jets = [jx.jet(f, x, u).streams for f in (lambda x: x**2j, lambda x: (x + 0j) ** 2j)]
    torch.testing.assert_close(*jets)
