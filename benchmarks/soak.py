"""Ten thousand small JacHess steps: do memory, open files or live tensors grow?

Row lengths and padding change from step to step, evaluations without gradients and exceptions
within a jet come in between, and every quantity of the last tenth of the run is put beside the
second tenth's (the first warms the allocator up).

    python -m benchmarks.soak                 # 10,000 steps
    python -m benchmarks.soak --quick         # 300
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from tqdm import tqdm

import jachess_ext as jx

from .common import (
    VOCABULARY,
    Row,
    Spread,
    build_model,
    finish,
    make_row,
    parse,
    parser,
    status_megabytes,
)

STEPS, QUICK_STEPS, TENTHS = 10_000, 300, 10


def live_tensors() -> float:
    gc.collect()
    return float(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))


def open_files() -> float:
    return float(len(os.listdir("/proc/self/fd")))


QUANTITIES: dict[str, tuple[Callable[[], float], str]] = {
    "resident memory": (lambda: status_megabytes("VmRSS"), "MiB"),
    "open files": (open_files, "files"),
    "live tensors": (live_tensors, "tensors"),
}


def batch(step: int) -> dict[str, Tensor]:
    """Return two to four rows of 4 to 24 tokens, some of them padding."""
    generator = torch.Generator().manual_seed(step)
    rows, tokens = 2 + step % 3, 4 + step * 7 % 21
    ids = torch.randint(5, VOCABULARY, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, tokens - step % 3 :] = 0
    labels = torch.randint(0, 2, (rows,), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def interrupted(model: nn.Module, given: dict[str, Tensor]) -> None:
    """Raise an exception in the middle of a pass, and catch it outside."""

    def stop(*_: object) -> None:
        raise KeyError

    last = list(model.modules())[-1]
    handle = last.register_forward_pre_hook(stop)
    try:
        jx.smoothness(model, given)
    except KeyError:
        pass
    finally:
        handle.remove()


def run(model: nn.Module, steps: int) -> dict[str, list[float]]:
    """Return each quantity, measured ten times in every tenth of the run."""
    regulariser = jx.JacHess(model, weights="uniform", strength=1e-4, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    values: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    every = steps // (10 * TENTHS)
    for step in tqdm(range(steps), disable=None):
        given = batch(step)
        regulariser(given).total.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            with torch.no_grad():
                jx.smoothness(model, given)
            interrupted(model, given)
        if (step + 1) % every == 0:
            for name, (measure, _) in QUANTITIES.items():
                values[name].append(measure())
    return values


def main(argv: list[str] | None = None) -> list[Row]:
    """Run, compare, append to the CSV, print."""
    assert __doc__ is not None
    options = parse(parser(__doc__), argv)
    (shape,) = options.shapes_or(["tiny"])
    steps = QUICK_STEPS if options.quick else STEPS
    rows = []
    for name, values in run(build_model(shape, **options.place), steps).items():
        tenth = len(values) // TENTHS
        early, late = Spread.of(values[tenth : 2 * tenth]), Spread.of(values[-tenth:])
        row = make_row(
            options,
            late,
            question="soak",
            shape=shape.name,
            figure=f"{name}, last tenth of {steps} steps",
            baseline="second tenth",
            baseline_p50=early.p50,
            ratio=late.p50 / early.p50,
            unit=QUANTITIES[name][1],
            target="≤ 1.01",
        )
        rows.append(row)
    return finish(rows, "soak", options)


if __name__ == "__main__":
    main(sys.argv[1:])
