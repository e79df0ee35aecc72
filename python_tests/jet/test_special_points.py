"""Every rule where formulas go wrong: far out, at zero, at ties, in halves, in every variant.

The oracle is torch's reverse mode, twice, in float64, on the plain function; where that itself is
wrong (a sinc near 0), a closed form.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jachess_ext as jx
from jachess_ext.jet import composed_rules
from jachess_ext.jet.engine import registry
from jachess_ext.jet.engine.errors import MissingJetRule, function_name

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float64, torch.float32, *HALVES)
INF = math.inf


def _grad(value: Tensor, x: Tensor) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(x)
    (found,) = torch.autograd.grad(value, x, create_graph=True, materialize_grads=True)
    return found


def _derivatives(function: Callable, x: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    """(f, Df[u_0], D²f[u_0, u_1]) of ``function(x)`` in float64, by reverse mode."""
    x = x.detach().double().requires_grad_()
    u = u.double()
    value = function(x)
    weight = torch.zeros_like(value, requires_grad=True)
    along = (_grad((value * weight).sum(), x) * u[0]).sum()
    first = _grad(along, weight)
    second = (_grad((first * weight).sum(), x) * u[1]).sum()
    curved = _grad(second, weight)
    return value.detach(), first.detach(), curved.detach()


# ---- element by element --------------------------------------------------------------------------

FAR = (1e-8, 1e-4, 0.3, 0.5, 1, 1.5, 3, 6, 20, 40, 88, 89, 104, 120, 700, 1e4, 6e4, 1e10, 1e20)
POINTS = (0.0, -0.0, *FAR, *(-x for x in FAR))


def _full(x: Any, value: float) -> Any:
    """A constant that arrives as a jet with tangents of zero."""
    return torch.full_like(x, value)


def _beside(x: Any, value: float) -> Any:
    return torch.stack([x, _full(x, value)], -1)


def _logit_loss(x: Any, target: float) -> Any:
    shown = torch.full(x.shape, target, dtype=x.dtype)
    return F.binary_cross_entropy_with_logits(x, shown, reduction="none")


PROGRAMS: dict[str, Callable] = {
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus 2, 5": lambda x: F.softplus(x, 2.0, 5.0),
    "elu 2": lambda x: F.elu(x, 2.0),
    "celu 2": lambda x: F.celu(x, 2.0),
    "logit 0.1": lambda x: torch.logit(x, 0.1),
    "bce": lambda x: _logit_loss(x, 0.3),
    "1 / x": lambda x: 1 / x,
    "x / (1 + |x|)": lambda x: x / (1 + x.abs()),
    "logaddexp": lambda x: torch.logaddexp(x, _full(x, 0.0)),
    "logaddexp -inf": lambda x: torch.logaddexp(x, _full(x, -INF)),
    "logaddexp from -inf": lambda x: torch.logaddexp(_full(x, -INF), x),
    "logaddexp2": lambda x: torch.logaddexp2(x, _full(x, 0.0)),
    "logaddexp2 -inf": lambda x: torch.logaddexp2(x, _full(x, -INF)),
    "logaddexp x": lambda x: torch.logaddexp(x, x),
    "xlogy 2": lambda x: torch.xlogy(x, _full(x, 2.0)),
    "xlogy 0": lambda x: torch.xlogy(x, _full(x, 0.0)),
    "2 xlogy": lambda x: torch.xlogy(_full(x, 2.0), x),
    "0 xlogy": lambda x: torch.xlogy(_full(x, 0.0), x),
    "xlog1py 2": lambda x: torch.special.xlog1py(x, _full(x, 2.0)),
    "2 xlog1py": lambda x: torch.special.xlog1py(_full(x, 2.0), x),
    "ldexp": lambda x: torch.ldexp(x, _full(x, 2.0)),
    "glu": lambda x: F.glu(torch.stack([x, x], -1), -1)[..., 0],
    "softmax": lambda x: _beside(x, 0.0).softmax(-1)[..., 0],
    "log_softmax": lambda x: _beside(x, 0.0).log_softmax(-1)[..., 0],
    "logsumexp": lambda x: _beside(x, 0.0).logsumexp(-1),
    "norm of one": lambda x: x[:, None].norm(dim=-1),
    "std of two": lambda x: _beside(x, 0.0).std(-1),
    "poisson": lambda x: F.poisson_nll_loss(x, x.new_ones(()), reduction="none"),
    "kl": lambda x: F.kl_div(x, x.new_ones(()) / 2, reduction="none"),
    **{f"x ** {n}": lambda x, n=n: x**n for n in (0, 1, 2, 3, -1, 0.5, 2.5)},
    **{
        f"x ** [{n}]": lambda x, n=n: x ** torch.full(x.shape, n, dtype=x.dtype)
        for n in (0.0, 1.0, 2.0, -1.0, 2.5)
    },
    **{f"x ** full_like {n}": lambda x, n=n: x ** _full(x, n) for n in (0.0, 1.0, 2.0, 0.5, 2.5)},
    **{f"{b} ** x": lambda x, b=b: b**x for b in (0.0, 1.0, 2.0, 0.5)},
    **{f"full_like {b} ** x": lambda x, b=b: _full(x, b) ** x for b in (0.0, 1.0, 2.0, 0.5)},
    "float_power 2": lambda x: torch.float_power(x, _full(x, 2.0)),
}

# Written otherwise for the oracle.
SAME: dict[str, Callable] = {"std of two": lambda x: x.abs() / math.sqrt(2)}
# f is not smooth (torch's one-sided choice).
KINK_AT_ZERO = ("celu", "elu", "selu", "celu 2", "elu 2", "fmax", "prelu", "hardshrink", "entr")
KINKS = {
    "softplus": (20.0,),
    "hardswish": (3.0, -3.0),
    "std of two": (0.0, 1e-8, -1e-8, 1e-4, -1e-4),  # 1/x times what is rounded
}
UNCHECKED = {
    "sinc": "its own test: torch's derivatives lose all digits near 0",
    "dropout": "drawn at random",
    "bernoulli": "drawn at random",
    "i0": "torch's third derivative near 0 in float32",
    "atleast_2d": "another shape",
    "atleast_3d": "another shape",
    "block_diag": "another shape",
    "i0e": "torch's third derivative at 0",
    "i1": "torch's second derivative near 0",
    "i1e": "torch's formulas lose digits in float32",
    "erfcx": "torch's formulas lose digits in float32",
    "log_ndtr": "torch's formulas lose digits in float32",
    "entr": "torch's own forward mode is NaN where the function is −∞",
    "lgamma": "poles",
    "digamma": "poles",
    "tan": "poles",
    "bfloat16": "rounds the oracle",
    "half": "rounds the oracle",
    "float": "rounds the oracle",
}


def _elementwise() -> dict[str, Callable]:
    """Every function with a rule, its own or the general one, that maps a tensor entry by entry."""
    found: dict[str, Callable] = dict(PROGRAMS)
    x = torch.tensor([[0.3, 0.7, 0.4], [0.2, 0.6, 0.9]], dtype=torch.float64, requires_grad=True)
    for function in (*registry.registered_functions(), *registry.GENERAL_RULES):
        name = function_name(function).rpartition(".")[2]
        if name in found or name in UNCHECKED or name.endswith("_"):
            continue
        try:
            y = function(x)
            if y.shape != x.shape or not y.is_floating_point() or not y.requires_grad:
                continue
            jacobian = torch.autograd.functional.jacobian(function, x.detach()).reshape(6, 6)
        except Exception:  # takes other arguments
            continue
        if torch.equal(jacobian, torch.diag(jacobian.diagonal())):
            found[name] = function
    return found


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ELEMENTWISE = _elementwise()


def _rising(function: Callable, x: Tensor) -> list[Tensor]:
    """f, f', f'', f''' of a function that maps entry by entry."""
    x = x.double().requires_grad_()
    found = [function(x)]
    for _ in range(3):
        found.append(_grad(found[-1].sum(), x))
    return [part.detach() for part in found]


def _check_elementwise(name: str, dtype: torch.dtype, composed: bool) -> None:
    function = ELEMENTWISE[name]
    points = torch.tensor(POINTS, dtype=torch.float64).to(dtype)
    points = points[points.isfinite()]
    if name in KINK_AT_ZERO:
        points = points[points != 0]
    for kink in KINKS.get(name, ()):
        points = points[points != kink]
    try:
        own = function(points)
        expected = _rising(SAME.get(name, function), points)
    except (RuntimeError, NotImplementedError):
        return  # torch has none in this dtype, or its domain is an interval
    x = points.clone().requires_grad_()
    ones = torch.ones(2, len(points), dtype=dtype)
    with composed_rules() if composed else nullcontext():
        try:
            jet = jx.jet(function, x, ones)
        except MissingJetRule:
            return
        found = [jet.primal, jet.first[0], jet.second[0]]
        if jet.streams.requires_grad:
            for stream in found[1:]:
                try:
                    found.append(_grad(stream.sum(), x))
                except NotImplementedError:  # a kernel that torch has not in halves
                    found.append(stream.detach())
                    expected[len(found) - 2] = stream.detach()
    order = (0, 1, 2, 2, 3)
    largest = torch.finfo(dtype).max
    inside = torch.stack([part.abs() for part in expected]).amax(0) < largest / 8
    steep = torch.stack([part.abs() for part in expected]).amax(0).clamp_min(1)
    eps = torch.finfo(dtype).eps
    for part, place in zip(found, order, strict=False):
        wanted = expected[place] if place or own.dtype == torch.float64 else own.double()
        said = f"{name} {dtype} part {place}"
        actual = part.detach().double()
        where = inside & own.isfinite()
        limit = 1e4 * eps * wanted.abs().clamp_max(1e-3 / eps) + 64 * eps * steep
        bad = where & ~((actual - wanted).abs() <= limit)
        assert not bad.any(), (said, points[bad], actual[bad], wanted[bad])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_far_out_and_at_zero(name: str) -> None:
    for dtype in DTYPES:
        for composed in (False, True) if dtype == torch.float32 else (True,):
            _check_elementwise(name, dtype, composed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("name", ["gelu", "gelu tanh", "silu", "mish", "tanh", "sigmoid"])
def test_saturated_activations_far_out(name: str, composed: bool, dtype: torch.dtype) -> None:
    """Torch's double backward is no number there; a saturated activation is a line."""
    x = torch.tensor([1e20, -1e20, 1e4, -1e4], dtype=torch.float64).to(dtype)
    x = x[x.isfinite()].requires_grad_()
    with composed_rules() if composed else nullcontext():
        streams = jx.jet(ELEMENTWISE[name], x, torch.ones(2, len(x), dtype=dtype)).streams
    assert streams.isfinite().all() and not streams[3].any()
    assert _grad(streams.sum(), x).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinc(dtype: torch.dtype) -> None:
    """Against 60 digits: near 0, on both sides of where the power series ends, and far out."""
    points = [0.0, 1e-30, 1e-8, 1e-3, 0.1, -0.25, 0.317, 0.319, 0.5, 1.0, -1.5, 2.0, 7.25, 40.0]
    x = torch.tensor(points, dtype=torch.float64).to(dtype).requires_grad_()
    jet = jx.jet(torch.sinc, x, torch.ones(2, len(points), dtype=dtype))
    found = [jet.primal, jet.first[0], jet.second[0], _grad(jet.second.sum(), x)]
    with mpmath.workdps(60):
        expected = [mpmath.taylor(mpmath.sincpi, mpmath.mpf(v), 3) for v in x.tolist()]
    for order, part in enumerate(found):
        wanted = [float(terms[order] * math.factorial(order)) for terms in expected]
        wanted_tensor = torch.tensor(wanted, dtype=torch.float64)
        eps = torch.finfo(dtype).eps
        limit = 60 * eps if order else 2 * eps
        torch.testing.assert_close(part.detach().double(), wanted_tensor, rtol=0.02, atol=limit)


