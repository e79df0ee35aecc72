"""Random programs: value, first and second derivatives and their gradients, in every mode."""

import pytest

from .draw import draw
from .oracle import NotAProgram, verdicts
from .shrink import shrunk


def check(seeds: range) -> None:
    """No program of the seeds is wrong; nine of ten are right."""
    right = tried = 0
    for seed in seeds:
        program = draw(seed)
        try:
            found = verdicts(program)
        except NotAProgram:
            continue
        for mode, verdict in found.items():
            if verdict.kind == "wrong":
                script = shrunk(program, mode).script()
                pytest.fail(f"seed {seed}, {mode}: {verdict.what}\n{script}\n{verdict.text}")
            right += verdict.kind == "right"
        tried += len(found)
    assert right > 0.9 * tried > 0


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_programs(first: int) -> None:
    check(range(first, first + 20))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(200, 5000, 200))
def test_more_random_programs(first: int) -> None:
    check(range(first, first + 200))
