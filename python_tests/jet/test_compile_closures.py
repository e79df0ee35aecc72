"""Functions made within ``torch.compile``: what they close over stays an input of the graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jachess_ext as jx
from python_tests.jet.compiling import NEEDS_MODULES_IN_GRAPHS

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), NEEDS_MODULES_IN_GRAPHS]
SCALE = 1.5
SIZES = [2.0, 3.0]
SHIFT = torch.tensor(0.5, dtype=torch.float64)
COUNT = 0


class Net(nn.Module):
    """Attention of four tokens of three numbers, and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.gain = nn.Linear(3, 12), nn.Linear(4, 3), 1.25

    def forward(self, z: Tensor, t: Tensor, c: Tensor | None = None) -> Tensor:
        q, k, v = self.enter(z + t[:, None, None].sin()).chunk(3, -1)
        y = self.gain * self.leave(F.scaled_dot_product_attention(q, k, v))
        return y if c is None else y * c

    def velocity(self, z: Tensor, t: Tensor) -> Tensor:
        return self(z, t) + z.square()

    def local(self, c: Tensor) -> Any:
        def u(z: Tensor, t: Tensor) -> Tensor:
            return self(z, t, c) * self.gain

        return u


class Trainer:
    """An object of the user's, which is no module."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.settings, self.power = net, {"scale": 2.0}, 3

    def velocity(self, z: Tensor, t: Tensor) -> Tensor:
        return self.net(z, t) * self.settings["scale"] + z**self.power


class World:
    """What functions close over."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.net, self.other = Net().double(), nn.Linear(3, 3).double()
        self.trainer = Trainer(self.net)
        self.c = torch.randn(3, dtype=torch.float64, requires_grad=True)
        self.d = torch.randn(3, dtype=torch.float64, requires_grad=True)
        self.number, self.count, self.name = 2.0, 2, "sin"
        self.act: Any = torch.sin
        self.dtype, self.kind = torch.float64, nn.Tanh

    def leaves(self) -> list[Tensor]:
        return [*self.net.parameters(), *self.other.parameters(), self.c, self.d]


def helper(z: Tensor) -> Tensor:
    return z * SCALE + SIZES[1]


def countdown(z: Tensor, n: int) -> Tensor:
    return z * SCALE if n == 0 else countdown(z.sin(), n - 1)


def twice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def called(*args: Tensor) -> Tensor:
        return function(*args) * 2

    return called


# ---- kinds of functions --------------------------------------------------------------------------


def module_and_tensor(w: World) -> Any:
    net, c = w.net, w.c
    return lambda z, t: net(z, t, c)


def nests_of_tensors(w: World) -> Any:
    nest = {"a": [w.c, (w.d, 0.5)], "b": w.net}
    return lambda z, t: nest["b"](z, t, nest["a"][0]) + nest["a"][1][0] * z.cos() * nest["a"][1][1]


def numbers(w: World) -> Any:
    net, number, count, name, nothing = w.net, w.number, w.count, w.name, None

    def u(z: Tensor, t: Tensor) -> Tensor:
        assert nothing is None
        return net(z, t) * number + getattr(torch, name)(z) ** count

    return u


def nested(w: World) -> Any:
    net, c, d = w.net, w.c, w.d

    def inner(z: Tensor, t: Tensor) -> Tensor:
        return net(z, t, c)

    def middle(z: Tensor, t: Tensor) -> Tensor:
        return inner(z, t).sin() + d

    def u(z: Tensor, t: Tensor) -> Tensor:
        return middle(z, t) * inner(z, 2 * t) * w.number

    return u


def defaults(w: World) -> Any:
    def u(
        z: Tensor, t: Tensor, net: Any = w.net, c: Any = w.c, *, number: float = w.number
    ) -> Tensor:
        return net(z, t, c) * number

    return u


def intermediate(w: World) -> Any:
    product, flow = w.c * w.d, w.other(w.d)
    return lambda z, t: w.net(z, t, product) + flow.sin() * z


def method(w: World) -> Any:
    return w.net.velocity


def closure_of_a_method(w: World) -> Any:
    return w.net.local(w.c)


def of_an_object(w: World) -> Any:
    trainer, c = w.trainer, w.c
    return lambda z, t: trainer.velocity(z, t) * c


def partial_of_a_module(w: World) -> Any:
    return functools.partial(w.net, c=w.c)


