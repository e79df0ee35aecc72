"""Functions that torch writes in Python, of other functions: their own code, run on jets."""

from __future__ import annotations

import types
from collections.abc import Callable

import torch.nn.functional as F

from ..registry import jet_rule

_NEVER = {
    name: lambda *tensors: False
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
}


def opened(function: Callable) -> Callable:
    """``function`` without its first step, which hands itself to the tensors that override it."""
    function = getattr(function, "__wrapped__", function)
    made = types.FunctionType(
        function.__code__,
        {**function.__globals__, **_NEVER},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_NAMES = (
    *("multi_head_attention_forward", "gaussian_nll_loss", "multilabel_soft_margin_loss"),
    *("triplet_margin_with_distance_loss", "tanhshrink", "softmin", "lp_pool1d", "lp_pool2d"),
    *("lp_pool3d", "local_response_norm"),
)
for _name in _NAMES:
    jet_rule(getattr(F, _name))(opened(getattr(F, _name)))
