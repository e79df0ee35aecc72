"""Who is probably the lowest: against drawing from the distributions with numpy."""

from __future__ import annotations

import numpy as np
import pytest

from jachess_ext.scaling.predictive import Student

DRAWS = 200_000
CASES = {
    "nearly separated": ([0.0, 0.1, 0.2, 0.5], [0.02] * 4),
    "tied": ([0.3] * 5, [0.02] * 5),
    "two tied, one behind": ([0.0, 0.0, 0.05], [0.02, 0.02, 0.02]),
    "narrow among wide": ([0.0, 0.02, 0.0, 0.1], [1e-4, 0.5, 0.03, 2.0]),
    "far apart": ([-3.0, 0.0, 2.0, 40.0], [0.01, 0.02, 0.01, 3.0]),
    "twelve": (np.linspace(0, 1, 12).tolist(), np.geomspace(0.01, 0.5, 12).tolist()),
}


def shares(location: np.ndarray, scale: np.ndarray, dof: np.ndarray) -> np.ndarray:
    generator = np.random.default_rng(0)
    counts = np.zeros(len(location))
    for _ in range(4):  # a quarter at a time keeps the memory small
        shape = (DRAWS // 4, len(location))
        normal = generator.standard_normal(shape)
        chi = generator.chisquare(np.where(np.isinf(dof), 1.0, dof), shape)
        t = normal / np.where(np.isinf(dof), 1.0, np.sqrt(chi / dof))
        counts += np.bincount((location + scale * t).argmin(1), minlength=len(location))
    return counts / DRAWS


@pytest.mark.parametrize("dof", [1, 2, 5, 30, np.inf])
@pytest.mark.parametrize("case", CASES)
def test_prob_lowest_against_drawing(case: str, dof: float) -> None:
    location, scale = map(np.array, CASES[case])
    every = np.full(len(location), float(dof))
    found = Student(location, scale, every).prob_lowest()
    assert found.sum() == pytest.approx(1.0)
    # Half of what was promised: 200,000 draws err by 0.0011.
    np.testing.assert_allclose(found, shares(location, scale, every), atol=0.005)


def test_prob_lowest_of_unequal_tails() -> None:
    location, scale = np.array([0.0, 0.05, 0.2, 0.3]), np.array([0.05, 0.02, 0.1, 1.0])
    dof = np.array([1.0, 30.0, 2.0, np.inf])
    found = Student(location, scale, dof).prob_lowest()
    np.testing.assert_allclose(found, shares(location, scale, dof), atol=0.005)
