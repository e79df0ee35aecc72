"""`jx.jet` and `JetTensor`: what goes in, what comes out, what is refused and how."""

from __future__ import annotations

import dataclasses
import re
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, MixtralConfig
from transformers.modeling_outputs import BaseModelOutput

import jachess_ext as jx
from jachess_ext.jet import composed_rules, jet_rule
from jachess_ext.jet.engine import registry
from jachess_ext.jet.engine.layout import operators_enabled
from jachess_ext.jet.passes.eager import make_input

X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
U = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x, directions, order, error, message",
    [
        (X, U[:, :2], 2, ValueError, "shape [2, 2, 4], but x of shape [3, 4] needs"),
        (X, U[:0], 2, ValueError, "no direction was given"),
        (X, X.expand(5, 3, 4), 2, ValueError, "5 directions were given, but a jet carries"),
        (X, U, 3, ValueError, "order is 3, but jets exist for order 1 and 2"),
        (X, U, 0, ValueError, "order is 0"),
        (X.where(X > 0, torch.nan), U, 2, ValueError, "x contains NaN or infinite values"),
        (X.long(), U, 2, TypeError, "x has dtype torch.int64"),
        (X.tolist(), U, 2, TypeError, "x[0][0] must be a plain tensor, not float"),
        (X, U.tolist(), 2, TypeError, "directions must be a tensor [q, *x.shape], not list"),
        (X, U.float(), 2, TypeError, "torch.float32; expected torch.float64, the dtype of x"),
        (X, U * 1j, 1, TypeError, "torch.complex128; expected torch.float64"),
        (X, U.to("meta"), 2, ValueError, "directions are on meta; expected cpu"),
    ],
)
def test_bad_input(x: Any, directions: Any, order: int, error: type, message: str) -> None:
    called = []
    with pytest.raises(error, match=re.escape(message)) as caught:
        jx.jet(called.append, x, directions, order=order)
    assert not called
    assert "\n" not in str(caught.value)


def test_a_jet_is_no_point_of_expansion() -> None:
    with pytest.raises(TypeError, match=r"belongs to a pass .* take torch.func.jvp"):
        jx.jet(lambda x: jx.jet(torch.sin, x, U).primal, X, U)


@pytest.mark.parametrize("make", ["script", "trace", "export"])
@pytest.mark.filterwarnings("ignore")
def test_a_program_says_pass_the_plain_module(make: str) -> None:
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    program = {
        "script": lambda: torch.jit.script(net),
        "trace": lambda: torch.jit.trace(net, x),
        "export": lambda: torch.export.export(net, (x,)).module(),
    }[make]()
    for call in (
        lambda: jx.jet(program, x, x[None]),
        lambda: jx.jvp(program, (x,), (x,)),
        lambda: jx.laplacian(program, x),
    ):
        with pytest.raises(RuntimeError, match=r"(?i)pass the plain module"):
            call()


class Block(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


@pytest.mark.parametrize("way", ["jet", "jvp", "target"])
def test_missing_rule_names_operation_module_and_decorator(way: str) -> None:
    model = nn.Sequential(nn.Tanh(), Block(torch.special.airy_ai))
    call = {
        "jet": lambda: jx.jet(model, X, U),
        "jvp": lambda: jx.jvp(model, (X,), (U[0],)),
        "target": lambda: jx.jvp(model, (X,), (U[0],), differentiable=False),
    }[way]
    with pytest.raises(jx.MissingJetRule) as caught:
        call()
    parts = ["no jet rule for torch.special.airy_ai", "module Block '1' of Sequential"]
    if way == "jet":
        parts += ["@jet_rule(torch.special.airy_ai)", "from jachess_ext.jet import jet_rule"]
    for part in parts:
        assert part in str(caught.value)
    assert isinstance(caught.value, NotImplementedError)


def test_missing_rule_outside_a_module() -> None:
    with pytest.raises(jx.MissingJetRule, match=r"poisson \(called in no torch\.nn\.Module\)"):
        jx.jet(torch.poisson, X, U)


def test_grouped_experts_name_the_setting_that_works() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    config = MixtralConfig(**sizes, num_hidden_layers=1, num_key_value_heads=2, num_local_experts=2)
    model, x = AutoModel.from_config(config), torch.ones(1, 2, 8)

    def run(x: Any) -> Any:
        return model(inputs_embeds=x, use_cache=False).last_hidden_state

    with pytest.raises(jx.MissingJetRule, match=r"grouped_mm.*in module MixtralExperts") as caught:
        jx.jet(run, x, x[None])
    assert 'experts_implementation="eager"' in str(caught.value)
    assert "Register a rule" not in str(caught.value)
    model.set_experts_implementation("eager")
    assert jx.jet(run, x, x[None]).primal.shape == x.shape
    eager = AutoModel.from_config(config, experts_implementation="eager")
    assert eager.config._experts_implementation == "eager"


def test_registering_a_rule_makes_it_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))

    @jet_rule(torch.special.erfcx)
    def erfcx(input: Any) -> Any:
        return torch.exp(input * input) * torch.erfc(input)

    out = jx.jet(Block(torch.special.erfcx), X, U)
    torch.testing.assert_close(out.primal, torch.special.erfcx(X))
    slope = 2 * X * torch.special.erfcx(X) - 2 / torch.pi**0.5
    torch.testing.assert_close(out.first, slope * U)


