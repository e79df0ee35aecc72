"""Methods on the loss on problems with an answer in closed form, through the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, log_softmax, softmax
from scipy.stats import entropy
from torch import Tensor, nn
from torch.nn import functional as F

from jachess_ext.training import MethodTrainer
from jachess_ext.training.decision import kl_divergence
from python_tests.smoothness.tiny_models import VOCABULARY, classifier

from .runs import (
    LABELS,
    SGD,
    arguments,
    assert_same_parameters,
    examples,
    first,
    method_trainer,
    parameters,
    tensors,
)
from .test_known_answers import (
    ROWS,
    LinearModel,
    word_tokenizer,
)

LR = SGD["learning_rate"]


def trained(folder: Path, name: str, model: nn.Module, **settings: Any) -> MethodTrainer:
    """One step on both rows of `ROWS`, or what the settings say."""
    made = method_trainer(folder, name, model=model, **({"data": ROWS, "max_steps": 1} | settings))
    made.train()
    return made


def features(model: LinearModel) -> np.ndarray:
    """[2, 3]: what the linear layer sees of `ROWS`."""
    return model.embeddings(tensors(ROWS)["input_ids"]).sum(1).numpy()


def weights(model: LinearModel) -> tuple[np.ndarray, np.ndarray]:
    return model.linear.weight.detach().numpy().copy(), model.linear.bias.detach().numpy().copy()


def test_l2(tmp_path: Path) -> None:
    """W ← W − η (g + s W), and b ← b − η g: biases are left free."""
    model = LinearModel()
    (weight, bias), x = weights(model), features(model)
    made = trained(tmp_path, "l2", model, method={"strength": 0.3})
    away = softmax(x @ weight.T + bias, -1) - np.eye(2)
    slope = away.T @ x / 2 + 0.3 * weight
    np.testing.assert_allclose(weights(model)[0], weight - LR * slope, rtol=1e-9)
    np.testing.assert_allclose(weights(model)[1], bias - LR * away.mean(0), rtol=1e-9)
    penalty = first(made, "jachess/penalty")
    assert penalty == pytest.approx(0.15 * np.square(weight).sum(), rel=1e-6)


def test_r3f(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two classes: KL(p‖q) + KL(q‖p) = (p₁ − q₁) (s − t), s and t the differences of the logits."""
    z = torch.tensor([[0.01, -0.02, 0.03]])
    monkeypatch.setattr(
        "jachess_ext.training.methods.noise.draw_noise", lambda shape, *_: z.expand(shape)
    )
    model = LinearModel()
    (weight, bias), x = weights(model), features(model)
    made = trained(tmp_path, "r3f", model, method={"strength": 2.0})
    line, offset = weight[1] - weight[0], bias[1] - bias[0]
    s, t = (seen @ line + offset for seen in (x, x + 2 * z.numpy()))
    expected = 2 * ((expit(s) - expit(t)) * (s - t)).mean()
    assert first(made, "jachess/penalty") == pytest.approx(expected, rel=1e-6)


def test_label_smoothing(tmp_path: Path) -> None:
    """The gradient of the logits is p − ((1 − ε) one-hot + ε/C)."""
    model = LinearModel()
    (weight, bias), x = weights(model), features(model)
    trained(tmp_path, "label-smoothing", model, method={"smoothing": 0.3})
    away = softmax(x @ weight.T + bias, -1) - (0.7 * np.eye(2) + 0.3 / 2)
    np.testing.assert_allclose(weights(model)[0], weight - LR * away.T @ x / 2, rtol=1e-9)
    np.testing.assert_allclose(weights(model)[1], bias - LR * away.mean(0), rtol=1e-9)


@pytest.mark.parametrize(
    ("problem", "what"),
    [("regression", "is a regression"), ("multi_label_classification", "has several labels a row")],
)
def test_label_smoothing_needs_classes(tmp_path: Path, problem: str, what: str) -> None:
    model = classifier("bert")
    model.config.problem_type = problem
    with pytest.raises(ValueError, match=f"the model {what}"):
        method_trainer(tmp_path, "label-smoothing", model=model)


