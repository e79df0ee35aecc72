"""The pages of the site as they are built, by what a reader meets: links, code, lists, figures.

Each check is a function of a page that returns what is wrong with it, and is tried on a page with
that fault.  `make docs` gives the folder it built in $SITE; without it the site is built here.
"""

from __future__ import annotations

import functools
import html
import json
import os
import posixpath
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jachess_ext
from python_tests import browser, processes

bs4 = pytest.importorskip("bs4", reason="pip install 'jachess-ext[docs]'")
ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PYTHON = ".language-python pre, .highlight-ipynb pre"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    if built := os.environ.get("SITE"):
        return ROOT / built
    pytest.importorskip("mkdocs", reason="pip install 'jachess-ext[docs]'")
    folder = tmp_path_factory.mktemp("site")
    # no -q: it silences warnings, which --strict then does not see
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    done = processes.run(command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, bs4.Tag]:
    """What each page says, without menus, by its path in the site."""
    found = {path.relative_to(site).as_posix(): path for path in sorted(site.rglob("*.html"))}
    del found["404.html"]
    assert len(found) > 50
    return {name: article(path.read_text(encoding="utf-8")) for name, path in found.items()}


def article(text: str) -> bs4.Tag:
    found = re.search("<article.*</article>", text, re.DOTALL)
    return bs4.BeautifulSoup(found[0], "html.parser").article


def prose(page: bs4.Tag) -> str:
    """A page's words, with ` for each piece of code."""
    copied = r'<div class="clipboard-copy-txt".*?</div>'  # a notebook's code a second time
    text = re.sub(rf"<(pre|code|script|style)\b.*?</\1>|{copied}", "`", str(page), flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub("<[^>]*>", "", text)))


def unquoted_examples(page: bs4.Tag) -> Iterator[str]:
    """Examples of docstrings that are not highlighted code below a heading of their own."""
    yield from (quote.get_text() for quote in page.find_all("blockquote"))
    for text in page.find_all(string=re.compile(">>>")):
        block = text.find_parent("div", class_="highlight")
        if block is None or block.find("span", class_=re.compile("^[kmnos]")) is None:
            yield text


def bare_returns(page: bs4.Tag) -> Iterator[str]:
    """Parts of a type, such as `...` of a tuple, that stand as the type of a returned value."""
    for title in page.find_all(class_="doc-section-title", string="Returns:"):
        entries = title.find_parent("p").find_next_sibling()
        if entries.name != "ul" or len(entries.find_all("li", recursive=False)) > 1:
            yield entries.get_text()


def private_headings(page: bs4.Tag) -> Iterator[str]:
    """Headings with another name than the one users write."""
    for heading in page.find_all("h2", class_="doc"):
        name = re.match(r"[\w.]*", heading.get_text().strip())[0]
        last = name.rpartition(".")[2]
        if not name or (name.startswith("jachess_ext.") and last in jachess_ext.__all__):
            yield name


def riddles(page: bs4.Tag) -> Iterator[str]:
    """Parentheses that end twice, and Markdown that stayed what it was."""
    words = prose(page)
    for found in re.finditer(r"\(`\)\)|` ?\)\)|\*\*|\]\(|~~~|``", words):
        yield words[max(0, found.start() - 40) : found.end() + 10]


def formulas_in_italics(page: bs4.Tag) -> Iterator[str]:
    """Indices that Markdown took for emphasis: `‖x‖_F, max_i`."""
    for word in page.find_all("em"):
        if re.search(r"[_^{}‖Σ]|^[^\w\s(\"“`−0-9]", word.get_text()):
            yield word.get_text()


def uncaptioned(page: bs4.Tag) -> Iterator[str]:
    """Figures without words for who cannot see them, or without a caption in italics."""
    for image in page.find_all("img"):
        alt = image.get("alt", "")
        caption = image.find_next("p")
        italics = caption and caption.find("em", recursive=False)
        captioned = italics and italics.get_text().strip() == caption.get_text().strip()
        if len(alt) < 10 or alt.startswith("No description") or not captioned:
            yield alt


