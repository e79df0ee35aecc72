"""More than four directions take several passes, between which the model must not change."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jachess_ext as jx
from jachess_ext.jet.engine.tensor import primal_of
from python_tests.smoothness.tiny_models import classifier, token_batch

CALLS = {"count": 0}
GENERATOR = torch.Generator()
BUFFER = torch.ones((), dtype=torch.float64)


def count() -> float:
    CALLS["count"] += 1
    return float(CALLS["count"])


FACTORS: dict[str, Callable[[], Tensor | float]] = {
    "counter": count,
    "buffer": lambda: BUFFER.mul_(1.01).clone(),
    "generator": lambda: torch.rand((), generator=GENERATOR, dtype=torch.float64),
    "NumPy": np.random.rand,
    "random": random.random,
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_model_that_changes_is_refused(name: str) -> None:
    model, batch = classifier("bert"), token_batch([3, 2])
    block: nn.Module = model.bert.encoder.layer[0].output
    block.register_forward_hook(lambda module, args, output: output * FACTORS[name]())
    jx.smoothness(model, batch, directions=4, seed=0)  # in one pass
    with pytest.raises(RuntimeError, match="not the same function"):
        jx.smoothness(model, batch, directions=5, seed=0)


def test_dropout_draws_anew_in_each_pass() -> None:
    """As in the replay of a CUDA graph, which sets no generator back."""
    model, batch = classifier("bert", dropout=0.5).train(), token_batch([3, 2])
    values: list[Tensor] = []
    model.bert.encoder.register_forward_hook(
        lambda module, args, output: values.append(primal_of(output.last_hidden_state).detach())
    )
    jx.smoothness(model, batch, directions=9, seed=0)
    first, second, third = values
    assert not torch.equal(first, second) and not torch.equal(second, third)
