"""What every jet rule is tested with: the table a new rule adds its entry to.

An entry names torch functions and gives arguments; one function of each rule is called with them,
with the tensors marked `X` carrying derivatives.  `test_rules.py` compares each call with finite
differences and with torch's own result, and the other spellings of a name (``torch.x``,
``Tensor.x``, ``F.x``, …) with that call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from jachess_ext.jet.engine import complex_rules
from jachess_ext.jet.engine.errors import function_name, last_name
from jachess_ext.jet.engine.registry import attribute, find_rule, spellings
from jachess_ext.ops import collectives


@dataclass(frozen=True)
class X:
    """A tensor that carries derivatives: normal entries, or uniform in ``[low, high]``."""

    shape: tuple[int, ...]
    low: float | None = None
    high: float | None = None
    active: bool = True


def P(*shape: int, low: float | None = None, high: float | None = None) -> X:
    """A plain tensor: constant."""
    return X(shape, low, high, active=False)


@dataclass(frozen=True)
class Row:
    """One way of calling some functions.

    Attributes:
        names: as in ``jet_rule``: names to be looked up in torch, or functions.
        args, kwargs: of the call; `X` stands for a tensor, everything else for itself.
        exact: whether the primal must equal torch's result bit by bit; otherwise (a formula of
            our own, or a matrix product of more rows) to a few units in the last place.
        in_place: whether the first argument is overwritten.
        only: keep the spellings that take such arguments.
    """

    names: Sequence[Any]
    args: Sequence[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    exact: bool = True
    in_place: bool = False
    only: Callable[[Any], bool] = lambda function: True
    seed: int = 0

    def functions(self) -> list[Any]:
        found: list[Any] = []
        for name in self.names:
            for function in spellings(name) if isinstance(name, str) else [name]:
                if function not in found and self.only(function):
                    found.append(function)
        return found

    def by_rule(self) -> list[list[Any]]:
        """Return the functions, those of one rule together."""
        groups: dict[Any, list[Any]] = {}
        for function in self.functions():
            groups.setdefault(self.rule_of(function), []).append(function)
        return [*groups.values()]

    def rule_of(self, function: Any) -> Any:
        """Return what stands for the rule of a function, which several functions may have."""
        # Rules of writes in place differ in the function that their error messages name.
        return last_name(function) if self.in_place else rule_of(function)


def rule_of(function: Any) -> Any:
    """Return the rule of a function without its recognisers, which each function has anew."""
    rule = find_rule(function) or function
    return getattr(rule, "ordinary", rule)


def Near(*args: Any, **kwargs: Any) -> Row:
    """A row whose primal agrees with torch's to a few units in the last place."""
    return Row(*args, **kwargs, exact=False)


def _index(*values: Any) -> torch.Tensor:
    return torch.tensor(values)


def _method(function: Any) -> bool:
    return getattr(torch.Tensor, getattr(function, "__name__", ""), None) is function


def _functional(function: Any) -> bool:
    return getattr(F, function.__name__, None) is function


def _takes_dtype_third(function: Any) -> bool:
    return function in (torch.softmax, torch.log_softmax) or _method(function)


POSITIVE = {"low": 0.5, "high": 2.0}
UNALIGNED = {"align_corners": False}
MASK = torch.tensor([[True, False, True], [False, False, True]])
ROW_MASK = torch.tensor([True, False, True])
COLUMN_MASK = torch.tensor([[True], [False]])

POINTWISE = [
    Near(["gelu"], [X((2, 3))]),
    Near(["gelu"], [X((2, 3))], {"approximate": "tanh"}),
    Near(["sigmoid", "tanh", "sin", "cos", "exp", "elu", "softplus"], [X((2, 3))]),
    Row(["relu", "erf", "erfc", "expm1", "exp2"], [X((2, 3))]),
    Near(["softsign"], [X((2, 3))]),
    Row(["logsigmoid", "selu", "square", "abs", "absolute"], [X((2, 3))]),
    Row(["__abs__", "positive", "__pos__", "neg", "negative", "__neg__"], [X((2, 3))]),
    Near(["silu", "mish"], [X((2, 3))]),
    Row(["leaky_relu"], [X((2, 3)), 0.2]),
    Row(["elu", "celu"], [X((2, 3)), 1.3]),
    Row(["softplus"], [X((2, 3)), 1.5, 20.0]),
    Row(["softplus"], [X((2, 3), 1.0, 3.0), 2.0, 3.0]),
    Near(["glu"], [X((2, 4))]),
    Near(["logit"], [X((2, 3), 0.3, 0.7)]),
    Near(["logit"], [X((2, 3), 0.1, 0.9)], {"eps": 0.3}),
    Row(["hardtanh"], [X((2, 3)), -0.4, 0.6]),
    Near(["relu6", "hardsigmoid", "hardswish"], [X((2, 3), -4.0, 8.0)]),
    Row(["log", "log1p", "log2", "log10"], [X((2, 3), **POSITIVE)]),
    Near(["sqrt", "rsqrt", "reciprocal"], [X((2, 3), **POSITIVE)]),
    Row(["clamp", "clip"], [X((2, 3)), -0.5, 0.5]),
    Row(["clamp", "clip"], [X((2, 3))], {"max": 0.1}),
    Row(["clamp"], [X((3,)), P(2, 3), P(2, 1, low=1.0, high=1.5)]),
    Row(["clamp_min", "clamp_max"], [X((2, 3)), 0.1]),
    Row(["clamp_min", "clamp_max"], [X((2, 3)), X((3,))]),
    Row(["clamp", "clip"], [X((2, 3)), X((3,)), P(3, low=1.5, high=2.0)]),
    Row(["clamp", "clip"], [P(2, 3), None, X((2, 1))]),
    Row(["nan_to_num"], [X((2, 3))]),
    Row(["sinc"], [X((2, 3))]),
    Row(["sinc"], [X((2, 3), -0.25, 0.25)]),
    *(
        Row([name], [X((2, 3))], {"inplace": True}, in_place=True, only=_functional)
        for name in ("relu", "leaky_relu", "elu", "hardtanh")
    ),
]

