"""Second backwards through attention, against torch's math attention, which has them."""

import math
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import (
    CheckpointError,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import jachess_ext as jx
from jachess_ext import ops
from jachess_ext.differentiable import attention as twice
from jachess_ext.ops.attention_reference import dropout_mask
from python_tests.models.oracles import math_attention
from python_tests.ops.cases import LargestTensor

Context = Callable[[], AbstractContextManager[object]]
Heads = tuple[Tensor, Tensor, Tensor]


def heads(
    heads: int = 4,
    key_heads: int = 4,
    queries: int = 9,
    keys: int = 9,
    size: int = 8,
    value_size: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Heads:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return (
        draw(2, heads, queries, size).requires_grad_(),
        draw(2, key_heads, keys, size).requires_grad_(),
        draw(2, key_heads, keys, value_size).requires_grad_(),
    )


def penalty(attention: Callable[..., Tensor], inputs: list[Tensor], order: int) -> list[Tensor]:
    """Return the gradients of a function of attention, and those of their squares, and so on."""
    y = attention(*inputs)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    value, results = (y.sin() * weights).sum(), []
    for _ in range(order):
        gradients = torch.autograd.grad(value, inputs, create_graph=True)
        results += gradients
        value = torch.stack([g.square().sum() for g in gradients]).sum()
    return [result.detach() for result in results]


HIDES = torch.ones(9, 9, dtype=torch.bool).tril(3)
HIDES[4] = False  # a query that sees no key
BIAS = torch.linspace(-2, 1, 2 * 9 * 9, dtype=torch.float64).view(2, 1, 9, 9)
SETTINGS: dict[str, tuple[dict[str, int], dict[str, object]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "causal, fewer queries": ({"queries": 5}, {"is_causal": True}),
    "causal, fewer keys": ({"keys": 5}, {"is_causal": True}),
    "grouped": ({"key_heads": 2}, {"enable_gqa": True}),
    "one key head": ({"key_heads": 1}, {"enable_gqa": True, "is_causal": True}),
    "boolean mask": ({}, {"attn_mask": HIDES}),
    "bias": ({}, {"attn_mask": BIAS}),
    "wider values": ({"value_size": 12}, {}),
    "scale": ({}, {"scale": 0.3}),
    "heads of 256": ({"size": 256, "value_size": 256, "heads": 1, "key_heads": 1}, {}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_three_orders_are_those_of_math_attention(name: str) -> None:
    shapes, options = SETTINGS[name]
    inputs = list(heads(**shapes))

    def attention(*inputs: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*inputs, **options)

    with jx.differentiable():
        results = penalty(attention, inputs, 3)
    with math_attention():
        expected = penalty(attention, inputs, 3)
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_of_some_inputs(needed: tuple[int, ...]) -> None:
    inputs = heads()
    for n, x in enumerate(inputs):
        x.requires_grad_(n in needed)
    chosen = [inputs[n] for n in needed]

    def attention(*chosen: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*inputs)

    with jx.differentiable():
        results = penalty(attention, chosen, 2)
    with math_attention():
        expected = penalty(attention, chosen, 2)
    torch.testing.assert_close(results, expected, rtol=1e-9, atol=1e-11)


def test_autocast() -> None:
    inputs = heads(dtype=torch.float32)

    def gradients(context: Context) -> list[Tensor]:
        with context(), torch.autocast("cpu", torch.bfloat16):
            y = F.scaled_dot_product_attention(*inputs)
            assert y.dtype == torch.bfloat16
            first = torch.autograd.grad(y.float().sin().sum(), inputs, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))

    for ours, maths in zip(gradients(jx.differentiable), gradients(math_attention), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - maths).norm() < 0.03 * maths.norm()


# ---- dropout -----------------------------------------------------------------------------------


def test_dropout_keeps_one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is a formula with the mask of that seed; the second backward would differ from it
    with any other."""
    monkeypatch.setattr(twice, "fresh_seed_on", lambda device: torch.tensor(11))
    inputs = heads()
    keeps = dropout_mask(2, 4, 9, 9, 0.4, 11, torch.device("cpu"))

    def formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT / math.sqrt(8)).softmax(-1)
        return (weights * keeps / 0.6) @ value

    with jx.differentiable():
        results = penalty(
            lambda *x: F.scaled_dot_product_attention(*x, dropout_p=0.4), list(inputs), 3
        )
    expected = penalty(formula, list(inputs), 3)
    torch.testing.assert_close(results, expected, rtol=1e-9, atol=1e-11)


def test_dropout_draws_from_torchs_generator() -> None:
    inputs = heads()

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        with jx.differentiable():
            return F.scaled_dot_product_attention(*inputs, dropout_p=0.5)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


# ---- modules and their surroundings ------------------------------------------------------------


def module_gradients(module: nn.Module, x: Tensor, context: Context) -> list[Tensor]:
    parameters = list(module.parameters())
    with context():
        (force,) = torch.autograd.grad(module(x).sin().sum(), x, create_graph=True)
        return list(torch.autograd.grad(force.square().sum(), [x, *parameters]))


@pytest.mark.parametrize("train", [True, False])
def test_modules_that_call_attention_from_python(train: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).double()
    layer.train(train)
    x = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    results = module_gradients(layer, x, jx.differentiable)
    expected = module_gradients(layer, x, math_attention)
    torch.testing.assert_close(results, expected, rtol=1e-9, atol=1e-11)


def test_attention_of_a_module_is_served() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(1, 64, 16, requires_grad=True)
    with jx.differentiable():
        y, _ = attention(x, x, x, need_weights=False)
    names, nodes = [], [y.grad_fn]
    while nodes:
        if node := nodes.pop():
            names.append(node.name())
            nodes += [below for below, _ in node.next_functions]
    assert "AttentionBackward" in names


def test_a_language_model() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="sdpa",
        )
    ).double()
    ids = torch.randint(32, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    parameters = list(model.parameters())
    vector = [torch.randn_like(p) for p in parameters]

    def product(context: Context) -> list[Tensor]:
        with context():
            loss = model(ids, attention_mask=mask, labels=ids).loss
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            return list(torch.autograd.grad(gradients, parameters, vector))

    results, expected = product(jx.differentiable), product(math_attention)
    torch.testing.assert_close(results, expected, rtol=1e-9, atol=1e-11)


def block(x: Tensor, weight: Tensor) -> Tensor:
    hidden = (x @ weight).unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)


def _by_method(y: Tensor, x: Tensor, **options: bool) -> Tensor:
    x.grad = None
    y.backward(inputs=[x], **options)
    assert x.grad is not None
    return x.grad


def _by_function(y: Tensor, x: Tensor, **options: bool) -> Tensor:
    x.grad = None
    torch.autograd.backward([y], [torch.ones_like(y)], inputs=x, **options)
    assert x.grad is not None
    return x.grad


BACKWARDS: dict[str, Callable[..., Tensor]] = {
    "grad": lambda y, x, **options: torch.autograd.grad(y, x, **options)[0],
    "Tensor.backward": _by_method,
    "autograd.backward": _by_function,
}


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("second", BACKWARDS)
@pytest.mark.parametrize("first", BACKWARDS)
def test_every_call_that_runs_a_backward(first: str, second: str, saves: bool) -> None:
    def penalty(attention: Callable[[Tensor], Tensor], saves: bool) -> tuple[Tensor, Tensor]:
        x = heads()[0].detach().requires_grad_()
        y = checkpoint(attention, x, use_reentrant=False) if saves else attention(x)
        gradient = BACKWARDS[first](y.square().sum(), x, create_graph=True)
        return gradient.detach().clone(), BACKWARDS[second](gradient.square().sum(), x)

    with jx.differentiable():
        found = penalty(lambda x: F.scaled_dot_product_attention(x, x, x), saves)
    expected = penalty(lambda x: (x @ x.mT / 8**0.5).softmax(-1) @ x, False)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_checkpoint_recomputed_outside_is_refused() -> None:
    """What torch's attention saves has the shapes of what ours saves, in another order."""
    weight = torch.randn(8, 8, requires_grad=True)
    with jx.differentiable():
        y = checkpoint(block, torch.randn(2, 5, 8), weight, use_reentrant=False)
    with pytest.raises(CheckpointError):
        y.sum().backward()


def test_a_graph_is_used_once_unless_retained() -> None:
    inputs = heads()
    with jx.differentiable():
        y = F.scaled_dot_product_attention(*inputs).sum()
    y.backward(retain_graph=True)
    y.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()


def test_a_write_in_place_is_noticed() -> None:
    query, key, value = heads()
    query = query * 1
    with jx.differentiable():
        y = F.scaled_dot_product_attention(query, key, value).sum()
    query.detach().zero_()
    with pytest.raises(RuntimeError, match="inplace"):
        y.backward()


def test_compiled_code_is_torchs() -> None:
    inputs = heads(dtype=torch.float32)

    @torch.compile(backend="aot_eager")
    def attention(*inputs: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*inputs).sin()

    with jx.differentiable():
        results = torch.autograd.grad(attention(*inputs).sum(), inputs)
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*inputs).sin().sum(), inputs)
    torch.testing.assert_close(results, expected)


def test_jets_within_have_their_rule() -> None:
    inputs = tuple(x.detach() for x in heads())
    tangents = tuple(torch.ones_like(x) for x in inputs)
    expected = jx.jvp(F.scaled_dot_product_attention, inputs, tangents)
    with jx.differentiable():
        results = jx.jvp(F.scaled_dot_product_attention, inputs, tangents)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


# ---- many cotangents at once -------------------------------------------------------------------


FORMULAS: dict[str, dict[str, object]] = {
    "plain": {},
    "causal, grouped": {"is_causal": True, "enable_gqa": True},
    "mask": {"attn_mask": BIAS[0, 0, :5, :5]},
    "dropout": {"dropout_p": 0.4},
}


def written_out(query: Tensor, key: Tensor, value: Tensor, setting: str) -> Tensor:
    """Return attention of `FORMULAS` by plain operations; dropout's mask is that of seed 11."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if setting == "mask":
        scores = scores + BIAS[0, 0, :5, :5].to(scores)
    if setting == "causal, grouped":
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
    weights = scores.softmax(-1)
    if setting == "dropout":
        keeps = dropout_mask(*query.shape[:2], 5, 5, 0.4, 11, torch.device("cpu"))
        weights = weights * keeps / 0.6
    return weights @ value


def rows_of(y: Tensor, count: int = 3) -> Tensor:
    return torch.randn(
        count, *y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )


def one_row(y: Tensor, x: Tensor, row: Tensor, train: bool) -> Tensor:
    return torch.autograd.grad(y, x, row, create_graph=train, retain_graph=True)[0]


def in_a_loop(y: Tensor, x: Tensor, rows: Tensor, train: bool) -> Tensor:
    return torch.stack([one_row(y, x, row, train) for row in rows])


def at_once(y: Tensor, x: Tensor, rows: Tensor, train: bool) -> Tensor:
    return torch.autograd.grad(y, x, rows, is_grads_batched=True, create_graph=train)[0]


def in_a_vmap(y: Tensor, x: Tensor, rows: Tensor, train: bool) -> Tensor:
    return torch.vmap(lambda row: one_row(y, x, row, train))(rows)


def in_two_vmaps(y: Tensor, x: Tensor, rows: Tensor, train: bool) -> Tensor:
    def scaled(row: Tensor) -> Tensor:
        return torch.vmap(lambda scale: one_row(y, x, scale * row, train))(torch.ones(2).double())

    return torch.vmap(scaled, in_dims=1)(rows.movedim(0, 1))[:, 1]


Rows = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
Program = Callable[[Callable[[Tensor], Tensor], Tensor, bool], Tensor]
Ways = Callable[[Rows], Program]


def backward_of(rows: Rows) -> Program:
    return lambda f, x, train: rows(y := f(x), x, rows_of(y), train)


def second_backward_of(rows: Rows) -> Program:
    def program(f: Callable[[Tensor], Tensor], x: Tensor, train: bool) -> Tensor:
        (gradient,) = torch.autograd.grad(f(x).sin().sum(), x, create_graph=True)
        return rows(gradient, x, rows_of(gradient), train)

    return program


def jacobian_by(vectorize: bool) -> Program:
    return lambda f, x, train: torch.autograd.functional.jacobian(
        lambda x: f(x).sin().sum((0, 1, 2)), x, create_graph=train, vectorize=vectorize
    )


def hessian_by(vectorize: bool) -> Program:
    return lambda f, x, train: torch.autograd.functional.hessian(
        lambda x: f(x).sin().sum(), x, create_graph=train, vectorize=vectorize
    )


def of_samples(f: Callable[[Tensor], Tensor], x: Tensor, train: bool) -> Tensor:
    gradients = torch.func.vmap(torch.func.grad(lambda x: f(x).sin().sum()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it goes to math attention
        return gradients(torch.stack([x, x.cos()]))


def of_one_sample_each(f: Callable[[Tensor], Tensor], x: Tensor, train: bool) -> Tensor:
    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(f(x).sin().sum(), x, create_graph=True)[0]

    return torch.stack([gradient(x), gradient(x.cos())])


MANY: dict[str, tuple[Program, Program]] = {
    "is_grads_batched": (backward_of(at_once), backward_of(in_a_loop)),
    "vmap": (backward_of(in_a_vmap), backward_of(in_a_loop)),
    "two vmaps": (backward_of(in_two_vmaps), backward_of(in_a_loop)),
    "second is_grads_batched": (second_backward_of(at_once), second_backward_of(in_a_loop)),
    "second vmap": (second_backward_of(in_a_vmap), second_backward_of(in_a_loop)),
    "second two vmaps": (second_backward_of(in_two_vmaps), second_backward_of(in_a_loop)),
    "jacobian": (jacobian_by(True), jacobian_by(False)),
    "hessian": (hessian_by(True), hessian_by(False)),
    "torch.func": (of_samples, of_one_sample_each),
}
DRAWS_ANEW = "torch.func", "dropout"  # it has a mask for each sample


@pytest.mark.parametrize(
    ("way", "setting", "train", "saves"),
    [
        *((way, "plain", False, False) for way in MANY),
        *((way, s, True, False) for way in MANY for s in FORMULAS if (way, s) != DRAWS_ANEW),
        *((way, "causal, grouped", True, True) for way in MANY if way != "torch.func"),
    ],
)
def test_many_cotangents_at_once(
    way: str, setting: str, train: bool, saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twice, "fresh_seed_on", lambda device: torch.tensor(11))
    x, _, weight = heads(heads=2, key_heads=1, queries=5, keys=5, size=3, value_size=3)
    weight = weight[0, 0, :3].detach().requires_grad_()
    x = x.detach()[:1].requires_grad_()
    key_heads = 1 if setting == "causal, grouped" else 2

    def program(attention: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        def f(x: Tensor) -> Tensor:
            hidden = x @ weight
            key = hidden.sin()[:, :key_heads]
            return attention(hidden, key, key.cos())

        return (lambda x: checkpoint(f, x, use_reentrant=False)) if saves else f  # type: ignore[return-value]

    def results(way: Program, attention: Callable[..., Tensor], of: Callable) -> list[Tensor]:
        first = way(of(attention), x, train)
        trained = torch.autograd.grad(first.square().sum(), [x, weight]) if train else ()
        return [first.detach(), *trained]

    at_once, in_a_loop = MANY[way]
    with jx.differentiable():
        options = FORMULAS[setting]
        got = results(at_once, partial(F.scaled_dot_product_attention, **options), program)
    saves = False
    expected = results(in_a_loop, partial(written_out, setting=setting), program)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("transform", ["grad", "jvp", "dual"])
def test_a_backward_that_torch_func_differentiates(transform: str) -> None:
    """Its forward ran outside of the transform."""
    query, key, value = heads()
    row, tangent = rows_of(query, 2)

    def result(attention: Callable[..., Tensor]) -> Tensor:
        y = attention(query, key, value)

        def backward(row: Tensor) -> Tensor:
            return one_row(y, query, row, True)

        if transform == "grad":
            return torch.func.grad(lambda row: backward(row).sin().sum())(row)
        if transform == "jvp":
            return torch.func.jvp(backward, (row,), (tangent,))[1]
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(backward(forward_ad.make_dual(row, tangent))).tangent

    with jx.differentiable():
        got = result(F.scaled_dot_product_attention)
    expected = result(partial(written_out, setting="plain"))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


DERIVATIVES: dict[str, Callable[..., Tensor]] = {
    "jvp": lambda f, x, v: jx.jvp(f, (x,), (v,))[1],
    "jet": lambda f, x, v: jx.jet(f, x, torch.stack([v, x])).second,
    "laplacian": lambda f, x, v: jx.laplacian(f, x)[-1],
    "hvp": lambda f, x, v: jx.hvp(lambda x: f(x).sin().sum(), (x,), (v,)).product[0],
    "gradient_loss": lambda f, x, v: (
        jx.gradient_loss(
            lambda x: f(x).sin().sum(), x, lambda value, slope: (slope * v).square().sum()
        ).loss
    ),
}
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: F.scaled_dot_product_attention(x.sin(), x, x),
    "softmax": lambda x: x.softmax(-1) * x,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "linear": lambda x: F.linear(x, x.detach()[0, 0].cos()).sin(),
    "product": lambda x: (x @ x.mT).sin(),
    "cdist": lambda x: torch.cdist(x, x.sin() + 2),
    "gelu": F.gelu,
}


@pytest.mark.parametrize(
    ("operation", "way"),
    [*((operation, "is_grads_batched") for operation in OPERATIONS), ("attention", "vmap")],
)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_many_cotangents_of_derivatives(derivative: str, operation: str, way: str) -> None:
    """Right but for what torch refuses: Hessian products ask for gradients within a backward."""
    train = derivative != "gradient_loss"
    x, v = (y.detach().requires_grad_() for y in heads(queries=3, keys=3, size=4)[:2])
    y = DERIVATIVES[derivative](OPERATIONS[operation], x, v)

    def results(rows: Rows) -> list[Tensor]:
        first = rows(y, x, rows_of(y), train)
        trained = torch.autograd.grad(first.square().sum(), x, retain_graph=True) if train else ()
        return [first.detach(), *trained]

    refused = derivative == "hvp" and operation == "attention"
    with pytest.raises(RuntimeError) if refused else nullcontext():
        expected = results(in_a_loop)
        got = results(at_once if way == "is_grads_batched" else in_a_vmap)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


# ---- where it is entered, and what surrounds it ------------------------------------------------


def squared(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the gradient of a squared gradient."""
    (gradient,) = torch.autograd.grad(f(x).sin().sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), x)[0]


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x.sin(), x.cos(), x)


