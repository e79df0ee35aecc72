"""Atomic file writes, strict JSON, optional imports, and the errors that a user can fix."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import math
import os
import re
import shutil
import tempfile
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_INTEGER = 2**63  # bound of the integers of torch and numpy
DISTRIBUTIONS = {"sklearn": "scikit-learn"}
"""Module -> name of its distribution, where the two differ."""
TRAINING = ("transformers", "accelerate")
"""Modules that `jachess_ext.training` needs beyond torch and numpy."""
RUN_NEEDS = (
    *("transformers", "accelerate", "safetensors", "scipy", "sklearn", "pandas", "joblib", "tqdm"),
    *("matplotlib", "jinja2"),
)
"""Modules that fine-tuning runs, their tables and their page need beyond torch and numpy."""


class DataError(ValueError):
    """Error for input that cannot be used; the message is a sentence for the user."""


class MissingExtra(ImportError):
    """Error for a library that is not installed; the message has the command that installs it."""


def require(module: str) -> types.ModuleType:
    """Import and return a module.

    Raises:
        MissingExtra: the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if error.name is not None and error.name.split(".")[0] != package:
            raise
        name = DISTRIBUTIONS.get(package, package)
        raise MissingExtra(
            f"{name} is needed for this and not installed: pip install {name}"
        ) from None


def missing(modules: Iterable[str]) -> list[str]:
    """Return the names of the distributions of those modules that are not installed.

    Nothing is imported.
    """
    return [DISTRIBUTIONS.get(name, name) for name in modules if not is_installed(name)]


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # sys.modules[module] is None: an import would fail
        return False


def require_all(user: str, modules: Iterable[str]) -> None:
    """Raise MissingExtra, with one command that installs them all, if modules are not installed.

    Args:
        user: name of the command or module that needs them, for the message.
    """
    if names := missing(modules):
        verb = "is" if len(names) == 1 else "are"
        text = f"{user} needs {', '.join(names)}, which {verb} not installed: pip install"
        raise MissingExtra(f"{text} {' '.join(names)}")


