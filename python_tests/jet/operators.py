"""torch's own samples of its operators (`op_db`), each held against derivatives by other means.

The oracles are central differences; where a sample sits on a kink, or is too steep for them,
torch's double backward, and, for rules that are not made of it, nested `torch.func.jvp`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp
from torch.utils import _pytree as pytree

import jachess_ext as jx
from jachess_ext.jet.engine.errors import MissingJetRule

from ..models import oracles

DIRECTIONS = 2
SMALL = oracles.Steps(1e-7, 1e-5)  # of first differences alone
STEPS = (oracles.Steps(1e-3, 2e-3), oracles.Steps(1e-5, 1e-4), oracles.Steps(2e-2, 2e-2))


def operators(forward: bool = True, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Every operator of torch's table with derivatives in this dtype, of those that have a forward
    mode, or of those that have none: a variant of a function may have none beside others that do.
    """
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds
    from torch.testing._internal.opinfo import core

    # For each sample torch reads the source of every frame of the stack, to find a unittest: here
    # is none, and under pytest that takes four times as long as all else.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    return [
        op
        for op in op_db
        if op.supports_autograd
        and op.supports_forward_ad == forward
        and dtype in op.supported_dtypes("cpu")
    ]


def title(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


@dataclass
class Call:
    """A sample as a function of the tensors that carry derivatives.

    Attributes:
        points: their values.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    structure: Any
    places: list[int]
    points: tuple[Tensor, ...]
    process: Callable[[Any], Any]
    strided: bool = False

    def __call__(self, *tensors: Any) -> tuple[Any, ...]:
        """Every output that carries derivatives; complex ones as pairs of real numbers."""
        torch.manual_seed(7)  # what is drawn at random is the same in every call
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = _with_gaps(tensor) if self.strided else tensor
        args, named = pytree.tree_unflatten(leaves, self.structure)
        return tuple(_outputs(self.process(self.function(*args, **named))))


def _with_gaps(tensor: Any) -> Any:
    """The same numbers, every other one of a storage."""
    return torch.stack([tensor, tensor], -1)[..., 0] if tensor.ndim else tensor


def _outputs(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        if value.is_complex():
            yield torch.view_as_real(value.resolve_conj())
        elif value.is_floating_point():
            yield value.to_dense() if value.layout != torch.strided else value
    elif isinstance(value, dict):
        yield from _outputs(list(value.values()))
    elif isinstance(value, list | tuple) or hasattr(value, "__next__"):
        for item in value:
            yield from _outputs(item)


def calls(op: Any, limit: int | None = None, dtype: torch.dtype = torch.float64) -> Iterator[Call]:
    """The samples of an operator: as they are, as a method, by its other names, and with fewer
    active tensors.

    Args:
        limit: how many of the samples; those with an empty tensor are not counted.
    """
    torch.manual_seed(0)
    samples = op.sample_inputs("cpu", dtype, requires_grad=True)
    named = [op, *op.aliases]
    others = [each.op for each in op.aliases] + [each.method_variant for each in named]
    functions = [op.op, *(f for f in others if f is not None and f is not op.op)]
    counted = 0
    for number, sample in enumerate(samples):
        leaves, structure = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
        if counted == limit:
            return
        counted += all(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
        places = [
            n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for place in places:  # cov's weights are float32, in which differences say nothing
            if leaves[place].dtype == torch.float32:
                leaves[place] = leaves[place].double()
        process = sample.output_process_fn_grad
        for turn, function in enumerate(functions):
            if turn and number:
                continue

            def called(*args: Any, function: Callable = function, **named: Any) -> Any:
                return op.gradcheck_wrapper(function, *args, **named)

            chosen = [places]
            if len(places) > 1 and number == 0 and not turn:
                chosen += [[place] for place in places]
            for some in chosen:
                points = tuple(leaves[place].contiguous() for place in some)
                if not points:
                    continue
                yield Call(called, leaves, structure, some, points, process)
            if number == 0 and not turn:
                points = tuple(leaves[place].contiguous() for place in places)
                yield Call(called, leaves, structure, places, points, process, strided=True)


@dataclass
class Verdict:
    """What became of one call.

    Attributes:
        kind: "right", "no rule", "wrong", "raises", "skipped" (the primal is no number), or
            "no gradient" (the values are right, their gradient is refused).
    """

    kind: str
    detail: str = ""


def judge(call: Call, *, independent: bool = True, gradients: bool = True) -> Verdict:
    """Hold the jet of a call against the oracles.

    Args:
        independent: torch's forward mode is an oracle, since the rule is not made of it.
    """
    torch.manual_seed(1)
    steps = tuple(torch.randn(DIRECTIONS, *p.shape, dtype=p.dtype) for p in call.points)
    if not all(point.isfinite().all() for point in call.points):
        return Verdict("skipped", "infinite input")
    try:
        plain = call(*call.points)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return Verdict("skipped", f"plain: {error}")
    if not plain or not any(p.isfinite().any() for p in plain):
        return Verdict("skipped", "no number among the outputs")
    try:
        with torch.no_grad():
            jets = jx.jet(call, call.points, steps)
    except MissingJetRule as error:
        return Verdict("no rule", str(error))
    except Exception as error:
        return Verdict("raises", f"{type(error).__name__}: {error}")
    if (found := _primals(jets, plain)) is not None:
        return Verdict("wrong", found)
    if not _agrees(jets, call, steps, plain, independent):
        return Verdict("wrong", "derivatives")
    if not _drawn_once(call, steps):
        return Verdict("wrong", "drawn anew for other directions")
    return _judge_gradient(call, steps) if gradients else Verdict("right")


def _drawn_once(call: Call, steps: Sequence[Tensor]) -> bool:
    """Whether four directions that are the same have the same derivatives, of what draws."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    call(*call.points)
    if torch.equal(torch.get_rng_state(), before):
        return True
    with torch.no_grad():
        jets = jx.jet(call, call.points, tuple(torch.stack([step[0]] * 4) for step in steps))
    return all(
        torch.allclose(part, parts[0], rtol=1e-12, atol=1e-12, equal_nan=True)
        for jet in jets
        for parts in (jet.first, jet.second)
        for part in parts
    )


def _primals(jets: Sequence[Any], plain: Sequence[Tensor]) -> str | None:
    if len(jets) != len(plain):
        return f"{len(jets)} outputs, not {len(plain)}"
    for jet, primal in zip(jets, plain, strict=True):
        if jet.primal.shape != primal.shape or jet.primal.dtype != primal.dtype:
            return f"primal {jet.primal.dtype}{list(jet.primal.shape)}"
        if not torch.allclose(jet.primal, primal, rtol=1e-9, atol=1e-11, equal_nan=True):
            return "primal"
    return None


def _moved(points: Sequence[Tensor], *moves: tuple[float, Sequence[Tensor]]) -> list[Tensor]:
    out = [point.clone() for point in points]
    for factor, step in moves:
        out = [point + factor * part for point, part in zip(out, step, strict=True)]
    return out


def _agrees(
    jets: Sequence[Any],
    call: Call,
    steps: Sequence[Tensor],
    plain: Sequence[Tensor],
    independent: bool,
) -> bool:
    u, w = ([step[i] for step in steps] for i in range(DIRECTIONS))
    found = [(jet.first[0], jet.first[1], jet.second[0]) for jet in jets]
    left = {(n, part) for n in range(len(plain)) for part in range(3)}
    for scale in STEPS:
        try:
            expected = _differences(call, u, w, scale)
        except RuntimeError:  # a step out of the domain, as of a probability above 1
            continue
        for n, part in sorted(left):
            h = scale.first if part < 2 else scale.mixed
            rounding = 2e-14 / h if part < 2 else 2e-14 / h**2
            if _close(found[n][part], expected[part][n], plain[n], rounding):
                left.discard((n, part))
        if not left:
            return True
    if _by_double_backward(call, u, w, found, plain):
        return True
    return independent and _by_nested_jvp(call, u, w, found, plain)


def _differences(call: Call, u: Any, w: Any, scale: oracles.Steps) -> list[list[Tensor]]:
    x, zero = torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)

    def at(place: Tensor) -> tuple[Any, ...]:
        return call(*_moved(call.points, (place[0].item(), u), (place[1].item(), w)))

    return [
        oracles.first_difference(at, x, zero[0], scale),
        oracles.first_difference(at, x, zero[1], scale),
        oracles.mixed_difference(at, x, zero[0], zero[1], scale),
    ]


