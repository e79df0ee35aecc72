"""Checkpoints: a resumed run goes on bit for bit, or says what it starts anew."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from jachess_ext import JacHess
from jachess_ext.smoothness import BaseNorms
from jachess_ext.training import DualSchedule
from jachess_ext.training.trainer import STATE, read_state, write_state
from python_tests.smoothness.tiny_models import VOCABULARY, classifier

from .runs import Padder, assert_same_parameters, examples, method_trainer, trainer
from .test_known_answers import word_tokenizer

TOKENIZER = word_tokenizer(["<pad>", "<unk>", *(f"word{n}" for n in range(VOCABULARY - 2))])
UNLABELLED = examples(8, seed=5, labels=False)

RESUMED = [
    ("train", {}, [2, 3]),
    ("joint", {}, [2, 3]),
    ("unlab", {}, [0, 3]),
    ("unlab", {"unlab_every": 1, "unlab_steps": 1}, [2, 3]),
    ("unlab", {"unlab_every": 2}, [3, 3]),
]
"""Mode, options, and the regulariser's steps in the checkpoints of steps 2 and 3."""


@pytest.mark.parametrize("mode, options, steps", RESUMED)
def test_resuming_goes_on_as_the_run_would_have(
    tmp_path: Path, mode: str, options: dict[str, Any], steps: list[int]
) -> None:
    """Bit for bit, from an epoch's last step and from within an epoch, with dropout.

    An epoch is two steps.  Twelve unlabelled rows are three batches.
    """
    jachess = {"mode": mode, "strength": 0.3, **options}
    unlabelled = examples(12, seed=5, labels=False)
    settings: dict[str, Any] = {"unlabelled": None if mode == "train" else unlabelled}
    settings |= {"data": examples(8), "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    dropping = {"dtype": torch.float32, "dropout": 0.1}
    whole = trainer(tmp_path / "a", jachess, model=classifier("bert", **dropping), **settings)
    whole.train()
    settings["save_strategy"] = "no"
    for step, taken in zip((2, 3), steps, strict=True):
        folder = tmp_path / "a" / f"checkpoint-{step}"
        assert read_state(folder / STATE)["regulariser"]["step"] == taken
        assert not list(folder.glob("*.partial"))
        resumed = trainer(
            tmp_path / "b", jachess, model=classifier("bert", **dropping, seed=1), **settings
        )
        resumed.train(resume_from_checkpoint=str(folder))
        assert resumed.state.global_step == 4
        assert_same_parameters(whole.model, resumed.model, rtol=0, atol=0)
        assert resumed.method.regulariser.state_dict() == whole.method.regulariser.state_dict()
        assert resumed.method.regulariser.step >= 4
        if mode == "unlab":
            dual = resumed.method.dual
            assert (dual.taken, dual.passes) == (4, whole.method.dual.passes)


SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    """One file, of tensors and JSON."""
    trainer(tmp_path, {"mode": "unlab", "unlab_every": 1}, unlabelled=UNLABELLED, **SAVING).train()
    folder = tmp_path / "checkpoint-1"
    assert [path.name for path in folder.glob("*jachess*")] == [STATE]
    state = read_state(folder / STATE)
    assert set(state) == {"regulariser", "unlabelled", "schedule"}
    assert state["unlabelled"] == {"round": 1, "taken": 0}
    trainer(tmp_path / "plain", **SAVING).train()
    assert not (tmp_path / "plain" / "checkpoint-1" / STATE).exists()


@pytest.mark.parametrize(
    "mode, part, words",
    [
        ("joint", "unlabelled", "unlabelled data starts anew"),
        ("unlab", "schedule", "the passes' AdamW starts anew"),
        ("train", "regulariser", "the directions start at step 0"),
    ],
)
def test_missing_state_in_a_checkpoint_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str, part: str, words: str
) -> None:
    jachess = {"mode": mode, "weights": "uniform", "normalize": False, "strength": 1e-4}
    settings = SAVING | {"unlabelled": None if mode == "train" else UNLABELLED}
    trainer(tmp_path, jachess, **settings).train()
    file = tmp_path / "checkpoint-1" / STATE
    write_state(file, {name: of for name, of in read_state(file).items() if name != part})
    trainer(tmp_path / "b", jachess, **settings).train(resume_from_checkpoint=str(file.parent))
    assert f"{file} has no {part}: {words}" in caplog.text


