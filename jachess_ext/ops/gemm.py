"""Matrix products on the CPU by oneDNN instead of MKL where that is faster.

On processors other than Intel's, oneDNN, which torch ships too, is faster in float32 for ``x Wᵀ``
and ``g W`` at thousands of rows (212 against 185 Gflop/s on two cores of an AMD Zen 4, 242 against
107 on a core of one whose AVX-512 is wider), and hardly faster for weight gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from .library import constant_when_compiled, transformed

_MINIMUM_ROWS = 128  # below, the call costs more than it saves
_PLAIN = (Tensor, torch.nn.Parameter)


@constant_when_compiled
@lru_cache
def onednn_preferred() -> bool:
    """Return whether oneDNN takes float32 products; ``JACHESS_GEMM=onednn|torch`` overrides it.

    Raises:
        ValueError: JACHESS_GEMM has another value.
    """
    wish = os.environ.get("JACHESS_GEMM", "auto")
    if wish not in ("auto", "onednn", "torch"):
        raise ValueError(f"JACHESS_GEMM is {wish!r}; expected 'auto', 'onednn' or 'torch'")
    able = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if wish == "auto":
        return able and torch.backends.mkl.is_available() and not _is_intel()
    return able and wish == "onednn"


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True  # unknown: torch's own choice


def onednn_serves(x: Tensor, weight: Tensor, least_rows: int = _MINIMUM_ROWS) -> bool:
    """Return whether `rows_times` gives this product to oneDNN."""
    plain = type(x) in _PLAIN and type(weight) in _PLAIN and not transformed()
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() >= least_rows * x.shape[-1]
        and weight.numel() > 0
        and (plain or torch.compiler.is_compiling())  # stand-ins, while a graph is made
        and onednn_preferred()
    )


def rows_times(
    x: Tensor, weight: Tensor, least_rows: int = _MINIMUM_ROWS, bias: Tensor | None = None
) -> Tensor:
    """Return ``x @ weight.mT + bias`` for x ``[..., k]``, weight ``[n, k]`` and bias ``[n]``, which
    has no derivative: where gradients are needed, call torch's functions instead.

    Args:
        least_rows: rows of x from which oneDNN is worth its call; fewer where k is long.
    """
    if onednn_serves(x, weight, least_rows):
        product = _operator() if torch.compiler.is_compiling() else _product
        return product(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


@lru_cache
def _operator() -> Callable[..., Tensor]:
    """Return an operator of its own: Inductor compiles a call of oneDNN's for constant weights."""
    library = torch.library.Library("jachess", "FRAGMENT")
    library.define("rows_times(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    library.impl("rows_times", _product, "CPU")
    torch.library.register_fake(
        "jachess::rows_times",
        lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)),
        lib=library,
    )
    _KEPT.append(library)
    return torch.ops.jachess.rows_times


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


_KEPT: list[torch.library.Library] = []  # whose operators go with it
