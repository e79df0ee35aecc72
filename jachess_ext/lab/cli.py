"""The command line `jachess`; a user's error gives one sentence on stderr and exit code 2."""

from __future__ import annotations

import argparse
import functools
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple, TextIO
from zipfile import BadZipFile

from .. import __version__
from .._io import RUN_NEEDS, DataError, quiet_libraries, require_all


class Command(NamedTuple):
    """A command of `jachess`.

    Attributes:
        function: "module:function" within this package, imported when the command is run.  Its
            signature and docstring define the options; it returns the exit code, or None for 0.
        summary: one line for the help.
        needs: modules that the command needs, besides torch and numpy.
        option_needs: option -> further modules that it needs; options with more modules first.
        errors: types of errors that the user can fix, besides those of every command.
    """

    function: str
    summary: str
    needs: tuple[str, ...] = ()
    option_needs: Mapping[str, tuple[str, ...]] = {}
    errors: tuple[type[Exception], ...] = ()


COMMANDS = {
    "demo": Command(
        "demo:demo",
        "derivatives where torch refuses, then methods compared on real text",
        ("tyro", *RUN_NEEDS),
        errors=(FloatingPointError,),
    ),
    "finetune": Command(
        "commands.finetune:finetune",
        "compare methods over tasks and seeds; goes on where it was stopped",
        ("tyro", *RUN_NEEDS),
    ),
    "evaluate": Command(
        "commands.finetune:evaluate",
        "draw a comparison's tables and report again",
        ("tyro", "scipy", "pandas", "matplotlib", "jinja2"),
    ),
    "select": Command(
        "commands.select:select",
        "which model to fine-tune, from a table of losses on small subsets",
        ("scipy",),
        {"report": ("pandas", "matplotlib", "jinja2"), "out": ("pandas",)},
        (ValueError, re.error, BadZipFile),
    ),
    "select-live": Command(
        "commands.select_live:select_live",
        "which model to fine-tune, by fine-tuning the candidates on small subsets",
        ("tyro", *RUN_NEEDS),
        errors=(ValueError,),
    ),
    "doctor": Command("doctor:main", "what was built, for what, what is missing, how to fix it"),
}


def modules_needed() -> dict[str, tuple[str, ...]]:
    """Return a dict of the modules that each command needs: command -> modules.

    An option that needs further modules has an entry of its own, such as "jachess select --report".
    """
    return {
        " --".join(["jachess " + name, *option]): (*command.needs, *modules)
        for name, command in COMMANDS.items()
        for option, modules in [((), ()), *(((o,), m) for o, m in command.option_needs.items())]
    }


class _Output:
    """A stream that discards its text once the reading process (such as `head`) has ended.

    A command thus finishes its work, and writes its files.  Characters that the stream's encoding
    lacks are written as escapes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _call_unless_broken(self, method: Callable[..., object], *args: object) -> None:
        try:
            method(*args)
        except BrokenPipeError:  # flushing the buffer would raise it again, also at Python's exit
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self._stream.fileno())
            os.close(devnull)

    def write(self, text: str) -> None:
        self._call_unless_broken(self._stream.write, text)

    def flush(self) -> None:
        self._call_unless_broken(self._stream.flush)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 for success, 2 for input that cannot be used.

    Raises:
        SystemExit: the options are invalid (code 2), or the help was requested (code 0).
    """
    out, err = _Output(sys.stdout), _Output(sys.stderr)
    try:
        with redirect_stdout(out), redirect_stderr(err):  # type: ignore[type-var]
            return _run(sys.argv[1:] if arguments is None else arguments)
    finally:
        out.flush()
        err.flush()


def _run(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="jachess",
        description="First and second derivatives through unmodified PyTorch models, and what is "
        "built on them:\nsmoothness, penalties, neural tangent kernels, choosing a model.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<12} {command.summary}" for name, command in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jachess_ext {__version__}")
    parser.add_argument("command", metavar="command", help="see below")
    name = parser.parse_args(words[:1]).command
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        parser.error(f"there is no command {name!r}; {hint}")
    quiet_libraries()
    try:
        return _parsed(name, words[1:])() or 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        user_errors = (DataError, ImportError, OSError, *COMMANDS[name].errors)
        if not isinstance(error, user_errors):
            from ..jet import MissingJetRule  # imports torch, which help and `select` do not

            if not isinstance(error, MissingJetRule):
                raise
        print(f"jachess {name}: {str(error).removeprefix(f'jachess {name} ')}", file=sys.stderr)
        return 2


def _parsed(name: str, words: Sequence[str]) -> functools.partial[int | None]:
    """Parse a command's options; return its function with the options bound.

    Raises:
        SystemExit: the options are invalid, or the help was requested.
        MissingExtra: a module that the command or an option needs is not installed.
    """
    command, user = COMMANDS[name], f"jachess {name}"
    if name == "doctor":  # needs torch and numpy only
        argparse.ArgumentParser(user, description=command.summary).parse_args(words)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the report itself has this warning
            bound = functools.partial(import_module("..doctor", __package__).main, modules_needed())
    elif name == "select":  # without tyro, so that it works in the smallest installation
        bound = import_module(f"{__package__}.commands.select").parsed(words)
    else:
        bound = _parsed_by_tyro(name, words)
    user += next((f" --{o}" for o in command.option_needs if bound.keywords.get(o)), "")
    require_all(user, modules_needed()[user])  # after the help
    return bound


def _parsed_by_tyro(name: str, words: Sequence[str]) -> functools.partial[int | None]:
    """Parse a command's options, which tyro derives from the signature of the command's function;
    return the function with these options bound."""
    command = COMMANDS[name]
    try:
        import tyro
    except ModuleNotFoundError:  # without it there is no help either
        require_all(f"jachess {name}", command.needs)
        raise
    module, _, attribute = command.function.partition(":")
    function = getattr(import_module(f"{__package__}.{module}"), attribute)

    # tyro calls this wrapper, not the function, since it reports errors as those of the options.
    @functools.wraps(function)
    def bind(*arguments: object, **options: object) -> functools.partial[int | None]:
        return functools.partial(function, *arguments, **options)

    with_defaults: Callable[..., functools.partial[int | None]] = bind
    if name == "finetune":
        from .commands.finetune import with_grid_file

        with_defaults, words = with_grid_file(bind, words)
    return tyro.cli(with_defaults, prog=f"jachess {name}", args=words)
