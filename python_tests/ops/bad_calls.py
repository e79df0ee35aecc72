"""Wrong arguments for every operator, and how each is answered: always by an error; asked of the
operator, through its wrapper, and of its pure-torch reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from jachess_ext import ops
from python_tests.operators import OPERATORS

Q, S = 2, 4


def _jet(*shape: int, streams: int = S, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(streams, *shape).to(dtype)


def signatures() -> dict[str, dict[str, Any]]:
    """Good arguments of every wrapper, by name."""
    found = {
        operator.name: operator.arguments([torch.ones(of) for of in operator.shapes(S)], Q)
        for operator in OPERATORS.values()
    }
    found["attention_jet"] |= {"mask": torch.ones(3, 3, dtype=torch.bool), "window": (-1, -1)}
    found["attention_jet"] |= {"softcap": 0.0, "dropout_p": 0.1, "dropout_seed": 0}
    sides = {
        "inputs": torch.ones(3, 4, 5),
        "cotangents": [torch.ones(2, 3, 4, 6), torch.ones(2, 3, 4, 1)],
        "other_inputs": torch.ones(2, 7, 5),
        "other_cotangents": [torch.ones(2, 2, 7, 6), torch.ones(2, 2, 7, 1)],
    }
    drawn = {"token": torch.arange(3), "q": Q, "d": 5, "seed": 0, "offset": 0}
    return found | {
        "ntk_gram": sides,
        "ntk_materialised": sides | {"workspace": 10**6},
        "sample_directions": drawn | {"distribution": "gaussian", "dtype": torch.float32},
    }


def _variants(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What may be wrong with one argument: (what, another value)."""
    if isinstance(value, Tensor) and name in ("x", "g", "u", "residual", "query", "key", "value"):
        yield "integers", value.long()
        yield "booleans", value.bool()
        yield "complex numbers", value.to(torch.complex64)
        yield "8-bit floats", value.to(torch.float8_e5m2)
        yield "no dimension", torch.ones(())
        yield "only streams", torch.ones(S)
        yield "a stream too many", torch.cat([value, value[:1]])
        yield "no stream", value[:0]
    elif isinstance(value, Tensor):
        yield "another length", torch.cat([value, value])
        yield "another rank", value[None, None, None, None, None]
        yield "complex numbers", value.to(torch.complex64)
    if isinstance(value, Tensor) and torch.cuda.is_available():
        yield "on another device", value.to("cuda")
    if name.endswith("inputs"):
        yield "integers", value.long()
        yield "8-bit floats", value.to(torch.float8_e5m2)
        yield "another dtype", value.double()
        yield "other features", value[..., :3]
    if isinstance(value, list):
        yield "none", []
        yield "one layer too few", value[:1]
        for what, other in _variants("a cotangent", value[0]):
            yield f"the first: {what}", [other, *value[1:]]
        yield "the first: another width", [value[0][..., :3], *value[1:]]
        yield "the first: another number of outputs", [value[0][:1], *value[1:]]
        yield "the first: another dtype", [value[0].double(), *value[1:]]
    if name == "workspace":
        yield from (("0", 0), ("-1", -1))
    if name == "q":
        yield from (("0", 0), ("-1", -1), ("5", 5), ("2**40", 2**40))
    if name in ("kind", "distribution"):
        yield from (("unknown", "gulu"), ("empty", ""))
    if name == "index":
        yield "outside", torch.tensor([5])
        yield "negative", torch.tensor([-1])
        yield "twice the same", torch.tensor([1, 1])
        yield "a float", torch.tensor([0.0])
    if name == "seed":
        yield from (("2**64", 2**64), ("-2**63 - 1", -(2**63) - 1))
    if name == "dtype":
        yield "integers", torch.int64
    if name == "window":
        yield "negative", (-2, 0)
    if name == "softcap":
        yield from (("negative", -1.0), ("inf", math.inf), ("nan", math.nan))
    if name == "dropout_p":
        yield from (("negative", -0.1), ("1", 1.0))
    if name == "dropout_seed":
        yield "2**64", 2**64
    if name in ("d", "offset"):
        yield from (("-1", -1), ("2**62", 2**62))
    if name == "token":
        yield "int32", value.int()