@pytest.mark.parametrize(
    ("kind", "unlabelled", "same_as"),
    [
        (None, True, "corrupt-consistency-joint,every=2,smoothing=0.1"),
        ("multi_label_classification", True, "corrupt-consistency-joint,every=2"),
        ("regression", True, "none"),
        ("regression", False, "none"),
    ],
)
def test_recommended(tmp_path: Path, kind: str | None, unlabelled: bool, same_as: str) -> None:
    """Bit for bit consistency with label smoothing; what of it the task allows."""
    ends = []
    for name in ("recommended", same_as):
        model = classifier("bert")
        model.config.problem_type = kind
        if kind == "regression":
            model.num_labels = model.config.num_labels = 1
            model.classifier = nn.Linear(model.classifier.in_features, 1).double()
            nn.init.constant_(model.classifier.weight, 0.1)
            nn.init.zeros_(model.classifier.bias)
        words = word_tokenizer([*WORDS, *(f"w{n}" for n in range(VOCABULARY - len(WORDS)))])
        swaps = unlabelled and kind != "regression"
        made = MethodTrainer(
            model=model,
            args=arguments(tmp_path / name, **SGD),
            train_dataset=examples(16),
            unlabelled_dataset=examples(8, seed=5, labels=False) if unlabelled else None,
            method=name,
            # where there is nothing to swap, no tokenizer is asked for
            processing_class=words if swaps else None,
        )
        if kind:
            made.train_dataset = [
                {**row, "labels": F.one_hot(row["labels"], LABELS).double()}
                if kind.startswith("multi")
                else {**row, "labels": row["labels"].double()}
                for row in examples(8)
            ]
        made.train()
        ends.append(made.model)
    assert_same_parameters(*ends, rtol=0, atol=0)


@pytest.mark.parametrize("count", [5, 200])
def test_swaps_are_words_that_the_model_has_a_row_for(tmp_path: Path, count: int) -> None:
    """All but the special first of 5 rows; this tokenizer has no unknown token."""
    made = method_trainer(
        tmp_path,
        "corrupt-augment",
        model=LinearModel(),
        method={"swapped": 0.99},
        options={"processing_class": word_tokenizer([f"w{n}" for n in range(count)])},
    )
    seen = made.method.corrupt({"input_ids": torch.full((400, 4), 2)})["input_ids"]
    assert set(seen.flatten().tolist()) == {1, 2, 3, 4}
    with pytest.raises(ValueError, match="a batch with input_ids to swap; it has pixel_values"):
        made.method.corrupt({"pixel_values": torch.zeros(1, 3, 2, 2)})


SENTENCES = [
    {"input_ids": torch.tensor([2, 3]), "labels": torch.tensor(0)},
    {"input_ids": torch.tensor([4, 2]), "labels": torch.tensor(1)},
]
WORDS = ["<pad>", "<unk>", *(f"w{n}" for n in range(3))]