TWO = [X((2, 3)), X((2, 3))]
EXTREME = ("maximum", "minimum", "fmax", "fmin")
ARITHMETIC = [
    *(
        Row(["add", "sub", "subtract", "mul", "multiply", "rsub", *EXTREME], pair)
        for pair in (
            TWO,
            [X((3,)), X((2, 1))],
            [X((2, 3)), P(3)],
            [P(2, 3), X((3,))],
            [X(()), X((2,))],
            [P(), X(())],
            [X((1, 2)), P(3, 1, 1)],
        )
    ),
    Near(["add", "sub", "subtract", "rsub"], TWO, {"alpha": 0.3}),
    Row(["add", "sub", "mul", "multiply"], [X((2, 3)), 1.7]),
    Row(["__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"], [X((3,)), P(2, 3)]),
    Row(["__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"], [X((3,)), 0.7]),
    *(
        Row(["div", "divide", "true_divide", "__truediv__", "__div__"], pair)
        for pair in (
            [X((2, 3)), X((3,), **POSITIVE)],
            [X((3,)), P(2, 3, **POSITIVE)],
            [P(2, 3), X((3,), **POSITIVE)],
            [X((2, 3)), 1.3],
            [X(()), X((2,), **POSITIVE)],
            [X((2,)), P(**POSITIVE)],
        )
    ),
    Near(["__rdiv__", "__rtruediv__"], [X((2, 3), **POSITIVE), 1.3]),
    Near(["__rtruediv__"], [X((3,), **POSITIVE), P(2, 3)]),
    Near(["addcmul"], [X((2, 3)), X((3,)), P(2, 3)], {"value": 0.6}),
    Near(["addcdiv"], [P(2, 3), X((3,)), X((2, 3), **POSITIVE)], {"value": 0.6}),
    Near(["lerp"], [X((2, 3)), X((3,)), 0.3]),
    Row(["outer"], [X((2,)), X((3,))]),
    *(Row(["pow", "__pow__"], [X((2, 3)), n]) for n in (0, 1, 2, 3, -1)),
    Row(["pow", "__pow__"], [X((2, 3), **POSITIVE), -0.5]),
    Row(["pow", "__pow__"], [X((3,), **POSITIVE), P(2, 3)]),
    Row(["pow"], [X((3,)), torch.tensor([[0, 1, 2], [3, 2, -1]])]),
    Row(["pow"], [P(2, 3, **POSITIVE), X((3,))]),
    Row(["pow"], [X((2, 3), **POSITIVE), X((3,))]),
    Near(["__rpow__"], [X((2, 3)), 2.0]),
    Near(["__rpow__"], [X((3,)), P(2, 3, **POSITIVE)]),
    Row(["float_power"], [X((2, 3), **POSITIVE), 1.5]),
    *(
        Row(["logaddexp", "logaddexp2", "hypot", "atan2", "arctan2"], pair)
        for pair in ([X((2, 3)), X((3,))], [X((3,)), P(2, 3)], [P(2, 3), X(())])
    ),
    Row(["xlogy", "xlog1py"], [X((2, 3)), P(3, **POSITIVE)]),
    Row(["xlogy", "xlog1py"], [X((3,)), P(2, 3, **POSITIVE)]),
    Row(["xlogy", "xlog1py"], [X((2, 3)), 1.7]),
    Row(["xlogy", "xlog1py"], [X((2, 3)), X((3,), **POSITIVE)]),
]

