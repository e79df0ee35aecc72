"""What torch refuses to differentiate, or gets wrong when nested, within `jx.differentiable`.

The oracles are central differences of torch's own values and of its own first backwards.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import jachess_ext as jx

from ..jet import operators as operators_of_torch
from ..jet.operators import Call
from .refused_cases import CASES, some_of_each

STEP = 1e-5
EXACT = {"hardsigmoid": 1e-7}  # torch's own slope in float64 is a float32 sixth
NAMES = list(CASES)
FEW = list(some_of_each())
BATCHED = [name for name in FEW if name not in ("LSTM", "GRU")]  # torch's have no rule for vmap


@pytest.fixture(autouse=True)
def quiet(recwarn: pytest.WarningsRecorder) -> None:
    """Some of the functions are deprecated."""


def directions(x: Sequence[Tensor], seed: int = 1) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(a.shape, dtype=a.dtype, generator=generator) for a in x)


def first_backward(f: Callable[..., Tensor], x: Sequence[Tensor]) -> tuple[Tensor, ...]:
    leaves = [a.clone().requires_grad_() for a in x]
    out = f(*leaves)
    (c,) = directions([out.detach()], 2)
    return torch.autograd.grad(out, leaves, c, allow_unused=True, materialize_grads=True)


def difference(
    f: Callable[..., Sequence[Tensor]], x: Sequence[Tensor], along: Sequence[Tensor]
) -> list[Tensor]:
    ends = [f(*(a + h * t for a, t in zip(x, along, strict=True))) for h in (STEP, -STEP)]
    return [(a - b) / (2 * STEP) for a, b in zip(*ends, strict=True)]


def close(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 2e-7) -> None:
    size = 1e-2 + max((b.abs().max().item() for b in expected if b.numel()), default=0)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.detach(), b, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("name", NAMES)
def test_value_and_first_backward_are_torchs(name: str) -> None:
    f, x = CASES[name]
    value, first = f(*x), first_backward(f, x)
    scalar = lambda *x: (f(*x) * directions([value], 2)[0]).sum()  # noqa: E731
    with jx.differentiable():
        assert torch.equal(f(*x), value)
        leaves = [a.clone().requires_grad_() for a in x]
        assert torch.equal(f(*leaves).detach(), value)
        with torch.no_grad():
            assert f(*leaves).grad_fn is None
        ours = first_backward(f, x)
        under_func = grad(scalar, tuple(range(len(x))))(*x)
    for got, expected in zip(ours, first, strict=True):
        assert torch.equal(got, expected)
    close(under_func, first, EXACT.get(name.partition("-")[0], 1e-12))


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_are_differences_of_the_first(name: str) -> None:
    f, x = CASES[name]
    along, every = directions(x), tuple(range(len(x)))
    (c,) = directions([f(*x)], 2)
    tangent = difference(lambda *x: [f(*x)], x, along)
    mixed = difference(lambda *x: first_backward(f, x), x, along)
    scalar = lambda *x: (f(*x) * c).sum()  # noqa: E731
    with jx.differentiable():
        value, forward = jvp(f, tuple(x), along)
        forward_reverse = jvp(grad(scalar, every), tuple(x), along)[1]
        leaves = [a.clone().requires_grad_() for a in x]
        gradients = torch.autograd.grad(scalar(*leaves), leaves, create_graph=True)
        dot = sum((a * b).sum() for a, b in zip(gradients, along, strict=True))
        twice = [torch.zeros_like(a) for a in x]
        if isinstance(dot, Tensor) and dot.requires_grad:
            twice = torch.autograd.grad(dot, leaves, allow_unused=True, materialize_grads=True)
        along_tangent = grad(lambda *x: (jvp(f, x, along)[1] * c).sum(), every)(*x)
        in_turn = jvp(lambda *x: jvp(f, x, along)[1], tuple(x), along)[1]
    close([value], [f(*x)], 1e-12)
    close([forward], tangent)
    close(forward_reverse, mixed)
    close(twice, mixed)
    close(along_tangent, mixed)
    # Σ c ∂∂f, which the mixed one gives, too.
    expected = sum((a * b).sum() for a, b in zip(mixed, along, strict=True))
    close([(in_turn * c).sum()], [torch.as_tensor(expected)], 1e-6)


@pytest.mark.parametrize("name", BATCHED)
def test_hessians_by_all_ways_agree(name: str) -> None:
    f, x = CASES[name]
    (c,) = directions([f(*x)], 2)
    first, *others = x
    scalar = lambda a: (f(a, *others) * c).sum()  # noqa: E731
    h, t = STEP, directions([first], 3)[0]
    with jx.differentiable():
        ways = [
            *(hessian(scalar)(first), jacrev(jacrev(scalar))(first), jacfwd(jacfwd(scalar))(first)),
            jacrev(jacfwd(scalar))(first),
            torch.autograd.functional.hessian(scalar, first),
            torch.autograd.functional.hessian(scalar, first, vectorize=True),
            torch.autograd.functional.hessian(
                scalar, first, vectorize=True, outer_jacobian_strategy="forward-mode"
            ),
        ]
        third = jvp(lambda a: jvp(grad(scalar), (a,), (t,))[1], (first,), (t,))[1]
        along = [jvp(grad(scalar), (first + s * h * t,), (t,))[1] for s in (1, -1)]
    for way in ways[1:]:
        close([way], [ways[0]], 1e-9)
    close([third], [(along[0] - along[1]) / (2 * h)], 2e-6)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", FEW)
def test_checkpoints(name: str, reentrant: bool) -> None:
    f, x = CASES[name]
    (c,) = directions([f(*x)], 2)
    first, along = first_backward(f, x), directions(x)
    mixed = difference(lambda *x: first_backward(f, x), x, along)
    with jx.differentiable():
        leaves = [a.clone().requires_grad_() for a in x]
        (checkpoint(f, *leaves, use_reentrant=reentrant) * c).sum().backward()
        if reentrant:
            return
        again = [a.clone().requires_grad_() for a in x]
        out = (checkpoint(f, *again, use_reentrant=False) * c).sum()
        gradients = torch.autograd.grad(out, again, create_graph=True)
        dot = sum((a * b).sum() for a, b in zip(gradients, along, strict=True))
        second = [torch.zeros_like(a) for a in x]
        if isinstance(dot, Tensor) and dot.requires_grad:
            second = torch.autograd.grad(dot, again, allow_unused=True, materialize_grads=True)
    for leaf, expected in zip(leaves, first, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, expected)
    close(second, mixed)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_in_other_dtypes_are_torchs(name: str, dtype: torch.dtype) -> None:
    f, x = CASES[name]
    if name in ("LSTM", "GRU", "RNN") or name.startswith("batch_norm"):
        pytest.skip("its parameters are of float64")
    x = [a.to(dtype) for a in x]
    try:
        value = f(*x)
        first = first_backward(f, x)
    except RuntimeError:
        pytest.skip("torch has no such kernel")
    with jx.differentiable():
        assert torch.equal(f(*x), value)
        assert all(map(torch.equal, first_backward(f, x), first))
        out, tangent = jvp(f, tuple(x), directions(x))
    assert out.dtype == tangent.dtype == value.dtype
    double = jx_free_jvp(f, x)
    size = double.abs().max().item() + 1
    # Of halves the formula computes in float32; deltas of one rounding are left.
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert (tangent.double() - double).abs().max() < tolerance * size


def jx_free_jvp(f: Callable[..., Tensor], x: Sequence[Tensor]) -> Tensor:
    """The tangent of the same numbers in float64, by differences."""
    along = [t.double() for t in directions(x)]
    return difference(lambda *x: [f(*x)], [a.double() for a in x], along)[0]


def test_autocast() -> None:
    a, b = (torch.randn(4, 8) for _ in range(2))
    exact = jvp(lambda a: _distance(a, b), (a,), (b,))[1]
    with torch.autocast("cpu", torch.bfloat16), jx.differentiable():
        value, tangent = jvp(lambda a: torch.cdist(a, b), (a,), (b,))
        norm = lambda a: F.layer_norm(a.bfloat16(), (8,))  # noqa: E731
        nested = jvp(lambda a: jvp(norm, (a,), (b,))[1], (a,), (b,))[1]
        assert norm(a).dtype == nested.dtype
    assert value.dtype == tangent.dtype == torch.float32
    close([tangent], [exact], 1e-5)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return (a.unsqueeze(1) - b).square().sum(-1).sqrt()


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_of_float32_against_float64(name: str) -> None:
    torch.manual_seed(0)
    module = getattr(nn, name)(3, 4, 2, batch_first=True)
    x, t = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    f = lambda x: module(x)[0].sin().sum()  # noqa: E731
    before = torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled
    with jx.differentiable():
        got = [jvp(f, (x,), (t,))[1], jvp(grad(f), (x,), (t,))[1]]
        got.append(jvp(lambda x: jvp(f, (x,), (t,))[1], (x,), (t,))[1])
        assert torch.equal(module(x)[0], module(x)[0])
    assert (torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled) == before
    module.double()
    x, t = x.double(), t.double()
    expected = [jvp(f, (x,), (t,))[1], jvp(grad(f), (x,), (t,))[1]]
    expected.append(jvp(lambda x: jvp(f, (x,), (t,))[1], (x,), (t,))[1])
    for a, b in zip(got, expected, strict=True):
        close([a.double()], [b], 1e-5)


def test_two_threads_leave_the_flags_as_they_were() -> None:
    module, x = nn.LSTM(3, 4), torch.randn(2, 1, 3)

    def run() -> None:
        with jx.differentiable():
            for _ in range(30):
                jvp(lambda x: module(x)[0], (x,), (x,))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.backends.mkldnn.enabled
    assert torch.backends.cudnn.enabled


def test_vmap_of_gradients() -> None:
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    f = lambda a: (torch.cdist(a, a + 1) ** 3).sum()  # noqa: E731
    plain = torch.stack([grad(f)(a) for a in x])
    with jx.differentiable():
        close([vmap(grad(f))(x)], [plain], 1e-12)
        many = vmap(hessian(f))(x)
        close([many], [torch.stack([hessian(f)(a) for a in x])], 1e-12)


@pytest.mark.parametrize("function", [F.batch_norm, F.instance_norm])
def test_running_statistics_within_a_transform_are_torchs(function: Callable[..., Tensor]) -> None:
    x = torch.randn(6, 3, 4)
    ours, torchs = ([torch.zeros(3), torch.ones(3)] for _ in range(2))
    f = lambda x: function(x, *ours, None, None, True)  # noqa: E731
    with jx.differentiable():
        jvp(lambda x: jvp(f, (x,), (x,))[1], (x,), (x,))
    function(x, *torchs, None, None, True)
    assert all(map(torch.equal, ours, torchs))


def test_a_graph_is_freed_by_its_backward() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    with jx.differentiable():
        out = torch.cdist(x, x + 1).sum()
        out.backward(retain_graph=True)
        out.backward()
        with pytest.raises(RuntimeError, match="second time"):
            out.backward()


def test_a_checkpoint_frees_what_it_computes_anew() -> None:
    x, held = torch.randn(4, 3, requires_grad=True), []

    def block(x: Tensor) -> Tensor:
        middle = x * 2
        held.append(weakref.ref(middle))
        return torch.cdist(middle, middle + 1)

    with jx.differentiable():
        out = checkpoint(block, x, use_reentrant=False).sum()
        gc.collect()
        assert held[0]() is None
        out.backward()


def test_determinants_of_singular_matrices() -> None:
    A, T = (torch.randn(4, 4, dtype=torch.float64) for _ in range(2))
    A[3] = A[0] + A[1]
    f = lambda A: torch.det(A)  # noqa: E731
    values = [torch.det(A + h * T) for h in (-1e-3, 0.0, 1e-3)]
    second = (values[0] - 2 * values[1] + values[2]) / 1e-6
    with jx.differentiable():
        got = jvp(lambda A: jvp(f, (A,), (T,))[1], (A,), (T,))[1]
    close([got], [second], 1e-4)


def test_the_fast_path_of_attention_with_weights() -> None:
    attend = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x, t = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    with torch.no_grad(), jx.differentiable():
        got = jvp(lambda x: attend(x, x, x)[0], (x,), (t,))[1].double()
    attend.double()
    with torch.no_grad():
        expected = difference(lambda x: [attend(x, x, x)[0]], [x.double()], [t.double()])
    close([got], expected, 1e-5)


INF = torch.inf
AT_INFINITY: dict[str, tuple[Callable[[Tensor], Tensor], list[list[float]]]] = {
    "hardsigmoid": (F.hardsigmoid, [[INF, -INF, 1.0]]),
    "huber": (lambda x: F.huber_loss(x, 0 * x.nan_to_num()), [[INF, -INF, 0.5, 3.0]]),
    "margin": (lambda x: F.multi_margin_loss(x, torch.tensor([0])), [[1.0, -INF, 0.5]]),
    "margin, p 2": (lambda x: F.multi_margin_loss(x, torch.tensor([0]), 2), [[1.0, -INF, 0.5]]),
    "labels": (
        lambda x: F.multilabel_margin_loss(x, torch.tensor([[0, -1, 0]])),
        [[1.0, -INF, 0.5]],
    ),
    "ctc without steps": (
        lambda x: F.ctc_loss(x[:, None], torch.tensor([[1]]), [0], [1], zero_infinity=True),
        [[-1.0, -0.5]],
    ),
}


@pytest.mark.parametrize("name", AT_INFINITY)
def test_infinite_values_and_empty_inputs_are_torchs(name: str) -> None:
    """Scores of −∞ hide a class, and must not make the others' derivatives NaN."""
    f, values = AT_INFINITY[name]
    x = torch.tensor(values, dtype=torch.float64)
    first = first_backward(f, [x])
    with jx.differentiable():
        value, tangent = jvp(f, (x,), (torch.ones_like(x),))
        leaf = x.clone().requires_grad_()
        (c,) = directions([value], 2)
        ours = torch.autograd.grad(f(leaf), leaf, c, create_graph=True)
    assert torch.equal(value, f(x)) and tangent.isfinite().all()
    close(ours, first)


