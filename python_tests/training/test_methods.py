"""Micro-batches, bf16, LoRA and checkpointing change no method; parsing and settings."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jachess_ext.lab.workbench.models import Encoded
from jachess_ext.smoothness import JacHess as Regulariser
from jachess_ext.training import METHODS, parse_method, with_lora
from jachess_ext.training.methods import JacHess
from python_tests.smoothness.tiny_models import LABELS, classifier

from .runs import (
    SETTINGS,
    Padder,
    assert_same_parameters,
    entries,
    examples,
    first_figures,
    furthest,
    method_trainer,
    parameters,
    tensors,
)
from .test_accumulation import mean_loss

FAST = ("label-smoothing", "sam", "r3f", "jacobian-joint", "cross-holder-unlab")
"""Methods that act in another place each; the others are slow tests, and `jachess-train` is that of
`test_accumulation`."""


def methods(*without: str) -> list[Any]:
    """The names of `SETTINGS` that do not end in one of `without`."""
    return [
        pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
        for name in SETTINGS
        if not name.endswith(without)
    ]


@pytest.fixture
def equal_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """R3F's noise is the same for every row of every batch."""

    def draw(shape: torch.Size, size: float, *_: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2)
        return (size * torch.randn(shape[1:], generator=generator)).expand(shape)

    monkeypatch.setattr("jachess_ext.training.methods.noise.draw_noise", draw)


def ragged(labels: bool = True) -> list[dict]:
    rows = [row for n in (2, 4, 3) for row in examples(4, n, seed=n, labels=labels)]
    return rows[::2] + rows[1::2]


@pytest.mark.usefixtures("equal_directions", "equal_noise")
@pytest.mark.parametrize(
    "name, own_loss",
    [pytest.param(*p.values, False, marks=p.marks) for p in methods("-unlab")]
    + [("l2", True), ("r3f", True)],
)
def test_micro_batches_change_nothing(tmp_path: Path, name: str, own_loss: bool) -> None:
    runs = []
    for size, pieces in ((8, 1), (2, 4)):
        model = classifier("bert")
        model.accepts_loss_kwargs = False
        made = method_trainer(
            tmp_path,
            name,
            model=model,
            unlabelled=examples(1, seed=5, labels=False) * 8,
            options={"compute_loss_func": mean_loss} if own_loss else {},
            per_device_train_batch_size=size,
            gradient_accumulation_steps=pieces,
            max_steps=2,
        )
        made.train()
        runs.append(made)
    assert_same_parameters(runs[0].model, runs[1].model, rtol=1e-6, atol=1e-8)
    figures = [first_figures(made) for made in runs]
    assert figures[0] == pytest.approx(figures[1], rel=1e-4)
    if name != "none":
        plain = method_trainer(tmp_path, "none", per_device_train_batch_size=8, max_steps=2)
        plain.train()
        assert furthest(plain.model, runs[0].model) > 1e-4, "the method moved nothing"


@pytest.mark.usefixtures("equal_noise")
@pytest.mark.parametrize("name", methods())
def test_bf16_changes_losses_by_rounding_only(tmp_path: Path, name: str) -> None:
    figures = []
    for bf16 in (False, True):
        method = {"noise": 1e-4} if name == "r3f" else {}
        made = method_trainer(
            tmp_path,
            name,
            model=classifier("bert", dtype=torch.float32),
            method=method,
            bf16=bf16,
            max_steps=1,
            learning_rate=1e-5,
        )
        made.train()
        figures.append(first_figures(made))
    assert set(figures[0]) == set(figures[1])
    for key, value in figures[0].items():
        assert figures[1][key] == pytest.approx(value, rel=0.05, abs=1e-9), key


