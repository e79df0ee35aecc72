"""Programs that were wrong once, small."""

from __future__ import annotations

import pytest

from .oracle import verdicts
from .program import Op, Program

Shape = tuple[int, ...]
# Name: shapes of x and w, how x lies in memory, and the lines, of which the last gives the output.
FOUND: dict[str, tuple[Shape, Shape, str, list[str]]] = {
    "a view of a view of a buffer": (
        (), (), "plain", ["v0.new_full([2], 0.3)", "v2[:-1]", "v3[0] -= v0", "v2 * 1"],
    ),
    "a write into what was detached": (
        (3,), (), "plain", ["v0 * 1", "v2 + 1", "v2.detach()", "v4.add_(1)", "v2 * 1"],
    ),
    "a write into what was detached from": (
        (3,), (), "plain", ["v0 * 1", "v2 + 1", "v2.detach()", "v2.mul_(2)", "v4 * v0"],
    ),
    "maximum of a tie": ((3,), (), "plain", ["torch.maximum(v0, v0.detach())"]),
    "minimum of a tie": ((3,), (), "plain", ["torch.minimum(v0, v0.detach())"]),
    "fmax of a tie": ((3,), (), "plain", ["torch.fmax(v0.detach(), v0)"]),
    "fmin of a tie": ((3,), (), "plain", ["torch.fmin(v0.detach(), v0)"]),
    "amax of a tie": ((3,), (), "plain", ["torch.stack([v0, v0.detach()]).amax(0)"]),
    "amin of a tie": ((3,), (), "plain", ["torch.stack([v0, v0.detach()]).amin(0, True)"]),
    "max of a tie": ((), (), "plain", ["torch.stack([v0, v0.detach(), v0 - 1]).max()"]),
    "infinity norm of a tie": (
        (3,), (), "plain",
        ["torch.linalg.vector_norm(torch.stack([v0, v0.detach()]), torch.inf, 0)"],
    ),
    "amax of a number": ((), (), "plain", ["v0.amax(None)"]),
    "norm of a number": ((), (), "plain", ["v0.norm(2, 0, keepdim=True) + v0.norm(2, -1)"]),
    "deviation of a number": ((), (), "plain", ["v0.std(-1, correction=0) + v0"]),
    "normalize of a number": ((), (), "plain", ["F.normalize(v0, dim=0) * v0"]),
    "flip of a number": ((), (), "plain", ["v0.flip(0)"]),
    "movedim of a number": ((), (), "plain", ["v0.movedim(-1, 0)"]),
    "roll without dimensions": ((), (), "plain", ["v0.roll(1, ())"]),
    "atan2 at the origin": ((3,), (), "plain", ["v0 * 0", "torch.atan2(v2, v2) + v0 * v0"]),
    "logit at its ends": ((3,), (), "plain", ["v0 * 0 + 1", "v2.logit(eps=0.1) + v0 * v0"]),
    "reshape of a transposed input": (
        (2, 3), (), "reversed", ["v0.reshape(-1)", "v0.mul_(2)", "v2 * 1"],
    ),
    "reshape of an input with gaps": (
        (2, 3), (), "gaps", ["v0.reshape(3, 2)", "v0.mul_(2)", "v2 * 1"],
    ),
    "an index that is a tensor of one number": (
        (1, 2, 1), (), "plain", ["v0[torch.tensor(0), 0:, 0]", "v0.mul_(2)", "v2 * 1"],
    ),
    "an index of two such tensors": (
        (1, 2, 2), (), "plain", ["v0[0, 0:1, torch.tensor(-1)]", "v2.add_(-0.5)", "v0 * v0"],
    ),
    "hypot at the origin, masked": (
        (3,), (), "plain",
        ["v0.masked_fill(v0 < 0, 0)", "torch.hypot(v2, v2)"],
    ),
    "a product with nothing": ((3,), (), "plain", ["v0 @ C(0, 3, 0)", "v2.sum() + v0"]),
    "a product of nothing": ((3,), (), "plain", ["v0[:0] @ C(0, 0, 2)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    *shapes, layout, lines = FOUND[name]
    statements = [" -= " in line for line in lines]
    ops = tuple(
        Op(None if statement else 2 + place - sum(statements[:place]), line)
        for place, (line, statement) in enumerate(zip(lines, statements, strict=True))
    )
    program = Program(7, tuple(shapes), layout, 2, ops, (ops[-1].out,))
    wrong = {m: (v.what, v.text) for m, v in verdicts(program).items() if v.kind != "right"}
    assert not wrong, f"{program.script()}\n{wrong}"
