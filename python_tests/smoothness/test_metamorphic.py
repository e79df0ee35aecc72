"""What means the same has the same norms, penalty and gradients: padding on either side, the order
of rows, ids that lie in memory otherwise, a second call, float32."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import jachess_ext as jx
from python_tests.models.oracles import Float64Casts

from .tiny_models import classifier, parameter_gradients, token_batch, with_positions

NAMES = ("bert", "roberta", "gpt2", "llama", "opt")
ENGINES: dict[str, dict[str, Any]] = {
    "jet": {"dimensions": "all"},
    "reverse": {"dimensions": "all", "layers": [1], "scope": "last"},
    "exact": {"layers": [1], "hessian": False},
}
LENGTHS = [4, 3, 5]
EXACT = {"rtol": 1e-9, "atol": 1e-10}

each_model = pytest.mark.parametrize("name", NAMES)
each_engine = pytest.mark.parametrize("engine", ENGINES)


def batch_of(name: str, side: str = "right") -> dict[str, Tensor]:
    batch = token_batch(LENGTHS, side=side, total=6)
    return with_positions(batch) if name in ("bert", "gpt2") else batch


def numbers(model: Any, batch: dict, engine: str) -> dict[str, Tensor]:
    """Loss, norms by layer, and the loss's gradients."""
    given = {"weights": "uniform", "seed": 11, "engine": engine} | ENGINES[engine]
    exact_casts = Float64Casts() if model.dtype == torch.float64 else contextlib.nullcontext()
    with exact_casts:  # Llama's RMS norms and rotary embeddings cast to float32
        out = jx.JacHess(model, **given)(batch)
    found = {"loss": out.loss, "jacobian": out.jacobian, **parameter_gradients(out.loss, model)}
    return found | ({} if out.hessian is None else {"hessian": out.hessian})


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert found.keys() == expected.keys() and float(expected["loss"]) > 0
    for key, value in expected.items():
        assert value.isfinite().all()
        torch.testing.assert_close(found[key].to(value), value, **(tolerance or EXACT))


@pytest.mark.parametrize("engine", ["jet", "exact"])  # "reverse" draws for padding, too
@each_model
def test_padding_side(name: str, engine: str) -> None:
    model = classifier(name)
    right, left = (numbers(model, batch_of(name, side), engine) for side in ("right", "left"))
    assert_same(left, right)


@each_model
def test_order_of_rows(name: str) -> None:
    """The other engines draw directions for each row."""
    model, batch, engine = classifier(name), batch_of(name), "exact"
    order = torch.tensor([2, 0, 1])
    moved = {key: value[order] for key, value in batch.items()}
    assert_same(numbers(model, moved, engine), numbers(model, batch, engine))


@each_engine
@each_model
def test_ids_in_columns(name: str, engine: str) -> None:
    model, batch = classifier(name), batch_of(name)
    strided = {k: v.t().contiguous().t() if v.ndim == 2 else v for k, v in batch.items()}
    assert_same(numbers(model, strided, engine), numbers(model, batch, engine))


@each_engine
@each_model
def test_a_second_call(name: str, engine: str) -> None:
    """Of another regulariser with the same seed, after the model took part in a training step."""
    model, batch = classifier(name), batch_of(name)
    before = numbers(model, batch, engine)
    jx.JacHess(copy.deepcopy(model), weights="uniform", **ENGINES[engine])(batch).loss.backward()
    assert_same(numbers(model, batch, engine), before, rtol=0, atol=0)


@each_engine
@each_model
def test_float32(name: str, engine: str) -> None:
    model, batch = classifier(name), batch_of(name)
    exact = numbers(model, batch, engine)
    found = numbers(copy.deepcopy(model).float(), batch, engine)
    assert_same(found, exact, rtol=2e-3, atol=2e-4)
