"""`jx.differentiable` around attention: dropout, dtypes, memory, and what it leaves as it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, func
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import jachess_ext as jx
from jachess_ext.differentiable import attention as differentiable_attention
from jachess_ext.ops import attention_products
from jachess_ext.ops.attention_reference import dropout_mask
from python_tests.differentiable.test_nestings import (
    BIAS,
    HIDES,
    Draw,
    Inputs,
    nestings,
    of,
    written_out,
)
from python_tests.ops.cases import LargestTensor

Function = Callable[..., Tensor]


def heads(tokens: int, dtype: torch.dtype = torch.float64, name: str = "heads") -> Inputs:
    draw = Draw(name)
    return tuple(draw(1, 2, tokens, 8).to(dtype) for _ in range(3))


# ---- dropout ---------------------------------------------------------------------------------


def dropped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention with the weights that seed 11 drops."""
    keeps = dropout_mask(2, 2, 5, 7, 0.4, 11, torch.device("cpu"))
    weights = (query @ key.mT / query.shape[-1] ** 0.5).exp()
    return (weights / weights.sum(-1, keepdim=True) * keeps / 0.6) @ value


# Of each way in which a level of one transform hands the mask to the next.
ONE_MASK = (
    *("jvp", "vjp", "grad", "linearize", "jvp(jvp)", "jvp(vjp)", "vjp(vjp)", "vjp(jvp)"),
    *("grad(grad)", "vmap(grad)", "vmap(jvp(grad))", "vmap(vjp)", "grad(vmap)", "jacfwd"),
    *("autograd.functional.hvp", "dual of a gradient", "create_graph", "is_grads_batched"),
    *("jvp(jvp(grad))", "grad(jvp(grad))"),
)


@pytest.mark.parametrize("nesting", ONE_MASK)
def test_one_mask_in_every_nesting(nesting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differentiable_attention, "fresh_seed_on", lambda device: torch.tensor(11))
    draw = Draw("dropout")
    x = draw(2, 2, 5, 4), draw(2, 2, 7, 4), draw(2, 2, 7, 4)
    expected = dict(nestings(dropped, x))[nesting]()
    with jx.differentiable():
        attention = of(F.scaled_dot_product_attention, {"dropout_p": 0.4})
        result = dict(nestings(attention, x))[nesting]()
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-10)


def test_vmap_says_what_a_draw_is() -> None:
    x = heads(9)
    same = tuple(torch.stack([y, y]) for y in x)

    def slope(*x: Tensor) -> Tensor:
        return func.jvp(partial(F.scaled_dot_product_attention, dropout_p=0.5), x, x)[1]

    with jx.differentiable():
        with pytest.raises(RuntimeError, match="randomness"):
            func.vmap(slope)(*same)
        a, b = func.vmap(slope, randomness="same")(*same)
        torch.testing.assert_close(a, b)
        a, b = func.vmap(slope, randomness="different")(*same)
        assert not torch.allclose(a, b)


# ---- dtypes ----------------------------------------------------------------------------------


def gradient(f: Function, x: Inputs) -> Inputs:
    return func.grad(lambda *x: f(*x).sin().sum(), (0, 1, 2))(*x)


def along(f: Callable[..., Any], x: Inputs) -> Any:
    return func.jvp(f, x, tuple(y.cos() for y in x))[1]


def gradient_of_a_tangent(f: Function, x: Inputs) -> Inputs:
    return func.grad(lambda *x: along(f, x).sum(), (0, 1, 2))(*x)


ORDERS: dict[str, Callable[[Function, Inputs], Any]] = {
    "jvp": along,
    "grad": gradient,
    "jvp(jvp)": lambda f, x: along(lambda *x: along(f, x), x),
    "jvp(grad)": lambda f, x: along(lambda *x: gradient(f, x), x),
    "grad(jvp)": gradient_of_a_tangent,
    "grad(grad)": lambda f, x: func.grad(
        lambda *x: torch.stack([g.square().sum() for g in gradient(f, x)]).sum(), (0, 1, 2)
    )(*x),
}


def size(x: Tensor | Inputs) -> Tensor:
    return torch.cat([y.double().flatten() for y in ((x,) if isinstance(x, Tensor) else x)])


