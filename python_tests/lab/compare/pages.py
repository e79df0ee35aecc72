"""What a page or a figure holds: tags and text of HTML, boxes of matplotlib's texts."""

from __future__ import annotations

from html.parser import HTMLParser
from itertools import combinations
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg

HOSTILE = "<script>alert(1)</script> & \"quoted\" 'x' $y_1$"


class Page(HTMLParser):
    """Tags, links and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for key, value in attrs if key.endswith(("src", "href"))]

    def handle_data(self, data: str) -> None:
        self.text += data


def lines(panel: Any, marker: str) -> list[tuple[list[float], list[float]]]:
    """Return (x, y) of every line with this marker."""
    drawn = [line for line in panel.lines if line.get_marker() == marker]
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in drawn]


def assert_legible(figure: Any) -> None:
    """No text lies over another, none outside the picture."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts: list[Any] = [text for legend in figure.legends for text in legend.get_texts()]
    for panel in (panel for panel in figure.axes if panel.get_visible()):
        texts += [panel.title, panel.xaxis.label, panel.yaxis.label, *panel.texts]
        for axis, limits in ((panel.xaxis, panel.get_xlim()), (panel.yaxis, panel.get_ylim())):
            low, high = sorted(limits)
            ticks = [t for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
            texts += [t.label1 for t in ticks if t.label1.get_visible()]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t.get_text()]
    width, height = figure.bbox.width, figure.bbox.height
    for text, box in boxes:
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
        assert inside, f"{text!r} is outside the picture"
    for (first, a), (second, b) in combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        up = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(across, up) < 1, f"{first!r} is over {second!r}"
