"""Argument checks of the operators' Python wrappers: what was wrong, what was expected, the fix."""

import torch
from torch import Tensor

MAX_DIRECTIONS = 4
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def pair_list(q: int) -> list[tuple[int, int]]:
    """Pairs i < j of q directions, in the order of the second-order streams."""
    return [(i, j) for i in range(q) for j in range(i + 1, q)]


def check_jet(op: str, x: Tensor, q: int, name: str = "x", last: str | None = None) -> None:
    """Refuse what is not a stack of jet streams [S, ...] of q directions; `name` names x.

    Args:
        last: what the last dimension is, where there must be one behind the streams.

    Raises:
        ValueError: q is not 1..4, S is neither 1 + q nor 1 + q + q(q-1)/2, or no last dimension.
        TypeError: x is not fp64, fp32, bf16 or fp16.
    """
    if not 1 <= q <= MAX_DIRECTIONS:
        raise ValueError(
            f"{op}: q is {q}; expected 1 to {MAX_DIRECTIONS} directions: split the directions "
            "over several jets."
        )
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{op}: {name} has dtype {x.dtype}; expected float64, float32, bfloat16 or float16: "
            "convert it with .to()."
        )
    first, second = 1 + q, 1 + q + q * (q - 1) // 2
    if x.dim() == 0 or x.shape[0] not in (first, second):
        raise ValueError(
            f"{op}: {name} has shape {list(x.shape)}; q = {q} expects {first} (first order) or "
            f"{second} (second order) streams in front, [S, ...]: stack them with torch.stack."
        )
    if last is not None and x.dim() < 2:
        raise ValueError(
            f"{op}: {name} has shape {list(x.shape)}; expected [S, ..., D], streams in front and "
            f"{last} last."
        )


def check_same(op: str, name: str, t: Tensor, x: Tensor, like: str = "x") -> None:
    """Refuse a tensor that has not x's shape, dtype and device; `like` names x.

    Raises:
        ValueError: another shape or device.
        TypeError: another dtype.
    """
    if t.shape != x.shape:
        raise ValueError(
            f"{op}: {name} has shape {list(t.shape)} but {like} has {list(x.shape)}: give both the "
            "same shape."
        )
    if t.dtype != x.dtype:
        raise TypeError(
            f"{op}: {name} has dtype {t.dtype} but {like} has {x.dtype}: convert one with .to()."
        )
    if t.device != x.device:
        raise ValueError(
            f"{op}: {name} is on {t.device} but {like} is on {x.device}: move it with "
            f".to({like}.device)."
        )


def check_channels(op: str, name: str, parameter: Tensor | None, x: Tensor) -> None:
    """Refuse a weight or bias that is not [D], of a floating dtype, on x's device.

    Raises:
        ValueError: wrong shape or device.
        TypeError: wrong dtype.
    """
    if parameter is None:
        return
    if parameter.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: {name} has shape {list(parameter.shape)}; expected [{x.shape[-1]}], the last "
            f"dimension of x, which is {list(x.shape)}."
        )
    if parameter.dtype not in DTYPES:
        raise TypeError(
            f"{op}: {name} has dtype {parameter.dtype}; expected float64, float32, bfloat16 or "
            "float16: convert it with .to()."
        )
    if parameter.device != x.device:
        raise ValueError(
            f"{op}: {name} is on {parameter.device} but x is on {x.device}: move it with "
            ".to(x.device)."
        )


def widened(x: Tensor) -> Tensor:
    """x in the dtype sums are kept in: fp32 for the 16-bit types, else its own."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
