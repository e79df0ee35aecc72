"""Compiled passes see every change of an attribute, or break the graph with a sentence."""

from __future__ import annotations

import collections
import dataclasses
import enum
import fractions
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import jachess_ext as jx
from python_tests.jet.compiling import NEEDS_MODULES_IN_GRAPHS

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), NEEDS_MODULES_IN_GRAPHS]


class Held:
    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def times(self, z: Tensor) -> Tensor:
        return z * self.scale

    __call__ = times


class Slots:
    __slots__ = ("scale",)

    def __init__(self, scale: Any) -> None:
        self.scale = scale


@dataclasses.dataclass
class Data:
    scale: float


class Choice(enum.Enum):
    TWO = 2.0
    THREE = 3.0


Pair = collections.namedtuple("Pair", "scale name")


def _times(z: Tensor, scale: float) -> Tensor:
    return z * scale


def _closure(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda z: z * scale


def _function(scale: Any) -> Any:
    def times(z: Tensor) -> Tensor:
        return z * times.scale  # type: ignore[attr-defined]

    times.scale = scale  # type: ignore[attr-defined]
    return times


def _partial(scale: float) -> Any:
    made: Any = functools.partial(_times)
    made.scale = scale
    return made


def _parameter(scale: float) -> Any:
    made: Any = nn.Parameter(torch.ones(3, dtype=torch.float64))
    made.scale = scale
    return made


def _decorated(scale: Any) -> Any:
    @functools.wraps(function := _function(scale))
    def called(z: Tensor) -> Tensor:
        return function(z)

    return called


def _first(value: Any) -> Any:
    return next(iter(value))


Use = Callable[[Any, Tensor], Tensor]
# How the attribute is made of a number, and used.
KINDS: dict[str, tuple[Callable[[float], Any], Use]] = {
    "float": (float, lambda a, z: z * a),
    "numpy.float64": (np.float64, lambda a, z: z * a),
    "array": (lambda v: np.full(3, v), lambda a, z: z * torch.as_tensor(a)),
    "object with numpy": (lambda v: Held(np.float64(v)), lambda a, z: z * a.scale),
    "Fraction": (fractions.Fraction, lambda a, z: z * float(a)),
    "partial": (lambda v: functools.partial(_times, scale=v), lambda a, z: a(z)),
    "deque": (lambda v: collections.deque([v]), lambda a, z: z * a[0]),
    "mappingproxy": (lambda v: types.MappingProxyType({"s": v}), lambda a, z: z * a["s"]),
    "set": (lambda v: {v}, lambda a, z: z * _first(a)),
    "named tuple": (lambda v: Pair(v, ""), lambda a, z: z * a.scale),
    "namespace": (lambda v: types.SimpleNamespace(scale=v), lambda a, z: z * a.scale),
    "object": (Held, lambda a, z: z * a.scale),
    "slots": (Slots, lambda a, z: z * a.scale),
    "dataclass": (Data, lambda a, z: z * a.scale),
    "nested": (lambda v: {"a": [Held(v)]}, lambda a, z: z * a["a"][0].scale),
    "enum": (Choice, lambda a, z: z * a.value),
    "closure": (_closure, lambda a, z: a(z)),
    "function": (_function, lambda a, z: a(z)),
    "decorated function": (_decorated, lambda a, z: a.__wrapped__(z)),
    "partial with an attribute": (_partial, lambda a, z: a(z, a.scale)),
    "parameter with an attribute": (_parameter, lambda a, z: z * a.scale),
    "method": (lambda v: Held(v).times, lambda a, z: a(z)),
    "dtype": (lambda v: torch.float64 if v > 2 else torch.float32, lambda a, z: z.to(a).double()),
    "class": (lambda v: nn.Tanh if v > 2 else nn.Sigmoid, lambda a, z: a()(z)),
    "module in a list": (lambda v: [nn.LeakyReLU(v)], lambda a, z: a[0](z)),
    "tensor": (torch.tensor, lambda a, z: z * a),
}
BREAKS = {"numpy.float64", "array", "object with numpy", "partial with an attribute"}
BREAKS |= {"parameter with an attribute"}

# Changes of what the attribute is, in place.
INSIDE: dict[str, Callable[[Any, float], Any]] = {
    "array": lambda a, v: a.fill(v),
    "deque": lambda a, v: a.__setitem__(0, v),
    "namespace": lambda a, v: setattr(a, "scale", v),
    "object": lambda a, v: setattr(a, "scale", v),
    "object with numpy": lambda a, v: setattr(a, "scale", np.float64(v)),
    "slots": lambda a, v: setattr(a, "scale", v),
    "dataclass": lambda a, v: setattr(a, "scale", v),
    "nested": lambda a, v: setattr(a["a"][0], "scale", v),
    "closure": lambda a, v: setattr(a.__closure__[0], "cell_contents", v),
    "function": lambda a, v: setattr(a, "scale", v),
    "decorated function": lambda a, v: setattr(a.__wrapped__, "scale", v),
    "partial with an attribute": lambda a, v: setattr(a, "scale", v),
    "parameter with an attribute": lambda a, v: setattr(a, "scale", v),
    "method": lambda a, v: setattr(a.__self__, "scale", v),
    "partial": lambda a, v: a.keywords.update(scale=v),
    "module in a list": lambda a, v: setattr(a[0], "negative_slope", v),
}


class Module(nn.Module):
    def __init__(self, attribute: Any, use: Use) -> None:
        super().__init__()
        self.linear, self.attribute, self.uses = nn.Linear(3, 3).double(), attribute, [use]

    def forward(self, z: Tensor) -> Tensor:
        return self.uses[0](self.attribute, self.linear(z).sin())


def _jvp(module: nn.Module, x: Tensor) -> Tensor:
    return jx.jvp(module, (x,), (x.cos(),))[1]


EVERY_TIME = ("numpy.float64", "Fraction", "dtype")
IN_PLACE_EVERY_TIME = ("deque", "nested", "closure", "partial with an attribute")


def _case(name: str, inside: Any) -> Any:
    fast = name in (IN_PLACE_EVERY_TIME if inside else EVERY_TIME)
    marks = () if fast else pytest.mark.slow
    return pytest.param(name, inside, id=name + (" in place" if inside else ""), marks=marks)


CASES = [_case(name, None) for name in KINDS] + [_case(*case) for case in INSIDE.items()]


@pytest.mark.parametrize("name, inside", CASES)
def test_a_change_is_seen(name: str, inside: Any) -> None:
    make, use = KINDS[name]
    module = Module(make(2.0), use)
    x = torch.randn(2, 3, dtype=torch.float64)
    compiled = torch.compile(lambda x: _jvp(module, x), backend="aot_eager")
    first = _jvp(module, x)
    torch.testing.assert_close(compiled(x), first)
    breaks = any(
        "whose changes a graph does not see" in str(why) for why in counters["graph_break"]
    )
    assert breaks == (name in BREAKS)
    if inside is None:
        module.attribute = make(3.0)
    else:
        inside(module.attribute, 3.0)
    expected = _jvp(module, x)
    assert not torch.equal(first, expected)
    torch.testing.assert_close(compiled(x), expected)


# ---- attributes that forward writes -------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(3, 3).double(), 0
        self.log: list[int] = []
        self.previous: Tensor | None = None

    def number(self) -> int:
        self.count = self.count + 1
        return self.count

    def list_(self) -> int:
        self.log.append(1)
        return len(self.log)

    def forward(self, z: Tensor) -> Tensor:
        return self.linear(z).sin() * getattr(self, self.way)()


class Recurrent(Counting):
    def forward(self, z: Tensor) -> Tensor:
        y = self.linear(z).sin()
        if self.previous is not None:
            y = y + self.previous
        self.previous = y.detach()
        return y


@pytest.mark.parametrize("way", ["number", "list_", "tensor"])
def test_what_forward_writes_is_as_without_a_graph(way: str) -> None:
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(Recurrent() if way == "tensor" else Counting())
        modules[-1].way = way
    x = torch.randn(2, 3, dtype=torch.float64)
    compiled = torch.compile(lambda x: _jvp(modules[0], x), backend="eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(x), _jvp(modules[1], x))
    torch._dynamo.reset()
    whole = torch.compile(lambda x: _jvp(modules[0], x), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"changes .*, which a graph cannot|neither its param"):
        whole(x)


def test_a_hook_that_computes_a_weight_stays_in_the_graph() -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        layer = torch.nn.utils.weight_norm(nn.Linear(3, 3).double())
    module, x = nn.Sequential(layer, nn.Tanh()), torch.randn(2, 3, dtype=torch.float64)
    compiled = torch.compile(lambda x: _jvp(module, x), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), _jvp(module, x))
    assert type(layer.weight) is Tensor


class Activated(nn.Module):
    """As torch's TransformerEncoderLayer, which holds F.relu itself."""

    def __init__(self, activation: Callable[..., Tensor]) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x) * x


def test_functions_of_torch_are_held_as_they_are() -> None:
    """Dynamo cannot read the defaults of those it knows."""
    module = Activated(nn.functional.relu)
    x = torch.tensor([-1.0, 2.0])

    @functools.partial(torch.compile, fullgraph=True, backend="eager")
    def slope(x: Tensor) -> Tensor:
        return jx.jvp(module, (x,), (torch.ones_like(x),))[1]

    assert torch.equal(slope(x), torch.tensor([0.0, 4.0]))
    module.activation = torch.square
    torch.testing.assert_close(slope(x), 3 * x**2)


def test_a_checkpoint_that_a_module_holds_stays_in_the_graph() -> None:
    """Diffusers' models hold torch's in a function, of which dynamo knows no id."""
    checkpoint = torch.utils.checkpoint.checkpoint
    module, x = Activated(torch.square), torch.tensor([-1.0, 2.0])
    module.checkpoint = lambda *args: checkpoint(*args, use_reentrant=False)  # type: ignore[assignment]

    @functools.partial(torch.compile, fullgraph=True, backend="eager")
    def slope(x: Tensor) -> Tensor:
        return jx.jvp(module, (x,), (torch.ones_like(x),))[1]

    torch.testing.assert_close(slope(x), 3 * x**2)
