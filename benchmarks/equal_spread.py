"""What an equally precise estimate of R costs.

Independent draws of R's estimate average to any precision, so an estimator's price is (time of a
training step) × (relative variance of its R).  Both sides estimate the same R: all layers, J + H,
|D| = 10, the Hessian differentiated, and the same tokens: the classifier token alone
(scope "first", the cheapest case for the reverse form, whose cost grows with the tokens), and every
token as in Eq. 7 (scope "all", on at most 2 sequences of 8 random tokens, or the reverse form takes
too long).  Ours with dimensions="all" (whose sum is scaled to |D| = 10), of 2 and 4 directions, and
with 10 sampled; the baseline is Eq. 5-6, reverse, one projection each, |D| = 10.

Variance and bias are of one row's R over draws, relative to the reference (the mean over 1,000
directions and all dimensions), averaged over the rows of the batch.  A reverse step runs layer by
layer, a backward each: the same gradient, within memory.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import jachess_ext as jx
from benchmarks.common.models import Batch, Shape, build_model, make_batch
from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.pretrained import load_encoder
from benchmarks.common.report import Row
from benchmarks.common.steps import penalty_step, regulariser
from benchmarks.common.timing import Spread, Step, interleaved

QUESTION = "equal-spread"
TARGETS = {6: "≥ 25", 24: "≥ 100"}
REFERENCE_DIRECTIONS = 1_000
REVERSE: dict[str, Any] = {"engine": "reverse", "directions": 1, "dimensions": 10}
OURS: dict[str, dict[str, Any]] = {
    "jet, all dimensions": {"engine": "jet", "directions": 2, "dimensions": "all"},
    "jet, all dimensions, 4 directions": {"engine": "jet", "directions": 4, "dimensions": "all"},
    "jet, 10 dimensions": {"engine": "jet", "directions": 2, "dimensions": 10},
}


@dataclass(frozen=True)
class Quality:
    """Of one row's R over draws: variance and bias relative to the reference, and draws."""

    variance: float
    bias: float
    draws: int


def row_penalties(model: nn.Module, batch: Batch, seed: int, settings: dict[str, Any]) -> Tensor:
    """``[B]``: one draw of every row's R = Σ_k (‖J‖ + Σ_{j∈D} ‖H_j‖), without gradients."""
    with torch.no_grad():
        found = jx.smoothness(model, batch, seed=seed, **settings)
    assert found.hessian_tokens is not None
    return (found.jacobian_tokens + found.hessian_tokens).sum((0, 2)).double()


def quality(
    model: nn.Module, batch: Batch, settings: dict[str, Any], draws: int, reference: Tensor
) -> Quality:
    """Sample R ``draws`` times."""
    values = [row_penalties(model, batch, 1_000 + seed, settings) for seed in range(draws)]
    relative = torch.stack(values) / reference
    return Quality(float(relative.var(0).mean()), float(relative.mean() - 1), draws)


def reverse_step(model: nn.Module, batch: Batch, layers: int, scope: str) -> Step:
    """Forward and backward of the reverse form's R, one layer at a time."""
    regs = [regulariser(model, scope=scope, layers=[k], **REVERSE) for k in range(layers)]

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for reg in regs:
            reg(batch).loss.backward()

    return step


def measure(shape: Shape, scope: str, options: Options) -> list[Row]:
    """One row per form of ours: how many times cheaper than the reverse form."""
    if scope == "all":
        shape = replace(shape, batch=min(shape.batch, 2), tokens=min(shape.tokens, 8))
    model, batch, name = _subject(shape, options)
    layers = int(model.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
    steps = {key: penalty_step(model, batch, scope=scope, **OURS[key]) for key in OURS}
    steps["reverse"] = reverse_step(model, batch, layers, scope)
    times = interleaved(steps, repeats=options.repeats, device=options.device, warmup=1)

    directions = 100 if options.quick else REFERENCE_DIRECTIONS
    exact = {"engine": "jet", "directions": directions, "dimensions": "all", "scope": scope}
    reference = row_penalties(model, batch, 0, exact)
    draws = options.extra.draws or (4 if options.quick else 16)
    theirs = quality(model, batch, REVERSE | {"scope": scope}, draws, reference)
    rows = []
    for figure, settings in OURS.items():
        mine = quality(model, batch, settings | {"scope": scope}, 8 * draws, reference)
        spreads = (times.milliseconds(figure), times.milliseconds("reverse"))
        place = (QUESTION, f"{name}, {scope}", options.dtype_name)
        rows.append(_row(place, figure, spreads, (mine, theirs), TARGETS.get(layers, "")))
    return rows


def _subject(shape: Shape, options: Options) -> tuple[nn.Module, Batch, str]:
    path = options.extra.model
    if path is None:
        model = build_model(shape, **options.place)
        return model, make_batch(shape, labels=False, device=options.device), shape.name
    model, batch = load_encoder(path, shape.batch, options.device)
    return model, batch, f"{path.name}-B{shape.batch}"


def _row(
    place: tuple[str, str, str],
    figure: str,
    spreads: tuple[Spread, Spread],
    qualities: tuple[Quality, Quality],
    target: str,
) -> Row:
    """``spreads`` and ``qualities`` are (ours, the reverse form's)."""
    (mine, other), (ours, theirs) = qualities, spreads
    slower = theirs.p50 / ours.p50
    note = (
        f"time ratio {slower:.2f}; relative variance {mine.variance:.3g} ({mine.draws} draws) "
        f"against {other.variance:.3g} ({other.draws} draws); bias {mine.bias:+.3f} against "
        f"{other.bias:+.3f}"
    )
    print(f"{place[1]}, {figure}: {note}")
    return Row.of(
        *(place, f"{figure}: time × variance", _scaled(ours, mine.variance)),
        baseline="reverse, |D| = 10",
        baseline_p50=theirs.p50 * other.variance,
        ratio=slower * other.variance / mine.variance,
        unit="ms·var",
        target=target,
        note=note,
    )


def _scaled(spread: Spread, factor: float) -> Spread:
    return Spread(spread.p20 * factor, spread.p50 * factor, spread.p80 * factor)


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print."""
    assert __doc__ is not None
    arguments = parser(__doc__, ["encoder6-T32"], ["tiny"], repeats=7)
    arguments.add_argument("--draws", type=int, help="draws of the reverse form; ours: 8 times")
    arguments.add_argument("--model", type=Path, help="a local encoder in place of random weights")
    arguments.add_argument("--scopes", nargs="+", default=["first", "all"])
    options = parse(arguments, argv)
    cases = [(shape, scope) for shape in options.shapes for scope in options.extra.scopes]
    rows = [row for shape, scope in cases for row in measure(shape, scope, options)]
    return finish(rows, "equal_spread", options)


if __name__ == "__main__":
    main(sys.argv[1:])
