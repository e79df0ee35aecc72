"""Which library multiplies matrices on the CPU: the stacks of linear layers, and the NTK's blocks.

torch sends float32 products to MKL. On processors that are not Intel's, oneDNN, which torch ships
too, was 10 to 15 % faster for ``x Wᵀ`` and ``g W`` at thousands of rows (AMD Zen 4: 212 against
185 Gflop/s on two cores; benchmarks/derivatives.py), and no faster for weight gradients, which
therefore stay with torch.
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
    """Whether oneDNN takes float32 products here; ``JACHESS_GEMM=onednn|torch`` decides otherwise.

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
    """Whether `rows_times` would give this product to oneDNN."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() >= least_rows * x.shape[-1]
        and weight.numel() > 0
        # not tensors that record: torch 2.12 compiles such a call for constant weights alone
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and not torch.compiler.is_compiling()
        and not transformed()
        and onednn_preferred()
    )


def rows_times(
    x: Tensor, weight: Tensor, least_rows: int = _MINIMUM_ROWS, bias: Tensor | None = None
) -> Tensor:
    """``x @ weight.mT`` for x ``[..., k]`` and weight ``[n, k]``, plus bias ``[n]``; not
    differentiable by itself.

    Args:
        least_rows: of x, from which oneDNN is worth its call; fewer where k is long.

    A caller that needs a derivative of the result must use torch's functions where gradients are
    enabled (`stacked_linear`).
    """
    if onednn_serves(x, weight, least_rows):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return torch.nn.functional.linear(x, weight, bias)
