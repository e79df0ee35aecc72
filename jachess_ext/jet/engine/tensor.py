"""`JetTensor`: a tensor with its primal's shape, dtype and device that carries the streams of a
jet."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .constants import call_on_constants, is_constant, mark_constant
from .context import call_rule, without_autocast
from .deferred import Deferred, Pattern
from .derivative import (
    DerivativeTensor,
    call_mask,
    carries_derivatives,
    check_call,
    check_complex,
    check_pass,
)
from .layout import JetLayout, Pass, replace_tensors
from .registry import original_function, require_rule
from .strides import match_torch_layout
from .types import Operand, T


class JetTensor(DerivativeTensor):
    """Truncated Taylor expansion of a tensor along q directions, stacked ``[S, ...]``.

    Shape, dtype and device are the primal's, so that unmodified model code runs on it; for every
    torch function that is called with a jet, a rule of the registry is called.  Autograd records
    the plain tensor `streams`, never the wrapper: ``backward`` of the result is the double backward
    of the model.

    Args:
        streams: floating-point or complex tensor ``[S, *shape]``, where S is ``layout.streams``.
        layout: which streams these are.

    Examples:
        >>> jx.jet(lambda x: (print(x), x * x)[1], torch.zeros(3), torch.ones(2, 3)).first.shape
        JetTensor(shape=(3,), dtype=torch.float32, device=cpu, directions=2, order=2)
        torch.Size([2, 3])
    """

    is_jet = True
    jet_layout: JetLayout
    _streams: Tensor | None
    _deferred: Deferred | None

    @staticmethod
    def __new__(cls, streams: Tensor, layout: JetLayout) -> JetTensor:
        if streams.shape[0] != layout.streams:
            raise ValueError(
                f"a jet of {layout.directions} directions at order {layout.order} has "
                f"{layout.streams} streams, but the stack has {streams.shape[0]} in front"
            )
        # The wrapper has a shape and no data; the data are in the attribute `_streams`.
        wrapper = torch.Tensor._make_wrapper_subclass(
            ComplexJetTensor if streams.is_complex() else cls,
            streams.shape[1:],
            strides=streams.stride()[1:],
            dtype=streams.dtype,
            device=streams.device,
            requires_grad=carries_derivatives(streams),  # for the reason see `DerivativeTensor`
        )
        wrapper._streams, wrapper._deferred = streams, None
        return wrapper._join_pass(layout)

    @classmethod
    def deferred(cls, deferral: Deferred, layout: JetLayout) -> JetTensor:
        """Return a jet whose streams are computed on first access (`deferred.py`)."""
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, deferral.shape, dtype=deferral.dtype, device=deferral.device, requires_grad=True
        )
        wrapper._streams, wrapper._deferred = None, deferral
        _PENDING.jets[id(wrapper)] = wrapper
        return wrapper._join_pass(layout)

    def _join_pass(self, layout: JetLayout) -> JetTensor:
        self.jet_layout = layout
        # A write in place may have to move all jets that share the memory (`copy_before_write`), so
        # the pass lists its jets, as weak references.
        if layout.jet_pass is not None:
            layout.jet_pass.jets[id(self)] = self
        return self

    @property
    def streams(self) -> Tensor:
        """Return the stack ``[S, *shape]``; the first access computes that of a deferred jet."""
        if self._streams is None:
            assert self._deferred is not None
            self.set_streams(self._deferred.make())
        return cast(Tensor, self._streams)

    def make_contiguous(self) -> None:
        """Have a deferred jet compute contiguous streams, whatever the strides of its sources."""
        assert self._deferred is not None
        self._deferred.contiguous = True

    @property
    def streams_if_computed(self) -> Tensor | None:
        """Return the streams; None for a deferred jet that has not computed them yet."""
        return self._streams

    def set_streams(self, streams: Tensor) -> None:
        """Set the streams: the computed streams of a deferred jet, or a copy before a write."""
        self._streams, self._deferred = streams, None
        _PENDING.jets.pop(id(self), None)

    @property
    def pattern(self) -> Pattern | None:
        """Return the pattern of a deferred jet; None once it has its streams.

        Also None if the gradient mode has changed since the jet was deferred, as a fused operator
        would record gradients that the model switched off, or lose gradients; and if a checkpoint
        began or ended since then (see `Deferred.make`).
        """
        deferred = self._deferred
        return deferred.pattern if deferred is not None and deferred.has_same_context() else None

    @property
    def _metadata(self) -> Deferred | Tensor:
        """Return an object with the jet's dtype and device, without computing the streams."""
        return self._deferred if self._streams is None else self._streams  # type: ignore[return-value]

    @property
    def primal(self) -> Tensor:
        """Return x_0, the value of the function: stream 0, a tensor of the jet's shape."""
        return self.streams[0]

    @property
    def autograd_tensor(self) -> Tensor:
        return self.streams

    @property
    def pass_layout(self) -> JetLayout:
        return self.jet_layout

    def is_constant(self) -> bool:
        return is_constant(self)

    def make_constant(self, value: Tensor) -> Tensor:
        if not carries_derivatives(value):
            return value
        jet = lift(value, self.jet_layout)
        mark_constant(jet)
        return jet

    def replace_tensor(self, plain: Tensor) -> None:
        jet_pass = self.jet_layout.jet_pass
        if jet_pass is not None:
            jet_pass.jets.pop(id(self), None)  # a weak reference, with which no swap is possible
        super().replace_tensor(plain)
        if jet_pass is not None:
            jet_pass.jets[id(plain)] = plain

    def with_streams(self, streams: Tensor) -> JetTensor:
        """Return a jet of the same layout with another stack ``[S, ...]``."""
        return JetTensor(streams, self.jet_layout)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        if self._streams is None:
            return self._metadata.shape
        return self._streams.shape[1:]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._metadata.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._metadata.device

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            f"JetTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"directions={self.jet_layout.directions}, order={self.jet_layout.order})"
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        func, kwargs = original_function(func), kwargs or {}
        if len(types) > 1 and (out := call_mask(func, types, args, kwargs)) is not NotImplemented:
            return out
        check_call(cls, func, types, args, kwargs)
        result = call_on_constants(func, args, kwargs, DerivativeTensor)
        if result is not NotImplemented:
            return result
        result = call_rule(func, require_rule(func), args, kwargs)
        check_pass(func, args, result)
        return match_torch_layout(func, args, kwargs, result)


