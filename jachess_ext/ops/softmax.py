"""Jets through the softmax: wrapper, pure-torch reference, fake kernels and autograd of
`jachess::softmax_jet`.

Signature: [S, ..., N], q, masked -> [S, ..., N], with S = 1 + q (first order) or
1 + q + q(q-1)/2 streams.
With c_i = s_i − Σ p s_i (docs/how_it_works.md, softmax):

    p_i = p c_i;   p_ij = p_j c_i + p (s_ij − Σ (p_j s_i + p s_ij))
"""

import torch
from torch import Tensor

from .checks import check_jet, pair_list, widened
from .library import available
from .registration import register_operator


def softmax_jet_reference(x: Tensor, q: int, masked: bool = False) -> Tensor:
    """Pure-torch reference of `softmax_jet`: any device, any number of backward passes.

    Args, returns and raises: as `softmax_jet`. 16-bit types are computed in fp32.
    """
    check_jet("softmax_jet", x, q, last="the scores of a row")
    s = widened(x).unbind(0)
    hidden = torch.isneginf(s[0]).all(-1, keepdim=True) & masked
    p = torch.softmax(s[0].masked_fill(hidden, 0), -1).masked_fill(hidden, 0)

    def centred(t: Tensor) -> Tensor:
        return t - (p * t).sum(-1, keepdim=True)

    c = [centred(s[1 + i]) for i in range(q)]
    y = [p, *(p * c_i for c_i in c)]
    if x.shape[0] > 1 + q:
        for n, (i, j) in enumerate(pair_list(q)):
            s_ij = s[1 + q + n]
            change = (y[1 + j] * s[1 + i] + p * s_ij).sum(-1, keepdim=True)
            y.append(y[1 + j] * c[i] + p * (s_ij - change))
    return torch.stack(y).to(x.dtype)


def softmax_jet(x: Tensor, q: int, masked: bool = False) -> Tensor:
    """Push a 2-jet through a softmax over the last dimension (docs/how_it_works.md, softmax).

    Args:
        x: [S, ..., N] stacked streams of the scores, S = 1 + q or 1 + q + q(q-1)/2; fp64, fp32,
            bf16 or fp16 (the 16-bit types are computed in fp32); any strides, any size including
            zero.
        q: number of directions, 1 to 4.
        masked: a row whose primal scores are all −inf gives zeros, as in torch's attention; else
            NaN, as in torch's softmax.

    Returns:
        [S, ..., N] of x's dtype; differentiable any number of times. Where no compiled kernel
        serves x's device, the pure-torch reference is used.

    Raises:
        ValueError: q outside 1..4, S that does not match q, or no dimension behind the streams.
        TypeError: a dtype other than the four.
    """
    check_jet("softmax_jet", x, q, last="the scores of a row")
    if not available("softmax_jet", x.device):
        return softmax_jet_reference(x, q, masked)
    return torch.ops.jachess.softmax_jet(x, q, masked)


register_operator("softmax_jet", softmax_jet_reference, tensors=1)
