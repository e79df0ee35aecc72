"""`DerivativeTensor`, what a `JetTensor` and a `DualTensor` share, and the checks of every call."""

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
from ...ops.library import forward_mode_is_on, unwatched
from .autograd_functions import is_apply, refuse_opaque_functions
from .complex_rules import takes_complex
from .errors import function_name, missing_rule
from .layout import JetLayout, iterate_tensors, replace_tensors
from .types import Named


class DerivativeTensor(torch.Tensor):
    """A tensor with the shape, dtype and device of a primal, which carries derivatives beside it.

    torch's own getters go through ``__torch_function__``; model code reads these properties often,
    and plain Python ones are cheaper.

    Below them the wrapper itself always requires a gradient: of such a tensor torch reads no number
    where a function takes one (``alpha``, ``p``, ``eps``), which would lose the derivative.
    """

    @property
    def pass_layout(self) -> JetLayout:
        """Return the layout of the jets of its pass."""
        raise NotImplementedError

    @property
    def autograd_tensor(self) -> Tensor:
        """Return the plain tensor that autograd knows."""
        raise NotImplementedError

    def is_constant(self) -> bool:
        """Return whether its tangents are zero and stay so until one is written into it."""
        raise NotImplementedError

    def make_constant(self, value: Tensor) -> Tensor:
        """Return a plain tensor as a constant of the same pass; itself where its dtype carries no
        derivatives."""
        raise NotImplementedError

    def replace_tensor(self, plain: Tensor) -> None:
        """Turn a plain tensor into this one in place, for every variable that holds it.

        Raises:
            RuntimeError: autograd, or a weak reference, knows the plain tensor.
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
    """Return whether the dtype can carry derivatives: real and complex numbers, not integers."""
    return tensor.is_floating_point() or tensor.is_complex()


def check_complex(func: Callable) -> None:
    """Raise MissingJetRule for a function whose rule holds for real numbers alone.

    An autograd Function that is served is so for complex numbers, too.
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
    """Refuse calls that no tensor of class ``cls`` can take part in.

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
    """Raise MissingJetRule if a function of Python takes a number where a tensor of no dimension
    stands that carries derivatives.

    Functions of C++ refuse it themselves, before a rule is asked.
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
        # No special value, such as 0 or 1, for which the function may do without the number.
        return torch.full((), 0.3, dtype=tensor.dtype, device=tensor.device, requires_grad=True)

    devices = {t.device for t in iterate_tensors((args, kwargs)) if t.device.type == "cuda"}
    with unwatched(), torch.random.fork_rng(devices), torch.enable_grad():
        try:
            func(*replace_tensors(args, plain), **replace_tensors(kwargs, plain))
        except TypeError as error:
            raise missing_rule(func, f"a number has no derivative ({error})") from error
        except Exception:  # of the stand-ins, or torch's own, which the rule raises again
            return


# ---- plain tensors that are written into ------------------------------------------------------


def _writes_in_place(func: Callable) -> bool:
    """Return whether a function writes into its first argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_")


def convert_buffer(args: tuple, kwargs: Named) -> None:
    """Turn the plain tensor that a call writes into, in place, to a constant of the pass.

    A model fills what `torch.zeros` or `torch.empty` returned; every variable that holds the buffer
    has to see the derivatives.  A tensor that any object holds, as a module does, may live longer
    than the pass, and one that shares its memory would miss the write: both stay plain.
    """
    buffer = args[0]
    if (
        buffer.requires_grad
        or buffer.layout is not torch.strided
        or not carries_derivatives(buffer)
    ):
        return
    # Storage and tensor; the tensor that `untyped_storage` returns is the other one.
    if torch_private.storage_use_count(buffer.untyped_storage()._cdata) > 2 or _is_shared(args):
        return
    tensors = iterate_tensors((args, kwargs))
    derivative = next(t for t in tensors if isinstance(t, DerivativeTensor))
    constant: Any = derivative.make_constant(buffer.detach())
    try:
        constant.replace_tensor(buffer)
    except RuntimeError:
        return


def _is_shared(args: tuple) -> bool:
    """Return whether an object may hold the first argument, beside variables of functions that run,
    their arguments among them."""
    holders = [h for h in gc.get_referrers(args[0]) if h is not args]
    return gc.get_freeze_count() > 0 or any(  # what is frozen is not found
        not isinstance(holder, tuple | dict)
        or any(h is not holders and not isinstance(h, FrameType) for h in gc.get_referrers(holder))
        for holder in holders
        if not isinstance(holder, FrameType)
    )


# ---- masks of a class of their own ------------------------------------------------------------


def ask_mask(func: Callable, types: Sequence[type], args: tuple, kwargs: Named) -> object:
    """Return what the class of attention's mask answers, if it has an answer of its own; else
    NotImplemented.

    Raises:
        MissingJetRule: it does not answer.
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
    # torch switches forward mode off inside of autograd Functions (registry.py): a flag to read at
    # each call, where a look at the stack would be slow.
    if not forward_mode_is_on():
        leaves = torch_private.pytree.tree_leaves((args, kwargs))
        derivative = next(leaf for leaf in leaves if isinstance(leaf, DerivativeTensor))
        surrounding = derivative.pass_layout.surrounding
        refuse_opaque_functions(func, args, surrounding, DerivativeTensor)


def check_pass(func: Callable, args: tuple, result: object) -> None:
    """Raise RuntimeError if ``result`` belongs to a pass that has ended.

    In a backward, where a checkpoint may run again, it may.
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