def _wrong(name: str, good: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for argument, value in good.items():
        for what, other in _variants(argument, value):
            yield f"{argument}: {what}", good | {argument: other}
    if "residual" in good or "u" in good:
        second = "residual" if "residual" in good else "u"
        yield f"{second}: another shape", good | {second: _jet(3, 6)}
        yield f"{second}: another dtype", good | {second: _jet(3, 5, dtype=torch.float64)}
    if "cotangents" in good:
        yield "other_inputs alone", good | {"other_cotangents": None}
        yield "other_cotangents alone", good | {"other_inputs": None}
    if "key" in good:
        yield "key: another head size", good | {"key": _jet(1, 2, 3, 6)}
        yield "key: heads that do not divide", good | {"key": _jet(1, 3, 3, 4)}
        yield "value: other tokens", good | {"value": _jet(1, 2, 5, 4)}
        yield "value: another dtype", good | {"value": _jet(1, 2, 3, 4, dtype=torch.float64)}


# Right, not wrong: an activation takes jets of any rank, and all operators tensors of any device.
ALLOWED = {
    ("activation_jet", "x: only streams"),
    ("activation_jet", "x: on another device"),
    ("softmax_jet", "x: on another device"),
    # numbers of tokens come in any shape, and far more directions than a jet has are drawn
    ("sample_directions", "token: another length"),
    ("sample_directions", "token: another rank"),
    ("sample_directions", "token: on another device"),
    ("sample_directions", "q: 0"),
    ("sample_directions", "q: 5"),
}
# What the references, in torch's way, give the right numbers for.
ALLOWED_IN_TORCH = {
    ("gated_activation_jet", "u: another dtype"),
    ("add_layer_norm_jet", "residual: another dtype"),
    ("add_rms_norm_jet", "residual: another dtype"),
    *((f"add_{norm}_norm_jet", f"{name}: {kind}")
      for norm in ("layer", "rms") for name in ("x", "residual")
      for kind in ("integers", "booleans")),
    ("softmax_jet", "x: only streams"),
    ("jet_mean_squares", "mask: complex numbers"),
    ("jet_mean_squares", "index: another length"),
    ("jet_mean_squares", "index: twice the same"),
}  # fmt: skip


def _answer(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return function(**arguments)
    except Exception as error:
        return error


def try_all() -> dict[tuple[str, str, str], Any]:
    """(operator, "wrapper" or "reference", what was wrong) → the answer, an error if all is well.

    Where an operator is compiled its wrapper hands the arguments to it unseen.
    """
    answers = {}
    for name, good in signatures().items():
        ways = {"wrapper": getattr(ops, name), "reference": getattr(ops, f"{name}_reference")}
        for way, function in ways.items():
            given = {k: v for k, v in good.items() if way == "wrapper" or k != "workspace"}
            assert not isinstance(_answer(function, given), Exception), name
            for what, arguments in _wrong(name, given):
                if (name, what) in ALLOWED:
                    continue
                if way == "reference" and (name, what) in ALLOWED_IN_TORCH:
                    continue
                answers[name, way, what] = _answer(function, arguments)
    return answers


def table(answers: dict[tuple[str, str, str], Any]) -> str:
    """How many wrong calls of each operator were answered by which error."""
    names = list(dict.fromkeys(name for name, _, _ in answers))
    lines = [
        f"{len(answers)} wrong calls: every one answered by an error, none by a crash or a result.",
        "",
        "| operator | wrong calls | of the operator: errors | of its reference: errors |",
        "|---|---|---|---|",
    ]
    for name in names:
        cells = []
        for way in ("wrapper", "reference"):
            kinds: dict[str, int] = {}
            for (operator, asked, _), error in answers.items():
                if (operator, asked) == (name, way):
                    kind = type(error).__name__
                    kinds[kind] = kinds.get(kind, 0) + 1
            cells.append(", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
        count = sum(operator == name for operator, _, _ in answers)
        lines.append(f"| {name} | {count} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"