def attend_written_out(x: Tensor) -> Tensor:
    return written_out(x.sin(), x.cos(), x, "plain")


@jx.differentiable()
def decorated(x: Tensor, depth: int = 0) -> Tensor:
    return decorated(x, depth - 1) if depth else squared(attend, x)


def in_one_instance(x: Tensor) -> Tensor:
    context = jx.differentiable()
    with context:
        with context:
            squared(attend, x)
        return squared(attend, x)


def after_an_exception(x: Tensor) -> Tensor:
    with pytest.raises(ZeroDivisionError), jx.differentiable():
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="not implemented"):
        squared(attend, x)
    return decorated(x)


def after_a_backward_failed(x: Tensor) -> Tensor:
    def fail(gradient: Tensor) -> Tensor:
        raise ZeroDivisionError

    with jx.differentiable():
        hidden = x.cos()
        hidden.register_hook(fail)
        y = F.scaled_dot_product_attention(hidden, x, x)
        with pytest.raises(ZeroDivisionError):
            in_a_vmap(y, x, rows_of(y), True)
        return squared(attend, x)


def in_two_threads(x: Tensor) -> Tensor:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(decorated, [x, x])
    torch.testing.assert_close(first, second)
    return second


def second_backward_in_a_thread(x: Tensor) -> Tensor:
    with jx.differentiable(), ThreadPoolExecutor(1) as pool:
        (gradient,) = torch.autograd.grad(attend(x).sin().sum(), x, create_graph=True)
        return pool.submit(lambda: torch.autograd.grad(gradient.square().sum(), x)[0]).result()


