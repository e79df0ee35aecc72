"""`jachess …`: the command line. A user's error is one sentence on stderr and exit code 2."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from ._io import DataError, quiet_libraries, require


class _Command(NamedTuple):
    """A command of `jachess`.

    Attributes:
        function: "module:function" below this package, imported when the command is given; its
            signature and docstring are the options, and what it returns the exit code, None for 0.
        summary: For the help.
        errors: What the user can fix beside those of every command, in one sentence.
    """

    function: str
    summary: str
    errors: tuple[type[Exception], ...] = ()


_COMMANDS = {
    "demo": _Command(
        "demo:demo",
        "derivatives where torch refuses, then methods compared on real text",
        (FloatingPointError,),
    ),
    "finetune": _Command(
        "commands.finetune:finetune",
        "compare methods over tasks and seeds; goes on where it was stopped",
    ),
    "evaluate": _Command(
        "commands.finetune:evaluate",
        "draw a comparison's tables and report again, or judge a fine-tuned model",
    ),
    "ntk": _Command(
        "commands.ntk:ntk",
        "the neural tangent kernel of a model on a file of texts",
        (TypeError, ValueError, RuntimeError),
    ),
    "select": _Command(
        "commands.select:select",
        "which model to fine-tune, from a table of losses on small subsets",
        (ValueError,),
    ),
    "select-live": _Command(
        "commands.select:select_live",
        "which model to fine-tune, by fine-tuning the candidates on small subsets",
        (ValueError,),
    ),
    "doctor": _Command("doctor:main", "what was built, for what, what is missing, how to fix it"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 done, 2 the input cannot be used.

    Raises:
        SystemExit: The options are wrong, with code 2, or help was asked for, with code 0.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="jachess",
        description="Jacobian and Hessian regularisation for transformers.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<12} {command.summary}" for name, command in _COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=_COMMANDS, metavar="command", help="see below")
    name = parser.parse_args(given[:1]).command
    quiet_libraries()
    try:
        return _parsed(name, given[1:])() or 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        from .jet import MissingJetRule  # imports torch, which help does not

        users = (DataError, ImportError, MissingJetRule, OSError, *_COMMANDS[name].errors)
        if not isinstance(error, users):
            raise
        print(f"jachess {name}: {error}", file=sys.stderr)
        return 2


def _parsed(name: str, given: Sequence[str]) -> Callable[[], int | None]:
    """Return the call of a command with the options given."""
    module, _, attribute = _COMMANDS[name].function.partition(":")
    if name == "doctor":  # runs where torch and numpy alone are installed
        summary = _COMMANDS[name].summary
        argparse.ArgumentParser(f"jachess {name}", description=summary).parse_args(given)
    else:
        tyro = require("tyro", extra="hf")
    function = getattr(import_module(f"{__package__}.{module}"), attribute)
    if name == "doctor":
        return function  # type: ignore[no-any-return]

    @functools.wraps(function)  # not called here: what it raises is no error of the options
    def call(*arguments: Any, **options: Any) -> Callable[[], int | None]:
        return functools.partial(function, *arguments, **options)

    with_defaults: Callable[..., Any] = call
    if name in ("finetune", "evaluate"):
        from .commands.finetune import with_grid_file

        with_defaults, given = with_grid_file(call, given)
    return tyro.cli(with_defaults, prog=f"jachess {name}", args=given)  # type: ignore[no-any-return]
