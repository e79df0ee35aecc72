"""Does the cost model of `jx.ntk` pick the faster form of a linear layer's kernel?

Forms A (`jachess::ntk_gram`) and B (`ops.ntk_materialised`) of one layer, symmetric, over a grid of
positions, features, outputs and samples, interleaved.  A row each: the faster form's time, the
other one's over it, and what the model chose.  The last row is the time that the model's choices
take over all cases, against always the faster form; its note says for which weights of the bytes of
form A and of form B the choices would have been best.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.report import Row
from benchmarks.common.timing import Spread, Timings, interleaved
from jachess_ext import ops
from jachess_ext.ntk import contract as cost

QUESTION = "ntk-forms"
POSITIONS = (1, 8, 16, 24, 28, 32, 40, 48, 64)
FEATURES = ((384, 384), (384, 1152), (384, 1536), (768, 768))
OUTPUTS, SAMPLES = (1, 2), (8, 48)
WEIGHTS = tuple(
    itertools.product((0.0, 4.0, 8.0, 16.0, 24.0, 32.0), (0.0, 24.0, 48.0, 64.0, 96.0, 128.0))
)


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

    @property
    def chosen(self) -> str:
        """The form that the model picks."""
        return cost.count_cost(self.size).form

    def weighed(self, gram: float, dense: float) -> str:
        """The form that it would pick if bytes weighed as much as so many operations."""
        c = cost.count_cost(self.size)
        materialised = c.materialise_flops + dense * c.materialise_bytes
        return "A" if c.gram_flops + gram * c.gram_bytes <= materialised else "B"


def measure(size: cost.Size, options: Options) -> tuple[Case, Timings]:
    """Both forms of one layer."""
    place = {"device": options.device, "dtype": options.dtype}
    inputs = torch.randn(size.samples, size.positions, size.inputs, **place)
    deltas = torch.randn(size.outputs, *inputs.shape[:2], size.cotangents, **place)
    times = interleaved(
        {
            "A": lambda: ops.ntk_gram(inputs, [deltas]),
            "B": lambda: ops.ntk_materialised(inputs, [deltas]),
        },
        repeats=options.repeats,
        device=options.device,
        warmup=1,
    )
    # A form's own time is its least one: what others on the machine add is not the form's.
    least = {form: min(seconds) for form, seconds in times.seconds.items()}
    return Case(size, least), times


def excess(cases: Sequence[Case], choose: Callable[[Case], str]) -> float:
    """Geometric mean, over cases, of the chosen form's time over the faster form's."""
    ratios = torch.tensor([case.seconds[choose(case)] / case.best for case in cases])
    return float(ratios.double().log().mean().exp())


def summary(cases: Sequence[Case], options: Options) -> Row:
    """Of all cases."""
    right = sum(case.seconds[case.chosen] == case.best for case in cases)
    found = {w: excess(cases, lambda case, w=w: case.weighed(*w)) for w in WEIGHTS}
    best = min(found, key=lambda w: found[w])
    always = {form: excess(cases, lambda case, form=form: form) for form in ("A", "B")}
    note = (
        f"faster form picked in {right} of {len(cases)}; best weights of bytes "
        f"{best[0]:g} and {best[1]:g} ({found[best]:.3f}); always A {always['A']:.2f}, always B "
        f"{always['B']:.2f}"
    )
    value = excess(cases, lambda case: case.chosen)
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
        rows.append(
            Row.of(
                (QUESTION, case.name, options.dtype_name),
                f"form {faster}",
                times.milliseconds(faster),
                baseline=f"form {slower}",
                baseline_p50=times.milliseconds(slower).p50,
                ratio=case.seconds[slower] / case.best,
                target="≥ 1",
                note=f"chosen: {case.chosen}",
            )
        )
    rows.append(summary(cases, options))
    print(rows[-1].note)
    return finish(rows, "ntk_forms", options)


if __name__ == "__main__":
    main(sys.argv[1:])
