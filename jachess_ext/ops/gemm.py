"""Matrix products on the CPU by oneDNN instead of MKL if that is faster.

On processors other than Intel's, oneDNN, which torch also ships, is faster in float32 for ``x Wᵀ``
and ``g W`` with thousands of rows (0.76 to 0.79 of the time for 1536 to 384 features on an AMD
EPYC; benchmarks/derivatives.py), and hardly faster for weight gradients.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..torch_private import functional
from .library import NAMESPACE, OPS, constant_when_compiled, recorded, transformed

_MINIMUM_ROWS = 128  # with fewer rows, the call costs more than it saves
_PLAIN = (Tensor, torch.nn.Parameter)


@constant_when_compiled
@lru_cache
def onednn_preferred() -> bool:
    """Return whether oneDNN computes float32 products.

    It does on processors other than Intel's, unless the environment variable
    ``JACHESS_GEMM=onednn|torch`` decides.

    Raises:
        ValueError: JACHESS_GEMM has another value.
    """
    library = os.environ.get("JACHESS_GEMM", "auto")
    if library not in ("auto", "onednn", "torch"):
        raise ValueError(f"JACHESS_GEMM is {library!r}; expected 'auto', 'onednn' or 'torch'")
    onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if library != "auto" or not torch.backends.mkl.is_available():
        return onednn and library == "onednn"
    with suppress(OSError):
        return onednn and "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    return False  # unknown processor: torch's own choice


def _fits_onednn(x: Tensor, weight: Tensor, least_rows: int) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() >= least_rows * x.shape[-1]
        and weight.numel() > 0
    )


def onednn_takes(x: Tensor, weight: Tensor, least_rows: int = _MINIMUM_ROWS) -> bool:
    """Return whether `rows_times` computes the product ``x @ weight.mT`` by oneDNN in eager
    mode."""
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
    """Return ``x @ weight.mT + bias``, ``[..., n]``, without an autograd graph.

    Args:
        x: ``[..., k]``.
        weight: ``[n, k]``.
        least_rows: smallest number of rows of x for which oneDNN is used; it is faster from fewer
            rows on if k is large.
        bias: ``[n]``, or None.
    """
    compiling = torch.compiler.is_compiling() and not recorded()
    if compiling and _fits_onednn(x, weight, least_rows) and onednn_preferred():
        _define_operator()
        return OPS.rows_times(x, weight, bias)
    if onednn_takes(x, weight, least_rows):
        return _product(x, weight, bias)
    return functional.linear(x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@lru_cache  # holds the library, since its operators are removed when it is freed
def _define_operator() -> torch.library.Library:
    """Define ``jachess::rows_times``, since Inductor compiles oneDNN's own operator only for
    constant weights."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define("rows_times(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    library.impl("rows_times", _product, "CPU")
    torch.library.register_fake(
        f"{NAMESPACE}::rows_times",
        lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)),
        lib=library,
    )
    return library
