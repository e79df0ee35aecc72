"""What `JacHess.state_dict` returns, checked where it comes back from a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from .._io import DataError, from_json

_DIGITS = 9  # of a layer's number; Python refuses to read one of thousands


class _Base(TypedDict):
    jacobian: list[float]
    hessian: list[float] | None
    tokens: int


class _Needed(TypedDict):
    step: int
    seed: int | None
    base: _Base | None


class _State(_Needed, total=False):
    skipped: Mapping[str, int]
    layer_weights: list[float] | None


def check_state(state: Any) -> None:
    """Whether `state` is a regulariser's.

    Raises:
        DataError (a ValueError): what it lacks, or has of another kind.
    """
    from_json(state, _State, "the regulariser's state")
    for layer in state.get("skipped", {}):
        if not layer.isdecimal() or len(layer) > _DIGITS:
            raise DataError(
                f"the regulariser's state counts skipped steps of the layer {layer[:40]!r}"
            )
    base = state["base"]
    if base is None:
        return
    norms = [base["jacobian"], *([base["hessian"]] if base["hessian"] is not None else [])]
    if len({len(values) for values in norms}) != 1 or not norms[0]:
        raise DataError("the regulariser's state has base norms of unequal numbers of layers")
    if min(min(values) for values in norms) <= 0:
        raise DataError("the regulariser's state has base norms that are not positive")
