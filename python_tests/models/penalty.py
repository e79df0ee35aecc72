"""A scalar of the jets with the shape of Eq. 7, for tests of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import jachess_ext as jx

from .zoo import Case


def smoothness_penalty(jets: Sequence[jx.Jet], mask: Tensor) -> Tensor:
    """Σ_k Σ_t ( (mean_i ‖J u_i‖²)^½ + (mean_p ‖D²z[u_i, u_j]‖²)^½ ) over real tokens.

    The embedding layer is left out: where a model adds only positions to its input it is constant.
    """
    total = jets[0].primal.new_zeros(())
    for jet in jets[1:]:
        for streams in (jet.first, jet.second):
            squares = streams[..., mask, :].pow(2).mean(0).sum(-1)
            total = total + torch.sqrt(squares).sum()
    return total


def penalty_of(case: Case) -> Tensor:
    """The penalty from one jet pass through the case's model."""
    return smoothness_penalty(jx.jet(case.hidden_states, case.x, case.directions), case.mask)
