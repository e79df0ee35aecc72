"""`jx.jet` within ``torch.compile``: no graph break, same numbers, nothing baked into the graph."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import BertConfig, BertForSequenceClassification

import jachess_ext as jx
from jachess_ext.ops import gemm
from python_tests.jet.compiled_blocks import (
    WIDTH,
    OperatorsCalled,
    Recorder,
    SelfAttention,
    assert_same,
    bert,
    example,
    jachess_operators,
    streams_and_gradients,
    streams_of,
)
from python_tests.jet.compiling import NEEDS_MODULES_IN_GRAPHS

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), NEEDS_MODULES_IN_GRAPHS]
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}


def graphs() -> int:
    """How many graphs dynamo has made in this test."""
    return counters["stats"]["unique_graphs"]


# ---- same numbers, forward and backward, in one graph with the operators ------------------------


def test_encoder_block_is_one_graph_of_operators() -> None:
    """The compiled graphs hold each operator as often as the eager pass calls it."""
    block = bert().double()
    recorder, eager = Recorder(), OperatorsCalled()
    tensors = example(block)
    with eager:
        expected = streams_and_gradients(streams_of(block), block, *tensors)
    compiled = torch.compile(streams_of(block), fullgraph=True, backend=recorder.backend)
    assert_same(streams_and_gradients(compiled, block, *tensors), expected, 1e-10)
    (forward,), (backward,) = recorder.forward, recorder.backward
    assert jachess_operators(forward) + jachess_operators(backward) == eager.counts
    for operator, count in jachess_operators(forward).items():
        assert jachess_operators(backward)[f"{operator}_backward"] == count
    assert jachess_operators(forward)
    assert graphs() == 1 and not counters["graph_break"]


@pytest.mark.parametrize(
    "make, dtype",
    [
        (SelfAttention, torch.float32),
        pytest.param(bert, torch.float64, marks=pytest.mark.slow),
    ],
)
def test_inductor_gives_the_same_numbers(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """Three steps: inputs and directions are inputs of the graph, and so are the parameters."""
    block = make().to(dtype)
    compiled = torch.compile(streams_of(block), fullgraph=True, backend="inductor")
    for step in range(3):
        # 4 × 8 tokens: enough rows for the eager engine to choose another GEMM library than torch
        tensors = example(block, 4, 8, seed=step)
        expected = streams_and_gradients(streams_of(block), block, *tensors)
        assert_same(streams_and_gradients(compiled, block, *tensors), expected, BOUNDS[dtype])
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    assert graphs() == 1 and not counters["graph_break"]


# ---- what is an input of the graph, and what makes it trace again -------------------------------


def test_other_sizes_share_one_dynamic_graph() -> None:
    block = SelfAttention().double()
    compiled = torch.compile(streams_of(block), fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, tokens in ((3, 5), (2, 7), (6, 4)):  # a batch of q rows would share q's symbol
        tensors = example(block, batch, tokens, seed=batch)
        expected = streams_and_gradients(streams_of(block), block, *tensors)
        assert_same(streams_and_gradients(compiled, block, *tensors), expected, 1e-10)
    assert graphs() == 1


def test_arguments_of_a_partial_are_inputs() -> None:
    block = SelfAttention().double()

    def masked(x: Tensor, directions: Tensor, mask: Tensor) -> Tensor:
        return jx.jet(functools.partial(block, attention_mask=mask), x, directions).streams

    compiled = torch.compile(masked, fullgraph=True, backend="aot_eager")
    for hidden in (3, 1):
        mask = torch.zeros(2, 1, 5, 5, dtype=torch.float64)
        mask[0, :, :, hidden:] = -1e9
        tensors = (*example(block), mask)
        torch.testing.assert_close(compiled(*tensors), masked(*tensors))
    assert graphs() == 1


def test_a_penalty_within_the_graph() -> None:
    """As a training step has it; parameters that are frozen later get no gradient."""
    block = SelfAttention().double()

    def penalty(x: Tensor, directions: Tensor) -> Tensor:
        jet = jx.jet(block, x, directions)
        return jet.first.square().sum() + jet.second.square().sum().sqrt()

    compiled = torch.compile(penalty, fullgraph=True, backend="aot_eager")
    compiled(*example(block)).backward()
    block.norm.requires_grad_(False)
    expected = streams_and_gradients(penalty, block, *example(block))
    assert_same(streams_and_gradients(compiled, block, *example(block)), expected, 1e-10)
    assert "norm.weight" not in expected and "attention.weight" in expected


def test_train_and_eval_mode_have_graphs_of_their_own() -> None:
    """Dynamo does not look into the module, so the flag is read where it does look."""
    module = nn.Sequential(nn.Dropout(1.0), nn.Tanh()).eval()
    compiled = torch.compile(streams_of(module), fullgraph=True, backend="aot_eager")
    x, directions = torch.randn(2, 4), torch.randn(2, 2, 4)
    for training in (False, True, False):
        module.train(training)
        torch.testing.assert_close(
            compiled(x, directions), streams_of(module)(x, directions), rtol=0, atol=0
        )
        assert bool(compiled(x, directions).any()) is not training


class Structured(nn.Module):
    """Results of every kind: a tuple in a dict, integers, a constant."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"y": (torch.sin(x), x.shape[0]), "index": torch.arange(3), "one": torch.ones(2)}


