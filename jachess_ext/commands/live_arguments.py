"""The options of `jachess select` that live selections alone have."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_DEFAULTS: dict[str, Any] = {
    "models": None,
    "train": None,
    "dev": None,
    "sizes": None,
    "order": "growing",
    "drop": None,
    "probe": 32,
    "seed": 0,
    "data_seed": 0,
    "dev_size": None,
    "batch_size": 16,
    "lr": 2e-5,
    "max_length": 128,
    "text_column": "text",
    "pair_column": None,
    "label_column": "label",
    "processes": 1,
    "threads": 1,
    "ray": None,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds them; nothing is imported that the package itself does not need."""
    what = parser.add_argument_group("live: fine-tune the candidates here")
    what.add_argument(
        "--models", nargs="+", metavar="PATH_OR_HUB_ID", help="the candidates, two or more"
    )
    what.add_argument("--train", type=Path, metavar="FILE", help="csv, tsv or jsonl, perhaps .gz")
    what.add_argument("--dev", type=Path, metavar="FILE", help="losses are measured on it")
    what.add_argument("--text-column", metavar="NAME", help=_default("text_column"))
    what.add_argument("--pair-column", metavar="NAME", help="default: text_pair, if there is one")
    what.add_argument("--label-column", metavar="NAME", help=_default("label_column"))
    what.add_argument("--dev-size", type=int, metavar="N", help="dev rows used; default all")
    how = parser.add_argument_group("live: subsets and stops")
    how.add_argument(
        "--sizes", type=int, nargs="+", metavar="D", help="default: halvings of the largest"
    )
    how.add_argument(
        "--order",
        choices=("growing", "halving"),
        help="all models on small subsets first (default), or Algorithm 1 with --gamma, --tau",
    )
    how.add_argument(
        "--drop",
        type=float,
        metavar="P",
        help="give a model up once its probability of being best is below P; default: never",
    )
    how.add_argument(
        "--probe", type=int, metavar="N", help="rows the NTK is measured on, " + _default("probe")
    )
    train = parser.add_argument_group("live: how every model is fine-tuned")
    train.add_argument("--batch-size", type=int, metavar="N", help=_default("batch_size"))
    train.add_argument("--lr", type=float, help=_default("lr"))
    train.add_argument(
        "--max-length",
        type=int,
        metavar="TOKENS",
        help="texts are cut there, " + _default("max_length"),
    )
    train.add_argument("--seed", type=int, help="of head, order and dropout, " + _default("seed"))
    train.add_argument(
        "--data-seed", type=int, help="of which rows a subset has, " + _default("data_seed")
    )
    run = parser.add_argument_group("live: where")
    run.add_argument(
        "--processes", type=int, metavar="N", help="runs at a time, " + _default("processes")
    )
    run.add_argument(
        "--threads", type=int, metavar="N", help="of each process, " + _default("threads")
    )
    run.add_argument(
        "--ray", nargs="?", const="auto", metavar="ADDRESS", help="fan out on a Ray cluster"
    )


def _default(name: str) -> str:
    return f"default {_DEFAULTS[name]}"


def given(options: argparse.Namespace) -> list[str]:
    """The options of these that were given, as they are written on the command line."""
    return [
        "--" + name.replace("_", "-")
        for name in _DEFAULTS
        if getattr(options, name, None) is not None
    ]


def complete(options: argparse.Namespace) -> dict[str, Any]:
    """The values given and the defaults of the others, by name."""
    return {
        name: default if getattr(options, name) is None else getattr(options, name)
        for name, default in _DEFAULTS.items()
    }
