"""`DerivativeTensor`, what a `JetTensor` and a `DualTensor` share, and the checks of every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from .. import torch_private
from ..ops.library import unwatched
from .layout import JetLayout, each_tensor, replace_tensors
from .registry import (
    forward_mode_is_on,
    function_name,
    missing_rule,
    refuse_opaque_functions,
    takes_complex,
)


class DerivativeTensor(torch.Tensor):
    """A tensor with the shape, dtype and device of a primal, which carries derivatives beside it.

    torch's own getters go through ``__torch_function__``; model code reads these properties often,
    and plain Python ones are cheaper.

    Below them the wrapper itself always requires a gradient: of such a tensor torch reads no number
    where a function takes one (``alpha``, ``p``, ``eps``), which would lose the derivative.
    """

    @property
    def layout_of_pass(self) -> JetLayout:
        """Return the layout of the jets of its pass."""
        raise NotImplementedError

    @property
    def _recorded(self) -> Tensor:
        """Return the plain tensor that autograd knows."""
        raise NotImplementedError

    def is_constant(self) -> bool:
        """Return whether its tangents are zero and stay so until one is written into it."""
        raise NotImplementedError

    def as_constant(self, value: Tensor) -> Tensor:
        """Return a plain tensor as a constant of the same pass; itself where its dtype carries no
        derivatives."""
        raise NotImplementedError

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._recorded.requires_grad

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self._recorded.is_leaf

    @property
    def grad_fn(self) -> Node | None:  # type: ignore[override]
        return self._recorded.grad_fn

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
        check_place(func, args, kwargs)
        raise missing_rule(func)


# ---- checks of a call -------------------------------------------------------------------------


def carries_derivatives(tensor: Tensor) -> bool:
    """Return whether the dtype can carry derivatives: real and complex numbers, not integers."""
    return tensor.is_floating_point() or tensor.is_complex()


def check_complex(func: Callable) -> None:
    """Raise MissingJetRule for a function whose rule holds for real numbers alone."""
    if not takes_complex(func):
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
    if isinstance(func, FunctionType):
        check_numbers(func, args, kwargs or {})
    if kwargs and kwargs.get("out") is not None:
        raise missing_rule(func, "a result cannot be written into out=")
    if len(types) > 1 and any(
        issubclass(t, DerivativeTensor) and not issubclass(cls, t) for t in types
    ):
        raise ValueError(
            "tensors of different derivatives met in one operation; run one jx.jet or jx.jvp at "
            "a time"
        )
    check_place(func, args, kwargs)


def check_numbers(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
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

    devices = {t.device for t in each_tensor((args, kwargs)) if t.device.type == "cuda"}
    with unwatched(), torch.random.fork_rng(devices), torch.enable_grad():
        try:
            func(*replace_tensors(args, plain), **replace_tensors(kwargs, plain))
        except TypeError as error:
            raise missing_rule(func, f"a number has no derivative ({error})") from error
        except Exception:  # of the stand-ins, or torch's own, which the rule raises again
            return


_BY_PLACE = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def with_plain_mask(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return attention's arguments by their names, with a plain mask, or `is_causal`, in place of a
    `CausalBias`; None where there is no such mask.

    It is a tensor whose memory nobody has written: its class alone knows what it means.
    """
    call = dict(zip(_BY_PLACE, args, strict=False)) | kwargs
    bias: Any = call.get("attn_mask")
    # By its name, since its module takes seconds to import.
    kind = f"{type(bias).__module__}.{type(bias).__name__}"
    if kind != "torch.nn.attention.bias.CausalBias" or call.get("is_causal"):
        return None
    rows, keys = bias.seq_len_q, bias.seq_len_kv
    causal = bias.variant.name == "UPPER_LEFT" or rows == keys
    ones = torch.ones(rows, keys, dtype=torch.bool, device=call["query"].device)
    return call | {"is_causal": causal, "attn_mask": None if causal else ones.tril(keys - rows)}


def ask_mask(func: Callable, types: Sequence[type], args: tuple, kwargs: dict[str, Any]) -> object:
    """Return what the class of attention's mask answers, if it has an answer of its own; else
    NotImplemented.

    Raises:
        MissingJetRule: it does not answer.
    """
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    kind: Any = type(mask)
    if func is not F.scaled_dot_product_attention or kind not in types:
        return NotImplemented
    torchs: Any = Tensor.__torch_function__
    if issubclass(kind, DerivativeTensor) or kind.__torch_function__.__func__ is torchs.__func__:
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


def check_place(func: Callable, args: tuple, kwargs: dict | None) -> None:
    """Raise RuntimeError if the call comes from within an autograd Function."""
    # torch switches forward mode off inside of autograd Functions (registry.py): a flag to read at
    # each call, where a look at the stack would be slow.
    if not forward_mode_is_on():
        leaves = torch_private.pytree.tree_leaves((args, kwargs))
        derivative = next(leaf for leaf in leaves if isinstance(leaf, DerivativeTensor))
        refuse_opaque_functions(func, args, derivative.layout_of_pass.surrounding)


def check_run(func: Callable, args: tuple, result: object) -> None:
    """Raise RuntimeError if ``result`` belongs to a pass that has ended.

    In a backward, where a checkpoint may run again, it may.
    """
    # A function that returns None, such as __setitem__, wrote into its first argument.
    probe = args[0] if result is None else result
    if isinstance(probe, list | tuple) and probe:
        probe = probe[0]
    if isinstance(probe, DerivativeTensor):
        run = probe.layout_of_pass.run
        if run is not None and run.ended and torch_private.current_graph_task_id() == -1:
            raise kept_too_long(f"{function_name(func)} was called with")


def kept_too_long(what: str) -> RuntimeError:
    """Return the error for a tensor of a pass that has ended; ``what`` begins its message."""
    return RuntimeError(
        f"{what} a tensor that was kept from an earlier pass of jx.jet, jx.jvp or a penalty, which "
        "has ended, along other directions; return it from the function in that pass "
        "(jx.jvp: has_aux=True), or keep tensor.detach(). If a module keeps it (a buffer, a "
        "cache), have its forward detach it"
    )
