"""Deferred jets: jets whose streams are computed on first access, so that the next operation can
fuse with the one that made them.

Models spell one operator as several functions: an RMS norm is ``pow, mean, add, rsqrt, mul, mul``,
a gated MLP is ``mul`` of an activation, a residual block is ``add`` before a norm.  A rule that
could be the beginning of such a spelling returns a *deferred* jet: its shape and dtype are known,
its streams are not computed.  The rule that recognises the end (`rules/fused.py`) calls the fused
operator on the sources; any other access to ``jet.streams`` calls the ordinary rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import torch_private
from ...ops.library import without_dispatch_modes
from .context import without_autocast
from .types import Function


@dataclass(frozen=True)
class Pattern:
    """The formula of a deferred jet; subclasses in `rules/patterns.py` hold its arguments."""


class Deferred:
    """A stack of streams that is not computed yet.

    Args:
        pattern: the formula, which a later rule may recognise.
        make: computes the stack by the ordinary rule; called at most once.
        sources: the plain tensors that ``make`` uses.  A write into one of them before ``make``
            is called would change the result; torch's version counter reveals it.
        shape, dtype, device: those of one stream.
    """

    def __init__(
        self,
        pattern: Pattern,
        make: Callable[[], Tensor],
        sources: tuple[Tensor, ...],
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pattern, self.shape, self.dtype, self.device = pattern, shape, dtype, device
        self._make = make
        self.contiguous = False  # whether the streams have to be contiguous
        # The rule has not run yet, so autograd has saved no source and cannot detect a write into
        # it: `check_sources` compares version counters instead.
        self._sources = [(source, _version(source)) for source in sources]
        self._grad_enabled, self._hooks = torch.is_grad_enabled(), _saving_hooks()

    def has_same_context(self) -> bool:
        """Return whether the gradient mode and the innermost checkpoint are as when the jet
        was deferred."""
        return self._grad_enabled == torch.is_grad_enabled() and self._hooks == _saving_hooks()

    def make(self) -> Tensor:
        """Compute the streams in the gradient mode in which the jet was deferred.

        Inside a checkpoint that began after the jet was deferred, they are computed outside of the
        checkpoint's hooks: when the checkpoint is recomputed, the jet already has its streams.

        Raises:
            RuntimeError: a source was written into or freed in between.
        """
        self.check_sources()
        is_outside = self._hooks != _saving_hooks()
        with (
            torch.set_grad_enabled(self._grad_enabled),
            without_autocast(self.device.type),
            _without_saving_hooks() if is_outside else nullcontext(),
        ):
            streams = self._make()
            return streams.contiguous() if self.contiguous else streams

    def check_sources(self) -> None:
        """Raise RuntimeError if a source was written into, or freed, since the jet was deferred."""
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


def _saving_hooks() -> tuple[Function, Function] | None:
    """Return the innermost pair of hooks through which autograd saves tensors, or None.

    Non-reentrant checkpointing sets a new pair for every call and every recomputation, so that two
    calls with the same pair are in the same checkpoint.
    """
    return torch_private.autograd._top_saved_tensors_default_hooks(True)


@contextmanager
def _without_saving_hooks() -> Iterator[None]:
    """Have autograd save tensors directly, without the hooks and modes of surrounding checkpoints.

    The hooks are removed, not overridden by other hooks: while any hooks are set, autograd does not
    detect writes into saved tensors.
    """
    removed_hooks = []
    while (hooks := _saving_hooks()) is not None:
        removed_hooks.append(hooks)
        torch_private.autograd._pop_saved_tensors_default_hooks()
    try:
        with without_dispatch_modes():
            yield
    finally:
        for hooks in reversed(removed_hooks):
            torch_private.autograd._push_saved_tensors_default_hooks(*hooks)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_freed(tensor: Tensor) -> bool:
    """Return whether FSDP has freed a gathered weight, by resizing its storage to 0 bytes."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
