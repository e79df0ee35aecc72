"""MethodTrainer: modes, logs, what it leaves alone, checkpoints, LoRA and checkpointing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer

from jachess_ext.smoothness import BaseNorms
from python_tests import processes
from python_tests.smoothness.host_reads import simulate_graphs
from python_tests.smoothness.tiny_models import BLOCKS, LABELS, classifier

from .runs import SGD, assert_same_parameters, entries, examples, furthest, trainer

UNLABELLED = examples(8, seed=5, labels=False)


def normalised(made: Any, entry: dict, tokens: int = 3) -> float:
    """R from a log entry's norms, sums over a row's tokens: each over the base's mean per token."""
    regulariser = made.method.regulariser
    total = 0.0
    for k, weight in enumerate(regulariser.layer_weights().tolist()):
        for kind in ("jacobian", "hessian"):
            base = float(getattr(regulariser.base, kind)[k])
            total += weight * entry[f"jachess/{kind}_{k}"] / tokens / base
    return total


def test_logs_every_norm_beside_the_loss(tmp_path: Path) -> None:
    made = trainer(tmp_path, {"strength": 0.2}, max_steps=3, logging_steps=1)
    made.train()
    logs = entries(made, "loss")
    assert len(logs) == 3
    names = [f"{kind}_{k}" for kind in ("jacobian", "hessian") for k in range(BLOCKS)]
    for entry in logs:
        assert all(entry[f"jachess/{name}"] > 0 for name in names)
        total = entry["jachess/task_loss"] + entry["jachess/penalty"]
        assert entry["loss"] == pytest.approx(total, rel=1e-4)
        assert entry["jachess/penalty"] == pytest.approx(0.2 * normalised(made, entry), rel=1e-5)


def test_logs_are_means_between_entries(tmp_path: Path) -> None:
    each = trainer(tmp_path, {"strength": 0.2}, max_steps=4, logging_steps=1)
    pairs = trainer(tmp_path, {"strength": 0.2}, max_steps=4, logging_steps=2)
    each.train()
    pairs.train()
    single = [entry["jachess/penalty"] for entry in entries(each, "loss")]
    means = [entry["jachess/penalty"] for entry in entries(pairs, "loss")]
    assert means == pytest.approx([sum(single[:2]) / 2, sum(single[2:]) / 2], rel=1e-9)


def test_strength_zero_is_the_plain_trainer(tmp_path: Path) -> None:
    plain, zero = trainer(tmp_path, kind=Trainer), trainer(tmp_path, {"strength": 0.0})
    plain.train()
    zero.train()
    assert_same_parameters(plain.model, zero.model, rtol=0, atol=0)
    assert zero.method.regulariser.base is None and not entries(zero, "jachess/penalty")


def test_calibration_and_directions_leave_torchs_generator_alone(tmp_path: Path) -> None:
    """With a vanishing strength and dropout on, the run is the plain one: same masks and order.

    SGD: Adam would blow up round-off in the key bias, whose gradient is zero.
    """
    settings: dict[str, Any] = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.05}
    runs = []
    for options in ({"kind": Trainer}, {"method": {"strength": 1e-12}}):
        model = classifier("bert", dropout=0.2, dtype=torch.float32)
        runs.append(trainer(tmp_path, model=model, **options, **settings))
        runs[-1].train()
    assert_same_parameters(runs[0].model, runs[1].model, rtol=1e-5, atol=1e-6)


def test_evaluation_and_prediction_have_no_penalty(tmp_path: Path) -> None:
    data = examples(8, seed=2)
    made = trainer(tmp_path, {"strength": 5.0})
    plain = trainer(tmp_path, kind=Trainer)
    before = made.method.regulariser.step
    ours, theirs = made.evaluate(data), plain.evaluate(data)
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-7)
    predicted = made.predict(data).predictions
    assert predicted.shape == (8, LABELS)
    assert torch.equal(torch.tensor(predicted), torch.tensor(plain.predict(data).predictions))
    assert made.method.regulariser.step == before


def test_evaluation_during_training(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    options = {"eval_dataset": examples(4, seed=2)}
    made = trainer(tmp_path, {"strength": 0.2}, options=options, **settings)
    made.train()
    assert len(entries(made, "eval_loss")) == 2
    assert not any("jachess/penalty" in entry for entry in entries(made, "eval_loss"))


def test_missing_labels(tmp_path: Path) -> None:
    made = trainer(
        tmp_path, {"weights": "uniform", "normalize": False}, data=examples(8, labels=False)
    )
    with pytest.raises(ValueError, match="model did not return a loss from the inputs"):
        made.train()


def test_joint_mode(tmp_path: Path) -> None:
    plain = trainer(tmp_path, kind=Trainer, max_steps=3)
    made = trainer(tmp_path, {"mode": "joint", "strength": 0.3}, unlabelled=UNLABELLED, max_steps=3)
    plain.train()
    made.train()
    assert furthest(plain.model, made.model) > 1e-4
    first = [entries(run, "loss")[0] for run in (plain, made)]
    assert first[1]["jachess/task_loss"] == pytest.approx(first[0]["loss"], rel=1e-4)
    assert made.method.regulariser.step == 3


@pytest.mark.parametrize("every, passes", [(None, 2), (2, 4)])
def test_unlab_mode(tmp_path: Path, every: int | None, passes: int) -> None:
    jachess = {"mode": "unlab", "unlab_every": every, "unlab_lr_ratio": 0.5}
    settings: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2}
    made = trainer(tmp_path, jachess, unlabelled=UNLABELLED, **settings)
    made.train()
    logs = entries(made, "jachess/penalty")
    assert len(logs) == passes
    assert made.method.regulariser.step == passes * 2, "a pass is two batches of four"
    moments = made.method.dual.optimizer.state
    assert moments and all(state["step"] == passes * 2 for state in moments.values())
    assert made.method.dual.optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 1e-3)
    shared = [made.optimizer.state[p]["exp_avg"] for p in moments]
    own = [state["exp_avg"] for state in moments.values()]
    assert not any(torch.equal(a, b) for a, b in zip(shared, own, strict=True))


