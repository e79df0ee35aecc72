"""What a comparison found, in sentences and one picture a figure: the top of its report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..evaluation.figures import SCALE, Styles, forest_figure
from ..evaluation.report import Picture
from ..evaluation.statistics import interval
from .paired import Compared, cost_of, differences
from .tables import REFERENCE, Results, at

_NAMED = 4  # of methods without a difference; of more the largest


_ASKED = (
    Compared("score × 100", at("score"), 100.0, 1, 1),
    Compared("Brier score", at("brier"), 1.0, 3, -1),
)


def answer(results: Results) -> list[str]:
    """Paragraphs: each figure's better and worse methods, and what they cost; [] without a pair."""
    methods = results.compared
    found = [text for asked in _ASKED if (text := _of_figure(results, methods, asked))]
    if not found:
        return []
    costs = {m: cost for m in methods if (cost := cost_of(results, m)) is not None}
    if costs:
        low, high = min(costs, key=costs.__getitem__), max(costs, key=costs.__getitem__)
        found.append(
            f"Training took {costs[low]:.1f} ({low}) to {costs[high]:.1f} ({high}) times the plain "
            "one's processor time."
            if len(costs) > 1
            else f"Training took {costs[low]:.1f} times the plain one's processor time ({low})."
        )
    return found


def _of_figure(results: Results, methods: Sequence[str], asked: Compared) -> str | None:
    """One paragraph: which methods' intervals lie on one side of zero."""
    tasks = results.tasks_with(asked.figure)
    groups: dict[str, list[tuple[float, str]]] = {"better": [], "worse": [], "open": []}
    by_method = {
        method: values
        for method in methods
        if len(values := asked.scale * differences(results, method, tasks, asked.figure))
    }
    seeds = max(map(len, by_method.values()), default=0)
    for method, values in by_method.items():
        mean, half = float(values.mean()), interval(values)
        place = "open"
        if abs(mean) > half:  # not of NaN
            place = "better" if mean * asked.better > 0 else "worse"
        shown = f"{method} ({_signed(mean, asked.digits)}"
        shown += "" if math.isnan(half) else f" ± {half:.{asked.digits}f}"
        shown += f", {_count(len(values), 'seed')}" if len(values) < seeds else ""
        groups[place].append((abs(mean), shown + ")"))
    if not any(groups.values()):
        return None
    over = f"{len(tasks)} tasks" if len(tasks) > 1 else tasks[0]
    where = f"{asked.title[0].upper()}{asked.title[1:]}, {over}, {_count(seeds, 'seed')}: "
    parts = [
        f"{name} than the plain model: {', '.join(text for _, text in groups[name])}"
        for name in ("better", "worse")
        if groups[name]
    ]
    if few := groups["open"]:
        largest = max(few)[1]
        listed = ", ".join(text for _, text in few)
        some = f"{len(few)} methods, the largest difference {largest}"
        it = "it" if parts else "the plain model"
        parts.append(f"not told apart from {it}: {listed if len(few) <= _NAMED else some}")
    note = (
        " One seed cannot tell a difference from chance."
        if seeds < 2
        else " ± is half of a 95 % interval over seeds, not adjusted for the number of methods."
    )
    return where + "; ".join(parts) + "." + note * (asked is _ASKED[0])


def _signed(value: float, digits: int) -> str:
    text = f"{round(value, digits) + 0.0:+.{digits}f}"  # + 0.0: no minus before a zero
    return text.replace("-", "−")


def _count(number: int, name: str) -> str:
    return f"{number} {name}" + "s" * (number != 1)


def forests(results: Results, styles: Styles) -> list[Picture]:
    """Differences from the plain model, a picture each task: of the score, then the Brier score."""
    made = []
    for asked in _ASKED:
        side = "right" if asked.better > 0 else "left"
        for task in results.tasks_with(asked.figure):
            found = {}
            for method in results.methods:
                values = asked.scale * differences(results, method, [task], asked.figure)
                if method != REFERENCE and len(values):
                    found[method] = (float(values.mean()), interval(values))
            if found:
                across = f"{asked.title}, difference from the plain model"
                several = any(not math.isnan(half) for _, half in found.values())
                caption = f"{task}, {asked.title}: " + (
                    f"mean and 95 % interval over seeds; better to the {side}."
                    if several
                    else f"the one seed's difference; better to the {side}."
                )
                made.append(Picture(caption, forest_figure(found, across, styles), SCALE))
    return made
