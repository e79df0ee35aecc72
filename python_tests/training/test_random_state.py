"""A method's random numbers change neither the order of rows nor the task's dropout masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import jachess_ext as jx
from jachess_ext.training.batches import seeded_rng
from jachess_ext.training.methods.jachess import step_key
from python_tests.smoothness.tiny_models import classifier

from .runs import assert_same_parameters, examples, furthest, method_trainer

TINY = 1e-30
"""A strength that no parameter can feel."""


def run(folder: Path, name: str, seed: int = 1, **method: Any) -> Any:
    """Two epochs of two steps with dropout, the order of rows drawn anew in each."""
    made = method_trainer(
        folder,
        name,
        model=classifier("bert", dropout=0.3, dtype=torch.float32),
        data=examples(16),
        method=method,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        max_steps=-1,
        seed=seed,
    )
    made.train()
    return made.model


def batches_of(folder: Path, name: str, **settings: Any) -> list[list[int]]:
    """The rows of every training batch, by their number."""
    rows = [
        {key: value[: 2 + n % 3] if value.ndim else value for key, value in row.items()}
        for n, row in enumerate(examples(16, 4))
    ]
    rows = [row | {"number": torch.tensor(n)} for n, row in enumerate(rows)]
    seen: list[list[int]] = []

    def collate(chosen: list[dict]) -> dict[str, torch.Tensor]:
        if len(chosen) == 4:
            seen.append([int(row["number"]) for row in chosen])
        padded = torch.nn.utils.rnn.pad_sequence
        ids = padded([row["input_ids"] for row in chosen], batch_first=True)
        labels = [row["labels"] for row in chosen if "labels" in row]
        batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
        return batch | ({"labels": torch.stack(labels)} if labels else {})

    made = method_trainer(
        folder,
        name,
        model=classifier("bert", dropout=0.3, attention="sdpa", dtype=torch.float32),
        data=rows,
        unlabelled=[{key: row[key] for key in ("input_ids", "number")} for row in rows[:3]],
        options={"data_collator": collate},
        num_train_epochs=2,
        max_steps=-1,
        train_sampling_strategy="group_by_length",
        remove_unused_columns=False,
        **settings,
    )
    made.train()
    return seen[-8:]


def test_every_method_sees_the_same_batches(tmp_path: Path) -> None:
    plain = batches_of(tmp_path, "none")
    assert len(plain) == 8 and plain[:4] != plain[4:]
    for name in ("r3f", "jachess-joint", "jachess-unlab"):
        assert batches_of(tmp_path, name) == plain, name
    assert batches_of(tmp_path, "none", seed=4) != plain


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("plain"), "none")


@pytest.mark.parametrize(
    "name, method",
    [
        ("r3f", {"strength": TINY}),
        ("sam", {"rho": TINY}),
        ("gradient-norm", {"strength": TINY}),
        ("jachess-joint", {"strength": TINY}),
        ("jachess-unlab", {"unlab_lr_ratio": TINY, "unlab_every": 3}),
    ],
)
def test_a_method_too_weak_to_act_changes_no_bit(
    tmp_path: Path, plain: Any, name: str, method: dict[str, Any]
) -> None:
    assert_same_parameters(plain, run(tmp_path, name, **method), rtol=0, atol=0)


def test_another_seed_changes_the_plain_run(tmp_path: Path, plain: Any) -> None:
    """Otherwise the test above would see neither order nor dropout."""
    assert furthest(plain, run(tmp_path, "none", seed=2)) > 1e-4


def test_seeded_rng_restores_the_generators() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    drawn = []
    for key in ((1, 2), (1, 3), (-1, 2), (1, 2)):
        with seeded_rng(*key):
            drawn.append(torch.rand(3))
    with pytest.raises(TypeError), seeded_rng(1):
        torch.rand("a number")
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(drawn[0], drawn[3]) and len({x[0].item() for x in drawn}) == 3


def test_step_key_changes_with_the_step() -> None:
    regulariser = jx.JacHess(classifier("bert"), weights="uniform", seed=4)
    assert step_key(regulariser) == (4, 0, 0)
    regulariser.step += 1
    assert step_key(regulariser) == (4, 1, 0)
    regulariser.seed = None
    torch.manual_seed(7)
    assert step_key(regulariser) == (7, 1, 0)