LINEAR = [
    Near(["linear"], [X((2, 4, 3)), P(5, 3), P(5)]),
    Near(["linear"], [X((3,)), P(5, 3)]),
    *(
        Near(["matmul", "__matmul__"], pair)
        for pair in (
            [X((2, 3)), X((3, 4))],
            [X((2, 2, 3)), P(3, 4)],
            [P(2, 4, 3), X((3, 2))],
            [X((2, 1, 2, 3)), X((3, 3, 2))],
            [X((2, 2, 3)), X((1, 3, 2))],
            [X((3,)), X((3,))],
            [X((3,)), X((2, 3, 2))],
            [P(2, 2, 3), X((3,))],
            [P(3), X((3, 2))],
        )
    ),
    Near(["__rmatmul__"], [X((3, 2)), X((4, 3))]),
    Near(["__rmatmul__"], [X((3,)), P(2, 3)]),
    Near(["bmm"], [X((2, 2, 3)), X((2, 3, 2))]),
    Near(["mm"], [P(2, 3), X((3, 2))]),
    Near(["mv"], [X((2, 3)), X((3,))]),
    Near(["dot"], [X((3,)), X((3,))]),
    Near(["addmm"], [P(4), X((2, 3)), P(3, 4)]),
    Near(["addmm"], [X((2, 4)), X((2, 3)), X((3, 4))], {"beta": 0.5, "alpha": 2}),
    Near(["baddbmm"], [X((2, 2, 2)), X((2, 2, 3)), X((2, 3, 2))], {"beta": 0.5}),
    Near(["baddbmm"], [P(2, 2, 2), X((2, 2, 3)), P(2, 3, 2)], {"beta": 0, "alpha": 3}),
    Near(["einsum"], ["bij,bjk->bik", X((2, 2, 3)), X((2, 3, 2))]),
    Near(["einsum"], ["ij,j->i", P(2, 3), X((3,))]),
    Row(["einsum"], ["ij->ji", X((2, 3))]),
    Near(["einsum"], ["bij, kj, bk -> bi", X((2, 2, 3)), P(4, 3), X((2, 4))]),
    Near(["einsum"], ["ij,j,jk,k->", P(2, 3), X((3,)), X((3, 2)), P(2)]),
    Near(["einsum"], ["...ni, ij, ...jk -> ...nk", X((2, 1, 2, 3)), P(3, 2), X((3, 2, 2))]),
    Near(["einsum"], ["...i,...ij,j...->...", X((2, 3)), X((3, 2)), P(2, 1)]),
    Near(["einsum"], ["...i,ij,jk->k", X((2, 2, 3)), P(3, 2), X((2, 2))]),
    Near(["einsum"], ["bi,ij,ja", X((2, 3)), P(3, 2), X((2, 2))]),
    Near(["einsum"], ["...c,Bc,c...b", X((2, 3)), X((2, 3)), P(3, 1, 2)]),
    Near(["conv1d"], [X((2, 3, 5)), P(4, 3, 2), P(4)], {"stride": 2}),
    Near(["conv1d"], [X((3, 5)), P(4, 3, 3), None, 1, 1]),
    Near(["conv2d"], [X((2, 2, 4, 4)), P(3, 2, 2, 2), P(3)], {"stride": 2}),
    Near([F.interpolate], [X((1, 2, 3)), 5]),
    Near([F.interpolate], [X((1, 2, 3, 3))], {"scale_factor": 2, "mode": "bilinear"}),
    Near([F.interpolate], [X((2, 1, 4, 4)), (3, 2)], {"mode": "area"}),
    Near(["conv2d"], [X((1, 2, 4, 4)), P(4, 1, 3, 3)], {"groups": 2, "padding": "same"}),
    Near(["conv3d"], [X((1, 1, 3, 3, 3)), P(2, 1, 2, 2, 2), P(2)]),
    Near(["conv_transpose1d"], [X((2, 3, 4)), P(3, 2, 2), P(2)], {"stride": 2}),
    Near(["conv_transpose2d"], [X((1, 2, 3, 3)), P(2, 1, 2, 2)], {"groups": 2}),
    Near(["conv_transpose3d"], [X((1, 1, 2, 2, 2)), P(1, 2, 2, 2, 2), P(2)]),
    Near(["conv1d"], [X((2, 3, 5)), X((4, 3, 2)), X((4,))]),
    Near(["conv2d"], [P(1, 2, 3, 3), X((2, 2, 2, 2))]),
    Near(["conv2d"], [P(1, 2, 3, 3), P(2, 2, 2, 2), X((2,))]),
    Near(["linear"], [X((2, 3)), X((4, 3)), X((4,))]),
    Near(["linear"], [P(2, 3), X((3,))]),
    Near(["avg_pool1d"], [X((2, 3, 6)), 2]),
    Near(["avg_pool2d"], [X((2, 2, 4, 4)), 2]),
    Near(["avg_pool3d", "adaptive_avg_pool3d"], [X((1, 2, 2, 2, 2)), 2]),
    Near(
        [F.grid_sample],
        [X((2, 2, 3, 4)), P(2, 3, 2, 2, low=-1.3, high=1.2)],
        {"padding_mode": "reflection", "align_corners": False},
    ),
    # By their places, between the centres of pixels, where bilinear sampling has no kink.
    *(
        Near([F.grid_sample], [image, grid], {"mode": mode, **settings})
        for image, grid in (
            (P(1, 2, 3, 3), X((1, 2, 2, 2), -0.9, -0.1)),
            (X((1, 2, 3, 3)), X((1, 2, 2, 2), 1.1, 1.9)),
        )
        for mode, settings in (
            ("bilinear", {"padding_mode": "reflection", "align_corners": True}),
            ("bicubic", {"padding_mode": "border", "align_corners": True}),
        )
    ),
    Near([F.grid_sample], [X((1, 1, 2, 3, 3)), X((1, 2, 1, 2, 3), -0.3, -0.1)], UNALIGNED),
    Near([F.affine_grid], [X((2, 2, 3)), (2, 1, 3, 2)], UNALIGNED),
    Near([F.affine_grid], [X((1, 3, 4)), (1, 1, 2, 3, 2)], {"align_corners": True}),
    Row([F.unfold], [X((2, 2, 3, 3)), 2]),
    Row([F.unfold], [X((2, 3, 3)), 2], {"stride": 2, "padding": 1}),
    Near([F.fold], [X((1, 4, 4)), (3, 3), 2]),
    Near([F.fold], [X((4, 4)), (3, 3), 2]),
    Near(["adaptive_avg_pool1d"], [X((2, 6)), 2]),
    Near(["adaptive_avg_pool2d"], [X((1, 2, 4, 4)), 1]),
    *(
        Near(["sum", "mean"], [X((2, 3, 2)), *args], kwargs)
        for args, kwargs in (
            ((), {}),
            ((-1,), {"keepdim": True}),
            (((0, -1),), {}),
            (([1],), {"keepdim": True, "dtype": torch.float64}),
            ((), {"dim": 1}),
        )
    ),
    Row(["sum", "mean"], [X(())]),
    Near(["sum", "mean"], [X((2, 3))], {"axis": 0, "keepdims": True}),
    Row(["cumsum"], [X((2, 3)), 0]),
    Row(["cumsum"], [X((2, 3)), -1], {"dtype": torch.float64}),
    Row(["dropout"], [X((2, 3)), 0.5, True]),
    Row(["dropout"], [X((2, 3)), 0.5, False]),
    Row([F.dropout], [X((2, 3))], {"p": 0.4, "training": True, "inplace": True}, in_place=True),
]

