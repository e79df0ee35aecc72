"""What the NTK's operators of linear layers take: inputs and cotangents of one or two sides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import DTYPES
from .library import transformed


def wide_dtype(inputs: Tensor) -> torch.dtype:
    """What is summed in: fp64 of fp64, else fp32."""
    return torch.float64 if inputs.dtype == torch.float64 else torch.float32


def widened(inputs: Tensor, cotangents: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """In `wide_dtype`; a position without a cotangent adds nothing, whatever its inputs hold."""
    dtype = wide_dtype(inputs)
    a, deltas = inputs.to(dtype), [delta.to(dtype) for delta in cotangents]
    unused = torch.stack([~delta.ne(0).any(-1).any(0) for delta in deltas]).all(0)
    return a.masked_fill(unused[..., None] & ~a.isfinite(), 0), deltas  # 0 · inf would be NaN


def widened_sides(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    other_inputs: Tensor | None,
    other_cotangents: Sequence[Tensor] | None,
) -> tuple[Tensor, list[Tensor], Tensor, list[Tensor]]:
    """Both sides, `widened`; the left one twice where there is no other."""
    left = widened(inputs, cotangents)
    if other_inputs is None or other_cotangents is None:
        return *left, *left
    return *left, *widened(other_inputs, other_cotangents)


def differentiated(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    other_inputs: Tensor | None,
    other_cotangents: Sequence[Tensor] | None,
) -> bool:
    """Whether a derivative is asked for, by autograd or a transform of torch.func."""
    operands = [inputs, *cotangents, *(other_cotangents or [])]
    if other_inputs is not None:
        operands.append(other_inputs)
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    return recorded or transformed()


def check_operands(
    operator: str,
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    other_inputs: Tensor | None,
    other_cotangents: Sequence[Tensor] | None,
) -> None:
    if (other_inputs is None) != (other_cotangents is None):
        raise ValueError(f"{operator}: pass both other_inputs and other_cotangents, or neither.")
    _check_side(operator, inputs, cotangents, inputs)
    if other_inputs is None or other_cotangents is None:
        return
    _check_side(operator, other_inputs, other_cotangents, inputs)
    if [d.shape[::3] for d in cotangents] != [d.shape[::3] for d in other_cotangents] or (
        inputs.shape[-1] != other_inputs.shape[-1]
    ):
        raise ValueError(
            f"{operator}: left and right differ in their feature sizes, or in their numbers of "
            "outputs or layers: give the cotangents of the same layers in the same order."
        )


def _check_side(operator: str, inputs: Tensor, cotangents: Sequence[Tensor], like: Tensor) -> None:
    if inputs.dim() != 3 or not cotangents:
        raise ValueError(
            f"{operator}: inputs have shape {list(inputs.shape)} and there are {len(cotangents)} "
            "cotangents; expected [N, T, d] and at least one [C, N, T, e]."
        )
    for delta in cotangents:
        outputs = cotangents[0].shape[0] if cotangents[0].dim() else 0
        if delta.dim() != 4 or delta.shape[:3] != (outputs, *inputs.shape[:2]):
            raise ValueError(
                f"{operator}: a cotangent has shape {list(delta.shape)}; expected "
                f"[C, {inputs.shape[0]}, {inputs.shape[1]}, e], with the same C for every layer."
            )
    for name, tensor in (("inputs", inputs), *(("a cotangent", delta) for delta in cotangents)):
        if tensor.dtype not in DTYPES or tensor.dtype != like.dtype:
            raise TypeError(
                f"{operator}: {name} has dtype {tensor.dtype}; expected float64, float32, bfloat16 "
                f"or float16, the same for all (the first inputs are {like.dtype}): convert it "
                "with .to()."
            )
        if tensor.device != like.device:
            raise ValueError(
                f"{operator}: {name} is on {tensor.device} but the first inputs are on "
                f"{like.device}: move it with .to(inputs.device)."
            )


def fake_kernel(
    inputs: Tensor,
    cotangents: list[Tensor],
    other_inputs: Tensor | None,
    *_: object,
) -> Tensor:
    """The result's shape and dtype, [C, N, C, M]."""
    outputs, count = cotangents[0].shape[:2]
    other_count = count if other_inputs is None else other_inputs.shape[0]
    return inputs.new_empty(outputs, count, outputs, other_count, dtype=wide_dtype(inputs))
