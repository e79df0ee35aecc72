"""Poisson's equation by a network: -Δu = f in the unit square, u = 0 on its boundary.

A physics-informed network (Raissi et al. 2019) trained on the mean square of Δu + f at random
points, with `jx.laplacian` and the backward of it.  The boundary holds by construction.  f is made
so that u = sin(πx) sin(2πy) solves the equation, against which the network is judged.

python examples/poisson.py [--tiny] [--out poisson.png]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn

import jachess_ext as jx

WIDTH = 32


def solution(x: Tensor) -> Tensor:
    """Return what the network should find at points ``[N, 2]``, ``[N]``."""
    return (math.pi * x[:, 0]).sin() * (2 * math.pi * x[:, 1]).sin()


def source(x: Tensor) -> Tensor:
    """Return f = -Δu of the solution, ``[N]``."""
    return 5 * math.pi**2 * solution(x)


class Solution(nn.Module):
    """A network times x (1 - x) y (1 - y), which is zero on the boundary: ``[N, 2]`` to ``[N]``."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
            *(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.network(2 * x - 1).squeeze(-1) * (16 * x * (1 - x)).prod(-1)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean square of the residual Δu + f."""
    _, _, laplacian = jx.laplacian(model, x)
    return (laplacian + source(x)).square().mean()


@torch.no_grad()
def error_of(model: nn.Module, x: Tensor) -> float:
    """Return the relative error in L2, ‖u - u*‖ / ‖u*‖."""
    expected = solution(x)
    return float((model(x) - expected).norm() / expected.norm())


def grid(side: int) -> Tensor:
    """Return the points of a regular grid, boundary included, ``[side², 2]``."""
    line = torch.linspace(0, 1, side)
    return torch.cartesian_prod(line, line)


@torch.no_grad()
def draw(model: nn.Module, out: Path, side: int = 101) -> None:
    """Save what the network found, and its error."""
    from matplotlib.figure import Figure

    x = grid(side)
    found, error = model(x), model(x) - solution(x)
    figure = Figure(figsize=(7.5, 3))
    for axes, title, values in zip(
        figure.subplots(1, 2), ("u", "error of u"), (found, error), strict=True
    ):
        image = values.reshape(side, side).T
        shown = axes.imshow(image, origin="lower", extent=(0, 1, 0, 1), cmap="RdBu_r")
        axes.set(title=title, xlabel="x", ylabel="y")
        figure.colorbar(shown, ax=axes)
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> None:
    """Trains, prints the error against the solution, draws both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a few steps: does it run, and learn?")
    parser.add_argument("--out", type=Path, help="a picture of solution and error")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, steps, points = Solution(), *((200, 128) if options.tiny else (1500, 512))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, torch.rand(points, 2)).backward()
        optimizer.step()
        rates.step()
    error = error_of(model, grid(101))
    print(f"error of the solution after {steps} steps, relative, L2: {error:.1e}")
    if options.out is not None:
        draw(model, options.out)
    if not error < (0.3 if options.tiny else 5e-3):
        raise SystemExit("the network did not find the solution")


if __name__ == "__main__":
    main()
