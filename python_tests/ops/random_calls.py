"""Random calls of every operator, from a kept seed: shapes, strides, dtypes, values, settings.

    python -m python_tests.ops.random_calls --calls 10000 --seed 0 [--table docs/hardening.md]

A call with ordinary values is compared, result and gradients, with the pure-torch reference in
float64.  One with a NaN, an infinity or huge numbers in one entry of the first dimension behind the
streams must leave every other entry as it is without them, to the bit, and hand a NaN on to its own
entry.
The NTK's operators have no streams, and calls of their own (`NTKCall`).
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jachess_ext import ops
from python_tests.ops import bad_calls
from python_tests.ops.ntk_sides import BOUNDS as NTK_BOUNDS
from python_tests.ops.ntk_sides import Side, gradients

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
HUGE = {torch.float64: 1e200, torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 3e4}
TINY = {torch.float64: 1e-300, torch.float32: 1e-38, torch.bfloat16: 1e-38, torch.float16: 1e-7}
SPECIAL = {"nan": lambda dtype: float("nan"), "inf": lambda dtype: float("inf"), "huge": HUGE.get}
CHANGED = "another entry has changed"


@dataclass(frozen=True)
class Call:
    """One call: ``run(operator, *tensors)``.

    Attributes:
        jets: differentiable tensors with streams in front; entries of dimension 1 do not mix.
        others: parameters, masks and indices, or None.
        run: calls a function with the operator's signature.
        scale: size of the terms that may cancel to nothing: errors are relative to it at least.
    """

    name: str
    jets: list[Tensor]
    others: list[Tensor | None]
    run: Callable[..., Any]
    scale: float = 0.0

    @property
    def first(self) -> Tensor:
        return self.jets[0]

    def scaled(self, factor: float) -> Call:
        return replace(self, jets=[jet * factor for jet in self.jets])

    def result(self, function: Any, jets: Sequence[Tensor], others: Sequence[Any]) -> list[Tensor]:
        found = self.run(function, *jets, *others)
        return list(found) if isinstance(found, tuple) else [found]


class Maker:
    """Random pieces of a call."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = self.choose.choice(list(BOUNDS))
        self.q = self.choose.randint(1, 4)
        pairs = self.q * (self.q - 1) // 2
        self.streams = 1 + self.q + self.choose.choice([0, pairs])

    def summed(self) -> int:
        """At times go on with stacks of any number of directions; over how many their sum goes."""
        if self.choose.random() < 0.6:
            return 0
        self.q = self.choose.randint(1, 9)
        summed = self.choose.randint(0, self.q)
        self.streams = 1 + self.q + (summed > 0)
        return summed

    def size(self, largest: int) -> int:
        """Often small, at times zero or one."""
        return self.choose.choice([0, 1, 2, self.choose.randint(1, largest)])

    def shape(self, dimensions: int, largest: int = 9, last: int = 70) -> list[int]:
        return [*(self.size(largest) for _ in range(dimensions - 1)), self.size(last)]

    def numbers(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return values.to(dtype or self.dtype)

    def jet(self, shape: Sequence[int]) -> Tensor:
        """[S, *shape] with any strides."""
        return self.strided(self.numbers([self.streams, *shape]))

    def strided(self, x: Tensor) -> Tensor:
        kind = self.choose.choice(["dense", "dense", "transposed", "sliced", "shifted"])
        if kind == "transposed" and x.ndim > 2:
            order = list(range(x.ndim))
            self.choose.shuffle(order)
            back = [order.index(d) for d in range(x.ndim)]
            return x.permute(order).contiguous().permute(back)
        if kind == "sliced":
            wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
            wide[..., ::2] = x
            return wide[..., ::2]
        if kind == "shifted":
            flat = x.new_zeros(x.numel() + 1)
            flat[1:] = x.flatten()
            return flat[1:].view(x.shape)
        return x

    def maybe(self, value: Tensor) -> Tensor | None:
        return self.choose.choice([value, value, None])

    def channels(self, n: int) -> Tensor | None:
        dtype = self.choose.choice([self.dtype, torch.float32])
        return self.maybe(self.numbers([n], dtype))


def _activation(m: Maker) -> Call:
    kind, summed = m.choose.choice(ops.ACTIVATION_KINDS), m.summed()
    q, x = m.q, m.jet(m.shape(m.choose.randint(1, 3)))
    return Call("activation_jet", [x], [], lambda f, x: f(x, kind, q, summed))


def _gated_activation(m: Maker) -> Call:
    kind, summed = m.choose.choice(ops.ACTIVATION_KINDS), m.summed()
    q, shape = m.q, m.shape(m.choose.randint(1, 3))
    if m.choose.random() < 0.3 and shape[-1]:
        both = m.numbers([m.streams, *shape[:-1], 2 * shape[-1]])
        jets = list(both.chunk(2, -1))
    else:
        jets = [m.jet(shape), m.jet(shape)]
    return Call("gated_activation_jet", jets, [], lambda f, g, u: f(g, u, kind, q, summed))


def _norm(name: str, bias: bool, residual: bool) -> Callable[[Maker], Call]:
    def make(m: Maker) -> Call:
        shape, eps = m.shape(m.choose.randint(2, 3)), 10.0 ** -m.choose.randint(2, 8)
        summed = m.summed()
        q = m.q
        jets = [m.jet(shape) for _ in range(1 + residual)]
        others = [m.channels(shape[-1]) for _ in range(1 + bias)]
        if len(shape) == 3 and others[0] is not None and m.choose.random() < 0.3:
            # every row its own
            others = [x if x is None else m.numbers(shape[1:], x.dtype) for x in others]
        # Of one channel x / sqrt(x^2 + eps) is left: terms of rstd^3 cancel in its derivatives.
        primal = sum(jet[0].double() for jet in jets)
        square = 0.0 if bias or not primal.numel() else float(primal.square().min())
        scale = (square + eps) ** -1.5 if shape[-1] == 1 else 0.0
        return Call(name, jets, others, lambda f, *tensors: f(*tensors, eps, q, summed), scale)

    return make


def _softmax(m: Maker) -> Call:
    masked, summed = m.choose.random() < 0.3, m.summed()
    q = m.q
    x = m.jet(m.shape(m.choose.randint(2, 3)))
    if masked and x.numel():
        x = x.clone()
        x[0].masked_fill_(torch.rand(x[0].shape, generator=m.generator) < 0.2, -torch.inf)
    return Call("softmax_jet", [x], [], lambda f, x: f(x, q, masked, summed))


def _attention(m: Maker) -> Call:
    batch, group, key_heads = m.size(3), m.choose.randint(1, 3), m.choose.randint(1, 2)
    queries, keys, size, value_size = m.size(40), m.size(70), m.size(40), m.size(24)
    summed = m.summed()
    q = m.q
    settings = {
        "summed": summed,
        "causal": m.choose.random() < 0.4,
        "window": m.choose.choice([(-1, -1), (m.choose.randint(0, 9), m.choose.randint(-1, 9))]),
        "softcap": m.choose.choice([0.0, 0.0, 5.0]),
        "scale": m.choose.choice([None, 0.3]),
    }
    jets = [
        m.jet([batch, group * key_heads, queries, size]),
        m.jet([batch, key_heads, keys, size]),
        m.jet([batch, key_heads, keys, value_size]),
    ]
    shape = [m.choose.choice([1, batch]), 1, m.choose.choice([1, queries]), keys]
    kind = m.choose.choice(["none", "none", "boolean", "additive"])
    mask = None
    if kind == "boolean":
        mask = torch.rand(shape, generator=m.generator) < 0.8
    elif kind == "additive":
        mask = m.numbers(shape)
    # Gradients of weights that sum to one cancel, wholly where there is one key: every stream of
    # the scores gets sums of value_size products from up to all streams.
    scale = m.streams * max(1, value_size) ** 0.5
    return Call(
        "attention_jet", jets, [mask], lambda f, *tensors: f(*tensors, q=q, **settings), scale
    )


def _jet_mean_squares(m: Maker) -> Call:
    q, shape = m.q, m.shape(m.choose.randint(2, 3))
    mask = m.maybe(torch.rand(shape[:-1], generator=m.generator) < 0.7)
    order = torch.randperm(shape[-1], generator=m.generator)
    index = m.maybe(order[: m.choose.randint(0, shape[-1])])
    return Call(
        "jet_mean_squares", [m.jet(shape)], [mask, index], lambda f, x, *rest: f(x, q, *rest)
    )


@dataclass(frozen=True)
class NTKCall:
    """One call: sides are inputs [N, T, d] and cotangents [C, N, T, e] of every layer.

    Attributes:
        left: whose kernel it is.
        right: with whom; None: with itself.
        settings: the operator's further arguments.
    """

    name: str
    left: Side
    right: Side | None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> Tensor:
        return self.left[0]

    def result(self) -> Tensor:
        sides = [*self.left, *(self.right or ())]
        found = getattr(ops, self.name)(*sides, **self.settings)
        assert isinstance(found, Tensor)
        return found

    def scaled(self, factor: float) -> NTKCall:
        """Both sides' inputs times a factor."""
        right = None if self.right is None else (self.right[0] * factor, self.right[1])
        return replace(self, left=(self.left[0] * factor, self.left[1]), right=right)

    def check(self, values: str, special: Callable[[torch.dtype], Any] | None) -> None:
        """Raises:
        AssertionError: the operator's answer is wrong.
        """
        if special is not None:
            self._check_containment(values, special(self.first.dtype))
            return
        found = self.result()
        assert torch.equal(found, self.result()), "another result the second time"
        if self.right is None:
            assert torch.equal(found, found.permute(2, 3, 0, 1)), "not symmetric"
        left = gradients(self.left)
        right = left if self.right is None else gradients(self.right)
        wanted = torch.einsum("cnp,dmp->cndm", left, right)
        wide = torch.float64 if self.first.dtype == torch.float64 else torch.float32
        assert found.shape == wanted.shape and found.dtype == wide
        if values == "ordinary" and wanted.numel():
            # ⟨g, g'⟩ of two samples cancels; ‖g‖ ‖g'‖ does not
            size = float(left.norm(dim=-1).max() * right.norm(dim=-1).max())
            error = float((found.double() - wanted).abs().max())
            assert error <= NTK_BOUNDS[self.first.dtype] * max(size, 1e-12), f"error {error:.2e}"

    def _check_containment(self, values: str, bad: float) -> None:
        """The first number of sample 0 is spoilt: kernels without sample 0 stay as they are."""
        inputs, deltas = self.left
        if not inputs.numel():
            return
        spoilt = inputs.clone(memory_format=torch.contiguous_format)
        spoilt[0, 0, 0] = bad
        clean, dirty = self.result(), replace(self, left=(spoilt, deltas)).result()
        rest = [kernel[:, 1:] for kernel in (clean, dirty)]
        if self.right is None:
            rest = [kernel[..., 1:] for kernel in rest]
        assert torch.equal(*rest), "another sample's kernel has changed"
        used = any(bool(delta[:, 0, 0].any()) for delta in deltas)
        if not used:
            assert torch.equal(clean, dirty), "a position without cotangents counts"
        elif values == "nan" and self.right is None:
            assert dirty[:, 0, :, 0].isnan().any(), "the NaN is lost"


def _count(m: Maker, largest: int) -> int:
    """As `Maker.size`, but rarely zero: of some ten sizes a call's kernel needs all."""
    return m.choose.choice([m.size(largest), *(m.choose.randint(1, largest) for _ in range(4))])


def _side(m: Maker, samples: int, outputs: int, features: int, widths: list[int]) -> Side:
    positions = _count(m, m.choose.choice([12, 150]))
    inputs = m.strided(m.numbers([samples, positions, features]))
    padded = torch.rand(samples, positions, 1, generator=m.generator) < m.choose.choice([0.0, 0.4])
    deltas = [
        m.strided(m.numbers([outputs, samples, positions, e]).masked_fill(padded, 0))
        for e in widths
    ]
    return inputs, deltas


def _maker(name: str) -> Callable[[Maker], NTKCall]:
    def make(m: Maker) -> NTKCall:
        outputs, features = m.choose.choice([1, 1, 2, 3]), _count(m, 70)
        widths = [_count(m, 60) for _ in range(m.choose.randint(1, 3))]
        sides = [_side(m, _count(m, 40), outputs, features, widths) for _ in range(2)]
        settings: dict[str, Any] = {}
        if name == "ntk_materialised":
            settings["workspace"] = m.choose.choice([1, 4096, 2**27])
        return NTKCall(name, sides[0], m.choose.choice([None, sides[1]]), settings)

    return make


NTK_MAKERS = {name: _maker(name) for name in ("ntk_gram", "ntk_materialised")}


MAKERS: dict[str, Callable[[Maker], Call | NTKCall]] = {
    "activation_jet": _activation,
    "gated_activation_jet": _gated_activation,
    "layer_norm_jet": _norm("layer_norm_jet", bias=True, residual=False),
    "add_layer_norm_jet": _norm("add_layer_norm_jet", bias=True, residual=True),
    "rms_norm_jet": _norm("rms_norm_jet", bias=False, residual=False),
    "add_rms_norm_jet": _norm("add_rms_norm_jet", bias=False, residual=True),
    "softmax_jet": _softmax,
    "attention_jet": _attention,
    "jet_mean_squares": _jet_mean_squares,
    **NTK_MAKERS,
}


def random_call(seed: int) -> tuple[Call | NTKCall, str]:
    """The call of this seed, and what its values are like."""
    maker = Maker(seed)
    call = MAKERS[maker.choose.choice(list(MAKERS))](maker)
    values = maker.choose.choice(["ordinary"] * 6 + ["tiny", *SPECIAL])
    if values == "tiny":
        call = call.scaled(TINY[call.first.dtype])
    return call, values


def check(call: Call | NTKCall, values: str) -> None:
    """Raises:
    AssertionError: the operator's answer is wrong.
    """
    if isinstance(call, NTKCall):
        call.check(values, SPECIAL.get(values))
    elif values in SPECIAL:
        check_containment(call, values)
    else:
        check_against_the_reference(call, ordinary=values == "ordinary")


def check_against_the_reference(call: Call, ordinary: bool = True) -> None:
    """Result and gradients.  Where a call is ill-conditioned (the variance of two channels), the
    error may be of the size of the reference's own in that dtype (in float64: in float32, in
    proportion), whose sums have another order."""
    dtype = call.jets[0].dtype
    reference = getattr(ops, f"{call.name}_reference")
    found = _with_gradients(call, getattr(ops, call.name), dtype)
    wide = dtype == torch.float64
    rounded = _with_gradients(call, reference, torch.float32 if wide else dtype)
    allowed = 16 * 2.0**-29 if wide else 16
    exact = _with_gradients(call, reference, torch.float64)
    for number, (one, same, right) in enumerate(zip(found, rounded, exact, strict=True)):
        assert one.shape == right.shape and (wide or one.dtype == same.dtype), number
        if not right.numel() or not ordinary:
            continue
        bound = max(BOUNDS[dtype], allowed * error_of(same, right, call.scale))
        error = error_of(one, right, call.scale)
        assert error <= bound, f"tensor {number}: error {error:.2e}, allowed {bound:.2e}"


def error_of(found: Tensor, right: Tensor, scale: float) -> float:
    """The worst stream's largest error, over its largest number or over ``scale``; infinite with a
    NaN anywhere."""
    rows = len(right)
    difference = (found.double() - right.double()).abs().reshape(rows, -1).amax(1)
    size = right.double().abs().reshape(rows, -1).amax(1).clamp_min(max(scale, 1e-12))
    return float((difference / size).nan_to_num(nan=math.inf, posinf=math.inf).max())


def _with_gradients(call: Call, function: Any, dtype: torch.dtype) -> list[Tensor]:
    """Results, then gradients of the jets."""
    convert = dtype != call.jets[0].dtype
    jets = [(jet.to(dtype) if convert else jet).detach().requires_grad_() for jet in call.jets]
    others = [
        other.to(dtype) if convert and other is not None and other.is_floating_point() else other
        for other in call.others
    ]
    results = call.result(function, jets, others)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(r.shape, generator=generator, dtype=torch.float64) for r in results]
    pairs = [(r, c.to(r.dtype)) for r, c in zip(results, cotangents, strict=True)]
    gradients = torch.autograd.grad(
        [r for r, _ in pairs], jets, [c for _, c in pairs], allow_unused=True
    )
    given = [torch.zeros_like(j) if g is None else g for g, j in zip(gradients, jets, strict=True)]
    return [*(r.detach() for r in results), *given]


