"""New modules of a checkpoint; a method trains the same in any trial and after compiled runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

import jachess_ext as jx
from jachess_ext.lab.demo import ASSETS
from jachess_ext.lab.workbench.models import load_model, load_tokenizer
from jachess_ext.models import drawn_modules
from jachess_ext.smoothness.probe import decision_slopes
from jachess_ext.training import METHODS, MethodTrainer, NTKDrift, with_lora
from jachess_ext.training.corruption import perturbed_embeddings
from python_tests.smoothness.tiny_models import LABELS, VOCABULARY, classifier

from .runs import arguments, examples, parameters, tensors
from .test_architectures import LOUD, TOKENIZER

STRONG = {
    **LOUD,
    "sam": {"rho": 0.5},
    "gradient-norm": {"strength": 0.2},
    "tapt": {"tapt_lr": 1e-2, "tapt_epochs": 1.0},
    **{name: {"strength": 0.5} for name in ("jacobian", "cross-holder", "published", "jachess")},
}
MODES = [
    (name, mode)
    for name in STRONG
    for mode in (METHODS[name].modes if "mode" in METHODS[name].parameters() else ("",))
]
QUICK = {"jachess", "attack-augment"}
EVERY = [
    pytest.param(name, mode, marks=[] if name in QUICK else pytest.mark.slow)
    for name, mode in MODES
]


def method_of(name: str, mode: str) -> Any:
    return METHODS[name](**STRONG[name], **({"mode": mode} if mode else {}))


def weights(model: Any) -> Tensor:
    return torch.cat([p.flatten() for p in parameters(model).values()])


# ---- who loaded the model -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of a language model: it lacks the classifier's head and its pooler."""
    folder = tmp_path_factory.mktemp("headless")
    config = classifier("bert", dropout=0.1).config
    torch.manual_seed(5)
    tf.BertForMaskedLM(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def by_our_loader(folder: str) -> Any:
    return load_model(folder, LABELS, load_tokenizer(folder), seed=7)


def by_transformers(folder: str) -> Any:
    torch.manual_seed(7)
    auto = tf.AutoModelForSequenceClassification
    return auto.from_pretrained(folder, num_labels=LABELS, dtype=torch.float32)


def made(folder: Path, method: Any, **options: Any) -> MethodTrainer:
    settings = options.pop("settings", {})
    return MethodTrainer(
        args=arguments(folder, **{"optim": "sgd", "learning_rate": 0.02, **settings}),
        train_dataset=examples(8, 5),
        unlabelled_dataset=examples(8, 5, seed=5, labels=False),
        method=method,
        processing_class=TOKENIZER,
        data_collator=tf.default_data_collator,
        **options,
    )


def finetuned(folder: Path, name: str, mode: str, model: Any, **settings: Any) -> Tensor:
    trainer = made(folder, method_of(name, mode), model=model, settings=settings)
    trainer.train()
    return weights(trainer.model)


def test_new_modules(headless: str) -> None:
    """As transformers reports them; a head of one's own is new, and a whole checkpoint has none."""
    model = by_transformers(headless)
    assert drawn_modules(model) == ("bert.pooler.dense", "classifier")
    assert drawn_modules(by_our_loader(headless)) == drawn_modules(model)
    model.classifier = torch.nn.Linear(12, 5)
    assert drawn_modules(model) == ("bert.pooler.dense", "classifier")
    assert drawn_modules(tf.AutoModel.from_pretrained(ASSETS)) == ()
    adapted = with_lora(by_transformers(headless))
    assert set(adapted.peft_config["default"].modules_to_save) >= {"bert.pooler.dense"}


# ---- several trials -----------------------------------------------------------------------------


def other_model(seed: int) -> Any:
    model = classifier("bert", dtype=torch.float32, dropout=0.1, seed=seed)
    model.drawn_modules = ("classifier",)
    return model


class Models:
    """A model_init that gives the model of another seed each time, the first to the constructor."""

    def __init__(self, *seeds: int) -> None:
        self.seeds, self.given = list(seeds), []

    def __call__(self) -> Any:
        self.given.append(other_model(self.seeds.pop(0)))
        return self.given[-1]


@pytest.mark.parametrize("name, mode", EVERY)
def test_two_trials_are_two_trainers(tmp_path: Path, name: str, mode: str) -> None:
    """One trainer's second trial, and one method's second trainer."""

    def last_of(method: Any, *seeds: int) -> Tensor:
        trainer = made(tmp_path, method, model_init=Models(*seeds))
        for _ in seeds[1:]:
            trainer.train()
        return weights(trainer.model)

    alone, method = last_of(method_of(name, mode), 2, 2), method_of(name, mode)
    assert torch.equal(last_of(method, 0, 1, 2), alone)
    assert torch.equal(last_of(method, 2, 2), alone)


def test_hyperparameter_search(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    models, rates = Models(0, 1, 2), []

    def space(trial: Any) -> dict[str, float]:
        rates.append(trial.suggest_float("learning_rate", 0.01, 0.02))
        return {"learning_rate": rates[-1]}

    method, rows = method_of("jachess", "train"), examples(4, 5, seed=9)
    trainer = made(tmp_path, method, model_init=models, eval_dataset=rows)
    trainer.hyperparameter_search(space, n_trials=2, backend="optuna")
    for seed, model, rate in zip((1, 2), models.given[1:], rates, strict=True):
        alone = made(
            tmp_path,
            method,
            model_init=Models(seed, seed),
            settings={"learning_rate": rate},
        )
        alone.train()
        assert torch.equal(weights(model), weights(alone.model))


def test_base_norms_of_a_trial(tmp_path: Path) -> None:
    """Each trial measures its own, unless they are given."""
    trainer = made(tmp_path, method_of("jachess", "train"), model_init=Models(0, 1, 2, 3))
    measured = []
    for _ in range(2):
        trainer.train()
        measured.append(trainer.method.regulariser.base)
    assert not torch.equal(measured[0].jacobian, measured[1].jacobian)
    trainer = made(tmp_path, method_of("jachess", "train"), model_init=Models(0, 1, 2))
    trainer.method.regulariser.base = measured[0]
    for _ in range(2):
        trainer.train()
        assert trainer.method.regulariser.base is measured[0]


def test_drift_of_a_trial(tmp_path: Path) -> None:
    drift = NTKDrift(tensors(examples(2, 5)))
    trainer = made(tmp_path, "none", model_init=Models(0, 1, 2), callbacks=[drift])
    for _ in range(2):
        trainer.train()
        assert drift.history[0]["ntk/drift"] == 0 < drift.history[-1]["ntk/drift"]


# ---- compiled before ----------------------------------------------------------------------------


class Tiny(nn.Module):
    """A classifier that compiles in no time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = nn.Embedding(VOCABULARY, 4)
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, LABELS)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> Any:
        x = self.embeddings(input_ids)
        y = torch.tanh(self.layer(x) + x.square())
        logits = self.head(nn.functional.dropout(y.mean(1), 0.1, self.training))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=(x, y))


@pytest.mark.parametrize("given", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_before_without_the_hooks(tmp_path: Path, given: bool) -> None:
    """Dynamo reuses the plain run's code, which has no hooks in it; and plain again afterwards."""
    torch._dynamo.reset()
    for name in ("none", *(("r3f", "attack-augment") if given else ()), "jachess", "none"):
        mode = "train" if name == "jachess" else ""
        eager = finetuned(tmp_path, name, mode, Tiny())
        model, settings = Tiny(), {}
        if given:
            model = torch.compile(model, backend="eager")
            settings = {"remove_unused_columns": False}  # the Trainer cannot read its forward
        else:
            settings = {"torch_compile": True, "torch_compile_backend": "eager"}
        again = finetuned(tmp_path, name, mode, model, **settings)
        torch.testing.assert_close(again, eager, rtol=1e-5, atol=1e-6, msg=name)
    torch._dynamo.reset()


@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_measured_when_compiled_before(inside: bool) -> None:
    """Compiled by `torch.compile` or by `Module.compile`, and called, before it is measured."""

    def noisy(model: Any) -> Tensor:
        with perturbed_embeddings(model, 1.0, torch.Generator()):
            return model(**batch).logits

    measures = {
        "noise": noisy,
        "slopes": lambda model: torch.tensor(list(decision_slopes(model, batch).values())),
        "smoothness": lambda model: jx.smoothness(model, batch, seed=0).jacobian,
        "ntk": lambda model: jx.ntk(model, batch),
    }
    batch = tensors(examples(2, 5))
    torch._dynamo.reset()
    model = Tiny().double().eval()
    expected = {name: measure(model).detach() for name, measure in measures.items()}
    if inside:
        model.compile(backend="eager")
    compiled = model if inside else torch.compile(model, backend="eager")
    compiled(**batch).loss.backward()
    for name, measure in measures.items():
        torch.testing.assert_close(measure(compiled).detach(), expected[name], msg=name)
    torch._dynamo.reset()