def test_structure_of_the_result_is_that_of_the_eager_jet() -> None:
    x, directions = torch.randn(2, 3), torch.randn(2, 2, 3)

    def run(x: Tensor, directions: Tensor) -> Any:
        return jx.jet(module, x, directions)

    module = Structured()
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(x, directions)
    expected = run(x, directions)
    assert got.keys() == expected.keys() and got["y"][1] == 2
    assert got["y"][0].pairs == [(0, 1)]
    assert torch.equal(got["index"], expected["index"])
    for a, b in ((got["y"][0], expected["y"][0]), (got["one"], expected["one"])):
        torch.testing.assert_close(a.streams, b.streams)
        torch.testing.assert_close(a.second, b.second)


# ---- what cannot be in a graph -----------------------------------------------------------------


class Hidden(nn.Module):
    """Its model is not a submodule, so its parameters are nobody's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.models = [model]

    def forward(self, x: Tensor) -> Any:
        return self.models[0](x)


class NoRule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)


def with_an_attribute(block: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose attribute a graph would not see change."""

    def call(x: Tensor) -> Any:
        return block(x)

    call.name = "call"  # type: ignore[attr-defined]
    return call


@pytest.mark.parametrize(
    "make, words",
    [
        (with_an_attribute, "takes an nn.Module, or a Python function that has no attributes"),
        (lambda block: Hidden(block), "neither its parameter nor its buffer"),
        (lambda block: NoRule(), "no jet rule for torch.special.bessel_j0"),
    ],
    ids=["attribute", "hidden parameters", "no rule"],
)
def test_what_the_graph_cannot_hold_is_refused(make: Any, words: str) -> None:
    fn = make(SelfAttention().double())
    compiled = torch.compile(streams_of(fn), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=words):
        compiled(*example(SelfAttention().double()))


def test_without_fullgraph_it_runs_eagerly() -> None:
    """A graph break, and every parameter keeps its gradient."""
    block = SelfAttention().double()
    compiled = torch.compile(streams_of(Hidden(block)), backend="aot_eager")
    expected = streams_and_gradients(streams_of(block), block, *example(block))
    assert_same(streams_and_gradients(compiled, block, *example(block)), expected, 1e-10)


def test_leaving_the_graph_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("jachess_ext.jet.compiled.regions"), "_WARNED_REASONS", set())
    square = with_an_attribute(torch.square)
    compiled = torch.compile(lambda x: jx.laplacian(square, x), backend="aot_eager")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        compiled(torch.ones(2, 2))
        compiled(torch.ones(3, 2))
    said = [w for w in warned if "run eagerly, outside of the graph" in str(w.message)]
    assert len(said) == 1


def test_wrong_directions_are_named() -> None:
    module = nn.Tanh()
    for options, error in (({"fullgraph": True}, RuntimeError), ({}, ValueError)):
        compiled = torch.compile(streams_of(module), backend="eager", **options)
        with pytest.raises(error, match="directions have shape"):
            compiled(torch.ones(2, 3), torch.ones(3))
    jvp = torch.compile(lambda x, t: jx.jvp(module, (x,), (t,)), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"tangents\[0\] has shape \[2\]; expected \[3\]"):
        jvp(torch.ones(3), torch.ones(2))


