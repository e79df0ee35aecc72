"""Matrix products on the CPU by oneDNN instead of MKL where that is faster.

On processors other than Intel's, oneDNN, which torch ships too, is 10 to 15 % faster in float32 for
``x Wᵀ`` and ``g W`` at thousands of rows (AMD Zen 4: 212 against 185 Gflop/s on two cores;
benchmarks/derivatives.py), and no faster for weight gradients.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from .library import transformed

_MINIMUM_ROWS = 128  # below, the call costs more than it saves
_PLAIN = (Tensor, torch.nn.Parameter)


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
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() >= least_rows * x.shape[-1]
        and weight.numel() > 0
        # torch 2.12 compiles the call for constant weights alone
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and not torch.compiler.is_compiling()
        and not transformed()
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
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return torch.nn.functional.linear(x, weight, bias)
