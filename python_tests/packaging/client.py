"""A program that uses the package, for the type checker (`make check`); nothing runs it.

`assert_type` fails where the checker sees another type, `Any` included.
"""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import jachess_ext as jx
from jachess_ext.jet.passes.eager import Jet

model, x = nn.Linear(3, 1), torch.randn(4, 3)
Nest = dict[str, Tensor]


def field(x: Tensor) -> Tensor:
    return x.sin()


def nest(x: Tensor) -> Nest:
    return {"a": x}


def labelled(x: Tensor) -> tuple[Tensor, str]:
    return x, "label"


# ---- derivatives: their types follow the function's ---------------------------------------------

assert_type(jx.jvp(field, (x,), (x,)), tuple[Tensor, Tensor])
assert_type(jx.jvp(nest, (x,), (x,), differentiable=False), tuple[Nest, Nest])
assert_type(jx.jvp(labelled, (x,), (x,), has_aux=True), tuple[Tensor, Tensor, str])
assert_type(jx.jvp(model, (x,), (x,)), tuple[Any, Any])  # as model(x) is for torch
assert_type(jx.jet(field, x, x[None]), Jet)
assert_type(jx.jet(field, x, x[None], 1, "sum").first, Tensor)
assert_type(jx.jet(field, x, x[None]).pairs, list[tuple[int, int]])

laplacian = jx.laplacian(field, x, weights=[1.0, 0.0, 2.0], chunk_size=2)
assert_type(laplacian.value, Tensor)
assert_type(laplacian.gradient, Tensor)
assert_type(laplacian.laplacian, Tensor)
assert_type(jx.laplacian(nest, x, directions=x[None], check=False)[2], Nest)
assert_type(jx.hessian_diagonal(field, x, chunk_size=1).diagonal, Tensor)
assert_type(jx.hessian_diagonal(nest, x).gradient, Nest)
assert_type(jx.divergence(field, x).divergence, Tensor)
assert_type(jx.divergence(nest, x).value, Nest)
product = jx.hvp(field, (x, x), (x, x), differentiable=False)
assert_type(product.value, Tensor)
assert_type(product.gradient, tuple[Tensor, Tensor])
assert_type(product.product, tuple[Tensor, Tensor])
jx.laplacian(field, x, weigths=[1.0])  # type: ignore[call-overload]
jx.divergence(field, x, weights=[1.0])  # type: ignore[call-overload]


def penalty(value: Tensor, gradient: Tensor) -> Tensor:
    return value.sum() + gradient.square().sum()


penalised = jx.gradient_loss(field, x, penalty)
assert_type(penalised.loss, Tensor)
assert_type(penalised.value, Tensor)
assert_type(penalised.gradient, Tensor)
assert_type(jx.gradient_loss(field, {"x": x}, lambda _, g: g["x"].sum()).gradient, Nest)

with jx.differentiable(), jx.forward_code():
    pass
assert_type(jx.differentiable()(field)(x), Tensor)
assert_type(jx.graphed(field)(x), Tensor)

# ---- kernels, smoothness, penalties -------------------------------------------------------------

theta = jx.ntk(model, x, outputs="sum", method="gram")
assert_type(theta, Tensor)
assert_type(jx.ntk(model, x, method="explain"), Any)
jx.ntk(model, x, output="sum")  # type: ignore[call-overload]
measured = jx.measure_ntk(model, x)
assert_type(measured.theta, Tensor | None)
assert_type(measured.report.form_of("bias"), str)
spectrum = jx.Spectrum.of(theta)
assert_type(spectrum, jx.Spectrum)
assert_type(spectrum.eigenvalues, Tensor)
assert_type(jx.ntk_loss(spectrum, x, t=1.0, lr=0.1), Tensor)
batch = {"input_ids": x}
assert_type(jx.smoothness(model, batch, hessian=False).jacobian, Tensor)
assert_type(jx.smoothness(model, batch).hessian, Tensor | None)
regulariser = jx.JacHess(model, weights="uniform")
assert_type(regulariser(batch).loss, Tensor)
assert_type(regulariser(batch).total, Tensor)
assert_type(regulariser.layer_weights(), Tensor)
assert_type(jx.SmoothnessProbe(batch).measure(model, 0), dict[str, float])
assert_type(jx.SmoothnessMonitor(batch).history, list[dict[str, float]])
assert_type(jx.LightningSmoothnessMonitor(batch).history, list[dict[str, float]])
assert_type(jx.ops.attention_jet(x, x, x, q=1), Tensor)
assert_type(jx.ops.sample_directions(x, 1, 2, seed=0), Tensor)
assert_type(jx.ops.available("attention_jet", x.device), bool)
assert_type(jx.ops.build_info(), dict[str, str])

# ---- choosing -----------------------------------------------------------------------------------

table = jx.scaling.read_table("losses.csv")
assert_type(table, jx.scaling.LossTable)
assert_type(jx.scaling.read_runs("runs", model="(.*)"), jx.scaling.LossTable)
selection = jx.scaling.select(table, target=10_000)
assert_type(selection, jx.scaling.Selection)
assert_type(selection.ranking, list[str])
assert_type(selection.shortlist, list[str])
assert_type(selection.share, float)
law = jx.scaling.fit([100, 200, 400], [3.0, 2.5, 2.2])
assert_type(law, jx.scaling.FittedLaw)
assert_type(law.law, str)
search = jx.scaling.Search(["a", "b"], [100, 200], target=1000)
assert_type(search.ask(), jx.scaling.Ask | None)
assert_type(search.best(), str)
assert_type(search.selection(), jx.scaling.Selection)
assert_type(jx.scaling.mean_tail_exponent({"weight": x}), float)
assert_type(jx.scaling.pac_bayes_bound(model, model, [x], 100).total, float)

unknown = jx.no_such_name  # type: ignore[attr-defined]  # reported where the name is taken
unknown = jx.scaling.no_such_name  # type: ignore[attr-defined]