# ---- compiled models in the eager engine -------------------------------------------------------


@pytest.mark.parametrize("engine", ["jet", pytest.param("reverse", marks=pytest.mark.slow)])
def test_regulariser_of_a_compiled_model(engine: Any) -> None:
    """Same penalty and gradients as of the model itself, and not a fragment compiled."""
    config = BertConfig(
        hidden_size=WIDTH,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=24,
        vocab_size=30,
        attn_implementation="sdpa" if engine == "jet" else "eager",
    )
    model = BertForSequenceClassification(config).double().eval()
    batch = {
        "input_ids": torch.randint(0, 30, (2, 6)),
        "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2]),
        "labels": torch.tensor([0, 1]),
    }

    def step(called: Any) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        regulariser = jx.JacHess(called, weights="uniform", seed=3, engine=engine, dimensions=2)
        output = regulariser(batch)
        output.total.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return found | {"out": output.loss.detach()}

    expected = step(model)
    compiled = torch.compile(model, backend="eager")
    assert_same(step(compiled), expected, 1e-10)
    assert graphs() == 0
    plain = compiled(**batch).loss  # the plain step is compiled as ever
    torch.testing.assert_close(plain, model(**batch).loss)
    assert graphs() > 0


class Meeting(nn.Module):
    """A layer whose forward waits for the other thread, which is then within its own call."""

    def __init__(self, before: threading.Event, after: threading.Event) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self._before, self._after = before, after

    def forward(self, x: Tensor) -> Tensor:
        self._before.set()
        assert self._after.wait(60)
        return self.layer(x)


def _jvp(model: nn.Module) -> None:
    jx.jvp(model, (torch.ones(1, 3),), (torch.ones(1, 3),))


def _ntk(model: nn.Module) -> None:
    jx.ntk(model, torch.ones(1, 3))


@pytest.mark.parametrize("call", [_jvp, _ntk])
def test_two_threads_leave_torch_compile_on(call: Callable[[nn.Module], None]) -> None:
    """The first to enter is the first to leave; torch's stance is one for both."""
    first_is_in, both_are_in, first_has_left = (threading.Event() for _ in range(3))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(call, Meeting(first_is_in, both_are_in))
        assert first_is_in.wait(60)
        second = threads.submit(call, Meeting(both_are_in, first_has_left))
        first.result(60)
        first_has_left.set()
        second.result(60)
    compiled = torch.compile(nn.Linear(3, 2), backend="eager")
    compiled(torch.ones(1, 3))
    assert graphs() > 0


# ---- jvp, and several tensors --------------------------------------------------------------------


