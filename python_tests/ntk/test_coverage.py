"""Which parameters count, how each is covered, and that none is dropped in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import jachess_ext as jx
from jachess_ext.ntk import measure_ntk

from .models import batch, classifier
from .oracles import error, kernel

LENGTHS = [7, 4, 5]


# ---- which parameters ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_lora(name: str) -> None:
    """Adapters alone; the base model is frozen by peft."""
    targets = {"bert": ["query", "dense"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}
    config = LoraConfig(
        r=2, lora_alpha=4, target_modules=targets.get(name, ["q", "wi"]), fan_in_fan_out=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft's remark on Conv1D
        model = get_peft_model(classifier(name), config).double().eval()
    for key, parameter in model.named_parameters():
        if "lora_B" in key:  # zero at first, which would leave lora_A without a gradient
            nn.init.normal_(parameter, std=0.3)
    samples = batch(LENGTHS)
    found = measure_ntk(model, samples)
    assert not found.report.fallback
    assert found.report.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert error(found.theta, kernel(model, samples)) < 1e-10


def test_frozen_parameters_do_not_count() -> None:
    model, samples = classifier("bert"), batch(LENGTHS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layer.1" in name or "classifier" in name)
    assert error(jx.ntk(model, samples), kernel(model, samples)) < 1e-10


@pytest.mark.parametrize("form", ["names", "predicate"])
def test_chosen_parameters(form: str) -> None:
    model, samples = classifier("bert"), batch(LENGTHS)
    named = {n: p for n, p in model.named_parameters() if "query" in n or "word_emb" in n}
    chosen: Any = list(named) if form == "names" else lambda name, p: name in named
    expected = kernel(model, samples, parameters=list(named.values()))
    assert error(jx.ntk(model, samples, parameters=chosen), expected) < 1e-10


def test_kernels_of_parts_add_up() -> None:
    model, samples = classifier("opt"), batch(LENGTHS)
    names = [name for name, _ in model.named_parameters()]
    parts = sum(jx.ntk(model, samples, parameters=[name]) for name in names)
    assert error(parts, jx.ntk(model, samples)) < 1e-12


# ---- how they are used -----------------------------------------------------------------------


class Toy(nn.Module):
    """Tokens in, logits out: a body between an embedding and a head."""

    def __init__(self, body: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.body = body
        self.head = nn.Linear(width, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(input_ids))).mean(1))


def _recurrence(step: Any, x: Tensor) -> Tensor:
    """Call one layer at every step."""
    state = torch.zeros_like(x[:, 0])
    states = []
    for t in range(x.shape[1]):
        state = torch.tanh(step(state) + x[:, t])
        states.append(state)
    return torch.stack(states, 1)


def _positions(tables: Any, x: Tensor) -> Tensor:
    """Add position embeddings for all samples at once, with and without a dimension for them."""
    t = torch.arange(x.shape[1])
    return x + tables[0](t[None]) + tables[1](t).unsqueeze(0)


def _only_shift(layers: Any, x: Tensor) -> Tensor:
    """Use the first layer without a gradient, the second not at all."""
    with torch.no_grad():
        shift = layers[0](x)
    return x + shift


class Body(nn.Module):
    """A layer, and the way in which it is applied to x, [N, T, 6]."""

    def __init__(self, inner: nn.Module, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.use = inner, use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.inner, x)


class ShiftedNorm(nn.Module):
    """A norm whose weight is 1 + w, as in Gemma."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt() * (1.0 + self.weight)