SHAPE = [
    Row(["view", "reshape"], [X((2, 6)), 3, -1], only=_method),
    Row(["view", "reshape"], [X((2, 6)), (2, 2, 3)]),
    Row(["reshape"], [X((1, 1)), ()]),
    Row(["view_as", "reshape_as"], [X((2, 6)), P(3, 4)]),
    Row(["view_as", "reshape_as"], [X((2, 6)), X((3, 4))]),
    Row(["flatten"], [X((2, 3, 2))]),
    Row(["flatten"], [X((2, 3, 2)), -2]),
    Row(["unflatten"], [X((2, 6)), -1, (2, 3)]),
    Row(["transpose", "swapaxes", "swapdims"], [X((2, 3, 2)), 0, -1]),
    Row(["t", attribute("T")], [X((2, 3))]),
    Row([attribute("mT")], [X((2, 3, 2))]),
    Row(["permute"], [X((2, 3, 2)), (2, 0, 1)]),
    Row(["permute"], [X((2, 3, 2)), -1, 0, -2], only=_method),
    Row(["movedim", "moveaxis"], [X((2, 3, 2)), 0, -1]),
    Row(["movedim"], [X((2, 3, 2)), (0, 1), (1, 2)]),
    Row(["unsqueeze"], [X((2, 3)), 0]),
    Row(["unsqueeze"], [X((2, 3)), -3]),
    Row(["squeeze"], [X((1, 2, 1))]),
    Row(["squeeze"], [X(()), (-1,)]),
    Row(["transpose"], [X(()), 0, -1]),
    Row(["squeeze"], [X((1, 2, 1)), 0]),
    Row(["squeeze"], [X((1, 2, 1)), (0, -1)]),
    Row(["expand"], [X((2, 1)), 4, -1, 3]),
    Row(["expand"], [X((2, 1)), (2, 3)]),
    Row(["expand_as"], [X((1, 3)), P(2, 3)]),
    Row(["broadcast_to"], [X((1, 3)), (2, 2, 3)]),
    Row(["broadcast_tensors"], [X((1, 3)), P(2, 1)]),
    Row(["repeat"], [X((2, 3)), 2, 1, 2]),
    Row(["tile"], [X((2, 3)), (2,)]),
    Row(["repeat_interleave"], [X((2, 3)), 2]),
    Row(["repeat_interleave"], [X((2, 3)), 2, 0]),
    Row(["repeat_interleave"], [X((2, 3)), _index(1, 0, 2)], {"dim": -1}),
    Row(["diagonal"], [X((2, 3, 2))], {"dim1": 0, "dim2": -1}),
    Row(["__getitem__"], [X((2, 3)), 1]),
    Row(["__getitem__"], [X((2, 3)), (slice(None), None, slice(0, 2))]),
    Row(["__getitem__"], [X((2, 3)), (Ellipsis, -1)]),
    Row(["__getitem__"], [X((2, 3)), _index(1, 0, 1)]),
    Row(["__getitem__"], [X((2, 3)), MASK]),
    Row(["__getitem__"], [X((2, 3)), (slice(None), ROW_MASK)]),
    Row(["__getitem__"], [X((2, 3, 4)), (_index(0, 1), slice(None), _index(1, 3))]),
    Row(["__getitem__"], [X((2, 3, 4)), (0, slice(None), [1, 3])]),
    Row(["__getitem__"], [X((2, 3, 4)), (slice(None), _index(0, 2), _index(1, 3))]),
    Row(["__getitem__"], [X((2, 3, 4)), (_index([0, 1]), _index([[2], [0]]))]),
    Row(["__getitem__"], [X((4, 3, 4)), (_index(0, 1), None, _index(1, 0, 2, 1)[:2])]),
    Row([torch.Tensor.unfold], [X((2, 5)), 1, 2, 2]),
    Row([torch.Tensor.unfold], [X(()), 0, 1, 1]),
    Row([torch.linalg.diagonal], [X((2, 3, 2))], {"dim1": 0, "dim2": 1}),
    Row([torch.linalg.vander], [X((2, 3))]),
    Row([torch.linalg.vander], [X((3,))], {"N": 2}),
    Row(["cholesky_solve"], [X((3, 2)), X((3, 3), **POSITIVE)]),
    Row(["cholesky_solve"], [X((2, 3, 2)), P(2, 3, 3, **POSITIVE), True]),
    Row(["triangular_solve"], [X((3, 2)), X((3, 3), **POSITIVE)]),
    Row(
        ["triangular_solve"], [P(3, 2), X((3, 3), **POSITIVE)], {"upper": False, "transpose": True}
    ),
    Row(["hsplit"], [X((2, 4)), 2]),
    Row(["hsplit"], [X((4,)), (1, 3)]),
    Row(["vsplit"], [X((4, 2)), 2]),
    Row(["dsplit"], [X((1, 2, 4)), 2]),
    Row(["unsafe_split"], [X((2, 5)), 2, -1]),
    Row(["unsafe_split_with_sizes"], [X((2, 5)), (2, 3), 1]),
    Row(["unsafe_chunk"], [X((2, 5)), 2, 1]),
    Row(["ravel"], [X((2, 3))]),
    *(Row(["atleast_1d", "atleast_2d", "atleast_3d"], [x]) for x in (X(()), X((2,)), X((2, 3)))),
    *(
        Row([getattr(space, f"atleast_{n}d")], [[X((2,)), X(())]])
        for space in (torch, torch._C._VariableFunctions)
        for n in (1, 2, 3)
    ),
    Row([torch.meshgrid], [X((2,)), X((3,))], {"indexing": "ij"}),
    Row(
        [torch.meshgrid, torch._C._VariableFunctions.meshgrid],
        [[X((2,)), P(3), X((2,))]],
        {"indexing": "xy"},
    ),
    Row(["select"], [X((2, 3)), 1, -1]),
    Row(["narrow"], [X((2, 3)), -1, 1, 2]),
    Row(["index_select"], [X((2, 3)), 1, _index(2, 0)]),
    Row(["gather"], [X((2, 3)), 1, _index([2, 0], [1, 1])]),
    Row(["gather"], [X((2, 3)), -2, _index([1, 0, 0])]),
    Row(["take_along_dim"], [X((2, 3)), _index([2, 0], [1, 1]), 1]),
    Row(["take_along_dim"], [X((2, 3)), _index(5, 0)]),
    Row(["gather"], [X(()), 0, _index(0, 0)]),
    Row(["index_select"], [X(()), 0, torch.tensor(0)]),
    Row(["flatten"], [X(())]),
    Row(["split"], [X((2, 5)), 2, -1]),
    Row(["split"], [X((2, 5)), [2, 3], 1]),
    Row(["split_with_sizes"], [X((2, 5)), (2, 3), 1]),
    Row(["chunk"], [X((2, 5)), 2, 1]),
    Row(["tensor_split"], [X((2, 5)), 3, -1]),
    Row(["unbind"], [X((2, 3)), -1]),
    Row(["__iter__"], [X((2, 3))]),
    Row(["cat", "concat", "concatenate"], [[X((2, 3)), P(1, 3), X((2, 3))]]),
    Row(["cat", "concat", "concatenate"], [[P(2, 3), X((2, 1))], -1]),
    Row(["cat"], [[P(0), X((2, 3))], -2]),
    Row(["stack"], [[X((2, 3)), P(2, 3)], -1]),
    Row(["stack"], [[X(()), P()]]),
    Row(["roll"], [X((2, 3)), 1]),
    Row(["roll"], [X((2, 3)), (1, 2), (0, -1)]),
    Row(["flip"], [X((2, 3)), (0, -1)]),
    Row(["tril", "triu"], [X((2, 3, 3))]),
    Row(["tril", "triu"], [X((3, 3)), -1]),
    Row(["pad"], [X((2, 3)), (1, 2)]),
    Row(["pad"], [X((2, 3)), (1, -1, 0, 2)], {"value": 1.5}),
    Row(["pad"], [X((2, 3)), (1, 0)], {"value": -torch.inf}),
    Row(["contiguous", "clone", "cpu", "double"], [X((2, 3))]),
    Row(["to"], [X((2, 3)), torch.float64]),
    Row(["to"], [X((2, 3)), "cpu", torch.float64]),
    Row(["to", "type_as"], [X((2, 3)), P(1)]),
    Row(["to", "type_as"], [X((2, 3)), X((1,))]),
    Row(["type"], [X((2, 3)), torch.float64]),
    Row(["type"], [X((2, 3)), "torch.DoubleTensor"]),
    Row(["masked_fill"], [X((2, 3)), MASK, -1.5]),
    Row(["masked_fill"], [X((2, 3)), COLUMN_MASK, torch.tensor(-torch.inf)]),
    Row(["masked_fill"], [X((3,)), MASK, 0.5], only=lambda f: f is torch.masked_fill),
    Row(["masked_fill"], [X((2, 3)), ROW_MASK, X(())]),
    Row(["where"], [MASK, X((2, 3)), X((3,))], only=lambda f: f is torch.where),
    Row(["where"], [ROW_MASK, X((3,)), P(2, 3)], only=lambda f: f is torch.where),
    Row(["where"], [MASK, 1.5, X((2, 1))], only=lambda f: f is torch.where),
    Row([torch.Tensor.where], [X((2, 3)), COLUMN_MASK, X((3,))]),
]

