"""Faults that were found and mended, each of which can be put back to see which tests notice."""

from dataclasses import dataclass

PROGRAMS = "python_tests/programs/test_programs.py -m 'not slow'"
"""The test of random programs."""


@dataclass(frozen=True)
class Edit:
    """Replace ``mended``, which occurs once in ``file``, by ``faulty``."""

    file: str
    mended: str
    faulty: str


@dataclass(frozen=True)
class Fault:
    """A fault that was mended, how to put it back, and the tests that have to notice.

    Attributes:
        name: short and unique, such as ``"strides: flatten of a transposed result"``.
        edits: put the fault back.
        tests: arguments of pytest, each of which has to fail: files, ``file::test``, or
            ``"file -k expression"``.
    """

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
