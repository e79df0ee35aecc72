"""`jx.jet` within ``torch.compile`` where torch takes no nn.Module into a graph (2.10, 2.11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jachess_ext as jx
from jachess_ext.jet.compiled import regions as compiled
from python_tests.jet.compiled_blocks import SelfAttention, example


@pytest.fixture
def block_and_streams(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> Any:
    monkeypatch.setattr(compiled, "MODULES_IN_GRAPHS", False)
    block = SelfAttention().double()
    return block, lambda x, directions: jx.jet(block, x, directions, 2).streams


def test_it_runs_eagerly(block_and_streams: Any) -> None:
    block, streams = block_and_streams
    tensors = example(block)
    assert torch.equal(torch.compile(streams, backend="eager")(*tensors), streams(*tensors))


def test_a_full_graph_says_what_is_needed(block_and_streams: Any) -> None:
    block, streams = block_and_streams
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"needs torch 2\.12 or newer"):
        torch.compile(streams, fullgraph=True, backend="eager")(*example(block))
