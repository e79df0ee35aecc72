"""The command line every benchmark script shares."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .models import SHAPES, Shape
from .report import RESULTS, Row, append_rows, print_table

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """Parsed arguments; ``quick`` runs are for trying a script out, not for figures."""

    device: torch.device
    dtype: torch.dtype
    named_shapes: list[tuple[str, Shape]]
    repeats: int
    dropout: float
    quick: bool
    results: Path | None
    extra: argparse.Namespace

    @property
    def shapes(self) -> list[Shape]:
        return [shape for _, shape in self.named_shapes]

    @property
    def place(self) -> dict[str, Any]:
        """Where and how `build_model` is to build."""
        return {"device": self.device, "dtype": self.dtype, "dropout": self.dropout}

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def parser(
    description: str, shapes: list[str], quick: list[str], repeats: int = 9
) -> argparse.ArgumentParser:
    """A parser with the shared options; a script adds its own before `parse`.

    Args:
        shapes: names of the shapes measured by default.
        quick: the shapes of a ``--quick`` run.
        repeats: rounds by default.
    """
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--device", default="cpu", help="cpu or cuda")
    result.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    result.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), help=f"default: {shapes}")
    result.add_argument(
        "--repeats", type=int, help=f"rounds that count; default {repeats}, quick 3"
    )
    result.add_argument("--threads", type=int, default=2, help="CPU threads")
    result.add_argument("--dropout", type=float, default=0.0)
    result.add_argument("--quick", action="store_true", help="small and few; writes no CSV")
    result.add_argument("--results", type=Path, help=f"folder of the CSV; default {RESULTS}")
    result.add_argument("--rows-to", type=Path, help=argparse.SUPPRESS)  # for run_all
    result.set_defaults(default_shapes=shapes, quick_shapes=quick, default_repeats=repeats)
    return result


def parse(arguments: argparse.ArgumentParser, argv: list[str] | None) -> Options:
    """Read the command line and set torch's threads."""
    found = arguments.parse_args(argv)
    device = torch.device(found.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        arguments.error("--device cuda was asked for, but torch sees no GPU; use --device cpu")
    default = 3 if found.quick else found.default_repeats
    repeats = default if found.repeats is None else found.repeats
    if repeats < 1:
        arguments.error(f"--repeats is {repeats}; expected 1 or more")
    torch.set_num_threads(found.threads)
    names = found.shapes or (found.quick_shapes if found.quick else found.default_shapes)
    results = found.results or (None if found.quick else RESULTS)
    return Options(
        device=device,
        dtype=DTYPES[found.dtype],
        named_shapes=[(name, SHAPES[name]) for name in names],
        repeats=repeats,
        dropout=found.dropout,
        quick=found.quick,
        results=results,
        extra=found,
    )


def finish(rows: list[Row], name: str, options: Options) -> list[Row]:
    """Append the rows to the CSV ``name`` (not in a quick run without --results), and print."""
    if options.results is not None:
        append_rows(rows, options.results, name, options.device)
    if options.extra.rows_to is not None:
        options.extra.rows_to.write_text(json.dumps([asdict(row) for row in rows]))
    print_table(rows)
    return rows