SOFTMAX = [
    *(Near(["softmax", "log_softmax"], [X((2, 3, 2)), dim]) for dim in (0, 2, -2)),
    Near(["softmax", "log_softmax"], [X((2, 3)), -1], {"dtype": torch.float64}),
    Near(["softmax", "log_softmax"], [X((2, 3)), 1, torch.float64], only=_takes_dtype_third),
    Near(["softmax", "log_softmax"], [X(()), 0]),
    Near(["logsumexp"], [X((2, 3)), 0]),
    Near(["logsumexp"], [X(()), 0]),
    Near(["logsumexp"], [X((2, 3, 2)), (0, -1)], {"keepdim": True}),
]

NORMS = [
    Near(["layer_norm"], [X((2, 4)), (4,), P(4), P(4)]),
    Near(["layer_norm"], [X((2, 4)), (4,), None, None, 0.1]),
    Near(["layer_norm"], [X((2, 3, 4)), (3, 4), P(3, 4), None]),
    Near(["layer_norm"], [X((2, 4)), (4,), X((4,)), X((4,))]),
    Near(["rms_norm"], [X((2, 4)), (4,), P(4), 1e-3]),
    Near(["rms_norm"], [X((2, 4)), (4,)]),
    Near(["group_norm"], [X((2, 4, 3)), 2, P(4), P(4)]),
    Near(["group_norm"], [X((2, 4, 2, 3)), 2, P(4), None]),
    Near(["group_norm"], [X((2, 4)), 2, None, P(4)]),
    Near(["group_norm"], [X((2, 4, 3)), 2, P(4), P(4), 0.3]),
    Near(["group_norm"], [X((2, 4, 3)), 2, None, None, 0.3]),
    Near(["group_norm"], [X((2, 4, 3)), 2, X((4,)), P(4)]),
    Near(
        ["batch_norm"],
        [X((2, 4, 3)), P(4), P(4, **POSITIVE), P(4), P(4)],
        only=lambda f: f is F.batch_norm,
    ),
    Near(
        [torch.batch_norm], [X((2, 4)), P(4), P(4), P(4), P(4, **POSITIVE), False, 0.1, 1e-5, False]
    ),
    Near([F.batch_norm], [X((2, 3, 2)), None, None, P(3), X((3,)), True]),
    Near([F.instance_norm], [X((2, 3, 4)), None, None, P(3), P(3)]),
    Near([F.instance_norm], [X((2, 3, 4)), None, None, P(3), None, True, 0.1, 0.3]),
    Near([F.instance_norm], [X((2, 3, 4)), P(3), P(3, **POSITIVE), None, None, False]),
    Near([torch.instance_norm], [X((2, 3, 2, 2)), P(3), None, None, None, True, 0.1, 1e-5, False]),
    Near(["cosine_similarity"], [X((2, 3)), X((2, 3))]),
    Near(["cosine_similarity"], [X((2, 3)), P(3)], {"dim": -1}),
    Near(["normalize"], [X((2, 3))]),
    Near(["normalize"], [X((2, 3))], {"dim": 0}),
    Near(["normalize"], [X((2, 3))], {"p": 1}),
    Near(["normalize"], [X((2, 3))], {"p": torch.inf}),
    Near(["norm", torch.linalg.norm], [X((2, 3))]),
    Near(["norm"], [X((2, 3)), 2, -1, True]),
    Near(["norm"], [X((2, 3))], {"p": 2, "dim": (0, 1)}),
    Near(["norm"], [X((2, 3))], {"p": 1, "dim": -1, "keepdim": True}),
    Near(["norm"], [X((2, 3)), torch.inf]),
    Near([torch.linalg.vector_norm], [X((2, 3))], {"dim": 0, "keepdim": True}),
    Near([torch.linalg.vector_norm], [X((2, 3))]),
    Near([torch.linalg.vector_norm], [X((2, 3)), 1]),
    Near([torch.linalg.vector_norm], [X((2, 3)), torch.inf, -1, True]),
    Near([torch.linalg.norm], [X((2, 3)), 2], {"dim": -1}),
    Near(["var", "std"], [X((2, 3))]),
    Near(["var", "std"], [X((2, 3)), False]),
    Near(["var", "std"], [X((2, 3)), -1, False, True]),
    Near(["var", "std"], [X((2, 3))], {"dim": (0, 1), "correction": 2}),
    Near(["var_mean", "std_mean"], [X((2, 3)), -1], {"correction": 0}),
    Near(["var_mean", "std_mean"], [X((2, 3)), -1], {"unbiased": False, "keepdim": True}),
]

EXTREMES = [
    Row(["max", "min"], [X((2, 3))]),
    Row(["max", "min"], [X((2, 3)), 0]),
    Row(["max", "min"], [X((2, 3)), -1, True]),
    Row(["max", "min"], [X((2, 3)), X((3,))]),
    Row(["max", "min"], [X((2, 3)), P(3)]),
    Row(["amax", "amin"], [X((2, 3)), -1]),
    Row(["amax", "amin"], [X((2, 3)), (0,), True]),
    Row(["amax", "amin"], [X((2, 3, 2)), (0, -1)]),
    Row(["amax", "amin"], [X((2, 3, 2)), (2, 0), True]),
    Row(["amax", "amin"], [X((2, 3))]),
    Row(["amax", "amin", "max", "min", "sort"], [X(()), 0]),
    Row(["max", "min"], [X(())]),
    Row(["topk"], [X(()), 1]),
    Row(["topk"], [X((2, 4)), 2]),
    Row(["topk"], [X((4, 2)), 2, 0, False]),
    Row(["sort"], [X((2, 3))]),
    Row(["sort"], [X((2, 3))], {"dim": 0, "descending": True}),
]

