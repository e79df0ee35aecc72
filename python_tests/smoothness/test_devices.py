"""On a GPU the whole path gives what it gives on the CPU: jets, norms, R, its gradients, a step.

In float64, where both run the same formulas; a seed draws the same directions on every device.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import jachess_ext as jx
from python_tests.ops.cases import DEVICES

from .tiny_models import classifier, parameter_gradients, token_batch

MODELS = ["bert", "gpt2", "opt", "llama"]


def on(device: str, name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The same weights and tokens on ``device``, one row padded."""
    batch = {key: value.to(device) for key, value in token_batch([4, 3]).items()}
    return copy.deepcopy(classifier(name, attention="sdpa")).to(device), batch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_norms_are_the_cpus(name: str, device: str) -> None:
    results = {}
    for place in ("cpu", device):
        model, batch = on(place, name)
        results[place] = jx.smoothness(model, batch, dimensions="all", directions=3, seed=5)
        assert results[place].jacobian_tokens.device.type == place
    for field in ("jacobian_tokens", "hessian_tokens"):
        expected, actual = (getattr(results[place], field) for place in ("cpu", device))
        assert expected.abs().max() > 0
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_train_mode_are_the_cpus(name: str, device: str) -> None:
    results = {}
    for place in ("cpu", device):
        model, batch = on(place, name)
        reg = jx.JacHess(model, weights="uniform", dimensions="all", seed=5)
        results[place] = parameter_gradients(reg(batch).total, model)
    assert torch.stack([g.abs().max() for g in results["cpu"].values()]).max() > 0
    for parameter, expected in results["cpu"].items():
        actual = results[device][parameter].cpu()
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8, msg=parameter)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_lowers_the_penalty(dtype: torch.dtype, device: str) -> None:
    """Also in the dtypes models train in; one set of directions, so that R is one function."""
    model, batch = on(device, "bert")
    model = model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        reg = jx.JacHess(model, weights="uniform", dimensions="all", seed=5)
        loss = reg(batch).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert losses[-1] < losses[0]
