"""Seeds reproduce; what is random is drawn afresh."""

from __future__ import annotations

import pytest
import torch

import jachess_ext as jx
from jachess_ext.smoothness import regulariser

from .tiny_models import classifier, token_batch

ENGINES = ("jet", "reverse")
SMALL = {"layers": [1], "scope": "last", "dimensions": 3}


def measured(engine: str, seed: int | None, **settings):
    batch = token_batch([4, 3])
    return jx.smoothness(classifier("bert"), batch, engine=engine, seed=seed, **SMALL | settings)


@pytest.mark.parametrize("engine", ENGINES)
def test_same_seed_same_numbers(engine: str) -> None:
    a, b, other = (measured(engine, seed) for seed in (1, 1, 2))
    assert torch.equal(a.jacobian, b.jacobian) and torch.equal(a.hessian, b.hessian)
    assert not torch.equal(a.jacobian, other.jacobian)
    assert not torch.equal(a.hessian, other.hessian)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_seed_leaves_torchs_generator_alone(engine: str) -> None:
    before = torch.get_rng_state()
    measured(engine, 5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_seed_torchs_generator_decides(engine: str) -> None:
    model, batch = classifier("bert"), token_batch([4, 3])

    def measure() -> torch.Tensor:
        return jx.smoothness(model, batch, engine=engine, **SMALL).jacobian

    torch.manual_seed(4)
    first, second = measure(), measure()
    torch.manual_seed(4)
    assert torch.equal(first, measure())
    assert not torch.equal(first, second)


def test_dimensions_are_drawn_afresh_each_step() -> None:
    """With the exact engine D is all that is random."""
    model, batch = classifier("bert"), token_batch([2])
    settings = {"engine": "exact", "weights": "uniform", "layers": [0], "scope": "first"}
    reg = jx.JacHess(model, dimensions=3, seed=0, **settings)
    values = [reg(batch).hessian.item() for _ in range(4)]
    assert len(set(values)) == 4
    again = jx.JacHess(model, dimensions=3, seed=0, **settings)
    assert [again(batch).hessian.item() for _ in range(4)] == values


def test_more_directions_keep_the_dimensions() -> None:
    """D has a generator of its own: in mean over directions, two q see the same subset."""
    subsets = []
    for engine in ("exact", "exact"):
        subsets.append(measured(engine, 9, directions=2 + 3 * len(subsets)).hessian)
    torch.testing.assert_close(*subsets)


def test_steps_draw_different_directions() -> None:
    model, batch = classifier("bert"), token_batch([4, 3])
    reg = jx.JacHess(model, weights="uniform", hessian=False, seed=0)
    values = [reg(batch).loss.item() for _ in range(3)]
    assert len(set(values)) == 3
    other = jx.JacHess(model, weights="uniform", hessian=False, seed=1)
    assert other(batch).loss.item() not in values


def test_step_seeds_do_not_collide() -> None:
    """Streams of (seed, step) are distinct over five seeds and ten thousand steps."""
    reg = jx.JacHess(classifier("bert"), weights="uniform")
    seeds = set()
    for reg.seed in range(5):
        for reg.step in range(10_000):
            seeds.add(reg._step_seed())
    assert len(seeds) == 50_000
    assert isinstance(reg, regulariser.JacHess)
