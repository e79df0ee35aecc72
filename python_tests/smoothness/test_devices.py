"""Jets, norms, R, its gradients and a training step are the same on a GPU and on the CPU.

In float64, where both run the same formulas; a seed draws the same directions on every device.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jachess_ext as jx
from jachess_ext.ops import library
from python_tests.ops.cases import DEVICES

from .host_reads import HostReads
from .tiny_models import classifier, parameter_gradients, token_batch

MODELS = ["bert", "gpt2", "opt", "llama"]


def on(device: str, name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The same weights and tokens on ``device``, one row padded."""
    batch = {key: value.to(device) for key, value in token_batch([4, 3]).items()}
    model = copy.deepcopy(classifier(name, attention="sdpa")).to(device)
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.register_forward_hook(_rotations_of_the_cpu, with_kwargs=True)
    return model, batch


def _rotations_of_the_cpu(module: nn.Module, given: Any, named: Any, found: Any) -> Any:
    """A rotary embedding takes its sines in float32, whose last bit depends on the device."""
    (x,) = given
    if x.device.type == "cpu":
        return None
    own, positions = copy.deepcopy(module).cpu(), named["position_ids"].cpu()
    parts = type(module).forward(own, torch.empty(0, dtype=x.dtype), positions)
    return tuple(part.to(x.device) for part in parts)


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


# ---- CUDA graphs -------------------------------------------------------------------------------


def test_every_kind_of_read_is_noted() -> None:
    x, mask = torch.arange(3.0), torch.tensor([True, False, True])
    with HostReads() as host:
        (
            x[0].item(),
            bool(mask[0]),
            x.tolist(),
            x.cpu(),
            mask.nonzero(),
            x[mask],
            torch.tensor([1.0]),
        )
        x.sum(), x[0], x[torch.arange(2)], x.where(mask, 0)  # none of these
    names = "_local_scalar_dense", "_local_scalar_dense", "tolist", "cpu", "nonzero"
    assert host.reads == [*names, "index by booleans", "lift_fresh"]


def with_dropout(device: str, name: str, p: float) -> tuple[nn.Module, dict[str, Any]]:
    model, batch = on(device, name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = p
    return model.train(), {**batch, "labels": torch.zeros(2, dtype=torch.int64, device=device)}


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_on_the_device_draws_what_the_number_draws(device: str) -> None:
    model, batch = on(device, "bert")
    by_number, by_tensor = (jx.JacHess(model, weights="uniform", seed=5) for _ in range(2))
    by_tensor.step = torch.zeros((), dtype=torch.int64, device=device)
    kept = by_tensor.step
    for _ in range(3):
        assert torch.equal(by_tensor(batch).loss, by_number(batch).loss)
    assert by_tensor.step is kept and by_tensor.state_dict() == by_number.state_dict()
    by_tensor.load_state_dict(by_number.state_dict() | {"step": 1})
    assert by_tensor.step is kept and kept.item() == 1


@pytest.mark.parametrize("name", MODELS)
def test_a_captured_step_reads_nothing_on_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward with dropout, as a CUDA graph would capture them; here on the CPU."""
    model, batch = with_dropout("cpu", name, 0.1)
    reg = jx.JacHess(model, weights="uniform", seed=None)
    reg.step = torch.zeros((), dtype=torch.int64)
    with HostReads() as eager:
        reg(batch)  # checks that the norms are finite
    assert "tolist" in eager.reads
    monkeypatch.setattr(library, "capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # transformers
    with HostReads() as captured:
        reg(batch).total.backward()
    assert not captured.reads
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_in_a_cuda_graph_draws_anew(dtype: torch.dtype) -> None:
    """JacHess, dropout and the optimiser; without dropout replays are what eager steps give."""
    for p in (0.1, 0.0):
        model, batch = with_dropout("cuda", "bert", p)
        model = model.to(dtype)
        reg = jx.JacHess(model, weights="uniform", seed=5)
        reg.step = torch.zeros((), dtype=torch.int64, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, capturable=True)

        def step(reg: Any = reg, batch: Any = batch, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = reg(batch).total
            loss.backward()
            optimizer.step()
            return loss.detach()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        reg.step.fill_(7)
        losses = []
        for _ in range(4):
            graph.replay()
            losses.append(loss.clone())
        assert reg.step.item() == 11
        assert len({float(x) for x in losses}) == 4
        if p == 0:
            reg.step = 7
            for expected in losses:
                torch.testing.assert_close(reg(batch).total.detach(), expected)
