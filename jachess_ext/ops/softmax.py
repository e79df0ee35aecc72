"""Jets through the softmax.

With c_i = s_i − Σ p s_i (docs/how_it_works.md, softmax):

    p_i = p c_i;   p_ij = p_j c_i + p (s_ij − Σ (p_j c_i + p s_ij))

p_j and c_i are both centred: what the tangents share would else be squared before it cancels.
"""

import torch
from torch import Tensor

from .library import Streams, available, in_passes, register_operator, streams_of, widened


def softmax_stack(s: Tensor, streams: Streams, masked: bool = False, dim: int = -1) -> Tensor:
    """Return the stack of the softmax of a stack [S, ...].

    Args:
        dim: the dimension of the softmax, negative: counted from the last.
        masked: as for `softmax_jet`.
    """
    # Hidden rows are replaced before the softmax: 0 · NaN would make their gradient NaN.
    hidden = torch.isneginf(s[0]).all(dim, keepdim=True) & masked
    p = torch.softmax(s[0].masked_fill(hidden, 0), dim).masked_fill(hidden, 0)
    _, first, second = s.split([1, streams.directions, streams.seconds])
    c = first - (p * first).sum(dim, keepdim=True)
    y = [p.unsqueeze(0), p * c]
    # cross = c_i p_j = p c_i c_j, whose sum over the row has to be taken off again.
    if streams.seconds:
        cross = streams.quadratic(c, y[1])
        y.append(cross + p * (second - (cross + p * second).sum(dim, keepdim=True)))
    return torch.cat(y)


def softmax_jet_reference(x: Tensor, q: int, masked: bool = False, summed: int = 0) -> Tensor:
    """Push a jet as `softmax_jet`, in pure torch, on any device."""
    return softmax_stack(widened(x), streams_of(x, q, summed), masked).to(x.dtype)


def softmax_jet(x: Tensor, q: int, masked: bool = False, summed: int = 0) -> Tensor:
    """Push a 2-jet through a softmax over the last dimension.

    Args:
        x: the scores, a stacked jet [S, ..., N].
        q, summed: as for `activation_jet`.
        masked: a row whose primal scores are all −inf gives zeros, as in torch's attention; else
            NaN, as in torch's softmax.

    Returns:
        [S, ..., N] of x's dtype.

    Example:
        >>> softmax_jet(torch.tensor([[0.0, 0.0], [1.0, -1.0]]), 1)
        tensor([[ 0.5000,  0.5000],
                [ 0.5000, -0.5000]])
    """
    if not available("softmax_jet", x.device, sums=summed > 0):
        return softmax_jet_reference(x, q, masked, summed)
    operator = torch.ops.jachess.softmax_jet
    return in_passes(lambda x, q: operator(x, q, masked, summed), [x], q, any_number=True)


register_operator("softmax_jet", softmax_jet_reference, tensors=1)
