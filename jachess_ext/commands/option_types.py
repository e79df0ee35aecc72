"""Types that argparse calls with an option's text; and which options are a dataclass's fields."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any


def checked(kind: Callable[[str], Any], good: Callable[[Any], bool], wanted: str) -> Any:
    """A type: `kind` of the text where that is `good`, else an error that says what was wanted."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not good(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return convert


def ending_in(*endings: str) -> Any:
    """The type of a path with one of these endings."""
    wanted = f"a file name that ends in {' or '.join(endings)}"
    return checked(Path, lambda path: path.suffix in endings, wanted)


out_path = ending_in(".csv", ".json")
"""The type of the option --out of commands that write records."""
whole = checked(int, lambda value: value >= 1, "a whole number of at least 1")
positive = checked(float, lambda value: 0 < value < float("inf"), "a positive number")
probability = checked(float, lambda value: 0 < value < 1, "between 0 and 1")


def fields_in(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that are fields of a dataclass; several values of one as a tuple."""
    given = {field.name: options[field.name] for field in fields(kind) if field.name in options}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
