"""The page of `jachess evaluate --model`: one fine-tuned model, judged on its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..evaluation.figures import SCALE, norms_figure, reliability_figure, styles_of
from ..evaluation.report import Picture, Section, Table
from ..compare.runs import Record
from .report import pooled


def judged_sections(figures: Sequence[Record]) -> list[Section]:
    """One a task: what was found in a sentence, the scores under all conditions, the pictures."""
    return [_section(found) for found in figures]


def _section(found: Record) -> Section:
    conditions = {f"{float(s):.0%} of the tokens unknown": v for s, v in found["corrupted"].items()}
    conditions |= {
        f"noise of δ = {delta} on the embeddings": score
        for delta, score in found["noisy"].items()
        if float(delta)
    }
    conditions |= {f"texts changed: {kind}": score for kind, score in found["perturbed"].items()}
    figures = {"as they are": found}
    figures |= {name: {"score": score} for name, score in conditions.items()}
    figures |= {f"rows of {target}": of for target, of in found["shift"].items()}
    rows = [
        [name, *(_shown(of.get(figure)) for figure in ("score", "brier", "ece"))]
        for name, of in figures.items()
    ]
    scores = Table("Under each condition", ["rows", found["metric"], "Brier", "ECE"], rows)
    return Section(found["task"], [_sentence(found)], [scores], _pictures(found))


def _sentence(found: Record) -> str:
    text = f"{found['metric'].capitalize()} {found['score']:.3f} on {found['rows']} rows"
    if found["brier"] is not None:
        text += f", Brier score {found['brier']:.3f}, calibration error {found['ece']:.3f}"
    slopes = found["slopes"]
    if slopes.get("margin_over_slope") is not None:
        text += (
            f"; the logits' Jacobian is {slopes['logit_jacobian']:.3g}, and the decision's border "
            f"about {slopes['margin_over_slope']:.3g} away in the embeddings' units (negative: "
            "wrong on average)"
        )
    return f"{text}. Judged on {found['device']}."


def _pictures(found: Record) -> list[Picture]:
    made = []
    name = found["task"]
    styles: Any = styles_of([name])
    if found["reliability"] is not None:
        made.append(
            Picture(
                "Reliability: accuracy of the predicted class over its confidence in 8 bins; on "
                "the dashed line the model is as sure as it is right. Bars: share of the rows.",
                reliability_figure({name: pooled([found["reliability"]])}, styles),
                SCALE,
            )
        )
    if found["jacobian"]:
        made.append(
            Picture(
                "Norms of the first and second derivatives of each layer with respect to the "
                "token embeddings.",
                norms_figure({name: found["jacobian"]}, {name: found["hessian"]}, styles=styles),
                SCALE,
            )
        )
    return made


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
