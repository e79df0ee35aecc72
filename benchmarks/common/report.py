"""Result rows: appended to a CSV file, and printed as a short table."""

from __future__ import annotations

import csv
import io
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from jachess_ext.evaluation.files import write_atomically

from .timing import Spread

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass
class Row:
    """One measured figure beside its baseline.

    Attributes:
        figure: what was measured, for example "JacHess step".
        unit: of p20, p50, p80 and baseline_p50.
        ratio: figure over baseline, or the other way round where ``target`` starts with "≥"
            (a speed-up); both from one run.
        peak_mb: peak memory of the step in MiB, where the timing run can tell (on a GPU).
        floor_ratio: figure over the matrix products' own time, where that was measured.
        target: what we ask of the ratio on the CPU; empty where nothing.
    """

    question: str
    shape: str
    dtype: str
    figure: str
    p20: float
    p50: float
    p80: float
    baseline: str
    baseline_p50: float
    ratio: float
    unit: str = "ms"
    floor_ratio: float | None = None
    peak_mb: float | None = None
    target: str = ""
    note: str = ""
    date: str = ""
    commit: str = ""
    device: str = ""
    torch: str = ""
    threads: int = 0

    @classmethod
    def of(cls, place: tuple[str, str, str], figure: str, spread: Spread, **rest: Any) -> Row:
        """A row from a `Spread`; ``place`` is (question, shape, dtype)."""
        return cls(*place, figure, spread.p20, spread.p50, spread.p80, **rest)


def append_rows(rows: list[Row], results: Path, name: str, device: torch.device) -> Path:
    """Append ``rows`` to ``results/name.csv`` in one write, with the run's circumstances.

    Raises:
        ValueError: the file has other columns (an older schema): move it away first.
    """
    path = results / f"{name}.csv"
    header = [field.name for field in fields(Row)]
    old = path.exists() and path.stat().st_size > 0
    if old and path.read_text().splitlines()[0].split(",") != header:
        raise ValueError(f"{path} has columns other than {header}; move it away and run again")
    stamp = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": device_name(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    text = io.StringIO()
    writer = csv.DictWriter(text, header, lineterminator="\n")
    if not old:
        writer.writeheader()
    for row in rows:
        writer.writerow({key: _cell(value) for key, value in (asdict(row) | stamp).items()})
    results.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text.getvalue())
    return path


def write_rows(rows: Sequence[Any], path: Path) -> None:
    """Dataclass objects of one kind as the whole content of a csv file; None as an empty cell."""
    text = io.StringIO()
    header = [field.name for field in fields(rows[0])]
    writer = csv.DictWriter(text, header, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _cell(value) for key, value in asdict(row).items()})
    write_atomically(path, text.getvalue())


def read_rows(path: Path, kind: type[Any]) -> list[Any]:
    """What `write_rows` wrote of dataclass objects whose fields are str, int, float, perhaps None.

    Raises:
        TypeError: the file has other columns.
    """
    types = {field.name: str(field.type).split(" | ") for field in fields(kind)}
    of = {"str": str, "int": int, "float": float}

    def value(name: str, text: str) -> Any:
        if name not in types:
            raise TypeError(f"{path} has a column {name!r}, and {kind.__name__} has none")
        return None if not text and "None" in types[name] else of[types[name][0]](text)

    with path.open(encoding="utf-8", newline="") as file:
        return [
            kind(**{name: value(name, text) for name, text in row.items()})
            for row in csv.DictReader(file)
        ]


def _cell(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else value


def commit() -> str:
    """Short hash of the checkout, with "+" where tracked package files differ from it."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "-uno", "--", "jachess_ext", "csrc", "benchmarks")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    lines = [line for line in changed.splitlines() if "benchmarks/results" not in line]
    return head + ("+" if lines else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def print_table(rows: list[Row]) -> None:
    """The rows as aligned columns, the ratio beside what it should reach."""
    header = ["shape", "figure", "p50", "p20..p80", "against", "p50", "ratio", "target", "/floor"]
    lines = [header]
    for row in rows:
        lines.append(
            [
                row.shape,
                row.figure,
                f"{row.p50:.4g} {row.unit}",
                f"{row.p20:.4g}..{row.p80:.4g}",
                row.baseline,
                f"{row.baseline_p50:.4g}",
                f"{row.ratio:.2f}",
                row.target,
                "" if row.floor_ratio is None else f"{row.floor_ratio:.2f}",
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = zip(line, widths, strict=True)
        print("  ".join(cell.ljust(width) for cell, width in cells).rstrip())
