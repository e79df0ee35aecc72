"""Jets through gated activations act(g) · u (gated MLPs): face, pure-torch twin, fake kernels and
autograd of `jachess::gated_activation_jet`.

Signature: [S, ...], [S, ...], kind, q -> [S, ...] with S = 1 + q (first order) or
1 + q + q(q-1)/2 (second order) streams. With the streams h of f(g)
(docs/how_it_works.md, pointwise)

    h_0 = f(g_0);   h_i = f' g_i;   h_ij = f' g_ij + f'' g_i g_j

the result's are Leibniz' (there, bilinear):

    y_0 = h_0 u_0;   y_i = h_i u_0 + h_0 u_i;   y_ij = h_ij u_0 + h_i u_j + h_j u_i + h_0 u_ij
"""

from typing import Any

import torch
from torch import Tensor

from .activation import activation_streams, check_kind
from .checks import check_jet, check_same, widened
from .double_backward import gradient_of_backward
from .jet_formulas import product_jet
from .library import available, loaded


def _check(g: Tensor, u: Tensor, kind: str, q: int) -> None:
    check_jet("gated_activation_jet", g, q, "g")
    check_same("gated_activation_jet", "u", u, g, "g")
    check_kind("gated_activation_jet", kind)


def gated_activation_jet_reference(g: Tensor, u: Tensor, kind: str, q: int) -> Tensor:
    """Pure-torch twin of `gated_activation_jet`: any device, any number of backward passes.

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
        compiled kernel serves g's device, the pure-torch twin is used.

    Raises:
        ValueError: unknown kind, q outside 1..4, S that does not match q, or g and u of two shapes
            or devices.
        TypeError: a dtype other than the four, or g and u of two dtypes.
    """
    _check(g, u, kind, q)
    if not available("gated_activation_jet", g.device):
        return gated_activation_jet_reference(g, u, kind, q)
    return torch.ops.jachess.gated_activation_jet(g, u, kind, q)


# ---- registrations: fake kernels and autograd ----------------------------------------------


def _fake(g: Tensor, u: Tensor, kind: str, q: int) -> Tensor:
    return torch.empty_like(g, memory_format=torch.contiguous_format)


def _fake_backward(gy: Tensor, g: Tensor, u: Tensor, kind: str, q: int) -> tuple[Tensor, Tensor]:
    gg = torch.empty_like(g, memory_format=torch.contiguous_format)
    return gg, torch.empty_like(gg)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    g, u, ctx.kind, ctx.q = inputs
    ctx.save_for_backward(g, u)


def _backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    g, u = ctx.saved_tensors
    gg, gu = torch.ops.jachess.gated_activation_jet_backward(gy, g, u, ctx.kind, ctx.q)
    return gg, gu, None, None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    gy, g, u, ctx.kind, ctx.q = inputs
    ctx.save_for_backward(gy, g, u)


def _backward_of_backward(
    ctx: Any, cot_g: Tensor | None, cot_u: Tensor | None
) -> tuple[Tensor | None, ...]:
    gy, g, u = ctx.saved_tensors
    ggy, gg, gu = gradient_of_backward(
        lambda g, u: gated_activation_jet_reference(g, u, ctx.kind, ctx.q),
        [g, u],
        gy,
        [cot_g, cot_u],
    )
    return ggy, gg, gu, None, None


if loaded():
    torch.library.register_fake("jachess::gated_activation_jet", _fake)
    torch.library.register_fake("jachess::gated_activation_jet_backward", _fake_backward)
    torch.library.register_autograd("jachess::gated_activation_jet", _backward, setup_context=_save)
    torch.library.register_autograd(
        "jachess::gated_activation_jet_backward",
        _backward_of_backward,
        setup_context=_save_backward,
    )