# ---- sums of squares in halves -------------------------------------------------------------------

# 64 or 768 entries of one row: their squares or the sum of these leave float16 on either side.
LEVELS = (1e-7, 1e-4, 12.0, 200.0, 1e4)
OF_ROWS: dict[str, Callable] = {
    "norm": lambda x: x.norm(dim=-1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "norm 1": lambda x: x.norm(1, -1),
    "norm inf": lambda x: x.norm(INF, -1),
    "norm 3": lambda x: x.norm(3, -1),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x),
    "dist": lambda x: torch.dist(x, torch.zeros_like(x)),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine": lambda x: F.cosine_similarity(x, x.flip(-1), -1),
    "pairwise_distance": lambda x: F.pairwise_distance(x, torch.zeros_like(x)),
    "std": lambda x: x.std(-1),
    "mean": lambda x: x.mean(-1),
    "layer_norm": lambda x: F.layer_norm(x, (768,)),
    "rms_norm": lambda x: F.rms_norm(x, (768,), eps=1e-6),
    "group_norm": lambda x: F.group_norm(x, 2),
    "logsumexp": lambda x: x.logsumexp(-1),
}
# torch's layer norm is wrong where it is differentiated more than twice.
WRITTEN: dict[str, Callable] = {
    "layer_norm": lambda x: (x - x.mean(-1, True)) / (x.var(-1, False, keepdim=True) + 1e-5).sqrt()
}
OF_SQUARES: dict[str, Callable] = {
    "var": lambda x: x.var(-1),
    "var_mean": lambda x: torch.var_mean(x, -1)[0],
}


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("name", [*OF_ROWS, *OF_SQUARES])
def test_sums_of_squares_in_halves(name: str, dtype: torch.dtype) -> None:
    """The value is torch's in this dtype, the tangents those of float64 rounded, wherever these
    are numbers of this dtype."""
    function = (OF_ROWS | OF_SQUARES)[name]
    levels = (12.0, 1e-3) if name in OF_SQUARES else LEVELS
    extreme = dtype == torch.float32 and not name.endswith("3")  # whose cubes torch adds up
    for level in (*levels, 1e-15, 1e15) if extreme else levels:
        torch.manual_seed(0)
        x = (level * (1 + torch.randn(2, 768)) / 2).to(dtype)
        u = (level * torch.randn(2, 2, 768)).to(dtype)
        try:
            with torch.no_grad():
                jet = jx.jet(function, x, u)
        except MissingJetRule:
            continue
        own = function(x).double()
        expected = _derivatives(WRITTEN.get(name, function), x, u)
        eps = torch.finfo(dtype).eps
        said = f"{name} {dtype} {level}"
        finite = own.isfinite()
        assert torch.equal(jet.primal.isfinite(), finite), said
        found = (jet.primal, jet.first[0], jet.second[0])
        for order, (part, wanted) in enumerate(zip(found, (own, *expected[1:]), strict=True)):
            size = wanted[finite].abs().amax() if finite.any() else wanted.new_zeros(())
            if size > torch.finfo(dtype).max / 4 or not finite.any():
                continue
            rounding = 16 * eps + 1e-4 + (level * 1e-5 if "sum" in name or "soft" in name else 0)
            limit = rounding * size + 4 * torch.finfo(dtype).smallest_normal
            limit = limit + (1e-6 * expected[1].abs().amax() if order == 2 else 0)
            wrong = (part.double() - wanted)[finite].abs()
            if not order:  # torch divides by a norm that has overflown
                wrong = wrong.minimum((part.double() - expected[0])[finite].abs())
            assert (wrong <= limit).all(), (said, order, wrong.max(), size)


