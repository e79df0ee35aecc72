"""``grid_sample`` with a grid that is a jet, and ``affine_grid``, which makes such grids.

``grid_sample`` calls the formula of `differentiable/sampling.py`, whose functions have rules.  The
rule for a constant grid is in `rules/linear.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...differentiable.sampling import MODES, PADDINGS, grid_sample
from ...torch_private import functional as F
from ..engine.registry import jet_rule, recognise
from ..engine.tensor import JetTensor, primal_of
from ..engine.types import Rule


@recognise(F.grid_sample)
def grid_sample_at_jets(
    rule: Rule,
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor | None:
    """Sample images ``[N, C, ...]`` at a grid that is a jet; return None for another grid.

    Between the centres of pixels, the result is a polynomial of the grid's coordinates.
    """
    if not isinstance(grid, JetTensor):
        return None
    settings = mode, padding_mode, align_corners
    # torch's own function checks the call.
    sampled = F.grid_sample(primal_of(input).detach(), grid.primal.detach(), *settings)
    if mode == "nearest" or not sampled.numel():  # the derivative by the grid is 0
        return F.grid_sample(input, grid.primal, *settings)
    numbers = MODES.index(mode), PADDINGS.index(padding_mode), bool(align_corners)
    return grid_sample(input, grid, *numbers).to(sampled.dtype)


@jet_rule(F.affine_grid)
def affine_grid(
    theta: JetTensor, size: Sequence[int], align_corners: bool | None = None
) -> JetTensor:
    """Apply ``affine_grid``, which is linear in ``theta``, to every stream."""
    streams = theta.streams
    sizes = [len(streams) * size[0], *size[1:]]
    out = F.affine_grid(streams.flatten(0, 1), sizes, align_corners)
    return theta.with_streams(out.unflatten(0, (len(streams), -1)))
