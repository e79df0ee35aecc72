"""Find out for which functions torch's own forward mode is right, and write the list.

    python -m python_tests.jet.keep_forward_mode [--limit 24] [--only NAME ...]

Every function without a jet rule of its own gets the general one (`rules/forward_mode.py`), and
torch's samples of its operators go through it, as they are, as a method, with each argument alone
active and with gaps between the entries.  A function is kept if none of the samples that met it was
wrong or raised; "with gradients" if the backward through its jets was right, too.  The oracles are
central differences and torch's double backward, never forward mode (`operators.judge`).  What draws
at random is not kept: for three directions the rule runs it three times.

``--only`` leaves what the list says of other functions as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import jachess_ext as jx
from jachess_ext import torch_private
from jachess_ext._io import write_text
from jachess_ext.jet.engine import errors, registry
from jachess_ext.jet.rules import forward_mode, forward_mode_kept

from .operators import Call, calls, judge, operators, quiet, title

TARGET = Path(jx.__file__).parent / "jet" / "rules" / "forward_mode_kept.py"
HEADER = '''"""Functions whose jets torch's own forward mode computes correctly (`forward_mode.py`).

For functions in `FORWARD_REVERSE`, torch's backward through its forward mode is correct,
too; for functions in `FORWARD_ONLY` it is not, and gradients are refused.

Written by `python -m python_tests.jet.keep_forward_mode` with torch {version}; do not edit.
"""


def full_names(names: dict[str, str]) -> tuple[str, ...]:
    """Return ``namespace.name`` for each name in ``names``, which maps a namespace to its names,
    separated by blanks."""
    return tuple(f"{{space}}.{{name}}" for space, text in names.items() for name in text.split())

'''


class Trial(dict):
    """The general rule for every function that has none; notes which were met."""

    def __init__(self) -> None:
        self.met: set[str] = set()

    def get(self, function: Any, default: Any = None) -> Any:
        name = errors.function_name(function)
        if name.endswith("_") and not name.endswith("__"):
            return None  # writes into its argument
        if torch_private.find(name) is not function:
            return None  # torch's own, below its functions
        self.met.add(name)
        return forward_mode.forward_mode_rule(function, has_gradients=True)


def try_operator(op: Any, limit: int) -> tuple[set[str], str, str]:
    """The functions met, and what became of the worst call: values, then gradients.

    Calls that meet no function without a rule say nothing here: a norm's first sample has a rule,
    and its fourth is left to the general one.
    """
    met: set[str] = set()
    values = gradients = "right"
    tried = False
    before = registry.GENERAL_RULES
    for call in calls(op, limit):
        registry.GENERAL_RULES = trial = Trial()
        try:
            if not _meets(call, trial):
                continue
            met |= trial.met
            found = judge(call, independent=False, gradients=gradients == "right")
        finally:
            registry.GENERAL_RULES = before
        if found.kind in ("right", "skipped", "no rule"):
            tried |= found.kind == "right"
        elif found.detail.startswith(("gradient", "in the backward")):
            tried, gradients = True, f"{found.kind}: {found.detail}"
        else:
            values = f"{found.kind}: {found.detail}"
            break
    return met, values if tried or values != "right" else "not tried", gradients


def _meets(call: Call, trial: Trial) -> bool:
    """Whether the call asks for the general rule; one pass, held against nothing."""
    points = call.points
    with torch.no_grad(), contextlib.suppress(Exception):
        jx.jet(call, points, tuple(torch.zeros(1, *p.shape, dtype=p.dtype) for p in points))
    return bool(trial.met)


def kept(limit: int, only: Iterable[str]) -> tuple[set[str], set[str]]:
    """Names of functions whose values and gradients are right; whose values alone are."""
    good: set[str] = set()
    bad: set[str] = set()
    without: set[str] = set()
    for op in operators():
        if only and op.name not in only:
            continue
        met, values, gradients = try_operator(op, limit)
        if not met:
            continue
        print(title(op), sorted(met), values[:150], gradients[:90], sep=" | ", flush=True)
        if values == "right":
            good |= met
            without |= _blamed(op, met) if gradients != "right" else set()
        elif values != "not tried":
            bad |= _blamed(op, met)
    if only:
        good |= set(forward_mode_kept.FORWARD_REVERSE) - bad - without
        without |= set(forward_mode_kept.FORWARD_ONLY) - good
    return good - bad - without, without - bad


def _blamed(op: Any, met: set[str]) -> set[str]:
    """What a bad verdict is about: the operator's own functions, where they are among those met."""
    return {name for name in met if _last_part(name).startswith(_last_part(op.name))} or met


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _listed(name: str, functions: set[str]) -> str:
    """A tuple of full names, written by namespace."""
    lines = [f"{name} = full_names(", "    {"]
    for space in sorted({function.rpartition(".")[0] for function in functions}):
        names = sorted(f.rpartition(".")[2] for f in functions if f.rpartition(".")[0] == space)
        wrapped = textwrap.wrap(" ".join(names), 88, break_on_hyphens=False)
        if len(wrapped) == 1 and len(line := f'        "{space}": "{wrapped[0]}",') <= 100:
            lines.append(line)
            continue
        lines += [f'        "{space}": """', *(f"            {line}" for line in wrapped)]
        lines.append('        """,')
    return "\n".join(["", *lines, "    }", ")", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=24, help="samples of each operator")
    parser.add_argument("--only", nargs="*", default=(), help="names of operators")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with quiet():
        with_gradients, without = kept(given.limit, given.only)
    text = HEADER.format(version=torch.__version__.split("+")[0])
    text += _listed("FORWARD_REVERSE", with_gradients) + _listed("FORWARD_ONLY", without)
    write_text(TARGET, text)


if __name__ == "__main__":
    main()
