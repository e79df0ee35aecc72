"""Jets through the softmax.

With c_i = s_i − Σ p s_i (docs/how_it_works.md, softmax):

    p_i = p c_i;   p_ij = p_j c_i + p (s_ij − Σ (p_j c_i + p s_ij))

p_j and c_i are both centred: otherwise an offset common to a row of tangents would be squared
before it cancels.
"""

import torch
from torch import Tensor

from .library import OPS, Streams, available, in_passes, register_operator, streams_of, widened


def softmax_stack(s: Tensor, streams: Streams, masked: bool = False, dim: int = -1) -> Tensor:
    """Return the softmax of a stacked jet [S, ...].

    Args:
        dim: the dimension of the softmax, counted from the last (negative).
        masked: as for `softmax_jet`.
    """
    # Fully hidden rows are replaced before the softmax: 0 · NaN would make their gradient NaN.
    hidden = torch.isneginf(s[0]).all(dim, keepdim=True) & masked
    p = torch.softmax(s[0].masked_fill(hidden, 0), dim).masked_fill(hidden, 0)
    _, first, second = s.split([1, streams.directions, streams.num_second])
    c = first - (p * first).sum(dim, keepdim=True)
    y = [p.unsqueeze(0), p * c]
    # cross = c_i p_j = p c_i c_j, whose sum over the row has to be subtracted.
    if streams.num_second:
        cross = streams.quadratic(c, y[1])
        y.append(cross + p * (second - (cross + p * second).sum(dim, keepdim=True)))
    return torch.cat(y)


def softmax_stack_gradient(g: Tensor, s: Tensor, streams: Streams) -> Tensor:
    """Return the gradient of a stacked jet s, [S, ..., N], from the gradient g of its softmax over
    the last dimension; zeros in rows whose primal scores are all −inf.

    It does not use autograd, which cannot differentiate within an operator. With h_n = g_n − Σ p
    g_n and w_i = g_i + Σ_n h_n c_j:

        s̄_n = p h_n;   s̄_i = p (w_i − Σ p w_i);   s̄ = p (p̄ − Σ p p̄),
        p̄ = g + Σ_i (g_i − Σ p w_i) c_i + Σ_n h_n (t_n − Σ p t_n),   t_n = s_n + c_i c_j
    """
    hidden = torch.isneginf(s[0]).all(-1, keepdim=True)
    p = torch.softmax(s[0].masked_fill(hidden, 0), -1).masked_fill(hidden, 0)

    def centred(x: Tensor) -> Tensor:
        return x - (p * x).sum(-1, keepdim=True)

    sizes = [1, streams.directions, streams.num_second]
    _, first, second = s.split(sizes)
    gradient, g_first, g_second = g.split(sizes)
    c, w = centred(first), g_first
    parts = []
    if streams.num_second:
        h = centred(g_second)
        parts = [p * h]
        w = w + streams.quadratic_gradient(h, c)
        gradient = gradient + (h * centred(second + streams.quadratic(c, c))).sum(0)
    parts.insert(0, p * centred(w))
    gradient = gradient + ((g_first - (p * w).sum(-1, keepdim=True)) * c).sum(0)
    return torch.cat([p * centred(gradient), *parts])


def softmax_jet_reference(x: Tensor, q: int, masked: bool = False, summed: int = 0) -> Tensor:
    """Compute `softmax_jet` in pure torch, on any device."""
    return softmax_stack(widened(x), streams_of(x, q, summed), masked).to(x.dtype)


def softmax_jet(x: Tensor, q: int, masked: bool = False, summed: int = 0) -> Tensor:
    """Return the 2-jet of the softmax over the last dimension.

    Args:
        x: the scores, a stacked jet [S, ..., N].
        q, summed: as for `activation_jet`.
        masked: whether a row whose primal scores are all −inf gives zeros, as in torch's attention;
            False: it gives NaN, as in torch's softmax.

    Returns:
        [S, ..., N] of x's dtype.

    Examples:
        >>> softmax_jet(torch.tensor([[0.0, 0.0], [1.0, -1.0]]), 1)
        tensor([[ 0.5000,  0.5000],
                [ 0.5000, -0.5000]])
    """
    if not available("softmax_jet", x.device, sums=summed > 0):
        return softmax_jet_reference(x, q, masked, summed)
    return in_passes(lambda x, q: OPS.softmax_jet(x, q, masked, summed), [x], q, any_number=True)


register_operator("softmax_jet", softmax_jet_reference, tensors=1)
