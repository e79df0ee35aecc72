"""`jachess::layer_norm_jet` and `jachess::rms_norm_jet`, alone and of a sum with a residual."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jachess_ext import ops
from python_tests.ops.cases import (
    DEVICES,
    DTYPES,
    dtype_bounds,
    jet_by_differences,
    opcheck_backward,
    random_jet,
    relative_error,
    same_for_any_threads,
)
from python_tests.ops.operator_tests import Case, OperatorTests

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

    def add(self, x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return getattr(ops, f"add_{self.name}_jet")(x, residual, *self.padded(*rest))

    def compiled(self, x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        """The operator itself: y, the sum and the statistics."""
        return getattr(torch.ops.jachess, f"{self.name}_jet")(x, residual, *self.padded(*rest))

    @property
    def backward(self) -> Any:
        return getattr(torch.ops.jachess, f"{self.name}_jet_backward")

    def padded(self, *rest: Any) -> list[Any]:
        """Parameters, then numbers, with None for the parameters that are missing."""
        given, numbers = list(rest), []
        while given and not isinstance(given[-1], Tensor | None):
            numbers.insert(0, given.pop())
        return [*given, *[None] * (self.parameters - len(given)), *numbers]

    def of_torch(self, x: Tensor, *given: Tensor) -> Tensor:
        return getattr(F, self.name)(x, x.shape[-1:], *given, eps=EPS)

    def scales(
        self, n: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
    ) -> list[Tensor]:
        """A weight, and layer norm's bias, [n]."""
        both = random_jet(2, n, dtype=dtype, device=device, seed=7)
        return list(both.unbind(0))[: self.parameters]

    def case(self, add: bool, affine: bool) -> Case:
        def leaves(
            streams: int, *shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
        ) -> list[Tensor]:
            """16-bit jets meet fp32 parameters; their sums with a residual are exact."""
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            jets = [random_jet(streams, *shape, seed=seed) for seed in ((0, 5) if add else (0,))]
            if add:
                jets = [(8 * x).round().clamp(-32, 32) / 8 for x in jets]
            scales = self.scales(shape[-1], wide, device) if affine else []
            return [*(x.to(device, dtype) for x in jets), *scales]

        def operator(q: int, *given: Tensor) -> tuple[Any, ...]:
            x, residual, *scales = given if add else (given[0], None, *given[1:])
            return (x, residual, *self.padded(*scales, EPS, q))

        def of_torch(*given: Tensor) -> Tensor:
            jets = 1 + add
            return self.of_torch(sum(given[:jets], torch.zeros(())), *given[jets:])

        return Case(
            name=f"add_{self.name}_jet" if add else f"{self.name}_jet",
            leaves=leaves,
            of_torch=of_torch,
            shapes=[(2, 21, channels) for channels in ((8, 19, 100) if add else (1, 19, 384))],
            bounds=dict(dtype_bounds(1e-11)),
            operator=operator,
            # one channel: no variance, or y is ±1, and eps alone leaves derivatives
            settings=lambda x: {"eps": 1.0 if x.shape[-1] == 1 else EPS},
            fast_gradients=add,
            # one operator: with a residual and parameters, and with neither
            registration={(True, True): [torch.float32], (False, False): [torch.bfloat16]}.get(
                (add, affine), []
            ),
        )


