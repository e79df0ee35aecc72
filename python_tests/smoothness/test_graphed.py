"""`jx.graphed`: what it refuses, and steps that are those of the function itself.

On the CPU, with a graph that runs the function again in place of its kernels; on a GPU, with one.
"""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import jachess_ext as jx
from jachess_ext import graphs
from jachess_ext.ops import library

from .host_reads import HostReads, simulate_graphs
from .tiny_models import classifier, token_batch

BATCH = token_batch([4, 3])


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return simulate_graphs(monkeypatch)


def batches(count: int, device: str = "cpu") -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = BATCH["input_ids"].shape
    return [
        {
            "input_ids": torch.randint(1, 7, shape, generator=generator).to(device),
            "attention_mask": BATCH["attention_mask"].to(device),
            "labels": torch.randint(2, (2,), generator=generator).to(device),
        }
        for _ in range(count)
    ]


class Descent(torch.optim.Optimizer):
    """On the CPU torch's optimizers read their rate, or their number of steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= p.grad * group["lr"]


def training(
    model: nn.Module, wrap: Callable[[Any], Any], device: str = "cpu", **settings: Any
) -> tuple[Any, list[Tensor]]:
    """Losses of eight steps of JacHess on other data each, and the parameters after them."""
    reg = jx.JacHess(model, weights="uniform", seed=5, **settings)
    rate = torch.tensor(1e-2, device=device)
    if device == "cuda":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
    else:
        optimizer = Descent(model.parameters(), {"lr": rate})

    def step(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        optimizer.zero_grad()
        out = reg(batch)
        out.total.backward()
        optimizer.step()
        return {"loss": out.total, "jacobian": out.jacobian}

    step = wrap(step)
    torch.manual_seed(3)
    results = []
    for number, batch in enumerate(batches(8, device)):
        rate.fill_(1e-2 / (1 + number))
        results.append(step(batch))
    parameters = [p.detach() for p in model.parameters()]
    return reg, [tensor for result in results for tensor in result.values()] + parameters


def dropping(device: str = "cpu") -> nn.Module:
    model = copy.deepcopy(classifier("bert", attention="sdpa")).to(device).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.1
    return model


@pytest.mark.parametrize("settings", [{}, {"normalize": True}, {"directions": 5}])
def test_replayed_steps_are_the_eager_ones(simulated: list[str], settings: Any) -> None:
    """And the captured one has the host read nothing."""
    _, expected = training(dropping(), lambda step: step, **settings)
    reg, actual = training(dropping(), jx.graphed, **settings)
    assert not simulated
    assert isinstance(reg.step, Tensor) and reg.step.item() == 8
    for theirs, ours in zip(expected, actual, strict=True):
        assert torch.equal(theirs.detach(), ours)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_steps_are_the_eager_ones_on_a_gpu(dtype: torch.dtype) -> None:
    _, expected = training(dropping("cuda").to(dtype), lambda step: step, "cuda")
    reg, actual = training(dropping("cuda").to(dtype), jx.graphed, "cuda")
    assert reg.step.item() == 8
    losses = [float(loss) for loss in expected[:16:2]]
    assert len(set(losses)) == 8
    for theirs, ours in zip(expected, actual, strict=True):
        assert torch.equal(theirs.detach(), ours)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["laplacian", "weights", "jvp"])
def test_derivatives_are_captured(name: str) -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).cuda()
    step = jx.graphed(lambda x: derivatives(net, x)[name], warmup=2)
    for x in torch.randn(5, 4, 3, device="cuda"):
        assert torch.equal(step(x), derivatives(net, x)[name].detach())


SIGNED = torch.tensor([1.0, -2.0, 0.0])


def derivatives(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return {
        "laplacian": jx.laplacian(net, x).laplacian,
        "weights": jx.laplacian(net, x, weights=SIGNED.to(x)).laplacian,
        "jvp": jx.jvp(net, (x,), (torch.ones_like(x),))[1],
        "jet": jx.jet(net, x, torch.stack([x, x])).second,
        "diagonal": jx.hessian_diagonal(net, x).diagonal,
        "divergence": jx.divergence(lambda x: net(x) * x, x).divergence,
    }


def test_derivatives_read_nothing_while_they_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(4, 3)
    with HostReads() as eager:
        expected = derivatives(net, x)
    assert eager.reads
    monkeypatch.setattr(library, "capturing", lambda: True)
    with HostReads() as captured:
        values = derivatives(net, x)
        sum(value.sum() for value in values.values()).backward()
    assert not captured.reads
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name])
    with pytest.raises(ValueError, match=r"fn has to run 3 times .* leave out chunk_size"):
        jx.laplacian(net, x, chunk_size=1)


# ---- what is refused ----------------------------------------------------------------------------


def linear(**settings: Any) -> tuple[Any, Callable[..., Tensor]]:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), **{"lr": 0.1} | settings)

    def step(x: Tensor, scale: float = 1.0) -> Tensor:
        optimizer.zero_grad()
        loss = (net(x) * scale).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return optimizer, step


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda s: s(torch.ones(5, 3)), r"\[0\] is torch.float32 \[5, 3\] on cpu, but was"),
        (lambda s: s(torch.ones(4, 3).double()), r"\[0\] is torch.float64 \[4, 3\] on cpu, but"),
        (lambda s: s(torch.ones(4, 3, device="meta")), r"\[4, 3\] on meta, but was .* on cpu"),
        (lambda s: s(torch.ones(4, 3), 2.0), "nested otherwise"),
        (lambda s: s(x=torch.ones(4, 3)), "nested otherwise"),
        (lambda s: s([torch.ones(4, 3)]), "nested otherwise"),
    ],
)
def test_another_batch(simulated: list[str], call: Callable[[Any], Tensor], sentence: str) -> None:
    step = jx.graphed(linear()[1], warmup=1)
    for _ in range(3):
        step(torch.ones(4, 3))
    with pytest.raises(ValueError, match=sentence):
        call(step)


def test_another_number(simulated: list[str]) -> None:
    optimizer, plain = linear()
    step = jx.graphed(plain, warmup=1)
    for _ in range(2):
        step(torch.ones(4, 3), 2.0)
    with pytest.raises(ValueError, match=r"argument \[1\] is 3.0, but was 2.0"):
        step(torch.ones(4, 3), 3.0)
    optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(ValueError, match=r"lr of SGD is 0.01, but was 0.1 .* pass a tensor"):
        step(torch.ones(4, 3), 2.0)


def test_an_optimizer_that_counts_on_the_host(simulated: list[str]) -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(net.parameters())

    def step(x: Tensor) -> Tensor:
        loss = net(x).mean()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(ValueError, match=r"Adam counts its steps on the host: .* capturable=True"):
        jx.graphed(step)(torch.ones(4, 3))


# ---- what each optimizer counts on the host


def _closed(optimizer: Any, loss: Callable[[], Tensor]) -> Tensor:
    """Take a step that may ask for the loss again, as LBFGS does."""

    def again() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    value = again()
    optimizer.step(again) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
    return value


OPTIMIZERS: dict[str, Any] = {
    f"torch.{name}": kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and kind is not torch.optim.Optimizer
}
OPTIMIZERS["transformers.Adafactor"] = transformers.Adafactor
OPTIMIZERS["torch.Adagrad with lr_decay"] = partial(torch.optim.Adagrad, lr_decay=0.5)
OPTIMIZERS["torch.SGD with momentum"] = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


COUNT_FOR_NOBODY = (
    "torch.Adagrad",
    "torch.Adadelta",
    "torch.RMSprop",
    "torch.Rprop",
    "torch.LBFGS",
)


def _has_dimensions(leaves: Sequence[object]) -> bool:
    """Stand in for `graphs.on_gpu`, with scalars on the host."""
    return any(isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in leaves)


def _host(optimizer: torch.optim.Optimizer) -> list[dict[Any, Any]]:
    """Numbers and scalars of the state, which torch keeps on the CPU."""
    return [
        {k: copy.deepcopy(v) for k, v in state.items() if not isinstance(v, Tensor) or v.ndim == 0}
        for state in optimizer.state.values()
    ]


def _trained(name: str) -> tuple[Tensor, Any, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    sparse = "Sparse" in name
    net: nn.Module = nn.Embedding(3, 2, sparse=True) if sparse else nn.Linear(3, 2, bias=False)
    optimizer = OPTIMIZERS[name](net.parameters())

    def step(x: Tensor) -> Tensor:
        return _closed(optimizer, lambda: net(x.argsort() if sparse else x).square().mean())

    return next(net.parameters()), optimizer, step


def _run(step: Callable[[Tensor], Tensor], batches: Tensor) -> None:
    for batch in batches:
        step(batch)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, simulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused where steps whose count stands still are other steps."""
    monkeypatch.setattr(graphs, "on_gpu", _has_dimensions)
    batches = torch.randn(6, 4, 3)
    expected, _, step = _trained(name)
    _run(step, batches)
    frozen, optimizer, step = _trained(name)
    _run(step, batches[:2])
    for batch in batches[2:]:
        before = _host(optimizer)
        step(batch)
        for state, held in zip(optimizer.state.values(), before, strict=True):
            state.update(held)
    parameter, _, step = _trained(name)
    graphed = jx.graphed(step, warmup=2)
    if name in ("torch.SGD", "torch.SGD with momentum", "torch.Muon"):
        assert torch.equal(frozen, expected)
        _run(graphed, batches)
        torch.testing.assert_close(parameter, expected)
    else:
        assert not torch.equal(frozen, expected) or name in COUNT_FOR_NOBODY
        with pytest.raises(ValueError, match=r"counts its steps on|changes its .* on the host"):
            _run(graphed, batches)


