"""mkdocs: a link out of docs/ leads to a copy of its file, and pages get their tables.

A page of docs/ links to rows of benchmarks/results, to tests, examples and other pages of the
repository.  Each such file is part of the site, at its path in the repository; so are the files
that pages among them link to.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)(\[[^\]]+\]\()<?([^)#>:\s]+)(#[^)>]*)?>?\)")
_OBJECT = re.compile(r"^::: (jachess_ext\.\S+)(?:\n    options: \{ (.*) \})?$", re.MULTILINE)
_NO_ALT = 'alt="No description has been provided for this image"'  # nbconvert
_CELL = re.compile(r"<td((?: [^>]*)?)>(.*?)</td>", re.DOTALL)


def rule_table() -> str:
    """A row for each name of a torch function with a jet rule, its spellings and their kind."""
    from jachess_ext.jet.engine.errors import function_name, last_name
    from jachess_ext.jet.engine.registry import rule_kinds

    rows: dict[tuple[str, str], set[str]] = {}
    for function, kinds in rule_kinds().items():
        key = last_name(function), ", ".join(kinds)
        rows.setdefault(key, set()).add(f"`{function_name(function)}`")
    table = [
        f"| `{name}` | {', '.join(sorted(spelled))} | {kind} |"
        for (name, kind), spelled in sorted(rows.items())
    ]
    return "\n".join(["| name | functions | answered by |", "|---|---|---|", *table])


def attention_table() -> str:
    """A row for each line of the rule that decides which backend computes a call of attention."""
    from jachess_ext.ops.attention import BACKENDS

    rows = [f"| {backend.calls} | {backend.name} |" for backend in BACKENDS]
    return "\n".join(["| the first that applies | served by |", "|---|---|", *rows])


def refused_table() -> str:
    """A row for each operator that torch refuses to differentiate, or gets wrong when nested."""
    from jachess_ext.differentiable.formulas import TABLE

    rows = [f"| `{row.name}` | {row.refuses} | {row.wrong} | {row.text} |" for row in sorted(TABLE)]
    head = "| operator | torch refuses | torch is wrong in | what is done there |"
    return "\n".join([head, "|---|---|---|---|", *rows])


TABLES = {
    "rules.md": rule_table,
    "how_it_works.md": attention_table,
    "refused.md": refused_table,
}
"""Of a page: what stands in it at `<!-- table -->`."""


def on_config(config: Any) -> None:
    """The site's name says of which version it is."""
    from jachess_ext import __version__

    config.site_name = f"{config.site_name} {__version__}"


def on_files(files: Any, config: Any) -> None:
    """Add the files of the repository that the pages link to."""
    from mkdocs.structure.files import File, InclusionLevel

    pages = [file for file in files.documentation_pages() if file.src_uri.endswith(".md")]
    for page in pages:  # which grows
        for place in linked(page.content_string, in_repository(page)):
            if place.startswith("docs/") or place in files.src_uris:
                continue
            path = str(ROOT / place)
            file = File.generated(
                config, place, abs_src_path=path, inclusion=InclusionLevel.NOT_IN_NAV
            )
            files.append(file)
            if place.endswith(".md"):
                pages.append(file)


def in_repository(file: Any) -> str:
    """The path of a page of the site in the repository."""
    return str(file.src_uri) if file.generated_by else f"docs/{file.src_uri}"


def linked(markdown: str, page: str) -> Iterator[str]:
    """The files of the repository that a page links to."""
    for match in _LINK.finditer(markdown):
        place = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[2]))
        if (ROOT / place).is_file():
            yield place


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its links as they are in the site, its table, and headings users know."""
    source = page.file.src_uri
    if table := TABLES.get(source):
        markdown = markdown.replace("<!-- table -->", table())
    if source.startswith("benchmarks/results/"):
        page.meta["search"] = {"exclude": True}
    here = in_repository(page.file)

    def to_site(match: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[2]))
        inside = place.removeprefix("docs/")
        target = posixpath.relpath(inside, posixpath.dirname(source) or ".")
        return f"{match[1]}<{target}{match[3] or ''}>)"

    def with_heading(match: re.Match[str]) -> str:
        options = ", ".join(filter(None, [f"heading: {public_name(match[1])}", match[2]]))
        return f"::: {match[1]}\n    options: {{ {options} }}"

    return _OBJECT.sub(with_heading, _LINK.sub(to_site, markdown))


def public_name(path: str) -> str:
    """An object's name as a user writes it: `jx.jet` for jachess_ext.jet.jet.

    Where jachess_ext does not have it, this is the path to import it from.
    """
    import jachess_ext as jx

    name = path.rsplit(".")[-1]
    if path in (f"jachess_ext.{name}", f"jachess_ext.{jx._NAMES.get(name)}.{name}"):
        return f"jx.{name}"
    attribute = path.split(".")[1] in jx._MODULES
    return path.replace("jachess_ext", "jx", 1) if attribute else path


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """The page with words for its pictures, links to pages that docstrings name, marked cells."""
    if page.file.src_uri.endswith(".ipynb"):
        for cell in json.loads(page.file.content_string)["cells"]:
            if alt := cell["metadata"].get("alt"):
                html = html.replace(_NO_ALT, f'alt="{escape(alt)}"', 1)
    if page.file.src_uri.startswith("reference/"):
        html = re.sub(r"\bdocs/(\w+)\.md\b", r'<a href="../\1.html">\g<0></a>', html)

    def marked(match: re.Match[str]) -> str:
        prose = len(re.sub("<[^>]*>", "", match[2])) > 40
        return f'<td class="prose"{match[1]}>{match[2]}</td>' if prose else match[0]

    return _CELL.sub(marked, html)
