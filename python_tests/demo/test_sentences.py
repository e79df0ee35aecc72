"""Cleaning and masking of docstrings, case by case."""

from __future__ import annotations

from pathlib import Path

import pytest

from jachess_ext.demo.docstrings import docstrings_of_file, package_root, source_files
from jachess_ext.demo.sentences import NAME, is_prose, sentences_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The value of `alpha` is used for all of the rows.", f"The value of {NAME} is used"),
        ("The my_value is used for all of the rows.", f"The {NAME} is used"),
        ("The np.array is used for all of the rows.", f"The {NAME} is used"),
        ("The DataFrame is used for all of the rows.", f"The {NAME} is used"),
        ("The GPU is used for all of the rows.", f"The {NAME} is used"),
        ("The value 3 is used for all of the rows.", f"The value {NAME} is used"),
        ("The call foo(x, y=2) is used for all of the rows.", f"The call {NAME} is used"),
        ("The NumPy library is used for all of the rows.", f"The {NAME} library is used"),
        ("The numpy's library is used for all of the rows.", f"The {NAME} library is used"),
        ("The torch-like library is used for all of the rows.", f"The {NAME} library is used"),
        ("The :class:`~a.B` object is used for all of the rows.", f"The {NAME} object is used"),
        ('The "mean" mode is used for all of the rows.', f"The {NAME} mode is used"),
        ("The $x^2$ term is used for all of the rows.", f"The {NAME} term is used"),
        ("The page [1]_ is used for all of the rows.", f"The page {NAME} is used"),
        ("The a.b, c_d and e1 are used for all of the rows.", f"The {NAME} and {NAME} are used"),
    ],
)
def test_names_are_masked(text: str, expected: str) -> None:
    (sentence,) = sentences_of(text)
    assert sentence == f"{expected} for all of the rows."


def test_hidden_words_are_masked_too() -> None:
    text = "The signals of the signal package are filtered as is the rest."
    (sentence,) = sentences_of(text, hidden={"signal"})
    assert sentence == f"The {NAME} of the {NAME} package are filtered as is the rest."


def test_code_headings_lists_and_examples_are_left_out() -> None:
    text = """Return the sum of all the values in it.

Parameters
----------
x : array of the values that are to be summed here.
    The values that are to be added to one another.

>>> The line below the prompt is not for the reader.
- An item of a list that is not for the reader.

The code below is an example of how it is used::

    The body of it is not meant to be read as prose.

.. note:: The directive of the text is not for the reader.
    Its body is left out as well, since it is one.

This is what comes after all of that code.
"""
    assert list(sentences_of(text)) == [
        "Return the sum of all the values in it.",
        "The values that are to be added to one another.",
        "This is what comes after all of that code.",
    ]


def test_sentences_are_split_and_joined_over_lines() -> None:
    text = (
        "This is the first of the two, vs. The\nother one that it is. This is the last of the two."
    )
    first, second = sentences_of(text)
    assert first == "This is the first of the two, vs. The other one that it is."
    assert second == "This is the last of the two."


@pytest.mark.parametrize(
    "text",
    [
        "Too short it is.",
        "no capital letter at the start of this one here.",
        "No full stop at the end of this one here",
        "Matrix Tensor Vector Scalar Column Row Shape Size.",
        f"The {NAME} of {NAME} in {NAME} or {NAME} is.",
        "The result x = y is for all of the rows.",
        "The naïve result is for all of the rows.",
        "Many " * 41 + "of the.",
    ],
)
def test_what_is_no_prose(text: str) -> None:
    assert not is_prose(text)


def test_docstrings_come_from_the_source_without_importing_it(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""Of the module."""\nraise SystemExit\n'
        'class A:\n    """Of the class.\n\n    Indented."""\n'
        '    async def f(self):\n        """Of the method."""\n'
        'x = """no docstring"""\nadd_docstr(torch.abs, r"""Of a C function.""")\n'
    )
    assert docstrings_of_file(path) == [
        "Of the module.",
        "Of the class.\n\nIndented.",
        "Of the method.",
        "Of a C function.",
    ]
    path.write_text("def broken(:\n")
    assert docstrings_of_file(path) == []
    assert docstrings_of_file(tmp_path / "missing.py") == []


def test_sources_are_found_in_order_and_without_tests() -> None:
    root = package_root("numpy")
    assert root is not None
    files = source_files(root)
    assert files == sorted(files) and "linalg/_linalg.py" in files
    assert not any("/tests/" in f"/{path}" for path in files)
    assert package_root("no_such_package_here") is None