class OfTwo(nn.Module):
    """Two inputs, one of them in a dict; attention and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
        y = nn.functional.scaled_dot_product_attention(x, given["key"], x)
        return {"y": nn.functional.gelu(self.layer(y)) + x}


def _two_inputs() -> tuple[Any, Any]:
    values = [torch.randn(2, 1, 3, 4, dtype=torch.float64) for _ in range(4)]
    for value in values[:2]:
        value.requires_grad_()
    return (values[0], {"key": values[1]}), (values[2], {"key": values[3]})


@pytest.mark.parametrize("way", ["jvp", "target", "jet"])
def test_several_tensors_in_a_graph(way: str) -> None:
    model = OfTwo().double()
    primals, tangents = _two_inputs()

    def both(primals: Any, tangents: Any) -> Any:
        if way == "jet":
            directions = torch.utils._pytree.tree_map(lambda t: torch.stack([t, t]), tangents)
            jet = jx.jet(model, primals, directions)["y"]
            return jet.first[0], jet.second[0]
        output, tangent = jx.jvp(model, primals, tangents, differentiable=way == "jvp")
        return output["y"], tangent["y"]

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    results = []
    for function in (both, compiled):
        output, tangent = function(primals, tangents)
        assert tangent.requires_grad == (way != "target")
        loss = output.sin().sum() + tangent.cos().sum()
        inputs = (primals[0], primals[1]["key"], *model.parameters())
        results.append((output, tangent, *torch.autograd.grad(loss, inputs)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)
    assert graphs() == 1 and not counters["graph_break"]


# ---- settings of a module, which are no inputs of the graph --------------------------------------


class WithSettings(nn.Module):
    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.flipped = False
        self.norm, self.act = nn.LayerNorm(3, eps=1e-5), nn.LeakyReLU(0.1)

    def forward(self, z: Any, mask: Any = None) -> Any:
        assert mask is None
        y = self.act(self.norm(z)).sin() * self.factor
        return -y if self.flipped else y


CHANGES: list[Callable[[Any], Any]] = [
    lambda m: setattr(m, "factor", 2.5),
    lambda m: setattr(m, "factor", 3.5),
    lambda m: setattr(m, "flipped", True),
    lambda m: setattr(m.norm, "eps", 0.5),
]


def test_changed_settings_are_traced_again() -> None:
    """Also where a number has changed before, which dynamo then takes for an input."""
    module = WithSettings().double()
    x, u = torch.randn(2, 2, 3, dtype=torch.float64)

    def tangent(x: Tensor, u: Tensor) -> Tensor:
        return jx.jet(functools.partial(module, mask=None), x, u[None], order=1).first[0]

    compiled = torch.compile(tangent, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, u), tangent(x, u))
    for change in CHANGES:
        change(module)
        expected = torch.func.jvp(module, (x,), (u,))[1]
        torch.testing.assert_close(compiled(x, u), expected)


def test_what_a_graph_cannot_take_runs_eagerly() -> None:
    class Casting(nn.Module):
        def forward(self, z: Any, dtype: Any) -> Any:
            return z.sin().to(dtype)

    module, x = Casting(), torch.randn(3)
    fn = streams_of(functools.partial(module, dtype=torch.float64))
    torch.testing.assert_close(
        torch.compile(fn, backend="aot_eager")(x, torch.ones(1, 3)), fn(x, torch.ones(1, 3))
    )


# ---- the Laplacian of a batch -------------------------------------------------------------------


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)).square().sum(-1)


def network(dtype: torch.dtype, width: int = 32) -> nn.Module:
    layers = nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    return nn.Sequential(*layers).to(dtype)


def laplacian_step(fn: Callable[[Tensor], Any], net: nn.Module, x: Tensor) -> list[Tensor]:
    """The results, and the gradients of the Laplacian's and of the slopes' mean square."""
    x = x.detach().requires_grad_()
    value, first, laplacian = fn(x)
    loss = laplacian.square().mean() + first.square().mean()
    return [value, first, laplacian, *torch.autograd.grad(loss, [x, *net.parameters()][:-1])]


def test_a_laplacian_along_directions_in_a_graph() -> None:
    net, x = network(torch.float64), torch.randn(5, 3, dtype=torch.float64)
    compiled = torch.compile(
        lambda x, d: jx.laplacian(net, x, directions=d), fullgraph=True, backend="aot_eager"
    )
    directions = torch.randn(2, 3, dtype=torch.float64)
    found = compiled(x, directions)
    assert found._fields == ("value", "gradient", "laplacian")
    torch.testing.assert_close(found, jx.laplacian(net, x, directions=directions))


WEIGHTS: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda w: None,
    "negative": lambda w: (-1, 0, -0.5),
    "of both signs": lambda w: [-1.0, 0.0, 2.0],
    "zero": lambda w: [0.0, 0.0, 0.0],
    "a tensor": lambda w: w.detach(),
    "learned": lambda w: w,
    "one is learned": lambda w: [0.0, w[2], -1.0],
    "by row": lambda w: torch.stack([w, 2 * w, -w, w + 1], 1),
}


SETTINGS = [
    *((name, None, None) for name in WEIGHTS),
    *((name, "aot_eager", None) for name in ("negative", "zero", "one is learned")),
    *((name, "aot_eager", True) for name in ("none", "of both signs", "by row")),
    ("none", "inductor", None),
]


@pytest.mark.parametrize("weights, backend, dynamic", SETTINGS)
def test_weights_of_a_laplacian_in_a_graph(
    weights: str, backend: str | None, dynamic: bool | None
) -> None:
    """Against torch's Hessian of each row, with the gradients by parameters, x and weights; backend
    None is the call without a graph.  A graph takes any tensor of weights as it takes learned ones.
    Without weights there are other rows and other parameters, traced once or twice.
    """
    dtype = torch.float32 if backend == "inductor" else torch.float64
    net, w = network(dtype), torch.tensor([0.5, -1.5, 0.0], dtype=dtype, requires_grad=True)

    def call(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return jx.laplacian(net, x, weights=WEIGHTS[weights](w))

    def by_hessian(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        def f(row: Tensor) -> Tensor:
            return net(row[None])[0, 0]

        slopes = torch.func.vmap(torch.func.grad(f))(x)
        squares = torch.func.vmap(torch.func.hessian(f))(x).diagonal(dim1=1, dim2=2)
        factors = [1.0] * 3 if weights == "none" else WEIGHTS[weights](w)
        if isinstance(factors, (list, tuple)):
            factors = torch.stack([torch.as_tensor(factor, dtype=dtype) for factor in factors])
        return net(x), slopes.T[..., None], (squares * factors.t()).sum(1, keepdim=True)

    compiled = call
    if backend:
        compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (4, 9, 11) if weights == "none" and dynamic else (4,):
        x = torch.randn(rows, 3, dtype=dtype, requires_grad=True)
        results = []
        for fn in (compiled, by_hessian):
            value, slopes, laplacian = fn(x, w)
            loss = laplacian.square().mean() + (slopes * value).square().mean()
            inputs = [x, w, *net.parameters()]
            gradients = torch.autograd.grad(loss, inputs, materialize_grads=True)
            results.append([value, slopes, laplacian, *gradients])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=100 * BOUNDS[dtype], atol=BOUNDS[dtype])
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.9)
    assert graphs() <= 2


def test_weights_of_another_shape_are_refused_where_it_is_traced() -> None:
    net, x = network(torch.float64), torch.randn(5, 3, dtype=torch.float64)
    compiled = torch.compile(lambda x, w: jx.laplacian(net, x, weights=w), backend="eager")
    for weights in ([1.0, 2.0], torch.ones(2), torch.ones(3, 4), torch.ones(3, 5, 1)):
        with pytest.raises(Exception, match=r"expected \[3\]"):
            compiled(x, weights)


def test_rows_that_depend_on_each_other_are_refused_where_it_is_traced() -> None:
    fn = Centred()
    compiled = torch.compile(lambda x: jx.laplacian(fn, x), backend="eager")
    with pytest.raises(Exception, match="results of fn depend on other rows"):
        compiled(torch.randn(4, 3))


@pytest.mark.parametrize("named", [{"chunk_size": 2}, {"has_aux": True}, {"partial": True}])
def test_what_a_graph_of_a_laplacian_does_not_take(named: dict[str, Any]) -> None:
    net, x = network(torch.float64), torch.randn(5, 3, dtype=torch.float64)
    partial, aux = named.pop("partial", False), named.get("has_aux", False)

    def fn(x: Tensor) -> Any:
        return (net(x), x.sum()) if aux else net(x)

    of = functools.partial(fn) if partial else fn if aux else net

    def call(x: Tensor) -> Any:
        return jx.laplacian(of, x, **named)

    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"within torch\.compile|in a graph takes"
    ):
        torch.compile(call, fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()
    found, expected = torch.compile(call, backend="eager")(x), call(x)
    torch.testing.assert_close(found[:3], expected[:3])


def test_products_of_a_graph_go_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the eager pass; forward, and the backward's by the inputs."""
    monkeypatch.setattr(gemm, "onednn_preferred", lambda: True)
    net, x, recorder = network(torch.float32), torch.randn(64, 3), Recorder()
    expected = laplacian_step(lambda x: jx.laplacian(net, x), net, x)
    compiled = torch.compile(
        lambda x: jx.laplacian(net, x), fullgraph=True, backend=recorder.backend
    )
    torch.testing.assert_close(laplacian_step(compiled, net, x), expected, rtol=1e-4, atol=1e-5)
    (forward,), (backward,) = recorder.forward, recorder.backward
    assert jachess_operators(forward)["rows_times"] == 3
    assert jachess_operators(backward)["rows_times"] == 3
