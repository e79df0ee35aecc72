"""Complex parameters, and complex numbers on the way, count as pairs of real ones everywhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from transformers.modeling_outputs import SequenceClassifierOutput

import jachess_ext as jx
from jachess_ext.ntk import Spectrum, kernel_drift, label_alignment, measure_ntk
from jachess_ext.ops import ntk_gram, ntk_materialised

from .oracles import error

COMPLEX, WIDTH = torch.complex128, 8


def _normal(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=dtype) / 2)


class Body(nn.Module):
    """Parameters, and what is made of x, [N, 8], with them; then a linear layer."""

    def __init__(
        self, parameters: dict[str, nn.Parameter | nn.Module], use: Callable[[Any, Tensor], Tensor]
    ) -> None:
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, value)
        self.use = use
        self.head = nn.Linear(WIDTH, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.use(self, x)))


class Spectral(nn.Module):
    """The spectral convolution of Fourier neural operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = _normal(2, 2, 4, dtype=COMPLEX)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x)
        out = torch.zeros_like(modes)
        out[..., :4] = torch.einsum("bik,iok->bok", modes[..., :4], self.weight)
        return torch.fft.irfft(out, n=x.shape[-1])


class Fourier(nn.Module):
    """A Fourier neural operator: spectral convolutions beside pointwise ones."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, 2, 1, dtype=torch.float64)
        self.spectral = nn.ModuleList([Spectral(), Spectral()])
        self.pointwise = nn.ModuleList([nn.Conv1d(2, 2, 1, dtype=torch.float64) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x[:, None])
        for wide, point in zip(self.spectral, self.pointwise, strict=True):
            x = torch.tanh(wide(x) + point(x))
        return self.head(x.mean(1))


def _unitary(self: Any, x: Tensor) -> Tensor:
    """A linear recurrence with diagonal complex transitions."""
    state = 0j * x[:, :4]
    for t in range(WIDTH):
        state = torch.exp(1j * self.angle - self.decay.exp()) * state + self.into * x[:, t, None]
    return torch.view_as_real(state).flatten(1)


BODIES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Any, Tensor], Tensor]]] = {
    "linear": (
        lambda: {"a": nn.Linear(8, 8, dtype=COMPLEX)},
        lambda self, x: self.a(x + 0j).abs(),
    ),
    "matrix": (
        lambda: {"a": _normal(8, 8, dtype=COMPLEX)},
        lambda self, x: ((x + 0j) @ self.a.conj().T).real,
    ),
    "both ways": (
        lambda: {"a": _normal(8, 8, dtype=COMPLEX)},
        lambda self, x: ((x + 0j) @ self.a @ self.a.mH).abs(),
    ),
    "product": (
        lambda: {"a": _normal(8, dtype=COMPLEX)},
        lambda self, x: (self.a * torch.exp(1j * x)).real,
    ),
    "one number": (lambda: {"a": _normal(dtype=COMPLEX)}, lambda self, x: (self.a * x).abs()),
    "convolution": (
        lambda: {"a": nn.Conv1d(1, 1, 3, padding=1, dtype=COMPLEX)},
        lambda self, x: self.a(x[:, None] + 0j).abs()[:, 0],
    ),
    "real product": (
        lambda: {"a": _normal(8)},
        lambda self, x: (self.a * torch.exp(1j * x)).square().imag,
    ),
    "two reals": (
        lambda: {"a": _normal(8), "b": _normal(8)},
        lambda self, x: (torch.complex(self.a, self.b) * torch.exp(1j * x)).real,
    ),
    "view of reals": (
        lambda: {"a": _normal(8, 2)},
        lambda self, x: (torch.view_as_complex(self.a) * torch.exp(1j * x)).real,
    ),
    "layer between": (
        lambda: {"a": nn.Linear(8, 8, dtype=torch.float64), "b": _normal(5, dtype=COMPLEX)},
        lambda self, x: torch.fft.irfft(torch.fft.rfft(self.a(x)) * self.b, n=8),
    ),
    "recurrence": (
        lambda: {"angle": _normal(4), "decay": _normal(4), "into": _normal(4, dtype=COMPLEX)},
        _unitary,
    ),
}
NAMES = [*BODIES, "fourier"]


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name == "fourier":
        return Fourier()
    parameters, use = BODIES[name]
    return Body(parameters(), use)


def inputs(samples: int, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, WIDTH, dtype=torch.float64, generator=generator)


def jacobian(model: nn.Module, f: Callable[[Any], Tensor], x: Tensor) -> Tensor:
    """[N, C, numbers], by `torch.func.jacrev` over parameters as pairs of real numbers."""
    plain = dict(model.named_parameters())
    reals = {
        name: torch.view_as_real(p.detach()).clone() if p.is_complex() else p.detach()
        for name, p in plain.items()
    }

    def of(reals: dict[str, Tensor]) -> Tensor:
        values = {
            name: torch.view_as_complex(v) if plain[name].is_complex() else v
            for name, v in reals.items()
        }
        return f(functional_call(model, values, (x,)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = jacrev(of)(reals)
    return torch.cat([part.flatten(2) for part in (p[..., None] for p in parts.values())], -1)


def _kernel(model: nn.Module, x: Tensor, y: Tensor, f: Callable[[Any], Tensor]) -> Tensor:
    left, right = jacobian(model, f, x), jacobian(model, f, y)
    return torch.einsum("ncp,mdp->ncmd", left, right)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "jachess_ext.ntk: exact per-sample", RuntimeWarning)
        yield


FEW = ["linear", "recurrence", "fourier"]


@pytest.mark.parametrize(
    ("name", "method"),
    [*product(NAMES, ["auto", "per_sample"]), *product(FEW, ["gram", "materialise"])],
)
def test_methods(name: str, method: Any) -> None:
    model, x = make(name), inputs(5)
    measured = measure_ntk(model, x, method=method)
    assert measured.theta.dtype == torch.float64
    assert error(measured.theta, _kernel(model, x, x, lambda out: out)) < 1e-12
    assert measured.report.parameters == sum(
        p.numel() * (1 + p.is_complex()) for p in model.parameters()
    )


LABELS = torch.tensor([0, 2, 1, 1, 0])
OUTPUTS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "sum": ("sum", lambda out: out.sum(1, keepdim=True) / 3**0.5),
    "label": ("label", lambda out: out.gather(1, LABELS[:, None])),
    "callable": (lambda out, batch: out[:, :1].exp(), lambda out: out[:, :1].exp()),
}


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("name", FEW)
def test_outputs(name: str, outputs: str) -> None:
    model, x = make(name), inputs(5)
    forward = model.forward
    model.forward = lambda x, labels=None: forward(x)  # type: ignore[assignment]
    how, f = OUTPUTS[outputs]
    theta = jx.ntk(model, {"x": x, "labels": LABELS}, outputs=how)
    assert error(theta, _kernel(model, x, x, f)) < 1e-12


@pytest.mark.parametrize("name", FEW)
def test_projections_sides_and_blocks(name: str) -> None:
    model, x, y = make(name), inputs(7), inputs(3, 6)
    expected = _kernel(model, x, y, lambda out: out)
    assert error(jx.ntk(model, x, y), expected) < 1e-12
    with pytest.raises(ValueError, match="too few") as caught:
        jx.ntk(model, x, y, memory_budget=100)
    least = int(str(caught.value).split("pass at least ")[1].split(",")[0])
    blocks = []
    for budget in (least, 2 * least):
        measured = measure_ntk(model, x, y, memory_budget=budget)
        assert error(measured.theta, expected) < 1e-12
        blocks.append(measured.report.blocks)
    assert blocks[0] > blocks[1]
    signs = torch.tensor([[1.0, -1.0, 1.0], [1.0, 1.0, -1.0]], dtype=torch.float64).T / 2**0.5
    theta = jx.ntk(model, x, outputs=lambda out, batch: out @ signs)
    assert error(theta, _kernel(model, x, x, lambda out: out @ signs)) < 1e-12
    spectrum = Spectrum.of(theta)
    residual = torch.randn(7, 2, dtype=torch.float64)
    matrix = theta.flatten(2).flatten(0, 1)
    moved = torch.linalg.matrix_exp(-0.3 * matrix) @ residual.flatten()
    loss = jx.ntk_loss(spectrum, residual, 3.0, 0.1)
    torch.testing.assert_close(loss, moved.square().sum(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", FEW)
def test_single_precision(name: str) -> None:
    double = make(name)
    x = inputs(5)
    expected = _kernel(double, x, x, lambda out: out)
    single = make(name)
    for module in single.modules():
        for key, p in module._parameters.items():
            if p is not None:
                dtype = torch.complex64 if p.is_complex() else torch.float32
                module._parameters[key] = nn.Parameter(p.detach().to(dtype))
    theta = jx.ntk(single, x.float())
    assert theta.dtype == torch.float32
    assert error(theta, expected) < 1e-5


def test_complex_outputs_are_refused() -> None:
    model = nn.Linear(8, 2, dtype=COMPLEX)
    x = inputs(3).to(COMPLEX)
    with pytest.raises(ValueError, match=r"outputs are torch\.complex128; a kernel is of real"):
        jx.ntk(model, x)
    theta = jx.ntk(model, x, outputs=lambda out, batch: torch.view_as_real(out).flatten(1))
    expected = _kernel(model, x, x, lambda out: torch.view_as_real(out).flatten(1))
    assert error(theta, expected) < 1e-12


def test_complex_kernels_residuals_and_labels_are_refused() -> None:
    dtype = torch.complex64
    real = torch.eye(4).reshape(2, 2, 2, 2)
    theta, labels = real.to(dtype), torch.tensor([0.0, 1.0])
    calls: list[Callable[[], Any]] = [
        lambda: Spectrum.of(theta),
        lambda: kernel_drift(theta, real),
        lambda: kernel_drift(real, theta),
        lambda: label_alignment(theta, labels),
        lambda: label_alignment(real, labels.to(dtype)),
        lambda: jx.ntk_loss(real, torch.ones(2, 2, dtype=dtype), 1.0, 0.1),
        lambda: ntk_gram(torch.ones(2, 3, 4, dtype=dtype), [torch.ones(1, 2, 3, 5, dtype=dtype)]),
        lambda: ntk_materialised(
            torch.ones(2, 3, 4, dtype=dtype), [torch.ones(1, 2, 3, 5, dtype=dtype)]
        ),
    ]
    for call in calls:
        with pytest.raises((TypeError, RuntimeError), match=r"complex.*; expected"):
            call()


# ---- smoothness ------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Hidden states that complex weights make of token embeddings, or a pair of real ones each."""

    def __init__(self, written_out: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.written_out = written_out
        self.embed = nn.Embedding(9, 6, dtype=torch.float64)
        weights = [torch.randn(6, 6, dtype=COMPLEX) / 3 for _ in range(2)]
        made = [torch.view_as_real(w) if written_out else w for w in weights]
        self.weights = nn.ParameterList([nn.Parameter(w.clone()) for w in made])
        self.head = nn.Linear(6, 2, dtype=torch.float64)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(
        self, input_ids: Tensor, output_hidden_states: bool = True, labels: Tensor | None = None
    ) -> Any:
        states = [self.embed(input_ids)]
        for weight in self.weights:
            x = states[-1]
            if self.written_out:
                real, imaginary = x @ weight[..., 0], x @ weight[..., 1]
                squares = real.square() - imaginary.square()
            else:
                squares = ((x + 0j) @ weight).square().real
            states.append(x + torch.tanh(squares) + squares.mean(1, keepdim=True))
        logits = self.head(states[-1].mean(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=tuple(states))


IDS = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]])}


@pytest.mark.parametrize("engine", ["jet", "reverse"])
def test_penalty_and_its_gradients(engine: Any) -> None:
    batch = IDS | {"labels": torch.tensor([0, 1])}
    results = []
    for reals in (False, True):
        model = Tokens(reals)
        regulariser = jx.JacHess(model, seed=1, engine=engine, weights="uniform", normalize=True)
        regulariser.calibrate([batch])
        total = regulariser(batch).total
        total.backward()
        gradients = [
            torch.view_as_real(p.grad) if p.grad.is_complex() else p.grad
            for p in model.parameters()
            if p.grad is not None
        ]
        probe = jx.SmoothnessProbe(batch, hessian=True)(model)
        results.append((total, gradients, list(probe.values())))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("engine", ["jet", "reverse"])
def test_complex_hidden_states_are_refused(engine: Any) -> None:
    model = Tokens(False)
    forward = model.forward

    def turned(input_ids: Tensor, output_hidden_states: bool = True) -> Any:
        result = forward(input_ids)
        states = result.hidden_states
        result.hidden_states = (states[0], states[1] * (1 + 1j), states[2])
        return result

    model.forward = turned  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"torch\.complex128; expected real .*view_as_real"):
        jx.smoothness(model, IDS, engine=engine)