class ComplexJetTensor(JetTensor):
    """A jet of complex numbers.

    Since it is the subclass, torch calls its ``__torch_function__`` before that of `JetTensor` when
    the arguments hold real and complex jets.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        check_complex(func)
        return super().__torch_function__(func, types, args, kwargs)


# ---- deferred jets of a thread -----------------------------------------------------------------


class _Pending(threading.local):
    """Deferred jets of this thread whose streams are not computed yet, by id."""

    def __init__(self) -> None:
        self.jets: weakref.WeakValueDictionary[int, JetTensor] = weakref.WeakValueDictionary()


_PENDING = _Pending()


def compute_deferred() -> None:
    """Compute the streams of every deferred jet of this thread.

    Called before a write, which may change the tensors that they are computed from.
    """
    for jet in list(_PENDING.jets.values()):
        jet.streams  # noqa: B018  the access computes them


def forget_deferred(jet_pass: Pass | None) -> None:
    """Drop the deferred jets of a pass that has ended, so that no later write computes them."""
    for key, jet in list(_PENDING.jets.items()):
        if jet.jet_layout.jet_pass is jet_pass:
            del _PENDING.jets[key]


# ---- jets among numbers and plain tensors ------------------------------------------------------


def common_layout(*values: object) -> JetLayout:
    """Return the layout of all jets among ``values``.

    Raises:
        ValueError: two jets have different layouts, or belong to different passes.
        TypeError: there is no jet (a rule was called with the jet in the wrong argument).
    """
    layouts = {value.jet_layout for value in values if isinstance(value, JetTensor)}
    if not layouts:
        raise TypeError("a jet rule was called without a jet in any of its tensor arguments")
    if len(layouts) > 1:
        raise layout_error(layouts)
    return layouts.pop()


def layout_error(layouts: set[JetLayout]) -> ValueError:
    """Return the error for jets of different layouts or passes in one operation."""
    names = sorted({f"{l.directions} directions at order {l.order}" for l in layouts})  # noqa: E741
    if len(names) == 1:
        names.append("of another pass")
    return ValueError(
        f"jets of different layouts met in one operation ({', '.join(names)}); "
        "run one jx.jet at a time"
    )


def to_tensor(value: Operand, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Convert a number or a tensor to a tensor of this dtype on this device.

    A number is filled in on the device: a CUDA graph that is being captured allows no copy from the
    host.
    """
    if isinstance(value, (bool, int, float, complex)):
        return torch.full((), value, dtype=dtype, device=device)
    return torch.as_tensor(value, dtype=dtype, device=device)


def lift(value: Operand, layout: JetLayout, like: Tensor | None = None) -> JetTensor:
    """Return ``value`` as a jet: a jet unchanged, anything else with zero tangents.

    Args:
        like: the tensor whose dtype and device a number gets; None if ``value`` is a tensor.

    Raises:
        ValueError: ``value`` is a jet of another layout or another pass.
        TypeError: ``value`` is no tensor, and ``like`` is None.
    """
    if isinstance(value, JetTensor):
        if value.jet_layout != layout:
            raise layout_error({value.jet_layout, layout})
        return value
    if not isinstance(value, Tensor):
        if like is None:
            raise TypeError(f"a jet was expected, not {type(value).__name__}")
        value = to_tensor(value, dtype=like.dtype, device=like.device)
    # Under autocast torch.cat may return another dtype than that of ``value``.
    zeros = value.new_zeros(layout.streams - 1, *value.shape)
    with without_autocast(value.device.type):
        return JetTensor(torch.cat([value.unsqueeze(0), zeros]), layout)


def align_streams(jet: JetTensor, ndim: int) -> Tensor:
    """Return the stack as ``[S, 1, ..., 1, *shape]``, with ``ndim`` dimensions after S, for
    broadcasting."""
    # Torch aligns shapes from the right: S of a stack [S, 3] would pair with the 2 of [2, 3].
    missing = ndim - jet.ndim
    if missing <= 0:
        return jet.streams
    return jet.streams.reshape(jet.jet_layout.streams, *(1,) * missing, *jet.shape)


def primal_of(value: T) -> T:
    """Replace every jet in a call's arguments, nested in lists, tuples and dicts, by its primal."""
    return replace_tensors(value, _primal)


def _primal(tensor: Tensor) -> Tensor:
    return tensor.primal if isinstance(tensor, JetTensor) else tensor
