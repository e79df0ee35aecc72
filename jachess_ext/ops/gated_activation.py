"""Jets through gated activations act(g) · u (gated MLPs): wrapper, reference and autograd of
`jachess::gated_activation_jet`.

Signature: [S, ...], [S, ...], kind, q -> [S, ...] with S = 1 + q (first order) or
1 + q + q(q-1)/2 (second order) streams. With the streams h of f(g)
(docs/how_it_works.md, pointwise)

    h_0 = f(g_0);   h_i = f' g_i;   h_ij = f' g_ij + f'' g_i g_j

the result's are Leibniz' (there, bilinear):

    y_0 = h_0 u_0;   y_i = h_i u_0 + h_0 u_i;   y_ij = h_ij u_0 + h_i u_j + h_j u_i + h_0 u_ij
"""

import torch
from torch import Tensor

from .activation import activation_streams, check_kind
from .checks import check_jet, check_same, widened
from .jet_formulas import product_jet
from .library import available
from .registration import register_operator


def _check(g: Tensor, u: Tensor, kind: str, q: int) -> None:
    check_jet("gated_activation_jet", g, q, "g")
    check_same("gated_activation_jet", "u", u, g, "g")
    check_kind("gated_activation_jet", kind)


def gated_activation_jet_reference(g: Tensor, u: Tensor, kind: str, q: int) -> Tensor:
    """Pure-torch reference of `gated_activation_jet`: any device, any number of backward passes.

    Args, returns and raises: as `gated_activation_jet`. 16-bit types are computed in fp32.
    """
    _check(g, u, kind, q)
    h = activation_streams(list(widened(g).unbind(0)), kind, q)
    return torch.stack(product_jet(h, list(widened(u).unbind(0)), q)).to(g.dtype)


def gated_activation_jet(g: Tensor, u: Tensor, kind: str, q: int) -> Tensor:
    """Push 2-jets through act(g) · u (docs/how_it_works.md, pointwise and bilinear).

    Args:
        g: [S, ...] stacked streams of the gate, S = 1 + q or 1 + q + q(q-1)/2; fp64, fp32, bf16 or
            fp16 (the 16-bit types are computed in fp32); any size including zero. Any strides; the
            halves of one [S, ..., 2F] tensor (`.chunk(2, -1)`) are read where they lie.
        u: as g, of the same shape and dtype, on the same device.
        kind: one of ACTIVATION_KINDS, the activation of the gate.
        q: number of directions, 1 to 4.

    Returns:
        [S, ...] of g's dtype, contiguous; differentiable any number of times in g and u. Where no
        compiled kernel serves g's device, the pure-torch reference is used.

    Raises:
        ValueError: unknown kind, q outside 1..4, S that does not match q, or g and u of two shapes
            or devices.
        TypeError: a dtype other than the four, or g and u of two dtypes.
    """
    _check(g, u, kind, q)
    if not available("gated_activation_jet", g.device):
        return gated_activation_jet_reference(g, u, kind, q)
    return torch.ops.jachess.gated_activation_jet(g, u, kind, q)


register_operator(
    "gated_activation_jet", gated_activation_jet_reference, tensors=2, differentiable=2
)