# ---- arguments on the host


class Batch:
    """Says nothing of what it holds."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __repr__(self) -> str:
        return "Batch"


Make = Callable[[float], Any]
ARGUMENTS: dict[str, tuple[Make, Callable[[Any], Any]]] = {
    "float": (float, float),
    "text": (str, float),
    "numpy.float64": (np.float64, float),
    "array": (lambda v: np.full(3, v), lambda a: float(a[1])),
    "long array": (lambda v: np.r_[np.ones(999), v, np.ones(999)], lambda a: float(a[999])),
    "scalar": (torch.tensor, lambda a: a),
    "slice": (lambda v: slice(int(v)), lambda a: a.stop),
    "object": (Batch, lambda a: a.scale),
    "nest": (lambda v: {"a": [np.full(2, v)]}, lambda a: float(a["a"][0][0])),
}
IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "long array": lambda a: a.__setitem__(999, 3.0),
    "scalar": lambda a: a.fill_(3.0),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_on_the_host(
    name: str, simulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "on_gpu", _has_dimensions)
    make, read = ARGUMENTS[name]
    sentence = "but was .* when it was captured|has other values than when it was captured"
    for change in ("none", "new", *(["in place"] if name in IN_PLACE else [])):
        step = jx.graphed(lambda x, argument: x * read(argument), warmup=1)
        argument = make(2.0)
        for number in range(3):
            value = argument if name == "object" or number else make(2.0)
            assert torch.equal(step(torch.ones(3), value), torch.full((3,), 2.0))
        if change == "none":
            continue
        if change == "in place":
            IN_PLACE[name](argument)
        else:
            argument = make(3.0)
        with pytest.raises(ValueError, match=sentence):
            step(torch.ones(3), argument)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.eval(),
        lambda net: net[1].eval(),
        lambda net: net.requires_grad_(False),
        lambda net: net[0].bias.requires_grad_(False),
    ],
    ids=["eval", "eval of a part", "requires_grad_", "requires_grad_ of a parameter"],
)
def test_a_model_that_changes_after_the_capture(simulated: list[str], change: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = jx.graphed(lambda x: _closed(optimizer, lambda: net(x).square().mean()), warmup=1)
    for _ in range(3):
        step(torch.ones(4, 3))
    change(net)
    with pytest.raises(
        ValueError, match=r"train\(\), eval\(\) or requires_grad_\(\) changed a model"
    ):
        step(torch.ones(4, 3))


def test_warm_ups_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each stream cuBLAS keeps memory of its own."""
    streams: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: streams.append(MagicMock()) or streams[-1])
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    graphs._stream.cache_clear()
    for _ in range(3):
        with graphs.side_stream():
            pass
    graphs._stream.cache_clear()
    assert len(streams) == 1


