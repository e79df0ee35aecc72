"""Reports on disk: JSON that any parser reads, and one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import write_atomically

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1rem; }
body { overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
.caption { font-size: .9rem; margin: 1rem 0 .2rem; opacity: .8; }
.pictures { display: flex; flex-wrap: wrap; gap: 0 1.5rem; }
th, td { border-bottom: 1px solid #8886; padding: .35rem .7rem; text-align: right; }
th:first-child, td:first-child, th.text, td.text { text-align: left; }
td { white-space: nowrap; } td.text { white-space: normal; min-width: 16rem; }
figure { margin: 1rem 0; max-width: 100%; } figcaption { font-size: .9rem; opacity: .8; }
img { max-width: 100%; height: auto; background: #fff; }
pre { white-space: pre-wrap; padding: .6rem; background: #8882; font-size: .85rem; }
@media (prefers-color-scheme: dark) { img { filter: invert(.92) hue-rotate(180deg); } }
@media (max-width: 40rem) {
  th, td { padding: .35rem .4rem; }
  td:first-child { white-space: normal; min-width: 6rem; }
}
"""


@dataclass(frozen=True)
class Table:
    """A table of ready-made text; columns whose index is in `prose` are set as running text."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Picture:
    """A PNG with a caption, which is its alternative text as well.

    Attributes:
        scale: image pixels a CSS pixel; 2 is sharp on dense screens, at the same size.
    """

    caption: str
    png: bytes
    scale: float = 1.0


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, tables, pictures and literal text, shown in that order."""

    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    literal: Sequence[str] = field(default=())


def to_html(title: str, sections: Sequence[Section]) -> str:
    """One self-contained page: styles and pictures inside, every text escaped, no script."""
    body = "".join(_section(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1>\n{body}</body></html>\n"
    )


def write_html(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Writes `to_html` to `path`, whole or not at all."""
    write_atomically(path, to_html(title, sections))


def write_json(path: Path, content: Any) -> None:
    """Writes strict JSON to `path`, whole or not at all; NaN and infinities become null.

    Raises:
        TypeError: something JSON cannot hold; the file is not touched.
    """
    text = json.dumps(finite(content), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, text + "\n")


def finite(content: Any) -> Any:
    """Plain JSON values: arrays as lists, NaN and infinities as None."""
    if isinstance(content, dict):
        return {str(key): finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    if hasattr(content, "tolist"):  # numpy arrays and scalars, torch tensors
        return finite(content.tolist())
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def _section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>\n"]
    parts += [f"<p>{html.escape(text)}</p>\n" for text in section.paragraphs]
    parts += [_table(table) for table in section.tables]
    if section.pictures:
        parts.append(f'<div class="pictures">{"".join(map(_picture, section.pictures))}</div>\n')
    parts += [f"<pre>{html.escape(text)}</pre>\n" for text in section.literal]
    return "".join(parts)


def _escaped(text: str, breaks: bool) -> str:
    """`breaks`: a line may end after each comma, which names of methods have in place of spaces."""
    return html.escape(text).replace(",", ",<wbr>" if breaks else ",")


def _table(table: Table) -> str:

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=text' * (index in table.prose)}>{_escaped(text, index == 0)}</{tag}>"
            for index, text in enumerate(row)
        )

    head = f"<tr>{cells('th', table.header)}</tr>"
    rows = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in table.rows)
    # Above the table, not in it: a caption is as wide as its table, wider than a phone.
    caption = f'<p class="caption">{html.escape(table.caption)}</p>\n' if table.caption else ""
    return (
        f'{caption}<div class="scroll"><table>\n'
        f"<thead>{head}</thead>\n<tbody>{rows}</tbody></table></div>\n"
    )


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode("ascii")
    caption = html.escape(picture.caption)
    width = ""
    if picture.scale != 1.0:
        across = int.from_bytes(picture.png[16:20], "big")  # of the PNG's header
        width = f' width="{round(across / picture.scale)}"'
    return (
        f'<figure><img alt="{caption}"{width} src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>\n"
    )
