"""`jx.jvp`, and `jx.jet` of several tensors.

The oracle is `torch.func.jvp` of attention written out in matrix products and a softmax, and of
other functions that torch differentiates rightly; for gradients, torch's backward through it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import jachess_ext as jx
from jachess_ext.jet.engine.errors import function_name
from jachess_ext.jet.engine.registry import registered_functions
from jachess_ext.jet.passes.dual import TANGENT_RULES
from python_tests.jet.calls import make_call
from python_tests.jet.rule_table import Row
from python_tests.jet.test_api import through_views
from python_tests.jet.test_rules import ONE_OF_EACH_NAME

PADDING = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()[:, None, None]
Attend = Callable[..., Tensor]


def randn(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def heads(seed: int, grad: bool = False) -> tuple[Tensor, ...]:
    """Query, key, value: 2 rows, 3 heads of 4, 5 tokens."""
    return tuple(randn(2, 3, 5, 4, seed=seed + n, grad=grad) for n in range(3))


def fused(mask: Tensor | None, causal: bool) -> Attend:
    return lambda *qkv: F.scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=causal)


def written_out(mask: Tensor | None, causal: bool) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        shown = torch.ones(scores.shape[-2:]).bool().tril() if causal else mask
        if shown is not None:
            scores = scores.masked_fill(~shown, -math.inf)
        return torch.softmax(scores, -1) @ value

    return attend


def assert_same(found: Any, expected: Any, bound: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


# ---- attention: three primals ------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask, causal", [(None, True), (PADDING, False), (None, False)], ids=["causal", "padded", "all"]
)
def test_attention_and_its_gradients(mask: Tensor | None, causal: bool) -> None:
    """Gradients of a function of output and tangent, in primals and tangents."""
    primals, tangents = heads(0, grad=True), heads(3, grad=True)
    losses = []
    for jvp, attend in ((torch.func.jvp, written_out), (jx.jvp, fused)):
        output, tangent = jvp(attend(mask, causal), primals, tangents)
        loss = output.sin().sum() + tangent.cos().sum()
        losses.append((output, tangent, *gradients(loss, *primals, *tangents)))
    assert_same(losses[1], losses[0])


@pytest.mark.parametrize("moving", range(3))
def test_tangents_of_other_inputs_are_zero(moving: int) -> None:
    """Two of three inputs are constants, or primals with tangents of zero: the same."""
    qkv, tangent = heads(0), heads(3)[moving]

    def of_one(x: Tensor) -> Tensor:
        return fused(None, True)(*qkv[:moving], x, *qkv[moving + 1 :])

    zeros = [torch.zeros_like(x) for x in qkv]
    zeros[moving] = tangent
    expected = torch.func.jvp(written_out(None, True), qkv, tuple(zeros))
    assert_same(jx.jvp(of_one, (qkv[moving],), (tangent,)), expected)
    assert_same(jx.jvp(fused(None, True), qkv, tuple(zeros)), expected)


@pytest.mark.parametrize("mask, causal", [(None, True), (PADDING, False)])
def test_a_tangent_without_a_graph(mask: Tensor | None, causal: bool) -> None:
    """The output and its gradients are those of the plain call, to the last bit."""
    primals, tangents = heads(0, grad=True), heads(3, grad=True)
    output, tangent = jx.jvp(fused(mask, causal), primals, tangents, differentiable=False)
    expected = torch.func.jvp(written_out(mask, causal), primals, tangents)
    assert not tangent.requires_grad and output.requires_grad
    assert_same((output, tangent), expected)
    plain = fused(mask, causal)(*primals)
    assert torch.equal(output, plain)
    found = gradients(output.sin().sum(), *primals)
    for one, other in zip(found, gradients(plain.sin().sum(), *primals), strict=True):
        assert torch.equal(one, other)


# ---- what goes in and comes out ----------------------------------------------------------------

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Record:
    a: Tensor
    b: Tensor | None = None


@pytest.mark.parametrize("differentiable", [True, False])
def test_nests_in_and_out(differentiable: bool) -> None:
    def fn(first: Any, second: Tensor) -> Any:
        x, y = first["x"], first["more"][0]
        made = x * y.sum()
        record = OrderedDict(a=x * x, b=Record(x.sin()))
        return {"sum": [x + second, (y.exp(),)], "pair": Pair(made, x @ second.T)}, record

    primals = ({"x": randn(2, 3), "more": [randn(4, seed=1)]}, randn(2, 3, seed=2))
    tangents = ({"x": randn(2, 3, seed=3), "more": [randn(4, seed=4)]}, randn(2, 3, seed=5))
    primals[0]["x"].requires_grad_()
    results = jx.jvp(fn, primals, tangents, differentiable=differentiable)
    expected = torch.func.jvp(lambda *given: fn(*given)[0], primals, tangents)
    x, t = primals[0]["x"], tangents[0]["x"]
    of_records = (x * x, x.sin()), (2 * x * t, x.cos() * t)
    for (found, record), right, parts in zip(results, expected, of_records, strict=True):
        assert isinstance(found["pair"], Pair) and isinstance(found["sum"][1], tuple)
        assert_same(found, right)
        assert isinstance(record, OrderedDict) and record["b"].b is None
        assert_same((record["a"], record["b"].a), parts)
    assert results[1][0]["pair"].a.requires_grad == differentiable


@pytest.mark.parametrize("differentiable", [True, False])
def test_aux(differentiable: bool) -> None:
    x, t = randn(3, grad=True), randn(3, seed=1)

    def fn(x: Tensor) -> Any:
        return x * x, {"plain": 7, "of x": x + 1}

    result = jx.jvp(fn, (x,), (t,), has_aux=True, differentiable=differentiable)
    output, tangent, aux = result
    assert_same((output, tangent), (x * x, 2 * x * t))
    assert aux["plain"] == 7 and type(aux["of x"]) is Tensor
    assert_same(aux["of x"], x + 1)
    assert_same(gradients(aux["of x"].sum(), x)[0], torch.ones(3).double())


@pytest.mark.parametrize("differentiable", [True, False])
def test_constants_and_integers_have_zero_tangents(differentiable: bool) -> None:
    x, t, constant = randn(3, grad=True), randn(3, seed=1), randn(2, seed=2)
    result = jx.jvp(
        lambda x: (constant, x.argmax(), x.detach()), (x,), (t,), differentiable=differentiable
    )
    for output, tangent in zip(*result, strict=True):
        assert tangent.shape == output.shape and tangent.dtype == output.dtype
        assert not tangent.any()
    assert torch.equal(result[0][0], constant) and torch.equal(result[0][1], x.argmax())


def test_without_gradients_there_is_no_graph_at_all() -> None:
    layer = nn.Linear(4, 4).double()
    x, t = randn(2, 4), randn(2, 4, seed=1)
    with torch.no_grad():
        for differentiable in (True, False):
            output, tangent = jx.jvp(layer, (x,), (t,), differentiable=differentiable)
            assert not output.requires_grad and not tangent.requires_grad
            assert_same((output, tangent), (layer(x), t @ layer.weight.mT))


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"primals": randn(3)}, TypeError, "primals must be a tuple"),
        ({"primals": (), "tangents": ()}, TypeError, "primals hold no tensor"),
        (
            {"primals": ({"a": [3.0]},), "tangents": ({"a": [3.0]},)},
            TypeError,
            "primals[0]['a'][0] must be a plain tensor, not float",
        ),
        ({"primals": (torch.ones(3).long(),)}, TypeError, "primals[0] has dtype torch.int64"),
        ({"tangents": (randn(2),)}, ValueError, "tangents[0] has shape [2]; expected [3]"),
        ({"tangents": (randn(3).float(),)}, TypeError, "torch.float32; expected torch.float64"),
        ({"tangents": ("3",)}, TypeError, "tangents[0] must be a plain tensor like primals[0]"),
        ({"tangents": randn(3)}, TypeError, "tangents are nested otherwise than primals"),
        ({"fn": lambda x: (x, "text")}, TypeError, "fn returned a str, which has no tangent"),
        ({"fn": lambda x: x, "has_aux": True}, TypeError, "fn must return a tuple (output, aux)"),
        ({"fn": lambda x: torch.add(x, 1, out=randn(3))}, jx.MissingJetRule, "out="),
        ({"fn": torch.ops.aten.tanh}, jx.MissingJetRule, "no jet rule for aten.tanh"),
    ],
)
def test_wrong_input(
    change: dict[str, Any], error: type, message: str, differentiable: bool
) -> None:
    given = {"fn": lambda x: x * x, "primals": (randn(3),), "tangents": (randn(3),)} | change
    with pytest.raises(error, match=re.escape(message)) as caught:
        jx.jvp(**given, differentiable=differentiable)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("inner, outer", [(True, False), (False, True), (False, False)])
def test_one_derivative_at_a_time(inner: bool, outer: bool) -> None:
    x = randn(3, grad=True)

    def nested(y: Tensor) -> Tensor:
        return jx.jvp(lambda z: z * y, (x,), (x,), differentiable=inner)[1]

    with pytest.raises(ValueError, match="run one"):
        jx.jvp(nested, (x,), (x,), differentiable=outer)


# ---- jx.jet of several tensors -----------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2])
def test_a_jet_of_three_tensors_is_the_jet_of_all_of_them_in_one(order: int) -> None:
    """And its first order is torch.func's."""
    points = heads(0, grad=True)
    steps = [torch.stack(pair) for pair in zip(heads(3), heads(6), strict=True)]
    together = jx.jet(fused(None, True), points, tuple(steps), order)

    def of_one(joined: Tensor) -> Tensor:
        return fused(None, True)(*joined.unbind(0))

    one = jx.jet(of_one, torch.stack(points), torch.stack(steps, 1), order)
    assert_same(together.streams, one.streams)
    assert together.pairs == one.pairs
    for i in range(2):
        tangent = torch.func.jvp(written_out(None, True), points, tuple(s[i] for s in steps))[1]
        assert_same(together.first[i], tangent)
    if order == 2:

        def slope(*qkv: Tensor) -> Tensor:
            return torch.func.jvp(written_out(None, True), qkv, tuple(s[0] for s in steps))[1]

        second = torch.func.jvp(slope, points, tuple(s[1] for s in steps))[1]
        assert_same(together.second[0], second)


