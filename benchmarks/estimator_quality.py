"""Bias and variance of every estimator of ‖J‖ and ‖H‖: the tables of docs/estimators.md.

    python -m benchmarks.estimator_quality --model PATH --update    # rewrite the document's tables

Tiny model (random weights, fp64): against the exact norms.  Encoder (``--model PATH``, else 6 × 384
with random weights): against the mean over 1,000 directions.  Everything is relative to the
reference; "±" is the standard error of a bias.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import jachess_ext as jx
import python_tests.smoothness.exact  # noqa: F401  adds engine="exact"
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
from jachess_ext.smoothness.estimators import chi_correction

DOCUMENT = ROOT / "docs" / "estimators.md"
KINDS = ("gaussian", "rademacher")
JETS = [Estimator("jet", q, kind) for kind in KINDS for q in (2, 3, 4)]
REVERSES = [Estimator("reverse", p, kind) for kind in KINDS for p in (1, 2, 10)]
SAMPLED = [Estimator("jet", 2, dimensions=10)]
REVERSE_SAMPLED = [Estimator("reverse", 1, dimensions=n) for n in (10, 1, 3, 5)]
REVERSE_SAMPLED += [Estimator("reverse", p, dimensions=10) for p in (2, 10)]
FORMS: dict[str, dict[str, Any]] = {
    "norm": {},
    "squared": {"squared": True},
    "tensor": {"hessian_norm": "tensor"},
}


def tiny(width: int = 12, tokens: int = 4) -> tuple[nn.Module, Batch]:
    """A model whose full Hessians are affordable: 2 layers, fp64."""
    shape = replace(SHAPES["tiny"], width=width, heads=3, inner=2 * width, batch=1, tokens=tokens)
    return build_model(shape, dtype=torch.float64).eval(), make_batch(shape, labels=False)


def exact_tables(options: Options) -> str:
    """All estimators against exact norms."""
    model, row = tiny()
    draws = 32 if options.quick else options.extra.draws
    exact = {form: _draw_form(model, row, Estimator("exact", 1), form, 1) for form in FORMS}
    jacobians, hessians = [], []
    for estimator in [*JETS, *REVERSES]:
        found = {}
        for form, reference in exact.items():
            drawn = _draw_form(model, row, estimator, form, draws)
            found[form] = (
                compare(drawn.jacobian, reference.jacobian),
                compare(drawn.hessian, reference.hessian),
            )
        jacobians.append(_jacobian_line(estimator, found))
        hessians.append(_hessian_line(estimator, found))
    jacobian = ["estimator", "bias of ‖J‖", "spread", "bias of ‖J‖²", "spread"]
    hessian = ["estimator", "bias of Σ‖H_j‖", "spread", "without c_P", "bias of Σ‖H_j‖²", "spread"]
    hessian += ["bias of the tensor norm", "spread"]
    return f"{markdown(jacobian, jacobians)}\n{markdown(hessian, hessians)}"


def _draw_form(model: nn.Module, row: Batch, estimator: Estimator, form: str, draws: int) -> Norms:
    return draw(model, row, estimator, copies=draws, calls=1, **FORMS[form])


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


def encoder_tables(options: Options) -> Iterator[dict[str, str]]:
    """The estimators on an encoder: per token, per layer, and on its first token only.

    The tables come again, longer by a line, after each form of the reverse estimator.
    """
    model, row = _encoder(options)
    directions = 100 if options.quick else 1_000
    reference = _reference(model, row, directions)
    found = {e.name: _drawn(model, row, e, options.quick) for e in [*JETS, *SAMPLED]}
    yield _tables("all", reference, found)
    # The reverse form's cost grows with the tokens: it is drawn for the first one only.
    first = {name: _first_token(norms) for name, norms in found.items()}
    yield _tables("first", _first_token(reference), first)
    for e in REVERSE_SAMPLED[: options.extra.reverse]:
        first[e.name] = _drawn(model, row, e, options.quick, scope="first")
        yield _tables("first", _first_token(reference), first)


def _first_token(norms: Norms) -> Norms:
    """The same draws with every other token's norm set to zero, as scope "first" has it."""
    first = torch.zeros_like(norms.jacobian[0, 0])
    first[0] = 1
    return Norms(norms.jacobian * first, norms.hessian * first)


def _tables(scope: str, reference: Norms, found: dict[str, Norms]) -> dict[str, str]:
    result = {}
    for quantity in ("jacobian", "hessian"):
        exact = getattr(reference, quantity)
        each = {name: compare(getattr(norms, quantity), exact) for name, norms in found.items()}
        result[f"{scope} {quantity}"] = f"{tokens_table(each)}\n{layers_table(each)}"
    return result


def _encoder(options: Options) -> tuple[nn.Module, Batch]:
    if options.extra.model is not None:
        return load_encoder(options.extra.model, 1, options.device)
    shape = replace(SHAPES["tiny" if options.quick else "encoder6-T32"], batch=1)
    model = build_model(shape, **options.place).eval()
    return model, make_batch(shape, labels=False, device=options.device)


def _reference(model: nn.Module, row: Batch, directions: int) -> Norms:
    return draw(model, row, Estimator("jet", directions), copies=1, calls=1)


def _drawn(
    model: nn.Module, row: Batch, estimator: Estimator, quick: bool, **settings: Any
) -> Norms:
    """Draws enough for a spread within some 10 %; the reverse form's are dear."""
    copies, calls = (16, 8) if estimator.engine == "jet" else (4, 6)
    if quick:
        copies, calls = 4, 2
    return draw(model, row, estimator, copies=copies, calls=calls, **settings)


def sections(options: Options) -> Iterator[dict[str, str]]:
    """Sections of the document, name and text, as they are done."""
    if "exact" in options.extra.parts:
        yield {"exact": exact_tables(options)}
    if "encoder" in options.extra.parts:
        yield from encoder_tables(options)


def main(argv: list[str] | None = None) -> dict[str, str]:
    """Measure, print, and with --update write the document's tables."""
    assert __doc__ is not None
    arguments = parser(__doc__, [], [])
    arguments.add_argument("--model", type=Path, help="folder of an encoder")
    arguments.add_argument("--update", action="store_true", help=f"rewrite tables in {DOCUMENT}")
    arguments.add_argument("--document", type=Path, default=DOCUMENT)
    arguments.add_argument("--parts", nargs="+", default=["exact", "encoder"])
    arguments.add_argument("--draws", type=int, default=1_000, help="against exact norms")
    count = len(REVERSE_SAMPLED)
    arguments.add_argument("--reverse", type=int, default=count, help="how many reverse forms")
    options = parse(arguments, argv)
    if options.extra.update and options.quick:
        arguments.error("--update with --quick would write figures of too few draws; drop one")
    found: dict[str, str] = {}
    for done in sections(options):
        found |= done
        if options.extra.update:
            for name, text in done.items():
                replace_section(options.extra.document, name, text)
    print(f"jachess_ext {jx.__version__}, torch {torch.__version__}")
    for name, text in found.items():
        print(f"\n## {name}\n\n{text}")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
