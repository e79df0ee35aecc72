"""Padding on the left is moved to the right, with everything that belongs to its tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jachess_ext.tasks.padding import padded_right
from python_tests.smoothness.tiny_models import classifier, token_batch

LENGTHS = [5, 3, 1]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 3))
def test_left_padding_becomes_right_padding(lengths: list[int], extra: int) -> None:
    total = max(lengths) + extra
    left, right = (token_batch(lengths, side=side, total=total) for side in ("left", "right"))
    for name, value in padded_right(left).items():
        assert torch.equal(value, right[name]), name
    for name, value in padded_right(right).items():
        assert torch.equal(value, right[name]), name


def test_what_belongs_to_tokens_moves_along_and_nothing_else() -> None:
    mask = torch.tensor([[0, 0, 1, 1]])
    batch = {
        "attention_mask": mask,
        "inputs_embeds": torch.arange(8.0).reshape(1, 4, 2),
        "labels": torch.tensor([[-100, -100, 7, 8]]),
        "number": torch.tensor([3]),
        "name": "x",
    }
    moved = padded_right(batch)
    assert moved["inputs_embeds"].tolist() == [[[4, 5], [6, 7], [0, 1], [2, 3]]]
    assert moved["labels"].tolist() == [[7, 8, -100, -100]]
    assert moved["number"] is batch["number"] and moved["name"] == "x"


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "opt", "llama"])
def test_logits_do_not_depend_on_the_side(name: str) -> None:
    """Each text alone, without padding, is the reference."""
    model = classifier(name)
    left = token_batch(LENGTHS, side="left", total=7)
    with torch.no_grad():
        got = logits(model, padded_right(left))
        alone = torch.cat(
            [logits(model, row(left, i, slice(7 - n, None))) for i, n in enumerate(LENGTHS)]
        )
        raw = logits(model, left)
    torch.testing.assert_close(got, alone, rtol=1e-9, atol=1e-9)
    if name in ("bert", "roberta", "gpt2"):
        assert (raw - alone).abs().max() > 1e-3, "without the move the side would matter"


def row(batch: dict, index: int, tokens: slice) -> dict:
    return {k: v[index : index + 1, tokens] for k, v in batch.items() if v.ndim == 2}


def logits(model: Any, batch: dict) -> torch.Tensor:
    return model(**{k: v for k, v in batch.items() if k != "labels"}).logits
