"""A program: lines of torch calls that write numbered registers, and the points it is run at."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

REGISTER = re.compile(r"\bv(\d+)\b")
NAME = re.compile(r"(?:\.|\b)([A-Za-z_]\w*)\(")
X, W = 0, 1


def constant(seed: int, *shape: int) -> Tensor:
    """Normal numbers, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """``x``, copied into memory of another order of strides, or with gaps between entries."""
    if layout == "plain":
        return x.clone(memory_format=torch.contiguous_format)
    if layout == "gaps":
        out = x.new_empty([2 * size for size in x.shape])
        return out[(slice(None, None, 2),) * x.ndim].copy_(x)
    return x.new_empty(x.shape[::-1]).permute(list(range(x.ndim))[::-1]).copy_(x)


@dataclass(frozen=True)
class Op:
    """One line.

    Attributes:
        out: the register that takes what ``text`` gives; None where the text is a statement.
        text: Python, with registers written as v0, v1, ...
    """

    out: int | None
    text: str

    def __str__(self) -> str:
        return self.text if self.out is None else f"v{self.out} = {self.text}"

    @property
    def reads(self) -> list[int]:
        """The registers in the text, each once, in their order."""
        return list(dict.fromkeys(int(number) for number in REGISTER.findall(self.text)))

    @property
    def writes_in_place(self) -> bool:
        return self.out is None or bool(re.search(r"[a-z]_\(|inplace=True", self.text))

    def renamed(self, old: int, new: int) -> Op:
        """The same line reading another register."""
        text = REGISTER.sub(lambda m: f"v{new}" if int(m[1]) == old else m[0], self.text)
        return replace(self, text=text)

    def features(self) -> list[str]:
        """What the line exercises: its functions, and the statements by their kind."""
        kinds = [kind for kind in (" += ", " -= ", " *= ", " /= ") if kind in self.text]
        if self.out is None and not kinds:
            kinds = ["[] ="]
        if re.search(r"v\d+\[", self.text) and self.out is not None:
            kinds.append("[]")
        kinds += re.findall(
            r" [-+*/@] | \*\* |inplace=True|\.mT|\.T\b|attn_mask|is_causal", self.text
        )
        ignored = {"C", "tensor", "array", "range", "slice"}
        return [kind.strip() for kind in kinds] + [
            name for name in NAME.findall(self.text) if name not in ignored
        ]


@dataclass(frozen=True)
class Program:
    """Lines from the registers v0 (the point x) and v1 (a parameter w) to outputs.

    Attributes:
        seed: of x, w and the directions.
        shapes: of x and of w.
        layout: how x lies in memory: "plain", "reversed" or "gaps".
        directions: how many.
    """

    seed: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    layout: str
    directions: int
    ops: tuple[Op, ...] = ()
    outputs: tuple[int, ...] = ()

    def point(self) -> Tensor:
        return laid_out(constant(self.seed, *self.shapes[X]), self.layout).requires_grad_()

    def parameter(self) -> Tensor:
        return constant(self.seed + 1, *self.shapes[W]).requires_grad_()

    def steps(self) -> Tensor:
        """``[q, *x.shape]``: the directions."""
        return constant(self.seed + 2, self.directions, *self.shapes[X])

    def source(self) -> str:
        """The function ``program(v0, v1)``."""
        results = "".join(f"v{n}, " for n in self.outputs)
        lines = [*map(str, self.ops), f"return {results.strip() if results else '()'}"]
        return "def program(v0, v1):\n" + "".join(f"    {line}\n" for line in lines)

    def function(self, functional: Any = F) -> Callable[..., tuple[Tensor, ...]]:
        """The program, with ``functional`` in place of torch.nn.functional."""
        names = environment(functional)
        exec(self.source(), names)
        return names["program"]

    def script(self) -> str:
        """Python to paste."""
        return (
            "import numpy as np\nimport torch\nimport torch.nn.functional as F\n"
            "import jachess_ext as jx\n"
            "from python_tests.programs.program import constant as C, laid_out\n\n"
            f"{self.source()}\n"
            f"x = laid_out(C({self.seed}, *{self.shapes[X]}), {self.layout!r}).requires_grad_()\n"
            f"w = C({self.seed + 1}, *{self.shapes[W]}).requires_grad_()\n"
            f"u = C({self.seed + 2}, {self.directions}, *{self.shapes[X]})\n"
            "print(program(x.clone(), w))\n"
            "print(jx.jet(lambda x: program(x, w), x, u))\n"
        )


def environment(functional: Any = F) -> dict[str, Any]:
    """The names a line may use."""
    return {"torch": torch, "F": functional, "np": np, "C": constant}