ENTRIES: dict[str, Callable[[Tensor], Tensor]] = {
    "decorator": decorated,
    "decorator, recursion": lambda x: decorated(x, 3),
    "decorator of a lambda": lambda x: jx.differentiable()(lambda: squared(attend, x))(),
    "one instance": in_one_instance,
    "exception": after_an_exception,
    "backward that fails": after_a_backward_failed,
    "two threads": in_two_threads,
    "second backward in a thread": second_backward_in_a_thread,
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_ways_to_enter_and_to_leave(entry: str) -> None:
    x = heads(queries=5, size=4)[0]
    expected = squared(attend_written_out, x)
    torch.testing.assert_close(ENTRIES[entry](x), expected, rtol=1e-9, atol=1e-11)
    with pytest.raises(RuntimeError, match="not implemented"):
        squared(attend, x)  # it has been left


@pytest.mark.parametrize(
    "owner, name",
    [
        *((F, "linear"), (F, "scaled_dot_product_attention"), (F, "_in_projection_packed")),
        *((F, "multi_head_attention_forward"), (torch.autograd, "grad")),
        *((torch.autograd, "backward"), (Tensor, "backward")),
    ],
)
def test_names_that_others_replace(
    owner: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profiler's function around one is called by a module as often as without the context."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    original, calls = getattr(owner, name), 0

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    def run(context: Context) -> tuple[int, list[Tensor]]:
        nonlocal calls
        calls = 0
        with context():
            y, _ = module(x, x, x, need_weights=False)
            in_forward = calls
            y.sin().sum().backward(create_graph=True, inputs=[x])
            (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
            result = torch.autograd.grad(gradient.square().sum(), [x, *module.parameters()])
        return in_forward, list(result)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward")
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, counted)
            expected, found = run(math_attention), run(jx.differentiable)
            assert found[0] == expected[0]
            torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-11)
        run(jx.differentiable)
        assert calls == 0  # it has been restored


def test_heads_that_do_not_lie_in_a_row() -> None:
    """Those of images, ``view(batch, 1, channels, places).mT``, have no fused kernel of torch's."""
    inputs = [x.detach().mT.contiguous().requires_grad_() for x in heads(keys=5)]

    def attention(*inputs: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(x.mT for x in inputs))

    with jx.differentiable():
        results = penalty(attention, inputs, 2)
    with math_attention():
        expected = penalty(attention, inputs, 2)
    torch.testing.assert_close(results, expected, rtol=1e-9, atol=1e-11)


# ---- checkpoints, wrappers and trainers --------------------------------------------------------


def test_a_checkpointed_block_runs_as_often_as_in_torch() -> None:
    runs, counts = 0, []
    x = heads()[0]

    def counted(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return attend(x)

    for context in (math_attention, jx.differentiable):
        runs = 0
        with context():
            squared(lambda x: checkpoint(counted, x, use_reentrant=False), x)
        counts.append(runs)
    assert counts == [3, 3]


def test_selective_checkpointing_that_keeps_attention() -> None:
    """Torch gives such a block one backward, whose gradient can have a graph nonetheless."""
    kept = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
    x = heads()[0]
    with jx.differentiable():
        contexts = partial(create_selective_checkpoint_contexts, kept)
        y = checkpoint(attend, x, use_reentrant=False, context_fn=contexts)
        result = torch.autograd.grad(y.sin().sum(), x)[0]
    expected = torch.autograd.grad(attend_written_out(x).sin().sum(), x)[0]
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11)


CHECKPOINTS: dict[str, Callable[..., Tensor]] = {
    "one": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "nested": lambda f, x: checkpoint(CHECKPOINTS["one"], f, x, use_reentrant=False),
    "no early stop": lambda f, x: checkpoint(f, x, use_reentrant=False, early_stop=False),
    "moved to the host": lambda f, x: on_host(f, x),
    "sequence": lambda f, x: checkpoint_sequential([f, torch.sin], 2, x, use_reentrant=False),
}


def on_host(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return f(x)


@pytest.mark.parametrize(
    ("way", "setting", "dtype"),
    [
        *((way, setting, torch.float64) for way in CHECKPOINTS for setting in FORMULAS),
        *(("one", setting, torch.bfloat16) for setting in FORMULAS),
    ],
)
def test_ways_to_checkpoint(
    way: str, setting: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twice, "fresh_seed_on", lambda device: torch.tensor(11))
    x = heads(heads=2, queries=5, size=4)[0]
    if dtype == torch.bfloat16:
        x = x.detach().float().requires_grad_()

    def block(attention: Callable[..., Tensor], x: Tensor) -> Tensor:
        key = x.sin()[:, : 1 if setting == "causal, grouped" else 2]
        return attention(x, key, key.cos())

    def gradients(f: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = f(x)
        y = y.sin() if way == "sequence" and f is plain else y
        (first,) = torch.autograd.grad(y.to(x.dtype).sin().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return torch.stack([first.detach(), second])

    plain = partial(block, partial(written_out, setting=setting))
    with jx.differentiable():
        options = {
            name: option.to(x.dtype) if isinstance(option, Tensor) else option
            for name, option in FORMULAS[setting].items()
        }
        attention = partial(F.scaled_dot_product_attention, **options)
        result = gradients(lambda x: CHECKPOINTS[way](partial(block, attention), x))
    expected = gradients(plain)
    error = (result - expected).norm() / expected.norm()
    assert error < (1e-10 if dtype == torch.float64 else 0.02)


def test_a_reentrant_checkpoint() -> None:
    """It has first gradients alone, in torch as well."""
    x = heads()[0]
    with jx.differentiable():
        checkpoint(attend, x, use_reentrant=True).sin().sum().backward()
    expected = torch.autograd.grad(attend_written_out(x).sin().sum(), x)[0]
    torch.testing.assert_close(x.grad, expected, rtol=1e-9, atol=1e-11)


def test_distributed_data_parallel(tmp_path: Path) -> None:
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(8, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(attend, x @ self.weight, use_reentrant=False)

    try:
        x, module = heads()[0], Block()
        with jx.differentiable():
            y = nn.parallel.DistributedDataParallel(module)(x)
            (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
            gradient.square().sum().backward()
        y = attend_written_out(x @ module.weight)
        (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        expected = torch.autograd.grad(gradient.square().sum(), module.weight)[0]
        torch.testing.assert_close(module.weight.grad, expected, rtol=1e-9, atol=1e-11)
    finally:
        dist.destroy_process_group()


def test_a_trainer_of_transformers(tmp_path: Path) -> None:
    """`accelerate` calls `backward` there, and the forward of a checkpoint runs within it."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    data = [{"input_ids": torch.arange(9), "labels": torch.arange(9)}] * 2

    class Penalised(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: nn.Module, inputs: dict, *_: object, **__: object) -> Tensor:
            embedded = model.get_input_embeddings()(inputs["input_ids"])  # type: ignore[operator]
            loss = model(inputs_embeds=embedded, labels=inputs["labels"]).loss
            (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
            return loss + gradient.square().sum()

    def weights(context: Context, saves: bool) -> Tensor:
        config = transformers.LlamaConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=2,
            optim="sgd",
            learning_rate=0.1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=saves,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
        with context():
            Penalised(model, arguments, train_dataset=data).train()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    result, expected = weights(jx.differentiable, True), weights(math_attention, False)
    torch.testing.assert_close(result, expected)


# ---- memory ------------------------------------------------------------------------------------


def test_the_operators_second_backward_builds_no_matrix_of_scores() -> None:
    """With one direction: of jets that are differentiated twice, as a penalty's are."""

    def elements(tokens: int) -> int:
        inputs = [
            torch.stack([x, x.cos()]).detach().requires_grad_() for x in heads(1, 1, tokens, tokens)
        ]
        with LargestTensor() as largest:
            penalty(lambda *jets: ops.attention_jet(*jets, q=1), inputs, 2)
        return largest.elements

    few, many = elements(128), elements(512)
    assert many <= 4 * few
    assert many < 512**2 / 4


# ---- other shapes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:, 0],
        lambda x: x[0, 0],
        lambda x: torch.stack([x, x.cos()], 1),
        lambda x: x[:1] if x.shape[2] == 5 else x,
        lambda x: x[:, :1] if x.shape[2] == 5 else x,
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_other_shapes(change: Callable[[Tensor], Tensor], masked: bool) -> None:
    inputs = [change(x.detach()).requires_grad_() for x in heads(keys=5)]
    attention = partial(F.scaled_dot_product_attention, attn_mask=HIDES[:, :5] if masked else None)
    with jx.differentiable():
        results = penalty(attention, inputs, 3)
    with math_attention():
        expected = penalty(attention, inputs, 3)
    torch.testing.assert_close(results, expected, rtol=1e-9, atol=1e-11)


# ---- random programs ---------------------------------------------------------------------------


def random_program(seed: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return a function of few layers, attention of random settings among them, and its inputs."""
    generator = torch.Generator().manual_seed(seed)

    def choose(*options: object) -> object:
        return options[int(torch.randint(len(options), (), generator=generator))]

    def draw(*shape: int) -> Tensor:
        scale = shape[-1] ** -0.5
        return (
            scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        ).requires_grad_()

    batch, tokens, count = choose(1, 3), choose(1, 2, 7, 33), choose(1, 2, 4)
    key_heads = choose(*(n for n in (1, 2, 4) if count % n == 0))
    size = choose(1, 2, 8)
    width = count * size
    settings = []
    inputs = [draw(batch, tokens, width)]
    for _ in range(choose(1, 2, 3)):
        kind = choose("plain", "causal", "boolean", "bias", "scale")
        options: dict[str, object] = {"enable_gqa": key_heads != count}
        if kind == "causal":
            options["is_causal"] = True
        elif kind == "boolean":
            options["attn_mask"] = torch.rand(tokens, tokens, generator=generator) > 0.3
        elif kind == "bias":
            options["attn_mask"] = draw(batch, 1, tokens, tokens).detach()
        elif kind == "scale":
            options["scale"] = choose(0.1, 1.0)
        shares = choose(True, False)  # keys are values: one tensor in two places
        activation = choose(torch.tanh, torch.sin, F.gelu, F.silu, F.softplus)
        inputs += [draw(width, width), draw(width, key_heads * size), draw(width, key_heads * size)]
        settings.append((options, shares, activation))

    def program(x: Tensor, *weights: Tensor) -> Tensor:
        def split(y: Tensor, heads: int) -> Tensor:
            return y.unflatten(-1, (heads, size)).transpose(1, 2)

        for n, (options, shares, activation) in enumerate(settings):
            to_query, to_key, to_value = weights[3 * n : 3 * n + 3]
            key = split(x @ to_key, key_heads)
            value = key if shares else split(x @ to_value, key_heads)
            y = F.scaled_dot_product_attention(split(x @ to_query, count), key, value, **options)
            x = x + activation(y.transpose(1, 2).flatten(-2))
        return x + 0 * sum(w.sum() for w in weights)

    return program, inputs


def check_program(seed: int) -> None:
    program, inputs = random_program(seed)
    with jx.differentiable():
        results = penalty(program, inputs, 2)
    with math_attention():
        expected = penalty(program, inputs, 2)
    size = max(float(value.abs().max()) for value in expected)
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value, rtol=1e-8, atol=1e-10 * max(size, 1))


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int) -> None:
    check_program(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(12, 300, 30))
def test_more_random_programs(first: int) -> None:
    for seed in range(first, first + 30):
        check_program(seed)


# ---- third derivatives, which torch's norms have wrong -------------------------------------------


def _standardise(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    variance, mean = torch.var_mean(x, dims, unbiased=False, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt()


NORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "layer": (lambda x: F.layer_norm(x, x.shape[2:]), lambda x: _standardise(x, (2,))),
    "batch": (
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: _standardise(x, (0, 2)),
    ),
    "instance": (F.instance_norm, lambda x: _standardise(x, (2,))),
    "group": (lambda x: F.group_norm(x, 1), lambda x: _standardise(x, (1, 2))),
}


@pytest.mark.parametrize("way", ["graph", "torch.func", "torch.func, graph"])
@pytest.mark.parametrize("name", NORMS)
def test_the_third_and_fourth_derivatives_of_norms(name: str, way: str) -> None:
    norm, written_out = NORMS[name]
    x, u = torch.randn(2, 3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def derivative(f: Callable[[Tensor], Tensor], order: int) -> Tensor:
        g = lambda x: (f(x * u).sin() * u).sum()  # noqa: E731
        levels = {"graph": 0, "torch.func": order}.get(way, order - 1)
        for _ in range(levels):
            g = lambda x, g=g: (torch.func.grad(g)(x) * u.cos()).sum()  # noqa: E731
        point = x.clone().requires_grad_()
        value = g(point)
        for _ in range(order - levels):
            (slope,) = torch.autograd.grad(value, point, create_graph=True)
            value = (slope * u.cos()).sum()
        return value

    for order in (2, 3, 4):
        expected = derivative(written_out, order)
        with jx.differentiable():
            torch.testing.assert_close(derivative(norm, order), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["layer", "batch"])
def test_a_norm_under_vmap_whose_weights_have_a_graph(name: str) -> None:
    weight = torch.linspace(1, 2, 3, dtype=torch.float64).requires_grad_()
    x = torch.randn(4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    norms: dict[str, Callable[[Tensor], Tensor]] = {
        "layer": lambda x: F.layer_norm(x, (3,), weight),
        "batch": lambda x: F.batch_norm(x, None, None, weight, training=True),
    }

    def gradients() -> list[Tensor]:
        values = torch.func.vmap(norms[name])(x)
        (slope,) = torch.autograd.grad(values.sin().sum(), weight, create_graph=True)
        return [values, slope, *torch.autograd.grad(slope.square().sum(), weight)]

    expected = gradients()
    with jx.differentiable():
        torch.testing.assert_close(gradients(), expected, rtol=1e-10, atol=1e-10)
