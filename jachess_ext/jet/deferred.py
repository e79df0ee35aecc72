"""Jets that are computed when they are looked at, so that the next operation can swallow them.

Models spell one operator as several functions: an RMS norm is ``pow, mean, add, rsqrt, mul, mul``,
a gated MLP is ``mul`` of an activation, a residual block is ``add`` before a norm.  A rule that
could be the beginning of such a spelling returns a *deferred* jet: shape and dtype are known, the
streams are not made.  The rule that recognises the end (`rules/fused.py`) calls the fused operator
on the sources; anybody else who reads ``jet.streams`` has them made by the ordinary rule.  So the
user's model is untouched, and what is not recognised is computed as before.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import torch_private
from .context import without_autocast

if TYPE_CHECKING:
    from .layout import Run
    from .tensor import JetTensor


@dataclass(frozen=True)
class Pattern:
    """What a deferred jet is made of; subclasses in `rules/fused.py` name their sources."""


class Deferred:
    """The promise of a stack: what it will look like, what it means, how it is made.

    Args:
        pattern: what a later rule may recognise.
        make: the ordinary rule's result; called at most once.
        sources: the plain tensors that ``make`` reads.  A write into one of them before the
            streams are made would change the result; it is noticed (torch's version counter).
    """

    def __init__(
        self,
        pattern: Pattern,
        make: Callable[[], JetTensor],
        sources: tuple[Tensor, ...],
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pattern, self.shape, self.dtype, self.device = pattern, shape, dtype, device
        self._make = make
        self.contiguous = False  # whether the streams have to be
        self._sources = [(source, _version(source)) for source in sources]
        self._grad_enabled, self._hooks = torch.is_grad_enabled(), _saving_hooks()

    def is_at_home(self) -> bool:
        """Whether streams made now would record gradients as where the jet was deferred: in the
        same gradient mode, and within the same checkpoint or outside of any."""
        return self._grad_enabled == torch.is_grad_enabled() and self._hooks == _saving_hooks()

    def make(self) -> Tensor:
        """The streams, made under the gradient mode of the place where the jet was deferred.

        Within a checkpoint that the jet comes into from outside they are made as if outside: a
        checkpoint computes anew what it computed, and would find this jet made already.

        Raises:
            RuntimeError: a source was written into or freed in between.
        """
        self.check_sources()
        elsewhere = self._hooks != _saving_hooks()
        with (
            torch.set_grad_enabled(self._grad_enabled),
            without_autocast(self.device.type),
            _plainly_saved() if elsewhere else nullcontext(),
        ):
            streams = self._make().streams
            return streams.contiguous() if self.contiguous else streams

    def check_sources(self) -> None:
        """Raises:
        RuntimeError: a source was written into, or freed, since the jet was deferred.
        """
        if any(_is_freed(source) for source, _ in self._sources):
            raise RuntimeError(
                "a weight was freed (FSDP?) before a jet that was computed from it was looked at; "
                "use jachess_ext.jet.composed_rules() around the pass, or jx.JacHess, which knows "
                "of FSDP"
            )
        if any(_version(source) != version for source, version in self._sources):
            raise RuntimeError(
                "a tensor was changed in place outside torch's function table after a jet was "
                "computed from it; use the out-of-place function, or jachess_ext.jet."
                "composed_rules() around the pass"
            )


def _saving_hooks() -> Any:
    """The innermost hooks through which autograd saves tensors, or None.

    Non-reentrant checkpointing sets a pair of its own for every call and for every recomputation,
    which is the one trace of a checkpoint's borders that code inside it can see.
    """
    return torch_private.autograd._top_saved_tensors_default_hooks(True)


@contextmanager
def _plainly_saved() -> Iterator[None]:
    """Autograd saves tensors as they are, unseen by the checkpoints around.

    The hooks are taken off rather than covered by ones that do nothing: with hooks of any kind
    autograd no longer notices a write into what it saved.
    """
    taken = []
    while (hooks := _saving_hooks()) is not None:
        taken.append(hooks)
        torch_private.autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(taken):
            torch_private.autograd._push_saved_tensors_default_hooks(*hooks)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_freed(tensor: Tensor) -> bool:
    """FSDP frees a gathered weight by resizing its storage to nothing."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


class _Pending(threading.local):
    """Deferred jets of this thread whose streams are not made yet."""

    def __init__(self) -> None:
        self.jets: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __iter__(self) -> Iterator[JetTensor]:
        return iter(list(self.jets.values()))


_PENDING = _Pending()


def remember(jet: JetTensor) -> None:
    """Note a deferred jet, so that a write in place can have it made first."""
    _PENDING.jets[id(jet)] = jet


def forget(jet: JetTensor) -> None:
    """The jet's streams exist now."""
    _PENDING.jets.pop(id(jet), None)


def end(run: Run | None) -> None:
    """End a pass: what is used of it from now on is refused, and what is deferred stays so."""
    if run is not None:
        run.ended = True
    for jet in _PENDING:
        if jet.jet_layout.run is run:
            forget(jet)


@contextmanager
def ending(run: Run | None) -> Iterator[None]:
    """End the pass when the context is left, also by an exception."""
    try:
        yield
    finally:
        end(run)


def make_pending() -> None:
    """Make every deferred jet of this thread: something they may read is about to change."""
    for jet in _PENDING:
        jet.streams  # noqa: B018  reading makes them