class Recording(LinearModel):
    """Records the ids of every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[Tensor] = []

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        self.passes.append(input_ids)
        return super().forward(input_ids, labels)


OTHERS = [torch.tensor([2, 4]), torch.tensor([3, 3])]


def with_unknown(words: list[str], **special: str) -> Any:
    tokenizer = word_tokenizer(words, **special)
    tokenizer.add_special_tokens({"unk_token": "<unk>"})
    return tokenizer


def corrupting(folder: Path, name: str, model: nn.Module, **method: Any) -> MethodTrainer:
    """A step on `SENTENCES`, in mode joint on `ROWS` and the unlabelled `OTHERS`."""
    return trained(
        folder,
        name,
        model,
        data=ROWS if method.get("mode") else SENTENCES,
        unlabelled=[{"input_ids": row, "labels": torch.tensor(1)} for row in OTHERS],
        options={"processing_class": with_unknown(WORDS)},
        max_steps=method.pop("steps", 1),
        method=method,
    )


def test_corruption_as_augmentation(tmp_path: Path) -> None:
    """clean · CE(x) + (1 − clean) · CE(x′), x′ as the model saw it."""
    model = Recording()
    (weight, bias), fresh = weights(model), LinearModel()
    made = corrupting(tmp_path, "corrupt-augment", model, swapped=0.5, unknown=0.0, clean=0.25)
    ids, other = model.passes
    assert ((ids != other).sum(1) <= 1).all() and (other > 1).all(), "one of two tokens, a word"
    labels = (ids[:, 0] == 4).long().numpy()
    losses = []
    for seen in (ids, other):
        log_p = log_softmax(fresh.embeddings(seen).sum(1).numpy() @ weight.T + bias, -1)
        losses.append(-log_p[np.arange(2), labels].mean())
    assert first(made, "loss") == pytest.approx(0.25 * losses[0] + 0.75 * losses[1], rel=1e-4)


def test_corruption_alone_is_one_pass(tmp_path: Path) -> None:
    model = Recording()
    corrupting(tmp_path, "corrupt-augment", model, swapped=0.5, unknown=1.0, clean=0.0)
    (ids,) = model.passes
    assert ((ids == 1).sum(1) == 1).all()


def test_corruption_as_consistency(tmp_path: Path) -> None:
    """scipy's relative entropy between the outputs on what the model saw."""
    model = Recording()
    (weight, bias), fresh = weights(model), LinearModel()
    made = corrupting(tmp_path, "corrupt-consistency", model, swapped=0.5, strength=4.0)
    ids, other = model.passes
    p, q = (
        softmax(fresh.embeddings(seen).sum(1).numpy() @ weight.T + bias, -1)
        for seen in (ids, other)
    )
    assert not torch.equal(ids, other)
    assert first(made, "jachess/penalty") == pytest.approx(
        4 * entropy(p, q, axis=1).mean(), rel=1e-6
    )


def test_joint_consistency_is_of_unlabelled_rows_and_their_copies(tmp_path: Path) -> None:
    """KL(target ‖ copy) and its gradient, which goes through the copy alone."""
    model, labelled = Recording(), []
    model.register_forward_pre_hook(
        lambda _, __, given: labelled.append("labels" in given), with_kwargs=True
    )
    (weight, bias), fresh = weights(model), LinearModel()
    method = {"mode": "joint", "swapped": 0.5, "strength": 4.0}
    made = corrupting(tmp_path, "corrupt-consistency", model, **method)
    assert labelled == [True, False, False]
    ids, copy = model.passes[1:]
    assert {tuple(row) for row in ids.tolist()} == {(2, 4), (3, 3)} and not torch.equal(ids, copy)
    x, y = (fresh.embeddings(seen).sum(1).detach().numpy() for seen in (ids, copy))
    p, q = (softmax(rows @ weight.T + bias, -1) for rows in (x, y))
    assert first(made, "jachess/penalty") == pytest.approx(
        4 * entropy(p, q, axis=1).mean(), rel=1e-6
    )
    z = features(fresh)
    away = softmax(z @ weight.T + bias, -1) - np.eye(2)
    slope = (away.T @ z + 4 * (q - p).T @ y) / 2
    np.testing.assert_allclose(weights(model)[0], weight - LR * slope, rtol=1e-6)


def test_consistency_every_second_step(tmp_path: Path) -> None:
    """With twice the strength; the other steps are plain ones."""
    ends = {}
    for every, steps in ((1, 1), (2, 1), (2, 2)):
        model = Recording()
        method = {"mode": "joint", "swapped": 0.5, "every": every, "steps": steps}
        corrupting(tmp_path / f"{every}{steps}", "corrupt-consistency", model, **method)
        ends[every, steps] = weights(model)[0], len(model.passes)
    plain = LinearModel()
    start = weights(plain)[0]
    trained(tmp_path / "plain", "none", plain)
    by_task = weights(plain)[0] - start
    once, twice = (ends[every, 1][0] - start - by_task for every in (1, 2))
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-6)
    assert np.abs(once).max() > 1e-4
    assert (ends[2, 1][1], ends[2, 2][1]) == (3, 4)


