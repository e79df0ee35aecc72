"""Triton's interpreter, which conftest.py asks for where there is no GPU, with a GPU's bfloat16:
importing this module mends it."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrowed(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16, ties to even, as GPUs do."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def _mend_bfloat16(builder: Any) -> None:
    """Triton's interpreter holds bfloat16 as its bits, which `tl.dot` multiplies as integers, and
    truncates float32 where a GPU rounds."""

    def convert(convert_others: Any) -> Any:
        def cast(self: Any, source: Any, dtype: Any, *more: Any) -> Any:
            pair = source.dtype.scalar, dtype.scalar
            if pair == (tl.bfloat16, tl.float32):
                return interpreter.TensorHandle(_widened(source.data), tl.float32)
            if pair == (tl.float32, tl.bfloat16):
                return interpreter.TensorHandle(_narrowed(source.data), tl.bfloat16)
            return convert_others(self, source, dtype, *more)

        return cast

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        x, y = (
            _widened(t.data) if t.dtype.scalar == tl.bfloat16 else t.data.astype(np.float32)
            for t in (a, b)
        )
        return interpreter.TensorHandle(np.matmul(x, y) + d.data, d.dtype.scalar)

    for name in ("cast_impl", "create_fp_ext", "create_fp_trunc", "create_fp_to_fp"):
        if hasattr(builder, name):
            setattr(builder, name, convert(getattr(builder, name)))
    builder.create_dot = create_dot


_mend_bfloat16(interpreter.InterpreterBuilder)
