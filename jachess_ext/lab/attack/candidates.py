"""Candidates to replace a word: from a file, from WordNet, or near it in a model's embedding."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from ..._io import DataError, read_text, shown
from ...models import token_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")  # letters, with hyphens or apostrophes between

NEAREST = "embeddings"
"""Name, instead of a file's, for the nearest rows of the model's own embedding table."""

_PARTS = ("noun", "verb", "adj", "adv")
_SHORTEST = 3  # letters; WordNet's shorter words are elements, units and states: as, in, he


Entry = tuple[str, list[str]]  # a key (a lemma or an offset) and its words or offsets


class Candidates(Protocol):
    """A source of candidates to replace a word.

    Examples:
        >>> class Shorter:
        ...     source = "the word without its end"
        ...
        ...     def __call__(self, word):
        ...         return [word.lower()[:-1]]
        >>> candidates: Candidates = Shorter()
        >>> candidates("Films")
        ['film']

    Attributes:
        source: name of the source, for reports.
    """

    source: str

    def __call__(self, word: str) -> Sequence[str]:
        """Return the candidates of a word in lower case, best first, without the word itself."""


class Synonyms:
    """Candidates from a table of synonyms, looked up in lower case.

    Examples:
        >>> Synonyms({"good": ["fine", "great"]})("Good")
        ('fine', 'great')

    Args:
        words: word -> its synonyms.
        source: name of the table, for reports.
    """

    def __init__(self, words: Mapping[str, Sequence[str]], source: str = "a table") -> None:
        self.source = source
        self._words = {word.lower(): tuple(synonyms) for word, synonyms in words.items()}

    def __call__(self, word: str) -> tuple[str, ...]:
        """Return the synonyms of a word; () if it is not in the table."""
        return self._words.get(word.lower(), ())


def read_synonyms(path: str | Path) -> Synonyms:
    """Read a file of synonyms, or a folder with WordNet's `index.*` and `data.*` files.

    A line of a file has a word and its synonyms, separated by blanks; a ``#`` begins a comment.
    Lines are not symmetric: a synonym does not get the word as its synonym.

    A word's synonyms in WordNet (the format is `wndb(5WN)`) are the other single lower-case words
    of its senses: of the senses tagged in texts, or of the first sense of a part of speech without
    tagged ones.  Words are not inflected, and words of one or two letters are left out.

    Raises:
        DataError: the file does not exist or is not UTF-8, a line is malformed, or no word has a
            synonym.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     file = Path(folder, "synonyms.txt")
        ...     _ = file.write_text("good fine great  # not: fine good\\n")
        ...     read_synonyms(file)("good")
        ('fine', 'great')
    """
    path = Path(path)
    words = _read_wordnet(path) if path.is_dir() else _read_lines(path)
    if not any(words.values()):
        raise DataError(
            f"{path} has no word with a synonym; expected lines of a word and its synonyms, or "
            "WordNet's folder (Debian: apt install wordnet-base, then /usr/share/wordnet)"
        )
    return Synonyms(words, f"{'WordNet in ' if path.is_dir() else ''}{path}")


def _read_lines(path: Path) -> dict[str, list[str]]:
    words: dict[str, list[str]] = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        entry = line.partition("#")[0].lower().split()
        if not entry:
            continue
        if wrong := [word for word in entry if not WORD.fullmatch(word)]:
            raise DataError(
                f"{path}: line {number} has {shown(wrong[0])}; expected words of letters, hyphens "
                "and apostrophes, separated by blanks: a word, then its synonyms"
            )
        first, *others = entry
        synonyms = words.setdefault(first, [])
        synonyms += [word for word in dict.fromkeys(others) if word not in (first, *synonyms)]
    return words


def _read_wordnet(folder: Path) -> dict[str, list[str]]:
    words: dict[str, list[str]] = {}
    for part in (part for part in _PARTS if (folder / f"index.{part}").is_file()):
        senses = dict(_parse_lines(folder / f"data.{part}", _parse_sense))
        for lemma, offsets in _parse_lines(folder / f"index.{part}", _parse_lemma):
            if len(lemma) < _SHORTEST or not WORD.fullmatch(lemma):
                continue
            synonyms = words.setdefault(lemma, [])
            sense_words = dict.fromkeys(word for offset in offsets for word in senses[offset])
            synonyms += [word for word in sense_words if word not in (lemma, *synonyms)]
    return words


def _parse_lines(path: Path, parse: Callable[[list[str]], Entry]) -> Iterator[Entry]:
    """Yield ``parse(fields)`` for each line of a WordNet file, without the lines of the licence,
    which begin with two blanks."""
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if line.startswith("  ") or not line.strip():
            continue
        try:
            yield parse(line.split())
        except (IndexError, ValueError):
            raise DataError(
                f"{path}: line {number} is {shown(line)}; expected WordNet's format (wndb)"
            ) from None


def _parse_sense(fields: list[str]) -> tuple[str, list[str]]:
    """Parse a line of a WordNet data file; return the sense's offset and its words.

    The fields are: offset, file, type, number of words in hexadecimal, then each word and a number.
    """
    words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
    words = [re.sub(r"\((?:a|p|ip)\)$", "", word) for word in words]  # an adjective's position
    return fields[0], [word for word in words if word.islower() and WORD.fullmatch(word)]


def _parse_lemma(fields: list[str]) -> tuple[str, list[str]]:
    """Parse a line of a WordNet index file; return the lemma and the offsets of its tagged senses,
    or of its first sense if none is tagged.

    The fields are: lemma, part of speech, number of senses, number of pointers, pointers …, number
    of senses, number of tagged senses, offsets of the senses.
    """
    pointers = int(fields[3])
    tagged, offsets = int(fields[5 + pointers]), fields[6 + pointers :]
    return fields[0], offsets[: max(1, tagged)]


class NearestRows:
    """Candidates whose rows of a model's embedding table are nearest to the word's, by cosine.

    Only words that are a single token have candidates, and are candidates.  Near rows are often not
    synonyms: words of opposite meaning occur in similar contexts.

    Examples:
        >>> from jachess_ext.lab.workbench.models import load_model, load_tokenizer
        >>> from jachess_ext.lab.demo import ASSETS
        >>> tokenizer = load_tokenizer(ASSETS)
        >>> nearest = NearestRows(load_model(ASSETS, 2, tokenizer, seed=0), tokenizer, count=3)
        >>> len(nearest("Good")), nearest("goodness gracious")
        (3, ())

    Args:
        model: a transformers model; its embedding table is copied.
        tokenizer: the model's tokenizer.
        count: number of candidates of a word.
    """

    source = "the nearest rows of the model's embedding table"

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, count: int = 8
    ) -> None:
        table = token_table(model).weight.detach()
        texts = tokenizer.batch_decode([[i] for i in range(min(len(table), len(tokenizer)))])
        words = [(i, text.strip()) for i, text in enumerate(texts)]
        words = [(i, text) for i, text in words if WORD.fullmatch(text)]
        ids = token_ids(tokenizer, [text for _, text in words])
        single = [
            (i, text.lower()) for (i, text), tokens in zip(words, ids, strict=True) if tokens == [i]
        ]
        self._words = [text for _, text in single]
        self._row = {text: row for row, text in reversed(list(enumerate(self._words)))}
        # Normalised once, so that the cosines with all words are one matrix-vector product.
        rows = table[torch.tensor([i for i, _ in single], dtype=torch.long, device=table.device)]
        self._unit = torch.nn.functional.normalize(rows.float(), dim=-1)
        self.count = count
        self._cache: dict[str, tuple[str, ...]] = {}

    def __call__(self, word: str) -> tuple[str, ...]:
        """Return the nearest words, nearest first; () for a word of several tokens."""
        word = word.lower()
        if word not in self._row:
            return ()
        if word not in self._cache:
            cosines = self._unit @ self._unit[self._row[word]]
            most = min(2 * self.count + 2, len(cosines))  # more: words may occur in several cases
            order = cosines.topk(most).indices.tolist()
            nearest = dict.fromkeys(self._words[i] for i in order if self._words[i] != word)
            self._cache[word] = tuple(nearest)[: self.count]
        return self._cache[word]


def candidates_from(
    source: str | Path, model: nn.Module, tokenizer: PreTrainedTokenizerBase
) -> Candidates:
    """Return `NearestRows` of the model if ``source`` is `NEAREST`, otherwise `read_synonyms` of
    the path ``source``.

    Raises:
        DataError: see `read_synonyms`.

    Examples:
        >>> candidates_from("no-such-file", None, None)
        Traceback (most recent call last):
        jachess_ext._io.DataError: no-such-file cannot be read: No such file or directory
    """
    if source == NEAREST:
        return NearestRows(model, tokenizer)
    return read_synonyms(source)


def token_ids(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each word as in the middle of a text, after a blank."""
    if not words:
        return []
    spaced = [f" {word}" for word in words]
    return tokenizer(spaced, add_special_tokens=False)["input_ids"]
