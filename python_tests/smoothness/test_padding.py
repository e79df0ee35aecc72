"""Padding changes nothing: neither norms nor the gradients of R."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jachess_ext as jx
from python_tests.models.oracles import Float64Casts

from .tiny_models import classifier, parameter_gradients, token_batch, with_positions

LENGTHS = [4, 3]
NAMES = ("bert", "roberta", "gpt2", "llama")
EXACT_64 = {"rtol": 1e-10, "atol": 1e-10}


def batch_for(name: str, side: str, total: int) -> dict:
    batch = token_batch(LENGTHS, side=side, total=total)
    # RoBERTa counts real tokens by itself; absolute positions must be told, rotary ones need not.
    return with_positions(batch) if name in ("bert", "gpt2") else batch


def regularised(name: str, batch: dict, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    model = classifier(name)
    defaults = {"weights": "uniform", "dimensions": 5, "seed": 11}
    with Float64Casts():  # Llama's RMS norms and rotary embeddings cast to float32
        out = jx.JacHess(model, **(defaults | settings))(batch)
    return out, parameter_gradients(out.loss, model)


def real_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """``[K, B, T]`` → ``[K, real tokens]``, row by row."""
    return values[:, mask.bool()]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("scope", ["all", "first", "last"])
@pytest.mark.parametrize("name", NAMES)
def test_jet_norms_and_gradients(name: str, scope: str, side: str) -> None:
    short, long = (batch_for(name, side, total) for total in (4, 8))
    (a, da), (b, db) = (regularised(name, batch, scope=scope) for batch in (short, long))
    torch.testing.assert_close(a.loss, b.loss, **EXACT_64)
    torch.testing.assert_close(a.jacobian, b.jacobian, **EXACT_64)
    torch.testing.assert_close(a.hessian, b.hessian, **EXACT_64)
    masks = short["attention_mask"], long["attention_mask"]
    for kind in ("jacobian_tokens", "hessian_tokens"):
        ours, theirs = (getattr(o.smoothness, kind) for o in (a, b))
        kept = real_tokens(ours, masks[0]), real_tokens(theirs, masks[1])
        torch.testing.assert_close(*kept, **EXACT_64)
        assert theirs[:, ~masks[1].bool()].eq(0).all()
    # The row of zeros in an embedding's gradient that padding looks up is no part of R.
    for key in da:
        torch.testing.assert_close(da[key], db[key], **EXACT_64, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("engine", ["reverse", "exact"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_other_engines(side: str, engine: str) -> None:
    settings = {"engine": engine, "scope": "last", "layers": [1], "dimensions": 2}
    settings |= {"hessian": engine == "reverse"}
    batches = [batch_for("gpt2", side, total) for total in (4, 8)]
    (a, da), (b, db) = (regularised("gpt2", batch, **settings) for batch in batches)
    torch.testing.assert_close(a.loss, b.loss, **EXACT_64)
    for key in da:
        torch.testing.assert_close(da[key], db[key], **EXACT_64)


@pytest.mark.parametrize("engine", ["jet", "reverse", "exact"])
def test_an_all_padding_row_is_refused(engine: str) -> None:
    batch = token_batch(LENGTHS)
    batch["attention_mask"][1] = 0
    with pytest.raises(ValueError, match=r"rows \[1\] of the batch are all padding.*drop them"):
        jx.smoothness(classifier("bert"), batch, engine=engine)
