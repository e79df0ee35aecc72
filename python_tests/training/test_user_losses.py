"""With a user's compute_loss or training_step a method acts, or an error says why not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers import Trainer

import jachess_ext as jx
from jachess_ext.training import METHODS, Method, MethodMixin, MethodTrainer, parse_method
from jachess_ext.training.methods import SAM, Loss
from python_tests.covering import pairs
from python_tests.smoothness.tiny_models import classifier

from .runs import parameters, trainer
from .test_architectures import LOUD, TOKENIZER, rows_of

WEIGHTS = torch.tensor([1.0, 3.0, 0.5])


def weighted(outputs: Any, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, labels, weight=WEIGHTS)


def own_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    """The documented way to class weights."""
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    loss = weighted(outputs, labels)
    return (loss, outputs) if return_outputs else loss


def smoothing_loss(
    self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
) -> Any:
    outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
    smooth = self.label_smoother
    loss = (weighted if smooth is None else smooth)(outputs, inputs["labels"])
    return (loss, outputs) if return_outputs else loss


def own_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
    model.train()
    loss = self.compute_loss(model, self._prepare_inputs(inputs))
    self.accelerator.backward(loss)
    return loss.detach()


def step_of_own_loss(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
    model.train()
    loss = model(**self._prepare_inputs(inputs)).loss
    self.accelerator.backward(loss)
    return loss.detach()


def below(**defined: Any) -> type:
    return type("Mine", (MethodMixin, type("Own", (Trainer,), defined)), {})


def above(**defined: Any) -> type:
    return type("Mine", (MethodTrainer,), defined)


class Adding(MethodTrainer):
    """A term more than the method's loss."""

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        more = 1e-3 * next(model.parameters()).square().sum()
        result = super().compute_loss(model, *args, **kwargs)
        return (result[0] + more, result[1]) if isinstance(result, tuple) else result + more


class Discarding(MethodTrainer):
    """The method's loss is computed, and another one trained."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any
    ) -> Any:
        _, outputs = super().compute_loss(model, inputs, return_outputs=True, **named)
        loss = weighted(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class Detached(MethodTrainer):
    """As `Discarding`, with the method's value but not its gradient."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any
    ) -> Any:
        theirs, outputs = super().compute_loss(model, inputs, return_outputs=True, **named)
        loss = weighted(outputs, inputs["labels"])
        loss = loss + (theirs - loss).detach()
        return (loss, outputs) if return_outputs else loss


class Passing(MethodTrainer):
    """A step around the method's."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs)


KINDS: dict[str, type] = {
    "loss below": below(compute_loss=own_loss),
    "loss above": above(compute_loss=own_loss),
    "smoothing loss below": below(compute_loss=smoothing_loss),
    "smoothing loss above": above(compute_loss=smoothing_loss),
    "added above": Adding,
    "discarded above": Discarding,
    "detached above": Detached,
    "step below": below(training_step=own_step),
    "step above": above(training_step=own_step),
    "step without compute_loss below": below(training_step=step_of_own_loss),
    "step without compute_loss above": above(training_step=step_of_own_loss),
    "passing step above": Passing,
}
SLOW = ("published", "jacobian", "cross-holder", "attack-augment", "tapt")


def loud(method: str, **more: Any) -> Method:
    """The method at the size of `LOUD`, by a name that may have a mode."""
    kind = type(parse_method(method))
    mode = {"mode": method.rpartition("-")[2]} if method not in METHODS else {}
    smooth = {"smoothing": 0.9} if "smoothing" in kind.parameters() else {}
    return kind(**{**smooth, **LOUD[kind.name], **mode, **more})


def run(folder: Path, kind: type, method: str | Method, **settings: Any) -> Tensor:
    """All weights after two steps."""
    made = trainer(
        folder,
        loud(method) if isinstance(method, str) else method,
        model=classifier("bert", dropout=0.1, dtype=torch.float32),
        data=rows_of("bert"),
        unlabelled=settings.pop("unlabelled", rows_of("bert")),
        kind=kind,
        options={"processing_class": TOKENIZER, "data_collator": tf.default_data_collator},
        **({"optim": "sgd", "learning_rate": 0.01, "max_grad_norm": 1.0} | settings),
    )
    made.train()
    return torch.cat([p.flatten() for p in parameters(made.model).values()])


def outcome(*args: Any, **settings: Any) -> Tensor | str:
    """The weights, or what the error says."""
    try:
        return run(*args, **settings)
    except ValueError as error:
        return str(error)


@cache
def plain(kind: str) -> Tensor:
    return run(Path(), KINDS[kind], "none")


MODES = ("jachess-joint", "jachess-unlab", "corrupt-consistency-joint")
NOT_IN_THE_LOSS = ("tapt", "jachess-unlab")


@pytest.mark.parametrize("method, kind", pairs((*LOUD, *MODES), KINDS, each=2, slow=SLOW))
def test_every_method_acts_or_says_why_not(tmp_path: Path, method: str, kind: str) -> None:
    more = {"unlab_lr_ratio": 1000.0} if method == "jachess-unlab" else {}
    result = outcome(tmp_path, KINDS[kind], loud(method, **more))
    if isinstance(result, str):
        assert f"method={loud(method).label!r} acts in" in result
        assert kind not in ("added above", "passing step above", "smoothing loss below")
        assert method not in ("none", *NOT_IN_THE_LOSS)
        return
    assert result.isfinite().all()
    moved = (result - plain(kind)).norm() / plain(kind).norm()
    assert moved == 0 if method == "none" else moved > 1e-4


SMOOTHING = [name for name, kind in METHODS.items() if "smoothing" in kind.parameters()]


@pytest.mark.parametrize("method, kind", pairs(SMOOTHING, KINDS))
def test_label_smoothing_acts_or_says_why_not(tmp_path: Path, method: str, kind: str) -> None:
    strengths = {"strength": 0.0} if "strength" in METHODS[method].parameters() else {}
    much, none = (METHODS[method](smoothing=e, **strengths) for e in (0.9, 1e-9))
    result = outcome(tmp_path, KINDS[kind], much)
    if isinstance(result, str):
        assert "acts in" in result
    else:
        assert (result - run(tmp_path, KINDS[kind], none)).norm() > 1e-4


def test_a_bypassed_method_says_what_to_do(tmp_path: Path) -> None:
    for kind, method, words in (
        ("loss above", "r3f", r"acts in MethodMixin\.compute_loss.*class Mine\(MethodMixin, Own\)"),
        ("step above", "sam", r"acts in MethodMixin\.training_step.*super\(\)\.training_step"),
        ("loss below", "label-smoothing", r"Call loss = self\.label_smoother\(outputs, labels\)"),
    ):
        with pytest.raises(ValueError, match=words):
            run(tmp_path, KINDS[kind], method)


@pytest.mark.parametrize("kind", ["loss above", "added above"])
def test_a_bypassed_method_is_refused_with_accumulation(tmp_path: Path, kind: str) -> None:
    """The check waits for the whole step, and stops it before the weights have moved."""
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    if kind == "added above":
        run(tmp_path, KINDS[kind], "r3f", **settings)
        return
    model = classifier("bert", dtype=torch.float32)
    before = parameters(model)
    made = trainer(tmp_path, "l2", model=model, kind=KINDS[kind], **settings)
    with pytest.raises(ValueError, match="acts in"):
        made.train()
    assert all(torch.equal(before[name], p) for name, p in parameters(model).items())


class HalfLoss(Method):
    """A method of one's own."""

    def loss(self, run: Any, model: Any, inputs: Any) -> Loss:
        task, outputs = run(inputs)
        assert outputs.logits.requires_grad
        return Loss(task / 2, outputs)


