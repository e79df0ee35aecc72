"""Calls of the operators that torch refuses to differentiate, or gets wrong when nested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from jachess_ext.torch_private import release

Case = tuple[Callable[..., Tensor], list[Tensor]]
CASES: dict[str, Case] = {}
_D = torch.float64
_G = torch.Generator().manual_seed(0)


def _r(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=_D, generator=_G)


def _add(name: str, *settings: object, f: Callable[..., Tensor], x: list[Tensor]) -> None:
    CASES["-".join(map(str, (name, *settings)))] = f, x


def _distances() -> None:
    apart = ~torch.eye(5, dtype=torch.bool)
    for p in (0.0, 1.0, 2.0, 3.0, torch.inf):
        _add("cdist", p, f=lambda a, b, p=p: torch.cdist(a, b, p), x=[_r(2, 5, 3), _r(2, 4, 3)])
        _add("pdist", p, f=lambda a, p=p: F.pdist(a, p), x=[_r(5, 3)])
    for mode in ("use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"):
        far = [_r(5, 3) + 100, _r(2, 4, 3) + 100]
        _add("cdist", mode, f=lambda a, b, m=mode: torch.cdist(a, b, 2.0, m), x=far)
    _add("cdist", "itself", f=lambda a: torch.cdist(a, a)[:, apart], x=[_r(2, 5, 3)])


def _samples() -> None:
    paddings = ("zeros", "border", "reflection")
    for mode, padding, align in product(
        ("bilinear", "nearest", "bicubic"), paddings, (True, False)
    ):
        if align and padding != "reflection" and mode != "bilinear":
            continue
        image, places = _r(2, 3, 4, 5), torch.rand(2, 3, 4, 2, dtype=_D, generator=_G) * 4 - 2
        _add(
            *("grid_sample", mode, padding, align),
            f=lambda x, g, m=mode, p=padding, a=align: F.grid_sample(x, g, m, p, a),
            x=[image, places],
        )
    for mode, padding in (("bilinear", "reflection"), ("bilinear", "zeros"), ("nearest", "border")):
        image, places = _r(1, 2, 3, 4, 3), torch.rand(1, 2, 3, 2, 3, dtype=_D, generator=_G) * 4 - 2
        _add(
            *("grid_sample_3d", mode, padding),
            f=lambda x, g, m=mode, p=padding: F.grid_sample(x, g, m, p, False),
            x=[image, places],
        )


def _losses() -> None:
    x, t, classes = 2 * _r(4, 5), _r(4, 5), torch.tensor([0, 3, 4, 1])
    labels = torch.tensor([[1, 2, -1, 0, 0], [0, -1, 1, 1, 1], [4, 3, 2, -1, 0], [-1, 0, 0, 0, 0]])
    sign, weight = t.sign(), t[0].abs()
    for how in ("none", "mean", "sum"):
        k = {"reduction": how}
        _add("huber", how, f=lambda a, b, k=k: F.huber_loss(a, b, delta=0.7, **k), x=[x, t])
        _add("soft_margin", how, f=lambda a, k=k: F.soft_margin_loss(a, sign, **k), x=[9 * x])
        _add(
            *("multi_margin", how),
            f=lambda a, k=k: F.multi_margin_loss(a, classes, 2, weight=weight, **k),
            x=[x],
        )
        _add(
            *("multilabel_margin", how),
            f=lambda a, k=k: F.multilabel_margin_loss(a, labels, **k),
            x=[x],
        )
    weighted = lambda a, b: F.huber_loss(a, b, weight=t.abs())  # noqa: E731
    _add("huber", "weight", f=weighted, x=[x, t])
    _add("huber", "no residual", f=F.huber_loss, x=[x, x.clone()])
    one = lambda a: F.multi_margin_loss(a, classes[0], margin=0.3)  # noqa: E731
    _add("multi_margin", "one", f=one, x=[x[0]])
    _add("multilabel_margin", "one", f=lambda a: F.multilabel_margin_loss(a, labels[0]), x=[x[0]])
    of_c = torch._C._nn  # their defaults are other ones
    _add("huber", "C", f=of_c.huber_loss, x=[x, t])
    _add("soft_margin", "C", f=lambda a: of_c.soft_margin_loss(a, sign), x=[x])
    _add("multi_margin", "C", f=lambda a: of_c.multi_margin_loss(a, classes), x=[x])
    _add("multilabel_margin", "C", f=lambda a: of_c.multilabel_margin_loss(a, labels), x=[x])
    _add("hardsigmoid", f=F.hardsigmoid, x=[2 * x])
    for dim in (0, 1, -1):
        normed = lambda v, g, dim=dim: torch._weight_norm(v, g, dim)  # noqa: E731
        _add("weight_norm", dim, f=normed, x=[x, torch.norm_except_dim(t, 2, dim)])
    _add("glu", f=lambda a: F.glu(a[:, 1:], 1), x=[x])
    _add("cumprod", f=lambda a: (a * (a > 0)).cumprod(1), x=[x])
    _add("hardsigmoid", "inplace", f=lambda a: F.hardsigmoid(a * 2, inplace=True), x=[x])
    of_dropout = lambda g: torch.ops.aten.native_dropout_backward(g, x > 0, 2.0)  # noqa: E731
    _add("native_dropout_backward", f=of_dropout, x=[t])


def _ctc() -> None:
    lengths = torch.tensor([3, 2, 0])
    padded = torch.tensor([[1, 2, 2], [4, 1, 1], [1, 1, 1]])
    flat = torch.cat([row[:n] for row, n in zip(padded, lengths, strict=True)])
    for how, zero, labels in (
        *(("none", False, padded), ("none", True, flat), ("mean", False, flat)),
        *(("mean", True, padded), ("sum", False, padded)),
    ):
        steps = torch.tensor([7, 1, 6] if zero else [7, 5, 6])
        _add(
            *("ctc", how, zero, labels.ndim),
            f=lambda z, s=steps, t=labels, h=how, zero=zero: F.ctc_loss(
                z.log_softmax(-1), t, s, lengths, 0, h, zero
            ),
            x=[_r(7, 3, 5)],
        )
    one = torch.tensor([1, 2, 1])
    unbatched = lambda z: F.ctc_loss(z.log_softmax(-1), one, (7,), (3,), 4)  # noqa: E731
    _add("ctc", "unbatched", f=unbatched, x=[_r(7, 5)])


def _groups() -> None:
    w, ids, offsets = _r(9, 4), torch.tensor([1, 2, 4, 5, 4, 3, 2, 8, 1, 1]), [0, 3, 3, 7]
    for mode, (last, pad) in product(
        ("sum", "mean", "max"), ((False, None), (True, 4), (False, -1))
    ):
        k = {"mode": mode, "include_last_offset": last, "padding_idx": pad}
        starts = torch.tensor(offsets + [10] * last)
        bag = lambda w, s=None, starts=starts, k=k: F.embedding_bag(  # noqa: E731
            ids, w, starts, per_sample_weights=s, **k
        )
        _add("embedding_bag", *k.values(), f=bag, x=[w])
        if mode == "sum":
            _add("embedding_bag", "weighted", *k.values(), f=bag, x=[w, _r(10)])
    square = ids.reshape(2, 5)
    _add("embedding_bag", "2d", f=lambda w: F.embedding_bag(square, w), x=[w])
    x, s = _r(8, 3), _r(3, 4)
    at = torch.tensor([0, 3, 4, 8])
    for how, start in product(("sum", "mean", "max", "min", "prod"), (None, 2.0)):
        k = {"reduce": how, "initial": start}
        by = {"lengths": torch.tensor([3, 1, 4])}
        by_lengths = lambda x, k=k, by=by: torch.segment_reduce(x, **k, **by)  # noqa: E731
        _add("segment", how, start, f=by_lengths, x=[x])
        if start is None:
            by_offsets = lambda x, k=k: torch.segment_reduce(x, **k, offsets=at)  # noqa: E731
            _add("segment", "offsets", how, f=by_offsets, x=[x])
        else:
            two = {"lengths": torch.tensor([[2, 1], [1, 2]]), "axis": 1}
            of_axis = lambda x, k=k, two=two: torch.segment_reduce(x, **k, **two)  # noqa: E731
            _add("segment", "axis", how, f=of_axis, x=[_r(2, 3, 3)])
    zeros = _r(3, 4)
    zeros[:, 1] = 0
    index = torch.tensor([[0, 1, 2, 0], [0, 1, 1, 2], [2, 1, 0, 0]])
    rows = torch.tensor([0, 2, 2])
    for itself, dim in product((True, False), (0, 1)):
        k = {"include_self": itself}
        _add(
            "scatter_prod",
            itself,
            dim,
            f=lambda x, s, d=dim, k=k: x.scatter_reduce(d, index, s, "prod", **k),
            x=[s, zeros],
        )
        _add(
            "scatter_prod",
            "inplace",
            itself,
            dim,
            f=lambda x, s, d=dim, k=k: x.clone().scatter_reduce_(d, index % 3, s, "prod", **k),
            x=[s, zeros],
        )
        for how in ("prod", "mean", "amax", "amin"):
            source = _r(3, 4) if dim == 0 else _r(3, 3)
            _add(
                "index_reduce",
                how,
                itself,
                dim,
                f=lambda x, s, d=dim, h=how, k=k: torch.index_reduce(x, d, rows, s, h, **k),
                x=[s, source],
            )
    _add(
        "index_reduce",
        "inplace",
        f=lambda x, s: x.clone().index_reduce_(0, rows, s, "prod"),
        x=[s, _r(3, 4)],
    )


def _norms() -> None:
    v, u = _r(4), _r(4)
    for name, shape in (("2d", (3, 4)), ("3d", (2, 4, 3)), ("4d", (2, 4, 3, 2))):
        x = _r(*shape)
        n = shape[-1]
        _add(
            "layer_norm",
            name,
            f=lambda x, w, b, n=n: F.layer_norm(x, (n,), w, b),
            x=[x, _r(n), _r(n)],
        )
        bn = lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)  # noqa: E731
        _add("batch_norm", name, f=bn, x=[x, v, u])
        running = lambda x, w, b: F.batch_norm(x, u, v.abs() + 1, w, b)  # noqa: E731
        _add("batch_norm", "running", name, f=running, x=[x, v, u])
        if len(shape) > 2:
            inst = lambda x, w, b: F.instance_norm(x, None, None, w, b)  # noqa: E731
            _add("instance_norm", name, f=inst, x=[x, v, u])
    _add("layer_norm", "no affine", f=lambda x: F.layer_norm(x, (3, 4)), x=[_r(2, 3, 4)])


def _matrices() -> None:
    A = _r(2, 3, 3) + 4 * torch.eye(3, dtype=_D)
    B = _r(2, 3, 2)
    for name, function in (
        *(("det", torch.det), ("linalg.det", torch.linalg.det)),
        *(
            ("slogdet", lambda A: torch.stack(torch.slogdet(A))),
            ("logdet", lambda A: torch.logdet(A @ A.mT)),
        ),
    ):
        _add(name, f=function, x=[A])
    _add("det", 1, f=torch.det, x=[A[:, :1, :1]])
    _add("solve", f=torch.linalg.solve, x=[A, B])
    _add("solve", "right", f=lambda A, B: torch.linalg.solve(A, B.mT, left=False), x=[A, B])
    _add("solve", "vector", f=torch.linalg.solve, x=[A[0], B[0, :, 0]])
    _add("solve", "vectors", f=torch.linalg.solve, x=[A, B[..., 0]])
    _add("solve_ex", f=lambda A, B: torch.linalg.solve_ex(A, B)[0], x=[A, B])
    _add("tensorsolve", f=torch.linalg.tensorsolve, x=[_r(2, 3, 6), _r(2, 3)])
    _add("householder_product", f=torch.linalg.householder_product, x=[_r(2, 4, 3), _r(2, 2)])
    for left, transpose in product((True, False), repeat=2):
        other = _r(2, 4, 5) if left else _r(2, 5, 4)
        _add(
            *("ormqr", left, transpose),
            f=lambda a, t, c, k=(left, transpose): torch.ormqr(a, t, c, *k),
            x=[_r(2, 4, 3), _r(2, 3), other],
        )
    old = release(torch.__version__) < (2, 14)  # newer ones have removed it
    for upper in (False, True) if old else ():
        _add("cholesky", upper, f=lambda A, u=upper: torch.cholesky(A @ A.mT, u), x=[A])


def _recurrent() -> None:
    for layer in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        torch.manual_seed(1)
        module = layer(3, 4, 2, bidirectional=True).double()
        _add(layer.__name__, f=lambda x, m=module: m(x)[0], x=[_r(3, 2, 3)])


for _family in (_distances, _samples, _losses, _ctc, _groups, _norms, _matrices, _recurrent):
    _family()


def some_of_each() -> Iterator[str]:
    """The first case of each operator."""
    seen = set()
    for name in CASES:
        operator = name.partition("-")[0]
        if operator not in seen:
            seen.add(operator)
            yield name