def test_sparse_tensors_have_no_tangent() -> None:
    x = torch.eye(3)
    with jx.differentiable():
        with pytest.raises(NotImplementedError, match="hold no tangent: keep the tensor dense"):
            jvp(lambda x: x.to_sparse().to_dense(), (x,), (x,))
        assert x.to_sparse().is_sparse
        leaf = x.clone().requires_grad_()
        (leaf.to_sparse().to_dense() ** 2).sum().backward()
    assert torch.equal(leaf.grad, 2 * x)  # type: ignore[arg-type]


# ---- torch's own table --------------------------------------------------------------------------

WORDS = (
    *("not implemented", "not supported", "does not support", "forward AD", "not differentiable"),
    *("once_differentiable", "double backward"),
)
SERVED = (
    *("cdist", "nn.functional.pdist", "nn.functional.ctc_loss", "nn.functional.embedding_bag"),
    *("nn.functional.hardsigmoid", "nn.functional.multi_margin_loss", "ormqr", "cholesky"),
    *("nn.functional.multilabel_margin_loss", "_segment_reduce", "nn.functional.grid_sample"),
    *("index_reduce", "nn.functional.huber_loss", "nn.functional.soft_margin_loss"),
    *("native_dropout_backward", "grid_sampler_2d"),
)
WRONG = (
    *("nn.functional.layer_norm", "nn.functional.batch_norm", "nn.functional.instance_norm"),
    *("linalg.det", "logdet", "linalg.slogdet", "linalg.solve", "linalg.solve_ex"),
    *("linalg.tensorsolve", "linalg.householder_product", "scatter_reduce"),
)


