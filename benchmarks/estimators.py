"""How good the estimators of ‖J‖ and ‖H‖ are, and what an equally precise estimate of R costs.

    python -m benchmarks.estimators --model PATH --update    # rewrite the tables of the document
    python -m benchmarks.estimators --parts spread           # rows go to results/equal_spread.csv

exact, encoder: bias and variance of every estimator, the tables of docs/estimators.md.  Tiny
model (random weights, fp64): against the exact norms.  Encoder (``--model PATH``, else 6 × 384 with
random weights): against the mean over 1,000 directions.  Everything is relative to the reference;
"±" is the standard error of a bias.  A batch of equal rows gives independent draws at once, since
rows draw their own directions; the sampled dimensions D, however, are shared by a call's rows, so
forms that sample D take several calls.

spread: independent draws of R's estimate average to any precision, so an estimator's price is (time
of a training step) × (relative variance of its R).  Both sides estimate the same R: all layers,
J + H, |D| = 10, the Hessian differentiated, and the same tokens: the classifier token alone (scope
"first", the cheapest case for the reverse form, whose cost grows with the tokens), and every token
as in Eq. 7 (scope "all", on at most 2 sequences of 8 random tokens, or the reverse form takes too
long).  Ours with dimensions="all" (whose sum is scaled to |D| = 10), of 2 and 4 directions, and
with 10 sampled; the baseline is Eq. 5-6, reverse, one projection each, |D| = 10.  Variance and bias
are of one row's R over draws, relative to the reference (the mean over 1,000 directions and all
dimensions), averaged over the rows of the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

import jachess_ext as jx
from jachess_ext._io import write_text
from jachess_ext.smoothness.estimators import chi_correction

from .common import (
    ROOT,
    SHAPES,
    Batch,
    Options,
    Row,
    Shape,
    Spread,
    Step,
    build_model,
    finish,
    interleaved,
    load_encoder,
    make_batch,
    make_row,
    markdown,
    parse,
    parser,
    penalty_step,
    regulariser,
)

DOCUMENT = ROOT / "docs" / "estimators.md"


# Draws of an estimator, and their statistics ----------------------------------------------------


@dataclass(frozen=True)
class Estimator:
    """One form of `jx.smoothness`.

    Attributes:
        directions: q of the jet, or p projections of the reverse form.
        dimensions: |D|, or "all".
    """

    engine: str
    directions: int
    distribution: str = "gaussian"
    dimensions: int | str = "all"

    @property
    def name(self) -> str:
        letter = "q" if self.engine == "jet" else "p"
        return f"{self.engine} {letter}={self.directions} {self.distribution} |D|={self.dimensions}"

    @property
    def pairs(self) -> int:
        """Pairs of directions behind a Hessian of the jet; 0 for the reverse form."""
        return self.directions * (self.directions - 1) // 2 if self.engine == "jet" else 0


@dataclass(frozen=True)
class Norms:
    """``[N, K, T]`` each: N draws (1 for a reference) of the norms of one sequence."""

    jacobian: Tensor
    hessian: Tensor


@dataclass(frozen=True)
class Statistics:
    """Per layer and token ``[K, T]``, and of the sum over tokens ``[K]``, relative to a reference.

    Attributes:
        bias: mean of the draws / reference − 1.
        bias_error: its standard error.
        spread: standard deviation of the draws / reference.
    """

    bias: Tensor
    bias_error: Tensor
    spread: Tensor
    sum_bias: Tensor
    sum_spread: Tensor
    draws: int

    def scaled(self, factor: float) -> Statistics:
        """Return the statistics of the draws times ``factor``, say without the c_P correction."""
        return Statistics(
            bias=(self.bias + 1) * factor - 1,
            bias_error=self.bias_error * factor,
            spread=self.spread * factor,
            sum_bias=(self.sum_bias + 1) * factor - 1,
            sum_spread=self.sum_spread * factor,
            draws=self.draws,
        )


def draw(
    model: nn.Module, row: Batch, estimator: Estimator, *, copies: int, calls: int, **settings: Any
) -> Norms:
    """Draw ``copies * calls`` times; a |D| other than 10 is rescaled to what |D| = 10 sums to.

    Args:
        row: a batch of one sequence, unpadded.
        settings: further arguments of `jx.smoothness` (scope, squared, hessian_norm).
    """
    batch = {name: value.expand(copies, -1).contiguous() for name, value in row.items()}
    given = {
        "engine": estimator.engine,
        "directions": estimator.directions,
        "distribution": estimator.distribution,
        "dimensions": estimator.dimensions,
    }
    with torch.no_grad():
        draws = [jx.smoothness(model, batch, seed=n + 1, **given | settings) for n in range(calls)]
    jacobian = torch.cat([each.jacobian_tokens for each in draws], 1).movedim(0, 1)
    hessian = torch.cat([_hessian(each) for each in draws], 1).movedim(0, 1)
    if estimator.dimensions != "all" and settings.get("hessian_norm") != "tensor":
        hessian = hessian * (10 / float(estimator.dimensions))
    return Norms(jacobian.double(), hessian.double())


def _hessian(drawn: jx.Smoothness) -> Tensor:
    assert drawn.hessian_tokens is not None, "hessian=True is the default"
    return drawn.hessian_tokens


def compare(drawn: Tensor, reference: Tensor) -> Statistics:
    """Compare draws ``[N, K, T]`` with ``[1, K, T]``; tokens whose norm is 0 are left out.

    Raises:
        ValueError: fewer than two draws.
    """
    count = len(drawn)
    if count < 2:
        raise ValueError(f"{count} draw was given; a spread needs two or more")
    counted = reference[0].ne(0).any(0)
    drawn, reference = drawn[..., counted], reference[..., counted]
    relative = drawn / reference
    sums = drawn.sum(-1) / reference.sum(-1)
    spread = relative.std(0)
    return Statistics(
        bias=relative.mean(0) - 1,
        bias_error=spread / count**0.5,
        spread=spread,
        sum_bias=sums.mean(0) - 1,
        sum_spread=sums.std(0),
        draws=count,
    )


# Cells of the tables ----------------------------------------------------------------------------


def _mean_bias(statistics: Statistics) -> str:
    """Return the mean over layers and tokens with its standard error (a draw's tokens as one)."""
    error = float(statistics.bias_error.square().mean().sqrt())
    return f"{100 * float(statistics.bias.mean()):+.1f} % ± {100 * error:.1f}"


def _mean_spread(spreads: Tensor) -> str:
    """Return the quadratic mean: spreads are averaged as variances."""
    return f"{float(spreads.square().mean().sqrt()):.3f}"


def _range(values: Tensor) -> str:
    """Return smallest, median and largest."""
    return f"{values.min():.3f} / {values.median():.3f} / {values.max():.3f}"


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return Markdown; blanks at the end of a column's name keep it apart from its namesakes."""

    def cell(text: str) -> str:
        return text.strip().replace("|", "\\|")

    return markdown(pd.DataFrame(rows).rename(columns=cell).map(cell))


def replace_section(path: Path, name: str, text: str) -> None:
    """Put ``text`` between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``, all or nothing.

    Raises:
        ValueError: the file lacks the markers.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    old = path.read_text()
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(end) < old.index(begin):
        raise ValueError(f"{path} needs the lines {begin} and {end}, once each and in that order")
    before, rest = old.split(begin)
    write_text(path, f"{before}{begin}\n{text}{end}{rest.split(end)[1]}")


# The tables of the document ---------------------------------------------------------------------

DISTRIBUTIONS = ("gaussian", "rademacher")
JETS = [Estimator("jet", q, drawn) for drawn in DISTRIBUTIONS for q in (2, 3, 4)]
REVERSES = [Estimator("reverse", p, drawn) for drawn in DISTRIBUTIONS for p in (1, 2, 10)]
SAMPLED = [Estimator("jet", 2, dimensions=10)]
REVERSE_SAMPLED = [Estimator("reverse", 1, dimensions=n) for n in (10, 1, 3, 5)]
REVERSE_SAMPLED += [Estimator("reverse", p, dimensions=10) for p in (2, 10)]
FORMS: dict[str, dict[str, Any]] = {
    "norm": {},
    "squared": {"squared": True},
    "tensor": {"hessian_norm": "tensor"},
}


def tiny(width: int = 12, tokens: int = 4) -> tuple[nn.Module, Batch]:
    """Return a model whose full Hessians are affordable: 2 layers, fp64."""
    shape = replace(SHAPES["tiny"], width=width, heads=3, inner=2 * width, batch=1, tokens=tokens)
    return build_model(shape, dtype=torch.float64).eval(), make_batch(shape, labels=False)


def exact_tables(options: Options) -> str:
    """Return the tables of all estimators against exact norms."""
    model, row = tiny()
    draws = 32 if options.quick else options.extra.draws or 1_000
    exact = {
        form: draw(model, row, Estimator("exact", 1), copies=1, calls=1, **settings)
        for form, settings in FORMS.items()
    }
    jacobians, hessians = [], []
    for estimator in [*JETS, *REVERSES]:
        j, h = {}, {}
        for form, reference in exact.items():
            drawn = draw(model, row, estimator, copies=draws, calls=1, **FORMS[form])
            j[form] = compare(drawn.jacobian, reference.jacobian)
            h[form] = compare(drawn.hessian, reference.hessian)
        raw = "–"
        if estimator.pairs:
            raw = _mean_bias(h["norm"].scaled(chi_correction(estimator.pairs)))
        jacobians.append(
            {
                "estimator": estimator.name,
                "bias of ‖J‖": _mean_bias(j["norm"]),
                "spread": _mean_spread(j["norm"].spread),
                "bias of ‖J‖²": _mean_bias(j["squared"]),
                "spread ": _mean_spread(j["squared"].spread),
            }
        )
        hessians.append(
            {
                "estimator": estimator.name,
                "bias of Σ‖H_j‖": _mean_bias(h["norm"]),
                "spread": _mean_spread(h["norm"].spread),
                "without c_P": raw,
                "bias of Σ‖H_j‖²": _mean_bias(h["squared"]),
                "spread ": _mean_spread(h["squared"].spread),
                "bias of the tensor norm": _mean_bias(h["tensor"]),
                "spread  ": _mean_spread(h["tensor"].spread),
            }
        )
    return f"{_table(jacobians)}\n{_table(hessians)}"


def encoder_tables(options: Options) -> Iterator[dict[str, str]]:
    """Yield the estimators on an encoder: per token, per layer, and on its first token only.

    The tables come again, longer by a line, after each form of the reverse estimator.
    """
    if options.extra.model is not None:
        model, row = load_encoder(options.extra.model, 1, options.device)
    else:
        shape = replace(SHAPES["tiny" if options.quick else "encoder6-T32"], batch=1)
        model = build_model(shape, **options.place).eval()
        row = make_batch(shape, labels=False, device=options.device)

    def drawn(estimator: Estimator, **settings: Any) -> Norms:
        """Draw enough for a spread within some 10 %; the reverse form's are dear."""
        copies, calls = (16, 8) if estimator.engine == "jet" else (4, 6)
        if options.quick:
            copies, calls = 4, 2
        return draw(model, row, estimator, copies=copies, calls=calls, **settings)

    directions = 100 if options.quick else 1_000
    reference = draw(model, row, Estimator("jet", directions), copies=1, calls=1)
    each = {estimator.name: drawn(estimator) for estimator in [*JETS, *SAMPLED]}
    yield _tables("all", reference, each)
    # The reverse form's cost grows with the tokens: it is drawn for the first token only.
    first = {name: _first_token(norms) for name, norms in each.items()}
    yield _tables("first", _first_token(reference), first)
    for estimator in REVERSE_SAMPLED[: options.extra.reverse]:
        first[estimator.name] = drawn(estimator, scope="first")
        yield _tables("first", _first_token(reference), first)


def _first_token(norms: Norms) -> Norms:
    """Return the same draws with every other token's norm zero, as scope "first" has it."""
    first = torch.zeros_like(norms.jacobian[0, 0])
    first[0] = 1
    return Norms(norms.jacobian * first, norms.hessian * first)


def _tables(scope: str, reference: Norms, drawn: dict[str, Norms]) -> dict[str, str]:
    result = {}
    for quantity in ("jacobian", "hessian"):
        exact = getattr(reference, quantity)
        each = {name: compare(getattr(norms, quantity), exact) for name, norms in drawn.items()}
        tokens = [
            {
                "estimator": name,
                "draws": str(s.draws),
                "bias per token": _range(s.bias),
                "spread per token": _range(s.spread),
                "spread of the sum over tokens": _mean_spread(s.sum_spread),
            }
            for name, s in each.items()
        ]
        layers = [
            {"estimator": name}
            | {f"layer {k}": f"{value:.3f}" for k, value in enumerate(s.sum_spread.tolist())}
            for name, s in each.items()
        ]
        result[f"{scope} {quantity}"] = f"{_table(tokens)}\n{_table(layers)}"
    return result


# The price of an equal spread -------------------------------------------------------------------

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
    """Return a draw of every row's R = Σ_k (‖J‖ + Σ_{j∈D} ‖H_j‖), [B], without gradients."""
    with torch.no_grad():
        drawn = jx.smoothness(model, batch, seed=seed, **settings)
    return (drawn.jacobian_tokens + _hessian(drawn)).sum((0, 2)).double()


def quality(
    model: nn.Module, batch: Batch, settings: dict[str, Any], draws: int, reference: Tensor
) -> Quality:
    """Sample R ``draws`` times."""
    values = [row_penalties(model, batch, 1_000 + seed, settings) for seed in range(draws)]
    relative = torch.stack(values) / reference
    return Quality(float(relative.var(0).mean()), float(relative.mean() - 1), draws)


def reverse_step(model: nn.Module, batch: Batch, layers: int, scope: str) -> Step:
    """Return forward and backward of the reverse form's R, layer by layer to fit in memory."""
    penalties = [regulariser(model, scope=scope, layers=[k], **REVERSE) for k in range(layers)]

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for penalty in penalties:
            penalty(batch).loss.backward()

    return step


def equal_spread(shape: Shape, scope: str, options: Options) -> list[Row]:
    """Measure how many times cheaper each form of ours is than the reverse form."""
    if scope == "all":
        shape = replace(shape, batch=min(shape.batch, 2), tokens=min(shape.tokens, 8))
    path, name = options.extra.model, shape.name
    if path is None:
        model = build_model(shape, **options.place)
        batch = make_batch(shape, labels=False, device=options.device)
    else:
        model, batch = load_encoder(path, shape.batch, options.device)
        name = f"{path.name}-B{shape.batch}"
    layers = int(model.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
    steps = {key: penalty_step(model, batch, scope=scope, **OURS[key]) for key in OURS}
    steps["reverse"] = reverse_step(model, batch, layers, scope)
    times = interleaved(steps, repeats=options.rounds(7), device=options.device, warmup=1)

    directions = 30 if options.quick else 1_000
    exact = {"engine": "jet", "directions": directions, "dimensions": "all", "scope": scope}
    reference = row_penalties(model, batch, 0, exact)
    draws = options.extra.draws or (4 if options.quick else 16)
    theirs = quality(model, batch, REVERSE | {"scope": scope}, draws, reference)
    slow = times.milliseconds("reverse").p50
    rows = []
    for figure, settings in OURS.items():
        ours = quality(model, batch, settings | {"scope": scope}, 8 * draws, reference)
        time = times.milliseconds(figure)
        faster = slow / time.p50
        note = (
            f"time ratio {faster:.2f}; relative variance {ours.variance:.3g} ({ours.draws} draws) "
            f"against {theirs.variance:.3g} ({theirs.draws} draws); bias {ours.bias:+.3f} against "
            f"{theirs.bias:+.3f}"
        )
        print(f"{name}, {scope}, {figure}: {note}")
        row = make_row(
            options,
            Spread(*(value * ours.variance for value in (time.p20, time.p50, time.p80))),
            question="equal-spread",
            shape=f"{name}, {scope}",
            figure=f"{figure}: time × variance",
            baseline="reverse, |D| = 10",
            baseline_p50=slow * theirs.variance,
            ratio=faster * theirs.variance / ours.variance,
            unit="ms·var",
            target={6: "≥ 25", 24: "≥ 100"}.get(layers, ""),
            note=note,
        )
        rows.append(row)
    return rows


# The command ------------------------------------------------------------------------------------


def sections(options: Options) -> Iterator[dict[str, str]]:
    """Yield sections of the document, name and text, as they are done."""
    if "exact" in options.extra.parts:
        yield {"exact": exact_tables(options)}
    if "encoder" in options.extra.parts:
        yield from encoder_tables(options)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Measure, print, append to the CSV, and with --update write the document's tables."""
    assert __doc__ is not None
    arguments = parser(__doc__)
    arguments.add_argument(
        "--parts", nargs="+", choices=("exact", "encoder", "spread"), default=["exact", "encoder"]
    )
    arguments.add_argument("--model", type=Path, help="folder of an encoder")
    arguments.add_argument("--update", action="store_true", help=f"rewrite tables in {DOCUMENT}")
    arguments.add_argument("--document", type=Path, default=DOCUMENT)
    arguments.add_argument(
        "--draws", type=int, help="exact: default 1,000; spread: of the reverse form, ours 8 times"
    )
    count = len(REVERSE_SAMPLED)
    arguments.add_argument("--reverse", type=int, default=count, help="how many reverse forms")
    arguments.add_argument("--scopes", nargs="+", default=["first", "all"])
    options = parse(arguments, argv)
    if options.extra.update and options.quick:
        arguments.error("--update with --quick would write figures of too few draws; drop one")
    done: dict[str, str] = {}
    for section in sections(options):
        done |= section
        if options.extra.update:
            for name, text in section.items():
                replace_section(options.extra.document, name, text)
    for name, text in done.items():
        print(f"\n## {name}\n\n{text}")
    if "spread" not in options.extra.parts:
        return []
    rows = [
        row
        for shape in options.shapes_or(["encoder6-T32"])
        for scope in options.extra.scopes
        for row in equal_spread(shape, scope, options)
    ]
    return finish(rows, "equal_spread", options)


if __name__ == "__main__":
    main(sys.argv[1:])
