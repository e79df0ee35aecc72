"""What a program's jets have to be, and what they are.

Expected is reverse mode, three times over, of the program on plain tensors; where that is refused
by torch, is not finite or differs from the jet, central differences in float64 have a word.
"""

from __future__ import annotations

import copy
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import jachess_ext as jx
from jachess_ext.jet import MissingJetRule, composed_rules

from .draw import draw
from .program import Program, constant, laid_out

MODES = ("jet", "composed", "no_grad", "jvp", "target", "squares", "sum")
ORDERS = {"target": 0, "jvp": 1, "squares": "squares", "sum": "sum"}  # 2 of the others
Order = int | str  # 2: with the mixed derivatives; "squares", "sum": with those along one direction
TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3, torch.float16: 6e-2}


class NotAProgram(Exception):
    """Plain torch refuses the program or gives something that is not finite."""


@dataclass(frozen=True)
class Verdict:
    """``kind`` is "right", "refused", "wrong" or, where neither reverse mode nor differences are to
    be had, "unknown"; ``what`` names the number or the error."""

    kind: str
    what: str = ""
    text: str = ""


@dataclass(frozen=True)
class Numbers:
    """Values of the outputs; sums of their derivatives with fixed weights, ``[q]`` and ``[q, q]``
    (above the diagonal; of squares on it, of their sum ``[1, 1]``); gradients of x and w of a sum
    of all of them.  None: not computed."""

    values: list[Tensor]
    first: Tensor | None = None
    second: Tensor | None = None
    gradients: list[Tensor] | None = None


def total(values: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    return torch.stack([(v.double() * w).sum() for v, w in zip(values, weights, strict=True)]).sum()


def gradients(of: Tensor, to: Sequence[Tensor], create_graph: bool = False) -> list[Tensor]:
    """Zeros where there is no dependence."""
    if not of.requires_grad:
        return [torch.zeros_like(tensor) for tensor in to]
    found = torch.autograd.grad(
        of, to, create_graph=create_graph, retain_graph=True, allow_unused=True
    )
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, to, strict=True)]


