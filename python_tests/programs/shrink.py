"""Make a program that is wrong as small as it can be while it stays wrong in the same way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from .oracle import NotAProgram, Verdict, verdicts
from .program import Program


def shrunk(program: Program, mode: str, limit: int = 3000) -> Program:
    """The smallest program found within ``limit`` trials."""
    kind = sort_of(verdict_of(program, mode))
    trials, smaller = 0, True
    while smaller:
        smaller = False
        for candidate in candidates(program):
            trials += 1
            if trials > limit:
                return renumbered(program)
            if sort_of(verdict_of(candidate, mode)) == kind:
                program, smaller = candidate, True
                break
    return renumbered(program)


def verdict_of(program: Program, mode: str) -> Verdict:
    try:
        return verdicts(program, [mode])[mode]
    except NotAProgram:
        return Verdict("none")


def sort_of(verdict: Verdict) -> str:
    """What has to stay: the error, or that numbers differ."""
    is_error = re.match(r"\w+(Error|Rule):.{0,40}", verdict.what)
    return f"{verdict.kind} {is_error[0] if is_error else verdict.kind}"


def candidates(program: Program) -> Iterator[Program]:
    """Smaller programs, the boldest first."""
    if len(program.outputs) > 1:
        for output in program.outputs:
            yield replace(program, outputs=(output,))
        for output in program.outputs:
            yield replace(program, outputs=tuple(n for n in program.outputs if n != output))
    count = len(program.ops)
    for size in (count // 2, count // 4, 3, 1):
        if size > 1:
            for start in range(0, count - size + 1, max(size // 2, 1)):
                yield replace(program, ops=program.ops[:start] + program.ops[start + size :])
    for place in range(count - 1, -1, -1):
        yield from without(program, place)
    if program.layout != "plain":
        yield replace(program, layout="plain")
    for fewer in range(1, program.directions):
        yield replace(program, directions=fewer)


def without(program: Program, place: int) -> Iterator[Program]:
    """Without a line; what read its register reads an earlier one."""
    op, rest = program.ops[place], program.ops[:place] + program.ops[place + 1 :]
    if op.out is None:
        yield replace(program, ops=rest)
        return
    earlier = [line.out for line in program.ops[:place] if line.out is not None]
    for instead in dict.fromkeys([*op.reads, *earlier[::-1], 0, 1]):
        outputs = tuple(instead if n == op.out else n for n in program.outputs)
        ops = tuple(line.renamed(op.out, instead) for line in rest)
        yield replace(program, ops=ops, outputs=outputs)


def renumbered(program: Program) -> Program:
    """With registers numbered in their order."""
    for new, old in enumerate([op.out for op in program.ops if op.out is not None], start=2):
        if old is not None and old != new:
            ops = [
                replace(op.renamed(old, new), out=new if op.out == old else op.out)
                for op in program.ops
            ]
            outputs = tuple(new if n == old else n for n in program.outputs)
            program = replace(program, ops=tuple(ops), outputs=outputs)
    return program
