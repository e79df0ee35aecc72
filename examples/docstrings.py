"""Writes the sentences of the demo's task: masked docstrings of installed packages.

    python -m examples.docstrings       # jachess_ext/lab/demo/assets/docstrings/{train,dev}.jsonl

The packages' versions decide what is found; those that the demo's sentences are from stand in
`jachess_ext/lab/demo/assets/docstrings/README.md`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import chain, groupby
from pathlib import Path

from jachess_ext._io import DataError, write_text
from jachess_ext.lab.demo import PACKAGES, SENTENCES

NAME = "[NAME]"
"""The mask for names and identifiers in a sentence."""

Sentences = dict[str, str]
"""Class by text."""

_LEFT_OUT = {
    *("test", "tests", "testing", "site-packages", "dist-packages", "idlelib", "lib2to3"),
    *("turtledemo", "_vendor", "vendor", "_bundled", "externals", "include", "__pycache__"),
}
_PACKAGE_WORDS = {  # words that give a package away
    *("python", "cpython", "pythonic", "numpy", "np", "scipy", "scikit", "scikits", "sklearn"),
    *("torch", "pytorch", "libtorch", "facebook", "transformers", "tokenizers", "huggingface"),
    *("hugging", "face", "google", "matplotlib", "mpl", "plt", "pyplot", "pandas", "tensorflow"),
}
_NO_PROSE = re.compile(  # blank, or a directive, prompt, field, item, comment, cell or underline
    r"\s*(\.\. |>>> |\.\.\. |\$ |:[a-z]+[^:]*:( |$)|[-*+] |\d+[.)] |[@#|]|$|([^\w\s])\3{2,}\s*$)"
)
_NAME_OR_WORD = re.compile(
    r"(:[\w:+-]+:`[^`]*`|``[^`]*``|`[^`]*`_{0,2}|\$[^$]*\$|\*{1,2}[^*\s][^*]*\*{1,2}"  # markup
    r"""|(?<!\w)"[^"]*"|(?<!\w)'[^']*'(?!\w)|\[[^\]]*\]_?|https?://\S+"""  # quotations, citations
    r"|[A-Za-z_][\w.]*\([^()]*\)"  # calls
    r"|[\w.]*(?:[\d_]|[a-zA-Z][A-Z]|\w\.\w)(?:[\w.]*\w)?)"  # identifiers, numbers
    r"|[A-Za-z]+"
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z]|\[NAME\])")
_PROSE = re.compile(r"[A-Z\[]([A-Za-z'-]|\[NAME\])*([ ,;:()]+([A-Za-z'-]|\[NAME\])+)*\)?\.")
_MOST_OF_A_FILE = 10  # sentences, so that no large file makes up a class


def source_files(package: str) -> list[str]:
    """Return the paths of a package's sources below `root_of` it, sorted; tests are left out."""
    root, paths = root_of(package), []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        relative = Path(folder).relative_to(root)
        paths += [(relative / name).as_posix() for name in files if name.endswith(".py")]
    return sorted(path for path in paths if not Path(path).name.startswith("test_"))


def root_of(package: str) -> Path:
    """Return a package's folder, of ``python`` the standard library's; nothing is imported.

    Raises:
        DataError: It is not installed.
    """
    if package == "python":
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"package {package!r} is not installed, and the texts are the packages' docstrings: "
            "pip install '.[demo]'"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def is_dev_file(package: str, path: str) -> bool:
    """Return whether a source file is for judging, which its name decides on any machine."""
    return _digest(f"{package}/{path}") % 4 == 0


def file_sentences(package: str, path: str) -> list[list[str]]:
    """Return the masked English sentences of each docstring of a source file.

    Masked are code, identifiers, and the words of package names and of the file's own path.
    """
    hidden = {word for word in re.findall(r"[a-z]+", path[:-3].lower()) if len(word) > 2}
    groups = [
        [
            sentence
            for paragraph in _paragraphs(docstring)
            for sentence in _SENTENCE_END.split(_masked(paragraph, _PACKAGE_WORDS | hidden))
            if _is_prose(sentence)
        ]
        for docstring in _docstrings(root_of(package) / path)
    ]
    return [group for group in groups if group]