class WrittenOut:
    """torch.nn.functional with its norms written out: the gradient of torch's own double backward
    of a layer norm is wrong (torch 2.13)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    @staticmethod
    def layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None) -> Tensor:
        y = standardised(x, tuple(range(-len(shape), 0)))
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    @staticmethod
    def batch_norm(x: Tensor, *statistics: None, training: bool) -> Tensor:
        return standardised(x, (0, *range(2, x.ndim)))

    @staticmethod
    def instance_norm(x: Tensor) -> Tensor:
        return standardised(x, tuple(range(2, x.ndim)))

    @staticmethod
    def group_norm(x: Tensor, groups: int) -> Tensor:
        grouped = x.reshape(len(x), groups, -1)
        return standardised(grouped, (2,)).reshape(x.shape)


def standardised(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred / (centred.square().mean(dims, keepdim=True) + 1e-5).sqrt()


class Case:
    """A program with its point, weights and plain values."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.x, self.w, self.steps = program.point(), program.parameter(), program.steps()
        self.q = program.directions
        try:
            self.function, self.written_out = program.function(), program.function(WrittenOut())
            plain = self.function(laid_out(self.x, program.layout), self.w.clone())
            # Where a line writes over what another has saved, this raises.
            gradients(total(plain, [torch.ones(())] * len(plain)), [self.x, self.w])
            self.values = self.plain(self.x)
            finite = all(torch.isfinite(value).all() for value in self.values)
        except Exception as error:  # whatever a line that was shrunk raises
            raise NotAProgram(str(error)) from error
        if not finite or not all(value.is_floating_point() for value in self.values):
            raise NotAProgram("a value is not finite, or no floating-point number")
        self.weights = [constant(k + 100, *value.shape) for k, value in enumerate(self.values)]
        # Of the sum whose gradient is compared: the derivatives of first and second order.
        self.slopes, self.bends = constant(200, self.q), constant(201, self.q, self.q)
        dtypes = [t.dtype for t in self.values]
        text = program.source()
        coarse = torch.float16 if ".half()" in text else torch.float32
        exact = ".half()" not in text and ".float()" not in text and torch.float32 not in dtypes
        self.tolerance = TOLERANCE[torch.float64 if exact else coarse]

    def plain(self, x: Tensor) -> list[Tensor]:
        """Values at x; it and w are copied, since programs write into them."""
        with sdpa_kernel(SDPBackend.MATH):
            return list(self.written_out(laid_out(x, self.program.layout), self.w.clone()))

    def along(self, t: Tensor) -> list[Tensor]:
        """Values at x + Σ t_i u_i."""
        return self.plain(self.x + torch.tensordot(t, self.steps, 1))

    def summed(self, values: list[Tensor], first: Tensor, second: Tensor | None) -> Tensor:
        found = total(values, self.weights) + (self.slopes[: len(first)] * first).sum()
        if second is None:
            return found
        return found + (self.bends[: len(second), : len(second)] * second).sum()

    def reverse(self, order: Order) -> Numbers:
        """By reverse mode; order 0 gives values and gradients of them, 1 leaves out the second,
        and takes one direction."""
        t = torch.zeros(self.q, dtype=torch.float64, requires_grad=True)
        values = self.along(t)
        weighted = total(values, self.weights)
        first = gradients(weighted, [t], create_graph=True)[0]
        if order == 0:
            kept = [g.detach() for g in gradients(weighted, [self.x, self.w])]
            return Numbers(self.values, first[:1].detach(), None, kept)
        second = None
        if order == 1:
            first = first[:1]
        elif self.q > 1 or order != 2:
            rows = [gradients(row, [t], create_graph=True)[0] for row in first]
            second = kept_of(torch.stack(rows), order)
        kept = gradients(self.summed(values, first, second), [self.x, self.w])
        bends = None if second is None else second.detach()
        return Numbers(self.values, first.detach(), bends, kept)

    @torch.no_grad()
    def differences(self, order: Order, step: float) -> Numbers:
        """By central differences of the weighted sum; no gradients."""

        def value(*moves: tuple[int, float]) -> Tensor:
            t = torch.zeros(self.q, dtype=torch.float64)
            for place, size in moves:
                t[place] += size
            return total(self.along(t), self.weights)

        q = 1 if order in (0, 1) else self.q
        first = [(value((i, step)) - value((i, -step))) / (2 * step) for i in range(q)]
        if order in (0, 1) or (q == 1 and order == 2):
            return Numbers(self.values, torch.stack(first))
        bends = torch.zeros(q, q, dtype=torch.float64)
        for i in range(q):
            for j in range(i, q):
                corners = [
                    a * b * value((i, a * step), (j, b * step)) for a in (1, -1) for b in (1, -1)
                ]
                bends[i, j] = sum(corners) / (4 * step * step)
        return Numbers(self.values, torch.stack(first), kept_of(bends, order))

    def slope_agrees(self, found: Numbers, order: Order) -> bool:
        """Whether the gradients that were found have the slope of the sum whose gradients they
        are; its value comes from reverse mode, one time less."""
        moves = [constant(300, *self.x.shape), constant(301, *self.w.shape)]
        sums = []
        for size in (2e-5, -2e-5, 1e-5, -1e-5):
            moved = copy.copy(self)
            moved.x, moved.w = (
                (start.detach() + size * move).requires_grad_()
                for start, move in zip((self.x, self.w), moves, strict=True)
            )
            numbers = moved.reverse(order)
            first = numbers.first if order else numbers.first * 0
            values = moved.plain(moved.x)
            sums.append(self.summed(values, first, numbers.second).detach())
        wide, narrow = (sums[0] - sums[1]) / 4e-5, (sums[2] - sums[3]) / 2e-5
        slope = sum((a * b).sum() for a, b in zip(found.gradients or [], moves, strict=True))
        return near(wide, narrow, 1e-4) and near(slope, narrow, 1e-3)

    def jet_numbers(self, mode: str) -> Numbers:
        """What jachess_ext finds."""
        fn: Callable[..., Any] = lambda x: self.function(x, self.w.clone())  # noqa: E731
        if mode in ("jvp", "target"):
            differentiable = mode == "jvp"
            values, tangents = jx.jvp(
                fn, (self.x,), (self.steps[0],), differentiable=differentiable
            )
            first = total(tangents, self.weights)[None]
            whole = total(values, self.weights)
            if differentiable:
                whole = whole + self.slopes[0] * first[0]
            elif first.requires_grad:
                raise AssertionError("a tangent that is a target has a graph")
            return Numbers(list(values), first.detach(), None, gradients(whole, [self.x, self.w]))
        if mode == "no_grad":
            with torch.no_grad():
                jets = jx.jet(fn, self.x, self.steps)
        elif mode == "composed":
            with composed_rules():
                jets = jx.jet(fn, self.x, self.steps)
        else:
            second = mode if mode in ("squares", "sum") else "pairs"
            jets = jx.jet(fn, self.x, self.steps, second=second)
        values = [jet.primal for jet in jets]
        first = torch.stack(
            [total([jet.first[i] for jet in jets], self.weights) for i in range(self.q)]
        )
        second = first.new_zeros(self.q, self.q)
        if mode == "sum":
            second = total([jet.second[0] for jet in jets], self.weights).reshape(1, 1)
        else:
            for p, (i, j) in enumerate(jets[0].pairs):
                second[i, j] = total([jet.second[p] for jet in jets], self.weights)
        if mode == "no_grad":
            return Numbers(values, first, second)
        whole = self.summed(values, first, second)
        return Numbers(values, first.detach(), second.detach(), gradients(whole, [self.x, self.w]))

    def disagreement(self, found: Numbers, expected: Numbers, tolerance: float) -> str:
        """The first number that differs, or ""."""
        for k, (a, b) in enumerate(zip(found.values, expected.values, strict=True)):
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                return f"output {k} is {a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}"
        pairs = [
            ("value", found.values, expected.values),
            ("first", found.first, expected.first),
            ("second", found.second, expected.second),
            ("gradient", found.gradients, expected.gradients),
        ]
        for name, ours, theirs in pairs:
            if ours is None or theirs is None:
                continue
            for a, b in zip(ours, theirs, strict=True):
                if not near(a, b, tolerance):
                    return name
        return ""


