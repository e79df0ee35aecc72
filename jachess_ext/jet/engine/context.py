"""Switches around the engine: autocast off around its rules, ``torch.compile`` off around passes.

Autocast works below ``__torch_function__``: it would cast the arguments of the functions that a
rule calls (the derivative of a GELU calls ``exp``, which autocast runs in float32 on a GPU), not
the arguments of the function that the model called.  So a rule runs without autocast, on arguments
that are cast here as torch casts the function's arguments on that device.  The names are those of
torch's own lists (ATen/autocast_mode.h; for the CPU, autocast_mode.cpp), and of Python functions
composed of them; `python_tests/jet/test_autocast.py` compares every rule with torch.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ... import torch_private
from ...torch_private import functional as F
from .errors import last_name, missing_rule
from .layout import iter_tensors, replace_tensors
from .types import T

_JET_PACKAGE = __package__.removesuffix(".engine")
Fn = TypeVar("Fn", bound=Callable[..., Any])

# Functions that autocast runs in its own dtype, float16 or bfloat16.
_LOW = {
    *("linear", "matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "spmm", "addmm", "baddbmm"),
    *("addbmm", "einsum", "vecdot", "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d"),
    *("conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}
_LOW_ON_CPU = {"affine_grid"}
_LOW_ON_GPU = {"mv", "addmv", "addr", "prelu", "chain_matmul", "multi_dot"}
# Functions that autocast runs in float32.
_FP32 = {
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "nll_loss", "cross_entropy", "kl_div"),
    *("binary_cross_entropy_with_logits", "poisson_nll_loss", "hinge_embedding_loss"),
    *("cosine_embedding_loss", "margin_ranking_loss", "soft_margin_loss", "triplet_margin_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "cdist"),
}
_FP32_ON_CPU = {"binary_cross_entropy", "prod", "avg_pool3d", "adaptive_avg_pool3d", "grid_sample"}
_FP32_ON_GPU = {
    *("acos", "arccos", "asin", "arcsin", "cosh", "sinh", "tan", "erfinv", "exp", "expm1"),
    *("log", "log2", "log10", "log1p", "reciprocal", "__rtruediv__", "__rdiv__", "rsqrt"),
    *("pow", "__pow__", "__rpow__", "square", "softplus", "layer_norm", "rms_norm", "group_norm"),
    *("normalize", "norm", "cosine_similarity", "dist", "pdist", "renorm", "logsumexp"),
    *("interpolate", "pairwise_distance"),
}
# Functions whose kernels mix dtypes.
_REFUSED = {
    *("lstm", "gru", "rnn_tanh", "rnn_relu"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
}
# Functions that autocast runs in the dtype of their argument ``dtype``; by default in float32.
_DTYPE_ON_GPU = {
    *("softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod", "vector_norm", "matrix_norm")
}


def call_rule(function: Callable, rule: Callable, args: tuple, kwargs: dict) -> Any:
    """Call ``rule`` with its arguments cast as the current autocast casts those of
    ``function``."""
    if not torch_private.is_any_autocast_enabled():
        return rule(*args, **kwargs)
    tensors = list(iter_tensors((args, kwargs)))
    device = next((t.device.type for t in tensors if _is_jet(t)), "")
    if not device or not torch.is_autocast_enabled(device) or not _is_engine_rule(rule):
        return rule(*args, **kwargs)
    if last_name(function) in _REFUSED:
        raise missing_rule(
            function,
            "not under autocast; call the module within torch.autocast(..., enabled=False)",
        )
    kind = _cast_kind(function, _on_gpu(device))
    if function is torch.einsum and not _on_gpu(device) and len(tensors) == 1:
        kind = None  # a sum of one operand, not a product
    if function is F.interpolate and "area" in (kwargs.get("mode"), *args[3:4]):
        kind = None  # an average over windows, which autocast does not cast
    if kind == "lower":
        args, kwargs = _cast((args, kwargs), torch.get_autocast_dtype(device), device)
    elif kind == "wide":
        args, kwargs = _cast((args, kwargs), torch.float32, device)
    elif kind == "dtype" and _autocast_casts(tensors[0], device):
        dtypes = [a for a in args if isinstance(a, torch.dtype)]
        kwargs = kwargs if kwargs.get("dtype") or dtypes else {**kwargs, "dtype": torch.float32}
    with without_autocast(device):
        return rule(*args, **kwargs)


def _on_gpu(device: str) -> bool:
    """Return whether autocast uses its lists for CUDA on a device type, as on any accelerator."""
    return device != "cpu"


@cache
def _cast_kind(function: Callable, on_gpu: bool) -> str | None:
    """Return how autocast treats a function: "lower", "wide", "dtype", or None for no cast."""
    name = last_name(function)
    if name in _LOW or name in (_LOW_ON_GPU if on_gpu else _LOW_ON_CPU):
        return "lower"
    if name in _FP32 or name in (_FP32_ON_GPU if on_gpu else _FP32_ON_CPU):
        return "wide"
    return "dtype" if on_gpu and name in _DTYPE_ON_GPU else None


def _is_engine_rule(rule: Callable) -> bool:
    """Return whether a rule needs the casts of this file.

    A user's rule needs none, as it calls torch's functions under torch's autocast.  The
    forward-mode rule needs none either, as it calls the function itself, whose arguments autocast
    casts.
    """
    return rule.__module__.startswith(_JET_PACKAGE) and not hasattr(rule, "under_autocast")


@contextmanager
def without_autocast(device: str) -> Iterator[None]:
    """Switch autocast off; cheaper than torch.autocast(enabled=False), which searches for a GPU."""
    was_enabled = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, was_enabled)


def _is_jet(tensor: Tensor) -> bool:
    return hasattr(tensor, "jet_layout")


def _autocast_casts(tensor: Tensor, device: str) -> bool:
    """Return whether autocast for this device type casts a tensor.

    It does not cast float64, nor tensor subclasses that wrap others, such as quantised tensors,
    whose rules cast them.
    """
    has_cast_dtype = tensor.dtype.is_floating_point and tensor.dtype != torch.float64
    is_wrapper = not _is_jet(tensor) and torch_private.is_traceable_wrapper_subclass(tensor)
    return has_cast_dtype and tensor.device.type == device and not is_wrapper


def _cast(value: T, dtype: torch.dtype, device: str) -> T:
    return replace_tensors(value, lambda t: t.to(dtype) if _autocast_casts(t, device) else t)


# ---- torch.compile ---------------------------------------------------------------------------

_REASON = "the jet engine runs eagerly: dynamo cannot trace it (docs/compile.md)"


def without_dynamo(fn: Fn) -> Fn:
    """Decorate ``fn`` to run with ``torch.compile`` switched off.

    Dynamo cannot trace a `JetTensor`: it would break the graph at every frame of a compiled model.
    A compiled model that ``fn`` calls runs its Python code instead.  The decorator costs nothing
    until torch._dynamo is imported (this file does not, since that takes seconds).
    """
    eager_fn: Fn | None = None

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal eager_fn
        if eager_fn is None:
            if "torch._dynamo" not in sys.modules:
                return fn(*args, **kwargs)
            eager_fn = _disable_dynamo(fn)
        return eager_fn(*args, **kwargs)

    return cast(Fn, run)


class _ForceEager:
    """Context manager in which compiled models run their Python code, on all threads.

    The stance of torch.compile is global, and `torch.compiler.set_stance` restores the stance that
    it replaced.  If two threads overlapped, the second would replace "force_eager" and restore it
    at the end.  So the first thread to enter sets the stance, and the last to leave restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                self._stance = torch.compiler.set_stance("force_eager")
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._stance.__exit__(*error)


FORCE_EAGER = _ForceEager()


def _disable_dynamo(fn: Fn) -> Fn:
    import torch._dynamo

    def run(*args: Any, **kwargs: Any) -> Any:
        with FORCE_EAGER:  # `disable` does not reach models that were compiled separately
            return fn(*args, **kwargs)

    return torch._dynamo.disable(run, reason=_REASON)