def wide_code(page: bs4.Tag) -> Iterator[str]:
    """Lines of Python that a page on a desktop would have to wrap."""
    for code in page.select(PYTHON):
        yield from (line for line in code.get_text().splitlines() if len(line) > 88)


CHECKS: dict[Callable[[bs4.Tag], Iterator[str]], tuple[str, str]] = {
    unquoted_examples: ("reference/", "<blockquote><p>&gt;&gt;&gt; f()</p></blockquote>"),
    bare_returns: (
        "reference/",
        "<p><span class='doc-section-title'>Returns:</span></p><ul><li>Any</li><li>...</li></ul>",
    ),
    private_headings: ("reference/", "<h2 class='doc'>jachess_ext.jet.jet</h2>"),
    riddles: ("", "<p>As measured (rows (<code>a.csv</code>)).</p>"),
    formulas_in_italics: ("", "<p>The norm ‖x‖<em>F + Σ</em>i y</p>"),
    wide_code: ("", f"<div class='language-python'><pre>{'x' * 89}</pre></div>"),
    uncaptioned: ("", "<img alt='Time over size of the input'><p>Text goes on.</p>"),
}
"""Each check, with where the pages it reads begin, and a fault."""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_pages(check: Callable[[bs4.Tag], Iterator[str]], pages: dict[str, bs4.Tag]) -> None:
    beginning, fault = CHECKS[check]
    assert [*check(article(f"<article>{fault}</article>"))]
    wrong = {
        name: found
        for name, page in pages.items()
        if name.startswith(beginning) and (found := [*check(page)])
    }
    assert not wrong


def test_python_is_known_as_such(pages: dict[str, bs4.Tag]) -> None:
    """`wide_code` reads these blocks; without their class it would read none."""
    for name in ("index.html", "tutorials/poisson.html", "notebooks/pinn.html"):
        assert pages[name].select(PYTHON), name


def test_every_docstring_s_examples_are_shown(pages: dict[str, bs4.Tag]) -> None:
    reference = [page for name, page in pages.items() if name.startswith("reference/")]
    shown = sum(len(page.find_all(string=re.compile("^Examples:$"))) for page in reference)
    assert shown >= 70


def dead_links(name: str, page: bs4.Tag, site: Path) -> Iterator[str]:
    """Links of a page that lead to no file of the site, or to no heading there."""
    for element in page.find_all(["a", "img"]):
        target = element.get("href", element.get("src"))
        address = urllib.parse.urlsplit(target or "")
        if target is None or address.scheme:
            continue
        place = posixpath.normpath(
            posixpath.join(posixpath.dirname(name), urllib.parse.unquote(address.path))
            if address.path
            else name
        )
        heading = urllib.parse.unquote(address.fragment)
        if not (site / place).is_file() or (heading and heading not in anchors(site / place)):
            yield target


@functools.cache
def anchors(path: Path) -> set[str]:
    return {*re.findall(r'\bid="([^"]*)"', path.read_text(encoding="utf-8"))}


def test_links_lead_somewhere(site: Path, pages: dict[str, bs4.Tag]) -> None:
    fault = "<article><a href='no.html'></a><a href='#no'></a><img src='no.png'></article>"
    assert [*dead_links("index.html", article(fault), site)] == ["no.html", "#no", "no.png"]
    dead = {name: found for name, p in pages.items() if (found := [*dead_links(name, p, site)])}
    assert not dead


def test_links_of_the_repository_are_links(pages: dict[str, bs4.Tag]) -> None:
    """Each that a page of docs/ has, to a file beside docs/, leads to a copy in the site."""
    checked = 0
    for source in sorted(DOCS.glob("**/*.md")):
        text = source.read_text(encoding="utf-8")
        targets = re.findall(r"\]\(<?((?:\.\./)+[\w/.=-]+)", text)
        page = source.relative_to(DOCS).with_suffix(".html").as_posix()
        links = [str(a.get("href")) for a in pages[page].find_all("a")]
        for target in targets:
            place = (source.parent / target).resolve().relative_to(ROOT).as_posix()
            if not place.startswith("docs/"):
                checked += 1
                built = re.sub("README.md$", "index.html", place)
                built = re.sub(r"\.md$", ".html", built)
                assert any(urllib.parse.unquote(link).endswith(built) for link in links), target
    assert checked > 50