def test_divergence_of_several_labels_is_the_sum_over_them() -> None:
    """scipy's relative entropy of each label's (p, 1 − p)."""
    z, moved = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p, q = (np.stack([expit(logits), expit(-logits)]) for logits in (z.numpy(), moved.numpy()))
    np.testing.assert_allclose(
        kl_divergence(z, moved, "multi"), entropy(p, q, axis=0).sum(-1), rtol=1e-12
    )
    both = (entropy(p, q, axis=0) + entropy(q, p, axis=0)).sum(-1)
    np.testing.assert_allclose(kl_divergence(z, moved, "multi", symmetric=True), both, rtol=1e-12)


def logits_that_are_equal(folder: Path, name: str, settings: dict[str, Any]) -> None:
    """Logits that are all the same number say nothing of one class and much of each label."""
    words = word_tokenizer([f"w{n}" for n in range(VOCABULARY)])
    penalties = []
    for several in (False, True):
        model = classifier("bert", dropout=0.2)
        rows = examples(4)
        with torch.no_grad():
            weight = model.classifier.weight
            weight.copy_(weight[:1].expand_as(weight))
            model.classifier.bias.zero_()
        if several:
            model.config.problem_type = "multi_label_classification"
            rows = [{**row, "labels": F.one_hot(row["labels"], LABELS).double()} for row in rows]
        options = {"processing_class": words}
        made = trained(
            folder / f"{several}", name, model, data=rows, method=settings, options=options
        )
        penalties.append(first(made, "jachess/penalty"))
    assert abs(penalties[0]) < 1e-12 and penalties[1] > 1e-6


def test_several_labels_are_no_choice_among_them(tmp_path: Path) -> None:
    logits_that_are_equal(tmp_path / "r3f", "r3f", {"noise": 0.1})
    logits_that_are_equal(tmp_path / "swaps", "corrupt-consistency", {"swapped": 0.5})


def test_shares_of_swapped_tokens(tmp_path: Path) -> None:
    """15 % of the tokens: half of them unknown, the others any word; special ones stay."""
    words = [*WORDS[:2], "<cls>", *(f"w{n}" for n in range(VOCABULARY - 3))]
    tokenizer = with_unknown(words, cls_token="<cls>")
    made = method_trainer(tmp_path, "corrupt-consistency", options={"processing_class": tokenizer})
    ids = torch.full((400, 40), 19)
    ids[:, 0], ids[:, 30:] = 2, 0
    mask = (ids != 0).long()
    found = made.method.corrupt({"input_ids": ids, "attention_mask": mask})["input_ids"]
    assert torch.equal(found[:, 0], ids[:, 0]) and torch.equal(found[:, 30:], ids[:, 30:])
    inner = found[:, 1:30]
    count = 0.15 * inner.numel()
    unknown, words_in = (inner == 1).sum().item(), inner[(inner != 1) & (inner != 19)]
    assert abs(unknown - count / 2) < 4 * (count / 4) ** 0.5
    kinds = len(range(3, VOCABULARY))
    assert abs(len(words_in) - count / 2 * (kinds - 1) / kinds) < 4 * (count / 4) ** 0.5
    times = torch.bincount(words_in, minlength=VOCABULARY)[3:19].double()
    assert (times - times.mean()).square().sum() / times.mean() < 45, "χ² of 15 degrees"
    assert words_in.min() >= 3


@pytest.mark.parametrize("name", ["l2", "jachess-train", "jacobian-joint"])
def test_a_placebo_steps_as_far_another_way(tmp_path: Path, name: str) -> None:
    """One step of SGD: what a penalty adds to the plain step, and what its placebo adds."""
    ends, losses = [], []
    for method in ({}, {"placebo": True}, None):
        model = classifier("bert")
        made = method_trainer(
            tmp_path,
            "none" if method is None else name,
            **{"model": model, "method": method, "max_steps": 1},
        )
        made.train()
        ends.append(torch.cat([p.flatten() for p in parameters(model).values()]))
        losses.append(first(made, "loss"))
    penalty, other = ends[0] - ends[2], ends[1] - ends[2]
    assert penalty.norm() > 1e-4
    torch.testing.assert_close(other.norm(), penalty.norm(), rtol=1e-9, atol=0)
    cosine = (penalty @ other / penalty.norm() ** 2).item()
    assert abs(cosine) < 5 / len(penalty) ** 0.5
    assert losses[0] == losses[1], "its value is the penalty's"