def kept_of(bends: Tensor, order: Order) -> Tensor:
    """Of all second derivatives ``[q, q]``, those of an order, as `Numbers` has them."""
    if order == "squares":
        return bends.diagonal().diag_embed()
    return bends.diagonal().sum().reshape(1, 1) if order == "sum" else bends.triu(1)


def is_finite(numbers: Numbers) -> bool:
    derivatives = [numbers.first, numbers.second, *(numbers.gradients or [])]
    return all(t is None or bool(torch.isfinite(t).all()) for t in derivatives)


def near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether they are equal up to ``tolerance``, relative to the largest entry or to 1."""
    if a.numel() == 0:
        return True
    scale = max(1.0, float(b.detach().abs().max()))
    return bool((a.detach() - b.detach()).abs().max() <= tolerance * scale)


def judge(case: Case, mode: str, expected: dict[Order, Numbers | None]) -> Verdict:
    """The verdict of one mode; ``expected`` keeps what reverse mode gave, by order."""
    order: Order = ORDERS.get(mode, 2)  # type: ignore[assignment]
    try:
        found = case.jet_numbers(mode)
    except MissingJetRule as error:
        return Verdict("refused", refused_operator(str(error)), str(error))
    except Exception as error:
        return error_verdict(error, case.program)
    if order not in expected:
        expected[order] = reverse_or_none(case, order)
    reverse = expected[order]
    if reverse is not None and not is_finite(reverse):
        if not is_finite(found):
            return Verdict("right", "not finite, as in reverse mode")
        reverse = None
    what = "" if reverse is None else case.disagreement(found, reverse, case.tolerance)
    if reverse is not None and not what:
        return Verdict("right")
    return by_differences(case, order, found, what)


def by_differences(case: Case, order: Order, found: Numbers, what: str) -> Verdict:
    """Whom differences support, where they are steady; gradients are beyond them."""
    if what == "gradient" and case.slope_agrees(found, order):
        return Verdict("right", "against reverse mode")
    if what.startswith(("output", "value", "gradient")):
        return Verdict("wrong", what)
    if case.tolerance > TOLERANCE[torch.float64] or is_detached(case.program):
        return Verdict("wrong" if what else "unknown", what)
    wide, narrow = (case.differences(order, step) for step in (2e-4, 1e-4))
    if case.disagreement(wide, narrow, 1e-4):
        return Verdict("wrong" if what else "unknown", what)
    if not case.disagreement(found, narrow, 1e-3):
        return Verdict("right", "against reverse mode" if what else "")
    return Verdict("wrong", what or "differences")


def reverse_or_none(case: Case, order: Order) -> Numbers | None:
    """None where torch has no reverse mode there."""
    try:
        return case.reverse(order)
    except (RuntimeError, NotImplementedError):
        return None


def refused_operator(message: str) -> str:
    names = re.findall(r"[`'\"]?(?:torch\.[\w.]+|Tensor\.[\w.]+|[\w.]*\b__\w+__)", message)
    return names[0] if names else message[:60]


def is_detached(program: Program) -> bool:
    """Whether differences would see what derivatives are not meant to."""
    return ".detach()" in program.source() or ".data" in program.source()


def error_verdict(error: Exception, program: Program) -> Verdict:
    """Refused where a line of the package's own raised it, else wrong.

    By autograd, too, where a plain tensor shares memory that is written into: the mechanism that
    gives jets new memory before a write (`copy_before_write`) does not act then.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = "".join(traceback.format_exception(error)[-6:])
    what = f"{type(error).__name__}: {str(error)[:90]}"
    ours = (
        not isinstance(error, IndexError | TypeError)
        and "jachess_ext" in last.filename
        and (last.line or "").startswith("raise")
    )
    overwritten = "modified by an inplace operation" in str(error) and is_detached(program)
    return Verdict("refused" if ours or overwritten else "wrong", what, text)


def verdicts(program: Program, modes: Sequence[str] = MODES) -> dict[str, Verdict]:
    """Of every mode.

    Raises:
        NotAProgram: plain torch does not take it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = Case(program)
        expected: dict[Order, Numbers | None] = {}
        return {mode: judge(case, mode, expected) for mode in modes}


@dataclass(frozen=True)
class Result:
    """What the program of a seed gives: no verdicts where plain torch does not take it."""

    seed: int
    verdicts: dict[str, Verdict]
    features: frozenset[str]


def result(seed: int) -> Result:
    program = draw(seed)
    try:
        found = verdicts(program)
    except NotAProgram:
        return Result(seed, {}, frozenset())
    return Result(seed, found, frozenset(name for op in program.ops for name in op.features()))