def test_a_typing_error_in_a_rule_s_name() -> None:
    with pytest.raises(AttributeError, match="torch has no function named 'gelluu'"):
        jet_rule("gelluu")(lambda input: input)


MEETINGS = {
    "add": torch.add,
    "cat": lambda a, b: torch.cat([a, b]),
    "where": lambda a, b: torch.where(torch.eye(3).bool(), a, b),
    "copy_": lambda a, b: a.copy_(b),
    "attention": lambda a, b: F.scaled_dot_product_attention(a, b, b),
}


@pytest.mark.parametrize("name", MEETINGS)
def test_jets_of_different_passes_do_not_meet(name: str) -> None:
    """Three directions at order 1 and two at order 2 have four streams both; those of two passes
    are along directions of their own."""
    x, u = X[:, :3], U[:, :, :3]
    first, second = make_input(x, torch.ones(3, 3, 3).double(), order=1), make_input(x, u)
    assert first.streams.shape == second.streams.shape
    with pytest.raises(ValueError, match="different layouts met"):
        MEETINGS[name](first, second)
    with pytest.raises(ValueError, match=r"met in one operation .*of another pass"):
        MEETINGS[name](make_input(x, u), make_input(x, u))


def test_a_pass_within_a_pass_is_refused() -> None:
    kept: list[Any] = []
    for inner in (lambda x, y: x * y, lambda x, y: x):
        with pytest.raises(ValueError, match=r"run one jx\.jet at a time"):
            jx.jet(lambda x, f=inner: jx.jet(lambda y: f(x, y), X, U).first[0], X, U)
    jx.jet(lambda x: kept.append(x) or x, X, U)
    with pytest.raises(ValueError, match=r"run one jx\.jet at a time"):
        jx.jet(lambda x: F.silu(x) * kept[0], X, U)
    alone = jx.jet(lambda x: x * jx.jet(torch.sin, X, U).primal, X, U)
    torch.testing.assert_close(alone.first, X.sin() * U)


def test_reentrant_checkpointing_is_refused() -> None:
    layer = nn.Linear(4, 4).double()
    with pytest.raises(RuntimeError, match="use_reentrant"):
        jx.jet(lambda x: checkpoint(layer, x, use_reentrant=True), X, U)
    with pytest.raises(RuntimeError, match="use_reentrant"):
        jx.jvp(
            lambda x: checkpoint(layer, x, use_reentrant=True),
            (X.clone().requires_grad_(),),
            (X,),
            differentiable=False,
        )
    kept = jx.jet(lambda x: checkpoint(layer, x, use_reentrant=False), X, U)
    assert kept.streams.requires_grad


def test_an_exception_leaves_nothing_behind() -> None:
    before = jx.jet(torch.sin, X, U).streams
    rules = dict(registry.RULES)

    def fail(x: Any) -> Any:
        with composed_rules():
            raise KeyError("in the model")

    with pytest.raises(KeyError, match="in the model"):
        jx.jet(fail, X, U)
    assert rules == registry.RULES
    assert operators_enabled()
    assert torch.equal(jx.jet(torch.sin, X, U).streams, before)


# ---- what comes back ---------------------------------------------------------------------------


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Record:
    a: Any
    label: str


def _is_square(jet: jx.Jet) -> None:
    torch.testing.assert_close(jet.primal, X * X)
    torch.testing.assert_close(jet.first, 2 * X * U)
    torch.testing.assert_close(jet.second, 2 * U[:1] * U[1:])


def test_tensor_and_its_parts() -> None:
    jet = jx.jet(lambda x: x * x, X, U)
    assert isinstance(jet, jx.Jet)
    _is_square(jet)
    assert jet.pairs == [(0, 1)]
    assert jet.streams.shape == (4, 3, 4)


