"""What a figure holds: read from matplotlib's own objects while the figures are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from jachess_ext.selection_report import figures


@contextmanager
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Within it the figures made are kept in the list."""
    made: list[Any] = []
    png = figures.to_png

    def keep(figure: Any, *rest: Any) -> bytes:
        made.append(figure)
        return png(figure, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(figures, "to_png", keep)
        yield made


def figures_of(monkeypatch: pytest.MonkeyPatch, draw: Callable[[], Any]) -> list[Any]:
    with kept(monkeypatch) as made:
        draw()
    return made


def lines(panel: Any, marker: str) -> list[tuple[list[float], list[float]]]:
    """(x, y) of every line with this marker."""
    found = [line for line in panel.lines if line.get_marker() == marker]
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in found]


def text_boxes(figure: Any) -> list[tuple[str, Any]]:
    """Every text that is drawn, with its place in pixels."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts: list[Any] = []
    for panel in figure.axes:
        if panel.get_visible():
            texts += [panel.title, panel.xaxis.label, panel.yaxis.label, *panel.texts]
            for axis, limits in ((panel.xaxis, panel.get_xlim()), (panel.yaxis, panel.get_ylim())):
                low, high = sorted(limits)
                ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
                ticks = [t for t in ticks if low <= t.get_loc() <= high]
                texts += [t.label1 for t in ticks if t.label1.get_visible()]
    for legend in figure.legends:
        texts += legend.get_texts()
    return [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t.get_text()]


def assert_legible(figure: Any) -> None:
    """No text over another, none outside the picture."""
    boxes = text_boxes(figure)
    width, height = figure.bbox.width, figure.bbox.height
    for text, box in boxes:
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
        assert inside, f"{text!r} is outside the picture"
    for (one, a), (other, b) in combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        up = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(across, up) < 1, f"{one!r} is over {other!r}"
