"""Errors for bad batches and settings, before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jachess_ext as jx

from .tiny_models import classifier, token_batch

IDS = token_batch([4, 3])
FLOATS = torch.zeros(2, 4, 12, dtype=torch.float64)

BAD_BATCHES: list[tuple[Any, type, str]] = [
    ([1, 2], TypeError, "batch must be a dict of tensors as a collator yields it, not list"),
    ({}, ValueError, "neither input_ids nor inputs_embeds"),
    ({"attention_mask": IDS["attention_mask"]}, ValueError, "neither input_ids nor inputs_embeds"),
    (IDS | {"attention_mask": torch.ones(2, 5)}, ValueError, r"shape \[2, 5\].*need \[2, 4\]"),
    (
        IDS | {"attention_mask": torch.zeros(2, 4)},
        ValueError,
        r"rows \[0, 1\].*all padding.*drop them",
    ),
    ({"input_ids": torch.zeros(0, 4).long()}, ValueError, "the batch is empty"),
    ({"inputs_embeds": FLOATS / 0}, ValueError, "NaN or infinite"),
]


@pytest.mark.parametrize("engine", ["jet", "reverse"])
@pytest.mark.parametrize("batch, error, sentence", BAD_BATCHES)
def test_batches(batch: Any, error: type, sentence: str, engine: str) -> None:
    with pytest.raises(error, match=sentence):
        jx.smoothness(classifier("bert"), batch, engine=engine)


def test_inference_mode() -> None:
    with torch.inference_mode(), pytest.raises(ValueError, match=r"use torch\.no_grad\(\), or"):
        jx.smoothness(classifier("bert"), IDS, engine="reverse")


@pytest.mark.parametrize("engine", ["jet", "reverse"])
def test_integer_embeddings(engine: str) -> None:
    batch = {"inputs_embeds": torch.ones(2, 4, 12).long()}
    with pytest.raises(TypeError, match=r"dtype torch\.int64.*floating-point"):
        jx.smoothness(classifier("bert"), batch, engine=engine)


BAD_SETTINGS: list[tuple[dict, str]] = [
    ({"engine": "taylor"}, "engine is 'taylor'; expected one of 'jet', 'reverse', 'exact'"),
    ({"directions": 0}, "directions is 0; expected a number from 1 up"),
    ({"directions": 2.0}, r"directions is 2.0; expected a number"),
    ({"directions": True}, "directions is True; expected a number"),
    ({"directions": 1}, "the Hessian needs a pair of directions: pass directions=2"),
    ({"scope": "middle"}, "scope is 'middle'; expected one of 'all', 'first', 'last'"),
    ({"layers": "some"}, "layers is 'some'; expected 'all', 'logits' or a list"),
    ({"layers": [2]}, r"layers is \[2\], but the model has blocks 0 to 1"),
    ({"layers": []}, r"layers is \[\].*non-empty"),
    ({"dimensions": -1}, "dimensions is -1; expected 'all' or how many"),
    ({"dimensions": "most"}, "dimensions is 'most'; expected 'all' or how many"),
    ({"hessian_norm": "spectral"}, "hessian_norm is 'spectral'; expected one of"),
    ({"distribution": "uniform"}, "distribution is 'uniform'; expected one of 'gaussian'"),
]


@pytest.mark.parametrize("settings, sentence", BAD_SETTINGS)
def test_settings(settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        jx.smoothness(classifier("bert"), IDS, **settings)


BAD_REGULARISERS: list[tuple[dict, str]] = [
    ({"weights": "best"}, "weights is 'best'; expected one of uniform, inverse, norm, softmax"),
    ({"weights": [1.0, -1.0]}, r"weights is \[1.0, -1.0\]; expected non-negative finite numbers"),
    ({"weights": [float("nan")]}, "expected non-negative finite numbers"),
    ({"strength": -0.1}, "strength is -0.1; expected a finite number from 0 up"),
    ({"strength": float("inf")}, "strength is inf; expected a finite number"),
    ({"strength": "big"}, "strength is 'big'; expected a finite number"),
    ({"directions": 0}, "directions is 0"),
]


@pytest.mark.parametrize("settings, sentence", BAD_REGULARISERS)
def test_regularisers(settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        jx.JacHess(classifier("bert"), **settings)


def test_wrong_number_of_weights() -> None:
    reg = jx.JacHess(classifier("bert"), weights=[1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="weights has 3 numbers, but there are 2 layers"):
        reg(IDS)


def test_calibration_without_batches() -> None:
    with pytest.raises(ValueError, match="calibrate got no batches; expected at least one"):
        jx.JacHess(classifier("bert")).calibrate([])


def test_no_logits() -> None:
    batch = {key: value for key, value in IDS.items() if key != "labels"}
    with pytest.raises(ValueError, match="'logits' was asked for, but the model returned no"):
        jx.smoothness(classifier("bert").bert, batch, layers="logits")


def test_dimensions_zero_means_no_hessian() -> None:
    result = jx.smoothness(classifier("bert"), IDS, dimensions=0, directions=1)
    assert result.hessian is None and result.jacobian.shape == (2,)
