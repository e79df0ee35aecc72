"""The options of `jachess select` that live selections alone have."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds them, None where they are not given, without an import of other libraries."""
    what = parser.add_argument_group("live: fine-tune the candidates here")
    what.add_argument(
        "--models", nargs="+", metavar="PATH_OR_HUB_ID", help="the candidates, two or more"
    )
    what.add_argument("--train", type=Path, metavar="FILE", help="csv, tsv or jsonl, perhaps .gz")
    what.add_argument("--dev", type=Path, metavar="FILE", help="losses are measured on it")
    what.add_argument("--text-column", metavar="NAME", help="default text")
    what.add_argument("--pair-column", metavar="NAME", help="default: text_pair, if there is one")
    what.add_argument("--label-column", metavar="NAME", help="default label")
    what.add_argument(
        "--regression", action="store_true", default=None, help="labels are numbers to predict"
    )
    what.add_argument(
        "--dev-size",
        type=int,
        metavar="N",
        help="dev rows judged on; default as many as cost 0.5 %% of training, 200 or more, unless "
        "that is above a sixth of what training on the subsets costs",
    )
    what.add_argument(
        "--rank-by",
        metavar="SCORE",
        help="loss (default), accuracy, f1, matthews, brier; regressions: mae, pearson, spearman",
    )
    what.add_argument(
        "--keep",
        choices=("winner",),
        help="fine-tune the best model on all rows and save it in --out/winner",
    )
    how = parser.add_argument_group("live: subsets and stops")
    how.add_argument(
        "--sizes", type=int, nargs="+", metavar="D", help="default: quarters of the largest"
    )
    how.add_argument(
        "--order",
        choices=("growing", "promotion", "algorithm1", "halving"),
        help="all models on small subsets first (default); promotion: and only the best forecasts "
        "on larger ones; algorithm1: from the largest down, with --gamma, --tau (was: halving)",
    )
    how.add_argument("--promote", type=share, metavar="SHARE", help="that goes on, default 0.5")
    how.add_argument(
        "--screen",
        type=share,
        metavar="SHARE",
        help="fine-tune only this share of the models, the best by their frozen features",
    )
    how.add_argument("--screen-by", metavar="SCORE", help="logme (default), hscore or knn")
    how.add_argument("--screen-rows", type=int, metavar="N", help="rows for that, default 512")
    how.add_argument(
        "--drop",
        type=float,
        metavar="P",
        help="give a model up once its probability of being best is below P; default: never",
    )
    how.add_argument(
        "--probe",
        type=int,
        metavar="N",
        help="rows the NTK is measured on; default 0, with --method lensllm 32",
    )
    train = parser.add_argument_group("live: how every model is fine-tuned")
    train.add_argument("--batch-size", type=int, metavar="N", help="default 16")
    train.add_argument(
        "--lr",
        type=float,
        nargs="+",
        metavar="X",
        help="default 2e-5, with --lora 1e-4; of several the best for each model counts",
    )
    train.add_argument("--lora", action="store_true", default=None, help="peft, r 8, alpha 16")
    train.add_argument("--bf16", action="store_true", default=None)
    train.add_argument(
        "--gradient-accumulation", type=int, metavar="N", help="batches a step, default 1"
    )
    train.add_argument("--gradient-checkpointing", action="store_true", default=None)
    train.add_argument(
        "--max-length", type=int, metavar="TOKENS", help="texts are cut there, default 128"
    )
    train.add_argument("--seed", type=int, help="of head, order and dropout, default 0")
    train.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help="at most, of models among which the ranking is open, default 1",
    )
    train.add_argument("--data-seed", type=int, help="of which rows a subset has, default 0")
    run = parser.add_argument_group("live: where")
    run.add_argument("--processes", type=int, metavar="N", help="runs at a time, default 1")
    run.add_argument("--threads", type=int, metavar="N", help="of each process, default 1")
    run.add_argument(
        "--device", metavar="NAME", help="cpu, cuda or cuda:N; default: the GPU if there is one"
    )
    run.add_argument(
        "--ray", nargs="?", const="auto", metavar="ADDRESS", help="fan out on a Ray cluster"
    )


def share(text: str) -> float:
    """The argument of --promote and --screen: 1/2, 0.5 or 50%.

    Raises:
        argparse.ArgumentTypeError: it is none of these, or not between 0 and 1.
    """
    above, slash, below = text.removesuffix("%").partition("/")
    try:
        value = float(above) / (float(below) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        value = float("nan")
    value /= 100 if text.endswith("%") else 1
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share between 0 and 1, such as 1/2")
    return value


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The options of these that were given, by name; the others' defaults are the settings' own."""
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser)
    names = vars(parser.parse_args([]))
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}
