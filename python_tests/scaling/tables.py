"""Synthetic tables of models: rectified curves of one task, with noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jachess_ext.scaling import LossTable
from python_tests.scaling import curves


def population(
    seed: int, models: int = 20, noise: float = 0.005, bend: float = 0.0
) -> tuple[LossTable, np.ndarray]:
    """A table of curves whose floors are alike, and their true losses at all sizes.

    `bend`: standard deviation, per doubling, of a random walk in each curve's slope.
    """
    generator = np.random.default_rng(seed)
    log_transition = generator.normal(np.log(8e3), 1.0, models)
    beta = np.exp(generator.normal(np.log(0.45), 0.25, models))
    floor = generator.normal(0.9, 0.1, models)
    start = generator.uniform(1.5, 3.0, models)
    d = curves.WITH_ZERO
    power = (d[None] / np.exp(log_transition)[:, None]) ** beta[:, None]
    losses = start[:, None] / (1 + power) + floor[:, None]
    walk = np.cumsum(np.cumsum(generator.standard_normal((models, len(d) - 1)), -1), -1) * bend
    losses[:, 1:] *= np.exp(walk)
    measured = curves.noisy(losses, generator, noise)
    names = tuple(f"model-{place}" for place in range(models))
    parameters = np.exp(generator.uniform(np.log(5e7), np.log(5e9), models))
    return LossTable(names, d, measured, parameters), losses


def write_csv(path: Path, table: LossTable) -> Path:
    lines = ["name," + ",".join(f"{size:.0f}" for size in table.sizes) + ",size,family"]
    assert table.parameters is not None
    for name, row, n in zip(table.names, table.losses, table.parameters, strict=True):
        lines.append(f"{name}," + ",".join(map(repr, map(float, row))) + f",{float(n)!r},x")
    path.write_text("\n".join(lines) + "\n")
    return path
