"""Norms, penalty and gradients do not change with padding, the order of rows, the ids' strides, a
second call or float32."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import jachess_ext as jx
from python_tests.covering import pairs
from python_tests.models.oracles import Float64Casts

from .tiny_models import classifier, parameter_gradients, token_batch, with_positions

NAMES = ("bert", "roberta", "gpt2", "llama", "opt")
ENGINES: dict[str, dict[str, Any]] = {
    "jet": {"dimensions": "all"},
    "reverse": {"dimensions": 2, "layers": [1], "scope": "last"},
    "exact": {"layers": [1], "hessian": False},
}
LENGTHS = [4, 3, 5]
EXACT = {"rtol": 1e-9, "atol": 1e-10}

each_engine = pytest.mark.parametrize(
    "name, engine", [("bert", "jet"), ("llama", "jet"), ("bert", "reverse")]
)


def batch_of(
    name: str, side: str = "right", *, lengths: list[int] | None = None, total: int = 6
) -> dict[str, Tensor]:
    batch = token_batch(lengths or LENGTHS, side=side, total=total)
    # RoBERTa and OPT count real tokens themselves, and Llama's positions are relative.
    return with_positions(batch) if name in ("bert", "gpt2") else batch


def output_and_numbers(model: Any, batch: dict, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a regulariser's output; and its loss, norms by layer, and the loss's gradients."""
    exact_casts = Float64Casts() if model.dtype == torch.float64 else contextlib.nullcontext()
    with exact_casts:  # Llama's RMS norms and rotary embeddings cast to float32
        out = jx.JacHess(model, weights="uniform", seed=11, **settings)(batch)
    values = {"loss": out.loss, "jacobian": out.jacobian, **parameter_gradients(out.loss, model)}
    return out, values | ({} if out.hessian is None else {"hessian": out.hessian})


def numbers(model: Any, batch: dict, engine: str) -> dict[str, Tensor]:
    return output_and_numbers(model, batch, engine=engine, **ENGINES[engine])[1]


@functools.cache
def plain_numbers(name: str, engine: str) -> dict[str, Tensor]:
    return numbers(classifier(name), batch_of(name), engine)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert actual.keys() == expected.keys() and expected["loss"].item() > 0
    for key, value in expected.items():
        assert value.isfinite().all()
        torch.testing.assert_close(actual[key].to(value), value, **(tolerance or EXACT))


@pytest.mark.parametrize(  # "reverse" draws for padding, too
    "name, engine", [*((name, "jet") for name in NAMES), ("gpt2", "exact")]
)
def test_padding_side(name: str, engine: str) -> None:
    assert_same(
        numbers(classifier(name), batch_of(name, "left"), engine), plain_numbers(name, engine)
    )


@pytest.mark.parametrize(
    "scope_side, name",
    pairs(
        [("all", "right"), ("all", "left"), ("first", "left"), ("last", "right")],
        ["bert", "roberta", "gpt2", "llama"],
        each=2,
    ),
)
def test_more_padding(scope_side: tuple[str, str], name: str) -> None:
    """Also in the gradient of an embedding that only padding looks up."""
    scope, side = scope_side
    settings: dict[str, Any] = {"scope": scope, "dimensions": 5}
    short, long = (batch_of(name, side, lengths=[4, 3], total=total) for total in (4, 8))
    out, expected = output_and_numbers(classifier(name), short, **settings)
    other, values = output_and_numbers(classifier(name), long, **settings)
    assert_same(values, expected, rtol=1e-10, atol=1e-10)
    real, wide = short["attention_mask"].bool(), long["attention_mask"].bool()
    for field in ("jacobian_tokens", "hessian_tokens"):
        ours, theirs = (getattr(o.smoothness, field) for o in (out, other))
        torch.testing.assert_close(theirs[:, wide], ours[:, real], rtol=1e-10, atol=1e-10)
        assert theirs[:, ~wide].eq(0).all()


@pytest.mark.parametrize("side, engine", [("right", "reverse"), ("left", "exact")])
def test_more_padding_of_other_engines(side: str, engine: str) -> None:
    batches = [batch_of("gpt2", side, lengths=[4, 3], total=total) for total in (4, 8)]
    expected, values = (numbers(classifier("gpt2"), batch, engine) for batch in batches)
    assert_same(values, expected, rtol=1e-10, atol=1e-10)


def test_order_of_rows() -> None:
    """The other engines draw directions for each row."""
    order = torch.tensor([2, 0, 1])
    moved = {key: value[order] for key, value in batch_of("gpt2").items()}
    assert_same(numbers(classifier("gpt2"), moved, "exact"), plain_numbers("gpt2", "exact"))


@each_engine
def test_ids_in_columns(name: str, engine: str) -> None:
    model, batch = classifier(name), batch_of(name)
    strided = {k: v.t().contiguous().t() if v.ndim == 2 else v for k, v in batch.items()}
    assert_same(numbers(model, strided, engine), plain_numbers(name, engine))


@each_engine
def test_a_second_call(name: str, engine: str) -> None:
    """Of another regulariser with the same seed, after the model took part in a training step."""
    model, batch = classifier(name), batch_of(name)
    settings: dict[str, Any] = {"engine": engine, "weights": "uniform"} | ENGINES[engine]
    jx.JacHess(model, **settings)(batch).loss.backward()
    assert_same(numbers(model, batch, engine), plain_numbers(name, engine), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_float32(name: str) -> None:
    single = numbers(classifier(name).float(), batch_of(name), "jet")
    assert_same(single, plain_numbers(name, "jet"), rtol=2e-3, atol=2e-4)