def refusals(call: Call) -> Iterator[str]:
    """Which derivatives torch refuses."""
    x, every = call.points, tuple(range(len(call.points)))
    t = directions(x)
    scalar = lambda *x: sum((y * y.conj()).real.sum() for y in call(*x))  # noqa: E731

    def second() -> None:
        leaves = [a.clone().requires_grad_() for a in x]
        first = torch.autograd.grad(scalar(*leaves), leaves, create_graph=True, allow_unused=True)
        first = [g for g in first if g is not None and g.requires_grad]
        if first:
            torch.autograd.grad(
                sum(g.abs().square().sum() for g in first), leaves, allow_unused=True
            )

    ways: dict[str, Callable[[], object]] = {
        "forward": lambda: jvp(call, x, t),
        "second": second,
        "mixed": lambda: jvp(grad(scalar, every), x, t),
    }
    for name, way in ways.items():
        try:
            way()
        except (RuntimeError, NotImplementedError) as error:
            if any(word in str(error) for word in WORDS):
                yield name


@pytest.mark.slow
def test_the_whole_table_but_sparse_tensors_is_served() -> None:
    refused = set()
    operators = operators_of_torch.operators(True) + operators_of_torch.operators(False)
    for operator in operators:
        if "scaled_dot_product" in operator.name or "attention" in operator.name:
            continue
        calls = []
        with suppress(RuntimeError):  # some start from sparse tensors, which are not contiguous
            calls += islice(operators_of_torch.calls(operator), 3)
        with jx.differentiable():
            for call in calls:
                refused |= {operators_of_torch.title(operator) for _ in refusals(call)}
    assert refused <= {"to_sparse"}


