"""The training loop: every method learns, repeats exactly, and does what its name says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jachess_ext.compare.judge import judge, layer_norms
from jachess_ext.compare.metrics import ACCURACY
from jachess_ext.compare.models import Encoded, encode, load_model, load_tokenizer
from jachess_ext.compare.settings import Columns
from jachess_ext.compare.tasks import file_task
from jachess_ext.demo.finetune import Trainer, finetune_in_turns
from jachess_ext.demo.options import TITLES, Method, Recipe
from jachess_ext.smoothness import JacHess
from jachess_ext.training.methods.noise import TokenSwaps

RECIPE = Recipe(steps=60, batch_size=8, lr=5e-3, strength=0.003)


@pytest.fixture(scope="module")
def data(tiny_model: Path, sentiment: Path) -> Encoded:
    task = file_task(sentiment, sentiment, Columns())
    return encode(task.train, load_tokenizer(tiny_model), 16)


def trainer(
    tiny_model: Path, data: Encoded, method: Method, recipe: Recipe = RECIPE, seed: int = 0
) -> Trainer:
    model = load_model(tiny_model, 2, data.tokenizer, seed)
    return Trainer(model, method, recipe, data, data, seed)


def test_every_method_and_form_learns(tiny_model: Path, data: Encoded) -> None:
    alternating = replace(RECIPE, form="alternating")
    trainers = [trainer(tiny_model, data, method) for method in TITLES]
    trainers.append(trainer(tiny_model, data, "unlab", alternating))
    logs = finetune_in_turns(trainers, lambda: None)
    for made, log in zip(trainers, logs, strict=True):
        assert judge(made.model, data, ACCURACY, 0.02)["score"] == 1.0
        assert log.losses[-1]["task"] < log.losses[0]["task"]
        assert len(log.seconds) == RECIPE.steps and min(log.seconds) > 0
        assert ("penalty" in log.losses[0]) == (made.method != "none")
        assert ("penalty" in log.losses[1]) == (made.method in ("train", "unlab"))


def test_jachess_ends_smoother_than_none(tiny_model: Path, data: Encoded) -> None:
    recipe = replace(RECIPE, steps=12, strength=1.0)
    methods: tuple[Method, ...] = ("none", "train", "unlab")
    trainers = [trainer(tiny_model, data, method, recipe) for method in methods]
    finetune_in_turns(trainers, lambda: None)
    (plain_j, plain_h), *others = (layer_norms(made.model, data) for made in trainers)
    for ours_j, ours_h in others:
        assert sum(ours_j) < 0.8 * sum(plain_j)
        assert sum(ours_h) < 0.8 * sum(plain_h)


def parameters(made: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in made.model.parameters()])


def test_taking_turns_changes_nothing(tiny_model: Path, data: Encoded) -> None:
    """A trainer's result does not depend on which others take turns with it."""
    recipe = replace(RECIPE, steps=3)
    together = [trainer(tiny_model, data, method, recipe) for method in TITLES]
    finetune_in_turns(together, lambda: None)
    for made in together:
        alone = trainer(tiny_model, data, made.method, recipe)
        finetune_in_turns([alone], lambda: None)
        assert torch.equal(parameters(alone), parameters(made))


def test_strength_zero_is_no_regulariser(tiny_model: Path, data: Encoded) -> None:
    recipe = replace(RECIPE, steps=5, strength=0.0)
    results = []
    for method in ("none", "unlab"):
        made = trainer(tiny_model, data, method, recipe)  # type: ignore[arg-type]
        for module in made.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # the extra pass would draw masks of its own
        finetune_in_turns([made], lambda: None)
        results.append(parameters(made))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("method", "penalty", "passes"), [("unlab", JacHess, 3), ("recommended", TokenSwaps, 2)]
)
def test_penalties_never_see_the_labels_of_their_text(
    method: Method,
    penalty: type,
    passes: int,
    tiny_model: Path,
    data: Encoded,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[set[str]] = []
    original = penalty.__call__

    def spy(self: Any, batch: dict[str, torch.Tensor], *rest: Any) -> object:
        seen.append(set(batch))
        return original(self, batch, *rest)

    monkeypatch.setattr(penalty, "__call__", spy)
    finetune_in_turns([trainer(tiny_model, data, method, replace(RECIPE, steps=3))], lambda: None)
    assert len(seen) == passes and not any("labels" in keys for keys in seen)


def test_global_random_state_is_left_alone(tiny_model: Path, data: Encoded) -> None:
    made = trainer(tiny_model, data, "train")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    made.step()
    assert torch.equal(torch.rand(2), expected)


def test_rates_warm_up_and_decay(tiny_model: Path, data: Encoded) -> None:
    made = trainer(tiny_model, data, "none", replace(RECIPE, steps=20, warmup=0.2, lr=1.0))
    rates = []
    for taken in range(20):
        made.taken = taken
        made._set_rates()
        rates.append(made._optimiser.param_groups[0]["lr"])
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4:] == pytest.approx([n / 16 for n in range(16, 0, -1)])


def test_a_loss_that_is_not_finite_is_named(tiny_model: Path, data: Encoded) -> None:
    made = trainer(tiny_model, data, "none")
    with torch.no_grad():
        made.model.classifier.bias.fill_(float("inf"))
    with pytest.raises(FloatingPointError, match=r"loss of step 1 .* lower the learning rate"):
        made.step()


def test_batches_cover_every_example_once_an_epoch(data: Encoded) -> None:
    stream = data.shuffled(8, seed=1)
    labels = [label for _ in range(4) for label in next(stream)["labels"].tolist()]
    assert sorted(labels) == sorted(data.labels)
    first = next(data.shuffled(8, seed=1))["input_ids"]
    assert torch.equal(first, next(data.shuffled(8, seed=1))["input_ids"])
