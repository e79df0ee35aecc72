"""Draw programs: each line is run on plain tensors as it is drawn, and dropped if torch refuses."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .program import Op, Program, X, environment, laid_out

LARGEST, ENTRIES = 30.0, 240  # what a register may hold
Maker = Callable[["Draw"], str]
MAKERS: list[tuple[float, Maker]] = []

UNARY = (
    *("tanh()", "sigmoid()", "exp().clamp(max=5)", "sin()", "cos()", "atan()", "erf()", "abs()"),
    *("relu()", "square()", "neg()", "clamp(-0.5, 0.7)", "clamp(min=0.1)", "sinh().tanh()"),
    *("pow(2)", "pow(3).tanh()", "clone()", "contiguous()", "sgn()"),
    *(
        "expm1().tanh()",
        "asinh()",
        "logit(eps=0.1)",
        "nan_to_num()",
        "mul(1.37).floor()",
        "mul(1.37).frac()",
        "sinc()",
    ),
    *(
        "detach()",
        "mul(1.37).round()",
        "mul(1.37).trunc()",
        "logical_not().double()",
        "positive()",
        "hardtanh()",
    ),
    *("__abs__()", "erfc()", "exp2().tanh()", "deg2rad()", "clip(-1, 1)"),
)
GUARDED = (
    *("log()", "sqrt()", "rsqrt()", "log1p()", "pow(0.5)", "pow(-1)", "log2()", "reciprocal()"),
    *("pow(1.7).tanh()", "lgamma()", "digamma()", "log10()", "__rpow__(1.5).tanh()"),
)
IN_PLACE = (
    *("relu_()", "tanh_()", "sigmoid_()", "exp_().clamp_(max=5)", "abs_()", "neg_()", "square_()"),
    *("mul_(0.5)", "add_(1)", "sub_(0.3)", "div_(2)", "clamp_(min=-0.5)", "clamp_(-1, 1)"),
    *("zero_()", "fill_(0.3)", "clamp_min_(0)", "clamp_max_(0.4)", "pow_(2)", "nan_to_num_()"),
)
FUNCTIONAL = (
    *("relu", "gelu", "silu", "elu", "selu", "celu", "leaky_relu", "softplus", "mish", "softsign"),
    *("hardtanh", "hardsigmoid", "hardswish", "relu6", "logsigmoid", "tanhshrink", "softshrink"),
    *("hardshrink", "tanh", "sigmoid"),
)
WITH_INPLACE = ("relu", "silu", "elu", "leaky_relu", "mish", "hardtanh", "relu6", "selu", "celu")
BINARY = (" + ", " - ", " * ", " / ")
FLOATS = (torch.float64, torch.float32)


def maker(weight: float = 1.0) -> Callable[[Maker], Maker]:
    """Register a function that draws a line's text; it raises IndexError where it cannot."""

    def register(function: Maker) -> Maker:
        MAKERS.append((weight, function))
        return function

    return register