class Scaled(nn.Module):
    """Parameters that meet the data elementwise, in every way of broadcasting."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.row = nn.Parameter(torch.randn(6))
        self.table = nn.Parameter(torch.randn(5, 6))
        self.batched = nn.Parameter(torch.randn(1, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scalar * x + self.row) * self.table + self.batched


def _linear(use: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Body(nn.Linear(6, 6), use)


def _two(make: Callable[[], nn.Module]) -> nn.ModuleList:
    return nn.ModuleList([make(), make()])


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def _normed() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6))


# name -> (the body, the forms its parameters may take).
BODIES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "shared over time": (_linear(_recurrence), {"A", "B", "dense"}),
    "transposed": (
        _linear(lambda inner, x: torch.tanh(inner(x)) @ inner.weight),
        {"per_sample", "dense"},
    ),
    "convolution": (
        lambda: Body(nn.Conv1d(6, 6, 3, padding=1), lambda inner, x: inner(x.mT).mT),
        {"dense"},
    ),
    "shifted norm": (ShiftedNorm, {"dense"}),
    "scaled": (Scaled, {"dense", "per_sample"}),
    # samples and tokens as one dimension, as OPT's layers once did
    "flattened tokens": (
        lambda: Body(_normed(), lambda inner, x: inner(x.reshape(-1, 6)).view_as(x)),
        {"A", "B", "dense"},
    ),
    # the first dimension does not number samples
    "time first": (
        _linear(lambda inner, x: inner(x.transpose(0, 1)).transpose(0, 1)),
        {"per_sample"},
    ),
    "positions": (lambda: Body(_two(lambda: nn.Embedding(8, 6)), _positions), {"matches"}),
    # a position embedding that meets the samples by broadcasting alone
    "broadcast": (
        lambda: Body(nn.Embedding(8, 6), lambda inner, x: x + inner(torch.arange(x.shape[1]))),
        {"per_sample"},
    ),
    # autograd moves an overwritten view's history
    "in place": (
        _linear(lambda inner, x: inner(x).mul_(2).sin_()),
        {"A", "B", "dense", "per_sample"},
    ),
    "checkpointed": (
        lambda: Body(_layers(), lambda inner, x: checkpoint(inner, x, use_reentrant=False)),
        {"A", "B", "dense"},
    ),
    # torch's own attention reads its projections past their modules
    "attention": (
        lambda: Body(
            nn.MultiheadAttention(6, 2, batch_first=True), lambda inner, x: inner(x, x, x)[0]
        ),
        {"A", "B", "dense", "per_sample"},
    ),
    "unused": (lambda: Body(_two(lambda: nn.Linear(6, 6)), _only_shift), {"none"}),
}


def _plain(model: nn.Module) -> Any:
    return lambda batch: model(**batch)


def _toy(body: str | type[nn.Module]) -> Toy:
    torch.manual_seed(3)
    return Toy(BODIES[body][0]() if isinstance(body, str) else body()).double()


IDS = {"input_ids": torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(1))}
OTHER = {"input_ids": torch.randint(0, 20, (3, 5), generator=torch.Generator().manual_seed(2))}


@pytest.mark.filterwarnings("ignore:jachess_ext.ntk")
@pytest.mark.parametrize("body", BODIES)
def test_every_way_of_using_a_parameter(body: str) -> None:
    model = _toy(body)
    found = measure_ntk(model, IDS)
    assert error(found.theta, kernel(model, IDS, f=_plain(model))) < 1e-10
    forms = {found.report.form_of(n) for n, _ in model.named_parameters() if "body" in n}
    assert forms <= BODIES[body][1]
    cross = jx.ntk(model, IDS, OTHER)
    assert error(cross, kernel(model, IDS, OTHER, f=_plain(model))) < 1e-10


@pytest.mark.parametrize("samples", [1, 2, 5], ids="N={}".format)
@pytest.mark.filterwarnings("ignore:jachess_ext.ntk")
def test_as_many_samples_as_tokens(samples: int) -> None:
    """Sizes that agree by chance (N = T, N = 1) do not confuse samples with tokens."""
    for body in ("time first", "positions", "flattened tokens", "scaled"):
        model = _toy(body)
        ids = {"input_ids": torch.arange(samples * 5).view(samples, 5) % 20}
        assert error(jx.ntk(model, ids), kernel(model, ids, f=_plain(model))) < 1e-10


def test_the_fallback_names_the_parameter_and_the_reason_once() -> None:
    model = _toy("transposed")
    with pytest.warns(RuntimeWarning) as caught:
        found = measure_ntk(model, IDS)
    assert len(caught) == 1
    assert "body.inner.weight (it is used in a call that is not covered)" in str(caught[0].message)
    assert list(found.report.fallback) == ["body.inner.weight"]
    assert "body.inner.weight" in str(found.report)


def test_a_use_that_no_call_shows_is_found_by_the_check() -> None:
    """The weight reaches the output through a view made long before the pass."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.view = [self.inner.weight.view(36).view(6, 6)]

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) @ self.view[0]

    model = _toy(Behind)
    model.body.view = [model.body.inner.weight.view(36).view(6, 6)]  # of the weight in double
    with pytest.warns(RuntimeWarning, match=r"inner.weight \(the recorded calls do not give its"):
        found = measure_ntk(model, IDS)
    assert error(found.theta, kernel(model, IDS, f=_plain(model))) < 1e-10


def test_mixed_convolution_and_linear_use_of_one_weight() -> None:
    """A weight used by two covered calls of different shapes of use: Conv1D's and a linear's."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))
            self.bias = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.addmm(self.bias, x.reshape(-1, 6), self.weight).view_as(x)
            return F.linear(torch.tanh(y), self.weight, self.bias) * self.bias

    model = _toy(Both)
    found = measure_ntk(model, IDS)
    assert not found.report.fallback
    assert error(found.theta, kernel(model, IDS, f=_plain(model))) < 1e-10


def test_embedding_padding_index_gets_no_gradient() -> None:
    model = _toy("shared over time")
    model.embed = nn.Embedding(20, 6, padding_idx=int(IDS["input_ids"][0, 0])).double()
    assert error(jx.ntk(model, IDS), kernel(model, IDS, f=_plain(model))) < 1e-10


# ---- the model is left as it was ----------------------------------------------------------------


def test_dropout_is_off_and_modes_come_back() -> None:
    model, samples = classifier("bert"), batch(LENGTHS)
    expected = kernel(model, samples)
    model.train()
    model.bert.pooler.eval()
    modes = [module.training for module in model.modules()]
    assert error(jx.ntk(model, samples), expected) < 1e-10
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_gradient_checkpointing_models(name: str) -> None:
    model, samples = classifier(name), batch(LENGTHS)
    expected = kernel(model, samples)
    model.gradient_checkpointing_enable()
    model.train()
    assert error(jx.ntk(model, samples), expected) < 1e-10


def test_under_no_grad_and_wrapped_by_compile() -> None:
    model, samples = classifier("bert"), batch(LENGTHS)
    expected = kernel(model, samples)
    with torch.no_grad():
        assert error(jx.ntk(torch.compile(model), samples), expected) < 1e-10
