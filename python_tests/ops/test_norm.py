"""`jachess::layer_norm_jet` and `jachess::rms_norm_jet` against finite differences, their
references, and autograd's own checks; the residual forms are in test_add_norm.py."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jachess_ext import ops
from python_tests.ops.cases import (
    DEVICES,
    STREAMS,
    dtype_bounds,
    jet_by_differences,
    random_jet,
    relative_error,
)

EPS = 1e-5


@dataclass(frozen=True)
class Norm:
    """One of the two: layer norm has a bias, and saves the mean too."""

    name: str

    @property
    def parameters(self) -> int:
        return 2 if self.name == "layer_norm" else 1

    def call(self, x: Tensor, *rest: Any) -> Tensor:
        return getattr(ops, f"{self.name}_jet")(x, *self.padded(*rest))

    def reference(self, x: Tensor, *rest: Any) -> Tensor:
        return getattr(ops, f"{self.name}_jet_reference")(x, *self.padded(*rest))

    def compiled(self, x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        """The operator itself: y, the sum and the statistics."""
        return getattr(torch.ops.jachess, f"{self.name}_jet")(x, residual, *self.padded(*rest))

    @property
    def backward(self) -> Any:
        return getattr(torch.ops.jachess, f"{self.name}_jet_backward")

    def padded(self, *rest: Any) -> list[Any]:
        """Parameters, eps and q, with None for the parameters that are missing."""
        *given, eps, q = rest
        return [*given, *[None] * (self.parameters - len(given)), eps, q]

    def of_torch(self, x: Tensor, *given: Tensor) -> Tensor:
        return getattr(F, self.name)(x, x.shape[-1:], *given, eps=EPS)

    def scales(
        self, n: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
    ) -> list[Tensor]:
        """A weight, and layer norm's bias, [n]."""
        both = random_jet(2, n, dtype=dtype, device=device, seed=7)
        return list(both.unbind(0))[: self.parameters]


@pytest.fixture(params=["layer_norm", "rms_norm"])
def norm(request: pytest.FixtureRequest) -> Norm:
    return Norm(request.param)


def test_is_available(norm: Norm) -> None:
    assert ops.available(f"{norm.name}_jet", "cpu")
    assert ops.available(f"{norm.name}_jet_backward", "cpu")


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("q", "streams"), STREAMS)
def test_agrees_with_finite_differences(norm: Norm, q: int, streams: int, affine: bool) -> None:
    x, given = random_jet(streams, 5, 19), norm.scales(19) if affine else []
    expected = jet_by_differences(lambda x: norm.of_torch(x, *given), x, q)
    assert relative_error(norm.compiled(x, None, *given, EPS, q)[0], expected) < 1e-7
    assert relative_error(norm.reference(x, *given, EPS, q), expected) < 1e-7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels", [1, 8, 19, 384])
@pytest.mark.parametrize(("q", "streams"), STREAMS)
@pytest.mark.parametrize(("dtype", "bound"), dtype_bounds(1e-11))
def test_agrees_with_the_reference(
    norm: Norm, device: str, channels: int, q: int, streams: int, dtype: torch.dtype, bound: float
) -> None:
    """Forward and all gradients against it in float64; 16-bit x meets an fp32 weight."""
    # one channel: no variance, or y is ±1, and eps alone leaves derivatives
    eps = 1.0 if channels == 1 else EPS
    wide_type = torch.float64 if dtype == torch.float64 else torch.float32
    x = random_jet(streams, 2, 21, channels, dtype=dtype, device=device).requires_grad_()
    gy = random_jet(streams, 2, 21, channels, dtype=dtype, device=device, seed=1)
    leaves = [x, *(p.requires_grad_() for p in norm.scales(channels, wide_type, device))]
    y = norm.call(*leaves, eps, q)
    assert y.dtype == dtype
    got = torch.autograd.grad(y, leaves, gy)
    assert [g.dtype for g in got] == [dtype, *[wide_type] * norm.parameters]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected_y = norm.reference(*wide, eps, q)
    expected = torch.autograd.grad(expected_y, wide, gy.double())
    assert relative_error(y, expected_y) < bound
    assert relative_error(got[0], expected[0]) < bound
    for g, e in zip(got[1:], expected[1:], strict=True):
        assert relative_error(g[None], e[None]) < bound


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weight_may_have_any_dtype(norm: Norm, dtype: torch.dtype) -> None:
    """The same numbers as the parameters widened, and their gradients in their own dtype."""
    x = random_jet(4, 3, 9, dtype=torch.float32)
    given = [p.requires_grad_() for p in norm.scales(9, dtype)]
    y = norm.call(x, *given, EPS, 2)
    assert torch.equal(y, norm.call(x, *(p.detach().float() for p in given), EPS, 2))
    assert all(g.dtype == dtype for g in torch.autograd.grad(y.square().sum(), given))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("q", "streams"), STREAMS)