ATTENTION = [
    Near(["scaled_dot_product_attention"], args, kwargs)
    for args, kwargs in (
        ([X((2, 3, 4)), X((2, 3, 4)), X((2, 3, 4))], {}),
        ([X((1, 2, 2, 4)), X((1, 2, 3, 4)), X((1, 2, 3, 2))], {"is_causal": True}),
        ([X((1, 2, 3, 4)), X((1, 2, 2, 4)), X((1, 2, 2, 4))], {"is_causal": True, "scale": 0.3}),
        ([X((1, 4, 3, 2)), X((1, 2, 3, 2)), X((1, 2, 3, 2))], {"enable_gqa": True}),
        ([X((1, 2, 2, 4)), X((1, 2, 3, 4)), X((1, 2, 3, 4))], {"attn_mask": MASK}),
        ([X((1, 2, 2, 4)), X((1, 2, 3, 4)), X((1, 2, 3, 4))], {"attn_mask": P(1, 1, 2, 3)}),
        ([X((1, 2, 2, 4)), X((1, 2, 3, 4)), X((1, 2, 3, 4))], {"attn_mask": COLUMN_MASK}),
        ([X((1, 2, 3, 4)), P(1, 2, 3, 4), P(1, 2, 3, 4)], {}),
        ([P(1, 2, 3, 4), X((1, 2, 3, 4)), P(1, 2, 3, 4)], {}),
        ([P(1, 2, 3, 4), P(1, 2, 3, 4), X((1, 2, 3, 4))], {"is_causal": True}),
    )
]

GATES = [P(12, 4), P(12, 3), P(12), P(12)]
ONE_LAYER = [True, 1, 0.0, False, False, False]
RECURRENT = [
    Near([torch.lstm], [X((3, 2, 4)), [X((1, 2, 3)), X((1, 2, 3))], GATES, *ONE_LAYER]),
    Near(
        [torch.lstm],  # two layers, backwards too, batch first, no biases
        [
            X((2, 3, 4)),
            [P(4, 2, 2), P(4, 2, 2)],
            [P(8, 4), P(8, 2), P(8, 4), P(8, 2), P(8, 4), X((8, 2)), P(8, 4), P(8, 2)],
            *(False, 2, 0.0, False, True, True),
        ],
    ),
    Near(
        [torch.lstm],  # the hidden state is projected
        [
            X((3, 2, 4)),
            [P(1, 2, 2), P(1, 2, 3)],
            [P(12, 4), P(12, 2), P(12), P(12), P(2, 3)],
            *ONE_LAYER,
        ],
    ),
    Near([torch.gru], [X((3, 2, 4)), X((1, 2, 3)), [P(9, 4), X((9, 3)), P(9), P(9)], *ONE_LAYER]),
    Near(
        [torch.rnn_tanh, torch.rnn_relu],
        [X((3, 2, 4)), P(1, 2, 3), [P(3, 4), P(3, 3), P(3), P(3)], *ONE_LAYER],
    ),
    Near([torch.lstm_cell], [X((2, 4)), [X((2, 3)), P(2, 3)], *GATES]),
    Near([torch.gru_cell], [X((2, 4)), X((2, 3)), P(9, 4), P(9, 3), P(9), P(9)]),
    Near(
        [torch.rnn_tanh_cell, torch.rnn_relu_cell],
        [X((2, 4)), P(2, 3), P(3, 4), P(3, 3), P(3), P(3)],
    ),
]

HEADS = [P(12, 4), P(12), None, None, False, 0.0, P(4, 4), P(4)]
COMPOSITE = [
    Near(
        [F.multi_head_attention_forward], [X((3, 2, 4)), X((3, 2, 4)), X((3, 2, 4)), 4, 2, *HEADS]
    ),
    Near([F.gaussian_nll_loss], [X((2, 3)), P(2, 3), X((2, 3), 0.5, 2.0)]),
    Near([F.multilabel_soft_margin_loss], [X((2, 3)), P(2, 3, low=0.0, high=1.0)]),
    Near([F.triplet_margin_with_distance_loss], [X((2, 3)), X((2, 3)), P(2, 3)]),
    Near([F.tanhshrink], [X((2, 3))]),
    Near([F.softmin], [X((2, 3))], {"dim": -1}),
    Near([F.lp_pool1d], [X((1, 2, 4), 0.5, 2.0), 2, 2]),
    Near([F.lp_pool2d], [X((1, 1, 4, 4), 0.5, 2.0), 2, 2]),
    Near([F.lp_pool3d], [X((1, 1, 2, 2, 2), 0.5, 2.0), 2, 2]),
    Near([F.local_response_norm], [X((1, 4, 3)), 2]),
    Near(["pairwise_distance"], [X((2, 3)), X((2, 3))]),
    Near(["cdist"], [X((2, 3)), X((4, 3))]),
    Near(["cdist"], [P(2, 3, 2), X((2, 2, 2), 5.0, 6.0), 1.0]),
    Near([F.pdist], [X((4, 3))]),
    Near([F.pdist], [X((4, 3)), 3.0]),
    Near([F.ctc_loss, torch.ctc_loss], [X((4, 2, 3)), _index([1, 2], [2, 2]), (4, 4), (2, 1)]),
    Near([F.multi_margin_loss, torch._C._nn.multi_margin_loss], [X((2, 3)), _index(0, 2)]),
    Near(
        [F.multilabel_margin_loss, torch._C._nn.multilabel_margin_loss],
        [X((2, 3)), _index([1, -1, 0], [2, 0, -1])],
    ),
    Near([F.embedding_bag], [_index(0, 2, 1, 1), X((3, 2)), _index(0, 1)]),
    Near([torch.embedding_bag], [X((3, 2)), _index(0, 2, 1, 1), _index(0, 1)]),
    Near([torch.segment_reduce], [X((4, 3)), "mean"], {"lengths": _index(3, 1)}),
    Near(["index_reduce"], [X((3, 2)), 0, _index(0, 2, 2), X((3, 2)), "prod"]),
    Near(["ormqr"], [X((3, 2)), X((2,)), X((3, 2))]),
]

