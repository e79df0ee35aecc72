"""`DerivativeTensor`, the base class of `JetTensor` and `DualTensor`, and the checks of every
call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from ... import torch_private
from ...ops.attention import with_plain_mask
from ...ops.library import forward_mode_is_on, without_dispatch_modes
from .autograd_functions import is_apply, refuse_opaque_functions
from .complex_rules import takes_complex
from .errors import function_name, missing_rule
from .layout import JetLayout, iter_tensors, replace_tensors
from .types import Named


class DerivativeTensor(torch.Tensor):
    """A tensor with the shape, dtype and device of its primal, which also carries derivatives.

    ``shape`` and similar attributes, which model code often uses, are Python properties: torch's
    getters go through ``__torch_function__``, which is slower.

    The wrapper always requires a gradient, so that torch refuses to convert it to a number for
    arguments such as ``alpha``, ``p`` or ``eps``, which would lose the derivative.
    """

    @property
    def pass_layout(self) -> JetLayout:
        """Return the layout of the jets of the pass that this tensor belongs to."""
        raise NotImplementedError

    @property
    def autograd_tensor(self) -> Tensor:
        """Return the plain tensor that autograd records."""
        raise NotImplementedError

    def is_constant(self) -> bool:
        """Return whether this is a constant (`constants.py`)."""
        raise NotImplementedError

    def make_constant(self, value: Tensor) -> Tensor:
        """Return a plain tensor as a constant of the same pass; an integer tensor unchanged."""
        raise NotImplementedError

    def replace_tensor(self, plain: Tensor) -> None:
        """Swap this tensor into the Python object of the plain tensor, so that all variables that
        hold the plain tensor hold this tensor.

        Raises:
            RuntimeError: autograd or a weak reference holds the plain tensor.
        """
        torch.utils.swap_tensors(plain, self)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.autograd_tensor.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(
            ".data of a tensor with derivatives was set, which has no memory to replace; use the "
            "new tensor in its place"
        )

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self.autograd_tensor.is_leaf

    @property
    def grad_fn(self) -> Node | None:  # type: ignore[override]
        return self.autograd_tensor.grad_fn

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
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # Called only for an operator that skipped __torch_function__, which can have no rule.
        refuse_inside_autograd_function(func, args, kwargs)
        raise missing_rule(func)


# ---- checks of a call -------------------------------------------------------------------------


def carries_derivatives(tensor: Tensor) -> bool:
    """Return whether a tensor has a floating-point or complex dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


def check_complex(func: Callable) -> None:
    """Raise MissingJetRule if a function's rule holds for real numbers only."""
    if not (is_apply(func) or takes_complex(func)):
        raise missing_rule(
            func,
            "its rule does not cover complex numbers; compute it from the real and imaginary "
            "parts (torch.view_as_real)",
        )


def check_call(
    cls: type, func: Callable, types: Sequence[type], args: tuple, kwargs: dict | None
) -> None:
    """Refuse calls that no tensor of class ``cls`` supports, whatever their rule.

    A plain tensor that the call writes a jet into becomes a jet first (`convert_buffer`).

    Raises:
        MissingJetRule: ``out`` is given, or a Python function would convert a jet to a number.
        ValueError: the arguments hold another class of `DerivativeTensor`.
        RuntimeError: the call comes from within an autograd Function.
    """
    if args and type(args[0]) is Tensor and _writes_in_place(func):
        convert_buffer(args, kwargs or {})
    if isinstance(func, FunctionType):
        refuse_number_reads(func, args, kwargs or {})
    if kwargs and kwargs.get("out") is not None:
        raise missing_rule(func, "a result cannot be written into out=")
    if len(types) > 1 and any(
        issubclass(t, DerivativeTensor) and not issubclass(cls, t) for t in types
    ):
        raise ValueError(
            "tensors of different derivatives met in one operation; run one jx.jet or jx.jvp at "
            "a time"
        )
    refuse_inside_autograd_function(func, args, kwargs)


def refuse_number_reads(func: Callable, args: tuple, kwargs: Named) -> None:
    """Raise MissingJetRule if a Python function would convert a 0-dimensional jet to a number.

    Functions in C++ need no check: they raise TypeError before a rule is called.
    """
    if not any(
        isinstance(value, DerivativeTensor) and not value.ndim
        for value in (*args[1:], *kwargs.values())
    ):
        return

    def stand_in(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DerivativeTensor):
            return tensor
        if tensor.ndim:
            return tensor.primal.detach().clone()  # type: ignore[attr-defined]
        # Not 0 or 1: for these the function may skip the code that uses the number.
        return torch.full((), 0.3, dtype=tensor.dtype, device=tensor.device, requires_grad=True)

    devices = {t.device for t in iter_tensors((args, kwargs)) if t.device.type == "cuda"}
    with without_dispatch_modes(), torch.random.fork_rng(devices), torch.enable_grad():
        try:
            func(*replace_tensors(args, stand_in), **replace_tensors(kwargs, stand_in))
        except TypeError as error:
            raise missing_rule(func, f"a number has no derivative ({error})") from error
        except Exception:  # due to the stand-ins, or else the rule raises it, too
            return