@pytest.mark.parametrize(
    ("dtype", "learns", "order"),
    [
        *((torch.bfloat16, learns, order) for learns in (False, True) for order in ORDERS),
        *((dtype, True, "grad(grad)") for dtype in (torch.float32, torch.float16)),
    ],
)
def test_smaller_dtypes_err_as_math_attention_does(
    dtype: torch.dtype, learns: bool, order: str
) -> None:
    x = heads(40)
    bias = Draw("bias")(2, 40, 40)

    def error(context: Callable[[], AbstractContextManager[Any]]) -> float:
        expected = size(ORDERS[order](lambda q, k, v: written_out(q, k, v, learned(q, bias)), x))
        with context():
            result = ORDERS[order](
                lambda q, k, v: F.scaled_dot_product_attention(
                    q, k, v, learned(q, bias.to(q.dtype))
                ),
                tuple(y.to(dtype) for y in x),
            )
        tensors = result if isinstance(result, tuple) else (result,)
        assert all(y.dtype == dtype for y in tensors)
        return float((size(result) - expected).norm() / expected.norm())

    def learned(q: Tensor, bias: Tensor) -> Tensor:
        return bias * q.mean() if learns else bias

    assert error(jx.differentiable) < 2 * error(lambda: sdpa_kernel(SDPBackend.MATH))


@pytest.mark.parametrize("order", ORDERS)
def test_autocast(order: str) -> None:
    x = heads(12, torch.float32)

    def result(context: Callable[[], AbstractContextManager[Any]]) -> Tensor:
        with context(), torch.autocast("cpu", torch.bfloat16):
            y = ORDERS[order](lambda q, k, v: F.scaled_dot_product_attention(q, k, v.sin()), x)
        return size(y)

    expected = size(ORDERS[order](lambda q, k, v: written_out(q, k, v.sin()), x))
    ours, maths = (
        float((result(context) - expected).norm() / expected.norm())
        for context in (jx.differentiable, lambda: sdpa_kernel(SDPBackend.MATH))
    )
    assert ours < 2 * maths + 1e-6


# ---- memory ----------------------------------------------------------------------------------


def largest(
    order: str, tokens: int, context: Callable[[], AbstractContextManager[Any]], **options: Any
) -> int:
    x = heads(tokens, torch.float32)
    with LargestTensor() as mode, context():
        ORDERS[order](partial(F.scaled_dot_product_attention, **options), x)
    return mode.elements


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "dropout_p": 0.1}])
def test_no_matrix_of_tokens_by_tokens(order: str, options: dict[str, Any]) -> None:
    few, many = (largest(order, n, jx.differentiable, **options) for n in (320, 1280))
    assert many <= 4 * few < 320**2
    if not options:
        assert largest(order, 256, lambda: sdpa_kernel(SDPBackend.MATH)) >= 256**2


