"""The oldest supported torch, and private names of torch, each looked up at first use.

Torch 2.10 to 2.15 were tested; newer ones are accepted (`nox -s new_torch` tests them).  If a newer
torch lacks a name, `MissingPrivate` is raised where the name is used, and nowhere else.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import functional
    from torch.utils import _pytree as pytree

__all__ = ["functional", "pytree"]

_PATHS = {
    "add_batch_dim": "torch._add_batch_dim",
    "assert_async": "torch._assert_async",
    "autograd": "torch._C._autograd",
    "disable_torch_function": "torch._C.DisableTorchFunction",
    "dispatch_has_kernel": "torch._C._dispatch_has_kernel_for_dispatch_key",
    "function_modes": "torch.overrides._get_current_function_mode_stack",
    "functorch": "torch._C._functorch",
    "fused_attention_choice": "torch._fused_sdp_choice",
    "higher_order_operator": "torch._ops.HigherOrderOperator",
    "current_graph_task_id": "torch._C._current_graph_task_id",
    "current_dispatch_modes": "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "is_any_autocast_enabled": "torch._C._is_any_autocast_enabled",
    "is_traceable_wrapper_subclass": "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    "neg_view": "torch._neg_view",
    "pack_padded_sequence": "torch._C._VariableFunctions._pack_padded_sequence",
    "pad_packed_sequence": "torch._C._VariableFunctions._pad_packed_sequence",
    "pyfunctorch": "torch._functorch.pyfunctorch",
    "pop_dispatch_mode": "torch.utils._python_dispatch._pop_mode",
    "process_group": "torch.distributed.distributed_c10d._resolve_process_group",
    "push_dispatch_mode": "torch.utils._python_dispatch._push_mode",
    "pytree": "torch.utils._pytree",
    "remove_batch_dim": "torch._remove_batch_dim",
    "reparametrize_module": "torch.nn.utils.stateless._reparametrize_module",
    "scaled_dot_product_attention": "torch._C._nn.scaled_dot_product_attention",
    "set_forward_grad_enabled": "torch.autograd.forward_ad._set_fwd_grad_enabled",
    "set_grad_enabled": "torch._C._set_grad_enabled",
    "skip_code": "torch._dynamo.eval_frame.skip_code",
    "storage_use_count": "torch._C._storage_Use_Count",
    "unpack_dual": "torch._VF._unpack_dual",
    "TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode",
    "replicate": "torch.distributed._composable.replicate",
}


class MissingPrivate(RuntimeError):
    """Error raised if this torch lacks a private name that the package needs."""


def __getattr__(name: str) -> Any:
    if name == "functional":
        return _original_functional()
    if name not in _PATHS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = find(_PATHS[name])
    if value is None:
        import torch

        raise MissingPrivate(
            f"torch {torch.__version__} has no {_PATHS[name]}, which jachess_ext needs here; use a "
            "torch that docs/compatibility.md names, or a newer jachess_ext"
        )
    globals()[name] = value  # the next access finds it there, without this function
    return value


# ---- torch.nn.functional -----------------------------------------------------------------------
#
# Profilers and kernel libraries replace its functions temporarily (F.linear = counted).  Rules must
# not be registered for a replacement, nor call it: their calls would be counted, too.


@cache
def _original_functional() -> SimpleNamespace:
    """Return the namespace of ``torch.nn.functional`` with torch's own functions, even if they are
    replaced at present."""
    live = vars(import_module("torch.nn.functional"))
    names = {**live}
    replaced = {name for name, value in live.items() if name[0].islower() and not _is_torchs(value)}
    if replaced:
        # By type(), since isinstance uses ``__class__``, which proxies compute.
        functions = [value for value in gc.get_objects() if type(value) is FunctionType]
        # If several functions have one name, the last is torch's; the others are stubs of
        # overloads.
        functions.sort(key=lambda function: function.__code__.co_firstlineno)
        by_name = {f.__qualname__: f for f in functions if f.__globals__ is live}
        for name in replaced:  # C++ functions are in another namespace, too
            builtin = find(f"torch._C._nn.{name}") or find(f"torch._C._VariableFunctions.{name}")
            names[name] = by_name.get(name) or builtin or names[name]
    return SimpleNamespace(**names)


def _is_torchs(value: object) -> bool:
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__")).startswith("torch.")
    return not callable(value) or isinstance(value, BuiltinFunctionType | type)


def original_of(function: object) -> Any:
    """Return torch's own function for a function that replaces it in ``torch.nn.functional``; any
    other function unchanged.

    torch's Python functions in this module look themselves up by name to call
    ``__torch_function__``, to which they then pass the replacement.
    """
    if isinstance(function, BuiltinFunctionType) or not callable(function):
        return function
    originals = vars(_original_functional())
    for name, value in vars(sys.modules["torch.nn.functional"]).items():
        if value is function:
            return originals.get(name, function)
    return function


class _LiveGlobals(dict[str, object]):
    """Global variables for a function: ``local`` ones, otherwise those that a module has at the
    time of use.

    Args:
        module: the module's namespace.
        local: names and values that take precedence.
    """

    def __init__(self, module: dict[str, object], local: dict[str, object]) -> None:
        super().__init__(local)
        self._module = module

    def __missing__(self, name: str) -> object:
        return self._module[name]


_OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def copy_without_override_check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a Python function of torch without its check for ``__torch_function__``.

    A rule that called the function itself would be called again, in an endless recursion.  The copy
    runs the body directly; functions called in it still have the check.
    """
    function = getattr(function, "__wrapped__", function)
    assert isinstance(function, FunctionType)
    local = {"__name__": function.__module__, **dict.fromkeys(_OVERRIDE_CHECKS, lambda *_: False)}
    names, defaults = _LiveGlobals(function.__globals__, local), function.__defaults__
    code, closure = function.__code__, function.__closure__
    copy = FunctionType(code, names, function.__name__, defaults, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def find(path: str) -> Any:
    """Return the object at a path ``torch.<...>``; None if this torch has none."""
    value: Any = import_module("torch")
    module = "torch"
    if path.startswith("torch.nn.functional."):
        return getattr(_original_functional(), path.rpartition(".")[2], None)
    for name in path.split(".")[1:]:
        module = f"{module}.{name}"
        # An attribute of a package may be a module that has not been imported yet.
        if not hasattr(value, name):
            try:
                import_module(module)
            except ImportError:
                return None
        value = getattr(value, name, None)
    return value


def find_function_apply() -> tuple[Any, Any]:
    """Return the function that ``apply`` of every autograd Function calls, and the class whose
    ``apply`` has to be replaced to intercept all calls (None: this torch has none).

    The function's first argument is the Function's class.

    Up to torch 2.13 it is in Python and calls ``apply`` of a base class, whose replacement also
    intercepts methods bound earlier (``f = Square.apply``).  Since 2.14 it is in C++.
    """
    function = find("torch.autograd.Function")
    apply = vars(function)["apply"]
    if isinstance(apply, classmethod):
        return apply.__func__, find("torch.autograd.function._SingleLevelFunction")
    return apply, function


TORCH_FLOOR = (2, 10)


def release(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as '2.13.0+cpu' or '5.0rc1'."""
    digits = ["".join(c for c in component if c.isdigit()) for component in version.split(".")[:2]]
    return int(digits[0] or 0), int(digits[1] or 0) if len(digits) > 1 else 0


def require_torch() -> None:
    """Raise ImportError if the installed torch is older than `TORCH_FLOOR`; torch is not
    imported."""
    if "torch" in sys.modules:
        version = str(sys.modules["torch"].__version__)
    else:
        try:
            version = metadata.version("torch")
        except metadata.PackageNotFoundError:
            return
    if release(version) < TORCH_FLOOR:
        floor = ".".join(map(str, TORCH_FLOOR))
        raise ImportError(
            f"jachess_ext needs torch {floor} or newer, but torch {version} is installed: "
            f"`pip install -U 'torch>={floor}'` (the package itself need not be built again)"
        )
