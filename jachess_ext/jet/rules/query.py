"""Questions about a tensor that carry no derivative: answered by the primal, as plain tensors.

Comparisons and index searches are piecewise constant; ``detach`` and ``item`` are a stop-gradient,
here as under autograd.  A result of these rules is therefore a constant for the derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..registry import attribute, jet_rule, spellings
from ..strides import note_memory
from ..tensor import JetTensor, primal_of

_COMPARISONS = spellings(
    *("eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__"),
    *("__gt__", "__ge__", "equal", "allclose", "isclose", "isnan", "isinf", "isfinite"),
    *("logical_not", "logical_and", "logical_or", "signbit", "sign", "round", "floor", "ceil"),
    *("argmax", "argmin", "argsort", "all", "any", "count_nonzero", "nonzero", "searchsorted"),
    *("long", "int", "short", "bool", "result_type"),
    *("item", "tolist", "__bool__", "__float__", "__int__"),
)
_LIKE = spellings(
    *("ones_like", "rand_like", "randn_like"),
    *("new_ones", "new_tensor", "bernoulli"),
)
_METADATA = spellings(
    *(
        "is_floating_point",
        "is_complex",
        "is_conj",
        "is_neg",
        "is_contiguous",
        "stride",
        "numel",
        "element_size",
    ),
    *("get_device", "nelement", "is_same_size", "is_tensor", "__format__"),
)
_ATTRIBUTES = [
    attribute(name)
    for name in ("is_cuda", "is_cpu", "is_mps", "is_meta", "is_sparse", "layout", "grad")
    + ("is_quantized", "is_nested", "is_mkldnn", "itemsize", "nbytes", "is_xla", "is_xpu")
    if hasattr(torch.Tensor, name)
]


def _on_primal(function: Callable) -> Callable:
    def rule(*args: Any, **kwargs: Any) -> Any:
        return function(*primal_of(args), **primal_of(kwargs))

    return rule


for _function in [*_COMPARISONS, *_LIKE, *_METADATA, *_ATTRIBUTES]:
    jet_rule(_function)(_on_primal(_function))


@jet_rule("detach", attribute("data"))
def detach(self: JetTensor) -> Tensor:
    """A constant that shares the jet's memory, as in torch: from now on writes must reach it."""
    if self.jet_layout.run is not None:
        note_memory(self, self.jet_layout.run.given_out)
    return self.primal.detach()


if hasattr(torch, "_nested_tensor_from_mask_left_aligned"):

    @jet_rule(torch._nested_tensor_from_mask_left_aligned)
    def left_aligned(*args: Any) -> bool:
        """Asked by torch.nn.TransformerEncoder, which would go on with nested tensors."""
        return False


@jet_rule("requires_grad_")
def requires_grad_(self: Tensor, requires_grad: bool = True) -> Tensor:
    """Asked of hidden states by gradient checkpointing; acts on the stack."""
    self.streams.requires_grad_(requires_grad)  # type: ignore[attr-defined]
    return self