# In torch 2.10 it asks no mode, and is not seen.
_UNSEEN = "handle_torch_function" not in inspect.getsource(torch.autograd.backward)


@pytest.mark.parametrize(
    "backward",
    [
        Tensor.backward,
        pytest.param(
            torch.autograd.backward,
            marks=pytest.mark.skipif(_UNSEEN, reason="this torch's function asks no mode"),
        ),
    ],
)
def test_accumulated_gradients(simulated: list[str], backward: Any) -> None:
    net = nn.Linear(3, 1)

    def micro_batch(x: Tensor) -> Tensor:
        loss = net(x).mean()
        backward(loss)
        return loss

    with pytest.raises(ValueError, match="without an optimizer's step, so that gradients would"):
        jx.graphed(micro_batch)(torch.ones(4, 3))


def test_gradients_for_an_optimizer_outside(simulated: list[str]) -> None:
    net = nn.Linear(3, 1)
    memory = [torch.zeros_like(p) for p in net.parameters()]
    runs = []

    def backward(x: Tensor) -> Tensor:
        loss = net(x).mean()
        gradients = torch.autograd.grad(loss, [*net.parameters()])
        runs.append(x)
        for parameter, place, gradient in zip(net.parameters(), memory, gradients, strict=True):
            place.copy_(gradient)
            if len(runs) <= 2:  # a replay writes into memory, and sets no attribute
                parameter.grad = place
        return loss

    step = jx.graphed(backward, parameters=net.parameters(), warmup=1)
    for call in range(4):
        x = torch.full((4, 3), float(call))
        step(x)
        assert net.weight.grad is not None and torch.equal(net.weight.grad, x[:1])
        with pytest.raises(ValueError, match="no gradient accumulation; call zero_grad"):
            step(x)
        net.zero_grad()


