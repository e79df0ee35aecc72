"""The options of `jachess ntk`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from .option_types import checked, ending_in, whole

HEADS = ("auto", "classifier", "causal", "masked", "seq2seq")
METHODS = ("auto", "gram", "materialise", "per_sample", "explain")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jachess ntk`, without an import that the package does not need."""
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a transformers model")
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help=".txt (a sample a line), .jsonl, .csv, .tsv; also .gz",
    )
    data = parser.add_argument_group("model and data")
    _add_data_options(data)
    data.add_argument("--classes", type=whole, help="of a classifier's new head, where it has none")
    data.add_argument("--samples", type=whole, default=64, help="the first so many (%(default)s)")

    how = parser.add_argument_group("kernel")
    how.add_argument(
        "--outputs",
        type=_outputs,
        default="logits",
        metavar="WHAT",
        help="logits, sum, label, or a number of random projections (%(default)s)",
    )
    how.add_argument("--parameters", metavar="REGEX", help="only parameters whose name it matches")
    how.add_argument(
        "--method", choices=METHODS, default="auto", help="explain: the plan, no kernel"
    )
    how.add_argument("--memory", type=_bytes, metavar="SIZE", help="budget, like 800M or 2G")
    how.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    how.add_argument("--seed", type=int, default=0, help="of new heads and of draws")
    how.add_argument("--threads", type=whole, help="of torch")
    parser.add_argument(
        "--out",
        type=ending_in(".npz", ".safetensors"),
        default=Path("ntk.npz"),
        metavar="FILE",
        help=".npz or .safetensors",
    )


def _add_data_options(group: Any) -> None:
    group.add_argument(
        "--head", choices=HEADS, default="auto", help="what the model is; auto: its own head"
    )
    group.add_argument("--text-column", default="text", metavar="NAME")
    group.add_argument("--pair-column", metavar="NAME", help="second text")
    group.add_argument("--label-column", default="label", metavar="NAME")
    group.add_argument("--max-length", type=whole, default=128, metavar="TOKENS")
    group.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")


def _outputs(text: str) -> str | int:
    if text in ("logits", "sum", "label"):
        return text
    wanted = "logits, sum, label, or a number of projections from 1 up"
    return checked(int, lambda value: value >= 1, wanted)(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:iB|B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 800M or 2G")
    return int(float(found[1]) * _UNITS[found[2].upper()])