# ---- broadcasting before a reduction -------------------------------------------------------------

SHAPES = (((3, 4), (3, 1)), ((3, 4), (4,)), ((1,), (3, 4)), ((2, 1, 4), (3, 1)))
REDUCTIONS = ("none", "mean", "sum")
OF_PAIRS: dict[str, Callable] = {
    **{f"cosine {d}": lambda a, b, d=d: F.cosine_similarity(a, b, dim=d) for d in (-1, 0)},
    **{f"distance {p}": lambda a, b, p=p: F.pairwise_distance(a, b, p) for p in (1, 2, 3, INF)},
    "vecdot": torch.linalg.vecdot,
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, b, b, value=0.7),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b * b + 1, value=0.7),
    "logaddexp": torch.logaddexp,
    "pow": lambda a, b: (a * a + 1) ** b,
    "xlogy": lambda a, b: torch.xlogy(a, b * b + 1),
    "xlog1py": lambda a, b: torch.special.xlog1py(a, b * b + 1),
    "dist": torch.dist,
    "hypot": torch.hypot,
    "atan2": torch.atan2,
    "inner": lambda a, b: torch.inner(*torch.broadcast_tensors(a, b)),
    **{
        f"{f.__name__} {way}": lambda a, b, f=f, way=way: f(a, b, reduction=way)
        for f in (F.mse_loss, F.l1_loss, F.huber_loss, F.poisson_nll_loss)
        for way in ("mean", "sum")
    },
    **{
        f"kl_div {way}": lambda a, b, way=way: F.kl_div(a, b * b + 1, reduction=way)
        for way in ("mean", "batchmean")
    },
    "kl_div of logarithms": lambda a, b: F.kl_div(a, b, reduction="mean", log_target=True),
    "gaussian_nll": lambda a, b: F.gaussian_nll_loss(
        *torch.broadcast_tensors(a, b), b.expand_as(a + b) ** 2 + 1, full=True
    ),
    **{
        f"bce {way}, {name}": lambda a, b, way=way, name=name: F.binary_cross_entropy_with_logits(
            a, (a * 0 + 0.3).detach(), **{name: b.detach().abs()}, reduction=way
        )
        for way, name in (("mean", "weight"), ("sum", "weight"), ("mean", "pos_weight"))
    },
    "margin_ranking": lambda a, b: F.margin_ranking_loss(a, b, (a + b).detach().sign()),
    "triplet": lambda a, b: F.triplet_margin_loss(a, b, a.flip(-1), swap=True),
    "cosine_embedding": lambda a, b: F.cosine_embedding_loss(a, b, torch.tensor([1])),
    "normalize": lambda a, b: F.normalize(a + b, dim=0),
    "matmul": lambda a, b: a @ b.mT if a.ndim > 1 and b.ndim > 1 else a @ a.mT,
}


