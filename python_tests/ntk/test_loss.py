"""F(Θ, t) against scipy's matrix exponential, finite differences and real training."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor, nn

import jachess_ext as jx
from jachess_ext.ntk import Spectrum, measure_ntk

from .models import batch, classifier
from .oracles import gradients, logits


def _random_kernel(size: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(size, rank, dtype=torch.float64, generator=generator)
    return factor @ factor.T / rank, torch.randn(size, dtype=torch.float64, generator=generator)


def _by_expm(theta: Tensor, residual: Tensor, t: float, lr: float) -> float:
    decayed = scipy.linalg.expm(-lr * t * theta.numpy()) @ residual.numpy()
    return float(np.sum(decayed**2))


@pytest.mark.parametrize("rank", [12, 5], ids=["definite", "singular"])
@pytest.mark.parametrize("seed", range(3))
def test_against_expm(seed: int, rank: int) -> None:
    theta, residual = _random_kernel(12, rank, seed)
    times = torch.tensor([0.0, 0.3, 5.0, 40.0], dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = jx.ntk_loss(theta, residual, times, lr=0.1)
    assert found.shape == (4,) and found.dtype == torch.float64
    for value, t in zip(found.tolist(), times.tolist(), strict=True):
        assert value == pytest.approx(_by_expm(theta, residual, t, 0.1), rel=1e-10, abs=1e-12)


def test_four_dimensional_kernels_and_kept_spectra() -> None:
    theta, residual = _random_kernel(12, 12, 3)
    flat = jx.ntk_loss(theta, residual, 2.0, lr=0.1)
    shaped = jx.ntk_loss(theta.view(4, 3, 4, 3), residual.view(4, 3), 2.0, lr=0.1)
    kept = jx.ntk_loss(Spectrum.of(theta), residual, 2.0, lr=0.1)
    assert flat.shape == () and torch.equal(flat, shaped) and torch.equal(flat, kept)


def test_gradient_in_t_and_residual() -> None:
    theta, residual = _random_kernel(8, 8, 4)
    spectrum = Spectrum.of(theta)
    t = torch.tensor([0.0, 1.5, 10.0], dtype=torch.float64, requires_grad=True)
    residual.requires_grad_(True)
    # At t = 0 a difference would step below zero, where F refuses: the others are checked.
    inner = t.detach()[1:].requires_grad_(True)
    assert torch.autograd.gradcheck(lambda t, r: spectrum.loss(r, t, 0.1), (inner, residual))
    assert torch.autograd.gradcheck(lambda t, r: spectrum.log_loss(r, t, 0.1), (inner, residual))
    (slope,) = torch.autograd.grad(spectrum.loss(residual, t, 0.1).sum(), t)
    at_zero = -2 * 0.1 * residual @ theta @ residual  # F'(0) = −2 η rᵀ Θ r
    assert slope[0].item() == pytest.approx(at_zero.item(), rel=1e-12)


def test_log_space_where_the_loss_underflows() -> None:
    theta, residual = _random_kernel(6, 6, 5)
    spectrum = Spectrum.of(theta)
    t = torch.tensor(1e9, dtype=torch.float64, requires_grad=True)
    assert spectrum.loss(residual, t, 1.0).item() == 0.0
    value = spectrum.log_loss(residual, t, 1.0)
    (slope,) = torch.autograd.grad(value, t)
    smallest = spectrum.eigenvalues[0].item()
    along = (spectrum.eigenvectors[:, 0] @ residual).abs().log().item()
    assert value.item() == pytest.approx(2 * along - 2 * smallest * 1e9, rel=1e-12)
    assert slope.item() == pytest.approx(-2 * smallest, rel=1e-12)
    early = torch.tensor(0.7, dtype=torch.float64)
    direct = spectrum.loss(residual, early, 1.0).log()
    assert spectrum.log_loss(residual, early, 1.0).item() == pytest.approx(direct.item(), rel=1e-12)
    assert spectrum.log_loss(torch.zeros(6), early, 1.0).item() == -math.inf


def test_round_off_is_clipped_and_reported() -> None:
    theta, residual = _random_kernel(6, 2, 6)
    low = -1e-5 * float(torch.linalg.eigvalsh(theta)[-1])
    vector = torch.linalg.eigh(theta)[1][:, 0]
    theta = (theta + low * torch.outer(vector, vector)).float()
    with pytest.warns(RuntimeWarning, match=r"of 6 eigenvalues of theta are negative, down to -"):
        spectrum = Spectrum.of(theta)
    assert spectrum.clipped >= 1 and spectrum.eigenvalues.min() == 0
    assert spectrum.most_negative == pytest.approx(low, rel=0.05)
    assert spectrum.asymmetry < 1e-6
    late = spectrum.loss(residual, 1e12, 1.0)  # no eigenvalue below zero: nothing blows up
    assert late <= residual.square().sum()


def test_follows_gradient_descent_of_the_linearised_model() -> None:
    """f0 + J Δ, trained in Δ by small steps on ½‖f − y‖², follows F(t) within 1 %."""
    model, samples = classifier("bert"), batch([5, 4, 6])
    target = nn.functional.one_hot(samples["labels"], 3).double()
    with torch.no_grad():
        start = logits(model)(samples)
    spectrum = Spectrum.of(jx.ntk(model, samples))
    lr = 0.02 / spectrum.eigenvalues[-1].item()

    tangent = gradients(logits(model), samples, list(model.parameters()))
    change = torch.zeros(tangent.shape[-1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([change], lr=lr)
    seen = {}
    for step in range(2001):
        loss = (start + tangent @ change - target).square().sum() / 2
        if step % 400 == 0:
            seen[step] = 2 * loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    times = torch.tensor(list(seen), dtype=torch.float64)
    predicted = jx.ntk_loss(spectrum, start - target, times, lr)
    assert predicted[-1] < 0.5 * predicted[0]  # the loss moves, so that agreement says something
    for value, loss_seen in zip(predicted.tolist(), seen.values(), strict=True):
        assert value == pytest.approx(loss_seen, rel=0.01)


BAD_KERNELS = [
    (torch.zeros(2, 3), ValueError, r"theta has shape \[2, 3\]; expected"),
    (torch.zeros(2, 3, 3, 2), ValueError, r"theta has shape \[2, 3, 3, 2\]; expected"),
    (torch.zeros(0, 0), ValueError, r"theta has shape \[0, 0\]"),
    (torch.full((2, 2), torch.nan), ValueError, "theta is NaN or infinite"),
    (torch.tensor([[1.0, 0.0], [0.5, 1.0]]), ValueError, "theta is not symmetric .*itself"),
    (torch.diag(torch.tensor([1.0, -0.1])), ValueError, "eigenvalue -1.*positive semidefinite"),
]


@pytest.mark.parametrize("theta, kind, sentence", BAD_KERNELS)
def test_bad_kernels(theta: Tensor, kind: type, sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        jx.ntk_loss(theta, torch.ones(2), 1.0, 0.1)


BAD_ARGUMENTS = [
    (torch.ones(3), 1.0, 0.1, r"residual is \[3\], but the kernel has 2 rows"),
    (torch.tensor([1.0, torch.nan]), 1.0, 0.1, "residual is NaN or infinite"),
    (torch.ones(2), -1.0, 0.1, "t holds a negative number"),
    (torch.ones(2), math.nan, 0.1, "t holds a negative number or NaN"),
    (torch.ones(2), 1.0, -0.1, "lr is -0.1; expected a finite learning rate"),
    (torch.ones(2), 1.0, math.inf, "lr is inf"),
]


@pytest.mark.parametrize("residual, t, lr, sentence", BAD_ARGUMENTS)
def test_bad_arguments(residual: Tensor, t: float, lr: float, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        jx.ntk_loss(torch.eye(2), residual, t, lr)


def test_a_spectrum_says_what_it_is_in_two_lines() -> None:
    """Whatever its size; and so do a measurement and its report, but for their parameters."""
    for size in (1, 3, 500):
        spectrum = Spectrum.of(torch.diag(torch.arange(size, dtype=torch.float64)))
        text = repr(spectrum)
        assert text == str(spectrum) and len(text.splitlines()) == 2 and len(text) < 250
        assert f"Spectrum of {size} eigenvalues, 0 to {size - 1}" in text
        assert "nan" not in text
    theta = torch.eye(6).reshape(2, 3, 2, 3) * 2
    assert "trace 12, effective rank 6" in repr(Spectrum.of(theta))
    measured = measure_ntk(torch.nn.Linear(3, 2), torch.randn(40, 3))
    assert len(repr(measured).splitlines()) < 8
    assert repr(measured).startswith("kernel [40, 2, 40, 2]\nNTK of 40 samples")


def test_the_plot_of_a_spectrum() -> None:
    pytest.importorskip("matplotlib").use("agg")
    spectrum = Spectrum.of(torch.diag(torch.tensor([0.0, 1.0, 4.0, 2.0])))
    axes = spectrum.plot()
    (line,) = axes.get_lines()
    assert line.get_xydata().tolist() == [[1, 4], [2, 2], [3, 1]]
    assert axes.get_yscale() == "log" and spectrum.plot(axes) is axes
    assert not Spectrum.of(torch.zeros(2, 2)).plot().get_lines()[0].get_xydata().size


def test_public_names() -> None:
    assert jx.Spectrum is Spectrum and jx.measure_ntk is measure_ntk
