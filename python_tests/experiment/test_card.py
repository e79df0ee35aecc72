"""Model cards of records made by hand; those of real runs are in test_commands."""

from __future__ import annotations

from huggingface_hub import ModelCard

from jachess_ext.experiment.card import model_card

from .records import record


def test_shift_noise_and_a_model_of_the_hub() -> None:
    shifted = {"there": {"score": 0.25, "brier": 0.5, "ece": None}}
    given = record(
        *("l2", "here", 3, 0.75),
        metric="Matthews correlation",
        accuracy=0.875,
        auc=None,
        label_noise=0.2,
        shift=shifted,
    )
    card = ModelCard(str(model_card("final-here-l2", given | {"model": "a/b"}, adapters=True)))
    found = {(r.dataset_name, r.metric_type): r.metric_value for r in card.data.eval_results}
    assert found == {
        ("here", "matthews_correlation"): 0.75,
        ("here", "accuracy"): 0.875,
        ("here", "brier"): 0.2,
        ("here", "ece"): 0.1,
        ("here", "matthews_correlation_corrupted_0.05"): 0.75 - 0.01,
        ("here", "matthews_correlation_corrupted_0.2"): 0.75 - 0.1,
        ("there", "score"): 0.25,
        ("there", "brier"): 0.5,
    }
    assert card.data.base_model == "a/b" and card.data.library_name == "peft"
    assert "`a/b`, fine-tuned on 10 rows of here by the method `l2` from seed 3" in card.text
    assert "20% of the training labels were wrong" in card.text
    assert "| there | Brier score, summed over classes | 0.5000 |" in card.text


def test_a_regression_has_a_score_alone() -> None:
    given = record("none", "likeness", 0, 0.5, metric="Spearman correlation", brier=None, ece=None)
    del given["corrupted"]
    card = ModelCard(str(model_card("final-likeness", given, adapters=False)))
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("spearman_correlation", 0.5)
    assert card.data.base_model == "tiny"