@pytest.mark.parametrize("kind", ["loss below", "added above", "detached above", "step below"])
def test_a_user_defined_method(tmp_path: Path, kind: str) -> None:
    result = outcome(tmp_path, KINDS[kind], HalfLoss(), max_grad_norm=0.0)
    if isinstance(result, str):
        assert "method='HalfLoss' acts in" in result
    else:
        assert (result - run(tmp_path, KINDS[kind], "none", max_grad_norm=0.0)).norm() > 1e-4


def bare_loss(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
    return model(**inputs).loss


def loss_alone(self: Any, model: Any, inputs: Any, **_: Any) -> Tensor:
    return model(**inputs).loss


@pytest.mark.parametrize(
    "method, loss", pairs([m for m in LOUD if m != "tapt"], [bare_loss, loss_alone])
)
def test_a_loss_without_outputs(tmp_path: Path, method: str, loss: Any) -> None:
    """Methods that do not read the outputs do without; others say what they need."""
    result = outcome(tmp_path, below(compute_loss=loss), method)
    if isinstance(result, str) and "acts in self.label_smoother" not in result:
        assert method in ("recommended", "r3f", "corrupt-consistency")
        assert "needs the model's output" in result and "return (loss, outputs)" in result


@pytest.mark.parametrize("method", ["jachess", "jacobian", "r3f"])
def test_a_penalty_of_frozen_weights(tmp_path: Path, method: str) -> None:
    model = classifier("bert", dtype=torch.float32)
    model.bert.requires_grad_(False)
    made = trainer(tmp_path, loud(method), model=model)
    if method == "jachess":
        with pytest.raises(ValueError, match="depends on no weight that is trained"):
            made.train()
    else:
        made.train()


@pytest.mark.parametrize(
    "method", [lambda: jx.JacHess(classifier("bert")), lambda: SAM, lambda: None, lambda: 3]
)
def test_an_object_that_is_no_method_is_refused(tmp_path: Path, method: Any) -> None:
    with pytest.raises(
        TypeError, match=r"method is .*expected a Method such as jachess_ext\.train"
    ):
        trainer(tmp_path, method())


NEED_UNLABELLED = ("recommended", "jachess-joint", "corrupt-consistency-joint", "tapt")


@pytest.mark.parametrize("method", NEED_UNLABELLED)
def test_a_method_without_its_unlabelled_rows_is_refused(tmp_path: Path, method: str) -> None:
    with pytest.raises(ValueError, match=f"method='{method}' needs unlabelled_dataset=<rows like"):
        trainer(tmp_path, method, options={"processing_class": TOKENIZER})


@pytest.mark.parametrize(
    "method, rows",
    [
        *((method, ["a good film"] * 4) for method in (*NEED_UNLABELLED, "jachess-unlab")),
        ("tapt", [{"text": "a good film"}] * 4),
    ],
)
def test_unlabelled_rows_of_the_wrong_kind(tmp_path: Path, method: str, rows: list) -> None:
    options = {"processing_class": TOKENIZER}
    with pytest.raises(ValueError, match=r"unlabelled_dataset: .*with the columns of train_data"):
        trainer(tmp_path, method, unlabelled=rows, options=options).train()