TWO = (randn(3), randn(2))


@pytest.mark.parametrize(
    "x, directions, error, message",
    [
        ((), (), TypeError, "x holds no tensor"),
        ((randn(3),), randn(1, 3), TypeError, "directions are nested otherwise than x"),
        (TWO, (randn(1, 3), randn(1, 3)), ValueError, "but x[1] of shape [2] needs [q, 2]"),
        (TWO, (randn(1, 3), randn(2, 2)), ValueError, "directions[1] hold 2 directions"),
        ((randn(3), randn(2) / 0), (randn(1, 3),) * 2, ValueError, "x[1] contains NaN"),
    ],
)
def test_wrong_input_of_a_jet(x: Any, directions: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        jx.jet(lambda *given: given[0], x, directions)
    assert "\n" not in str(caught.value)


# ---- tangents without a graph: every rule, and what autograd keeps ------------------------------


@pytest.mark.parametrize("function, row", ONE_OF_EACH_NAME)
def test_every_rule_without_a_graph(function: Any, row: Row) -> None:
    """Output and gradients of the plain call, to the last bit; the tangent of the jet."""
    call = make_call(function, row)
    torch.manual_seed(1)
    t = torch.randn(len(call.x), dtype=torch.float64)
    x = call.x.clone().requires_grad_()
    _, expected = jx.jvp(call, (x,), (t,))
    output, tangent = jx.jvp(call, (x,), (t,), differentiable=False)
    plain = call(x)
    after = torch.get_rng_state()
    torch.manual_seed(7)  # as `call` does
    if not torch.equal(after, torch.get_rng_state()):
        assert function in TANGENT_RULES, "drawn twice, output and tangent belong to two functions"
    assert len(output) == len(plain) > 0
    for found, right in zip(output, plain, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)
        assert found.stride() == right.stride()
    for found, right in zip(tangent, expected, strict=True):
        assert not found.requires_grad
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    if any(part.requires_grad for part in plain):
        sums = [sum(o.nan_to_num(neginf=0).sin().sum() for o in of) for of in (output, plain)]
        found, right = (gradients(total, x)[0] for total in sums)
        torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


def test_functions_that_draw_are_known_to() -> None:
    """In every spelling; `test_every_rule_without_a_graph` sees whether one of a name draws."""
    names = ("rand", "rrelu", "bernoulli", "dropout", "multinomial", "normal_", "uniform")
    found = {f for f in registered_functions() if any(n in function_name(f) for n in names)}
    assert found and found <= set(TANGENT_RULES)


class Block(nn.Module):
    """A pre-norm transformer block: 2 heads of 4."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, 4)).movedim(-3, 0).transpose(-3, -2)
        y = F.scaled_dot_product_attention(*qkv, dropout_p=self.dropout if self.training else 0.0)
        x = x + F.dropout(self.out(y.transpose(-3, -2).flatten(-2)), self.dropout, self.training)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def saved_bytes(run: Callable[[], Any]) -> int:
    """What autograd keeps for a backward pass."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    assert result is not None
    return sum(storages.values())


def test_a_tangent_without_a_graph_keeps_nothing_for_a_backward() -> None:
    block, x, t = Block().double(), randn(2, 5, 8), randn(2, 5, 8, seed=1)
    plain = saved_bytes(lambda: block(x))
    without = saved_bytes(lambda: jx.jvp(block, (x,), (t,), differentiable=False)[0])
    graph = saved_bytes(lambda: jx.jvp(block, (x,), (t,))[1])
    assert without == plain
    assert graph > 1.4 * plain


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("differentiable", [True, False])
def test_a_block_and_its_parameters(differentiable: bool, dropout: float) -> None:
    """The oracle of the tangent: differences, with the same draws of dropout."""
    block, x, t = Block(dropout).double(), randn(2, 5, 8), randn(2, 5, 8, seed=1)

    def at(step: float) -> Tensor:
        torch.manual_seed(3)
        return jx.jvp(block, (x + step * t,), (t,), differentiable=differentiable)[0]

    torch.manual_seed(3)
    output, tangent = jx.jvp(block, (x,), (t,), differentiable=differentiable)
    h = 1e-3
    weights = {-2: 1 / 12, -1: -2 / 3, 1: 2 / 3, 2: -1 / 12}
    assert_same(tangent, sum(w * at(s * h) for s, w in weights.items()) / h, 1e-8)
    if dropout == 0:
        plain = block(x)
        assert_same(output, plain)
        parameters = list(block.parameters())
        found = gradients(output.square().sum(), *parameters)
        assert_same(found, gradients(plain.square().sum(), *parameters))
    else:
        assert not torch.equal(output, block(x))


# ---- under checkpointing and autocast ----------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("differentiable", [True, False])
def test_checkpointing_changes_nothing(differentiable: bool, dropout: float) -> None:
    blocks = nn.Sequential(Block(dropout), Block(dropout)).double()
    x, t = randn(2, 5, 8, grad=True), randn(2, 5, 8, seed=1)

    def checkpointed(x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    results = []
    for fn in (blocks, checkpointed):
        torch.manual_seed(2)
        output, tangent = jx.jvp(fn, (x,), (t,), differentiable=differentiable)
        loss = (output - tangent).square().sum()
        results.append((output, tangent, *gradients(loss, x, *blocks.parameters())))
    assert_same(results[1], results[0], 1e-12)


@pytest.mark.parametrize("differentiable", [True, False])
def test_autocast(differentiable: bool) -> None:
    """The output is the plain call's, its parameters' gradients too: none is lost in a cast that
    was made for the tangent."""
    block, x, t = Block(), randn(2, 5, 8).float(), randn(2, 5, 8, seed=1).float()
    parameters = list(block.parameters())
    exact = jx.jvp(block, (x,), (t,), differentiable=differentiable)[1]
    with torch.autocast("cpu", torch.bfloat16):
        output, tangent = jx.jvp(block, (x,), (t,), differentiable=differentiable)
        plain = block(x)
    assert output.dtype == tangent.dtype == plain.dtype
    assert_same(tangent.float(), exact, 0.05)
    assert (tangent.float() - exact).abs().max() > 1e-5  # it was computed in halves
    found = gradients(output.float().square().sum(), *parameters)
    expected = gradients(plain.float().square().sum(), *parameters)
    if differentiable:
        assert_same(found, expected, 0.05)
    else:
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


# ---- writes in place ---------------------------------------------------------------------------


def test_writes_show_through_views() -> None:
    x, t = randn(3, 4), randn(3, 4, seed=1)
    output, tangent = jx.jvp(through_views, (x.requires_grad_(),), (t,), differentiable=False)
    expected = jx.jvp(through_views, (x.detach(),), (t,))
    assert_same((output, tangent), expected, 1e-14)


def test_a_copy_is_a_copy_for_the_tangent_too() -> None:
    """The rule of gelu gives a contiguous tangent where torch keeps the strides of a transposed
    primal: a contiguous copy of it must not share the tangent's memory."""

    def fn(x: Tensor) -> Any:
        y = F.gelu(x.mT)
        copied = y.contiguous()
        copied.mul_(3)
        return y, copied

    x, t = randn(3, 4), randn(3, 4, seed=1)
    found = jx.jvp(fn, (x.requires_grad_(),), (t,), differentiable=False)
    assert_same(found, torch.func.jvp(fn, (x.detach(),), (t,)), 1e-14)


@pytest.mark.parametrize("base", [True, False])
def test_a_write_beside_a_view_whose_tangent_is_a_copy_is_refused(
    base: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view that only a jet rule knows has a tangent of its own, which a write would not reach."""
    monkeypatch.delitem(TANGENT_RULES, torch.Tensor.transpose)

    def fn(x: Tensor) -> Tensor:
        y = x * 1
        view = y.transpose(0, 1)
        (y if base else view).mul_(2)
        return view

    x = randn(3, 3, grad=True)
    with pytest.raises(jx.MissingJetRule, match="a tensor of which"):
        jx.jvp(fn, (x,), (x,), differentiable=False)


def test_the_arguments_are_left_as_they_were() -> None:
    x, t = randn(3), randn(3, seed=1)
    kept = x.clone(), t.clone()
    for differentiable in (True, False):
        jx.jvp(lambda x: x.mul_(2).add_(x), (x,), (t,), differentiable=differentiable)
        assert torch.equal(x, kept[0]) and torch.equal(t, kept[1])


NUMBERS = torch.linspace(0.1, 0.9, 3, dtype=torch.float64)


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("number", [None, 0, 1, -0.5])
def test_a_number_stands_for_a_tangent(number: float | None, differentiable: bool) -> None:
    def f(x: Tensor, times: dict[str, Tensor], labels: Tensor) -> Tensor:
        return (x * times["t"].sin())[labels]

    labels, t = torch.tensor([0, 2]), NUMBERS.flip(0)
    found = jx.jvp(
        f,
        (NUMBERS, {"t": t}, labels),
        (NUMBERS.cos(), {"t": number}, None),
        differentiable=differentiable,
    )
    full = torch.full_like(t, number or 0)
    expected = torch.func.jvp(
        lambda x, t: f(x, {"t": t}, labels), (NUMBERS, t), (NUMBERS.cos(), full)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("zeros", [torch.zeros_like, lambda label: label * 0.0, lambda label: None])
def test_zeros_are_the_tangent_of_integers(zeros: Callable, differentiable: bool) -> None:
    x, u, label = torch.randn(3, 2), torch.randn(3, 2), torch.arange(6).reshape(3, 2)
    step = zeros(label)
    value, tangent = jx.jvp(torch.mul, (x, label), (u, step), differentiable=differentiable)
    torch.testing.assert_close((value, tangent), (x * label, u * label))
    with pytest.raises(TypeError, match="expected None, or zeros of its shape"):
        jx.jvp(torch.mul, (x, label), (u, torch.ones_like(label)), differentiable=differentiable)
    with pytest.raises(TypeError, match=r"torch.int64, but derivatives need a floating-point"):
        jx.jvp(lambda n: n, (label,), (None,))
