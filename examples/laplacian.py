"""The Laplacian of a network in its inputs, without and with double backward.

Physics-informed networks and score models need Σᵢ ∂²f/∂xᵢ².  torch differentiates the gradient
once for each coordinate; `jx.laplacian` gives the sum going forward, in one pass.  The network is a
small transformer over the coordinates as tokens, whose fused attention has no double backward in
torch: there it runs in its plain form.

python examples/laplacian.py [--tiny] [--out laplacian.png]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import jachess_ext as jx
from jachess_ext.lab.demo import peak_mebibytes

WIDTH, HEADS, LAYERS = 64, 4, 3


class Network(nn.Module):
    """From points [N, d] to a value each, [N]; a coordinate is a token."""

    def __init__(self, coordinates: int) -> None:
        super().__init__()
        self.enter = nn.Linear(1, WIDTH)
        self.place = nn.Parameter(torch.randn(coordinates, WIDTH) / 2)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.mixers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the values."""
        h = self.enter(x.unsqueeze(-1)) + self.place
        for project, mix in zip(self.projections, self.mixers, strict=True):
            q, k, v = project(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v)
            h = h + torch.tanh(mix(mixed.transpose(1, 2).flatten(2)))
        return self.leave(h).mean((-2, -1))


def by_jet(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the Laplacian at each point, [N], going forward."""
    return jx.laplacian(f, x)[2]


def by_double_backward(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the same from gradients of the gradient, a coordinate at a time."""
    x = x.detach().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        (gradient,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        second = [
            torch.autograd.grad(gradient[:, i].sum(), x, retain_graph=True)[0][:, i]
            for i in range(x.shape[1])
        ]
    return torch.stack(second).sum(0)


def cost(run: Callable[[], Tensor]) -> tuple[float, float]:
    """Return seconds, the best of three, and MiB that torch's allocator held at most."""
    most = peak_mebibytes(run)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times), most


def draw(coordinates: list[int], costs: dict[str, list[tuple[float, float]]], out: Path) -> None:
    """Save time and memory over the number of coordinates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3))
    for axes, part, label in zip(
        figure.subplots(1, 2), (0, 1), ("milliseconds", "MiB"), strict=True
    ):
        for name, rows in costs.items():
            axes.plot(coordinates, [row[part] * (1000, 1)[part] for row in rows], "o-", label=name)
        axes.set(xscale="log", yscale="log", xlabel="coordinates", ylabel=label)
        axes.set_xticks(coordinates, map(str, coordinates))
        axes.minorticks_off()
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> None:
    """Prints the error against double backward, and what both cost."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="few coordinates: does it run?")
    parser.add_argument("--out", type=Path, help="a picture of time and memory")
    options = parser.parse_args()
    torch.manual_seed(0)
    coordinates = [2, 4] if options.tiny else [4, 8, 16, 32]
    costs: dict[str, list[tuple[float, float]]] = {"jx.laplacian": [], "double backward": []}
    for d in coordinates:
        network, x = Network(d).double().requires_grad_(False), torch.randn(16, d).double()
        error = float((by_jet(network, x) - by_double_backward(network, x)).abs().max())
        if not error < 1e-12:
            raise SystemExit(f"the Laplacian disagrees with double backward by {error:.1e}")
        network, x = network.float(), x.float()
        costs["jx.laplacian"].append(cost(partial(by_jet, network, x)))
        costs["double backward"].append(cost(partial(by_double_backward, network, x)))
    (ours, ours_held), (theirs, theirs_held) = (rows[-1] for rows in costs.values())
    print(
        f"{d} coordinates, 16 points: agrees to {error:.0e}; jx.laplacian {1000 * ours:.0f} ms, "
        f"{ours_held:.0f} MiB; double backward {1000 * theirs:.0f} ms, {theirs_held:.0f} MiB"
    )
    if options.out is not None:
        draw(coordinates, costs, options.out)


if __name__ == "__main__":
    main()