class Draw:
    """One program in the making.

    Attributes:
        values: what the registers hold, of the run of the lines so far.
        given: choices among the drawn lines that nothing read yet come first.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        sizes = [self.sizes(), self.sizes()]
        self.program = Program(
            seed=seed * 10,
            shapes=(sizes[0], sizes[1]),
            layout=self.of("plain", "plain", "reversed", "gaps"),
            directions=self.random.choices((1, 2, 3, 4), (1, 4, 2, 1))[0],
        )
        self.ops: list[Op] = []
        self.restart()

    # ---- pieces of lines ------------------------------------------------------------------------

    def of(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def sizes(self, fewest: int = 0, most: int = 4) -> tuple[int, ...]:
        ndim = self.random.choices(range(5), (1, 3, 6, 5, 2))[0]
        sizes = (1, 2, 3, 4, 0) if self.random.random() < 0.05 else (1, 2, 3, 4)
        return tuple(self.of(*sizes) for _ in range(max(fewest, min(ndim, most))))

    def tensor(self, fits: Callable[[Tensor], bool] = lambda t: True, dtypes: Any = FLOATS) -> str:
        """A register whose value fits; late ones are likelier."""
        found = [n for n, v in self.values.items() if v.dtype in dtypes and fits(v)]
        weights = [1.0 + 3 * place / len(found) for place in range(len(found))]
        return f"v{self.random.choices(found, weights)[0]}"

    def __getitem__(self, name: str) -> Tensor:
        return self.values[int(name[1:])]

    def dim(self, name: str) -> int:
        return self.of(*range(-self[name].ndim, self[name].ndim))

    def dims(self, name: str) -> str:
        """One dimension or several, as an argument."""
        ndim = self[name].ndim
        several = self.random.sample(range(ndim), self.random.randint(1, ndim))
        return self.of(str(self.dim(name)), str(tuple(several)), "None" if ndim else "()")

    def broadcast(self, name: str) -> str:
        """A register or a constant that broadcasts with another, on either side."""
        shape = self[name].shape

        def fits(t: Tensor) -> bool:
            try:
                return len(torch.broadcast_shapes(t.shape, shape)) < 6
            except RuntimeError:
                return False

        thinned = [self.of(size, size, 1) for size in shape[self.random.randint(0, len(shape)) :]]
        choice = self.random.random()
        if choice < 0.55:
            return self.tensor(fits)
        if choice < 0.9:
            return self.constant(*thinned)
        return self.of("2.0", "-0.5", "3", "torch.tensor(1.5)")

    def constant(self, *shape: int) -> str:
        return f"C({', '.join(map(str, (self.random.randint(0, 99), *shape)))})"

    def mask(self, name: str) -> str:
        """True and False, of a shape that broadcasts to the register's."""
        shape = [self.of(size, size, 1) for size in self[name].shape]
        own = f"({name} {self.of('>', '<', '>=', '!=')} {self.of('0', '0.1', '-0.3')})"
        same = f"({self.constant(*shape)} > 0.2)"
        return self.of(own, same, same + ".logical_not()")

    def integers(self, size: int, *shape: int) -> str:
        """A constant index tensor below ``size``."""
        if size == 0:
            raise IndexError
        drawn = torch.tensor([self.random.randrange(size) for _ in range(_count(shape))])
        return f"torch.tensor({drawn.reshape(shape).tolist()})"

    def whole_index(self, shape: Sequence[int]) -> str:
        """What stands in the brackets, of any kind torch takes."""
        choice, rest = self.random.random(), list(shape)
        if choice < 0.06:
            return self.of("...", "None", "()", "True", "slice(None)", "0")
        if choice < 0.12 and shape:
            return f"{self.constant(*shape[: self.random.randint(1, len(shape))])} > -0.4"
        if choice < 0.17 and shape:
            return self.of(
                f"[[{self.random.randrange(shape[0])}, 0], [0, {self.random.randrange(shape[0])}]]",
                f"[{self.random.randrange(shape[0])}, -1]",
            )
        parts, common = [], self.random.randint(1, 3)
        while rest and self.random.random() < 0.8:
            parts.append(self.index_part(rest, common))
            if parts[-1] == "...":
                rest = rest[len(rest) - self.random.randint(0, len(rest)) :]
                parts += [self.index_part(rest, common) for _ in range(len(rest)) if rest]
                break
        return ", ".join(parts) or "..."

    def index_part(self, rest: list[int], common: int) -> str:
        """An index of the first dimensions of ``rest``, which are taken off."""
        if self.random.random() < 0.08:
            return "None"
        if self.random.random() < 0.1:
            return "..."
        size = rest.pop(0)
        at = self.of(0, -1, self.random.randrange(size) if size else 0)
        several = [self.random.randrange(-size, size) if size else 0 for _ in range(common)]
        start, stop = sorted((self.random.randint(0, size), self.random.randint(0, size)))
        steps = f"{start}:{max(stop, start + 1)}", f":{stop}", f"{start}:", "::2", ":-1", ":"
        kinds = [str(at), *steps, str(several), f"torch.tensor({several})", f"np.array({several})"]
        kinds += [f"torch.tensor({[several]})", f"torch.tensor({at})", f"np.int64({at})"]
        kinds += [f"range({max(start, 1)})", f"{[n % 2 == 0 for n in range(size)]}"]
        kinds += [f"torch.tensor({[n != 1 for n in range(size)]})", f"{[[n] for n in several]}"]
        return self.of(*kinds)

    # ---- running what was drawn -----------------------------------------------------------------

    def restart(self) -> None:
        """Run all lines anew."""
        program = self.program
        self.names = environment()
        self.leaves = (program.point(), program.parameter())
        self.names["v0"] = laid_out(self.leaves[0], program.layout)
        self.names["v1"] = self.leaves[1]
        for op in self.ops:
            exec(str(op), self.names)
        self.look()

    def look(self) -> None:
        found = {name: v for name, v in self.names.items() if re.fullmatch(r"v\d+", name)}
        self.values = {int(name[1:]): v for name, v in found.items() if isinstance(v, Tensor)}

    def extend(self) -> bool:
        """Add a line, if the drawn one is good."""
        weights, makers = zip(*MAKERS, strict=True)
        try:
            text = self.random.choices(makers, weights)[0](self)
        except (IndexError, ValueError):
            return False
        statement = re.search(r"(\]| [-+*/]) ?= (?!=)", text)
        op = Op(None if statement else 2 + len(self.ops), text)
        if not self.ops and X not in op.reads:
            return False
        try:
            exec(str(op), self.names)
            self.look()
            if not self.good():
                raise ValueError
            self.ops.append(op)
            if any(line.writes_in_place for line in self.ops):
                self.backward()
        except Exception:
            self.ops = [line for line in self.ops if line is not op]
            self.restart()
            return False
        return True

    def good(self) -> bool:
        """Whether the registers hold numbers of moderate size."""
        for value in self.values.values():
            if value.is_complex() or value.numel() > ENTRIES or value.ndim > 5:
                return False
            if value.is_floating_point() and value.numel():
                largest = value.detach().abs().max()
                if not largest <= LARGEST:
                    return False
        return True

    def backward(self) -> None:
        """torch's version error comes here, if a line writes over what autograd saved."""
        floats = [v for v in self.values.values() if v.requires_grad and v.dtype in FLOATS]
        if floats:
            whole = torch.stack([v.double().sum() for v in floats]).sum()
            torch.autograd.grad(whole, self.leaves, retain_graph=True, allow_unused=True)

    def finished(self) -> Program:
        """With what nothing read, and what was written into, as outputs."""
        floats = {n for n, v in self.values.items() if v.is_floating_point() and n > 1}
        read = {register for op in self.ops for register in op.reads}
        written = {op.reads[0] for op in self.ops if op.writes_in_place and op.reads}
        last = sorted((floats - read) | (floats & written)) or [0]
        p = self.program
        return Program(p.seed, p.shapes, p.layout, p.directions, tuple(self.ops), tuple(last))