def _check_program(program: Callable, x: Tensor, said: str, written: Any = None) -> None:
    """``program`` of a vector, against reverse mode through it, or through another way of writing
    it; a refusal passes, and so does an error of torch's."""
    tolerance = 1e-8
    torch.manual_seed(1)
    u = torch.randn(2, *x.shape, dtype=torch.float64)
    try:
        expected = _derivatives(written or program, x, u)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return
    try:
        with torch.no_grad():
            jet = jx.jet(program, x, u)
    except MissingJetRule:
        return
    for part, wanted in zip((jet.primal, jet.first[0], jet.second[0]), expected, strict=True):
        assert part.shape == wanted.shape, said
        scale = 1 + wanted.abs().amax() if wanted.numel() else 1.0
        torch.testing.assert_close(
            part,
            wanted,
            rtol=tolerance,
            atol=tolerance * float(scale),
            msg=lambda m: f"{said}: {m}",
        )


@pytest.mark.parametrize("name", OF_PAIRS)
def test_broadcasting_before_a_reduction(name: str) -> None:
    """Both arguments of every pair of shapes carry derivatives, and one of them alone."""
    function = OF_PAIRS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of targets that are broadcast
        for n, (left, right) in enumerate(SHAPES):
            torch.manual_seed(0)
            sizes = [math.prod(shape) for shape in (left, right)]
            x = torch.randn(sum(sizes), dtype=torch.float64)
            kept = [part.clone() for part in x.split(sizes)]
            for active in ((0, 1), (n % 2,)):
                program = _of_one_vector(function, left, right, kept, active)
                _check_program(program, x, f"{name} {left} {right} {active}")


