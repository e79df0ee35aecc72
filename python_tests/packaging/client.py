"""A program that uses the package, for the type checker (`make check`); nothing runs it."""

import torch
from torch import nn

import jachess_ext as jx

model, x = nn.Linear(3, 1), torch.randn(4, 3)
value, tangent = jx.jvp(model, (x,), (x,))
result: jx.scaling.Selection = jx.scaling.select("losses.csv", target=10_000)
ranking: list[str] = result.ranking
regulariser = jx.JacHess(model, weights="uniform")
laplacian = jx.laplacian(model, x).laplacian
rows = jx.ops.attention_jet(x, x, x, q=1).shape[0] + 1
unknown = jx.no_such_name  # type: ignore[attr-defined]  # reported where the name is taken
unknown = jx.scaling.no_such_name  # type: ignore[attr-defined]
