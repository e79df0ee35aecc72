"""Does the cost model of `jx.ntk` pick the faster form of a linear layer's kernel?

Forms A (`jachess::ntk_gram`) and B (gradients written in blocks, `contract_materialised`) of one
layer, symmetric, over a grid of positions, features, outputs and samples, interleaved.  A row each:
the faster form's time, the other one's over it, and what the model chose.  The last row is the time
that the model's choices take over all cases, against always the faster form; its note says for
which weight of a byte (`_OPERATIONS_PER_BYTE`) the choices would have been best.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.report import Row
from benchmarks.common.timing import Spread, Timings, interleaved
from jachess_ext import ops
from jachess_ext.ntk import cost
from jachess_ext.ntk.contributions import Factors
from jachess_ext.ntk.materialise import contract_materialised

QUESTION = "ntk-forms"
WORKSPACE = 128 * 2**20
POSITIONS = (1, 8, 16, 24, 28, 32, 40, 48, 64)
FEATURES = ((384, 384), (384, 1152), (384, 1536), (768, 768))
OUTPUTS, SAMPLES = (1, 2), (8, 48)
WEIGHTS = (0.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 20.0, 24.0, 32.0, 48.0, 64.0)


@dataclass(frozen=True)
class Case:
    """A layer's sizes, and the seconds of both forms."""

    size: cost.Size
    seconds: dict[str, float]

    @property
    def name(self) -> str:
        s = self.size
        return f"N{s.samples}-T{s.positions}-C{s.outputs}-d{s.inputs}-e{s.cotangents}"

    @property
    def best(self) -> float:
        return min(self.seconds.values())

    def chosen(self, weight: float) -> str:
        """The form that the model picks if a byte weighs as much as ``weight`` operations."""
        counted = cost.count_cost(self.size)
        gram = counted.gram_flops + weight * counted.gram_bytes
        dense = counted.materialise_flops + weight * counted.materialise_bytes
        return "A" if gram <= dense else "B"


def measure(size: cost.Size, options: Options) -> tuple[Case, Timings]:
    """Both forms of one layer."""
    place = {"device": options.device, "dtype": options.dtype}
    inputs = torch.randn(size.samples, size.positions, size.inputs, **place)
    deltas = torch.randn(size.outputs, *inputs.shape[:2], size.cotangents, **place)
    factors = Factors(inputs, deltas)
    times = interleaved(
        {
            "A": lambda: ops.ntk_gram(inputs, [deltas]),
            "B": lambda: contract_materialised(factors, factors, True, WORKSPACE, options.dtype),
        },
        repeats=options.repeats,
        device=options.device,
        warmup=1,
    )
    # A form's own time is its least one: what others on the machine add is not the form's.
    return Case(size, {form: min(seconds) for form, seconds in times.seconds.items()}), times


def excess(cases: Sequence[Case], weight: float) -> float:
    """Geometric mean, over cases, of the chosen form's time over the faster form's."""
    ratios = torch.tensor([case.seconds[case.chosen(weight)] / case.best for case in cases])
    return float(ratios.double().log().mean().exp())


def summary(cases: Sequence[Case], options: Options) -> Row:
    """Of all cases."""
    weight = cost._OPERATIONS_PER_BYTE
    right = sum(case.seconds[case.chosen(weight)] == case.best for case in cases)
    found = {w: excess(cases, w) for w in WEIGHTS}
    best = min(found, key=lambda w: found[w])
    always = {
        form: float(
            torch.tensor([case.seconds[form] / case.best for case in cases]).log().mean().exp()
        )
        for form in ("A", "B")
    }
    note = (
        f"faster form picked in {right} of {len(cases)}; a byte weighs {weight:g}, best would be "
        f"{best:g} ({found[best]:.3f}); always A {always['A']:.2f}, always B {always['B']:.2f}"
    )
    value = excess(cases, weight)
    return Row.of(
        (QUESTION, "all", options.dtype_name),
        "chosen form",
        Spread(value, value, value),
        baseline="the faster form",
        baseline_p50=1.0,
        ratio=value,
        unit="x",
        note=note,
    )


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print."""
    assert __doc__ is not None
    options = parse(parser(__doc__, ["tiny"], ["tiny"], repeats=3), argv)
    grid = itertools.product(POSITIONS, FEATURES, OUTPUTS, SAMPLES)
    if options.quick:
        grid = itertools.product((1, 32), ((32, 32),), (2,), (4,))
    cases, rows = [], []
    for positions, (inputs, cotangents), outputs, samples in grid:
        sides = (samples, positions, samples, positions, outputs, inputs, cotangents, True)
        case, times = measure(cost.Size(*sides, options.dtype.itemsize), options)
        cases.append(case)
        faster, slower = sorted(case.seconds, key=lambda form: case.seconds[form])
        chosen = case.chosen(cost._OPERATIONS_PER_BYTE)
        rows.append(
            Row.of(
                (QUESTION, case.name, options.dtype_name),
                f"form {faster}",
                times.milliseconds(faster),
                baseline=f"form {slower}",
                baseline_p50=times.milliseconds(slower).p50,
                ratio=case.seconds[slower] / case.best,
                target="≥ 1",
                note=f"chosen: {chosen}",
            )
        )
    rows.append(summary(cases, options))
    print(rows[-1].note)
    return finish(rows, "ntk_forms", options)


if __name__ == "__main__":
    main(sys.argv[1:])