NORMS = {name: Norm(name) for name in ("layer_norm", "rms_norm")}
CASES = {
    f"{'add ' if add else ''}{name}{'' if affine else ' without parameters'}": norm.case(
        add, affine
    )
    for name, norm in NORMS.items()
    for add, affine in ((False, False), (True, True))
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(params=NORMS)
def norm(request: pytest.FixtureRequest) -> Norm:
    return NORMS[request.param]


class TestNorms(OperatorTests):
    pass


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_may_have_any_dtype(norm: Norm, dtype: torch.dtype) -> None:
    """The same numbers as the parameters widened, and their gradients in their own dtype."""
    x = random_jet(4, 3, 9, dtype=torch.float32)
    given = [p.requires_grad_() for p in norm.scales(9, dtype)]
    y = norm.call(x, *given, EPS, 2)
    assert torch.equal(y, norm.call(x, *(p.detach().float() for p in given), EPS, 2))
    assert all(g.dtype == dtype for g in torch.autograd.grad(y.square().sum(), given))


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


def test_nan_stays_in_its_row(norm: Norm) -> None:
    x = random_jet(4, 3, 16, dtype=torch.float32)
    x[0, 1, 5] = float("nan")
    y = norm.call(x, EPS, 2)
    assert torch.isnan(y[:, 1]).all()
    assert torch.isfinite(y[:, [0, 2]]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q", "summed"), [(1, 0), (2, 0), (5, 0), (1, 1), (4, 2)])
def test_a_row_whose_squares_overflow(norm: Norm, q: int, summed: int, dtype: torch.dtype) -> None:
    """As torch's: of layer norm NaN, with its gradient, and of RMS norm 0, as the reference's."""
    x = random_jet(1 + q + (summed > 0), 3, 16, dtype=dtype)
    x[0, 1] *= {torch.float64: 1e200, torch.float16: torch.inf}.get(dtype, 1e25)
    x.requires_grad_()
    own = norm.of_torch(x[0].detach())
    assert own[1].isnan().all() or norm.name == "rms_norm"
    for call in (norm.call, norm.reference):
        y = call(x, EPS, q, summed)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(y[0], own, equal_nan=True)
        assert torch.isfinite(y[:, [0, 2]]).all() and torch.isfinite(gradient[:, [0, 2]]).all()
        if norm.name == "layer_norm":
            assert y[:, 1].isnan().all() and gradient[0, 1].isnan().all()


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


# ---- rows with parameters of their own, and sums of squares -------------------------------------

Q_AND_SUMMED = [(1, 0), (2, 0), (3, 0), (5, 0), (1, 1), (4, 2), (6, 6)]


def group_leaves(norm: Norm, streams: int, *shape: int, positions: int = 1) -> list[Tensor]:
    """A jet [streams, *shape], and parameters of the shape's last two dimensions, with an entry for
    each ``positions`` elements of a row."""
    scales = random_jet(2, shape[-2], shape[-1] // positions, seed=7)[: norm.parameters]
    return [t.requires_grad_() for t in (random_jet(streams, *shape), *scales)]


def test_group_norm_by_differences() -> None:
    """Groups of channels are rows with parameters of their own."""
    x, weight, bias = random_jet(4, 2, 6, 7), *random_jet(2, 6, seed=7)

    def of_torch(x: Tensor) -> Tensor:
        return F.group_norm(x, 3, weight, bias, EPS)

    scales = weight.view(3, 2), bias.view(3, 2)
    y = ops.layer_norm_jet(x.view(4, 2, 3, 14), *scales, EPS, 2).view(x.shape)
    assert relative_error(y, jet_by_differences(of_torch, x, 2)) < 1e-7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "positions"),
    [
        *(((2, 3, 7), 1), ((1, 1, 40), 1), ((19, 2, 5), 1), ((3, 70, 3), 1), ((2, 0, 3), 1)),
        *(((2, 3, 7), 7), ((1, 1, 40), 4), ((19, 2, 6), 3), ((1, 2, 2100), 1050), ((0, 2, 6), 3)),
    ],
)
@pytest.mark.parametrize(("q", "summed"), Q_AND_SUMMED)
def test_rows_with_parameters_of_their_own(
    norm: Norm, q: int, summed: int, shape: tuple[int, ...], positions: int, device: str
) -> None:
    """Results and gradients of all, against the reference and run to run."""
    made = group_leaves(norm, 1 + q + (summed > 0), *shape, positions=positions)
    leaves = [x.detach().to(device).requires_grad_() for x in made]

    def results(call: Any) -> list[Tensor]:
        y = call(*leaves, EPS, q, summed)
        return [y, *torch.autograd.grad(y, leaves, random_jet(*y.shape, seed=1).to(y))]

    own, reference = (getattr(ops, f"{norm.name}_jet{end}") for end in ("", "_reference"))
    got = results(own)
    for ours, theirs in zip(got, results(reference), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert same_for_any_threads(lambda: results(own))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("q", "summed"), Q_AND_SUMMED)
def test_gradients_of_sums(norm: Norm, q: int, summed: int, add: bool, apart: bool) -> None:
    """First and second, of jets and parameters."""
    leaves = group_leaves(norm, 1 + q + (summed > 0), 2, 2, 4, positions=2 if apart else 1)
    if not apart:
        leaves[1:] = [p.detach()[0].requires_grad_() for p in leaves[1:]]
    if add:
        leaves[1:1] = [random_jet(*leaves[0].shape, seed=5).requires_grad_()]
    function = norm.add if add else norm.call

    def f(*leaves: Tensor) -> Any:
        return function(*leaves, 0.3, q, summed)

    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)


