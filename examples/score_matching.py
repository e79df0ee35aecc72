"""The score of a density from its samples: implicit score matching (Hyvärinen 2005).

The score s(x) = ∇ log p(x) minimises E[½ ‖s‖² + div s] over samples of p: no density, no noise, but
the divergence of a network.  `jx.divergence` has it from one pass of order 1, and the backward of
that trains the network.  The density, a mixture of three Gaussians in the plane, is known, so that
the score that was learned is judged against its own.

python examples/score_matching.py [--tiny] [--out score.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import jachess_ext as jx

WIDTH, SPREAD = 64, 0.5
CENTRES = torch.tensor([[-1.0, -0.6], [1.0, -0.6], [0.0, 1.0]])


def sample(count: int) -> Tensor:
    """Draw points of the mixture, ``[count, 2]``."""
    return CENTRES[torch.randint(len(CENTRES), (count,))] + SPREAD * torch.randn(count, 2)


def true_score(x: Tensor) -> Tensor:
    """Return ∇ log p at points ``[N, 2]``: the way to each centre, weighted by its share of p."""
    ways = CENTRES - x[:, None]
    shares = (-ways.square().sum(-1) / (2 * SPREAD**2)).softmax(-1)
    return (shares[..., None] * ways).sum(1) / SPREAD**2


def network() -> nn.Sequential:
    """Return a network from points ``[N, 2]`` to scores ``[N, 2]``."""
    return nn.Sequential(
        *(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        nn.Linear(WIDTH, 2),
    )


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean of ½ ‖s‖² + div s over samples."""
    score, divergence = jx.divergence(model, x)
    return (score.square().sum(-1) / 2 + divergence).mean()


@torch.no_grad()
def error_of(model: nn.Module, x: Tensor) -> float:
    """Return the relative error √(E ‖s - s*‖² / E ‖s*‖²) over samples."""
    expected = true_score(x)
    return float((model(x) - expected).norm() / expected.norm())


@torch.no_grad()
def draw(model: nn.Module, out: Path, side: int = 17) -> None:
    """Save samples with both scores as arrows."""
    from matplotlib.figure import Figure

    line, points = torch.linspace(-2, 2, side), sample(1000)
    x = torch.cartesian_prod(line, line)
    figure = Figure(figsize=(7.5, 3.8))
    for axes, title, arrows in zip(
        figure.subplots(1, 2, sharex=True, sharey=True),
        ("learned from samples", "score of the density"),
        (model(x), true_score(x)),
        strict=True,
    ):
        axes.scatter(points[:, 0], points[:, 1], s=2, color="0.75")
        axes.quiver(x[:, 0], x[:, 1], arrows[:, 0], arrows[:, 1], scale=120)
        axes.set(title=title, xlim=(-2.2, 2.2), ylim=(-2.2, 2.2), aspect="equal")
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> None:
    """Trains, prints the error against the density's score, draws both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a few steps: does it run, and learn?")
    parser.add_argument("--out", type=Path, help="a picture of both scores")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, steps, points = network(), *((200, 256) if options.tiny else (2000, 1024))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, sample(points)).backward()
        optimizer.step()
        rates.step()
    error = error_of(model, sample(10_000))
    print(f"error of the score after {steps} steps, relative, over samples: {error:.1e}")
    if options.out is not None:
        draw(model, options.out)
    if not error < (0.5 if options.tiny else 0.1):
        raise SystemExit("the network did not learn the score")


if __name__ == "__main__":
    main()
