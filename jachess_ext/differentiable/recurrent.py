"""Recurrent layers by torch's native kernels, with derivatives that cuDNN and oneDNN lack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock

import torch
from torch import Tensor
from torch.backends import cudnn, mkldnn

from .. import torch_private
from .formulas import TABLE, Row
from .levels import levels_of
from .registry import answers

# The flags belong to the process: two threads that change them at once would restore wrong values.
_FLAGS = RLock()


@contextmanager
def _without_libraries() -> Iterator[None]:
    with _FLAGS:
        were_enabled = mkldnn.enabled, cudnn.enabled
        mkldnn.enabled = cudnn.enabled = False  # type: ignore[assignment]
        try:
            yield
        finally:
            mkldnn.enabled, cudnn.enabled = were_enabled


def _recurrent(name: str) -> None:
    """Register the answer for torch's recurrent function ``name``."""
    function = getattr(torch, name)

    @answers(function)
    def answer(input: Tensor, *args: object) -> tuple[Tensor, ...]:
        leaves = torch_private.pytree.tree_leaves((input, args))
        levels = levels_of([x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()])
        # cuDNN's layers have no second backward, and from a graph it is not known if one will
        # follow.
        is_refused = levels.forward or levels.reverse + levels.has_graph > 1
        is_refused = is_refused or (levels.has_graph and input.is_cuda)
        with _without_libraries() if is_refused else nullcontext():
            return function(input, *args)  # type: ignore[no-any-return]

    text = "Call torch's own kernels, not oneDNN or cuDNN (on a GPU in the first backward, too)."
    TABLE.append(Row(name, "forward, mixed (oneDNN), second (cuDNN)", "", text))


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    _recurrent(_name)
