"""mkdocs: links out of docs/ to files of the repository become the files' names.

The site holds the pages of docs/ alone; a link to ../benchmarks/README.md, good where the
repository is read, would be dead there.  One to a file that does not exist is an error.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(<?(\.\./[^)#>\s]+)(#[^)>]*)?>?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its links out of docs/ replaced."""
    here = posixpath.dirname("docs/" + page.file.src_uri)

    def replaced(found: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(here, found[2]))
        if place.startswith("docs/"):
            return found[0]
        if not (ROOT / place).exists():
            raise PluginError(f"{page.file.src_uri} links to {place}, which does not exist")
        text = found[1].strip("`")
        return f"`{place}`" if text == place.rsplit("/")[-1] else f"{found[1]} (`{place}`)"

    return _LINK.sub(replaced, markdown)
