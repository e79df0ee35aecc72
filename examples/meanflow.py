"""MeanFlow (Geng et al. 2025, arXiv 2505.13447): noise to data in one step of a network.

The network u(z, r, t) learns the mean velocity between times r and t, from the identity
u = v - (t - r) du/dt along the path.  du/dt is a derivative of the network that is a target, so it
needs no graph: jx.jvp(..., differentiable=False).  The data are eight clusters on a circle; each
point is two tokens, so that the derivative goes through attention.

python examples/meanflow.py [--tiny] [--out meanflow.png]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jachess_ext as jx

WIDTH, HEADS = 64, 4


def clusters(count: int) -> Tensor:
    """``[count, 2]`` points near eight places of the unit circle."""
    angles = torch.randint(8, (count,)) * (math.pi / 4)
    return torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(count, 2)


class Velocity(nn.Module):
    """Points ``[B, 2]`` and times ``[B]`` to velocities ``[B, 2]``: a transformer of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.coordinates = nn.Parameter(torch.randn(2, 2, WIDTH))
        self.times = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        angles = torch.stack([r, t], 1)[..., None] * torch.tensor([1.0, 2.0, 4.0, 8.0])
        time = self.times(torch.cat([angles.sin(), angles.cos()], -1).flatten(1))
        h = z[..., None] * self.coordinates[0] + self.coordinates[1]  # [B, 2, WIDTH]
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            x = F.layer_norm(h + time[:, None], (WIDTH,))
            heads = qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            h = h + F.scaled_dot_product_attention(*heads.unbind(0)).transpose(1, 2).flatten(2)
            h = h + mlp(F.layer_norm(h + time[:, None], (WIDTH,)))
        return self.leave(h).squeeze(-1)


def loss_of(model: nn.Module, data: Tensor) -> Tensor:
    """The MeanFlow loss; half of the rows have r = t, which is flow matching."""
    noise = torch.randn_like(data)
    r, t = torch.rand(2, len(data)).sort(0).values
    r = torch.where(torch.rand(len(data)) < 0.5, t, r)
    z, v = torch.lerp(data, noise, t[:, None]), noise - data
    tangents = (v, torch.zeros_like(r), torch.ones_like(t))
    u, slope = jx.jvp(model, (z, r, t), tangents, differentiable=False)
    error = (u - (v - (t - r)[:, None] * slope)).square().sum(1)
    return (error / (error.detach() + 0.01)).mean()  # the paper's weights


@torch.no_grad()
def sample(model: nn.Module, count: int) -> Tensor:
    """One evaluation of the network from noise at time 1 to data at time 0."""
    noise = torch.randn(count, 2)
    return noise - model(noise, torch.zeros(count), torch.ones(count))


def energy_distance(a: Tensor, b: Tensor) -> float:
    """2 E|a - b| - E|a - a'| - E|b - b'|: zero for equal distributions."""

    def within(x: Tensor) -> Tensor:
        return torch.cdist(x, x).sum() / (len(x) * (len(x) - 1))

    return float(2 * torch.cdist(a, b).mean() - within(a) - within(b))


def draw(before: Tensor, after: Tensor, data: Tensor, out: Path) -> None:
    """Three panels of points."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(9, 3.2), sharex=True, sharey=True)
    titles = ("before training", "one step of MeanFlow", "data")
    for axis, title, points in zip(axes, titles, (before, after, data), strict=True):
        axis.scatter(points[:, 0], points[:, 1], s=3)
        axis.set(title=title, xlim=(-2, 2), ylim=(-2, 2), aspect="equal")
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> None:
    """Trains, prints the distance of samples to data before and after, draws both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a few steps: does it run, and learn?")
    parser.add_argument("--out", type=Path, help="a picture of the samples")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, steps = Velocity(), 150 if options.tiny else 4000
    data, before = clusters(1000), sample(model, 1000)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, clusters(128 if options.tiny else 512)).backward()
        optimizer.step()
        rates.step()
    after = sample(model, 1000)
    first, last = energy_distance(before, data), energy_distance(after, data)
    if options.out is not None:
        draw(before, after, data, options.out)
    print(f"distance of one-step samples to the data: {first:.3f} before, {last:.3f} after")
    if not last < first / (2 if options.tiny else 10):
        raise SystemExit("the model did not learn")


if __name__ == "__main__":
    main()