def test_base_norms_set_before_training_stay(tmp_path: Path) -> None:
    base = BaseNorms(torch.ones(BLOCKS).double(), torch.ones(BLOCKS).double(), 1)
    made = trainer(tmp_path, {})
    made.method.regulariser.base = base
    made.train()
    assert made.method.regulariser.base is base


def test_label_smoothing_on_a_peft_model(tmp_path: Path) -> None:
    """The stand-in for the model passes for a PEFT model in the Trainer's own code."""
    model = classifier("bert", dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    made = trainer(tmp_path, {}, model=model, label_smoothing_factor=0.1)
    made.train()
    assert len(entries(made, "jachess/task_loss")) == 2


def test_bf16(tmp_path: Path) -> None:
    made = trainer(tmp_path, {"strength": 0.3}, bf16=True)
    made.train()
    assert all(torch.isfinite(p).all() for p in made.model.parameters())
    logs = entries(made, "loss")
    assert len(logs) == 2
    for entry in logs:
        assert entry["jachess/penalty"] == pytest.approx(0.3 * normalised(made, entry), rel=1e-5)


BAD_TRAINERS = [
    ({"mode": "joint"}, None, {}, "method='jachess-joint' needs unlabelled_dataset"),
    ({"mode": "unlab"}, None, {}, "method='jachess-unlab' needs unlabelled_dataset"),
    ({"mode": "unlab"}, UNLABELLED, {"fp16": True}, "fp16, whose loss scaling"),
]


@pytest.mark.parametrize("jachess, unlabelled, settings, sentence", BAD_TRAINERS)
def test_bad_trainers(
    tmp_path: Path, jachess: dict, unlabelled: Any, settings: dict, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        trainer(tmp_path, jachess, unlabelled=unlabelled, **settings)


def test_unlab_in_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path, {"mode": "unlab"}, unlabelled=UNLABELLED)
    monkeypatch.setattr(type(made.args), "world_size", property(lambda self: 2))
    with pytest.raises(ValueError, match=r"method='jachess-unlab' runs in one process"):
        made.method.bind(made)


# ---- steps as a CUDA graph -----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["none", "jachess,strength=0.2,seed=0"])
def test_graphed_steps_are_the_eager_ones(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, with a graph that runs the step again: what is copied, logged and reset."""
    runs = []
    for graphed in (False, True):
        made = trainer(
            tmp_path / str(graphed), method, max_steps=7, options={"graphed": graphed}, **SGD
        )
        reads = []
        if graphed:
            reads = simulate_graphs(monkeypatch, list(made.model.parameters()))
        made.train()
        runs.append((made, entries(made, "loss")))
    assert not reads and made._graph._graph.replays == 4
    (eager, of_eager), (replayed, of_replayed) = runs
    assert furthest(eager.model, replayed.model) == 0
    assert furthest(eager.model, classifier("bert", dtype=torch.float32)) > 0
    times = ("epoch", "step", "grad_norm")
    for a, b in zip(of_eager, of_replayed, strict=True):
        assert a.keys() == b.keys() and len(a) > 3
        assert all(b[name] == pytest.approx(a[name], rel=1e-6) for name in a if name not in times)


@pytest.mark.cuda
def test_graphed_steps_are_the_eager_ones_on_a_gpu(tmp_path: Path) -> None:
    models = []
    for graphed in (False, True):
        made = trainer(
            tmp_path / str(graphed),
            "jachess,strength=0.2,seed=0",
            max_steps=7,
            options={"graphed": graphed},
            use_cpu=False,
        )
        made.train()
        models.append(made.model)
    assert furthest(*models) == 0


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("sam", {}),
        ("r3f", {}),
        ("jachess,mode=joint", {}),
        ("jachess,placebo=true", {}),
        ("jachess", {"gradient_accumulation_steps": 2}),
    ],
)
def test_methods_that_cannot_be_graphed_are_refused(
    tmp_path: Path, method: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="cannot run with graphed=True: a CUDA graph takes none"):
        trainer(tmp_path, method, unlabelled=UNLABELLED, options={"graphed": True}, **settings)


def test_graphed_on_the_cpu(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", {"strength": 0.2, "seed": 0}, max_steps=3)
    plain.train()
    made = trainer(
        tmp_path / "graphed",
        {"strength": 0.2, "seed": 0},
        max_steps=3,
        options={"graphed": True},
    )
    with pytest.warns(UserWarning, match="run as they are: a CUDA graph needs the batch on"):
        made.train()
    assert furthest(plain.model, made.model) == 0


def test_without_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import jachess_ext\n"
        "try:\n    jachess_ext.training\n"
        "except ImportError as error:\n    print(error)"
    )
    run = processes.run([sys.executable, "-c", code], check=True)
    assert run.stdout.strip() == (
        "jachess_ext.training needs transformers, which is not installed: pip install transformers"
    )