def _of_one_vector(function: Callable, left: Any, right: Any, kept: Any, active: Any) -> Callable:
    def program(x: Any) -> Any:
        parts = x.split([len(part) for part in kept])
        a, b = (parts[n] if n in active else kept[n] for n in (0, 1))
        return function(a.reshape(left), b.reshape(right))

    return program


# ---- tangents that share a large constant --------------------------------------------------------

SHIFTED: dict[str, Callable] = {
    "logsumexp": lambda x: x.logsumexp(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "softmax": lambda x: x.softmax(-1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1])),
    "cross_entropy of probabilities": lambda x: F.cross_entropy(
        x, torch.full((2, 5), 0.2, dtype=x.dtype)
    ),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1),
    "logaddexp": lambda x: torch.logaddexp(x[0], x[1]),
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
}


@pytest.mark.parametrize("level", [1.0, 1e9, 1e15, 1e17])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm"])
def test_gradients_of_norms_of_large_numbers(name: str, level: float) -> None:
    """Of the composed rules: no power of the root, as of 1e15 cubed, is formed on the way back."""
    torch.manual_seed(0)
    given = level * torch.randn(3, 2, 768, dtype=torch.float64)

    def gradient(dtype: torch.dtype) -> Tensor:
        x, u = given[0].to(dtype).requires_grad_(), given[1:].to(dtype)
        with composed_rules():
            streams = jx.jet(OF_ROWS[name], x, u).streams
            weighted = streams * torch.linspace(-1, 1, 768, dtype=dtype)
            return torch.autograd.grad(weighted.sum(), x)[0].double() * level

    expected = gradient(torch.float64)
    bound = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(gradient(torch.float32), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("name", SHIFTED)
def test_tangents_that_share_a_constant(name: str, composed: bool) -> None:
    """What they share has no second derivative, so that float32 must keep what differs."""
    function = SHIFTED[name]
    torch.manual_seed(0)
    x, u = torch.randn(2, 5), torch.randn(2, 2, 5)
    expected = _derivatives(WRITTEN.get(name, function), x, (u + 1024) - 1024)
    with composed_rules() if composed else nullcontext():
        try:
            jet = jx.jet(function, x, u + 1024)
        except MissingJetRule:
            return
    torch.testing.assert_close(jet.second[0].double(), expected[2], rtol=1e-3, atol=1e-3)


# ---- forms of an index ---------------------------------------------------------------------------

ROWS = torch.tensor([True, False, True, False])
INDICES: dict[str, Any] = {
    "list": [0, 2],
    "negative list": [-1, 0],
    "nested list": [[0, 1], [1, 0]],
    "list in a tuple": ([0, 1], [1, 0]),
    "thrice nested": [[[0, 1], [1, 0]]],
    "tuple in a list": [(0, 1), (1, 0)],
    "list of booleans": [True, False, True, False],
    "list of booleans behind": (slice(None), [True, False, True]),
    "array": np.array([2, 0]),
    "matrix of an array": np.array([[0, 1], [2, 3]]),
    "number of numpy": np.int64(1),
    "range": range(0, 4, 2),
    "range behind": (slice(None), range(2)),
    "None": None,
    "None in a list": [None, 1],
    "slice in a list": [slice(0, 2), 1],
    "Ellipsis": ...,
    "Ellipsis between": (0, ..., 1),
    "True": True,
    "False": False,
    "a list and True": ([0, 1], True),
    "True behind": (slice(None), True),
    "None and a list": (None, [0, 1]),
    "a list and None": ([0, 1], None, [1, 0]),
    "apart": ([0, 1], slice(None), [1, 0]),
    "integer and tensor": (1, torch.tensor([0, 2])),
    "tensor": torch.tensor([[0, 1], [2, 3]]),
    "tensors that broadcast": (torch.tensor([[0], [1]]), torch.tensor([0, 2])),
    "tensor of no dimension": torch.tensor(2),
    "boolean of no dimension": torch.tensor(True),
    "bytes": torch.tensor([1, 0, 1, 0], dtype=torch.uint8),
    "mask": ROWS,
    "mask and integer": (ROWS, 1),
    "mask and tensor": (ROWS, torch.tensor([0, 2])),
    "slice with a step": slice(None, None, 2),
    "empty list": [],
    "empty tuple": (),
    "slice of tensors": slice(torch.tensor(1), torch.tensor(3)),
}


def _same(actual: Any, expected: Tensor, said: str) -> None:
    assert actual.shape == expected.shape, said
    assert torch.equal(actual, expected), said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", INDICES)
def test_forms_of_an_index(name: str) -> None:
    """Reading and writing through every form mean for each stream what they mean for a tensor."""
    index = INDICES[name]
    x, u = torch.randn(4, 3, 2), torch.randn(2, 4, 3, 2)
    expected = x[index]
    jet = jx.jet(lambda x: x[index], x, u)
    _same(jet.primal, expected, name)
    for n in range(2):
        _same(jet.first[n], u[n][index], name)
    views = expected.untyped_storage()._cdata == x.untyped_storage()._cdata
    if views:

        def through(x: Any) -> Any:
            y = x * 1
            y[index].zero_()
            return y

        assert torch.equal(jx.jet(through, x, u).primal, through(x)), name

    def write(x: Any, value: Any) -> Any:
        y = x * 1
        y[index] = value
        return y

    try:
        write(x, 0.5)
    except RuntimeError:  # nor does torch: a mask of bytes
        return
    written = jx.jet(lambda x: write(x, 0.5), x, u)
    _same(written.primal, write(x, 0.5), name)
    _same(written.first[0], write(u[0], 0.0), name)
    twice = jx.jet(lambda x: write(x, x[index] * 2), x, u)
    _same(twice.primal, write(x, x[index] * 2), name)
    _same(twice.first[1], write(u[1], u[1][index] * 2), name)


# ---- every variant of an operator ----------------------------------------------------------------

ONES = torch.tensor([0, 1, 1, 2, 2, 2])
VARIANTS: dict[str, Callable] = {
    **{
        f"scatter_reduce {way} {own} {part}": lambda x, way=way, own=own, part=part: (
            torch.scatter_reduce(
                *((x[:6], 0, ONES, x[6:12]) if part == "both" else (x[:6], 0, ONES, CONSTANT)),
                way,
                include_self=own,
            )
            if part != "source"
            else torch.scatter_reduce(CONSTANT, 0, ONES, x[:6], way, include_self=own)
        )
        for way in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
        for part in ("both", "self", "source")
    },
    **{
        f"index_reduce {way}": lambda x, way=way: torch.index_reduce(x[:6], 0, ONES, x[6:12], way)
        for way in ("prod", "mean", "amax", "amin")
    },
    **{
        f"pad {mode}": lambda x, mode=mode: F.pad(x.reshape(1, 3, 4), (1, 2), mode=mode)
        for mode in ("constant", "reflect", "replicate", "circular")
    },
    **{
        f"div {mode}": lambda x, mode=mode: torch.div(x, 0.7, rounding_mode=mode)
        for mode in ("trunc", "floor")
    },
    **{
        f"matrix_norm {p}": lambda x, p=p: torch.linalg.matrix_norm(x.reshape(3, 4), p)
        for p in ("fro", "nuc", INF, -INF, 1, -1, 2, -2)
    },
    **{
        f"vector_norm {p}": lambda x, p=p: torch.linalg.vector_norm(x.reshape(3, 4), p, -1)
        for p in (0, 0.5, 1, 2, 3, INF, -INF, -1)
    },
    **{
        f"quantile {way} {f.__name__}": lambda x, way=way, f=f: f(
            x.reshape(3, 4), torch.tensor([0.3, 0.6]).double(), 1, interpolation=way
        )
        for way in ("linear", "lower", "higher", "midpoint", "nearest")
        for f in (torch.quantile, torch.nanquantile)
    },
    **{
        f"interpolate {mode}": lambda x, mode=mode: F.interpolate(
            x.reshape(1, 1, *((3, 4) if mode != "linear" else (12,))), scale_factor=1.7, mode=mode
        )
        for mode in ("nearest", "linear", "bilinear", "bicubic", "area", "nearest-exact")
    },
    **{
        f"qr {mode}": lambda x, mode=mode: torch.linalg.qr(x.reshape(4, 3), mode)[1]
        for mode in ("reduced", "r", "complete")
    },
    "cov": lambda x: torch.cov(x.reshape(3, 4), correction=2),
    **{
        f"linear_cross_entropy {chunks}": lambda x, chunks=chunks: F.linear_cross_entropy(
            x.reshape(4, 3),
            torch.ones(5, 3, dtype=x.dtype).tril(),
            torch.tensor([0, 1, 4, 2]),
            options=torch.nn.LinearCrossEntropyOptions() if chunks else None,
        )
        for chunks in ((False, True) if hasattr(F, "linear_cross_entropy") else ())
    },
    "cross_entropy": lambda x: F.cross_entropy(
        x.reshape(4, 3),
        torch.tensor([0, 1, 2, 2]),
        torch.tensor([1.0, 2.0, 0.5], dtype=x.dtype),
        ignore_index=1,
        label_smoothing=0.2,
    ),
    "hinge": lambda x: F.hinge_embedding_loss(x, torch.ones(12).double()),
    "poisson": lambda x: F.poisson_nll_loss(
        x * x, torch.full_like(x, 2.5), log_input=False, full=True
    ),
    "put": lambda x: torch.put(x[:6], torch.tensor([0, 2, 2]), x[6:9], True),
    **{
        f"index_put {accumulate}": lambda x, accumulate=accumulate: torch.index_put(
            x[:6], (torch.tensor([0, 2, 3]),), x[6:9], accumulate
        )
        for accumulate in (True, False)
    },
    **{f"prod with {n} zeros": lambda x, n=n: (x[:4] * _ones_but(4, n)).prod() for n in range(4)},
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "renorm": lambda x: torch.renorm(x.reshape(3, 4), 2, 0, 0.5),
    "multi_dot": lambda x: torch.linalg.multi_dot([x.reshape(3, 4), x.reshape(4, 3), x[:3]]),
    "matrix_power": lambda x: torch.linalg.matrix_power(x[:9].reshape(3, 3), 3),
    "matrix_power -1": lambda x: torch.linalg.matrix_power(x[:9].reshape(3, 3), -1),
    "float_power": lambda x: torch.float_power(x, 3),
    "ldexp": lambda x: torch.ldexp(x[:6], x[6:12]),
    "polygamma": lambda x: torch.polygamma(2, x * x + 1),
    "mvlgamma": lambda x: torch.mvlgamma(x * x + 3, 2),
}
CONSTANT = torch.tensor([0.5, 1.5, 0.7, 2.0, 1.2, 0.9], dtype=torch.float64)


def _ones_but(count: int, zeros: int) -> Tensor:
    return (torch.arange(count) >= zeros).double()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant(name: str) -> None:
    """Right or refused: no variant may have derivatives of zero in silence."""
    torch.manual_seed(3)
    x = torch.randn(12, dtype=torch.float64)
    # torch has no second derivative of a loss by chunks, in silence, and NaN for logcumsumexp.
    written = VARIANTS[name.replace("True", "False")] if name.startswith("linear_cross") else None
    if name == "logcumsumexp":
        written = lambda x: x.exp().cumsum(0).log()  # noqa: E731
    _check_program(VARIANTS[name], x, name, written)


def test_logit_beyond_its_ends() -> None:
    """Flat there, backward too; at 1/2 the slope is 4 and the third derivative 32."""
    x = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64, requires_grad=True)
    jet = jx.jet(lambda x: x.logit(eps=0.1), x, torch.ones(2, 3, dtype=torch.float64))
    assert jet.first[:, :2].eq(0).all() and jet.second[:, :2].eq(0).all()
    (gradient,) = torch.autograd.grad(jet.streams.sum(), x)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, 36.0], dtype=torch.float64))


