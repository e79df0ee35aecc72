"""The same seed and step give the same directions and dimensions; other steps give others."""

from __future__ import annotations

import pytest
import torch

import jachess_ext as jx
from jachess_ext.smoothness.directions import DrawCounter, draw_directions
from jachess_ext.smoothness.settings import Randomness, Settings, sample_dimensions

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
    model = classifier("bert")  # draws its weights
    before = torch.get_rng_state()
    jx.smoothness(model, token_batch([4, 3]), engine=engine, seed=5, **SMALL)
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
    model, batch = classifier("bert"), token_batch([1])
    settings = {"engine": "exact", "weights": "uniform", "layers": [0], "scope": "first"}
    values, again = (
        [reg(batch).hessian.item() for _ in range(3)]
        for reg in (jx.JacHess(model, dimensions=3, seed=0, **settings) for _ in range(2))
    )
    assert len(set(values)) == 3 and again == values


def test_more_directions_keep_the_dimensions() -> None:
    plain, other = Randomness.from_seed(9), Randomness.from_seed(9)
    draw_directions(torch.zeros(2, 3, 8), 4, counter=other.directions)
    subsets = [
        sample_dimensions([20], Settings(), random.dimensions, torch.device("cpu"))[0][0]
        for random in (plain, other)
    ]
    assert torch.equal(*subsets)


def test_dimensions_of_a_layer_do_not_depend_on_the_other_layers() -> None:
    """Of one width, whose numbers are sorted as one tensor, of several, and after a first call."""
    cpu = torch.device("cpu")
    together, apart, mixed = (Randomness.from_seed(9).dimensions for _ in range(3))
    subsets = sample_dimensions([20, 20, 20], Settings(), together, cpu)
    first, _ = sample_dimensions([20, 20], Settings(), apart, cpu)
    (last,) = sample_dimensions([20], Settings(), apart, cpu)
    assert torch.equal(first[0], subsets[0][0]) and torch.equal(last[0], subsets[2][0])
    unequal = sample_dimensions([20, 7, 20], Settings(), mixed, cpu)
    assert torch.equal(unequal[0][0], subsets[0][0]) and len(unequal[1][0]) == 7
    assert torch.equal(unequal[2][0], subsets[2][0]) and unequal[1][0].max() < 7


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_of_the_regulariser_can_be_repeated(engine: str) -> None:
    """Each step has its own numbers, which seed and step alone decide."""
    model, batch = classifier("bert"), token_batch([4, 3])
    settings = {"engine": engine, "weights": "uniform", "seed": 3} | SMALL
    reg = jx.JacHess(model, **settings)
    losses = [reg(batch).loss for _ in range(3)]
    assert len({loss.item() for loss in losses}) == 3
    other = jx.JacHess(model, **settings | {"seed": 9})
    other.load_state_dict(reg.state_dict() | {"step": 2})
    assert torch.equal(other(batch).loss, losses[2])
    again = jx.smoothness(model, batch, engine=engine, seed=3, step=1, **SMALL)
    torch.testing.assert_close(losses[1], 0.01 * (again.jacobian + again.hessian).mean())


def test_draws_of_a_seed_share_no_offset() -> None:
    """Over uses, ranks, steps and draws, to the ends of their ranges; all within 62 bits."""
    uses = ("directions", "dimensions", "calibration directions", "calibration dimensions")
    offsets = set()
    for use in uses:
        for rank in (0, 1, 2**11 - 1):
            for step in (0, 1, 77, 2**27 - 1):
                counter = DrawCounter(0, use, step, rank, drawn=2**22 - 4)
                offsets.update(counter.next_offset() for _ in range(4))
                with pytest.raises(ValueError, match="drawn is 4194304; expected 0 to 4194303"):
                    counter.next_offset()
    assert len(offsets) == 4 * 3 * 4 * 4
    assert min(offsets) >= 0 and max(offsets) < 2**62


def test_ranks_draw_different_directions() -> None:
    like = torch.zeros(2, 3, 8)
    draws = [draw_directions(like, 2, counter=DrawCounter(1, rank=rank)) for rank in (0, 1, 0)]
    assert torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[1])


@pytest.mark.parametrize("field, value", [("rank", 2**11), ("step", 2**27), ("step", -1)])
def test_counters_out_of_range_are_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}; expected 0 to"):
        DrawCounter(0, **{field: value}).next_offset()


def test_dimensions_are_a_uniform_subset() -> None:
    """Each of 20 dimensions is in a D of 5 a quarter of the time, each pair 1/19 of it.

    Bounds: five standard errors of the binomial counts.
    """
    draws, width, size = 4000, 20, 5
    counter = DrawCounter(0, "dimensions")
    member = torch.zeros(draws, width)
    settings, cpu = Settings(dimensions=size), torch.device("cpu")
    sampled = sample_dimensions([width] * draws, settings, counter, cpu)
    for row, (indices, scale) in zip(member, sampled, strict=True):
        assert scale == 1 and len(indices.unique()) == size
        row[indices] = 1
    together = member.T @ member / draws
    alone, pair = size / width, size * (size - 1) / (width * (width - 1))
    expected = torch.full((width, width), pair).fill_diagonal_(alone)
    assert ((together - expected).abs() < 5 * (expected * (1 - expected) / draws).sqrt()).all()