LINALG = [
    Near([torch.linalg.cond], [X((3, 3))]),
    *(
        Near([torch.linalg.solve, torch.linalg.solve_ex], pair, {"left": left})
        for left, *pair in (
            (True, X((3, 3)), P(3)),
            (True, P(3, 3), X((2, 3, 1))),
            (True, X((2, 3, 3)), X((3,))),
            (True, X((2, 2, 2)), X((2, 2))),
            (True, X((3, 1, 2, 2)), X((2, 2, 3))),
            (False, X((3, 3)), X((2, 3))),
            (False, X((2, 3, 3)), P(4, 3)),
        )
    ),
    Near([torch.linalg.tensorsolve], [X((2, 3, 6)), X((2, 3))]),
    Near([torch.linalg.tensorsolve], [X((2, 6, 3)), P(6)], {"dims": (2, 0)}),
    Near(["inverse"], [X((2, 3, 3))]),
    *(
        Near(["det", "slogdet", torch.linalg.det, torch.linalg.slogdet], [X(shape)])
        for shape in ((1, 1), (2, 2), (2, 4, 4))
    ),
    Near(["logdet"], [X((3, 3))]),
    Near(["cholesky_inverse"], [X((3, 3), **POSITIVE)]),
    Near(["cholesky_inverse"], [X((2, 2, 2), **POSITIVE), True]),
    Near(["orgqr", torch.linalg.householder_product], [X((2, 4, 3)), X((2, 2))]),
]

RUNNING = [
    Near(["cumprod", "logcumsumexp"], [X((2, 5)), -1]),
    Near(["cumprod", "logcumsumexp"], [X((4, 2)), 0]),
    Near(["cumprod", "logcumsumexp"], [X(()), 0]),
    Near(["cumprod", "logcumsumexp"], [X((1, 2)), 0]),
    Near(["cumprod"], [X((3,)), 0], {"dtype": torch.float64}),
    Near(["prod"], [X((2, 5)), -1]),
    Near(["prod"], [X((4, 2)), 0, True]),
    Near(["prod"], [X((2, 3))], {"dtype": torch.float64}),
    Near(["prod"], [X(()), 0]),
]

CLASSES = _index(0, 2, -100, 1)
LOSSES = [
    Near([F.nll_loss], [X((4, 3)), CLASSES]),
    Near([F.nll_loss], [X((4, 3)), CLASSES, P(3, **POSITIVE)], {"reduction": "sum"}),
    Near([F.cross_entropy], [X((4, 3)), CLASSES]),
    Near([F.cross_entropy], [X((4, 3)), CLASSES, P(3, **POSITIVE)], {"reduction": "none"}),
    Near([F.cross_entropy], [X((2, 3, 2)), CLASSES.reshape(2, 2)]),
    Near([F.cross_entropy], [X((4, 3)), _index(0, 2, 1, 1)], {"ignore_index": 1}),
    Near([F.cross_entropy], [X((4, 3)), CLASSES], {"label_smoothing": 0.2}),
    *(
        Near([F.linear_cross_entropy], [X((4, 5)), P(3, 5), CLASSES], {"reduction": way})
        for way in (("mean", "sum") if hasattr(F, "linear_cross_entropy") else ())
    ),
    Near([F.mse_loss], [X((2, 3)), P(2, 3)]),
    Near([F.mse_loss], [X((2, 3)), X((2, 3))], {"reduction": "sum"}),
    Near([F.mse_loss], [P(2, 3), X((2, 3))], {"reduction": "none"}),
    *(
        Near([F.huber_loss], [*pair, "sum"], kwargs)
        for pair in ([P(2, 3), X((2, 3))], [X((2, 3)), X((2, 3))])
        for kwargs in ({"delta": 0.7}, {"weight": P(2, 3)})
    ),
    Near([F.huber_loss], [X((2, 3)), P(2, 3), "none", 0.5], seed=1),
    Near([F.huber_loss, torch._C._nn.huber_loss], [X((2, 3)), P(2, 3)]),
    Near([F.soft_margin_loss, torch._C._nn.soft_margin_loss], [X((2, 3)), P(3)]),
    Near([F.soft_margin_loss], [X((2, 3)), P(2, 3)], {"reduction": "none"}),
    Near([F.gumbel_softmax], [X((2, 3))], {"tau": 0.7}),
    Near([F.gumbel_softmax], [X((2, 3))], {"dim": 0}),
    Near(
        [F.binary_cross_entropy_with_logits],
        [X((2, 3)), P(2, 3, low=0.0, high=1.0), P(3, **POSITIVE)],
    ),
    Near([F.binary_cross_entropy], [X((2, 3), 0.3, 0.7), P(2, 3, low=0.0, high=1.0)]),
    Near(
        [F.binary_cross_entropy],
        [X((2, 3), 0.3, 0.7), P(2, 3, low=0.0, high=1.0), P(3, **POSITIVE)],
        {"reduction": "none"},
    ),
    Near([F.triplet_margin_loss], [X((2, 3)), X((2, 3)), P(2, 3)]),
    Near([F.triplet_margin_loss], [X((2, 3)), X((2, 3)), X((2, 3))], {"swap": True, "margin": 5.0}),
    Near([torch._weight_norm], [X((4, 3)), X((4, 1))]),
    Near([torch._weight_norm], [X((4, 3)), P(1, 3), 1]),
    Near([torch._weight_norm], [P(4, 3), X((1, 1)), -1]),
    Near(["dist"], [X((2, 3)), X((2, 3))]),
    Near([torch.linalg.matrix_norm], [X((2, 2, 3))]),
]
IN_PLACE = [
    Row(["add_", "sub_", "mul_", "__iadd__", "__isub__", "__imul__"], TWO, in_place=True),
    Row(
        ["add_", "sub_", "mul_", "__iadd__", "__isub__", "__imul__"],
        [X((2, 3)), P(3)],
        in_place=True,
    ),
    Near(["add_", "sub_"], [X((2, 3)), X((3,))], {"alpha": 0.5}, in_place=True),
    Row(["div_", "__itruediv__", "__idiv__"], [X((2, 3)), X((3,), **POSITIVE)], in_place=True),
    Near(["tanh_", "sigmoid_", "exp_", "elu_"], [X((2, 3))], in_place=True),
    Row(["pow_", "__ipow__"], [X((2, 3)), 3], in_place=True),
    Near(["addcmul_"], [X((2, 3)), X((3,)), P(2, 3)], in_place=True),
    Near(["lerp_"], [X((2, 3)), X((2, 3)), 0.3], in_place=True),
    Row(
        ["neg_", "relu_", "abs_", "square_"],
        [X((2, 3))],
        in_place=True,
    ),
    Row(["nan_to_num_", "leaky_relu_"], [X((2, 3))], in_place=True),
    Near(["log_", "sqrt_", "rsqrt_", "reciprocal_"], [X((2, 3), **POSITIVE)], in_place=True),
    Row(["clamp_"], [X((2, 3)), -0.5, 0.5], in_place=True),
    Row(["clamp_min_", "clamp_max_"], [X((2, 3)), 0.1], in_place=True),
    Row(["tril_", "triu_"], [X((2, 3))], in_place=True),
    Row(["dropout_"], [X((2, 3)), 0.5, True], in_place=True),
    Row(["masked_fill_"], [X((2, 3)), MASK, 0.5], in_place=True),
    Row(["copy_"], [X((2, 3)), X((3,))], in_place=True),
    Row(["copy_"], [X((2, 3)), P(2, 3)], in_place=True),
    Row(["fill_"], [X((2, 3)), 1.5], in_place=True),
    Row(["fill_"], [X((2, 3)), X(())], in_place=True),
    Row(["zero_"], [X((2, 3))], in_place=True),
    *(
        Row(["__setitem__"], [X((2, 3)), index, value], in_place=True)
        for index, value in (
            (1, X((3,))),
            (1, 0.5),
            ((slice(None), 0), P(2)),
            ((Ellipsis, slice(1, None)), X((2,))),
            (MASK, X((3,))),
            (MASK, 0.5),
            ((slice(None), ROW_MASK), X(())),
            (_index(1), X((1, 3))),
            ((_index(0, 1), _index(2, 0)), X((2,))),
        )
    ),
]

