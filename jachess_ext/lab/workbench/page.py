"""Pages of tables, figures and text, for a browser or a terminal."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._io import require, write_text

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (
    *("#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"),
    *("#56b4e9", "#7b3294", "#a6d854", "#e7298a", "#8c510a", "#1a1a80"),
)
MARKERS = "osD^vPX*<>ph"
Styles = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Table:
    """A table of text, for a page or a terminal.

    Attributes:
        prose: Indices of the columns that are typeset as running text.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Picture:
    """A matplotlib figure, drawn when a page needs it, and its caption and alternative text."""

    caption: str
    draw: Callable[[], Figure]

    def svg(self) -> Markup:
        """Return the figure as an ``<svg>`` element without a background, date or link."""
        # matplotlib writes random ids of clip paths and the date: with a fixed salt and without
        # metadata the same records give the same page, byte for byte.
        markup, buffer = require("markupsafe"), io.StringIO()
        with require("matplotlib").rc_context({"svg.hashsalt": "jachess"}):
            self.draw().savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        _, _, drawn = buffer.getvalue().partition("<svg")
        drawn = re.sub(r"<metadata>.*?</metadata>| xmlns(:\w+)?=\"[^\"]*\"", "", drawn, flags=re.S)
        label = markup.escape(self.caption)
        return markup.Markup(f'<svg role="img" aria-label="{label}"{drawn}')

    def png(self, dots_per_inch: int = 120) -> bytes:
        """Return the figure as the bytes of a PNG file, on a white background."""
        buffer = io.BytesIO()
        self.draw().savefig(buffer, format="png", dpi=dots_per_inch)
        return buffer.getvalue()


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, tables, pictures and literal text, shown in that order."""

    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    literal: Sequence[str] = ()


def to_html(title: str, sections: Iterable[Section]) -> str:
    """Return a self-contained HTML page: styles and pictures are inline, and there is no script.

    Examples:
        >>> page = to_html("Scores", [Section("Film reviews", ["Plain wins."], literal=["seed 0"])])
        >>> "<h1>Scores</h1>" in page, "http" in page
        (True, False)
    """
    template = Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8")
    environment = require("jinja2").Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(template).render(title=title, sections=sections)


def write_html(path: Path, title: str, sections: Iterable[Section]) -> None:
    """Write the page of `to_html` to a file, atomically."""
    write_text(path, to_html(title, sections))


def nonempty(sections: Iterable[Section]) -> list[Section]:
    """Return the sections that have a table, a picture or literal text."""
    return [s for s in sections if s.tables or s.pictures or s.literal]


def to_text(table: Table, width: int) -> str:
    """Return a table as text of `width` characters; a wider table is split into several blocks of
    columns, each with the first column."""
    first, *header = table.header
    body = require("pandas").DataFrame(
        [row[1:] for row in table.rows], [row[0] for row in table.rows], header
    )
    body.columns.name = first
    return f"{body.to_string(line_width=width)}\n{wrap(table.caption, width)}\n"


def wrap(text: str, width: int) -> str:
    """Return a paragraph wrapped to lines of `width` characters, not broken at hyphens."""
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def styles_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return name -> colour and marker; up to 144 names have different pairs.

    A report calls it once, so that a method looks the same in all of its figures.

    Examples:
        >>> styles_of(["none", "sam"])["sam"]
        {'color': '#0072b2', 'marker': 's'}
    """
    # 12 colours and 12 markers: each round of colours starts one marker later, so that no pair is
    # repeated before the 145th name.
    count = len(COLOURS)
    return {
        name: {"color": COLOURS[i % count], "marker": MARKERS[(i + i // count) % count]}
        for i, name in enumerate(names)
    }


def panels(
    rows: int = 1, columns: int = 1, *, width: float, height: float, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure of `width` × `height` inches and its axes, row by row.

    Args:
        shared: ``sharex``, ``sharey``.
    """
    # Figure itself, not pyplot, needs no display and is not kept in a global list.
    figure = require("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def pluralise(number: int, name: str) -> str:
    """Return a number with its noun, such as "1 seed" or "2 seeds"."""
    return f"{number} {name}" + "s" * (number != 1)


def break_name(name: str, width: int = 26) -> str:
    """Return a long name wrapped to lines of about `width` characters, broken after commas and
    spaces, with $ escaped for matplotlib."""
    lines = [""]
    for part in re.findall(r"[^ ,]*[ ,]*", name.replace("$", r"\$")):
        if lines[-1] and len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def print_section(section: Section, width: int) -> None:
    """Print a section wrapped to `width` characters, without its pictures and literal text."""
    print(f"\n{section.title}\n")
    for paragraph in section.paragraphs:
        print(wrap(paragraph, width) + "\n")
    for table in section.tables:
        print(to_text(table, width))
