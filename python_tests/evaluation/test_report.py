"""Reports: strict JSON, escaped and self-contained HTML, nothing half-written."""

from __future__ import annotations

import io
import itertools
import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from jachess_ext.evaluation import extras
from jachess_ext.evaluation.calibration import reliability
from jachess_ext.evaluation.figures import (
    forest_figure,
    norms_figure,
    reliability_figure,
    score_curves_figure,
    styles_of,
)
from jachess_ext.evaluation.files import write_atomically
from jachess_ext.evaluation.report import Picture, Section, Table, to_html, write_html, write_json

HOSTILE = "<script>alert(1)</script> & \"quoted\" 'x'"


class Page(HTMLParser):
    """Collects the tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for key, value in attrs if key in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def page() -> Page:
    picture = Picture(HOSTILE, reliability_figure({"a": reliability([[0.3, 0.7]], [1])}))
    table = Table(HOSTILE, [HOSTILE, "b"], [[HOSTILE, "1"]], prose=frozenset({0}))
    section = Section(HOSTILE, [HOSTILE], [table], [picture], [HOSTILE])
    return Page(to_html(HOSTILE, [section]))


def test_user_text_is_escaped_everywhere() -> None:
    got = page()
    assert "script" not in got.tags
    assert got.text.count(HOSTILE) == 9  # title, h1, h2, p, caption, th, td, figcaption, pre


def test_page_needs_nothing_from_outside() -> None:
    got = page()
    assert got.links and all(link.startswith("data:image/png;base64,") for link in got.links)
    assert "link" not in got.tags and "iframe" not in got.tags
    text = to_html("t", [Section("s", pictures=[Picture("c", b"x")])])
    assert "http" not in text and "@import" not in text
    assert 'name="viewport" content="width=device-width' in text


def test_json_is_strict_and_nan_becomes_null(tmp_path: Path) -> None:
    content = {"a": np.array([1.0, np.nan]), "b": (np.float64(2), float("inf")), 3: "é"}
    write_json(tmp_path / "deep" / "r.json", content)
    text = (tmp_path / "deep" / "r.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"a": [1.0, None], "b": [2.0, None], "3": "é"}


def test_unwritable_content_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_failed_move_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("jachess_ext.evaluation.files.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "x", "y")
    assert list(tmp_path.iterdir()) == []


def test_html_is_written_whole(tmp_path: Path) -> None:
    write_html(tmp_path / "r.html", "title", [Section("s")])
    assert (tmp_path / "r.html").read_text(encoding="utf-8").endswith("</html>\n")


def test_figures_are_png_and_repeat_exactly() -> None:
    p = np.random.default_rng(0).dirichlet(np.ones(3), 50)
    diagrams = {
        "none": reliability(p, np.zeros(50, int)),
        "other": reliability(p, np.ones(50, int)),
    }
    scores = {"none": [[0.8, 0.6], [0.7, 0.5]], "other": [[0.9, 0.8], [0.8, 0.6]]}
    for draw in (
        lambda: reliability_figure(diagrams),
        lambda: score_curves_figure([0, 1], scores, "δ (rms)", "accuracy"),
        lambda: score_curves_figure([0, 1], {"one": [[0.8, 0.6]]}, "δ (rms)", "accuracy"),
        lambda: norms_figure({"a": [1.0, 10.0]}, {"a": [2.0, 3.0]}),
    ):
        first = draw()
        assert first.startswith(b"\x89PNG\r\n\x1a\n")
        assert first == draw()


def colours_of(png: bytes) -> set[str]:
    """Of its pixels, as "#rrggbb"."""
    from matplotlib.image import imread

    pixels = np.unique((imread(io.BytesIO(png))[..., :3] * 255).round().astype(int).reshape(-1, 3),
                       axis=0)  # fmt: skip
    return {"#{:02x}{:02x}{:02x}".format(*pixel) for pixel in pixels}


def _lab(colour: str) -> npt.NDArray[np.float64]:
    """CIE L*a*b* of a colour of the web, where equal distances look about equally large."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    rgb = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    f = np.cbrt(xyz @ rgb / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_twelve_methods_stay_apart() -> None:
    names = [str(i) for i in range(144)]
    looks = [tuple(style.values()) for style in styles_of(names).values()]
    assert len(set(looks)) == 144
    colours, markers = zip(*looks[:12], strict=True)
    assert len(set(colours)) == len(set(markers)) == 12
    pairs = itertools.combinations(map(_lab, colours), 2)
    assert min(float(np.linalg.norm(a - b)) for a, b in pairs) > 25  # some 2 can just be seen


def test_a_method_looks_the_same_in_every_figure() -> None:
    names = ["none", *"abcdefgh"]
    styles = styles_of(names)
    p = np.random.default_rng(0).dirichlet(np.ones(3), 50)
    for draw in (
        lambda: reliability_figure({"h": reliability(p, np.zeros(50, int))}, styles),
        lambda: score_curves_figure([0, 1], {"h": [[0.8, 0.6]]}, "x", "y", styles),
        lambda: norms_figure({"h": [1.0, 10.0]}, {"h": [2.0, 3.0]}, styles=styles),
        lambda: forest_figure({"h": (1.0, 0.5)}, "x", styles),
    ):
        found = colours_of(draw())
        assert styles["h"]["color"] in found
        assert not {styles[name]["color"] for name in "abcdefg"} & found


def test_missing_extra_says_what_to_install() -> None:
    with pytest.raises(extras.MissingExtra, match=r"pip install 'jachess-ext\[demo\]'"):
        extras.require("a_library_that_is_not_there.part")


def test_a_broken_extra_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_extra.py").write_text("import something_it_needs")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError) as caught:
        extras.require("broken_extra")
    assert not isinstance(caught.value, extras.MissingExtra)