# ---- plain tensors that are written into ------------------------------------------------------


def _writes_in_place(func: Callable) -> bool:
    """Return whether a function writes into its first argument, judged by its name."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_")


def convert_buffer(args: tuple, kwargs: Named) -> None:
    """Convert ``args[0]``, a plain tensor into which a call is about to write a jet, into a jet
    with zero tangents (a constant of the pass).

    A model may fill the result of `torch.zeros` or `torch.empty`; all variables that hold this
    tensor then hold the jet.  The tensor stays plain if an object such as a module holds it, since
    it may outlive the pass; or if another tensor shares its storage, which would miss the write.
    """
    buffer = args[0]
    if (
        buffer.requires_grad
        or buffer.layout is not torch.strided
        or not carries_derivatives(buffer)
    ):
        return
    # A count of two is unshared: the tensor, and the object that `untyped_storage` returns.
    if torch_private.storage_use_count(buffer.untyped_storage()._cdata) > 2 or _is_shared(args):
        return
    tensors = iter_tensors((args, kwargs))
    derivative = next(t for t in tensors if isinstance(t, DerivativeTensor))
    jet: Any = derivative.make_constant(buffer.detach())
    try:
        jet.replace_tensor(buffer)
    except RuntimeError:
        return


def _is_shared(args: tuple) -> bool:
    """Return whether ``args[0]`` may be referred to by anything except local variables of running
    functions."""
    holders = [h for h in gc.get_referrers(args[0]) if h is not args]
    return gc.get_freeze_count() > 0 or any(  # referrers that are frozen are not listed
        not isinstance(holder, tuple | dict)
        or any(h is not holders and not isinstance(h, FrameType) for h in gc.get_referrers(holder))
        for holder in holders
        if not isinstance(holder, FrameType)
    )


# ---- masks of a class of their own ------------------------------------------------------------


def call_mask(func: Callable, types: Sequence[type], args: tuple, kwargs: Named) -> object:
    """Return the attention as computed by the ``__torch_function__`` of the mask's class.

    NotImplemented if that class is no subclass of Tensor with a ``__torch_function__`` of its own,
    such as torch's CausalBias.

    Raises:
        MissingJetRule: the class's ``__torch_function__`` returns NotImplemented.
    """
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    mask_class: Any = type(mask)
    if func is not F.scaled_dot_product_attention or mask_class not in types:
        return NotImplemented
    torch_function, default = mask_class.__torch_function__, Tensor.__torch_function__
    if issubclass(mask_class, DerivativeTensor) or torch_function.__func__ is default.__func__:  # type: ignore[attr-defined]
        return NotImplemented
    plain = with_plain_mask(args, kwargs)
    if plain is not None:
        return func(**plain)
    result = torch_function(func, types, args, kwargs)
    if result is NotImplemented:
        name = f"{mask_class.__module__}.{mask_class.__qualname__}"
        raise missing_rule(func, f"its mask is a {name}; pass a plain tensor")
    return result


def refuse_inside_autograd_function(func: Callable, args: tuple, kwargs: dict | None) -> None:
    """Raise RuntimeError if the call comes from within an autograd Function."""
    if not forward_mode_is_on():
        leaves = torch_private.pytree.tree_leaves((args, kwargs))
        derivative = next(leaf for leaf in leaves if isinstance(leaf, DerivativeTensor))
        num_surrounding = derivative.pass_layout.num_surrounding
        refuse_opaque_functions(func, args, num_surrounding, DerivativeTensor)


def check_pass(func: Callable, args: tuple, result: object) -> None:
    """Raise RuntimeError if the result of a call belongs to a pass that has ended.

    In a backward this is allowed, since a checkpoint may be recomputed there.
    """
    # A function that returns None, such as __setitem__, wrote into its first argument.
    tensor = args[0] if result is None else result
    if isinstance(tensor, list | tuple) and tensor:
        tensor = tensor[0]
    if isinstance(tensor, DerivativeTensor):
        jet_pass = tensor.pass_layout.jet_pass
        if jet_pass is not None and jet_pass.ended and torch_private.current_graph_task_id() == -1:
            raise stale_tensor_error(f"{function_name(func)} was called with")


def stale_tensor_error(event: str) -> RuntimeError:
    """Return the error for a tensor of a pass that has ended.

    Args:
        event: the beginning of the message: subject and verb, such as "the function returned".
    """
    return RuntimeError(
        f"{event} a tensor that was kept from an earlier pass of jx.jet, jx.jvp or a penalty, "
        "which has ended, along other directions; return it from the function in that pass "
        "(jx.jvp: has_aux=True), or keep tensor.detach(). If a module keeps it (a buffer, a "
        "cache), have its forward detach it"
    )
