"""The options of `jachess demo`, and what they mean."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..commands.option_types import checked, fields_in, whole
from ..compare.settings import Columns
from .options import Options, Recipe

_not_negative = checked(float, lambda value: 0 <= value < float("inf"), "a finite number from 0 up")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's options; nothing is imported that the package itself does not need."""
    data = parser.add_argument_group("model and data (default: both come with the package)")
    data.add_argument("--model", metavar="PATH_OR_HUB_ID", help="any sequence classifier")
    data.add_argument("--train", type=Path, metavar="FILE", help="csv, tsv or jsonl to train on")
    data.add_argument("--dev", type=Path, metavar="FILE", help="csv, tsv or jsonl to judge on")
    data.add_argument("--dataset", metavar="NAME", help="of the datasets library, like glue/cola")
    data.add_argument("--text-column", default="text", metavar="NAME")
    data.add_argument(
        "--pair-column", metavar="NAME", help="second text (default: text_pair, if there is one)"
    )
    data.add_argument("--label-column", default="label", metavar="NAME")
    data.add_argument("--max-length", type=whole, default=Options.max_length, metavar="TOKENS")

    size = parser.add_argument_group("how much")
    size.add_argument("--seeds", type=whole, default=Options.seeds, help="default %(default)s")
    size.add_argument("--steps", type=whole, default=Recipe.steps, help="default %(default)s")
    size.add_argument("--quick", action="store_true", help="one seed, few steps: does it run?")
    size.add_argument("--threads", type=whole, default=Options.threads, help="of torch")

    how = parser.add_argument_group("how to train")
    how.add_argument("--strength", type=_not_negative, default=Recipe.strength)
    how.add_argument(
        "--lr", type=_not_negative, default=None, help="default 1e-3, or 2e-5 with --model"
    )
    how.add_argument("--batch-size", type=whole, default=Recipe.batch_size)
    how.add_argument(
        "--weights", choices=("uniform", "inverse", "norm", "softmax"), default=Recipe.weights
    )
    how.add_argument(
        "--unlab",
        dest="form",
        choices=("joint", "alternating"),
        default=Recipe.form,
        help="JacHess-unlab: one step on both losses, or a step on each in turn",
    )
    parser.add_argument(
        "--out", type=Path, default=Options.out, metavar="FOLDER", help="default ./%(default)s"
    )


def from_namespace(given: argparse.Namespace) -> Options:
    """The parsed options as `Options`."""
    values = vars(given) | {
        "lr": given.lr if given.lr is not None else (2e-5 if given.model else Recipe.lr),
        "columns": Columns(given.text_column, given.pair_column, given.label_column),
    }
    values["recipe"] = Recipe(**fields_in(Recipe, values))
    options = Options(**fields_in(Options, values))
    return options.quick() if given.quick else options
