"""A model card from a run's record, as the hub reads it."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..compare.runs import Record

_FIGURES = {
    "accuracy": "accuracy",
    "auc": "area under the ROC curve",
    "nll": "negative log-likelihood, nats",
    "brier": "Brier score, summed over classes",
    "ece": "expected calibration error, 8 bins",
}


def model_card(run: str, record: Record, *, adapters: bool) -> ModelCard:
    """What the model of a run is, how it was trained, and its figures as evaluation results.

    Args:
        run: the run's name, which is the model's.
        record: as in the results file.
        adapters: whether the folder has LoRA's adapters alone.
    """
    results = _results(record)
    local = Path(record["model"]).exists()
    base = Path(record["model"]).name if local else record["model"]
    data = ModelCardData(
        model_name=run,
        base_model=None if local else base,  # the hub takes no path
        library_name="peft" if adapters else "transformers",
        pipeline_tag="text-classification",
        tags=["jachess_ext", record["settings"]["method"]],
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        eval_results=results or None,
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_text(run, record, base, results)}")


def _results(record: Record) -> list[EvalResult]:
    """Those of the task's judged rows, then those of other tasks' rows; missing ones left out."""
    task, metric = record["task"], record["metric"]
    kind = metric.lower().replace(" ", "_")
    found = [(task, kind, metric, record["score"])]
    found += [(task, f, name, record.get(f)) for f, name in _FIGURES.items() if f != kind]
    for share, score in record.get("corrupted", {}).items():
        name = f"{metric}, {float(share):.0%} of the tokens unknown"
        found.append((task, f"{kind}_corrupted_{share}", name, score))
    for target, of in record.get("shift", {}).items():
        found.append((target, "score", "score, in the target's own metric", of["score"]))
        found += [(target, figure, _FIGURES[figure], of[figure]) for figure in ("brier", "ece")]
    return [
        EvalResult(
            task_type="text-classification",
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_split="dev",
            metric_type=kind,
            metric_name=name,
            metric_value=value,
        )
        for dataset, kind, name, value in found
        if value is not None
    ]


def _text(run: str, record: Record, base: str, results: list[EvalResult]) -> str:
    train, unlabelled, judged = record["rows"]
    noise = record.get("label_noise")
    sentences = [
        f"`{base}`, fine-tuned on {train} rows of {record['task']} by the method "
        f"`{record['method']}` from seed {record['seed']}.",
        f"The method also saw {unlabelled} rows without their labels." * bool(unlabelled),
        f"{noise:.0%} of the training labels were wrong on purpose." if noise else "",
        f"Judged on {judged} rows that were not trained on. One run: what lies within the scatter "
        "over seeds says nothing about the method.",
    ]
    rows = "".join(
        f"| {each.dataset_name} | {each.metric_name} | {each.metric_value:.4f} |\n"
        for each in results
    )
    made = json.dumps({"recipe": record["recipe"], "method": record["settings"]}, indent=1)
    return (
        f"# {run}\n\n{' '.join(filter(None, sentences))}\n\n"
        f"| rows of | figure | value |\n|---|---|---|\n{rows}\n"
        f"## Settings\n\n```json\n{made}\n```\n"
    )