def _close(actual: Tensor, expected: Tensor, primal: Tensor, rounding: float) -> bool:
    """Entries whose primal is no number, or infinite, have no difference to be held against."""
    finite = primal.isfinite()
    a, b, size = actual[finite], expected[finite], primal[finite]
    if not a.numel():
        return True
    if not a.isfinite().all() or not b.isfinite().all():
        return False
    limit = 1e-6 * b.abs().max() + rounding * (1 + size.abs().max())
    return bool(((a - b).abs() <= limit).all())


def _by_double_backward(call: Call, u: Any, w: Any, found: Any, plain: Any) -> bool:
    """Every part contracted with three random vectors."""
    points = [point.clone().requires_grad_() for point in call.points]
    try:
        for _ in range(3):
            for n in range(len(plain)):
                v = torch.where(plain[n].isfinite(), torch.randn_like(plain[n]), 0)
                output = call(*points)[n]
                output = torch.where(plain[n].isfinite(), output, 0)
                gradients = _grad((v * output).sum(), points)
                along = [_dot(gradients, d) for d in (u, w)]
                mixed = _dot(_grad(along[0], points), w)
                parts = [torch.where(plain[n].isfinite(), part, 0) for part in found[n]]
                for part, expected in zip(parts, (*along, mixed), strict=True):
                    size = v.norm() * part.norm()
                    if not (((v * part).sum() - expected).abs() <= 1e-9 * size + 1e-12):
                        return False
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _dot(gradients: Sequence[Tensor], steps: Sequence[Tensor]) -> Tensor:
    """The derivative along the steps; a complex gradient is torch's, ∂/∂a + i ∂/∂b."""
    pairs = zip(gradients, steps, strict=True)
    return sum(((g.conj() * s).real.sum() for g, s in pairs), torch.zeros(()))


