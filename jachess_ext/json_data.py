"""JSON that a user's file holds: parsed as data, its values checked against type hints.

Standard `json` is kinder than a reader of settings may be: of two equal names the last one wins in
silence, NaN passes, and deep nesting ends in a RecursionError.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LARGEST = 2**63  # what torch and numpy hold as an integer


class BadJSON(ValueError):
    """What is wrong: of a text, a sentence without its subject; of a value, a whole one."""


def read_json(path: Path) -> Any:
    """What a file holds; UTF-8, with or without a byte-order mark.

    Raises:
        BadJSON: it cannot be read, is not UTF-8, or as `parse_json`.
    """
    try:
        return parse_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise BadJSON(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadJSON(f"is not UTF-8 text (byte {error.start})") from error


def parse_json(text: str, *, constants: bool = False, strict: bool = True) -> Any:
    """What a text holds.

    Args:
        constants: whether NaN and the infinities, which Python writes, are numbers.
        strict: False allows raw control characters, line breaks among them, within strings.

    Raises:
        BadJSON: it is not JSON, has a name twice in an object, half of a surrogate pair, or is
            nested too deeply.
    """

    def refused(name: str) -> float:
        raise BadJSON(f"is not JSON ({name} is no number there)")

    try:
        value = json.loads(
            text,
            object_pairs_hook=_once_each,
            parse_constant=None if constants else refused,
            strict=strict,
        )
    except BadJSON:
        raise
    except RecursionError:
        raise BadJSON("is nested too deeply") from None
    except ValueError as error:  # also of an integer with thousands of digits
        raise BadJSON(f"is not JSON ({error})") from error
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise BadJSON("holds half of a surrogate pair, which no text can have") from None
    return value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadJSON(f"has the name {shown(twice)} twice in one object")
    return found


def check(value: Any, hint: Any, place: str) -> None:
    """Whether plain data is what a type hint says.

    Args:
        hint: int, float (finite; an int will do), str, bool, None, Any, a union or Literal of
            them, tuple[X, ...] or list[X] (JSON has lists alone), Mapping[str, X], a dataclass (as
            itself or as an object with its fields, none of them required), or a TypedDict.
        place: names the value in the sentence.

    Raises:
        BadJSON: it is not; or an object has a name that the hint does not know.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (dataclasses.is_dataclass(hint) and isinstance(value, hint)):  # type: ignore[arg-type]
        return
    if dataclasses.is_dataclass(hint):
        _check_fields(value, typing.get_type_hints(hint), frozenset(), place)
    elif typing.is_typeddict(hint):
        _check_fields(value, typing.get_type_hints(hint), hint.__required_keys__, place)
    elif origin in (typing.Union, types.UnionType):
        _check_union(value, arguments, place)
    elif origin in (tuple, list):
        _expect(isinstance(value, (list, tuple)), value, "a list", place)
        for number, item in enumerate(value):
            check(item, arguments[0], f"{place}[{number}]")
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        _expect(isinstance(value, Mapping), value, "an object", place)
        for name, item in value.items():
            check(item, arguments[1], f"{place}[{name!r}]")
    elif origin is typing.Literal:
        _expect(value in arguments, value, f"one of {', '.join(map(repr, arguments))}", place)
    else:
        _expect(_is(value, hint), value, _WORDS[hint], place)


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    type(None): "null",
}


def _is(value: Any, kind: Any) -> bool:
    if kind is int:
        return type(value) is int and abs(value) < _LARGEST
    if kind is float:
        if type(value) is int:
            return abs(value) < _LARGEST
        return isinstance(value, float) and math.isfinite(value)
    return isinstance(value, kind)


def _check_union(value: Any, hints: tuple[Any, ...], place: str) -> None:
    faults = []
    for hint in hints:
        try:
            check(value, hint, place)
        except BadJSON as error:
            faults.append((hint is type(None), error))
        else:
            return
    _, fault = min(faults, key=lambda pair: pair[0])  # says more than "expected null"
    raise BadJSON(f"{fault} or null" if type(None) in hints else str(fault))


def _check_fields(value: Any, hints: dict[str, Any], needed: frozenset[str], place: str) -> None:
    _expect(isinstance(value, Mapping), value, "an object", place)
    unknown = sorted(set(map(str, value)) - set(hints))
    if unknown:
        raise BadJSON(f"{place} has no setting {shown(unknown[0])}; it has {', '.join(hints)}")
    missing = sorted(needed - set(value))
    if missing:
        raise BadJSON(f"{place} lacks {missing}")
    for name, item in value.items():
        check(item, hints[name], f"{place}'s {name}")


def _expect(well: bool, value: Any, words: str, place: str) -> None:
    if not well:
        raise BadJSON(f"{place} is {shown(value)}; expected {words}")


def shown(value: object) -> str:
    """A value as it stands in a sentence, at most 60 characters of it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
