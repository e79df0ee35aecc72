"""Questions about a jet that carry no derivative, as entries of a table; see `rule_table`."""

from __future__ import annotations

from typing import Any

import torch

from jachess_ext.jet.engine.registry import attribute

from .rule_table import MASK, P, Row, X

ONE = [X((2, 3))]
PAIR = [X((2, 3)), P(2, 3)]


def _attributes() -> list[Any]:
    names = ("is_cuda", "is_cpu", "is_mps", "is_meta", "is_sparse", "layout", "data", "grad")
    names += ("is_quantized", "is_nested", "is_mkldnn", "itemsize", "nbytes", "is_xla", "is_xpu")
    return [attribute(name) for name in names if hasattr(torch.Tensor, name)]


QUERIES = [
    Row(["eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__"], PAIR),
    Row(["greater", "greater_equal", "less", "less_equal", "not_equal"], PAIR),
    Row(["__gt__", "__ge__", "equal", "allclose", "isclose", "is_same_size"], PAIR),
    Row(["logical_and", "logical_or", "result_type"], PAIR),
    Row(["isnan", "isinf", "isfinite", "logical_not", "signbit", "sign", "round"], ONE),
    Row(["floor", "ceil", "argmax", "argmin", "argsort", "all", "any", "count_nonzero"], ONE),
    Row(["nonzero", "tolist", "detach", "long", "int", "short", "bool"], ONE),
    Row(["item", "__bool__", "__float__", "__int__"], [X(())]),
    Row(["__format__"], [X(()), ".3f"]),
    Row(
        ["searchsorted"],
        [torch.arange(3.0, dtype=torch.float64), X((2, 3))],
        only=lambda f: "e" in f.__name__ and f is torch.searchsorted,
    ),
    Row(["bucketize"], [X((2, 3)), torch.arange(3.0, dtype=torch.float64)]),
    Row(["ones_like"], ONE),
    Row(["new_ones"], [X((2, 3)), (2,)]),
    Row(["new_tensor"], [X((2, 3)), [1.0, 2.0]]),
    Row(["rand_like", "randn_like"], ONE),
    Row(["bernoulli"], [X((2, 3), 0.1, 0.9)]),
    Row(["is_conj", "is_neg"], ONE),
    Row(["is_floating_point", "is_complex", "is_contiguous", "stride", "numel"], ONE),
    Row(["element_size", "get_device", "nelement", "is_tensor", "dim"], ONE),
    Row(_attributes(), ONE),
    Row(["requires_grad_"], ONE),
    Row([torch._nested_tensor_from_mask_left_aligned], [X((2, 3, 4)), MASK]),
]
