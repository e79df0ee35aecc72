"""Bias and variance of every estimator of ‖J‖ and ‖H‖: the tables of docs/estimators.md.

    python -m benchmarks.estimator_quality --model PATH --update    # rewrite the document's tables

Tiny model (random weights, fp64): against the exact norms.  Encoder (``--model PATH``, else 6 × 384
with random weights): against the mean over 1,000 directions.  Everything is relative to the
reference; "±" is the standard error of a bias.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import jachess_ext as jx
from benchmarks.common.models import SHAPES, Batch, build_model, make_batch
from benchmarks.common.options import Options, parse, parser
from benchmarks.common.pretrained import load_encoder
from benchmarks.common.report import ROOT
from benchmarks.estimator_sampling import Estimator, Norms, Statistics, compare, draw
from benchmarks.estimator_tables import (
    layers_table,
    markdown,
    mean_bias,
    quadratic_mean,
    replace_section,
    scaled,
    spread,
    tokens_table,
)
from jachess_ext.smoothness.norms import chi_correction

DOCUMENT = ROOT / "docs" / "estimators.md"
KINDS = ("gaussian", "rademacher")
JETS = [Estimator("jet", q, kind) for kind in KINDS for q in (2, 3, 4)]
REVERSES = [Estimator("reverse", p, kind) for kind in KINDS for p in (1, 2, 10)]
SAMPLED = [Estimator("jet", 2, dimensions=10)]
REVERSE_SAMPLED = [Estimator("reverse", 1, dimensions=n) for n in (1, 3, 5, 10)]
REVERSE_SAMPLED += [Estimator("reverse", p, dimensions=10) for p in (2, 10)]
FORMS: dict[str, dict[str, Any]] = {
    "norm": {},
    "squared": {"squared": True},
    "tensor": {"hessian_norm": "tensor"},
}


def tiny() -> tuple[nn.Module, Batch]:
    """A model whose full Hessians are affordable: 2 layers, 12 wide, 4 tokens, fp64."""
    shape = replace(SHAPES["tiny"], width=12, heads=3, inner=24, batch=1, tokens=4)
    return build_model(shape, dtype=torch.float64).eval(), make_batch(shape, labels=False)


def exact_tables(options: Options) -> str:
    """All estimators against exact norms."""
    model, row = tiny()
    draws = 32 if options.quick else 2_000
    jacobians, hessians = [], []
    for estimator in [*JETS, *REVERSES]:
        found = {form: _against_exact(model, row, estimator, form, draws) for form in FORMS}
        jacobians.append(_jacobian_line(estimator, found))
        hessians.append(_hessian_line(estimator, found))
    jacobian = ["estimator", "bias of ‖J‖", "spread", "bias of ‖J‖²", "spread"]
    hessian = ["estimator", "bias of Σ‖H_j‖", "spread", "without c_P", "bias of Σ‖H_j‖²", "spread"]
    hessian += ["bias of the tensor norm", "spread"]
    return f"{markdown(jacobian, jacobians)}\n{markdown(hessian, hessians)}"


def _against_exact(
    model: nn.Module, row: Batch, estimator: Estimator, form: str, draws: int
) -> tuple[Statistics, Statistics]:
    """(Jacobian, Hessian) statistics of one form of the norm."""
    drawn = draw(model, row, estimator, copies=draws, calls=1, **FORMS[form])
    exact = draw(model, row, Estimator("exact", 1), copies=1, calls=1, **FORMS[form])
    return compare(drawn.jacobian, exact.jacobian), compare(drawn.hessian, exact.hessian)


Forms = dict[str, tuple[Statistics, Statistics]]


def _jacobian_line(estimator: Estimator, found: Forms) -> list[str]:
    line = [estimator.name]
    for form in ("norm", "squared"):
        each = found[form][0]
        line += [mean_bias(each), spread(quadratic_mean(each.spread))]
    return line


def _hessian_line(estimator: Estimator, found: Forms) -> list[str]:
    norm, squared, tensor = (found[form][1] for form in FORMS)
    raw = mean_bias(scaled(norm, chi_correction(estimator.pairs))) if estimator.pairs else "–"
    line = [estimator.name, mean_bias(norm), spread(quadratic_mean(norm.spread)), raw]
    for each in (squared, tensor):
        line += [mean_bias(each), spread(quadratic_mean(each.spread))]
    return line


def encoder_tables(options: Options) -> dict[str, str]:
    """The estimators on an encoder: per token, per layer, and on its first token only."""
    model, row = _encoder(options)
    directions = 100 if options.quick else 1_000
    result = {}
    for scope in ("all", "first"):
        reference = _reference(model, row, directions, scope)
        estimators = [*JETS, *SAMPLED]
        if scope == "first":  # the reverse form's cost grows with the tokens
            estimators += REVERSE_SAMPLED
        found = {e.name: _drawn(model, row, e, scope, options.quick) for e in estimators}
        for quantity in ("jacobian", "hessian"):
            statistics = {
                name: compare(getattr(norms, quantity), getattr(reference, quantity))
                for name, norms in found.items()
            }
            key = f"{scope} {quantity}"
            result[key] = f"{tokens_table(statistics)}\n{layers_table(statistics)}"
    return result


def _encoder(options: Options) -> tuple[nn.Module, Batch]:
    if options.extra.model is not None:
        return load_encoder(options.extra.model, 1, options.device)
    shape = replace(SHAPES["tiny" if options.quick else "encoder6-T32"], batch=1)
    model = build_model(shape, **options.place).eval()
    return model, make_batch(shape, labels=False, device=options.device)


def _reference(model: nn.Module, row: Batch, directions: int, scope: str) -> Norms:
    return draw(model, row, Estimator("jet", directions), copies=1, calls=1, scope=scope)


def _drawn(model: nn.Module, row: Batch, estimator: Estimator, scope: str, quick: bool) -> Norms:
    """Draws enough for a spread within some 10 %; the reverse form's are dear."""
    copies, calls = (16, 16) if estimator.engine == "jet" else (4, 12)
    if quick:
        copies, calls = 4, 2
    return draw(model, row, estimator, copies=copies, calls=calls, scope=scope)


def sections(options: Options) -> dict[str, str]:
    """Name of each section of the document and its text."""
    found = {} if "exact" not in options.extra.parts else {"exact": exact_tables(options)}
    if "encoder" in options.extra.parts:
        found |= encoder_tables(options)
    return found


def main(argv: list[str] | None = None) -> dict[str, str]:
    """Measure, print, and with --update write the document's tables."""
    assert __doc__ is not None
    arguments = parser(__doc__, [], [])
    arguments.add_argument("--model", type=Path, help="folder of an encoder")
    arguments.add_argument("--update", action="store_true", help=f"rewrite tables in {DOCUMENT}")
    arguments.add_argument("--document", type=Path, default=DOCUMENT)
    arguments.add_argument("--parts", nargs="+", default=["exact", "encoder"])
    options = parse(arguments, argv)
    if options.extra.update and options.quick:
        arguments.error("--update with --quick would write figures of too few draws; drop one")
    found = sections(options)
    stamp = f"jachess_ext {jx.__version__}, torch {torch.__version__}"
    for name, text in found.items():
        print(f"\n## {name} ({stamp})\n\n{text}")
        if options.extra.update:
            replace_section(options.extra.document, name, text)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
