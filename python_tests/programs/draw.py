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


from . import lines  # noqa: E402, F401  registers the makers