def _grad(value: Tensor, points: list[Tensor]) -> Sequence[Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(point) for point in points]
    return torch.autograd.grad(value, points, create_graph=True, materialize_grads=True)


def _by_nested_jvp(call: Call, u: Any, w: Any, found: Any, plain: Any) -> bool:
    points = call.points

    def inner(*given: Tensor) -> tuple[Tensor, ...]:
        return jvp(call, given, tuple(u))[1]

    try:
        with torch.no_grad():
            first, second = jvp(inner, points, tuple(w))
            other = jvp(call, points, tuple(w))[1]
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return all(
        torch.allclose(part[p.isfinite()], expected[p.isfinite()], rtol=1e-9, atol=1e-11)
        for n, p in enumerate(plain)
        for part, expected in zip(found[n], (first[n], other[n], second[n]), strict=True)
    )


def _judge_gradient(call: Call, steps: Sequence[Tensor]) -> Verdict:
    """The gradient of a random combination of all streams, along a random displacement."""
    given = [t.clone().requires_grad_() for t in (*call.points, *steps)]
    count = len(call.points)
    weights: list[Tensor] = []

    def value(tensors: Sequence[Tensor]) -> Tensor:
        jets = jx.jet(call, tuple(tensors[:count]), tuple(tensors[count:]))
        if not weights:
            torch.manual_seed(2)
            weights.extend(
                torch.where(j.primal.isfinite(), torch.randn_like(j.streams), 0).detach()
                for j in jets
            )
        parts = zip(jets, weights, strict=True)
        return sum((w * torch.where(j.primal.isfinite(), j.streams, 0)).sum() for j, w in parts)

    try:
        total = value(given)
        gradients = _grad(total, given)
    except MissingJetRule as error:
        return Verdict("no gradient", str(error))
    except Exception as error:
        return Verdict("raises", f"in the backward: {type(error).__name__}: {error}")
    torch.manual_seed(3)
    # A point whose value is NaN stays where it is.
    move = [torch.where(g.isfinite(), torch.randn_like(g), 0) for g in gradients]
    if len(weights) and all(w.all() for w in weights):
        move = [torch.randn_like(g) for g in gradients]
    gradients = [torch.where(m != 0, g, 0) for g, m in zip(gradients, move, strict=True)]
    along = _dot(gradients, move).detach()
    origin = [t.detach() for t in given]
    estimates = []
    for scale in (*STEPS, SMALL):
        try:
            with torch.no_grad():
                (expected,) = oracles.first_difference(
                    lambda s: (value(_moved(origin, (s.item(), move))),),
                    torch.zeros((), dtype=torch.float64),
                    torch.ones((), dtype=torch.float64),
                    scale,
                )
        except RuntimeError:  # a step out of the domain
            continue
        size = sum((g * m).abs().sum() for g, m in zip(gradients, move, strict=True))
        limit = 1e-6 * size + 1e-13 / scale.first * (1 + total.abs())
        if (along - expected).abs() <= limit:
            return Verdict("right")
        estimates.append(expected.item())
    if estimates and along.isfinite() and max(estimates) - min(estimates) > abs(estimates[0]) / 2:
        return Verdict("right", "a kink: the gradient's differences contradict each other")
    return Verdict("wrong", "gradient")


@contextmanager
def quiet() -> Iterator[None]:
    """torch's samples call what is deprecated, on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