def test_gradients(norm: Norm, q: int, streams: int, affine: bool) -> None:
    leaves = [random_jet(streams, 2, 3), *(norm.scales(3) if affine else [])]
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def f(*leaves: Tensor) -> Tensor:
        return norm.call(*leaves, 0.3, q)

    assert torch.autograd.gradcheck(f, leaves, fast_mode=streams > 5)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=streams > 5)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_gradient_of_one_input_alone(norm: Norm, wanted: int) -> None:
    inputs = [random_jet(4, 3, 9), *norm.scales(9)]
    leaf = inputs[min(wanted, norm.parameters)].requires_grad_()
    (got,) = torch.autograd.grad(norm.call(*inputs, EPS, 2).square().sum(), leaf)
    expected = norm.reference(*inputs, EPS, 2).square().sum()
    torch.testing.assert_close(got, torch.autograd.grad(expected, leaf)[0])


def test_saved_statistics_are_jets(norm: Norm) -> None:
    """The operator's further outputs, by finite differences; and no gradient may leave by them."""
    x = random_jet(4, 5, 19).requires_grad_()
    y, total, *means, rstd = norm.compiled(x, None, EPS, 2)
    assert y.requires_grad
    assert total.shape == (0,)
    assert not any(t.requires_grad for t in (total, *means, rstd))

    def inverse(x: Tensor) -> Tensor:
        square = x.var(-1, correction=0) if norm.name == "layer_norm" else x.square().mean(-1)
        return (square + EPS).rsqrt()

    assert relative_error(rstd, jet_by_differences(inverse, x.detach(), 2)) < 1e-7
    assert len(means) == norm.parameters - 1
    for mean in means:
        torch.testing.assert_close(mean, x.detach().mean(-1))


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1.0, 1e4, 1e9])
def test_keeps_its_accuracy_at_any_scale(norm: Norm, scale: float) -> None:
    """No power of the variance or of the mean square may overflow or vanish in fp32."""
    x = (random_jet(4, 3, 40) * scale).float().requires_grad_()
    gy = random_jet(4, 3, 40, seed=1).float()
    eps = 1e-30 if scale < 1e-6 else 1e-12
    (got,) = torch.autograd.grad(norm.call(x, eps, 2), x, gy)
    wide = x.detach().double().requires_grad_()
    y = norm.reference(wide, eps, 2)
    (expected,) = torch.autograd.grad(y, wide, gy.double())
    assert relative_error(norm.call(x, eps, 2), y) < 1e-5
    assert relative_error(got / got.abs().max(), expected / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_weight_gradients_are_the_same_run_to_run(norm: Norm, device: str) -> None:
    """Bit for bit, and on the CPU whatever the number of threads."""
    x = random_jet(4, 301, 64, dtype=torch.float32, device=device).requires_grad_()
    gy = random_jet(4, 301, 64, dtype=torch.float32, device=device, seed=1)
    leaves = [x, *(p.requires_grad_() for p in norm.scales(64, torch.float32, device))]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            results.append(torch.autograd.grad(norm.call(*leaves, EPS, 2), leaves, gy))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_strides_and_empty(norm: Norm, device: str, dtype: torch.dtype) -> None:
    x = random_jet(8, 6, 6, dtype=dtype, device=device)
    weight, *bias = norm.scales(12, dtype, device)
    weight, bias = weight[::2], [b[:6] for b in bias]
    for view in (x[::2], x[:4].transpose(1, 2), x[:1].expand(4, 6, 6)):
        got = norm.call(view, weight, *bias, EPS, 2)
        dense = norm.call(view.contiguous(), weight.contiguous(), *bias, EPS, 2)
        assert torch.equal(got, dense)
    for shape in ((0, 6), (3, 0)):
        leaves = [random_jet(4, *shape, dtype=dtype, device=device).requires_grad_()]
        leaves += [p.requires_grad_() for p in norm.scales(shape[-1], dtype, device)]
        y = norm.call(*leaves, EPS, 2)
        assert y.shape == (4, *shape)
        for leaf, grad in zip(leaves, torch.autograd.grad(y.sum(), leaves), strict=True):
            assert grad.shape == leaf.shape
            assert not grad.any()


def test_nan_stays_in_its_row(norm: Norm) -> None:
    x = random_jet(4, 3, 16, dtype=torch.float32)
    x[0, 1, 5] = float("nan")
    y = norm.call(x, EPS, 2)
    assert torch.isnan(y[:, 1]).all()
    assert torch.isfinite(y[:, [0, 2]]).all()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.ones(4), EPS, 2), ValueError, "normalised dimension last"),
        ((torch.ones(5, 3), EPS, 2), ValueError, "expects 3 .* or 4"),
        ((torch.ones(4, 3), EPS, 7), ValueError, "expected 1 to 4"),
        ((torch.ones(4, 3).int(), EPS, 2), TypeError, "loat|Double"),
        ((torch.ones(4, 3), torch.ones(2), EPS, 2), ValueError, r"expected \[3\]"),
        ((torch.ones(4, 3), torch.ones(3).int(), EPS, 2), TypeError, "weight has dtype"),
        ((torch.ones(4, 3), torch.ones(3, device="meta"), EPS, 2), ValueError, "move it with"),
    ],
)
def test_bad_arguments_get_one_sentence(
    norm: Norm, arguments: tuple, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        norm.call(*arguments)
    if not getattr(arguments[1], "is_meta", False):
        with pytest.raises(RuntimeError, match=words):
            norm.compiled(arguments[0], None, *arguments[1:])


def test_a_bad_bias_gets_one_sentence() -> None:
    arguments = (torch.ones(4, 3), None, torch.ones(3, 1), EPS, 2)
    with pytest.raises(ValueError, match=r"expected \[3\]"):
        ops.layer_norm_jet(*arguments)
    with pytest.raises(RuntimeError, match=r"expected \[3\]"):
        torch.ops.jachess.layer_norm_jet(arguments[0], None, *arguments[1:])


def test_backward_refuses_what_does_not_fit_x(norm: Norm) -> None:
    x = torch.ones(4, 2, 3)
    _, _, *statistics = norm.compiled(x, None, EPS, 2)
    with pytest.raises(RuntimeError, match=r"gy is .* expected what x is"):
        norm.backward(torch.ones(4, 2, 2), None, x, None, EPS, 2, *statistics, False)
    with pytest.raises(RuntimeError, match=r"gsum is .* expected what x is"):
        norm.backward(x, torch.ones(4, 2, 2), x, None, EPS, 2, *statistics, False)
    for place, wrong in enumerate(statistics):
        for bad in (wrong.double(), wrong[:, :1]):
            given = [*statistics[:place], bad, *statistics[place + 1 :]]
            with pytest.raises(RuntimeError, match=f"expected what {norm.name}_jet returned"):
                norm.backward(x, None, x, None, EPS, 2, *given, False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(norm: Norm, device: str, dtype: torch.dtype) -> None:
    x = random_jet(4, 3, 5, dtype=dtype, device=device).requires_grad_()
    residual = random_jet(4, 3, 5, dtype=dtype, device=device, seed=2).requires_grad_()
    gy = random_jet(4, 3, 5, dtype=dtype, device=device, seed=1)
    weight, *bias = (p.requires_grad_() for p in norm.scales(5, torch.float32, device))
    added, need_weight = (residual, False) if dtype == torch.bfloat16 else (None, True)
    forward = getattr(torch.ops.jachess, f"{norm.name}_jet")
    torch.library.opcheck(forward, (x, added, weight, *bias, EPS, 2))
    _, _, *statistics = forward(x.detach(), None, weight, *bias, EPS, 2)
    torch.library.opcheck(norm.backward, (gy, added, x, weight, EPS, 2, *statistics, need_weight))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_to_one_graph(norm: Norm, device: str) -> None:
    wrapper = getattr(ops, f"{norm.name}_jet")

    def loss(x: Tensor, *given: Tensor) -> Tensor:
        return wrapper(2 * x, *given, EPS, 2).square().sum()

    leaves = [random_jet(4, 8, 16, dtype=torch.float32, device=device).requires_grad_()]
    leaves += [p.requires_grad_() for p in norm.scales(16, torch.float32, device)]
    eager = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