def _count(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def draw(seed: int) -> Program:
    """The program of a seed: 3 to 60 lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = Draw(seed)
        length = drawn.of(drawn.random.randint(3, 12), drawn.random.randint(3, 60))
        for _ in range(20 * length):
            drawn.extend()
            if len(drawn.ops) == length:
                break
        return drawn.finished()


# ---- the kinds of lines ----------------------------------------------------------------------


def matrix(t: Tensor) -> bool:
    return t.ndim == 2


def has_dims(t: Tensor) -> bool:
    return t.ndim > 0


@maker(4)
def unary(d: Draw) -> str:
    return f"{d.tensor()}.{d.of(*UNARY)}"


@maker(1.5)
def guarded(d: Draw) -> str:
    return f"({d.tensor()}.abs() + 0.5).{d.of(*GUARDED)}"


@maker(2)
def activation(d: Draw) -> str:
    return f"F.{d.of(*FUNCTIONAL)}({d.tensor()})"


@maker(1)
def activation_in_place(d: Draw) -> str:
    return f"F.{d.of(*WITH_INPLACE)}({d.tensor()}, inplace=True)"


@maker(4)
def binary(d: Draw) -> str:
    a = d.tensor()
    b = d.broadcast(a)
    sign = d.of(*BINARY, " + ", " * ")
    if sign == " / ":
        b = f"({b} * {b} + 0.5)" if b[0] in "vC" else "2"
    return d.of(f"{a}{sign}{b}", f"{b}{sign}{a}" if sign != " / " else f"{a}{sign}{b}")


@maker(1.5)
def binary_named(d: Draw) -> str:
    a = d.tensor()
    b = d.tensor(lambda t: t.shape == d[a].shape) if d.of(0, 1) else d.broadcast(a)
    if b[0] not in "vC":
        b = f"torch.tensor({b})" if b[0] != "t" else b
    if d.of(*range(8)) == 0:  # ties
        name = d.of("maximum", "minimum", "fmax", "fmin", "max", "min")
        return f"torch.{name}({a}, {a}.detach())"
    name = d.of(
        "maximum",
        "minimum",
        "atan2",
        "hypot",
        "fmax",
        "where",
        "lerp",
        "rsub",
        "add",
        "sub",
        "mul",
        *("pow", "pow", "pow"),
        "xlogy",
        "fmod",
        "addcmul",
        "ldexp",
    )
    if name == "where":
        return f"torch.where({d.mask(a)}, {d.of(a, b)}, {d.of(b, b, '0.0')})"
    if name == "lerp":
        return f"torch.lerp({a}, {b}.to({a}.dtype), {d.of('0.3', f'C(5, 1).to({a}.dtype)')})"
    if name in ("add", "sub"):
        return f"torch.{name}({a}, {b}, alpha={d.of('2', '0.5')})"
    if name == "pow":
        return d.of(f"(({a}.abs() + 0.5) ** {b}).tanh()", f"{a} ** torch.full_like({a}, 2)")
    if name == "xlogy":
        return f"torch.xlogy({a}, {b}.abs() + 0.3)"
    if name == "fmod":
        return f"torch.fmod({a} * 1.37, {b}.abs() + 0.3)"
    if name == "addcmul":
        return f"torch.addcmul({a}, {b}, {d.broadcast(a)}, value=0.5)"
    return f"torch.{name}({a}, {b})"


@maker(5)
def view(d: Draw) -> str:
    a = d.tensor()
    shape, n = list(d[a].shape), d[a].ndim
    kinds = [f"{a}.unsqueeze({d.of(0, -1, n)})", f"{a}.squeeze()", f"{a}.flatten()", f"{a}.ravel()"]
    kinds += [f"{a}.expand({d.of(2, 3)}, {', '.join(['-1'] * n)})", f"{a}.view(-1)", f"{a}[None]"]
    kinds += [f"{a}.reshape(-1)", f"{a}.expand_as(C(1, 2, {', '.join(map(str, shape))}))"]
    kinds += [f"torch.atleast_{d.of(1, 2, 3)}d({a})"]
    if n:
        i, j = d.dim(a), d.dim(a)
        order = d.random.sample(range(n), n)
        size = shape[i]
        kinds += [f"{a}.transpose({i}, {j})", f"{a}.permute({order})", f"{a}.movedim({i}, {j})"] * 3
        kinds += [f"{a}.select({i}, {d.of(0, -1)})", f"{a}.narrow({i}, 0, {max(size - 1, 1)})"]
        kinds += [f"{a}.squeeze({i})", f"{a}.flip({i})", f"{a}.roll(1, {i})", f"{a}.T", f"{a}.mT"]
        kinds += [f"{a}.unflatten({i}, ({d.of(1, 2, -1)}, {d.of(-1, 2)}))", f"{a}.t()"]
        kinds += [f"{a}.unfold({i}, {d.of(1, 2)}, {d.of(1, 2)})", f"{a}.flatten({d.of(0, 1)}, -1)"]
        kinds += [
            f"{a}.diagonal(0, {i}, {j})",
            f"{a}.reshape(-1, {shape[-1]})",
            f"{a}.swapaxes(0, -1)",
        ]
        kinds += [f"{a}.view({', '.join(map(str, shape[:-1]))}, {shape[-1]}, 1)"]
        kinds += [f"{a}.reshape({d.of(shape[::-1], [2, -1], [-1, 2], [1, -1])})"]
        kinds += [
            f"{a}.expand({d.random.randint(1, 3)}, {str(shape)[1:-1]})",
            f"{a}.view({shape[::-1]})",
        ]
        kinds += [
            f"{a}.broadcast_to({[2, *shape]})",
            f"torch.broadcast_tensors({a}, C(7, 2, *{[1] * n}))[0]",
        ]
    return d.of(*kinds)


@maker(5)
def index(d: Draw) -> str:
    a = d.tensor()
    return f"{a}[{d.whole_index(d[a].shape)}]"


@maker(3)
def index_write(d: Draw) -> str:
    a = d.tensor()
    place = d.whole_index(d[a].shape)
    part = eval(f"{a}[{place}]", d.names)
    entries = torch.arange(d[a].numel()).reshape(d[a].shape)
    written = eval(f"entries[{place}]", {**d.names, "entries": entries})
    if len(written.unique()) < written.numel():
        raise ValueError  # torch: undefined
    fitting = [s for n in range(part.ndim + 1) if (s := part.shape[n:]) is not None]
    shape = list(d.of(*fitting))
    thinned = [d.of(size, 1) for size in shape]
    choices = [
        d.constant(*shape),
        d.of("0", "1.5"),
        d.constant(*thinned),
        f"{a}[{place}].{d.of(*UNARY)}",
    ]
    same = [f"v{n}" for n, v in d.values.items() if list(v.shape) in (shape, thinned)]
    value = d.of(*same, *same, *choices)
    return f"{a}[{place}] {d.of('=', '=', '=', '+=', '*=', '-=')} {value}"


@maker(2)
def in_place(d: Draw) -> str:
    return f"{d.tensor()}.{d.of(*IN_PLACE)}"


@maker(3)
def in_place_with(d: Draw) -> str:
    a = d.tensor()
    b = d.broadcast(a)
    kinds = [f"{a} {d.of('+=', '-=', '*=')} {b}", f"{a}.{d.of('add_', 'mul_', 'sub_')}({b})"]
    kinds += [f"{a}.masked_fill_({d.mask(a)}, {d.of('0', '-1.5')})", f"{a}.add_({b}, alpha=2)"]
    if b[0] in "vC":
        kinds += [f"{a}.copy_({b})", f"{a}.addcmul_({b}, {b}, value=0.3)", f"{a}.lerp_({b}, 0.4)"]
        kinds += [f"{a} /= ({b} * {b} + 1)"]
    if d[a].ndim:
        i = d.dim(a)
        size = d[a].shape[i]
        at = d.integers(size, 2)
        source = [2 if n == i % d[a].ndim else s for n, s in enumerate(d[a].shape)]
        kinds += [f"{a}.index_add_({i}, {at}, {d.constant(*source)}.to({a}.dtype))"]
        kinds += [f"{a}.{d.of('tril_', 'triu_')}()"]
        kinds += [f"{a}.index_copy_({i}, torch.tensor([0]), {a}.narrow({i}, {size - 1}, 1) * 2)"]
        kinds += [
            f"{a}.scatter_add_({i}, torch.zeros({list(d[a].shape)}, dtype=torch.long), {a} * 0.5)"
        ]
        kinds += [f"{a}.select({i}, 0).{d.of(*IN_PLACE)}", f"{a}.unbind({i})[0].mul(2)"]
    return d.of(*kinds)


@maker(3)
def reduction(d: Draw) -> str:
    a = d.tensor()
    keep = d.of("", ", keepdim=True")
    dims = d.dims(a) if d[a].ndim else d.of("0", "-1")
    one = d.dim(a) if d[a].ndim else 0
    kinds = [
        f"{a}.{d.of('sum', 'mean')}()",
        f"{a}.{d.of('sum', 'mean', 'amax', 'amin')}({dims}{keep})",
    ]
    kinds += [f"{a}.{d.of('max', 'min')}()", f"{a}.{d.of('std', 'var')}({dims}{keep})"]
    kinds += [f"{a}.{d.of('max', 'min', 'median', 'kthvalue', 'sort')}({one}{keep}).values"]
    kinds += [f"{a}.{d.of('cumsum', 'cumsum')}({one})"]
    kinds += [f"{a}.logsumexp({dims}{keep})", f"{a}.norm()", f"{a}.norm({d.of(1, 2)}, {one}{keep})"]
    kinds += [
        f"torch.linalg.vector_norm({a}, {d.of(1, 2)}, {dims}{keep})",
        f"{a}.topk(1, {one}).values",
    ]
    both = f"torch.stack([{a}, {a}.detach()], {d.of(0, -1)})"
    kinds += [f"{both}.{d.of('amax', 'amin')}({d.of(0, -1, 'None')})"]
    kinds += [
        f"torch.linalg.norm({a})",
        f"{a}.var({one}, correction=0{keep})",
        f"{a}.nansum({dims}{keep})",
    ]
    kinds += [
        f"{a}.cummax({one}).values",
        f"torch.diff({a}, dim={one})",
        f"torch.var_mean({a}, {one})[0]",
    ]
    kinds += [f"torch.aminmax({a}, dim={one}).max", f"{a}.msort()", f"torch.std({a}, {one}{keep})"]
    text = d.of(*kinds)
    return (
        text.replace("kthvalue(", "kthvalue(1, ")
        .replace("sort(", "sort(")
        .replace(f"sort({one}{keep})", f"sort({one})")
    )


@maker(2)
def softmax(d: Draw) -> str:
    a = d.tensor(has_dims)
    i = d.dim(a)
    return d.of(
        f"{a}.softmax({i})",
        f"F.log_softmax({a}, {i})",
        f"F.softmin({a}, {i})",
        f"{a}.masked_fill({d.mask(a)}, -1e4).softmax({i})",
        f"F.softmax({a} * 3, dim={i})",
        f"F.glu(torch.cat([{a}, {a}.tanh()], {i}), {i})",
        f"{a}.argmax({i})",
    )


@maker(2)
def cast(d: Draw) -> str:
    a = d.tensor()
    return d.of(
        f"{a}.float()",
        f"{a}.to(torch.float64)",
        f"{a}.double()",
        f"{a}.type_as({d.tensor()})",
        f"{a}.float().double()",
        f"{a}.tanh().half().double()",
        f"{a}.to({d.tensor()})",
    )


@maker(2.5)
def masked(d: Draw) -> str:
    a = d.tensor()
    mask = d.mask(a)
    kinds = [
        f"{a}.masked_fill({mask}, {d.of('0', '-2.0')})",
        f"{a} * {mask}",
        f"{a}.where({mask}, 0.0)",
    ]
    kinds += [
        f"torch.where({mask}, {a}, {a}.tanh())",
        f"{a}.masked_select({mask})",
        f"{a}[{a} > 0]",
    ]
    kinds += [f"{a}.masked_fill({mask}, torch.tensor(0.5))"]
    if d[a].ndim > 1:
        kinds += [f"{a}.{d.of('tril', 'triu')}({d.of(-1, 0, 1)})"]
    return d.of(*kinds)


@maker(2)
def joined(d: Draw) -> str:
    a = d.tensor(has_dims)
    i = d.dim(a)
    b = d.tensor(lambda t: t.shape == d[a].shape)
    size = d[a].shape[i]
    count = d.of(2, 3)
    kinds = [
        f"torch.cat([{a}, {d.of(b, d.constant(*d[a].shape))}], {i})",
        f"torch.stack([{a}, {b}], {i})",
    ]
    kinds += [
        f"torch.cat({a}.chunk({count}, {i})[::-1], {i})",
        f"torch.stack({a}.unbind({i})[::-1])",
    ]
    kinds += [
        f"{a}.split({d.of(1, 2)}, {i})[{d.of(0, -1)}]",
        f"{a}.chunk({count}, {i})[{d.of(0, -1)}]",
    ]
    kinds += [f"{a}.tensor_split({count}, {i})[0]", f"{a}.unbind({i})[-1]", f"list({a})[0]"]
    kinds += [
        f"{a}.split([1, {size - 1}], {i})[1]",
        f"sum({a}.unbind({i}))",
        f"{a}.repeat_interleave(2, {i})",
    ]
    kinds += [
        f"torch.{d.of('hstack', 'vstack', 'dstack', 'column_stack')}([{a}, {b}])",
        f"{a}.tile(2)",
    ]
    kinds += [
        f"torch.cat([{a}.new_zeros({a}.shape), {a}], {i})",
        f"{a}.repeat({[2] + [1] * (d[a].ndim - 1)})",
    ]
    kinds += [f"F.pad({a}, (1, 0))", f"F.pad({a}, ({d.of(0, 1)}, -1), value=0.5)"]
    return d.of(*kinds)


@maker(1.5)
def gathered(d: Draw) -> str:
    a = d.tensor(has_dims)
    i = d.dim(a)
    size = d[a].shape[i]
    shape = [d.of(1, 2) if n == i % d[a].ndim else s for n, s in enumerate(d[a].shape)]
    return d.of(
        f"{a}.index_select({i}, {d.integers(size, 2)})",
        f"{a}.gather({i}, {d.integers(size, *shape)})",
        f"{a}.take_along_dim({d.integers(size, *shape)}, {i})",
        f"torch.take({a}, {d.integers(size, 2)})",
        f"{a}.scatter({i}, {d.integers(size, *shape)}, 0.5)",
        f"torch.zeros_like({a}).index_add({i}, {d.integers(size, size)}, {a})",
        f"torch.zeros_like({a}).scatter_add("
        f"{i}, torch.zeros({list(d[a].shape)}, dtype=torch.long), {a})",
    )


@maker(2)
def buffer(d: Draw) -> str:
    a = d.tensor()
    shape = [2, *d[a].shape]
    return d.of(
        f"{a}.new_zeros({shape})",
        f"torch.zeros_like({a})",
        f"torch.ones_like({a})",
        f"torch.full_like({a}, 0.5)",
        f"{a}.new_full({shape}, 0.3)",
        f"{a}.new_ones({shape})",
        f"torch.empty_like({a}).fill_(0.1)",
        f"{a}.new_tensor([1.0, 2.0])",
        f"{a}.detach() * {a}",
        f"{a}.clone().detach()",
        f"{a}.new_empty({shape}).zero_()",
        f"{a}.data * 2",
    )


@maker(3)
def product(d: Draw) -> str:
    a = d.tensor(has_dims)
    size = d[a].shape[-1]
    b = d.tensor(lambda t: t.ndim > 0 and t.dtype == d[a].dtype and t.shape[-1] == size)
    kinds = [f"{a} @ C(5, {size}, {d.of(1, 3)}).to({a}.dtype)", f"{a} @ {a}.mT", f"{a} @ {b}.mT"]
    kinds += [
        f"F.linear({a}, {b}.reshape(-1, {size}))",
        f"F.linear({a}, C(6, 3, {size}).to({a}.dtype), C(7, 3).to({a}.dtype))",
    ]
    kinds += [
        f"torch.einsum('...i,...j->...ij', {a}, {b})",
        f"torch.einsum('...i,...i->...', {a}, {b})",
    ]
    kinds += [
        f"torch.matmul({a}.mT, {a})",
        f"torch.tensordot({a}, {b}, dims=([-1], [-1]))",
        f"{a} @ {b}",
    ]
    kinds += [
        f"torch.{d.of('inner', 'outer', 'dot', 'mv', 'mm', 'bmm')}({a}, {b})",
        f"torch.kron({a} * 1, {b} * 1)",  # torch sees no write into what its kron saved
    ]
    kinds += [f"torch.addmm({b}, {a}, C(8, {size}, {size}).to({a}.dtype), beta=0.5)"]
    kinds += [f"torch.baddbmm({b}, {a}, {b}.mT)", f"C(9, 2, {d[a].shape[0]}) @ {a}"]
    return f"({d.of(*kinds)}) * 0.3"


@maker(1.5)
def convolution(d: Draw) -> str:
    a = d.tensor(lambda t: t.ndim in (2, 3) and t.numel() > 1)
    channels = d[a].shape[-2]
    k = d.of(1, 2)
    kinds = [f"F.conv1d({a}, C(4, 2, {channels}, {k}).to({a}.dtype), padding={d.of(0, 1)})"]
    kinds += [
        f"F.conv1d({a}, C(4, {channels}, 1, {k}).to({a}.dtype), "
        f"C(3, {channels}).to({a}.dtype), groups={channels})"
    ]
    kinds += [
        f"F.conv_transpose1d({a}, C(4, {channels}, 2, {k}).to({a}.dtype), stride={d.of(1, 2)})"
    ]
    kinds += [
        f"F.avg_pool1d({a}, {k})",
        f"F.max_pool1d({a}, {k})",
        f"F.adaptive_avg_pool1d({a}, 2)",
    ]
    rows = 1 if d[a].ndim == 2 else d[a].shape[0]
    kinds += [f"F.conv2d({a}[None], C(4, 2, {rows}, {k}, 1).to({a}.dtype))"]
    how = d.of("'nearest'", "'linear'")
    kinds += [f"F.interpolate({a}.reshape(1, {channels}, -1), scale_factor=2, mode={how})"]
    return d.of(*kinds)


@maker(2)
def normed(d: Draw) -> str:
    a = d.tensor(lambda t: t.ndim > 0 and t.numel() > 1)
    size, i = d[a].shape[-1], d.dim(a)
    b = d.broadcast(a)
    if b[0] not in "vC":
        b = a
    weights = d.of(
        "",
        f", C(2, {size}).to({a}.dtype)",
        f", C(2, {size}).to({a}.dtype), C(3, {size}).to({a}.dtype)",
    )
    kinds = [
        f"F.layer_norm({a}, ({size},){weights})",
        f"F.rms_norm({a}, ({size},))",
        f"F.normalize({a}, dim={i})",
    ]
    kinds += [f"F.cosine_similarity({a}, {b}, dim={i})"]
    kinds += [
        f"F.group_norm({a}, 1)",
        f"F.batch_norm({a}, None, None, training=True)",
        f"F.pairwise_distance({a}, {b})",
    ]
    kinds += [
        f"F.instance_norm({a})",
        f"{a} * torch.rsqrt({a}.pow(2).mean(-1, keepdim=True) + 1e-3)",
    ]
    kinds += [f"({a} - {a}.mean({i}, keepdim=True)) / ({a}.std({i}, keepdim=True) + 0.1)"]
    kinds += [f"F.silu({a}) * {b}", f"F.gelu({a}) * {b}"]
    return d.of(*kinds)


@maker(2)
def loss(d: Draw) -> str:
    a = d.tensor(lambda t: t.ndim > 0 and t.numel() > 0)
    shape = list(d[a].shape)
    b = d.of(d.constant(*shape), d.tensor(lambda t: t.shape == d[a].shape))
    end = f", reduction={d.of('mean', 'sum', 'none')!r}"
    kinds = [f"F.{d.of('mse_loss', 'l1_loss', 'smooth_l1_loss')}({a}, {b}{end})"]
    kinds += [f"F.binary_cross_entropy_with_logits({a}, {b}.sigmoid(){end})"]
    kinds += [f"F.kl_div({a}.log_softmax(-1), {b}.softmax(-1){end})"]
    kinds += [f"F.gaussian_nll_loss({a}, {b}, {a}.square() + 0.2{end})"]
    classes = shape[1] if len(shape) > 1 else shape[0]
    where = [shape[0], *shape[2:]] if len(shape) > 1 else []
    target = d.integers(classes, *where)
    kinds += [
        f"F.cross_entropy({a}, {target}{end})",
        f"F.nll_loss({a}.log_softmax({min(len(shape) - 1, 1)}), {target}{end})",
    ]
    kinds += [f"F.cross_entropy({a}, {b}.softmax({min(len(shape) - 1, 1)}){end})"]
    kinds += [f"F.cross_entropy({a}, {target}, label_smoothing=0.1, ignore_index=0{end})"]
    kinds += [f"F.margin_ranking_loss({a}, {b}, C(3).sign(){end})"]
    return d.of(*kinds)


@maker(2.5)
def attention(d: Draw) -> str:
    """Of copies: whether torch's attention may be followed by a write into its arguments depends
    on the kernel that it takes."""
    a = d.tensor(lambda t: t.ndim > 1 and t.numel() > 0)
    tokens, size = d[a].shape[-2:]
    b = d.tensor(lambda t: t.shape == d[a].shape)
    kv = d.of(
        f"{a} * 1, {a} * 2",
        f"{b} * 1, {b} * 1",
        f"{b}.sin(), {a}.tanh()",
        f"C(5, 3, {size}).to({a}.dtype), C(6, 3, 2).to({a}.dtype)",
    )
    keys = 3 if kv[0] == "C" else tokens
    end = d.of(
        "",
        ", is_causal=True",
        ", scale=0.7",
        f", attn_mask=C(7, {tokens}, {keys}).to({a}.dtype)",
        f", attn_mask=C(8, {tokens}, {keys}) > -0.5",
        f", attn_mask=C(8, 1, {keys}) > -0.5",
        f", attn_mask=torch.ones({tokens}, {keys}, dtype=torch.bool).tril()",
    )
    text = f"F.scaled_dot_product_attention({a} * 1, {kv}{end})"
    if d[a].ndim == 3 and d.of(0, 1, 2) == 0:
        shared = f"{a}[None, :1] * 1, {a}[None, :1] * 2"
        text = f"F.scaled_dot_product_attention({a}[None] * 1, {shared}, enable_gqa=True)"
    return text


@maker(0.1)
def seldom(d: Draw) -> str:
    """What a pass refuses, at least where it asks for gradients."""
    a = d.tensor(lambda t: t.ndim > 0 and t.numel() > 0)
    i, size = d.dim(a), d[a].shape[-1]
    return d.of(
        f"F.normalize({a}, p={d.of(1, 3)}, dim={i})",
        f"F.huber_loss({a}, C(2, {size}))",
        f"{a}.norm(3, {i})",
        f"F.cosine_embedding_loss({a}, C(1, {size}), C(4, {d[a].shape[0]}).sign())",
        f"{a}.prod()",
        f"{a}.prod({i})",
        f"{a}.cumprod({i})",
        f"{a}.logcumsumexp({i})",
        f"{a}.index_put_((torch.tensor([0, 0]),), {a}[0] * 0.5, accumulate=True)",
        f"{a}.masked_scatter_({a} > 0, {a} * 2)",
        f"{a}.index_fill_({i}, torch.tensor([0]), 0.5)",
        f"torch.logaddexp({a}, {a}.tanh())",
        f"{a}.renorm(2, {i}, 1.0)",
        f"F.binary_cross_entropy({a}.sigmoid(), C(2, {size}).sigmoid())",
        f"torch.cdist({a}, {a} + 1)",
        f"F.soft_margin_loss({a}, C(2, {size}).sign())",
        f"F.triplet_margin_loss({a}, {a} * 2, {a}.sin())",
        f"F.hinge_embedding_loss({a}, C(2, {size}).sign())",
        f"F.poisson_nll_loss({a}, C(2, {size}).abs())",
    )
