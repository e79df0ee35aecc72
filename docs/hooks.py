"""mkdocs: links out of docs/ become the names of files, and pages get their tables.

The site holds the pages of docs/ alone; a link to ../benchmarks/README.md, good where the
repository is read, would be dead there.  One to a file that does not exist is an error.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(<?(\.\./[^)#>\s]+)(#[^)>]*)?>?\)")


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


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its links out of docs/ replaced, and its table from the code."""
    if table := TABLES.get(page.file.src_uri):
        markdown = markdown.replace("<!-- table -->", table())
    here = posixpath.dirname("docs/" + page.file.src_uri)

    def replaced(found: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(here, found[2]))
        if place.startswith("docs/"):
            return found[0]
        if not (ROOT / place).exists():
            from mkdocs.exceptions import PluginError

            raise PluginError(f"{page.file.src_uri} links to {place}, which does not exist")
        text = found[1].strip("`")
        return f"`{place}`" if text == place.rsplit("/")[-1] else f"{found[1]} (`{place}`)"

    return _LINK.sub(replaced, markdown)
