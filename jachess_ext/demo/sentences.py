"""From a docstring to clean English sentences in which names and identifiers are masked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

NAME = "[NAME]"
"""What stands in a sentence where a name or identifier was."""

_PACKAGES = """
accelerate cpython datasets facebook fftpack google hugging huggingface keras libtorch matplotlib
microsoft mpl networkx np numpy openai pandas pip pillow plt pypi pyplot python pythonic pytorch
scikit scikits scipy sklearn sympy tensorflow tokenizers torch transformers
"""
PACKAGE_WORDS = frozenset(_PACKAGES.split())
"""Words masked wherever they stand, in lower case: they name a package, or as good as name one."""

_MINIMUM_WORDS, _MAXIMUM_WORDS = 6, 40
_MAXIMUM_MASKED = 0.25
_MINIMUM_FUNCTION_WORDS = 0.15
_COMMON = """
a an and any are as at be been but by can each for from has have if in into is it its may more must
no not of on only or other same should so some such than that the their then there these they this
those to used was were when where which will with without you your
"""
_FUNCTION_WORDS = frozenset(_COMMON.split())
_DIRECTIVE = re.compile(r"^\s*(\.\. |>>> |\.\.\. |\$ |:[a-z]+[^:]*:( |$)|[-*+] |\d+[.)] |@|#|\|)")
_UNDERLINE = re.compile(r"^\s*([=\-~^\"'`*+#_])\1{2,}\s*$")
_BOUNDARY = re.compile(r"(?<=[.!?])\s+(?=[A-Z]|\[NAME\])")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|resp|approx|Fig|Eq|Ref|No|al)\.\s*$")
_MARKUP = re.compile(
    r"""
      :[\w:+-]+:`[^`]*`                    # :func:`...`
    | ``[^`]*`` | `[^`]*`_{0,2}            # code
    | \$[^$]*\$                            # TeX
    | \*{1,2}[^*\s][^*]*\*{1,2}            # emphasis, mostly of parameters
    | (?<!\w)"[^"]*" | (?<!\w)'[^']*'(?!\w)  # quotations, mostly of values
    | \[[^\]]*\]_?                         # citations, indices
    | [A-Za-z_][\w.]*\([^()]*\)            # calls
    | https?://\S+
    """,
    re.VERBOSE,
)
_WORD = re.compile(r"[A-Za-z]+(?:['’][a-z]+)?(?:-[A-Za-z]+)*$")
_EDGES = re.compile(r"^([(\[{\"']*)(.*?)([)\]}\"',;:.!?]*)$")


def sentences_of(docstring: str, hidden: Iterable[str] = ()) -> Iterator[str]:
    """Masked English sentences of one dedented docstring, in order.

    Args:
        docstring: text as `docstrings_of_file` returns it.
        hidden: further words to mask, lower case (the names in the module's own path).
    """
    hidden_words = PACKAGE_WORDS | frozenset(hidden)
    for paragraph in _paragraphs(docstring):
        for sentence in _split(_MARKUP.sub(f" {NAME} ", paragraph)):
            masked = _mask(sentence, hidden_words)
            if is_prose(masked):
                yield masked


def is_prose(sentence: str) -> bool:
    """Whether a masked sentence reads as English prose: its length, words, and function words."""
    if not sentence.isascii() or not sentence[:1].isupper() or not sentence.endswith("."):
        return False
    if re.search(r"[=<>{}\\|@#/~^_]", sentence):
        return False
    words = [word.strip("(),;:.!?\"'") for word in sentence.replace(NAME, "NAME").split()]
    if not _MINIMUM_WORDS <= len(words) <= _MAXIMUM_WORDS:
        return False
    masked = sum(word == "NAME" for word in words)
    common = sum(word.lower() in _FUNCTION_WORDS for word in words)
    return (
        masked <= _MAXIMUM_MASKED * len(words)
        and common >= _MINIMUM_FUNCTION_WORDS * len(words)
        and all(_WORD.match(word) for word in words)
    )


def _paragraphs(docstring: str) -> Iterator[str]:
    """Runs of lines of equal indentation, without examples, directives, headings and code."""
    block: list[str] = []
    indent, code_below = 0, -1
    for line in [*docstring.splitlines(), ""]:
        text = line.strip()
        depth = len(line) - len(line.lstrip())
        if text and code_below >= 0:
            if depth > code_below:
                continue
            code_below = -1
        if not text or depth != indent or _DIRECTIVE.match(line) or _UNDERLINE.match(line):
            if block:
                yield " ".join(block)
            block = []
        if text.endswith("::") or text.startswith(".. "):
            code_below = depth
        indent = depth
        if text and not _DIRECTIVE.match(line) and not _UNDERLINE.match(line):
            block.append(text)


def _split(paragraph: str) -> Iterator[str]:
    """Sentences of a paragraph; a full stop after a common abbreviation ends none."""
    held = ""
    for part in _BOUNDARY.split(paragraph):
        held = f"{held} {part}".strip()
        if not _ABBREVIATION.search(held):
            yield held
            held = ""
    if held:
        yield held


def _mask(sentence: str, hidden: frozenset[str]) -> str:
    """Replaces names by `NAME`, runs of them by one, and tidies the spaces."""
    words = [_mask_word(word, hidden) for word in sentence.split()]
    text = re.sub(r"\s+([,;:.!?)])", r"\1", " ".join(words))
    text = re.sub(rf"({re.escape(NAME)})(?:[\s,-]+{re.escape(NAME)})+", r"\1", text)
    return text.strip()


def _mask_word(word: str, hidden: frozenset[str]) -> str:
    match = _EDGES.match(word)
    if match is None or NAME in word:
        return re.sub(rf"\S*{re.escape(NAME)}[\w'’-]*", NAME, word)
    before, core, after = match.groups()
    if not core or not _is_name(core, hidden):
        return word
    return f"{before}{NAME}{after}"


def _is_name(core: str, hidden: frozenset[str]) -> bool:
    """Identifiers by their spelling (`_`, `.`, digits, inner capitals) and the `hidden` words."""
    if re.search(r"[_\d.()\[\]*%&+]", core) or re.search(r"[a-zA-Z][A-Z]", core):
        return True
    parts = re.split(r"[-'’]", core.lower())
    return any(part in hidden or part.rstrip("s") in hidden for part in parts)
