"""`open_pass`, the context in which a pass runs, and the functions of torch that it replaces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..engine.derivative import DerivativeTensor
from ..engine.layout import Pass
from ..engine.tensor import forget_deferred


@contextmanager
def open_pass(jet_pass: Pass | None) -> Iterator[None]:
    """Keep a pass open while the context lasts; leaving the context, also by an exception, ends the
    pass.

    Tensors of a pass that has ended are refused, and its deferred jets are never computed.  While
    any pass is open, `Tensor.requires_grad_` is `_guarded_requires_grad`, and `Tensor.data` cannot
    be set to a tensor of a pass.
    """
    global _num_open
    _OPEN.passes.append(jet_pass)
    with _LOCK:
        _num_open += 1
        Tensor.requires_grad_ = _guarded_requires_grad  # type: ignore[assignment, method-assign]
        Tensor.data = _GUARDED_DATA  # type: ignore[assignment]
    try:
        yield
    finally:
        _OPEN.passes.pop()
        with _LOCK:
            _num_open -= 1
            if not _num_open:
                # torch.Tensor inherits both: without the attributes they are torch's own again.
                del Tensor.requires_grad_, Tensor.data
        if jet_pass is not None:
            jet_pass.ended = True
        forget_deferred(jet_pass)


# ---- derivatives of detached tensors ------------------------------------------------------------
#
# ``torch.autograd.functional.jacobian(g, x)``, or the gradient of an energy by
# ``x.detach().requires_grad_()``, has derivatives by x that a pass cannot see: its tangent would
# silently be 0.  torch.func refuses every `requires_grad_` inside a transform; here it is refused
# only after the pass has detached a tensor.  Earlier calls are allowed, such as that of gradient
# checkpointing with peft on the embeddings of token ids.


class _Open(threading.local):
    """The passes that are open on this thread."""

    def __init__(self) -> None:
        self.passes: list[Pass | None] = []


_OPEN = _Open()
_num_open = 0  # number of open passes on all threads
_LOCK = threading.Lock()
_requires_grad_ = Tensor.requires_grad_


def _guarded_requires_grad(self: Tensor, requires_grad: bool = True) -> Tensor:
    """Set ``requires_grad`` like the method of `Tensor` that this function replaces.

    Raises:
        RuntimeError: a pass that is open on this thread has detached a tensor, and this tensor did
            not require a gradient.
    """
    if isinstance(self, DerivativeTensor):  # torch would look for a rule of this function
        _requires_grad_(self.autograd_tensor, requires_grad)
        return self
    turns_on = requires_grad and not self.requires_grad
    if turns_on and any(p is not None and p.is_detached for p in _OPEN.passes):
        raise RuntimeError(
            "requires_grad_() was called, perhaps by torch.autograd.functional, on a tensor inside "
            "jx.jet, jx.jvp or a penalty after a detach: the derivative taken there would count as "
            "a constant. Differentiate inside with jx.jvp's own arguments, or write the gradient "
            "out (torch.func refuses this, too)"
        )
    return _requires_grad_(self, requires_grad)


# ---- the memory of a plain tensor --------------------------------------------------------------


def _set_data(self: Tensor, value: Tensor) -> None:
    """Set ``self.data`` like the setter of `Tensor` that this function replaces.

    Raises:
        RuntimeError: the value carries derivatives; torch would use the wrapper as memory, and the
            process would crash.
    """
    if isinstance(value, DerivativeTensor):
        raise RuntimeError(
            "plain.data was set to a tensor of jx.jet, jx.jvp or a penalty, whose derivatives a "
            "plain tensor cannot hold; use the new tensor in its place, or set value.detach()"
        )
    _DATA.__set__(self, value)


_DATA: Any = Tensor.data  # the descriptor
_GUARDED_DATA = property(_DATA.__get__, _set_data)
