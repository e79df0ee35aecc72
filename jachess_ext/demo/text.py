"""The demo's default task, from real text on every machine: which package is a sentence from?"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path, PurePosixPath

from ..compare.tasks import Examples
from .docstrings import docstrings_of_file, package_root, source_files
from .sentences import NAME, sentences_of

PACKAGES = ("python", "numpy", "scipy", "sklearn", "torch", "transformers")
"""The classes: the standard library (`python`) and what the demo needs anyway."""

_DEV_SHARE = 4  # one file in four is a dev file
_PER_FILE = 10  # sentences at most from one file, so that no large file makes up a class
_FEWEST_WORDS = 10  # below that, a sentence rarely says where it is from
_SHINGLE = 4
_SURPLUS = 1.6  # sentences gathered per sentence wanted: near-duplicates are dropped afterwards


@dataclass(frozen=True)
class Sentences(Examples):
    """Labelled sentences: `texts[i]` has class `labels[i]` and comes from `files[i]`."""

    files: list[str]


@dataclass(frozen=True)
class TextTask:
    """A classification task. No source file serves both splits; classes are balanced in each."""

    classes: tuple[str, ...]
    train: Sentences
    dev: Sentences


def is_dev_file(package: str, path: str) -> bool:
    """Whether a source file belongs to the dev split: decided by its name alone, on any machine."""
    return _digest(f"{package}/{path}") % _DEV_SHARE == 0


def file_sentences(package: str, path: str) -> list[list[str]]:
    """Masked sentences of one source file, one list per docstring, in source order.

    The words of the file's own path (its package and modules) are masked as well.
    """
    root = _installed(package)
    hidden = _path_words(path)
    found = (list(sentences_of(text, hidden)) for text in docstrings_of_file(root / path))
    return [sentences for sentences in found if sentences]


def _installed(package: str) -> Path:
    root = package_root(package)
    if root is None:
        raise ValueError(
            f"package {package!r} is not installed, and the texts are the packages' docstrings: "
            "pip install 'jachess-ext[demo]'"
        )
    return root


def ordered_files(package: str, dev: bool) -> list[str]:
    """Source files of one split of a package, in an order random-like but always the same."""
    root = _installed(package)
    files = [path for path in source_files(root) if is_dev_file(package, path) == dev]
    return sorted(files, key=lambda path: _digest(f"order/{package}/{path}"))


def load_text_task(train_size: int, dev_size: int, packages: Sequence[str] = PACKAGES) -> TextTask:
    """Builds the task from the installed packages' docstrings; the same answer on every call.

    Args:
        train_size: sentences to train on, all classes together.
        dev_size: sentences to judge on, all classes together.
        packages: the classes, at least two installed top-level packages.

    Sentences of which half the four-word runs were seen before are dropped (first in dev, then in
    train), so neither a copied docstring nor a template of one stands on both sides.

    Raises:
        ValueError: a size below the number of classes, a package that is not installed, or one
            with too few sentences.
    """
    if len(packages) < 2 or min(train_size, dev_size) < len(packages):
        raise ValueError(
            f"a task needs two packages and a sentence of each per split; got {len(packages)} "
            f"packages, {train_size} training and {dev_size} dev sentences"
        )
    seen: set[tuple[str, ...]] = set()
    dev = _split(packages, dev_size // len(packages), dev=True, seen=seen)
    train = _split(packages, train_size // len(packages), dev=False, seen=seen)
    return TextTask(tuple(packages), train, dev)


def _split(
    packages: Sequence[str], per_class: int, *, dev: bool, seen: set[tuple[str, ...]]
) -> Sentences:
    """One split, `per_class` of every package; classes take turns, so that no one loses ties."""
    streams = [_gather(package, int(per_class * _SURPLUS) + 50, dev) for package in packages]
    kept: list[list[tuple[str, str]]] = [[] for _ in packages]
    for turn in zip_longest(*streams):
        for label, item in enumerate(turn):
            if item is None or len(kept[label]) == per_class:
                continue
            if _is_new(item[0], seen):
                kept[label].append(item)
    for package, sentences in zip(packages, kept, strict=True):
        if len(sentences) < per_class:
            raise ValueError(
                f"package {package!r} has {len(sentences)} usable sentences, {per_class} are "
                "needed for the split; ask for fewer or leave the package out"
            )
    rows = [(*item, label) for label, items in enumerate(kept) for item in items]
    rows.sort(key=lambda row: _digest(row[0]))
    texts, files, labels = (list(column) for column in zip(*rows, strict=True))
    return Sentences(texts, None, labels, files)


def _gather(package: str, wanted: int, dev: bool) -> list[tuple[str, str]]:
    """Distinct (sentence, file) pairs, at least `wanted` where there are as many."""
    found: dict[str, str] = {}
    for path in ordered_files(package, dev):
        groups = file_sentences(package, path)
        sentences = [text for group in groups for text in group if _is_long(text)]
        for text in sorted(set(sentences), key=_digest)[:_PER_FILE]:
            found.setdefault(text, f"{package}/{path}")
        if len(found) >= wanted:
            break
    return list(found.items())


def _is_long(text: str) -> bool:
    return len(text.replace(NAME, " ").split()) >= _FEWEST_WORDS


def _is_new(text: str, seen: set[tuple[str, ...]]) -> bool:
    """Whether most word runs of `text` are new; if so, they count as seen from now on."""
    runs = set(_shingles(text))
    if not runs or 2 * len(runs & seen) >= len(runs):
        return False
    seen |= runs
    return True


def _shingles(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"[a-z]+", text.replace(NAME, " ").lower())
    return (tuple(words[i : i + _SHINGLE]) for i in range(len(words) - _SHINGLE + 1))


def _path_words(path: str) -> set[str]:
    """Words of a module's path: `models/bert/modeling_bert.py` gives models, bert, modeling."""
    words = re.findall(r"[a-z]+", str(PurePosixPath(path).with_suffix("")).lower())
    return {word for word in words if len(word) > 2}


def _digest(text: str) -> int:
    """A number that depends on the text alone: Python's own `hash` changes from run to run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
