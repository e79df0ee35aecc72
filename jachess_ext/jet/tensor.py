"""`JetTensor`: a tensor that shows its primal's shape and carries every stream of a 2-jet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from .. import torch_private
from .context import call_rule, without_autocast
from .deferred import Deferred, Pattern, forget, remember
from .layout import JetLayout
from .registry import (
    find_rule,
    forward_mode_is_on,
    function_name,
    missing_rule,
    refuse_opaque_functions,
    takes_complex,
)
from .strides import as_torch_lays_out


class DerivativeTensor(torch.Tensor):
    """A wrapper with a primal's shape, dtype and device, which carries derivatives beside it."""

    @property
    def layout_of_pass(self) -> JetLayout:
        """The layout of the jets of its pass."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # Only reached by an operator that skipped __torch_function__: there is no rule to ask.
        check_place(func, args, kwargs)
        raise missing_rule(func)


class JetTensor(DerivativeTensor):
    """The truncated Taylor expansion of a tensor along q directions, stacked ``[S, ...]``.

    Shape, dtype and device are the primal's, so that unmodified model code runs on it; every torch
    function called with one is answered by a rule of the registry.  Autograd sees the plain tensor
    `streams`, never the wrapper: calling ``backward`` on what a rule returns is the double backward
    of the model.

    Args:
        streams: ``[S, *shape]`` floating-point tensor, S as ``layout.streams``.
        layout: which streams these are.
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
        wrapper = torch.Tensor._make_wrapper_subclass(
            ComplexJetTensor if streams.is_complex() else cls,
            streams.shape[1:],
            strides=streams.stride()[1:],
            dtype=streams.dtype,
            device=streams.device,
        )
        wrapper._streams = streams
        wrapper._deferred = None
        wrapper.jet_layout = layout
        if layout.run is not None:
            layout.run.jets[id(wrapper)] = wrapper
        return wrapper

    @classmethod
    def deferred(cls, promise: Deferred, layout: JetLayout) -> JetTensor:
        """A jet whose streams are made when they are first read (see `deferred.py`)."""
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, promise.shape, dtype=promise.dtype, device=promise.device
        )
        wrapper._streams, wrapper._deferred, wrapper.jet_layout = None, promise, layout
        if layout.run is not None:
            layout.run.jets[id(wrapper)] = wrapper
        remember(wrapper)
        return wrapper

    @property
    def streams(self) -> Tensor:
        """``[S, *shape]``."""
        if self._streams is None:
            assert self._deferred is not None
            self.settle(self._deferred.make())
        return cast(Tensor, self._streams)

    def make_contiguous(self) -> None:
        """Have the streams of a deferred jet made contiguous, whatever its sources are."""
        assert self._deferred is not None
        self._deferred.contiguous = True

    @property
    def made_streams(self) -> Tensor | None:
        """The streams where they are made; None for a deferred jet."""
        return self._streams

    def settle(self, streams: Tensor) -> None:
        """Give a jet its streams: a deferred one, whose operator has made them beside its result,
        or one whose memory is renewed before a write."""
        self._streams, self._deferred = streams, None
        forget(self)

    @property
    def pattern(self) -> Pattern | None:
        """What the jet is made of, while its streams are not made.

        None in another gradient mode than where the jet was deferred: an operator that swallowed
        it there would record gradients that the model switched off, or lose those it asked for.
        None, too, where a checkpoint begins or ends in between (`Deferred.make` says why).
        """
        deferred = self._deferred
        return deferred.pattern if deferred is not None and deferred.is_at_home() else None

    @property
    def _shown(self) -> Any:
        """Whatever knows dtype and device, without making the streams."""
        return self._deferred if self._streams is None else self._streams

    @property
    def primal(self) -> Tensor:
        """x0, ``shape``."""
        return self.streams[0]

    @property
    def layout_of_pass(self) -> JetLayout:
        return self.jet_layout

    def with_streams(self, streams: Tensor) -> JetTensor:
        """A jet of the same layout around another stack ``[S, ...]``."""
        return JetTensor(streams, self.jet_layout)

    # Read often by model code; a plain property is cheaper than the trip through
    # __torch_function__ that torch's own getters take.
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        if self._streams is None:
            return self._shown.shape
        return self._streams.shape[1:]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._shown.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._shown.device

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.streams.requires_grad

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self.streams.is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return self.streams.grad_fn

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"JetTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"directions={self.jet_layout.directions}, order={self.jet_layout.order})"
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        check_call(cls, func, types, args, kwargs)
        rule = find_rule(func)
        if rule is None:
            raise missing_rule(func)
        named = kwargs or {}
        result = call_rule(func, rule, args, named)
        check_pass(func, args, result)
        return as_torch_lays_out(func, args, named, result)