def test_regression(tmp_path: Path) -> None:
    model = classifier("bert")
    model.config.num_labels, model.num_labels = 1, 1
    model.config.problem_type = "regression"
    model.classifier = torch.nn.Linear(12, 1).double()
    data = [row | {"labels": torch.tensor(n % 5.0).double()} for n, row in enumerate(examples(16))]
    made = method_trainer(tmp_path, "r3f", model=model, data=data, max_steps=8, learning_rate=0.02)
    made.train()
    losses = [entry.get("jachess/task_loss", entry["loss"]) for entry in entries(made, "loss")]
    assert sum(losses[4:]) < sum(losses[:4])


@pytest.mark.parametrize(
    "family, name, lora",
    [
        ("bert", "r3f", True),
        ("opt", "sam", True),
        ("opt", "jacobian-joint", False),
        ("bert", "jachess-train", True),
        ("gpt2", "jachess-train", False),
    ],
)
def test_lora_and_checkpointing(tmp_path: Path, family: str, name: str, lora: bool) -> None:
    """Only adapters and the head move; checkpointing changes nothing."""
    runs = []
    for checkpointing in (False, True):
        model = classifier(family, dtype=torch.float32, dropout=0.2 if family == "bert" else 0.0)
        model = with_lora(model) if lora else model
        before = parameters(model)
        made = method_trainer(tmp_path, name, model=model, gradient_checkpointing=checkpointing)
        made.train()
        moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
        assert moved and (not lora or all("lora_" in n or "modules_to_save" in n for n in moved))
        runs.append(model)
    if lora:
        config = runs[0].peft_config["default"]
        assert (config.r, config.lora_alpha) == (8, 16)
    assert_same_parameters(*runs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["joint", "unlab"])
def test_penalty_without_dropout(tmp_path: Path, mode: str) -> None:
    """R of a model full of dropout is then R of the model without, and the task keeps its own."""
    penalties, tasks = [], []
    for rate, dropout in ((0.5, False), (0.0, True), (0.5, True)):
        made = method_trainer(
            tmp_path,
            f"jachess-{mode}",
            model=classifier("bert", dropout=rate),
            method={"dropout": dropout, "normalize": False, "weights": "uniform"},
            learning_rate=1e-12,
            max_steps=1,
        )
        made.train()
        figures = first_figures(made)
        penalties.append(figures["jachess/penalty"])
        tasks.append(figures.get("jachess/task_loss", figures["loss"]))
    assert penalties[0] == pytest.approx(penalties[1], rel=1e-9)
    assert abs(penalties[2] / penalties[1] - 1) > 1e-3
    assert abs(tasks[0] / tasks[1] - 1) > 1e-3, "the task's own pass has its dropout"


def test_parse() -> None:
    text = "jachess-unlab, strength=0.1, weights=0.5,1, hessian=no,layers=0,-1,dimensions=all"
    made = parse_method(text)
    settings = made.settings
    assert (made.name, made.mode, made.strength) == ("jachess", "unlab", 0.1)
    assert (settings["weights"], settings["layers"]) == ([0.5, 1], [0, -1])
    assert (settings["hessian"], settings["dimensions"]) == (False, "all")
    assert (made.label, made.knob) == ("jachess-unlab", "unlab_lr_ratio")
    reg = made.build_regulariser(torch.nn.Linear(1, 1), seed=4)
    assert reg.weights.tolist() == [0.5, 1.0] and reg.settings.layers == [0, -1]
    assert not reg.settings.hessian and reg.strength == 0.1 and reg.seed == 4
    assert parse_method("cross-holder").label == "cross-holder-train"
    assert parse_method("jacobian,mode=joint").label == "jacobian-joint"
    assert parse_method("jachess,layers=1").settings["layers"] == [1]
    assert [parse_method(n).strength for n in ("r3f", "l2", "published")] == [1.0, 1e-5, 1.0]
    assert [parse_method(n).knob for n in ("none", "tapt", "sam", "l2")] == [None] * 3 + [
        "strength"
    ]


