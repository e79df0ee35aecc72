"""The double functions of csrc/scalar_math.h, in loops of each instruction set, against mpmath.

An error is counted in units of the last place of the exact value, rounded to double.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch

from python_tests import processes
from python_tests.ops.shim import CSRC

Values = np.ndarray[tuple[int], np.dtype[np.float64]]
WIDTHS = {"x86-64": 16, "x86-64-v3": 32, "x86-64-v4": 64}  # a register's bytes, by level
FLAGS = ["-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"]  # as the build's

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def supported(level: str) -> bool:
    """Whether this processor runs code for an x86-64 level."""
    best = torch.backends.cpu.get_cpu_capability()
    return {"x86-64": True, "x86-64-v3": best != "DEFAULT", "x86-64-v4": best == "AVX512"}[level]


@pytest.fixture(scope="module", params=WIDTHS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The evaluating program for an x86-64 level; every function's loop is one of vectors."""
    if not supported(request.param):
        pytest.skip(f"this processor lacks {request.param}")
    target = tmp_path_factory.mktemp(request.param) / "run_scalar_math"
    source = CSRC / "testing/run_scalar_math.cpp"
    command = ["g++", "-std=c++17", *FLAGS, f"-march={request.param}", "-fopt-info-vec"]
    done = processes.run([*command, source, "-o", target], cwd=target.parent)
    assert done.returncode == 0, done.stderr
    vectors = rf"run_scalar_math.cpp.*vectorized using {WIDTHS[request.param]} byte"
    assert len(re.findall(vectors, done.stderr)) == len(BOUNDS)
    return target


def evaluated(program: Path, function: str, x: Values) -> Values:
    """function(x) by the program."""
    source, result = program.parent / "input", program.parent / "output"
    x.tofile(source)
    done = processes.run([program, function, source, result])
    assert done.returncode == 0, done.stderr
    return np.fromfile(result)


def units_off(y: Values, x: Values, exact: Callable[[mpmath.mpf], mpmath.mpf]) -> float:
    """The largest error of y in units of the last place; infinite for a NaN."""
    worst = 0.0
    with mpmath.workprec(160):
        for value, argument in zip(y.tolist(), x.tolist(), strict=True):
            expected = exact(mpmath.mpf(argument))
            error = abs(mpmath.mpf(value) - expected) / math.ulp(float(expected))
            worst = max(worst, math.inf if mpmath.isnan(error) else float(error))
    return worst


def spread(low: float, high: float, seed: int = 0) -> Values:
    """1,000 arguments: half even over [low, high], half over the magnitudes down to 1e-18."""
    generator = np.random.default_rng(seed)
    even = generator.uniform(low, high, 500)
    signs = generator.choice([bound for bound in (low, high) if bound != 0], 500)
    return np.concatenate([even, signs * 10 ** generator.uniform(-18, 0, 500)])


# exact function, arguments, units allowed
BOUNDS = {
    "exp": (mpmath.exp, -745.0, 709.7, 1.0),
    "expm1_nonpositive": (mpmath.expm1, -40.0, 0.0, 1.5),
    "log1p": (mpmath.log1p, 0.0, 1.0, 2.0),
    "gauss": (lambda x: mpmath.exp(-x * x / 2), -38.0, 38.0, 1.0),
    "normal_tail": (lambda x: mpmath.erfc(abs(x) / mpmath.sqrt(2)) / 2, -37.5, 37.5, 2.5),
    "sin": (mpmath.sin, -1e6, 1e6, 1.0),
    "cos": (mpmath.cos, -1e6, 1e6, 1.0),
    "tanh": (mpmath.tanh, -20.0, 20.0, 1.5),
}


@pytest.mark.parametrize("function", BOUNDS)
def test_error(program: Path, function: str) -> None:
    exact, low, high, bound = BOUNDS[function]
    x = np.concatenate([spread(low, high), spread(max(low, -3.0), min(high, 3.0), seed=1)])
    assert units_off(evaluated(program, function, x), x, exact) <= bound


def test_multiples_of_quarter_turns(program: Path) -> None:
    """At the doubles nearest to the zeros of sin and cos the results keep their digits."""
    x = np.rint(np.random.default_rng(0).uniform(1, 6e5, 2000)) * (math.pi / 2)
    for function in ("sin", "cos"):
        assert units_off(evaluated(program, function, x), x, BOUNDS[function][0]) <= 1.0


SPECIAL = {
    "exp": [
        (0.0, 1.0),
        (-0.0, 1.0),
        (5e-324, 1.0),
        (-math.inf, 0.0),
        (math.inf, math.inf),
        (math.nan, math.nan),
        (-745.1, 5e-324),  # the least positive number
        (-745.2, 0.0),
        (-1e300, 0.0),
        (709.79, math.inf),
        (1e300, math.inf),
    ],
    "expm1_nonpositive": [
        (0.0, 0.0),
        (5e-324, 5e-324),
        (-5e-324, -5e-324),
        (-math.inf, -1.0),
        (-50.0, -1.0),
        (math.nan, math.nan),
    ],
    "log1p": [(0.0, 0.0), (5e-324, 5e-324), (math.nan, math.nan)],
    "gauss": [(0.0, 1.0), (40.0, 0.0), (-40.0, 0.0), (math.nan, math.nan)],
    "normal_tail": [(0.0, 0.5), (-0.0, 0.5), (40.0, 0.0), (-40.0, 0.0), (math.nan, math.nan)],
    "sin": [(0.0, 0.0), (-0.0, -0.0), (5e-324, 5e-324), (math.nan, math.nan)],
    "cos": [(0.0, 1.0), (-0.0, 1.0), (5e-324, 1.0), (math.nan, math.nan)],
    "tanh": [
        (0.0, 0.0),
        (5e-324, 5e-324),
        (-5e-324, -5e-324),
        (20.0, 1.0),
        (math.inf, 1.0),
        (-math.inf, -1.0),
        (math.nan, math.nan),
    ],
}


@pytest.mark.parametrize("function", SPECIAL)
def test_special_points(program: Path, function: str) -> None:
    x, expected = (np.array(column) for column in zip(*SPECIAL[function], strict=True))
    y = evaluated(program, function, x)
    np.testing.assert_array_equal(y, expected)  # NaN equals NaN
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.signbit(y[numbers]), np.signbit(expected[numbers]))