def docstring_task(train_size: int = 1200, dev_size: int = 480) -> tuple[Sentences, Sentences]:
    """Return the training and dev sentences with their packages; the same on every call.

    Classes are balanced, and no source file has sentences in both parts.  Sentences half of whose
    four-word runs were seen before are left out, so that no copied docstring is in both parts.

    Args:
        train_size, dev_size: Sentences, rounded down to a multiple of the number of packages.

    Raises:
        DataError: A package is not installed or has too few sentences.
    """
    seen: set[str] = set()

    def part(per_class: int, dev: bool) -> Sentences:
        found: Sentences = {}
        left = dict.fromkeys(PACKAGES, per_class)
        streams = {package: _long_sentences(package, dev) for package in PACKAGES}
        while any(left.values()):
            for package in (package for package, count in left.items() if count):
                text = next(streams[package], None)
                if text is None:
                    raise DataError(
                        f"package {package!r} has {per_class - left[package]} sentences to use, "
                        f"and {per_class} are needed; ask for fewer"
                    )
                if _is_new(text, seen):
                    found[text] = package
                    left[package] -= 1
        return {text: found[text] for text in sorted(found, key=_digest)}

    dev = part(dev_size // len(PACKAGES), True)
    return part(train_size // len(PACKAGES), False), dev


def _docstrings(path: Path) -> list[str]:
    """Return the docstrings of a file; none where it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, documented)]


def _paragraphs(docstring: str) -> Iterator[str]:
    """Yield paragraphs: consecutive lines of prose of the same indentation."""

    def indentation(line: str) -> int | None:
        return None if _NO_PROSE.match(line) else len(line) - len(line.lstrip())

    for depth, lines in groupby(docstring.splitlines(), indentation):
        if depth is not None:
            yield " ".join(line.strip() for line in lines)


def _masked(text: str, hidden: set[str]) -> str:
    """Return a text with `NAME` for names and words of `hidden`, and for runs of them."""

    def masked(match: re.Match[str]) -> str:
        word = match[0].lower()
        return NAME if match[1] or hidden & {word, word.removesuffix("s")} else match[0]

    name = re.escape(NAME)
    text = re.sub(rf"[\w-]*{name}[\w'’-]*", NAME, _NAME_OR_WORD.sub(masked, text))
    return re.sub(rf"{name}(?:[\s,-]+{name})+", NAME, text)


def _is_prose(sentence: str) -> bool:
    """Return whether a sentence is 6 to 40 words and no more than a quarter of them names."""
    words = sentence.split()
    few = 4 * sentence.count(NAME) <= len(words)
    return 6 <= len(words) <= 40 and few and bool(_PROSE.fullmatch(sentence))


def _long_sentences(package: str, dev: bool) -> Iterator[str]:
    """Yield a package's sentences of ten words or more in a fixed order, for one part.

    A shorter sentence rarely tells its package.
    """
    files = [path for path in source_files(package) if is_dev_file(package, path) == dev]
    for path in sorted(files, key=lambda path: _digest(f"order/{package}/{path}")):
        texts = set(chain.from_iterable(file_sentences(package, path)))
        long = [text for text in texts if len(text.replace(NAME, " ").split()) >= 10]
        yield from sorted(long, key=_digest)[:_MOST_OF_A_FILE]


def _is_new(text: str, seen: set[str]) -> bool:
    """Return whether most four-word runs of a text are new; if so, add them to `seen`."""
    words = re.findall(r"[a-z]+", text.replace(NAME, " ").lower())
    runs = {" ".join(words[i : i + 4]) for i in range(len(words) - 3)}
    if 2 * len(runs & seen) >= len(runs):
        return False
    seen |= runs
    return True


def _digest(text: str) -> int:
    """Return a number that depends on the text alone; `hash` differs from run to run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def main() -> None:
    """Write both parts."""
    for name, part in zip(("train", "dev"), docstring_task(), strict=True):
        rows = (json.dumps({"text": text, "label": label}) for text, label in part.items())
        write_text(SENTENCES / f"{name}.jsonl", "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