@pytest.mark.parametrize("name", METHODS)
def test_settings_make_the_method_again(name: str) -> None:
    made = parse_method(name)
    assert made.name == name and made.replace().settings == made.settings
    assert type(made)(**made.settings).settings == made.settings == pickled(made).settings
    assert eval(repr(made), vars(sys.modules[type(made).__module__])).settings == made.settings
    if (knob := made.knob) is not None:
        other = made.replace(**{knob: 0.3})
        assert other.settings == made.settings | {knob: 0.3} != made.settings
        assert other.replace().settings == other.settings


def pickled(made: Any) -> Any:
    return pickle.loads(pickle.dumps(made))


def test_settings_are_those_of_the_regulariser() -> None:
    """They are declared twice, with the same defaults but for two; each reaches it."""
    parameters = signature(Regulariser).parameters
    own = {n: p.default for n, p in parameters.items() if n not in ("model", "compile")}
    ours = JacHess.parameters()
    assert {name: ours[name] for name in own} == own | {"normalize": True}
    values = {"squared": True, "hessian_gradient": False, "temperature": 2.0, "seed": 5}
    made = JacHess(**values, distribution="rademacher").build_regulariser(torch.nn.Linear(1, 1), 4)
    assert made.settings.squared and made.settings.distribution == "rademacher" and made.seed == 5
    assert (made.hessian_gradient, made.temperature, made.normalize) == (False, 2.0, True)


@pytest.mark.parametrize("name", ["jacobian", "cross-holder"])
def test_presets_reach_the_regulariser(name: str) -> None:
    settings = parse_method(f"{name}-unlab").build_regulariser(torch.nn.Linear(1, 1)).settings
    assert settings.layers == "logits" and settings.hessian is (name == "cross-holder")


NEEDS = [
    ("tapt", {}, "needs processing_class"),
    ("corrupt-augment", {}, "needs processing_class=<the tokenizer>"),
    ("recommended", {}, "needs processing_class"),
    ("attack-augment", {}, "needs processing_class"),
    ("sam", {"fp16": True}, "not in fp16"),
    ("gradient-norm", {"fp16": True}, "runs in one process and not in fp16"),
    ("jachess-unlab", {"fp16": True}, "fp16, whose loss scaling"),
]


@pytest.mark.parametrize("name, settings, sentence", NEEDS)
def test_what_a_method_needs_of_its_trainer(
    tmp_path: Path, name: str, settings: dict, sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"method='{name}' .*{sentence}"):
        method_trainer(tmp_path, name, **settings)


def test_passes_of_unlabelled_rows_in_several_processes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = method_trainer(tmp_path, "jachess-unlab")
    monkeypatch.setattr(type(made.args), "world_size", property(lambda self: 2))
    with pytest.raises(ValueError, match=r"method='jachess-unlab' runs in one process"):
        made.method.bind(made)


