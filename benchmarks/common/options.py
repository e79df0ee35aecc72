"""The command line every benchmark script shares."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from .models import SHAPES, Shape
from .report import RESULTS

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """Parsed arguments; ``quick`` runs are for trying a script out, not for figures."""

    device: torch.device
    dtype: torch.dtype
    shapes: list[Shape]
    repeats: int
    dropout: float
    quick: bool
    results: Path | None
    extra: argparse.Namespace

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def parser(description: str, shapes: list[str], quick: list[str]) -> argparse.ArgumentParser:
    """A parser with the shared options; a script adds its own before `parse`.

    Args:
        shapes: names of the shapes measured by default.
        quick: the shapes of a ``--quick`` run.
    """
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--device", default="cpu", help="cpu or cuda")
    result.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    result.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), help=f"default: {shapes}")
    result.add_argument("--repeats", type=int, help="rounds that count; default 9, quick 3")
    result.add_argument("--threads", type=int, default=2, help="CPU threads")
    result.add_argument("--dropout", type=float, default=0.0)
    result.add_argument("--quick", action="store_true", help="small and few; writes no CSV")
    result.add_argument("--results", type=Path, help=f"folder of the CSV; default {RESULTS}")
    result.set_defaults(default_shapes=shapes, quick_shapes=quick)
    return result


def parse(arguments: argparse.ArgumentParser, argv: list[str] | None) -> Options:
    """Read the command line and set torch's threads."""
    found = arguments.parse_args(argv)
    device = torch.device(found.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        arguments.error("--device cuda was asked for, but torch sees no GPU; use --device cpu")
    repeats = found.repeats or (3 if found.quick else 9)
    if repeats < 1:
        arguments.error(f"--repeats is {repeats}; expected 1 or more")
    torch.set_num_threads(found.threads)
    names = found.shapes or (found.quick_shapes if found.quick else found.default_shapes)
    results = found.results or (None if found.quick else RESULTS)
    return Options(
        *(device, DTYPES[found.dtype], [SHAPES[name] for name in names]),
        *(repeats, found.dropout, found.quick, results, found),
    )