# ---- running products and sums, losses, what draws ----------------------------------------------


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_a_running_product_with_zeros(zeros: int) -> None:
    """Every stream, and the gradient of the second order, against products written out."""
    torch.manual_seed(0)
    x, u, w = torch.randn(3, 5, dtype=torch.float64)
    x[1 : 1 + zeros] = 0
    x.requires_grad_()
    jet = jx.jet(lambda x: torch.cumprod(x, 0), x, torch.stack([u, w]))

    def written(x: Tensor) -> Tensor:
        products = [x[0]]
        for entry in x[1:]:
            products.append(products[-1] * entry)
        return torch.stack(products)

    def along(f: Callable, u: Tensor) -> Callable:
        return lambda x: torch.func.jvp(f, (x,), (u,))[1]

    both = along(along(written, u), w)
    expected = [written(x), along(written, u)(x), along(written, w)(x), both(x)]
    torch.testing.assert_close(jet.streams, torch.stack(expected))
    gradients = [torch.autograd.grad(part.sum(), x)[0] for part in (jet.second[0], both(x))]
    torch.testing.assert_close(*gradients)


def test_a_running_sum_of_exponentials_with_masked_entries() -> None:
    """A masked entry adds nothing, backward too; large entries do not overflow."""
    hidden = torch.tensor([True, True, False, True, False])
    x = torch.tensor([0.0, 1.0, 800.0, 2.0, 801.0], dtype=torch.float64, requires_grad=True)
    u = torch.ones(2, 5, dtype=torch.float64)
    jet = jx.jet(lambda x: x.masked_fill(hidden, -torch.inf).logcumsumexp(0), x, u)
    torch.testing.assert_close(jet.first, torch.tensor([[0.0, 0, 1, 1, 1]] * 2).double())
    torch.testing.assert_close(jet.second, torch.zeros(1, 5).double())
    last = math.log1p(math.e) + 800
    torch.testing.assert_close(
        jet.primal, torch.tensor([-torch.inf, -torch.inf, 800, 800, last]).double()
    )
    (gradient,) = torch.autograd.grad(jet.streams[:, 2:].sum(), x)
    assert gradient.isfinite().all() and not gradient[hidden].any()