BAD = [
    ("jachess-dual", "unknown method 'jachess-dual'; expected one of none, label-smoothing"),
    ("sam-train", "unknown method 'sam-train'"),
    ("corrupt-consistency-unlab", "unknown method 'corrupt-consistency-unlab'"),
    ("recommended-joint", "unknown method 'recommended-joint'"),
    ("sam,strength=1", "method 'sam' has no setting 'strength'; it has rho"),
    ("none,rho=1", "method 'none' has no setting 'rho'; it has none"),
    ("jachess-unlab,mode=train", "has no setting 'mode'"),
    ("jacobian,layers=all", "has no setting 'layers'"),
    ("sam,0.1", "'0.1' has no ="),
    ("sam,rho=much", "rho is 'much'; expected a number"),
    ("sam,rho=0", "rho is 0.0; expected a number above 0"),
    ("jachess,hessian=perhaps", "hessian is 'perhaps'; expected yes or no"),
    ("r3f,noise_distribution=cauchy", "expected one of uniform, normal"),
    ("tapt,tapt_masked=1", "tapt_masked is 1.0; expected a share"),
    ("jachess,mode=dual", "mode is 'dual'; expected one of train, joint, unlab"),
    ("jachess,strength=-1", "strength is -1.0; expected a number from 0 up"),
    ("jachess,weights=biggest", "weights is 'biggest'; expected one of uniform"),
    ("jachess,weights=1,x", "weights is '1,x'; expected one of"),
    ("jachess,layers=1,x", "layers is '1,x'; expected 'all', 'logits' or a list"),
    ("jachess,layers=0.5", "layers is [0.5]; expected 'all', 'logits' or a list"),
    ("jachess,dimensions=many", "dimensions is 'many'; expected 'all' or"),
    ("jachess,directions=0", "directions is 0; expected"),
    ("jachess,seed=x", "seed is 'x'; expected a whole number"),
    ("jachess,temperature=0", "temperature is 0.0; expected a number above 0"),
    ("jachess,engine=forward", "engine is 'forward'; expected one of 'jet'"),
    ("jachess,unlab_lr_ratio=0", "unlab_lr_ratio is 0.0; expected a number above 0"),
    ("jachess,unlab_schedule=cosine", "unlab_schedule is 'cosine'; expected one of constant"),
    ("jachess,unlab_every=0", "unlab_every is 0; expected a whole number from 1 up"),
    ("jachess,calibration_batches=0", "calibration_batches is 0; expected a whole number"),
    ("jachess-train,dropout=no", "dropout=False needs a pass of R alone"),
    ("corrupt-augment,clean=1.5", "clean is 1.5; expected a share from 0 to 1"),
    ("label-smoothing,smoothing=0", "smoothing is 0.0; expected a share between 0 and 1"),
    ("jachess-unlab,placebo=yes", "placebo acts on penalties added to the task loss"),
    ("sam,placebo=yes", "method 'sam' has no setting 'placebo'"),
    ("attack-augment,steps=0", "steps is 0; expected a whole number"),
    ("attack-augment,synonyms=", "synonyms is ''; expected a path"),
]


@pytest.mark.parametrize("text, sentence", BAD)
def test_bad_methods(text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_method(text)
    assert sentence in str(caught.value)


def test_a_data_set_of_encoded_rows(tmp_path: Path) -> None:
    """`Encoded` is a data set of the Trainer's, and its `collate` a collator."""
    rows = [{k: row[k].tolist() for k in ("input_ids", "attention_mask")} for row in examples(8)]
    data = Encoded(rows, [n % LABELS for n in range(8)], Padder("left"))
    made = method_trainer(
        tmp_path,
        "jachess-joint",
        data=data,
        unlabelled=data,
        options={"data_collator": data.collate},
    )
    made.train()
    assert first_figures(made)["jachess/penalty"] > 0


def test_tapt_with_adapters_does_not_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    """The backbone that it changed is not in the checkpoint."""
    made = method_trainer(
        tmp_path,
        "tapt",
        model=with_lora(classifier("bert", dtype=torch.float32)),
        options={"processing_class": Padder("right")},
    )
    made.state.global_step = 3
    with pytest.raises(ValueError, match="cannot go on from a checkpoint: it has the adapters"):
        made.begin_training()


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_r3f_is_in_full_precision_behind_data_parallelism(tmp_path: Path) -> None:
    """Noise of 1e-5 is lost in bfloat16, in which accelerate wraps the model within DDP."""
    batch = tensors(examples(4, labels=False))

    def penalty(model: torch.nn.Module) -> float:
        method = made.method.bind(made)  # draws the same numbers again
        with torch.no_grad():
            return method.penalty(model, batch, model(**batch)).item()

    model = classifier("bert", dtype=torch.float32).eval()
    made = method_trainer(tmp_path, "r3f", method={"noise": 1e-5}, model=model)
    expected = penalty(model)
    model._original_forward = model.forward
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    assert penalty(model) == expected > 0
    assert penalty(torch.nn.parallel.DistributedDataParallel(model)) == expected
