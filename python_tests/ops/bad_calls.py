"""Wrong arguments for every operator, and how each is answered: always by an error that names the
operator; asked through the Python wrapper, and past it of the C++ operator itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jachess_ext import ops

Q, S = 2, 4


def _jet(*shape: int, streams: int = S, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(streams, *shape).to(dtype)


@dataclass(frozen=True)
class Signature:
    """How an operator is called: `good` arguments by name, in the wrapper's order."""

    good: dict[str, Any]
    raw: Callable[..., Any]


def _signatures() -> dict[str, Signature]:
    raw = torch.ops.jachess
    x, channels = _jet(3, 5), torch.ones(5)
    norm = {"x": x, "weight": channels, "bias": channels, "eps": 1e-5, "q": Q}
    rms = {"x": x, "weight": channels, "eps": 1e-5, "q": Q}
    heads = {name: _jet(1, 2, 3, 4) for name in ("query", "key", "value")}
    sides = {
        "inputs": torch.ones(3, 4, 5),
        "cotangents": [torch.ones(2, 3, 4, 6), torch.ones(2, 3, 4, 1)],
        "other_inputs": torch.ones(2, 7, 5),
        "other_cotangents": [torch.ones(2, 2, 7, 6), torch.ones(2, 2, 7, 1)],
    }
    return {
        "activation_jet": Signature({"x": x, "kind": "gelu", "q": Q}, raw.activation_jet),
        "gated_activation_jet": Signature(
            {"g": x, "u": x, "kind": "gelu", "q": Q}, raw.gated_activation_jet
        ),
        "layer_norm_jet": Signature(
            norm, lambda x, weight, bias, eps, q: raw.layer_norm_jet(x, None, weight, bias, eps, q)
        ),
        "add_layer_norm_jet": Signature(
            {"x": x, "residual": x} | norm,
            lambda x, residual, weight, bias, eps, q: raw.layer_norm_jet(
                x, residual, weight, bias, eps, q
            ),
        ),
        "rms_norm_jet": Signature(
            rms, lambda x, weight, eps, q: raw.rms_norm_jet(x, None, weight, eps, q)
        ),
        "add_rms_norm_jet": Signature(
            {"x": x, "residual": x} | rms,
            lambda x, residual, weight, eps, q: raw.rms_norm_jet(x, residual, weight, eps, q),
        ),
        "softmax_jet": Signature({"x": x, "q": Q, "masked": False}, raw.softmax_jet),
        "attention_jet": Signature(
            heads | {"mask": torch.ones(3, 3, dtype=torch.bool), "q": Q},
            lambda query, key, value, mask, q: raw.attention_jet(
                query, key, value, mask, q, 0.5, False, -1, -1, 0.0, 0.0, 0
            ),
        ),
        "jet_mean_squares": Signature(
            {"x": x, "mask": torch.ones(3, dtype=torch.bool), "index": torch.tensor([0]), "q": Q},
            lambda x, mask, index, q: raw.jet_mean_squares(x, mask, index, q),
        ),
        "ntk_gram": Signature(
            sides, lambda a, d, other, others: raw.ntk_gram(a, d, other, others or [])
        ),
        "sample_directions": Signature(
            {
                "token": torch.arange(3),
                "q": Q,
                "d": 5,
                "seed": 0,
                "offset": 0,
                "distribution": "gaussian",
                "dtype": torch.float32,
            },
            raw.sample_directions,
        ),
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
        yield "on another device", value.to("meta")
    elif isinstance(value, Tensor):
        yield "another length", torch.cat([value, value])
        yield "another rank", value[None, None, None, None, None]
        yield "complex numbers", value.to(torch.complex64)
        yield "on another device", value.to("meta")
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


# Right, not wrong: an activation takes jets of any rank, and all operators meta tensors alone.
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


def _answer(function: Callable[..., Any], arguments: dict[str, Any]) -> BaseException | None:
    try:
        function(**arguments)
    except Exception as error:
        return error
    return None


def try_all() -> dict[tuple[str, str, str], BaseException | None]:
    """(operator, "wrapper" or "operator", what was wrong) → the error, if any."""
    answers = {}
    for name, signature in _signatures().items():
        wrapper = getattr(ops, name)
        assert _answer(wrapper, signature.good) is None, name
        for what, arguments in _wrong(name, signature.good):
            if (name, what) in ALLOWED:
                continue
            answers[name, "wrapper", what] = _answer(wrapper, arguments)
            if what.endswith("on another device"):
                continue  # a meta tensor among the arguments: torch asks the fake kernel
            positional = list(arguments.values())
            answers[name, "operator", what] = _answer(
                lambda *_, f=signature.raw, p=positional, **__: f(*p), {}
            )
    return answers


def table(answers: dict[tuple[str, str, str], BaseException | None]) -> str:
    """How many wrong calls of each operator were answered by which error."""
    names = list(dict.fromkeys(name for name, _, _ in answers))
    lines = [
        f"{len(answers)} wrong calls: every one answered by an error, none by a crash or a result.",
        "",
        "| operator | wrong calls | of the wrapper: errors | of the C++ operator: errors |",
        "|---|---|---|---|",
    ]
    for name in names:
        cells = []
        for way in ("wrapper", "operator"):
            kinds: dict[str, int] = {}
            for (operator, asked, _), error in answers.items():
                if (operator, asked) == (name, way):
                    kind = type(error).__name__
                    kinds[kind] = kinds.get(kind, 0) + 1
            cells.append(", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
        count = sum(operator == name for operator, _, _ in answers)
        lines.append(f"| {name} | {count} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"
