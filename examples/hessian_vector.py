"""Hessian-vector products of an unmodified transformers model, through its fused attention.

`jx.hvp` takes the tangent g·v of the loss along v going forward, and its gradient in the
embeddings, H v, going back.  With it, power iteration finds the direction in which the loss is
curved most.
torch's own ways stop at scaled_dot_product_attention, which has neither forward-mode derivatives
nor a second backward.

python examples/hessian_vector.py [--tiny]
"""

from __future__ import annotations

import torch
from small_task import load, parse
from torch import Tensor
from torch.utils.data import DataLoader

import jachess_ext as jx


def main() -> None:
    """Prints the largest eigenvalue of a batch's loss, and checks H v by differences."""
    options = parse(__doc__)
    model, train, _, _ = load(options.tiny)
    model.double().eval()
    batch = next(iter(DataLoader(train, 8, collate_fn=train.collate)))
    x = model.get_input_embeddings()(batch.pop("input_ids")).detach()

    def loss(x: Tensor) -> Tensor:
        return model(inputs_embeds=x, **batch).loss

    def hessian_times(v: Tensor) -> Tensor:
        _, _, (product,) = jx.hvp(loss, (x,), (v,), differentiable=False)
        return product

    v = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    v /= v.norm()
    step = 1e-4
    moved = [(x + s * v).requires_grad_() for s in (step, -step)]
    ahead, behind = (torch.autograd.grad(loss(point), point)[0] for point in moved)
    difference = (ahead - behind) / (2 * step)
    error = float((hessian_times(v) - difference).norm() / difference.norm())
    values = []
    for _ in range(5 if options.tiny else 30):
        product = hessian_times(v)
        values.append(float((v * product).sum()))
        v = product / product.norm()
    print(
        f"curvature along v, by iteration: {values[0]:.3f} {values[1]:.3f} ... {values[-1]:.3f}; "
        f"H v against differences of gradients: {error:.1e}"
    )
    if not error < 1e-5:
        raise SystemExit("H v disagrees with differences of gradients")


if __name__ == "__main__":
    main()