def test_a_huber_loss_and_a_soft_margin_far_out() -> None:
    x = torch.tensor([1e30, -1e30, 0.5, 1.0], requires_grad=True)
    u = torch.ones(2, 4)
    jet = jx.jet(lambda x: F.huber_loss(x, torch.zeros(4), "none"), x, u)
    assert jet.first[0].tolist() == [1, -1, 0.5, 1] and jet.second[0].tolist() == [0, 0, 1, 0]
    jet = jx.jet(lambda x: F.soft_margin_loss(x, torch.ones(4), reduction="none"), x, u)
    assert jet.first[0, :2].tolist() == [0, -1] and jet.second[0, :2].tolist() == [0, 0]
    (gradient,) = torch.autograd.grad(jet.streams.sum(), x)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("hard", [True, False])
def test_a_gumbel_softmax_draws_as_torch_does(hard: bool, differentiable: bool) -> None:
    """The value and the state of the generator are torch's, the tangent that of this draw; the hard
    one has the derivatives of the soft one, as in torch's backward."""
    torch.manual_seed(0)
    x, u = torch.randn(2, 3, 4, dtype=torch.float64)

    def drawn(x: Any, hard: bool) -> Any:
        torch.manual_seed(5)
        return F.gumbel_softmax(x, 0.7, hard), torch.rand(())

    (value, after), (tangent, _) = jx.jvp(
        lambda x: drawn(x, hard), (x,), (u,), differentiable=differentiable
    )
    torch.testing.assert_close(value, drawn(x, hard)[0])
    assert after == drawn(x, hard)[1]
    point = x.clone().requires_grad_()
    soft = torch.autograd.functional.jvp(lambda x: drawn(x, False)[0], point, u)[1]
    torch.testing.assert_close(tangent, soft)
