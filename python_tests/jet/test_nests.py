"""Nests are paired by their keys, not by the order in which these were written, or refused."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import jachess_ext as jx
from python_tests.jet.drawn import randn

KEYS = ("a", "b", "c")
POWERS = {"a": 3, "b": 2, "c": 4}
ORDERS = ("abc", "cab", "cba")
"""Of the keys: one as it is, one turned round, one backwards."""
PAIRS = (("abc", "cab"), ("cab", "abc"), ("cba", "cab"))
Named = namedtuple("Named", KEYS)


@dataclasses.dataclass
class Fields:
    a: Tensor
    b: Tensor
    c: Tensor


X = {key: randn(4, 2, seed=seed) for seed, key in enumerate(KEYS)}
"""All of one shape: a wrong pair shows in the numbers alone."""
V = {key: randn(4, 2, seed=10 + seed) for seed, key in enumerate(KEYS)}
DICTS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "nested": lambda items: {"inner": dict(items)},
}


def in_order(values: dict[str, Tensor], order: str) -> list[tuple[str, Tensor]]:
    return [(key, values[key]) for key in order]


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def total(x: Any) -> Tensor:
    """Σ a³ + b² + c⁴ of each row."""
    x = x.get("inner", x) if isinstance(x, dict) and "inner" in x else x
    return sum(x[key].pow(power).sum(-1) for key, power in POWERS.items())  # type: ignore[return-value]


def slope(key: str) -> Tensor:
    return POWERS[key] * X[key] ** (POWERS[key] - 1)


def bend(key: str) -> Tensor:
    return POWERS[key] * (POWERS[key] - 1) * X[key] ** (POWERS[key] - 2)


@pytest.mark.parametrize("order, other", PAIRS)
@pytest.mark.parametrize("kind", DICTS)
def test_divergence_of_a_field_in_another_order(kind: str, order: str, other: str) -> None:
    make = DICTS[kind]

    def field(x: Any) -> Any:
        x = x["inner"] if kind == "nested" else x
        return make([(key, x[key] ** POWERS[key]) for key in other])

    expected = sum(slope(key).sum(-1) for key in KEYS)
    value, divergence = jx.divergence(field, make(in_order(X, order)))
    close(divergence, expected)
    value = value["inner"] if kind == "nested" else value
    for key in KEYS:
        close(value[key], X[key] ** POWERS[key])
    probes = make([(key, torch.stack([V[key]])) for key in other])
    estimate = sum((V[key] ** 2 * slope(key)).sum(-1) for key in KEYS)
    close(jx.divergence(field, make(in_order(X, order)), directions=probes)[1], estimate)


@pytest.mark.parametrize("order, other", PAIRS)
@pytest.mark.parametrize("kind", DICTS)
def test_directions_and_tangents_in_another_order(kind: str, order: str, other: str) -> None:
    make = DICTS[kind]
    x, v = make(in_order(X, order)), make(in_order(V, other))
    u = make([(key, V[key][None]) for key in other])
    along = sum((slope(key) * V[key]).sum(-1) for key in KEYS)
    square = sum((bend(key) * V[key] ** 2).sum(-1) for key in KEYS)
    close(jx.jvp(total, (x,), (v,))[1], along)
    close(jx.jvp(total, (x,), (v,), differentiable=False)[1], along)
    jet = jx.jet(total, x, u, second="squares")
    close([jet.first[0], jet.second[0]], [along, square])
    for call in (jx.laplacian, jx.hessian_diagonal):
        first, second = call(total, x, directions=u)[1:]
        close([first[0], second.reshape(4)], [along, square])
    _, (gradient,), (product,) = jx.hvp(lambda x: total(x).sum(), (x,), (v,))
    gradient, product = (
        part["inner"] if kind == "nested" else part for part in (gradient, product)
    )
    for key in KEYS:
        close([gradient[key], product[key]], [slope(key), bend(key) * V[key]])


REFUSED: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "list": lambda x: list(x.values()),
    "keys of others": lambda x: {key.upper(): x[key] for key in x},
    "a key more": lambda x: {**x, "d": x["a"]},
    "deeper": lambda x: {key: [x[key]] for key in x},
    "named": lambda x: Named(**x),
    "fields": lambda x: Fields(**x),
    "tensor": lambda x: x["a"],
    "none": lambda x: {**x, "a": None},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_structure_is_refused(kind: str) -> None:
    make = REFUSED[kind]
    v, u = make(V), make({key: V[key][None] for key in KEYS})
    with pytest.raises(ValueError, match="nested as those of x"):
        jx.divergence(make, X)
    for call in (
        *(
            [
                lambda: jx.jvp(total, (X,), (v,)),
                lambda: jx.hvp(lambda x: total(x).sum(), (X,), (v,)),
            ]
            if kind != "none"  # a tangent of zero
            else []
        ),
        lambda: jx.jet(total, X, u),
        lambda: jx.laplacian(total, X, directions=u),
        lambda: jx.hessian_diagonal(total, X, directions=u),
        lambda: jx.divergence(lambda x: x, X, directions=u),
    ):
        with pytest.raises(TypeError, match=r"nested otherwise|must be (a tensor|a plain tensor)"):
            call()


def test_lists_tuples_and_named_tuples() -> None:
    a, b, c = X.values()
    expected = sum(slope(key).sum(-1) for key in KEYS)
    field = lambda a, b, c: (a**3, b**2, c**4)  # noqa: E731
    for x, f in (
        ((a, b, c), field),
        (Named(a, b, c), lambda a, b, c: Named(a**3, b**2, c**4)),
        ([a, b, c], lambda x: [x[0] ** 3, x[1] ** 2, x[2] ** 4]),
        (((a, [b, c]),), lambda x: ((x[0] ** 3, [x[1][0] ** 2, x[1][1] ** 4]),)),
    ):
        close(jx.divergence(f, x)[1], expected)
    close(jx.divergence(lambda a: a**3, (a,))[1], slope("a").sum(-1))
    for f in (
        lambda a, b, c: [a**3, b**2, c**4],
        lambda a, b, c: (a**3, (b**2, c**4)),
        lambda a, b, c: (a**3, b**2),
        lambda a, b, c: {"a": a, "b": b, "c": c},
    ):
        with pytest.raises(ValueError, match="nested as those of x"):
            jx.divergence(f, (a, b, c))


@dataclasses.dataclass
class Gaussian:
    mean: Tensor
    scale: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.scale = self.mean.exp()


def test_results_are_made_by_no_constructor() -> None:
    """It would compute with tangents, or take no such keys."""
    x = X["a"]
    result = jx.jvp(lambda x: Gaussian(x.sin()), (x,), (torch.ones_like(x),))
    for part, expected in zip(result, (x.sin().exp(), x.cos() * x.sin().exp()), strict=True):
        close(part.scale, expected)
    tangent = jx.jvp(lambda x: defaultdict(list, {0: x.sin()}), (x,), (torch.ones_like(x),))[1]
    close(tangent[0], x.cos())
    assert tangent[1] == []


@pytest.mark.parametrize("order", ORDERS)
def test_results_have_the_structure_that_fn_returned(order: str) -> None:
    made: dict[str, Callable[[dict[str, Tensor]], Any]] = {
        "dict": lambda y: {key: y[key] for key in order},
        "OrderedDict": lambda y: OrderedDict(in_order(y, order)),
        "named": lambda y: Named(**y),
        "fields": lambda y: Fields(**{key: y[key] for key in order}),
        "list": lambda y: [y[key] for key in KEYS],
    }
    for kind, make in made.items():
        value, first, second = jx.laplacian(
            lambda x, make=make: make({key: (x ** POWERS[key]).sum(-1) for key in KEYS}), X["a"]
        )
        assert type(value) is type(first) is type(second) is type(make(X))
        for number, key in enumerate(KEYS):
            part = (
                second[number]
                if kind == "list"
                else second[key]
                if isinstance(second, dict)
                else getattr(second, key)
            )
            power = POWERS[key]
            close(part, (power * (power - 1) * X["a"] ** (power - 2)).sum(-1))