def numbers(markdown: str) -> list[int]:
    """The numbers of a page's lists, as they are written."""
    text = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    return [int(n) for n in re.findall(r"(?:^|\n) *(\d+)\. ", text)]


def counted(page: bs4.Tag) -> list[int]:
    """The numbers of a page's lists, as they are shown."""
    return [
        int(entries.get("start", 1)) + k
        for entries in page.find_all("ol")
        for k, _ in enumerate(entries.find_all("li", recursive=False))
    ]


def test_lists_count_on(pages: dict[str, bs4.Tag]) -> None:
    """A paragraph with too small an indent ends a list, and the next entry would be 1 again."""
    broken = "<article><ol><li>a</li><li>b</li></ol><pre></pre><ol><li>c</li></ol></article>"
    assert counted(article(broken)) == [1, 2, 1] != numbers("1. a\n2. b\n\n    c\n3. c\n")
    lists = 0
    for name, page in pages.items():
        path = Path(name).with_suffix(".md")
        places = (DOCS / path, ROOT / path, ROOT / path.with_name("README.md"))
        source = next(filter(Path.is_file, places), None)
        if source is None:  # a notebook
            continue
        text = source.read_text(encoding="utf-8")
        expected = numbers(text)
        assert counted(page) == expected, source
        nested = re.findall(r"^ {1,3}[-*] .*", text, re.MULTILINE)
        assert not nested, f"{source}: four spaces make a list within a list"
        lists += bool(expected)
    assert lists > 0


def test_the_version_and_the_next_page_are_shown(site: Path) -> None:
    for name in ("index.html", "tutorials/derivatives.html"):
        text = (site / name).read_text(encoding="utf-8")
        assert f"jachess_ext {jachess_ext.__version__}</title>" in text
        assert 'class="md-footer__link md-footer__link--next"' in text


_MEASURE = """<body></body><script>
const pages = PAGES, wide = [];
const frame = document.createElement('iframe');
document.body.append(frame);
async function measure(page) {
  frame.style.cssText = 'border: 0; width: 1280px; height: 900px';
  await new Promise(done => { frame.onload = done; frame.src = page; });
  const shown = frame.contentDocument;
  for (const width of [1280, 390]) {
    frame.style.width = `${width}px`;
    await new Promise(done => setTimeout(done, 20));
    if (shown.documentElement.scrollWidth > width) wide.push([width, page, 'the page']);
    for (const code of shown.querySelectorAll('pre, pre > code'))
      if (code.scrollWidth > code.clientWidth + 1)
        wide.push([width, page, code.textContent.slice(0, 60)]);
    for (const image of shown.querySelectorAll('article img'))
      if (image.getBoundingClientRect().width < 100) wide.push([width, page, image.alt]);
  }
}
addEventListener('load', async () => {
  for (const page of pages) await measure(page);
  document.body.setAttribute('data-wide', encodeURIComponent(JSON.stringify(wide)));
});</script>"""


def too_wide(paths: list[Path], scratch: Path) -> list[list[object]]:
    """What is cut at the border of a page on a desktop and on a phone, or not shown."""
    harness = scratch / "measure.html"
    harness.write_text(_MEASURE.replace("PAGES", json.dumps([path.as_uri() for path in paths])))
    flags = ("--allow-file-access-from-files", "--virtual-time-budget=60000")
    run = browser.loaded(harness, scratch, *flags)
    found = re.search(r'data-wide="([^"]*)"', run.stdout)
    assert found is not None, run.stderr[-2000:]
    return json.loads(urllib.parse.unquote(found[1]))


def test_nothing_is_cut(site: Path, pages: dict[str, bs4.Tag], tmp_path: Path) -> None:
    fault = tmp_path / "fault.html"
    fault.write_text(f"<pre style='overflow: auto'><code>{'x' * 300}</code></pre>")
    assert len(too_wide([fault], tmp_path)) >= 2
    ours = [site / name for name in pages if not name.startswith("benchmarks/")]
    assert too_wide(ours, tmp_path) == []
