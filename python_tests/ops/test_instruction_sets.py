"""Attention and the NTK's form A as compiled for each instruction set, older processors' too.

A process reads torch's variable ATEN_CPU_CAPABILITY once, so each set has a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from jachess_ext import ops
from python_tests import processes
from python_tests.ops.cases import relative_error, same_for_any_threads
from python_tests.ops.ntk_sides import Side, error, expected

SETS = ["default", "avx2", "avx512"]
BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5}
SIZES = [(1, 3), (3, 1), (20, 20), (64, 80), (80, 64)]
"""Of a head's keys and values: below, between and at whole cache lines."""
TOKENS = [(37, 150), (8, 16), (65, 9), (5, 1030)]
"""Queries and keys: blocks and chunks with ragged ends, whole ones, less than a line of double and
a bit, keys that several items share."""
STACKS = [(1, 2, 0), (2, 4, 0), (3, 4, 0), (5, 7, 4)]
"""Directions, streams, and how many of the directions are summed."""
Settings = dict[str, int | float | bool]


def exact(*shape: int, seed: int) -> Tensor:
    """Numbers of either sign below 1, without a rounding that may differ between processors."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * (7919 + 2 * seed) % 1009 - 504) / 512).double().view(shape)


def attentions() -> Iterator[tuple[list[Tensor], Settings]]:
    """Query, key and value in float64, and settings: all sizes with two of the stacks each."""
    for n, (size, value_size) in enumerate(SIZES):
        queries, keys = TOKENS[n % len(TOKENS)]
        for m in (n, n + 1):
            q, streams, summed = STACKS[m % len(STACKS)]
            shapes = [(1, 2, queries, size), (1, 1, keys, size), (1, 1, keys, value_size)]
            jets = [exact(streams, *shape, seed=m) for m, shape in enumerate(shapes)]
            settings: Settings = {"q": q, "summed": summed, "scale": 0.2, "causal": m > n}
            yield jets, settings
            if not summed:
                yield jets, {**settings, "softcap": 2.0, "dropout_p": 0.25, "dropout_seed": 7}


def sides() -> Iterator[Side]:
    """Inputs and cotangents in float64: ragged ends of tiles, panels and what is packed."""
    for samples, positions, size, width in [(3, 5, 7, 9), (40, 7, 300, 33), (150, 1, 64, 16)]:
        inputs = exact(samples, positions, size, seed=1)
        yield inputs, [exact(2, samples, positions, width, seed=2)]


def outcome(dtype: torch.dtype) -> tuple[float, str, bool]:
    """The largest error, a digest of all bits, and whether any number of threads gives these."""
    worst, digest, same = 0.0, hashlib.sha256(), True

    def attend(jets: list[Tensor], settings: Settings, ending: str = "") -> list[Tensor]:
        y = getattr(ops, f"attention_jet{ending}")(*jets, None, **settings)
        return [y.detach(), *torch.autograd.grad(y, jets, exact(*y.shape, seed=5).to(y.dtype))]

    for jets, settings in attentions():
        wide = attend([jet.requires_grad_() for jet in jets], settings, "_reference")
        narrow = [jet.detach().to(dtype).requires_grad_() for jet in jets]
        results = attend(narrow, settings)
        pairs = zip(results, wide, strict=True)
        worst = max(worst, *(relative_error(got, wanted) for got, wanted in pairs))
        for result in results:
            digest.update(result.contiguous().numpy().tobytes())
        same &= same_for_any_threads(partial(attend, narrow, settings))
    for a, deltas in sides():
        gram = ops.ntk_gram(a.to(dtype), [delta.to(dtype) for delta in deltas])
        worst = max(worst, error(gram, expected((a, deltas), (a, deltas))))
        digest.update(gram.numpy().tobytes())
    return worst, digest.hexdigest(), same


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, tuple[float, str, bool]]]:
    """Of every instruction set that this processor has, by dtype."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    sets = SETS[: SETS.index(best) + 1] if best in SETS else SETS[:1]
    texts = {
        name: processes.run(
            [sys.executable, "-m", "python_tests.ops.test_instruction_sets"],
            env={**os.environ, "ATEN_CPU_CAPABILITY": name},
            check=True,
        ).stdout
        for name in sets
    }
    return {name: json.loads(text) for name, text in texts.items()}


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64")
    or "JACHESS_OPS_LIBRARY" in os.environ,  # which a sanitizer built
    reason="compiled for one set alone",
)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_every_set_agrees_with_the_reference(
    outcomes: dict[str, dict[str, tuple[float, str, bool]]], dtype: torch.dtype
) -> None:
    """Each adds up in another order: that its bits differ shows that no set runs another's code."""
    errors, digests, same = zip(*(of[str(dtype)] for of in outcomes.values()), strict=True)
    assert max(errors) < BOUNDS[dtype]
    assert len(set(digests)) == len(outcomes)
    assert all(same)


if __name__ == "__main__":
    print(json.dumps({str(dtype): outcome(dtype) for dtype in BOUNDS}))