BUFFERS = [
    Row(["zeros_like"], [X((2, 3))]),
    Row(["zeros_like"], [X((2, 3))], {"dtype": torch.float64}),
    Row(["new_zeros"], [X((2, 3)), (2, 2)]),
    Row(["full_like"], [X((2, 3)), 2.0]),
    Row(["new_full"], [X((2, 3)), (2,), 1.5]),
    Near(["index_add"], [X((3, 2)), 0, _index(2, 0, 2), X((3, 2))], {"alpha": 0.5}),
    Row(["index_add", "index_copy"], [X(()), 0, torch.tensor(0), X(())]),
    Row(["index_add"], [P(2, 3), -1, _index(0, 1), X((2, 2))]),
    Row(["index_copy"], [X((3, 2)), 0, _index(2, 0), X((2, 2))]),
    Row(["index_copy"], [X((3, 2)), 0, _index(2, 0), P(2, 2)]),
    Row(["scatter_add"], [X((2, 3)), 1, _index([2, 0], [1, 1]), X((2, 2))]),
    *(
        Near(
            ["scatter_reduce"],
            [X((2, 3)), 1, _index([2, 0], [1, 1]), X((2, 2)), way],
            {"include_self": own},
        )
        for way in ("sum", "mean", "amax", "amin")
        for own in (True, False)
    ),
    Row([torch.scatter, torch.Tensor.scatter], [P(2, 3), 1, _index([2, 0], [1, 0]), X((2, 2))]),
    Row(["index_add_"], [X((3, 2)), 0, _index(2, 0, 2), X((3, 2))], in_place=True),
    Row(["index_copy_"], [X((3, 2)), 0, _index(2, 0), X((2, 2))], in_place=True),
    Row([torch.scatter, torch.Tensor.scatter], [X((2, 3)), 1, _index([2, 0], [1, 0]), 1.5]),
    Row([torch.scatter, torch.Tensor.scatter], [X((2, 3)), 0, _index([1, 0]), 2]),
    Row(
        [torch.scatter, torch.Tensor.scatter],
        [X((2, 3)), -1, _index([2, 0], [1, 0])],
        {"value": -1},
    ),
    Row(["scatter_"], [X((2, 3)), 1, _index([2, 0], [1, 0]), X((2, 2))], in_place=True),
    Row(["scatter_"], [X((2, 3)), 1, _index([2], [1]), 1], in_place=True),
    Row(["scatter_add_"], [X((2, 3)), 1, _index([2, 0], [1, 1]), X((2, 2))], in_place=True),
]

ROWS = [
    *BUFFERS,
    *POINTWISE,
    *ARITHMETIC,
    *LINEAR,
    *SHAPE,
    *SOFTMAX,
    *NORMS,
    *EXTREMES,
    *ATTENTION,
    *LOSSES,
    *RECURRENT,
    *COMPOSITE,
    *LINALG,
    *RUNNING,
    *IN_PLACE,
]

# Casts to a narrower type cannot be held against differences; test_dtypes.py covers them.
NARROWING = ("float", "half", "bfloat16")
# Needs a device that is not everywhere, and the rule is one line; and what takes lengths on the CPU
# whatever the device: test_modules.py packs sequences.
ELSEWHERE = ("cuda", "_pack_padded_sequence", "_pad_packed_sequence")
# Constant between jumps; test_traps.py.
ROUNDED = (
    *("floor_divide", "__floordiv__", "__rfloordiv__", "floor_divide_", "__ifloordiv__"),
    *("round_", "floor_", "ceil_"),
)
# Products of a library, which get a rule once a program has imported it; test_quantised.py.
OF_LIBRARIES = (
    "bitsandbytes.autograd._functions.matmul",
    "bitsandbytes.autograd._functions.matmul_4bit",
    "torch_attn._varlen_attn",
    "torch_attn._varlen_attn.default",
    # Run by two ranks in python_tests/distributed/test_collectives.py.
    *map(function_name, (*collectives.NAMES, *collectives.LISTWISE)),
    "_c10d_functional._wrap_tensor_autograd",
    "_c10d_functional._wrap_tensor_autograd.default",
    "torch.distributed._functional_collectives._maybe_wrap_tensor",
)


def is_complex(function: Any) -> bool:
    """Whether a function leads to complex numbers, or from them; test_complex.py tries those."""
    return last_name(function) in complex_rules.OF_COMPLEX


# Their entries are arbitrary; test_api.py fills them.
UNSET = ("empty_like", "new_empty")