def check_containment(call: Call, values: str) -> None:
    """Entry 0 of the first jet is spoilt, in its primal."""
    jet = call.jets[0]
    if jet.ndim < 3 or not jet.numel():
        return
    spoilt = jet.clone(memory_format=torch.contiguous_format)
    spoilt[0, 0].view(-1)[0] = SPECIAL[values](jet.dtype)
    function = getattr(ops, call.name)
    clean = call.result(function, [jet, *call.jets[1:]], call.others)
    dirty = call.result(function, [spoilt, *call.jets[1:]], call.others)
    for one, other in zip(clean, dirty, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        axis = 0 if call.name == "jet_mean_squares" else 1
        rest = [x.narrow(axis, 1, x.shape[axis] - 1) for x in (one, other)]
        torch.testing.assert_close(*rest, rtol=0, atol=0, equal_nan=True, msg=CHANGED)
    if values == "nan" and call.name not in ("jet_mean_squares", "attention_jet"):
        assert dirty[0][0, 0].isnan().any(), "the NaN is lost"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--calls", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--table", type=Path, help="write the counts into this file")
    given = options.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    for seed in range(given.seed, given.seed + given.calls):
        call, values = random_call(seed)
        try:
            check(call, values)
        except Exception as error:
            first = f"{call.first.dtype} {list(call.first.shape)}"
            raise AssertionError(f"seed {seed}: {call.name}, {values}, {first}") from error
        counts[call.name, values] += 1
    answers = bad_calls.try_all()
    text = table(counts, given.seed) + "\n" + bad_calls.table(answers)
    print(text)
    if given.table:
        given.table.write_text(text)


def table(counts: Counter[tuple[str, str]], seed: int) -> str:
    kinds = ["ordinary", "tiny", *SPECIAL]
    lines = [
        f"{counts.total()} random calls from seed {seed}: no crash, none wrong.",
        "",
        "| operator | " + " | ".join(kinds) + " |",
        "|---" * (1 + len(kinds)) + "|",
    ]
    for name in MAKERS:
        lines.append(f"| {name} | " + " | ".join(str(counts[name, k]) for k in kinds) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