def axes_or_new(ax: Axes | None) -> Axes:
    """Return the matplotlib axes ``ax``, or new ones if it is None."""
    return require("matplotlib.pyplot").figure(figsize=(7, 4.5)).add_subplot() if ax is None else ax


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: on any error the old file stays, and no partial file is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename is atomic within one file system only.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError) and error.errno is not None:
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: object) -> None:
    """Write a value as strict JSON, after `finite`, atomically.

    Raises:
        TypeError: the value cannot be written as JSON; the file is unchanged.
    """
    text = json.dumps(finite(value), indent=1, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def finite(value: object) -> Any:
    """Return a value as plain JSON data: arrays as lists, NaN and infinities as None."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars, torch tensors
        return finite(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Replace a folder atomically: yield an empty folder to fill, and move it to `path` at the end.

    On any error the old folder is unchanged, and no partial folder is left.  The partial folder of
    a killed process is removed by the next call; two processes must not write one folder at a time.
    """
    partial = path.with_name(f".partial-{path.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if path.exists():
            shutil.rmtree(path)
        partial.replace(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_json(path: Path) -> Any:
    """Read a JSON file in UTF-8 as `parse_json` does.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or is not JSON.
    """
    return parse_json(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Read a text file in UTF-8, or in UTF-16 with a byte order mark.

    Raises:
        DataError: the file cannot be read, or has another encoding.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        if error.object[:2] in (b"\xff\xfe", b"\xfe\xff"):
            return path.read_text(encoding="utf-16", errors="replace")
        raise DataError(f"{path} is not UTF-8 text (byte {error.start})") from error


def parse_json(text: str, source: str, *, lenient: bool = False) -> Any:
    """Parse JSON more strictly than `json.loads`, which accepts NaN and repeated names.

    Args:
        source: name of the text, for messages.
        lenient: whether to accept NaN, and line breaks in strings.

    Raises:
        DataError: the text is not JSON, an object has a name twice, or it is nested too deeply.
    """

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is no number there")

    try:
        value = json.loads(
            text,
            object_pairs_hook=_refuse_repeated_names,
            parse_constant=None if lenient else refuse,
            strict=not lenient,
        )
        json.dumps(value, ensure_ascii=False).encode()  # raises ValueError for a lone surrogate
        return value
    except RecursionError:
        raise DataError(f"{source} is nested too deeply") from None
    except ValueError as error:  # also for an integer with thousands of digits
        raise DataError(f"{source} is not JSON ({error})") from error


def _refuse_repeated_names(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the name {shown(repeated[0])} stands twice in one object")
    return dict(pairs)


def from_json(value: Any, hint: Any, place: str) -> Any:
    """Return plain data converted to a type: lists to tuples, objects to dataclasses.

    Args:
        hint: the type: int, float (finite; may be an int), str, bool, None, Any, a union or Literal
            of them, tuple[X, ...], list[X], Mapping[str, X], a dataclass or a TypedDict.
        place: name of the value, for messages.

    Raises:
        DataError: the value has another type, an object has an unknown name or lacks a name, or the
            dataclass raises a ValueError.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (dataclasses.is_dataclass(hint) and isinstance(value, hint)):  # type: ignore[arg-type]
        return value
    if dataclasses.is_dataclass(hint) or typing.is_typeddict(hint):
        return _object_from_json(value, hint, place)
    if origin in (typing.Union, types.UnionType):
        return _union_from_json(value, arguments, place)
    if origin in (tuple, list):
        _expect(isinstance(value, (list, tuple)), value, "a list", place)
        items = [from_json(x, arguments[0], f"{place}[{i}]") for i, x in enumerate(value)]
        return origin(items)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        _expect(isinstance(value, Mapping), value, "an object", place)
        return {k: from_json(x, arguments[1], f"{place}[{k!r}]") for k, x in value.items()}
    if origin is typing.Literal:
        _expect(value in arguments, value, f"one of {', '.join(map(repr, arguments))}", place)
    else:
        _expect(_is_plain(value, hint), value, _WORDS[hint], place)
    return value


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    type(None): "null",
}


def _is_plain(value: Any, hint: Any) -> bool:
    if hint in (int, float) and type(value) is int:
        return abs(value) < _MAX_INTEGER
    if hint is int:
        return False
    return isinstance(value, hint) and (hint is not float or math.isfinite(value))


def _union_from_json(value: object, hints: tuple[object, ...], place: str) -> object:
    faults = []
    for hint in hints:
        try:
            return from_json(value, hint, place)
        except DataError as error:
            faults.append((hint is type(None), error))
    _, fault = min(faults, key=lambda pair: pair[0])  # preferably not "expected null"
    raise DataError(f"{fault} or null" if type(None) in hints else str(fault))


def _object_from_json(value: Any, cls: Any, place: str) -> object:
    _expect(isinstance(value, Mapping), value, "an object", place)
    hints = typing.get_type_hints(cls)
    if unknown := sorted(set(map(str, value)) - set(hints)):
        raise DataError(f"{place} has no setting {shown(unknown[0])}; it has {', '.join(hints)}")
    needed = getattr(cls, "__required_keys__", None)  # of a TypedDict
    if needed is None:
        parameters = inspect.signature(cls).parameters.values()
        needed = {p.name for p in parameters if p.default is p.empty}
    if missing := [name for name in hints if name in needed and name not in value]:
        raise DataError(f"{place} lacks {', '.join(missing)}")
    arguments = {
        name: from_json(item, hints[name], f"{place}'s {name}") for name, item in value.items()
    }
    try:
        return cls(**arguments)
    except ValueError as error:
        raise DataError(str(error)) from error


def _expect(is_valid: bool, value: object, expected: str, place: str) -> None:
    if not is_valid:
        raise DataError(f"{place} is {shown(value)}; expected {expected}")


def shown(value: object) -> str:
    """Return the repr of a value for a message, shortened to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Logger → pattern of the start of messages to suppress: they are about binaries of torchao and
# bitsandbytes for another GPU, Python or torch, which a user cannot change.
_SUPPRESSED = {
    "torchao": r"Failed to load .*\.so|Skipping import of cpp extensions",
    "torch.utils._pytree": r"<enum '\w+'> is an Enum subclass and is now natively supported",
    "bitsandbytes.backends.cpu.ops": r"Failed to load CPU \w+ from kernels-community",
    "bitsandbytes.cextension": r"No prebuilt binary for |The installed version .* without GPU",
}


def quiet_libraries() -> None:
    """Suppress the log messages in `_SUPPRESSED`, without importing the libraries."""
    for name in _SUPPRESSED:
        logging.getLogger(name).addFilter(_message_filter(name))


@functools.cache  # one filter object per logger, which then adds it only once
def _message_filter(name: str) -> Callable[[logging.LogRecord], bool]:
    pattern = re.compile(_SUPPRESSED[name])
    return lambda record: record.levelno > logging.WARNING or not pattern.match(record.getMessage())
