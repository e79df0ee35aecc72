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

    Model code often reads ``shape`` and the like, so these are Python properties: torch's getters
    go through ``__torch_function__``, which is slower.

    The wrapper always requires a gradient.  torch refuses to read such a tensor as a number
    (``alpha``, ``p``, ``eps``), which would lose the derivative.
    """

    @property
    def pass_layout(self) -> JetLayout:
        """Return the layout of the jets of its pass."""
        raise NotImplementedError

    @property
    def autograd_tensor(self) -> Tensor:
        """Return the plain tensor that autograd records."""
        raise NotImplementedError

    def is_constant(self) -> bool:
        """Return whether this is a constant (`constants.py`)."""
        raise NotImplementedError

    def make_constant(self, value: Tensor) -> Tensor:
        """Return a plain tensor as a constant of the same pass; an integer tensor as it is."""
        raise NotImplementedError

    def replace_tensor(self, plain: Tensor) -> None:
        """Swap this tensor into the Python object of a plain one, for every variable that holds it.

        Raises:
            RuntimeError: autograd, or a weak reference, holds the plain tensor.
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
        # Reached only by an operator that skipped __torch_function__: no rule can answer it.
        refuse_inside_autograd_function(func, args, kwargs)
        raise missing_rule(func)


# ---- checks of a call -------------------------------------------------------------------------


def carries_derivatives(tensor: Tensor) -> bool:
    """Return whether a tensor has a floating-point or complex dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


def check_complex(func: Callable) -> None:
    """Raise MissingJetRule for a function whose rule holds for real numbers alone.

    Rules of autograd Functions hold for complex numbers, too.
    """
    if not (is_apply(func) or takes_complex(func)):
        raise missing_rule(
            func,
            "its rule does not cover complex numbers; compute it from the real and imaginary "
            "parts (torch.view_as_real)",
        )


def check_call(
    cls: type, func: Callable, types: Sequence[type], args: tuple, kwargs: dict | None
) -> None:
    """Refuse calls that no tensor of class ``cls`` supports.

    Raises:
        MissingJetRule: an argument ``out`` is given.
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
    """Raise MissingJetRule if a Python function would read a 0-dimensional jet as a number.

    Functions in C++ raise TypeError before a rule is called.
    """
    if not any(
        isinstance(value, DerivativeTensor) and not value.ndim
        for value in (*args[1:], *kwargs.values())
    ):
        return

    def plain(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DerivativeTensor):
            return tensor
        if tensor.ndim:
            return tensor.primal.detach().clone()  # type: ignore[attr-defined]
        # Not 0 or 1, for which the function may not read the number.
        return torch.full((), 0.3, dtype=tensor.dtype, device=tensor.device, requires_grad=True)

    devices = {t.device for t in iter_tensors((args, kwargs)) if t.device.type == "cuda"}
    with without_dispatch_modes(), torch.random.fork_rng(devices), torch.enable_grad():
        try:
            func(*replace_tensors(args, plain), **replace_tensors(kwargs, plain))
        except TypeError as error:
            raise missing_rule(func, f"a number has no derivative ({error})") from error
        except Exception:  # due to the stand-in values; or an error that the rule raises, too
            return


# ---- plain tensors that are written into ------------------------------------------------------


def _writes_in_place(func: Callable) -> bool:
    """Return whether a function writes into its first argument, by its name."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_")


def convert_buffer(args: tuple, kwargs: Named) -> None:
    """Turn ``args[0]``, a plain tensor that a call is about to write a jet into, into a jet with
    tangents of zero.

    A model fills the result of `torch.zeros` or `torch.empty`; every variable that holds it has to
    see the derivatives.  A tensor stays plain if an object holds it, as a module does, since it may
    outlive the pass; and if another tensor shares its storage, which would miss the write.
    """
    buffer = args[0]
    if (
        buffer.requires_grad
        or buffer.layout is not torch.strided
        or not carries_derivatives(buffer)
    ):
        return
    # Two uses: by the tensor, and by the object that `untyped_storage` returns.
    if torch_private.storage_use_count(buffer.untyped_storage()._cdata) > 2 or _is_shared(args):
        return
    tensors = iter_tensors((args, kwargs))
    derivative = next(t for t in tensors if isinstance(t, DerivativeTensor))
    constant: Any = derivative.make_constant(buffer.detach())
    try:
        constant.replace_tensor(buffer)
    except RuntimeError:
        return


def _is_shared(args: tuple) -> bool:
    """Return whether an object other than the local variables of running functions may hold the
    first argument."""
    holders = [h for h in gc.get_referrers(args[0]) if h is not args]
    return gc.get_freeze_count() > 0 or any(  # referrers that are frozen are not listed
        not isinstance(holder, tuple | dict)
        or any(h is not holders and not isinstance(h, FrameType) for h in gc.get_referrers(holder))
        for holder in holders
        if not isinstance(holder, FrameType)
    )


# ---- masks of a class of their own ------------------------------------------------------------


def ask_mask(func: Callable, types: Sequence[type], args: tuple, kwargs: Named) -> object:
    """Call ``__torch_function__`` of the class of attention's mask, where it overrides torch's;
    else return NotImplemented.

    Raises:
        MissingJetRule: the class returns NotImplemented.
    """
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    kind: Any = type(mask)
    if func is not F.scaled_dot_product_attention or kind not in types:
        return NotImplemented
    default: Any = Tensor.__torch_function__
    if issubclass(kind, DerivativeTensor) or kind.__torch_function__.__func__ is default.__func__:
        return NotImplemented
    plain = with_plain_mask(args, kwargs)
    if plain is not None:
        return func(**plain)
    result = kind.__torch_function__(func, types, args, kwargs)
    if result is NotImplemented:
        raise missing_rule(
            func, f"its mask is a {kind.__module__}.{kind.__qualname__}; pass a plain tensor"
        )
    return result


def refuse_inside_autograd_function(func: Callable, args: tuple, kwargs: dict | None) -> None:
    """Raise RuntimeError if the call comes from within an autograd Function."""
    if not forward_mode_is_on():
        leaves = torch_private.pytree.tree_leaves((args, kwargs))
        derivative = next(leaf for leaf in leaves if isinstance(leaf, DerivativeTensor))
        surrounding = derivative.pass_layout.surrounding
        refuse_opaque_functions(func, args, surrounding, DerivativeTensor)


def check_pass(func: Callable, args: tuple, result: object) -> None:
    """Raise RuntimeError if ``result`` belongs to a pass that has ended.

    It may in a backward, where a checkpoint is recomputed.
    """
    # A function that returns None, such as __setitem__, wrote into its first argument.
    probe = args[0] if result is None else result
    if isinstance(probe, list | tuple) and probe:
        probe = probe[0]
    if isinstance(probe, DerivativeTensor):
        jet_pass = probe.pass_layout.jet_pass
        if jet_pass is not None and jet_pass.ended and torch_private.current_graph_task_id() == -1:
            raise stale_tensor_error(f"{function_name(func)} was called with")


def stale_tensor_error(what: str) -> RuntimeError:
    """Return the error for a tensor of a pass that has ended; ``what`` begins its message."""
    return RuntimeError(
        f"{what} a tensor that was kept from an earlier pass of jx.jet, jx.jvp or a penalty, which "
        "has ended, along other directions; return it from the function in that pass "
        "(jx.jvp: has_aux=True), or keep tensor.detach(). If a module keeps it (a buffer, a "
        "cache), have its forward detach it"
    )
