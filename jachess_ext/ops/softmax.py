"""Jets through the softmax.

With c_i = s_i − Σ p s_i (docs/how_it_works.md, softmax):

    p_i = p c_i;   p_ij = p_j c_i + p (s_ij − Σ (p_j c_i + p s_ij))

p_j and c_i are both centred: what the tangents share would else be squared before it cancels.
"""

import torch
from torch import Tensor

from .library import available, in_passes, pair_list, register_operator, split_streams


def softmax_jet_reference(x: Tensor, q: int, masked: bool = False, dim: int = -1) -> Tensor:
    """Push a jet as `softmax_jet`, in pure torch, on any device.

    Args:
        dim: the dimension of the softmax, negative: counted from the last.
    """
    s = split_streams(x, q)
    # Hidden rows are replaced before the softmax: 0 · NaN would make their gradient NaN.
    hidden = torch.isneginf(s[0]).all(dim, keepdim=True) & masked
    p = torch.softmax(s[0].masked_fill(hidden, 0), dim).masked_fill(hidden, 0)
    c = [s_i - (p * s_i).sum(dim, keepdim=True) for s_i in s[1 : 1 + q]]
    y = [p, *(p * c_i for c_i in c)]
    for (i, j), s_ij in zip(pair_list(q), s[1 + q :], strict=False):
        cross = y[1 + j] * c[i]
        y.append(cross + p * (s_ij - (cross + p * s_ij).sum(dim, keepdim=True)))
    return torch.stack(y).to(x.dtype)


def softmax_jet(x: Tensor, q: int, masked: bool = False) -> Tensor:
    """Push a 2-jet through a softmax over the last dimension.

    Args:
        x: the scores, a stacked jet [S, ..., N].
        q: number of directions, 1 to 4.
        masked: a row whose primal scores are all −inf gives zeros, as in torch's attention; else
            NaN, as in torch's softmax.

    Returns:
        [S, ..., N] of x's dtype.

    Example:
        >>> softmax_jet(torch.tensor([[0.0, 0.0], [1.0, -1.0]]), 1)
        tensor([[ 0.5000,  0.5000],
                [ 0.5000, -0.5000]])
    """
    if not available("softmax_jet", x.device):
        return softmax_jet_reference(x, q, masked)
    return in_passes(lambda x, q: torch.ops.jachess.softmax_jet(x, q, masked), [x], q)


register_operator("softmax_jet", softmax_jet_reference, tensors=1)