def partial_of_a_closure(w: World) -> Any:
    net, d = w.net, w.d

    def u(scale: float, z: Tensor, t: Tensor, *, c: Tensor) -> Tensor:
        return net(z, t, c) * scale + d

    return functools.partial(u, w.number, c=w.c)


def holds_functions_of_torch(w: World) -> Any:
    act, gelu, relu, dtype, kind = w.act, F.gelu, F.relu6, w.dtype, w.kind
    return lambda z, t: kind()(act(w.net(z, t)) + gelu(z) * relu(z)).to(dtype)


def global_variables(w: World) -> Any:
    net = w.net
    return lambda z, t: helper(net(z, t)) * SCALE


def global_recursion(w: World) -> Any:
    net = w.net
    return lambda z, t: countdown(net(z, t), 2)


def decorated(w: World) -> Any:
    net, c = w.net, w.c

    @twice
    def u(z: Tensor, t: Tensor) -> Tensor:
        return net(z, t, c)

    return u


SCOPE: dict[str, Any] = {}  # without a __name__
exec("def make(net, c):\n return lambda z, t: net(z, t, c)", SCOPE)


def without_a_file(w: World) -> Any:
    return SCOPE["make"](w.net, w.c)


def without_gradient(w: World) -> Any:
    net, c = w.net, w.c

    def u(z: Tensor, t: Tensor) -> Tensor:
        with torch.no_grad():
            gate = net(z, t).sigmoid()
        return net(z, t, c) * gate.detach()

    return u


def inner_functions(w: World) -> Any:
    net, c = w.net, w.c

    def u(z: Tensor, t: Tensor) -> Tensor:
        total = z
        parts = [net(z, n * t, c) for n in range(1, 3)]

        def add(part: Tensor) -> None:
            nonlocal total
            total = total + part * SCALE

        for part in parts:
            add(part)
        return total

    return u


def a_parameter(w: World) -> Any:
    weight, net = w.net.leave.weight, w.net
    return lambda z, t: net(z, t) @ (weight @ weight.mT)[:3, :3]


Kind = Callable[[World], Any]
Change = Callable[[World], Any]


def _new_c(w: World) -> None:
    w.c = torch.randn(3, dtype=torch.float64, requires_grad=True)


def _number(w: World) -> None:
    w.number += 1.5


def _set_global(name: str, value: object) -> None:
    setattr(sys.modules[__name__], name, value)


# What is made, and every change of what it reads.
KINDS: dict[Kind, list[Change]] = {
    module_and_tensor: [_new_c, lambda w: w.net.leave.weight.data.mul_(2)],
    nests_of_tensors: [_new_c],
    numbers: [
        *(_number, _number, lambda w: setattr(w, "name", "cos")),
        *[lambda w: setattr(w, "count", w.count + 1)] * 2,
    ],
    nested: [_new_c, _number],
    defaults: [_new_c, _number],
    intermediate: [_new_c],
    method: [lambda w: setattr(w.net, "gain", w.net.gain + 1)],
    closure_of_a_method: [_new_c, lambda w: setattr(w.net, "gain", w.net.gain + 1)],
    of_an_object: [
        lambda w: w.trainer.settings.update(scale=4.0),
        *[lambda w: setattr(w.trainer, "power", w.trainer.power + 1)] * 2,
        lambda w: setattr(w.trainer, "net", Net().double()),
        lambda w: setattr(w, "trainer", Trainer(w.net)),
    ],
    partial_of_a_module: [_new_c],
    partial_of_a_closure: [_new_c, _number],
    holds_functions_of_torch: [
        lambda w: setattr(w, "act", torch.cos),
        lambda w: setattr(w, "act", torch.special.expit),
        lambda w: setattr(w, "kind", nn.Sigmoid),
    ],
    global_variables: [
        *(lambda w: _set_global("SCALE", SCALE + 1), lambda w: SIZES.__setitem__(1, 7.0)),
        lambda w: _set_global("SCALE", SCALE + 1),
    ],
    global_recursion: [lambda w: _set_global("SCALE", SCALE + 1)],
    decorated: [_new_c],
    without_a_file: [_new_c],
    without_gradient: [_new_c],
    inner_functions: [_new_c, lambda w: _set_global("SCALE", SCALE + 1)],
    a_parameter: [lambda w: w.net.leave.weight.data.mul_(2)],
}


