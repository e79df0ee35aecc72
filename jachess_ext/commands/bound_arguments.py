"""The options of `jachess bound`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .ntk_arguments import HEADS
from .option_types import positive, whole
from .records import out_path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of the fine-tuned model")
    parser.add_argument("pretrained", metavar="PRETRAINED", help="the model before")
    parser.add_argument("file", type=Path, metavar="FILE", help="its training data, as for ntk")
    parser.add_argument("--head", choices=HEADS, default="auto", help="what the model is")
    parser.add_argument("--text-column", default="text", metavar="NAME")
    parser.add_argument("--pair-column", metavar="NAME", help="second text")
    parser.add_argument("--label-column", default="label", metavar="NAME")
    parser.add_argument(
        "--samples",
        type=whole,
        default=16,
        help="the first so many are measured, one by one (%(default)s)",
    )
    parser.add_argument("--max-length", type=whole, default=128, metavar="TOKENS")
    parser.add_argument("--steps", type=whole, default=20, help="of Lanczos (%(default)s)")
    parser.add_argument("--epsilon", type=positive, default=0.1, help="default %(default)s")
    parser.add_argument(
        "--loss-bound", type=positive, metavar="C", help="default: the largest loss measured"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    parser.add_argument("--out", type=out_path, metavar="FILE", help=".csv or .json")
