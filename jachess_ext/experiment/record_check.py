"""What a record of a run holds (made in `one_run`), checked where one is read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from ..json_data import BadJSON, check


class _Figures(TypedDict, total=False):
    accuracy: float | None
    auc: float | None
    nll: float | None
    brier: float | None
    brier_binary: float | None
    ece: float | None
    scaled: Mapping[str, float | None] | None


class _Optional(_Figures, total=False):
    run: str
    corrupted: Mapping[str, float | None]
    noisy: Mapping[str, float | None]
    jacobian: list[float | None]
    hessian: list[float | None]
    reliability: _Diagram | None
    shift: Mapping[str, _ShiftFigures]
    validation_rows: int
    label_noise: float
    resampled: bool
    perturbed: Mapping[str, float | None]
    accuracies: Mapping[str, float | None]
    slopes: Mapping[str, float | None]
    embedding_growth: float | None
    curve: list[_Point]
    seconds: Mapping[str, float | None]


class _Shape(_Optional):
    kind: Literal["tuning", "final"]
    task: str
    method: str
    value: float | None
    seed: int
    model: str
    metric: str
    rows: list[int]
    settings: Mapping[str, Any]
    recipe: Mapping[str, Any]
    score: float | None
    brier: float | None  # type: ignore[misc]  # needed here, optional elsewhere
    ece: float | None  # type: ignore[misc]
    error: str | None


class _Diagram(TypedDict):
    edges: list[float]
    confidence: list[float | None]
    accuracy: list[float | None]
    counts: list[int]


class _ShiftFigures(TypedDict):
    score: float | None
    brier: float | None
    ece: float | None


class _Point(_Figures):
    epoch: int
    score: float | None
    validation: Mapping[str, float | None]


def check_record(record: Any) -> None:
    """Whether `record` has what tables and report read.

    Raises:
        BadJSON: what it lacks, or has of another kind.
    """
    check(record, _Shape, "the record")
    if len(record["rows"]) != 3:
        raise BadJSON(f"the record's rows has {len(record['rows'])} numbers; expected three")
    settings = record["settings"]
    if not isinstance(settings.get("method"), str):
        raise BadJSON("the record's settings have no text 'method'")
    missing = {"mode", "weights", "dimensions"} - settings.keys()
    if settings["method"] == "jachess" and missing:
        raise BadJSON(f"the record's settings have no {min(missing)!r}")
    for name in ("corrupted", "noisy"):
        for key in record.get(name, {}):
            check(_number(key), float, f"the record's {name}: the key {key!r}")
    diagram = record.get("reliability")
    if diagram is not None:
        _check_diagram(diagram)


def check_together(records: Sequence[Any]) -> None:
    """Whether records, each of which is well, can stand in one report.

    Raises:
        BadJSON: no run counts, or reliability diagrams have other bins.
    """
    if not any(record["kind"] == "final" for record in records):
        raise BadJSON("has no finished run yet, only runs that choose strengths")
    edges = [r["reliability"]["edges"] for r in records if r.get("reliability")]
    if any(found != edges[0] for found in edges):
        raise BadJSON("has records with reliability diagrams of different bins")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _check_diagram(diagram: _Diagram) -> None:
    bins = len(diagram["edges"]) - 1
    for values in (diagram["confidence"], diagram["accuracy"], diagram["counts"]):
        if bins < 1 or len(values) != bins:
            raise BadJSON(f"the record's reliability has {len(values)} values for {bins} bins")
    if min(diagram["counts"]) < 0:
        raise BadJSON("the record's reliability counts fewer than no example in a bin")
