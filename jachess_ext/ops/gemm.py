"""Matrix products on the CPU by oneDNN instead of MKL where that is faster.

On processors other than Intel's, oneDNN, which torch ships too, is faster in float32 for ``x Wᵀ``
and ``g W`` at thousands of rows (0.76 to 0.79 of the time for 1536 to 384 features on an AMD EPYC;
benchmarks/derivatives.py), and hardly faster for weight gradients.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..torch_private import functional
from .library import constant_when_compiled, recorded, transformed

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
    if wish != "auto" or not torch.backends.mkl.is_available():
        return able and wish == "onednn"
    with suppress(OSError):
        return able and "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    return False  # unknown: torch's own choice


def _fits_onednn(x: Tensor, weight: Tensor, least_rows: int) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() >= least_rows * x.shape[-1]
        and weight.numel() > 0
    )


def onednn_takes(x: Tensor, weight: Tensor, least_rows: int = _MINIMUM_ROWS) -> bool:
    """Return whether `rows_times` computes this product with oneDNN, outside of graphs."""
    return (
        type(x) in _PLAIN
        and type(weight) in _PLAIN
        and not torch.compiler.is_compiling()
        and _fits_onednn(x, weight, least_rows)
        and not transformed()
        and onednn_preferred()
        and not recorded()
    )


def rows_times(
    x: Tensor, weight: Tensor, least_rows: int = _MINIMUM_ROWS, bias: Tensor | None = None
) -> Tensor:
    """Return ``x @ weight.mT + bias`` without a graph, of ``[..., k]``, ``[n, k]`` and ``[n]``.

    Args:
        least_rows: number of rows of x from which on oneDNN is used; fewer pay where k is long.
    """
    compiling = torch.compiler.is_compiling() and not recorded()
    if compiling and _fits_onednn(x, weight, least_rows) and onednn_preferred():
        _define_operator()
        return torch.ops.jachess.rows_times(x, weight, bias)
    if onednn_takes(x, weight, least_rows):
        return _product(x, weight, bias)
    return functional.linear(x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@lru_cache  # which keeps the library, whose operators go with it
def _define_operator() -> torch.library.Library:
    """Define ``jachess::rows_times``: Inductor compiles oneDNN's own for constant weights alone."""
    library = torch.library.Library("jachess", "FRAGMENT")
    library.define("rows_times(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    library.impl("rows_times", _product, "CPU")
    torch.library.register_fake(
        "jachess::rows_times",
        lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)),
        lib=library,
    )
    return library