@pytest.mark.parametrize(
    "state, words",
    [
        (b"no archive", "cannot be read"),
        ({"regulariser": "text"}, "cannot be read"),
        ({"regulariser": {"step": "one"}}, "regulariser"),
    ],
)
def test_a_damaged_checkpoint(tmp_path: Path, state: Any, words: str) -> None:
    jachess = {"mode": "unlab", "weights": "uniform", "normalize": False}
    trainer(tmp_path, jachess, unlabelled=UNLABELLED, **SAVING).train()
    file = tmp_path / "checkpoint-1" / STATE
    if isinstance(state, bytes):
        file.write_bytes(state)
    else:
        write_state(file, read_state(file) | state)
    resumed = trainer(tmp_path / "b", jachess, unlabelled=UNLABELLED, **SAVING | {"max_steps": 2})
    with pytest.raises(ValueError, match=words):
        resumed.train(resume_from_checkpoint=str(file.parent))


def test_a_checkpoint_without_jachess(tmp_path: Path) -> None:
    trainer(tmp_path, kind=Trainer, **SAVING).train()
    folder = str(tmp_path / "checkpoint-1")
    with pytest.raises(
        FileNotFoundError,
        match=r"jachess\.safetensors.*there is no regulariser.*method\.regulariser\.base",
    ):
        trainer(tmp_path, {}).train(resume_from_checkpoint=folder)


@pytest.mark.parametrize("name", ["none", "sam"])
def test_methods_without_base_norms_resume_from_any_checkpoint(tmp_path: Path, name: str) -> None:
    """Where the method adds nothing, as the plain Trainer goes on."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    plain = trainer(tmp_path, kind=Trainer, **settings)
    plain.train()
    resumed = trainer(tmp_path / "b", name, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.state.global_step == 2
    if name == "none":
        assert_same_parameters(plain.model, resumed.model)


def lengths(seed: int, labels: bool = True) -> list[dict]:
    return [row for n in (2, 4, 3) for row in examples(4, n, seed=seed + n, labels=labels)]


@pytest.mark.parametrize("name", ["gradient-norm", "r3f", "corrupt-consistency-joint,every=2"])
def test_every_method_resumes(tmp_path: Path, name: str) -> None:
    """Across epochs of three steps, batches grouped by length, with dropout and AdamW."""
    settings: dict[str, Any] = {
        "data": lengths(0),
        "unlabelled": lengths(9, labels=False),
        "train_sampling_strategy": "group_by_length",
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 5,
        "options": {"data_collator": Padder("right"), "processing_class": TOKENIZER},
    }
    ends = []
    for step in (None, 3, 4):
        model = classifier("bert", dropout=0.1)
        made = method_trainer(tmp_path / str(step), name, model=model, **settings)
        checkpoint = step and str(tmp_path / "None" / f"checkpoint-{step}")
        made.train(resume_from_checkpoint=checkpoint)
        ends.append(model)
    for resumed in ends[1:]:
        assert_same_parameters(ends[0], resumed, rtol=0, atol=0)


@pytest.mark.parametrize("weights, warned", [("softmax", False), ("inverse", True)])
def test_other_layer_weights_are_warned_of(
    caplog: pytest.LogCaptureFixture, weights: str, warned: bool
) -> None:
    model = classifier("bert")
    saved, other = JacHess(model, weights="softmax"), JacHess(model, weights=weights)
    saved.base = BaseNorms(torch.tensor([1.0, 2.0]).double(), None, 1)
    state = saved.state_dict()
    # softmax of ±1, the standardised norms of two layers
    assert state["layer_weights"] == pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))])
    other.load_state_dict(state)
    assert ("saved with other layer weights" in caplog.text) == warned
    if warned:
        assert other.layer_weights().tolist() == pytest.approx([1 / 3, 2 / 3])


def test_moments_of_another_model_are_refused() -> None:
    reg = JacHess(torch.nn.Linear(2, 3), strength=0.1)
    dual = DualSchedule(reg, [], lr=0.1)
    good = {"step": torch.tensor(1.0), "exp_avg": torch.ones(3, 2), "exp_avg_sq": torch.ones(3, 2)}
    for moments, words in (
        ({1: good}, "parameter 1 has moments"),
        ({0: {"exp_avg": good["exp_avg"]}}, "parameter 0 has moments"),
        ({0: good | {"exp_avg": torch.full((3, 2), math.nan)}}, "not finite numbers"),
    ):
        with pytest.raises(ValueError, match=words):
            dual.load_state_dict({"taken": 3, "passes": 1, "moments": moments})
        assert dual.taken == dual.passes == 0 and not dual.state_dict()["moments"]
    dual.load_state_dict({"taken": 3, "passes": 1, "moments": {0: good}})
    assert (dual.taken, dual.passes) == (3, 1)
    assert torch.equal(dual.state_dict()["moments"][0]["exp_avg"], good["exp_avg"])
