"""`jachess …`: the command line. A user's error is one sentence on stderr and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ._io import quiet_libraries


@dataclass(frozen=True)
class _Command:
    """A command: its functions as "module:function" below this package, imported when it is given.

    Attributes:
        run: what it does with the parsed options; returns the exit code, None for 0.
        options: adds its options to a parser; None: it has none.
        summary: for the help.
        errors: what the user can fix beside `_user_errors`, in one sentence.
    """

    run: str
    options: str | None
    summary: str
    errors: tuple[type[Exception], ...] = ()


_COMMANDS = {
    "demo": _Command(
        "demo:show",
        "demo:add_options",
        "fine-tune on real text with and without JacHess",
        (FloatingPointError,),
    ),
    "ntk": _Command(
        "commands.ntk:run",
        "commands.ntk_arguments:add_options",
        "the neural tangent kernel of a model on a file of texts",
        (TypeError, ValueError, RuntimeError),
    ),
    "select": _Command(
        "commands.select:run",
        "commands.select:add_options",
        "which model to fine-tune, from a table of losses on small subsets",
        (ImportError, OSError, ValueError),
    ),
    "select-live": _Command(
        "commands.select_live:run",
        "commands.select_live:add_options",
        "which model to fine-tune, by fine-tuning the candidates on small subsets",
        (ImportError, OSError, ValueError),
    ),
    "finetune": _Command(
        "commands.finetune:finetune",
        "commands.finetune:add_finetune_options",
        "compare methods over tasks and seeds; goes on where it was stopped",
        (ImportError,),
    ),
    "evaluate": _Command(
        "commands.finetune:evaluate",
        "commands.finetune:add_evaluate_options",
        "draw a comparison's tables and report again, or judge a fine-tuned model",
        (ImportError,),
    ),
    "doctor": _Command(
        "doctor:main", None, "what was built, for what, what is missing, how to fix it"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code (0 done, 2 the input cannot be used)."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = _parser(given).parse_args(given)
        quiet_libraries()
        command = _COMMANDS[options.command]
        run = _function(command.run)
    except ImportError as error:  # a library that the command needs
        print(f"jachess {given[0]}: {error}", file=sys.stderr)
        return 2
    try:
        return run(options) or 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (*command.errors, *_user_errors()) as error:
        print(f"jachess {options.command}: {error}", file=sys.stderr)
        return 2


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """Options of the command given alone: others may need libraries that are not installed."""
    parser = argparse.ArgumentParser(
        prog="jachess", description="Jacobian and Hessian regularisation for transformers."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in _COMMANDS.items():
        added = commands.add_parser(name, help=command.summary, description=command.summary)
        if name in given[:1] and command.options is not None:
            _function(command.options)(added)
    return parser


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"{__package__}.{module}"), function)
    return found


def _user_errors() -> tuple[type[Exception], ...]:
    """What the user can fix, in one sentence, whatever the command; imported only where asked."""
    from ._io import DataError, MissingExtra
    from .jet import MissingJetRule

    return DataError, MissingExtra, MissingJetRule
