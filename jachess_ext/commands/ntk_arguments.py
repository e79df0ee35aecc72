"""The options of `jachess ntk`."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, fields
from pathlib import Path

from .option_types import checked, ending_in, whole

HEADS = ("auto", "classifier", "causal", "masked", "seq2seq")
METHODS = ("auto", "gram", "materialise", "sketch", "per_sample", "explain")
FORMATS = (".npz", ".safetensors")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class NTKOptions:
    """What `jachess ntk` is asked for; names as on the command line."""

    model: str
    file: Path
    head: str = "auto"
    classes: int | None = None
    text_column: str = "text"
    pair_column: str | None = None
    label_column: str = "label"
    samples: int = 64
    max_length: int = 128
    outputs: str | int = "logits"
    parameters: str | None = None
    method: str = "auto"
    sketch_size: int = 64
    memory: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    threads: int | None = None
    out: Path = Path("ntk.npz")

    @classmethod
    def of(cls, given: argparse.Namespace) -> NTKOptions:
        """From what `add_options` parsed."""
        return cls(**{field.name: getattr(given, field.name) for field in fields(cls)})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options; nothing is imported that the package itself does not need."""
    default = NTKOptions
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a transformers model")
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help=".txt (a sample a line), .jsonl, .csv, .tsv; also .gz",
    )
    data = parser.add_argument_group("model and data")
    data.add_argument(
        "--head", choices=HEADS, default=default.head, help="what the model is; auto: its own head"
    )
    data.add_argument("--classes", type=whole, help="of a classifier's new head, where it has none")
    data.add_argument("--text-column", default=default.text_column, metavar="NAME")
    data.add_argument("--pair-column", metavar="NAME", help="second text")
    data.add_argument("--label-column", default=default.label_column, metavar="NAME")
    data.add_argument(
        "--samples", type=whole, default=default.samples, help="the first so many (%(default)s)"
    )
    data.add_argument("--max-length", type=whole, default=default.max_length, metavar="TOKENS")

    how = parser.add_argument_group("kernel")
    how.add_argument(
        "--outputs",
        type=_outputs,
        default=default.outputs,
        metavar="WHAT",
        help="logits, sum, label, or a number of random projections (%(default)s)",
    )
    how.add_argument("--parameters", metavar="REGEX", help="only parameters whose name it matches")
    how.add_argument(
        "--method", choices=METHODS, default=default.method, help="explain: the plan, no kernel"
    )
    how.add_argument("--sketch-size", type=whole, default=default.sketch_size, metavar="K")
    how.add_argument("--memory", type=_bytes, metavar="SIZE", help="budget, like 800M or 2G")
    how.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default=default.dtype)
    how.add_argument("--device", default=default.device, help="cpu, cuda, cuda:1, …")
    how.add_argument("--seed", type=int, default=default.seed, help="of new heads and of draws")
    how.add_argument("--threads", type=whole, help="of torch")
    parser.add_argument(
        "--out",
        type=ending_in(*FORMATS),
        default=default.out,
        metavar="FILE",
        help=".npz or .safetensors",
    )


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