class ComplexJetTensor(JetTensor):
    """A jet of complex numbers: torch asks it before the real jets of the same call."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        check_complex(func)
        return super().__torch_function__(func, types, args, kwargs)


def carries_derivatives(tensor: Tensor) -> bool:
    """Whether a tensor of this dtype could: real and complex numbers, not integers."""
    return tensor.is_floating_point() or tensor.is_complex()


def check_complex(func: Callable) -> None:
    """Raises:
    MissingJetRule: the function's rule holds for real numbers alone.
    """
    if not takes_complex(func):
        raise missing_rule(
            func,
            "its rule does not cover complex numbers; compute it from the real and imaginary "
            "parts (torch.view_as_real)",
        )


def check_call(kind: type, func: Callable, types: Any, args: tuple, kwargs: dict | None) -> None:
    """What every function that met a tensor of ``kind`` is refused for.

    Raises:
        MissingJetRule: an argument ``out``.
        ValueError: another kind of `DerivativeTensor` among the arguments.
        RuntimeError: the call comes from within an autograd Function.
    """
    if kwargs and kwargs.get("out") is not None:
        raise missing_rule(func, "a result cannot be written into out=")
    if len(types) > 1 and any(
        issubclass(t, DerivativeTensor) and not issubclass(kind, t) for t in types
    ):
        raise ValueError(
            "tensors of different derivatives met in one operation; run one jx.jet or jx.jvp at "
            "a time"
        )
    check_place(func, args, kwargs)


def check_place(func: Callable, args: tuple, kwargs: dict | None) -> None:
    """Raises:
    RuntimeError: the call comes from within an autograd Function.
    """
    if not forward_mode_is_on():
        leaves = torch_private.pytree.tree_leaves((args, kwargs))
        derivative = next(leaf for leaf in leaves if isinstance(leaf, DerivativeTensor))
        surrounding = derivative.layout_of_pass.surrounding
        refuse_opaque_functions(func, args, surrounding)


def check_pass(func: Callable, args: tuple, result: Any) -> None:
    """Refuse what was kept from a pass that has ended; a checkpoint may run again in backward.

    Raises:
        RuntimeError: ``result`` is of such a pass.
    """
    probe = args[0] if result is None else result
    if isinstance(probe, list | tuple) and probe:
        probe = probe[0]
    if isinstance(probe, DerivativeTensor):
        run = probe.layout_of_pass.run
        if run is not None and run.ended and torch_private.current_graph_task_id() == -1:
            raise kept_too_long(f"{function_name(func)} was called with")


def kept_too_long(what: str) -> RuntimeError:
    """The error for a tensor of a pass that has ended; ``what`` begins the sentence."""
    return RuntimeError(
        f"{what} a tensor that was kept from an earlier pass of jx.jet, jx.jvp or a penalty, which "
        "has ended, along other directions; return it from the function in that pass "
        "(jx.jvp: has_aux=True), or keep tensor.detach(). If a module keeps it (a buffer, a "
        "cache), have its forward detach it"
    )


def common_layout(*values: Any) -> JetLayout:
    """The layout shared by all jets among ``values``.

    Raises:
        ValueError: if two jets of different layouts, or of different passes, meet in one operation.
        TypeError: if there is no jet at all (a rule called with the jet in the wrong argument).
    """
    layouts = {value.jet_layout for value in values if isinstance(value, JetTensor)}
    if not layouts:
        raise TypeError("a jet rule was called without a jet in any of its tensor arguments")
    if len(layouts) > 1:
        raise different_layouts(layouts)
    return layouts.pop()


def different_layouts(layouts: set[JetLayout]) -> ValueError:
    kinds = sorted({f"{k.directions} directions at order {k.order}" for k in layouts})
    if len(kinds) == 1:
        kinds.append("of another pass")
    return ValueError(
        f"jets of different layouts met in one operation ({', '.join(kinds)}); "
        "run one jx.jet at a time"
    )


def lift(value: Any, layout: JetLayout, like: Tensor | None = None) -> JetTensor:
    """``value`` as a jet: unchanged if it is one, else constant (all tangents zero).

    Raises:
        ValueError: if it is a jet of another layout or another pass.
    """
    if isinstance(value, JetTensor):
        if value.jet_layout != layout:
            raise different_layouts({value.jet_layout, layout})
        return value
    if not isinstance(value, Tensor):
        if like is None:
            raise TypeError(f"a jet was expected, not {type(value).__name__}")
        value = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    zeros = value.new_zeros(layout.streams - 1, *value.shape)
    with without_autocast(value.device.type):
        return JetTensor(torch.cat([value.unsqueeze(0), zeros]), layout)


def aligned(jet: JetTensor, ndim: int) -> Tensor:
    """The stack with singleton dimensions after the stream dimension, to broadcast to ``ndim``."""
    missing = ndim - jet.ndim
    if missing <= 0:
        return jet.streams
    return jet.streams.reshape(jet.jet_layout.streams, *(1,) * missing, *jet.shape)


def primal_of(value: Any) -> Any:
    """The primal of a jet; anything else as it is.  Lists, tuples and dicts are searched."""
    return map_jets(value, lambda jet: jet.primal)


def map_jets(value: Any, apply: Callable[[JetTensor], Any]) -> Any:
    """``value`` with every jet replaced.  Lists, tuples and dicts are searched."""
    if isinstance(value, JetTensor):
        return apply(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map_jets(item, apply) for item in value)
    if isinstance(value, dict):
        return {key: map_jets(item, apply) for key, item in value.items()}
    return value
