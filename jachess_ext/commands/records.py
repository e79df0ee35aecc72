"""Records as a table on the terminal, and as a csv or json file that is whole or absent."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._io import write_json, write_text

Record = Mapping[str, Any]


def write_records(path: Path, records: Sequence[Record], **facts: Any) -> None:
    """Writes records to a csv file, or with the facts beside them to a json file."""
    if path.suffix == ".json":
        write_json(path, {**facts, "rows": [dict(record) for record in records]})
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_text(path, text.getvalue())


def print_records(records: Sequence[Record]) -> None:
    """Aligned columns: words to the left, numbers to the right with four significant digits."""
    head = list(records[0])
    lines = [head, *([_cell(record[key]) for key in head] for record in records)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    words = [isinstance(records[0][key], str) for key in head]
    for line in lines:
        cells = (
            cell.ljust(width) if word else cell.rjust(width)
            for cell, width, word in zip(line, widths, words, strict=True)
        )
        print("  ".join(cells).rstrip())


def _cell(value: Any) -> str:
    return f"{value:#.4g}" if isinstance(value, float) else str(value)