def test_containers_come_back_as_they_are() -> None:
    out = jx.jet(lambda x: (x * x, [x * x, None], {"s": x * x, "n": 3}), X, U)
    assert isinstance(out, tuple)
    _is_square(out[0])
    _is_square(out[1][0])
    assert out[1][1] is None
    _is_square(out[2]["s"])
    assert out[2]["n"] == 3
    pair = jx.jet(lambda x: Pair(x * x, "b"), X, U)
    assert isinstance(pair, Pair) and pair.b == "b"
    _is_square(pair.a)
    record = jx.jet(lambda x: Record(x * x, "name"), X, U)
    assert isinstance(record, Record) and record.label == "name"
    _is_square(record.a)
    output = jx.jet(lambda x: BaseModelOutput(x * x, hidden_states=(x, x * x)), X, U)
    assert isinstance(output, BaseModelOutput) and output.attentions is None
    _is_square(output.last_hidden_state)
    _is_square(output.hidden_states[1])


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_scalar_and_empty_inputs(shape: tuple[int, ...]) -> None:
    x, u = torch.ones(shape).double(), torch.ones(2, *shape).double()
    jet = jx.jet(lambda x: (x * x).sum(), x, u)
    assert jet.primal.shape == ()
    assert jet.second.item() == 2 * x.numel()


def test_gradient_reaches_the_point_and_the_directions() -> None:
    x, u = X.clone().requires_grad_(), U.clone().requires_grad_()
    jet = jx.jet(lambda x: x**3, x, u)
    jet.second.sum().backward()
    torch.testing.assert_close(x.grad, 6 * U[0] * U[1])
    torch.testing.assert_close(u.grad, torch.stack([6 * X * U[1], 6 * X * U[0]]))


# ---- aliasing ----------------------------------------------------------------------------------


def through_views(x: Any) -> Any:
    y = x.clone()
    row, columns, transposed = y[0], y[:, 1:3], y.view(-1).view(3, 4).t()
    row *= 2
    columns.add_(row[1:3].clone())
    transposed[3] = row[0]
    copied = y.t().contiguous()
    copied.mul_(3)
    y[y > 1.5] = 0.25
    return y, row, columns, transposed, copied


def test_writes_show_through_views_as_with_plain_tensors() -> None:
    jets = jx.jet(through_views, X, U)
    h = 1e-6
    for jet, plain, ahead, behind in zip(
        jets,
        through_views(X),
        through_views(X + h * U[0]),
        through_views(X - h * U[0]),
        strict=True,
    ):
        assert torch.equal(jet.primal, plain)
        torch.testing.assert_close(jet.first[0], (ahead - behind) / (2 * h), rtol=1e-7, atol=1e-8)


MAKERS = (torch.zeros_like, torch.empty_like, lambda x: x.new_zeros(3, 4))
MAKERS += (lambda x: x.new_empty((3, 4)),)


@pytest.mark.parametrize("make", MAKERS)
def test_buffers_can_be_filled(make: Any) -> None:
    def fill(x: Any) -> Any:
        buffer = make(x)
        buffer[:, ::2] = x[:, :2] * x[:, :2]
        buffer[:, 1::2] = 1
        return buffer

    jet = jx.jet(fill, X, U)
    assert torch.equal(jet.primal, fill(X))
    torch.testing.assert_close(jet.first[:, :, ::2], 2 * X[:, :2] * U[:, :, :2])
    assert not jet.first[:, :, 1::2].any()


def test_a_plain_tensor_shaped_like_a_jet_stays_plain() -> None:
    row, flat = X[0], X.flatten()
    jet = make_input(X, U)
    for made in (row.expand_as(jet), flat.view_as(jet), flat.reshape_as(jet)):
        assert type(made) is torch.Tensor
    assert torch.equal(row.expand_as(jet), row.expand_as(X))
    assert torch.equal(flat.view_as(jet), X)
    assert torch.equal(X.T.reshape_as(jet), X.T.reshape(3, 4))
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        X.T.view_as(jet)
    product = jx.jet(lambda x: row.expand_as(x) * x, X, U)
    torch.testing.assert_close(product.first, row * U)


def test_an_integer_buffer_is_plain() -> None:
    assert type(torch.zeros_like(make_input(X, U), dtype=torch.long)) is torch.Tensor


# ---- operators and composed rules --------------------------------------------------------------

EYE = torch.eye(3)
FUSED = (
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: F.layer_norm(x, (4,), X[0], X[1]),
    lambda x: F.softmax(x, -1),
    lambda x: F.scaled_dot_product_attention(x, x * 2, x, attn_mask=EYE.bool()),
    lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=EYE[:, :1] > 0),
    lambda x: x @ (x * x).T,
    lambda x: F.silu(x) * x,
)


@pytest.mark.parametrize("function", FUSED)
def test_operators_and_composed_rules_agree(function: Any) -> None:
    """Streams and their gradients; without a compiled binary both sides are composed."""
    x, u = X.clone().requires_grad_(), U.clone().requires_grad_()
    weights = torch.linspace(-1, 1, 4 * X.numel(), dtype=X.dtype).reshape(4, *X.shape)
    results = []
    for rules in (nullcontext, composed_rules):
        with rules():
            streams = jx.jet(function, x, u).streams
        loss = (streams * weights[..., : streams.shape[-1]]).sum()
        results.append((streams.detach(), *torch.autograd.grad(loss, (x, u))))
    torch.testing.assert_close(*results, rtol=1e-13, atol=1e-13)
