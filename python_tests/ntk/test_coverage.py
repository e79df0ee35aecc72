"""Which parameters count, how each is covered, and that none is dropped in silence."""

from __future__ import annotations

import warnings
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


class TimeShared(nn.Module):
    """One layer called at every step of a recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        states = []
        for t in range(x.shape[1]):
            state = torch.tanh(self.step(state) + x[:, t])
            states.append(state)
        return torch.stack(states, 1)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) @ self.inner.weight


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


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


class FlattenedTokens(nn.Module):
    """Samples and tokens as one dimension (as OPT's layers once did)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(x.reshape(-1, 6))).view_as(x)


class TimeFirst(nn.Module):
    """[T, N, d]: the first dimension does not number samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


class Positions(nn.Module):
    """Position embeddings for all samples at once, with and without a dimension for them."""

    def __init__(self) -> None:
        super().__init__()
        self.one_row = nn.Embedding(8, 6)
        self.no_row = nn.Embedding(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.arange(x.shape[1])
        return x + self.one_row(t[None]) + self.no_row(t).unsqueeze(0)


class Broadcast(nn.Module):
    """A position embedding that meets the samples by broadcasting alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(torch.arange(x.shape[1]))


class InPlace(nn.Module):
    """The layer's output is overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mul_(2).sin_()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Attention(nn.Module):
    """torch's own: its projections are parameters of the module or read past their module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)[0]


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.inner(x)
        return x + shift


# body -> the forms its parameters may take.
BODIES: dict[type[nn.Module], set[str]] = {
    TimeShared: {"A", "B", "dense"},
    Transposed: {"per_sample", "dense"},
    Convolution: {"dense"},
    ShiftedNorm: {"dense"},
    Scaled: {"dense", "per_sample"},
    FlattenedTokens: {"A", "B", "dense"},
    TimeFirst: {"per_sample"},
    Positions: {"matches"},
    Broadcast: {"per_sample"},
    InPlace: {"A", "B", "dense", "per_sample"},  # autograd moves an overwritten view's history
    Checkpointed: {"A", "B", "dense"},
    Attention: {"A", "B", "dense", "per_sample"},
    Unused: {"none"},
}


def _plain(model: nn.Module) -> Any:
    return lambda batch: model(**batch)


def _toy(body: type[nn.Module]) -> Toy:
    torch.manual_seed(3)
    return Toy(body()).double()


IDS = {"input_ids": torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(1))}
OTHER = {"input_ids": torch.randint(0, 20, (3, 5), generator=torch.Generator().manual_seed(2))}


@pytest.mark.filterwarnings("ignore:jachess_ext.ntk")
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_way_of_using_a_parameter(body: type[nn.Module]) -> None:
    model = _toy(body)
    found = measure_ntk(model, IDS)
    assert error(found.theta, kernel(model, IDS, f=_plain(model))) < 1e-10
    forms = {found.report.form_of(n) for n, _ in model.named_parameters() if "body" in n}
    assert forms <= BODIES[body]
    cross = jx.ntk(model, IDS, OTHER)
    assert error(cross, kernel(model, IDS, OTHER, f=_plain(model))) < 1e-10


@pytest.mark.parametrize("samples", [1, 2, 5], ids="N={}".format)
@pytest.mark.filterwarnings("ignore:jachess_ext.ntk")
def test_as_many_samples_as_tokens(samples: int) -> None:
    """Sizes that agree by chance (N = T, N = 1) do not confuse samples with tokens."""
    for body in (TimeFirst, Positions, FlattenedTokens, Scaled):
        model = _toy(body)
        ids = {"input_ids": torch.arange(samples * 5).view(samples, 5) % 20}
        assert error(jx.ntk(model, ids), kernel(model, ids, f=_plain(model))) < 1e-10


def test_the_fallback_names_the_parameter_and_the_reason_once() -> None:
    model = _toy(Transposed)
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


def test_samples_that_depend_on_one_another_are_refused() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            return x - x.mean(0, keepdim=True)

    with pytest.raises(RuntimeError, match="depend on the other samples"):
        jx.ntk(_toy(Mixing), IDS)


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
    model = _toy(TimeShared)
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


def test_one_tensor_as_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(parameters)
    flat = torch.cat([g.detach().flatten(2) for g in jacobian.values()], -1)
    assert error(jx.ntk(model, x), torch.einsum("ncp,mdp->ncmd", flat, flat)) < 1e-10