@pytest.mark.parametrize("need_weight", [False, True])
def test_opcheck_of_sums(norm: Norm, need_weight: bool) -> None:
    """Forward and backward, of rows with parameters of their own."""
    x, *scales = group_leaves(norm, 5, 2, 2, 4, positions=2)
    if not need_weight:
        scales = [p.detach() for p in scales]
    forward = getattr(torch.ops.jachess, f"{norm.name}_jet")
    torch.library.opcheck(forward, (x, None, *scales, EPS, 3, 2))
    with torch.no_grad():
        _, _, *saved = forward(x, None, *scales, EPS, 3, 2)
    arguments = (x.detach(), None, x, scales[0], EPS, 3, *saved, need_weight, 2)
    opcheck_backward(norm.backward, arguments, traced=False)


# ---- with a residual ---------------------------------------------------------------------------


def residual_leaves(norm: Norm, *shape: int) -> list[Tensor]:
    """x, residual and the parameters, all with gradients."""
    tensors = [random_jet(*shape), random_jet(*shape, seed=5), *norm.scales(shape[-1])]
    return [t.requires_grad_() for t in tensors]


@pytest.mark.parametrize("used", [0, 1])
def test_gradients_of_one_result_alone(norm: Norm, used: int) -> None:
    """First and second, of the norm or the sum."""

    def f(*leaves: Tensor) -> Tensor:
        return norm.add(*leaves, 0.3, 2)[used]

    leaves = residual_leaves(norm, 4, 2, 3)
    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves)


def test_only_the_sum_is_kept(norm: Norm) -> None:
    """Neither x nor residual is saved; without a residual x itself is, nothing else so large."""
    saved: list[Tensor] = []

    def record(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    x, residual, *given = residual_leaves(norm, 4, 3, 8)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        _, total = norm.add(x, residual, *given, EPS, 2)
    pointers = [t.data_ptr() for t in saved if t.numel() == x.numel()]
    assert pointers == [total.data_ptr()]
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        norm.call(x, *given, EPS, 2)
    assert [t.data_ptr() for t in saved if t.numel() == x.numel()] == [x.data_ptr()]


def test_an_unused_output_gets_no_zeros(norm: Norm) -> None:
    """The backward operator gets the gradients that exist, and does not run for the sum alone."""
    calls: list[tuple] = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append((str(func), args))
            return func(*args, **(kwargs or {}))

    leaves = residual_leaves(norm, 4, 3, 8)
    name = f"jachess.{norm.name}_jet_backward.default"
    y, _ = norm.add(*leaves, EPS, 2)
    with Record():
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    backward = [args for func, args in calls if func == name]
    assert len(backward) == 1
    assert backward[0][1] is None  # gsum
    assert not [func for func, _ in calls if "zeros" in func or "fill" in func]
    calls.clear()
    _, total = norm.add(*leaves, EPS, 2)
    with Record():
        gradients = torch.autograd.grad(total, leaves[:2], torch.ones_like(total))
    assert not [func for func, _ in calls if func == name]
    assert all(torch.equal(g, torch.ones_like(total)) for g in gradients)


def test_results_alias_no_argument_and_none_another(norm: Norm) -> None:
    x, residual, *given = (leaf.detach() for leaf in residual_leaves(norm, 4, 3, 8))
    kept = x.clone(), residual.clone()
    y, total = norm.add(x, residual, *given, EPS, 2)
    pointers = {t.data_ptr() for t in (x, residual, y, total)}
    assert len(pointers) == 4
    y.zero_()
    total.zero_()
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_the_sum_is_rounded_before_it_is_normalised(norm: Norm) -> None:
    """As an unfused model rounds its residual stream; one gradient serves x and the residual."""
    leaves = [random_jet(4, 9, 19, dtype=torch.bfloat16, seed=n).requires_grad_() for n in (0, 5)]
    y, total = norm.add(*leaves, EPS, 2)
    assert torch.equal(total, leaves[0] + leaves[1])
    assert torch.equal(y, norm.call(total.detach(), EPS, 2))
    first, second = torch.autograd.grad((y * y).sum() + total.sum(), leaves)
    assert torch.equal(first, second)