def nested_errors(call: Call) -> Iterator[tuple[str, float]]:
    """The relative error of each nesting that answers, against differences of the inner one."""
    x, t, u = call.points, directions(call.points), directions(call.points, 5)
    c = directions([y.detach() for y in call(*x)], 6)
    pull = lambda *x: torch.func.vjp(call, *x)[1](c)  # noqa: E731
    push = lambda *x: jvp(call, x, t)[1]  # noqa: E731
    pairs = [torch.stack([a, -2 * a]) for a in c]
    rows = lambda *x: vmap(torch.func.vjp(call, *x)[1])(tuple(pairs))  # noqa: E731
    for name, inner in {"vjp": pull, "jvp": push, "jacrev": rows}.items():
        try:
            expected = _flat(difference(inner, x, u))
            got = _flat(jvp(inner, x, u)[1])
        except (RuntimeError, NotImplementedError):
            continue
        size = max(expected.norm().item(), 1e-3 * _flat(inner(*x)).norm().item(), 1e-6)
        if torch.isfinite(expected).all():
            yield f"jvp({name})", ((got - expected).norm() / size).item()


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors]) if tensors else torch.zeros(0)


@pytest.mark.parametrize("served", WRONG)
def test_nestings_over_torchs_samples(served: str) -> None:
    for operator in operators_of_torch.operators():
        if operator.name == served and operator.variant_test_name in ("", "prod"):
            with jx.differentiable():
                for call in islice(operators_of_torch.calls(operator), 4):
                    errors = dict(nested_errors(call))
                    assert all(error < 1e-4 for error in errors.values()), errors


@pytest.mark.slow
@pytest.mark.parametrize("served", SERVED)
def test_gradcheck_over_torchs_samples(served: str) -> None:
    operators = operators_of_torch.operators(True) + operators_of_torch.operators(False)
    matching = [operator for operator in operators if operator.name == served]
    assert matching or served == "cholesky"  # which newer versions have removed
    for operator in matching:
        for call in islice(operators_of_torch.calls(operator), 8):
            if sum(x.numel() for x in call.points) > 60:
                continue
            x = [a.clone().requires_grad_() for a in call.points]
            with jx.differentiable():
                torch.autograd.gradcheck(call, x, check_forward_ad=True)
                torch.autograd.gradgradcheck(call, x, check_fwd_over_rev=True, atol=1e-4)