@pytest.mark.cuda
def test_gradients_for_an_optimizer_outside_on_a_gpu() -> None:
    net = nn.Linear(3, 1).cuda()

    def backward(x: Tensor) -> Tensor:
        loss = net(x).mean()
        loss.backward()
        return loss

    step = jx.graphed(backward, parameters=net.parameters(), warmup=2)
    for call in range(5):
        x = torch.full((4, 3), float(call), device="cuda")
        step(x)
        assert net.weight.grad is not None and torch.equal(net.weight.grad, x[:1])
        net.zero_grad()


def test_results_that_no_replay_computes(simulated: list[str]) -> None:
    with pytest.raises(TypeError, match="returned a float, which no replay computes anew"):
        jx.graphed(lambda x: {"loss": x.mean(), "count": 3.0})(torch.ones(2))


def test_results_are_looked_at_every_few_calls(simulated: list[str]) -> None:
    step = jx.graphed(lambda x: x.log(), warmup=1, check_every=3)
    for value in (1.0, -1.0):  # the second is the capture
        step(torch.full((2,), value))
    with pytest.raises(FloatingPointError, match=r"call 3: a result .* every 3 calls"):
        step(torch.full((2,), -1.0))
    kept = step(torch.ones(2))
    step(torch.full((2,), 2.0))
    assert torch.equal(kept, torch.zeros(2)), "a result is the caller's own"


@pytest.mark.parametrize("name", ["warmup", "check_every"])
def test_numbers_of_calls(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; expected a number of calls from 1 up"):
        jx.graphed(lambda x: x, **{name: 0})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"on_nonfinite": "skip"}, "on_nonfinite='skip' needs results on the host"),
        ({"engine": "reverse"}, "engine='reverse' needs results on the host"),
    ],
)
def test_a_penalty_that_reads_on_the_host(
    simulated: list[str], settings: Any, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        training(dropping(), jx.graphed, **settings)


def test_a_step_that_would_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    reg = jx.JacHess(dropping(), weights="uniform")
    monkeypatch.setattr(library, "capturing", lambda: True)
    with pytest.raises(ValueError, match="step is a number, which stays the same in every replay"):
        reg(BATCH)


# ---- the CPU ------------------------------------------------------------------------------------


def test_on_the_cpu_steps_run_as_they_are() -> None:
    """Which is said once, and shapes may change."""
    _, expected = training(dropping(), lambda step: step)
    with pytest.warns(UserWarning, match="run as they are: a CUDA graph needs the batch on") as w:
        reg, actual = training(dropping(), jx.graphed)
    assert len([x for x in w if "CUDA graph" in str(x.message)]) == 1
    assert reg.step == 8 and not isinstance(reg.step, Tensor)
    for theirs, ours in zip(expected, actual, strict=True):
        assert torch.equal(theirs, ours)
    with warnings.catch_warnings(record=True):
        double = jx.graphed(lambda x: x + x)
        assert [len(double(torch.ones(n))) for n in (2, 3)] == [2, 3]


def test_what_a_graph_reads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the layers on the device, when other ones replace them."""
    reg = jx.JacHess(dropping(), weights=[0.25, 0.75])
    reg.step = torch.tensor(0)
    reg(BATCH)
    with monkeypatch.context() as patch:
        patch.setattr(library, "capturing", lambda: True)
        reg(BATCH)
    memory = weakref.ref(reg._copies["weights"][1])
    reg.weights = "uniform"
    reg(BATCH)
    assert memory() is not reg._copies["weights"][1] and memory() is not None