# ---- calls ---------------------------------------------------------------------------------------


def _jvp(fn: Any, z: Tensor, t: Tensor, **settings: bool) -> tuple[Tensor, ...]:
    return jx.jvp(fn, (z, t), (z.cos(), torch.ones_like(t)), **settings)


def _jet(fn: Any, z: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    steps = torch.stack([z.cos(), z.sin()]), torch.stack([torch.ones_like(t), t])
    jet = jx.jet(fn, (z, t), steps)
    return jet.primal, jet.first, jet.second


def _laplacian(fn: Any, z: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    def of_z(z: Tensor) -> Tensor:
        return fn(z, t)

    return tuple(jx.laplacian(of_z, z, directions=z.cos()[None], check=False))


def _gradient_loss(fn: Any, z: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    result = jx.gradient_loss(fn, (z, t), lambda value, slopes: slopes[0].square().sum())
    return result.loss, *result.gradient


CALLS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "jvp": _jvp,
    "jvp of a target": functools.partial(_jvp, differentiable=False),
    "jet": _jet,
    "laplacian": _laplacian,
    "gradient_loss": _gradient_loss,
}


def results(step: Callable[..., Any], w: World, z: Tensor, t: Tensor) -> list[Tensor]:
    """The values, and the gradients in all that was closed over."""
    values = step(w, z, t)
    loss = sum(value.sin().sum() for value in values)
    slopes = torch.autograd.grad(loss, w.leaves(), allow_unused=True)
    return [*values, *(torch.zeros(()) if s is None else s for s in slopes)]


def point(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 4, 3, dtype=torch.float64), torch.rand(batch, dtype=torch.float64)


SLOW = [
    pytest.param(kind, call, marks=pytest.mark.slow)
    for kind in KINDS
    for call in (CALLS if kind is module_and_tensor else ["jet"])
]


@pytest.mark.parametrize("place", ["inside", pytest.param("outside", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind, call", [(nested, "jvp of a target"), *SLOW])
def test_what_a_function_closes_over_is_an_input(
    kind: Kind, call: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one graph: values and gradients, at other points, after each change, in another batch."""
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 1.5)
    monkeypatch.setattr(sys.modules[__name__], "SIZES", [2.0, 3.0])
    w, made = World(), []

    def step(w: World, z: Tensor, t: Tensor) -> Any:
        return CALLS[call](kind(w) if place == "inside" else made[0], z, t)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")

    def compare(batch: int) -> None:
        made[:] = [kind(w)]
        z, t = point(batch)
        expected = results(step, w, z, t)
        made[:] = [kind(w)]
        torch.testing.assert_close(results(compiled, w, z, t), expected)

    for batch in (3, 3):
        compare(batch)
    for change in KINDS[kind]:
        change(w)
        compare(3)
    if call == "jet":
        compare(5)


ACTIVATION: type[nn.Module] = nn.Tanh


def activated(z: Tensor) -> Tensor:
    return ACTIVATION()(z)


@pytest.mark.parametrize("place", ["closure", "global variable"])
def test_another_class_is_traced_anew(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a class in a closure dynamo itself guards only that it is a class (torch 2.13)."""

    def of_closure(kind: type[nn.Module]) -> Any:
        return lambda z: kind()(z)

    made: list[Any] = []
    z, _ = point(3)

    def step(z: Tensor) -> Tensor:
        return jx.jvp(made[0], (z,), (z.cos(),))[1]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for kind in (nn.Tanh, nn.Sigmoid):
        monkeypatch.setattr(sys.modules[__name__], "ACTIVATION", kind)
        made[:] = [of_closure(kind) if place == "closure" else activated]
        torch.testing.assert_close(compiled(z), step(z))


# ---- what no graph holds -------------------------------------------------------------------------


def writes_a_cell(w: World) -> Any:
    calls = 0

    def u(z: Tensor, t: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return w.net(z, t) * (calls + w.count)

    return u


def writes_an_object(w: World) -> Any:
    trainer = w.trainer

    def u(z: Tensor, t: Tensor) -> Tensor:
        trainer.power += 1
        return trainer.velocity(z, t)

    return u


def writes_a_global_variable(w: World) -> Any:
    net = w.net

    def u(z: Tensor, t: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return net(z, t) * COUNT

    return u


def is_recursive(w: World) -> Any:
    net = w.net

    def u(z: Tensor, t: Tensor, n: int = 2) -> Tensor:
        return net(z, t) if n == 0 else u(z.sin(), t, n - 1) * n

    return u


def numpy_number(w: World) -> Any:
    net, number = w.net, np.float64(w.number)
    return lambda z, t: net(z, t) * float(number)


def global_tensor(w: World) -> Any:
    net = w.net
    return lambda z, t: net(z, t) * SHIFT


def tensor_of_an_object(w: World) -> Any:
    return lambda z, t: w.net(z, t) * w.c


def with_an_attribute(w: World) -> Any:
    net = w.net

    def u(z: Tensor, t: Tensor) -> Tensor:
        return net(z, t)

    u.name = "u"  # type: ignore[attr-defined]
    return u


def changed_before(w: World) -> Any:
    w.net.gain = w.net.gain + w.number
    return lambda z, t: w.net(z, t)


def changed_global(w: World) -> Any:
    global COUNT
    COUNT = COUNT + w.count
    net = w.net
    return lambda z, t: net(z, t) * COUNT


REFUSED = [
    *(writes_a_cell, writes_an_object, writes_a_global_variable, is_recursive),
    *(numpy_number, global_tensor, tensor_of_an_object, with_an_attribute),
    *(changed_before, changed_global),
]


@pytest.mark.filterwarnings("ignore:derivatives run eagerly")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(x, marks=() if x in (writes_a_cell, changed_before) else pytest.mark.slow)
        for x in REFUSED
    ],
)
def test_what_no_can_join_graph_runs_eagerly(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same numbers, twice; an error in one graph."""
    compiled = torch.compile(lambda w, z, t: _jvp(kind(w), z, t), backend="eager")
    runs = []
    points = [point(3) for _ in range(2)]
    for step in (compiled, lambda w, z, t: _jvp(kind(w), z, t)):
        monkeypatch.setattr(sys.modules[__name__], "COUNT", 0)
        w = World()
        runs.append([results(step, w, *p) for p in points])
        runs.append([w.trainer.power, w.net.gain, COUNT])
    torch.testing.assert_close(runs[:2], runs[2:])
    torch._dynamo.reset()
    whole = torch.compile(lambda w, z, t: _jvp(kind(w), z, t), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole(World(), *points[0])


# ---- a step of MeanFlow --------------------------------------------------------------------------


class MeanFlow(nn.Module):
    """The loss in the form that public code has it: a local function around the network."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.power = Net(), 0.75

    def forward_with_loss(self, x: Tensor, c: Tensor) -> Tensor:
        e = x.cos()
        t = torch.linspace(0.4, 0.9, len(x), dtype=x.dtype).view(-1, 1, 1)
        r = t / 2
        z, v = (1 - t) * x + t * e, e - x

        def u_func(z: Tensor, t: Tensor, r: Tensor) -> Tensor:
            h = t - r
            return self.net(z, t.view(-1) + 2 * h.view(-1), c)

        with torch.amp.autocast("cuda", enabled=False):
            tangents = v, torch.ones_like(t), torch.zeros_like(r)
            u, slope = jx.jvp(u_func, (z, t, r), tangents, differentiable=False)
            error = (u - (v - (t - r) * slope).detach()).square().sum((1, 2))
            return (error / (error.detach() + 0.01) ** self.power).mean()


def train_step(model: MeanFlow, x: Tensor, c: Tensor) -> Tensor:
    loss = model.forward_with_loss(x, c)
    loss.backward(create_graph=False)
    return loss


@pytest.mark.filterwarnings("error:derivatives run eagerly")
def test_a_compiled_training_step_of_meanflow() -> None:
    """The step is compiled as a whole, its backward within; against central differences."""
    model = MeanFlow().double()
    c = torch.randn(3, dtype=torch.float64)
    compiled = torch.compile(train_step, backend="aot_eager")
    for _ in range(2):
        x, _ = point(3)
        losses, slopes = [], []
        for step in (compiled, train_step):
            model.zero_grad()
            losses.append(step(model, x, c))
            slopes.append([parameter.grad.clone() for parameter in model.parameters()])  # type: ignore[union-attr]
        torch.testing.assert_close(losses[0], losses[1])
        torch.testing.assert_close(slopes[0], slopes[1])
    whole = torch.compile(model.forward_with_loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(whole(x, c), losses[1])
