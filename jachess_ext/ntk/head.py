"""The output head of a language model, on the words or the token that f reads and no others.

A head of V words gives logits [n, T, V].  Their memory, and that of their cotangents, is what
limits a kernel of a language model; yet "label" reads one word of each token, and the next-token
outputs read one token of each sample.  While one of the contexts below is open, the head computes

    on_words    z[n, t, 0] = h_{n,t} · W[y_{n,t}] + b[y_{n,t}]      [n, T, 1]
    on_token    z[n, 0, :] = W h_{n,t(n)} + b                       [n, 1, V]

What the model does to its logits afterwards (a scale, a soft-cap) must act on each of them alone;
`OutputMap.settled` finds out by comparing f with that of whole logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CONSTANT = "final_logits_bias"  # transformers' buffer [1, V] of BART and its relatives


def output_head(model: nn.Module) -> nn.Linear | None:
    """The linear layer that makes logits over a vocabulary; None where there is no plain one."""
    found = getattr(model, "get_output_embeddings", lambda: None)()
    plain = type(found) is nn.Linear and "forward" not in vars(found)
    return found if plain else None


@contextmanager
def on_words(model: nn.Module, words: Tensor) -> Iterator[None]:
    """The head gives each token the logit of its word alone.

    Args:
        words: y, [n, T], from 0 to V - 1.
    """

    def forward(head: nn.Linear, hidden: Tensor) -> Tensor:
        if hidden.shape[:-1] != words.shape:
            return F.linear(hidden, head.weight, head.bias)
        y = words.to(hidden.device)
        # As an embedding of the labels: its per-sample gradients are rows, not [V, d] each.
        logit = (hidden * F.embedding(y, head.weight)).sum(-1)
        if head.bias is not None:
            logit = logit + torch.take(head.bias, y)
        return logit[..., None]

    with _head_replaced(model, forward):
        yield


@contextmanager
def on_token(model: nn.Module, places: Callable[[int, int], Tensor]) -> Iterator[None]:
    """The head sees one token of each sample.

    Args:
        places: (n, T) -> t(n), [n].
    """

    def forward(head: nn.Linear, hidden: Tensor) -> Tensor:
        if hidden.dim() == 3:
            count, length = hidden.shape[:2]
            rows = torch.arange(count, device=hidden.device)
            hidden = hidden[rows, places(count, length).to(hidden.device)][:, None]
        return F.linear(hidden, head.weight, head.bias)

    with _head_replaced(model, forward):
        yield


@contextmanager
def _head_replaced(
    model: nn.Module, forward: Callable[[nn.Linear, Tensor], Tensor]
) -> Iterator[None]:
    head = output_head(model)
    assert head is not None
    with ExitStack() as stack:
        stack.enter_context(_without_constant(model))
        stack.callback(delattr, head, "forward")
        head.forward = lambda hidden: forward(head, hidden)  # type: ignore[assignment]
        yield


@contextmanager
def _without_constant(model: nn.Module) -> Iterator[None]:
    """A zero buffer [1, V] that is added to the logits, as [1, 1]: it would widen them again."""
    constant: Any = getattr(model, _CONSTANT, None)
    if not isinstance(constant, Tensor) or constant.requires_grad or bool(constant.any()):
        yield
        return
    setattr(model, _CONSTANT, constant.new_zeros(1, 1))
    try:
        yield
    finally:
        setattr(model, _CONSTANT, constant)
