"""Paragraphs of plain-text files, split into text to train on and text to judge on."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from jachess_ext.tasks.examples import DataError

ENDINGS = (".txt", ".raw", ".tokens", ".md")
"""Of the files read from a folder, perhaps with .gz after them."""
_HELD_OUT = 20  # the last paragraph in so many of every file, so the judged text is contiguous
_FEWEST_WORDS = 6


@dataclass(frozen=True)
class Corpus:
    """Paragraphs to train on and to judge on, and a digest of all of them."""

    train: list[str]
    held_out: list[str]

    @property
    def digest(self) -> str:
        """Changes with any character."""
        return sha256("\0".join([*self.train, "", *self.held_out]).encode()).hexdigest()[:16]


def read_corpus(sources: Sequence[Path]) -> Corpus:
    """Every text file of the folders (in the order of their names), and the files named.

    Raises:
        DataError: nothing there, not readable as UTF-8 (perhaps gzip), or too little text.
    """
    files = [path for source in sources for path in _files(source)]
    train: list[str] = []
    held_out: list[str] = []
    for path in files:
        found = list(paragraphs(_read(path)))
        cut = len(found) - len(found) // _HELD_OUT
        train += found[:cut]
        held_out += found[cut:]
    if not held_out:
        raise DataError(
            f"{', '.join(map(str, sources))} has {len(train)} paragraphs of {_FEWEST_WORDS} words "
            f"or more; expected {_HELD_OUT} or more in a file, of English text"
        )
    return Corpus(train, held_out)


def paragraphs(text: str) -> Iterable[str]:
    """Lines with enough words, in order; WikiText's marks (headings, @-@, <unk>) undone."""
    for line in text.splitlines():
        line = re.sub(r" @([-.,])@ ", r"\1", line.strip())
        line = re.sub(r"\s*<unk>\s*", " ", line)
        if len(line.split()) >= _FEWEST_WORDS and not line.startswith("="):
            yield line


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise DataError(f"{source} is neither a file nor a folder; expected text files (--text)")
    endings = (*ENDINGS, *(ending + ".gz" for ending in ENDINGS))
    names = sorted(path.name for path in source.iterdir() if path.name.lower().endswith(endings))
    found = [source / name for name in names if not name.lower().startswith("readme")]
    if not found:
        raise DataError(f"{source} has no file that ends in {', '.join(ENDINGS)} (or .gz after it)")
    return found


def _read(path: Path) -> str:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            return file.read()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error
