"""`jx.jet` within ``torch.compile`` where torch takes no nn.Module into a graph (2.10, 2.11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jachess_ext as jx
from jachess_ext.jet.compiled import regions as compiled
from python_tests.jet.compiled_blocks import bert, call_of, example


@pytest.fixture
def block_and_streams(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "MODULES_IN_GRAPHS", False)
    block = bert().double()
    fn = call_of("bert", block, 5, torch.float64)

    def streams(x: Tensor, directions: Tensor) -> Tensor:
        return jx.jet(fn, x, directions, 2).streams

    yield block, streams
    torch._dynamo.reset()


def test_it_runs_eagerly(block_and_streams: Any) -> None:
    block, streams = block_and_streams
    tensors = example(block)
    assert torch.equal(torch.compile(streams, backend="eager")(*tensors), streams(*tensors))


def test_a_full_graph_says_what_is_needed(block_and_streams: Any) -> None:
    block, streams = block_and_streams
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"needs torch 2\.12 or newer"):
        torch.compile(streams, fullgraph=True, backend="eager")(*example(block))
