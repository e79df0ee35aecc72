"""`jachess …`: the command line. A user's error is one sentence on stderr and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code (0 done, 2 the input cannot be used)."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = _parser(given).parse_args(given)
    except ImportError as error:  # a library that the command's options need
        print(f"jachess {given[0]}: {error}", file=sys.stderr)
        return 2
    command = _COMMANDS[options.command][0]
    try:
        return command(options)
    except UserError as error:
        print(f"jachess {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


class UserError(Exception):
    """What the user can fix, in one sentence."""


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """Options of the command given alone: others may need libraries that are not installed."""
    parser = argparse.ArgumentParser(
        prog="jachess", description="Jacobian and Hessian regularisation for transformers."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (_, add_options, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in given[:1]:
            add_options(command)
    return parser


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    from .demo import arguments

    arguments.add_options(parser)


def _demo(options: argparse.Namespace) -> int:
    from .demo.arguments import from_namespace
    from .demo.main import show
    from .evaluation.extras import MissingExtra
    from .jet import MissingJetRule
    from .tasks.examples import DataError

    try:
        show(from_namespace(options))
    except (DataError, MissingExtra, MissingJetRule, FloatingPointError) as error:
        raise UserError(str(error)) from error
    return 0


def _add_ntk_options(parser: argparse.ArgumentParser) -> None:
    from .commands import ntk_arguments

    ntk_arguments.add_options(parser)


def _ntk(options: argparse.Namespace) -> int:
    from .commands.ntk_arguments import NTKOptions
    from .evaluation.extras import MissingExtra
    from .tasks.examples import DataError

    try:
        from .commands.ntk import run

        run(NTKOptions.of(options))
    except (DataError, MissingExtra, TypeError, ValueError, RuntimeError) as error:
        raise UserError(str(error)) from error
    return 0


def _add_fit_options(parser: argparse.ArgumentParser) -> None:
    from .commands import scaling_arguments

    scaling_arguments.add_fit_options(parser)


def _fit(options: argparse.Namespace) -> int:
    from .commands.fit import run

    return _scaling(run, options)


def _add_select_options(parser: argparse.ArgumentParser) -> None:
    from .commands import scaling_arguments

    scaling_arguments.add_select_options(parser)


def _select(options: argparse.Namespace) -> int:
    from .commands.select import run

    return _scaling(run, options)


def _scaling(run: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    from .evaluation.extras import MissingExtra

    try:
        run(options)
    except (MissingExtra, OSError, ValueError) as error:
        raise UserError(str(error)) from error
    return 0


def _add_bound_options(parser: argparse.ArgumentParser) -> None:
    from .commands import bound_arguments

    bound_arguments.add_options(parser)


def _bound(options: argparse.Namespace) -> int:
    from .evaluation.extras import MissingExtra
    from .tasks.examples import DataError

    try:
        from .commands.bound import run

        run(options)
    except (DataError, MissingExtra, OSError, ValueError, RuntimeError) as error:
        raise UserError(str(error)) from error
    return 0


def _add_finetune_options(parser: argparse.ArgumentParser) -> None:
    from .experiment.arguments import add_finetune_options

    add_finetune_options(parser)


def _add_evaluate_options(parser: argparse.ArgumentParser) -> None:
    from .experiment.arguments import add_evaluate_options

    add_evaluate_options(parser)


def _experiment(options: argparse.Namespace) -> int:
    from .evaluation.extras import MissingExtra
    from .jet import MissingJetRule
    from .tasks.examples import DataError

    try:
        from .experiment import commands

        return getattr(commands, options.command)(options)
    except (DataError, MissingExtra, MissingJetRule, ImportError) as error:
        raise UserError(str(error)) from error


def _add_bench_options(parser: argparse.ArgumentParser) -> None:
    from .commands import bench

    bench.add_options(parser)


def _bench(options: argparse.Namespace) -> int:
    from .commands.bench import NoBenchmarks, run

    try:
        return run(options)
    except NoBenchmarks as error:
        raise UserError(str(error)) from error


def _doctor(_options: argparse.Namespace) -> int:
    from .doctor import main as doctor

    return doctor()


def _no_options(_parser: argparse.ArgumentParser) -> None:
    """The command takes none."""


_COMMANDS = {
    "demo": (_demo, _add_demo_options, "fine-tune on real text with and without JacHess"),
    "ntk": (_ntk, _add_ntk_options, "the neural tangent kernel of a model on a file of texts"),
    "fit": (_fit, _add_fit_options, "a scaling law through every row of a table of losses"),
    "select": (_select, _add_select_options, "which model to fine-tune, from small subsets"),
    "bound": (_bound, _add_bound_options, "how far fine-tuning went, in the loss's curvature"),
    "finetune": (
        _experiment,
        _add_finetune_options,
        "compare methods over tasks and seeds; goes on where it was stopped",
    ),
    "evaluate": (
        _experiment,
        _add_evaluate_options,
        "draw a comparison's tables and report again, or judge a fine-tuned model",
    ),
    "bench": (_bench, _add_bench_options, "how fast it is here: the benchmark set and its tables"),
    "doctor": (_doctor, _no_options, "what was built, for what, what is missing, how to fix it"),
}