@pytest.mark.parametrize("order", ORDERS)
def test_a_mask_with_derivatives_costs_its_own_size(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a matrix for each sample and head."""
    monkeypatch.setattr(attention_products, "_PIECE", 1 << 17)
    tokens = 256
    draw = Draw("few")
    x = tuple(draw(4, 8, tokens, 4).float() for _ in range(3))
    bias = Draw("bias")(1, 1, tokens, tokens).float()
    with LargestTensor() as mode, jx.differentiable():
        ORDERS[order](lambda q, k, v: F.scaled_dot_product_attention(q, k, v, bias * q.mean()), x)
    assert mode.elements <= 8 * tokens**2 / 2  # of 32


@pytest.mark.parametrize("order", ["grad", "jvp(jvp)", "grad(grad)"])
def test_a_program_that_forces_math_attention(order: str) -> None:
    def forced(math: str) -> int:
        x = heads(256, torch.float32)
        with LargestTensor() as mode, jx.differentiable(math), sdpa_kernel(SDPBackend.MATH):  # type: ignore[arg-type]
            ORDERS[order](F.scaled_dot_product_attention, x)
        return mode.elements

    assert forced("replace") < 256**2 <= forced("keep")


def test_math_is_a_known_word() -> None:
    with pytest.raises(ValueError, match="expected one of replace, keep"):
        jx.differentiable("flash")  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ORDERS)
def test_a_block_mask(order: str) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    x = heads(300)
    ids = torch.arange(300) // 90
    packed = flex.create_block_mask(
        lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), None, None, 300, 300, device="cpu"
    )
    seen = (ids[:, None] == ids) & torch.ones(300, 300, dtype=torch.bool).tril()
    with jx.differentiable():
        result = ORDERS[order](lambda *x: flex.flex_attention(*x, block_mask=packed), x)
    expected = ORDERS[order](lambda *x: written_out(*x, seen), x)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-11)


# ---- what the context leaves as it is ----------------------------------------------------------


@pytest.mark.parametrize("context", [jx.differentiable, nullcontext])
def test_no_derivative_is_torchs_own_call(context: Callable[[], Any]) -> None:
    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    x = heads(5)
    with context(), Names():
        F.scaled_dot_product_attention(*x)
        with torch.no_grad():
            F.scaled_dot_product_attention(*(y.clone().requires_grad_() for y in x))
    assert names.count("aten::_scaled_dot_product_flash_attention_for_cpu") == 2
    assert {name for name in names if "attention" in name} == {
        "aten::_scaled_dot_product_flash_attention_for_cpu"
    }


def test_values_and_first_gradients_are_torchs() -> None:
    x = heads(33, torch.float32)
    results = []
    for context in (jx.differentiable, nullcontext):
        leaves = [y.clone().requires_grad_() for y in x]
        with context():
            y = F.scaled_dot_product_attention(*leaves, is_causal=True)
            results.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
    for ours, torchs in zip(*results, strict=True):
        assert torch.equal(ours, torchs)


@pytest.mark.parametrize("shapes", [((2, 5, 4), (3, 7, 4)), ((1, 2, 5, 4), (1, 2, 7, 3))])
def test_errors_are_torchs(shapes: tuple[tuple[int, ...], ...]) -> None:
    query, key = (torch.ones(shape, requires_grad=True) for shape in shapes)
    with pytest.raises(RuntimeError), jx.differentiable():
        F.scaled_dot_product_attention(query, key, key)


def test_written_into_a_result_that_the_backward_needs() -> None:
    x = tuple(y.requires_grad_() for y in heads(5))
    with jx.differentiable():
        y = F.scaled_dot_product_attention(*x)
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), x)


def test_within_itself() -> None:
    x = heads(5)
    expected = ORDERS["grad(jvp)"](written_out, x)
    context = jx.differentiable()
    with context, jx.differentiable(), context:
        result = ORDERS["grad(jvp)"](F.scaled_dot_product_attention, x)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-11)


# ---- random programs ---------------------------------------------------------------------------


def random_program(seed: int) -> tuple[Callable[[Function], Any], str]:
    """Return a nest of transforms of a function with two attentions, and its name."""
    draw = Draw(f"program {seed}")

    def choose(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=draw.generator))]

    tokens, keys, groups = choose(1, 3, 5), choose(2, 7), choose(1, 2)
    x = draw(2, 2 * groups, tokens, 4), draw(2, 2, keys, 4), draw(1, 1, tokens, keys)
    masks = {
        "none": lambda bias: None,
        "causal": lambda bias: None,
        "boolean": lambda bias: HIDES[:, :, :1].repeat(1, 1, tokens, 1)[..., :keys],
        "bias": lambda bias: BIAS[:, :1, :1, :keys].repeat(1, 1, tokens, 1),
        "trained": lambda bias: bias.tanh(),
    }
    kinds = [choose(*masks), choose(*masks)]

    def model(attention: Function) -> Function:
        def f(query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
            for kind in kinds:
                mask = masks[kind](bias)
                y = attention(
                    query,
                    key,
                    key.sin(),
                    attn_mask=mask,
                    is_causal=kind == "causal",
                    enable_gqa=groups > 1,
                )
                query = query + y.sin()
            return query

        return f

    layers = [
        choose("jvp", "grad", "vjp", "vmap", "functional", "one") for _ in range(choose(1, 2, 3))
    ]
    layers = [*layers[:2], *("vmap" if name == "functional" else name for name in layers[2:])]
    moves = [draw.like(x) for _ in layers]
    place = choose(0, 1, 2)

    def nest(f: Callable[..., Any], names: list[str], moves: list[Inputs]) -> Callable[..., Any]:
        if not names:
            return f
        inner, d = nest(f, names[1:], moves[1:]), moves[0]

        def total(*x: Tensor) -> Tensor:
            y = inner(*x)
            return torch.stack(
                [z.sin().sum() for z in ((y,) if isinstance(y, Tensor) else y)]
            ).sum()

        return {
            "jvp": lambda *x: func.jvp(inner, x, d)[1],
            "grad": func.grad(total, (0, 1, 2)),
            "vjp": lambda *x: func.vjp(total, *x)[1](torch.ones((), dtype=torch.float64)),
            "vmap": lambda *x: func.vmap(inner)(*(torch.stack([y, y.cos()]) for y in x)),
            "functional": lambda *x: torch.autograd.functional.jvp(inner, x, d)[1],
            "one": lambda *x: func.jvp(
                lambda y: inner(*x[:place], y, *x[place + 1 :]), (x[place],), (d[place],)
            )[1],
        }[names[0]]

    return lambda attention: nest(model(attention), layers, moves)(*x), " ".join([*layers, *kinds])


def check_program(seed: int) -> None:
    program, name = random_program(seed)
    try:
        expected = program(written_out)
    except RuntimeError as error:  # autograd.functional within a transform
        pytest.skip(str(error)[:80])
    with jx.differentiable():
        result = program(F.scaled_dot_product_attention)
    torch.testing.assert_close(
        result, expected, rtol=1e-9, atol=1e-10, msg=lambda m: f"{name}: {m}"
    )


@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed: int) -> None:
    check_program(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24, 360))
def test_more_random_programs(seed: int) -> None:
    check_program(seed)
