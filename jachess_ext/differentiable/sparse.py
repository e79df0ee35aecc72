"""Sparse tensors, which hold no tangents in torch."""

from __future__ import annotations

from torch import Tensor

from .formulas import TABLE, Row
from .levels import levels_of
from .registry import answers


@answers(Tensor.to_sparse)
def to_sparse(input: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Call torch's `to_sparse`; raise NotImplementedError in forward mode."""
    if levels_of([input]).forward:
        raise NotImplementedError(
            "Tensor.to_sparse is not differentiable in forward mode, because torch's sparse "
            "tensors hold no tangent: keep the tensor dense there, or differentiate in reverse "
            "mode alone (create_graph=True, or torch.func.grad of grad)."
        )
    return input.to_sparse(*args, **kwargs)  # type: ignore[call-overload,no-any-return]


TABLE.append(
    Row("to_sparse", "forward, mixed", "", "Not served: torch's sparse tensors hold no tangent.")
)
