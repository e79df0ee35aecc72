"""The controls on problems whose answer can be written out, through the Trainer."""

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

from jachess_ext.training import MethodTrainer, with_lora
from jachess_ext.training.decision import kl_divergence
from jachess_ext.training.methods.noise import row_noise
from python_tests.smoothness.tiny_models import VOCABULARY, classifier

from .runs import (
    LABELS,
    SGD,
    arguments,
    assert_same_parameters,
    entries,
    examples,
    first,
    method_trainer,
    parameters,
    tensors,
)
from .test_known_answers import (
    CURVATURE,
    ROWS,
    START,
    LinearModel,
    Output,
    Quadratic,
    centres,
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
        (None, False, "label-smoothing"),
        ("multi_label_classification", True, "corrupt-consistency-joint,every=2"),
        ("multi_label_classification", False, "none"),
        ("regression", True, "none"),
    ],
)
def test_recommended(tmp_path: Path, kind: str | None, unlabelled: bool, same_as: str) -> None:
    """Bit for bit consistency with label smoothing; what of it task and data allow."""
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


def test_recommended_needs_a_tokenizer_for_unlabelled_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="method='recommended' needs processing_class=<the tok"):
        method_trainer(tmp_path, "recommended")


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
    seen = made.method.corrupted({"input_ids": torch.full((400, 4), 2)})["input_ids"]
    assert set(seen.flatten().tolist()) == {1, 2, 3, 4}
    with pytest.raises(ValueError, match="a batch with input_ids to swap; it has pixel_values"):
        made.method.corrupted({"pixel_values": torch.zeros(1, 3, 2, 2)})


def test_neftune_is_uniform_noise_on_the_embeddings(tmp_path: Path) -> None:
    """Of T = 2 tokens and d = 3 entries: a row's sum moves by less than 2 α / √6."""
    model, seen = LinearModel(), []
    handle = model.linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    made = trained(tmp_path, "neftune", model, method={"alpha": 0.5}, learning_rate=1e-9)
    moved = seen[0].numpy() - features(model)[np.argsort(seen_order(seen[0], model))]
    assert 0.1 < np.abs(moved).max() / (2 * 0.5 / 6**0.5) < 1
    assert moved.min() < 0 < moved.max()
    handle.remove()
    plain = model.eval()(tensors(ROWS)["input_ids"]).logits.detach().numpy()
    np.testing.assert_allclose(made.predict(ROWS).predictions, plain, rtol=1e-12)


def seen_order(seen: Tensor, model: LinearModel) -> list[int]:
    """Which row of `ROWS` each seen one is nearest to, as a rank."""
    away = np.abs(seen.numpy()[:, None] - features(model)[None]).sum(-1)
    return list(np.argsort(away.argmin(1)))


def test_l2_sp_pulls_towards_the_start(tmp_path: Path) -> None:
    """θ ← θ − η (A (θ − x̄) + s (θ − θ₀)), three times."""
    data = centres(4)
    mean = torch.stack([row["x"] for row in data]).mean(0)
    made = trained(tmp_path, "l2-sp", Quadratic(), data=data, max_steps=3, method={"strength": 2.0})
    theta = START.clone()
    for _ in range(3):
        theta -= LR * (CURVATURE @ (theta - mean) + 2.0 * (theta - START))
    torch.testing.assert_close(made.model.theta.detach(), theta, rtol=1e-9, atol=1e-9)


def test_l2_sp_leaves_a_new_head_alone(tmp_path: Path) -> None:
    """Its penalty is ½ ‖move‖² of the rest, measured after a step without any pull."""
    model = classifier("bert")
    model.drawn_modules = ("classifier",)
    before = parameters(model)
    made = trained(
        tmp_path, "l2-sp", model, data=examples(8), max_steps=2, method={"strength": 1e-9}
    )
    plain = classifier("bert")
    trained(tmp_path, "none", plain, data=examples(8), max_steps=1)
    move = sum(
        (p.detach() - before[name]).square().sum().item()
        for name, p in plain.named_parameters()
        if not name.startswith("classifier")
    )
    logged = [entry["jachess/penalty"] for entry in entries(made, "jachess/penalty")]
    assert logged == [0.0, pytest.approx(1e-9 * move / 2, rel=1e-4)]


@pytest.mark.parametrize("name", ["l2-sp", "wise-ft"])
def test_a_model_without_pretrained_weights_is_refused(tmp_path: Path, name: str) -> None:
    model = LinearModel()
    model.drawn_modules = ("linear",)
    with pytest.raises(ValueError, match="holds on to pretrained weights, and none of"):
        method_trainer(tmp_path, name, model=model)


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_wise_ft_interpolates_all_but_the_new_head(tmp_path: Path, mix: float) -> None:
    model, plain = classifier("bert"), classifier("bert")
    model.drawn_modules = ("classifier",)
    start = parameters(model)
    trained(tmp_path, "wise-ft", model, data=examples(8), max_steps=3, method={"mix": mix})
    trained(tmp_path, "none", plain, data=examples(8), max_steps=3)
    for name, now in parameters(model).items():
        end = parameters(plain)[name]
        share = 1.0 if name.startswith("classifier") else mix
        torch.testing.assert_close(now, (1 - share) * start[name] + share * end, rtol=1e-9, atol=0)


def test_wise_ft_of_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fine-tune without adapters"):
        method_trainer(
            tmp_path, "wise-ft", model=with_lora(classifier("bert", dtype=torch.float32))
        )


class Masked(LinearModel):
    """With dropout on the features; keeps what it was given and the masks it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        x = self.embeddings(input_ids).sum(1)
        mask = (torch.rand(x.shape) < 0.5).to(x) if self.training else torch.ones_like(x)
        self.seen.append((input_ids, mask))
        logits = self.linear(x * mask)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return Output(loss=loss, logits=logits)


def test_r_drop(tmp_path: Path) -> None:
    """½ (CE₁ + CE₂) + s · ½ (KL + KL), of the masks drawn; the first is the plain run's."""
    model, plain = Masked(), Masked()
    made = trained(tmp_path, "r-drop", model, method={"strength": 3.0})
    trained(tmp_path, "none", plain)
    (ids, one), (again, two) = model.seen
    assert torch.equal(ids, again) and torch.equal(one, plain.seen[0][1])
    assert not torch.equal(one, two)
    fresh = Masked()
    x = fresh.embeddings(ids).sum(1)
    labels = (ids[:, 0] == 3).long()
    p, q = (fresh.linear(x * mask) for mask in (one, two))
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    apart = [
        F.kl_div(a, b, log_target=True, reduction="batchmean")
        for a, b in ((log_p, log_q), (log_q, log_p))
    ]
    task = (F.cross_entropy(p, labels) + F.cross_entropy(q, labels)) / 2
    assert first(made, "jachess/penalty") == pytest.approx(1.5 * sum(apart).item(), rel=1e-6)
    assert first(made, "jachess/task_loss") == pytest.approx(task.item(), rel=1e-6)
    (task + 3.0 * sum(apart) / 2).backward()
    expected = fresh.linear.weight - LR * fresh.linear.weight.grad
    torch.testing.assert_close(model.linear.weight.detach(), expected.detach(), rtol=1e-8, atol=0)


@pytest.mark.parametrize("radius", [0.0, 0.25])
def test_freelb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, radius: float) -> None:
    """Both tokens of a row have the gradient Wᵀ (p − y): δ grows by lr · that over √2 ‖·‖."""
    monkeypatch.setattr(
        "jachess_ext.training.methods.noise.draw_noise", lambda shape, *_: torch.ones(shape)
    )
    model = LinearModel()
    (weight, bias), x = weights(model), features(model)
    settings = {"adv_steps": 3, "adv_lr": 0.2, "adv_start": 0.1, "adv_radius": radius}
    made = trained(tmp_path, "freelb", model, method=settings)
    token = np.full((2, 3), 0.1 / 6**0.5)  # δ of either token of each row
    gradient, loss = np.zeros((2, 3)), 0.0
    for _ in range(3):
        seen = x + 2 * token
        logits = seen @ weight.T + bias
        away = softmax(logits, -1) - np.eye(2)
        gradient += away.T @ seen / 2 / 3
        loss -= np.diag(log_softmax(logits, -1)).mean() / 3
        slope = away @ weight
        token = token + 0.2 * slope / np.linalg.norm(slope, axis=1, keepdims=True) / 2**0.5
        norm = 2**0.5 * np.linalg.norm(token, axis=1, keepdims=True)
        if radius:
            token = token * np.minimum(1, radius / norm)
    np.testing.assert_allclose(weights(model)[0], weight - LR * gradient, rtol=1e-7)
    assert first(made, "loss") == pytest.approx(loss, rel=1e-4)


def test_freelb_leaves_padding_and_random_numbers_alone(tmp_path: Path) -> None:
    """Its noise is on real tokens; all passes of a step have the plain run's dropout masks."""
    data = examples(8, 3)
    for row in data:
        row["attention_mask"][2] = 0
    states: dict[str, list[Tensor]] = {"none": [], "freelb": []}
    for name, found in states.items():
        model = classifier("bert", dropout=0.3)

        def keep(*_: Any, found: list[Tensor] = found) -> None:
            found.append(torch.get_rng_state())

        model.classifier.register_forward_pre_hook(keep)
        made = method_trainer(tmp_path, name, model=model, data=data, learning_rate=1e-12)
        made.train()
    steps = len(states["none"])
    assert [len(found) for found in states.values()] == [steps, 3 * steps]
    for number, state in enumerate(states["freelb"]):
        assert torch.equal(state, states["none"][number // 3])
    real = torch.stack([row["attention_mask"] for row in data]).bool()
    noise = row_noise(torch.zeros(8, 3, 12), real, 1.0, made.method.generator())
    assert (noise[:, 2] == 0).all() and (noise[:, :2] != 0).all()
    assert 0.9 < noise.abs().max() * 24**0.5 < 1


def test_smart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two classes: the divergence is (σ(s) − σ(t)) (s − t), rising along ± (w₁ − w₀)."""
    z = 0.05
    monkeypatch.setattr(
        "jachess_ext.training.methods.noise.draw_noise", lambda shape, *_: torch.full(shape, z)
    )
    model = LinearModel()
    (weight, bias), x = weights(model), features(model)
    table = model.embeddings.weight.numpy()
    unit = np.sqrt((table**2).mean())
    settings = {"strength": 2.0, "adv_steps": 2, "adv_lr": 0.3, "adv_radius": 0.5, "adv_start": 1.0}
    made = trained(tmp_path, "smart", model, method=settings)
    line, offset = weight[1] - weight[0], bias[1] - bias[0]
    s = x @ line + offset
    token = np.full((2, 3), z)
    for _ in range(2):
        t = (x + 2 * token) @ line + offset
        slope = -expit(t) * (1 - expit(t)) * (s - t) - (expit(s) - expit(t))
        step = np.sign(slope)[:, None] * line / np.abs(line).max()
        token = np.clip(token + 0.3 * unit * step, -0.5 * unit, 0.5 * unit)
    t = (x + 2 * token) @ line + offset
    expected = 2.0 * ((expit(s) - expit(t)) * (s - t)).mean()
    assert first(made, "jachess/penalty") == pytest.approx(expected, rel=1e-6)
    assert all(p.requires_grad for p in model.linear.parameters())


SENTENCES = [
    {"input_ids": torch.tensor([2, 3]), "labels": torch.tensor(0)},
    {"input_ids": torch.tensor([4, 2]), "labels": torch.tensor(1)},
]
WORDS = ["<pad>", "<unk>", *(f"w{n}" for n in range(3))]


class Recording(Masked):
    """As `Masked`, without dropout."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        self.seen.append((input_ids, torch.ones(())))
        return LinearModel.forward(self, input_ids, labels)


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
    (ids, _), (other, _) = model.seen
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
    ((ids, _),) = model.seen
    assert ((ids == 1).sum(1) == 1).all()


def test_corruption_as_consistency(tmp_path: Path) -> None:
    """scipy's relative entropy between the outputs on what the model saw."""
    model = Recording()
    (weight, bias), fresh = weights(model), LinearModel()
    made = corrupting(tmp_path, "corrupt-consistency", model, swapped=0.5, strength=4.0)
    (ids, _), (other, _) = model.seen
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
    ids, copy = (seen for seen, _ in model.seen[1:])
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
        ends[every, steps] = weights(model)[0], len(model.seen)
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


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("corrupt-consistency", {"swapped": 0.5}),
        ("r-drop", {}),
        ("r3f", {"noise": 0.1}),
        ("smart", {"adv_start": 0.3}),
    ],
)
def test_several_labels_are_no_choice_among_them(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    """Logits that are all the same number say nothing of one class and much of each label."""
    words = word_tokenizer([f"w{n}" for n in range(VOCABULARY)])
    penalties = []
    for several in (False, True):
        model = classifier("bert")
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2  # or R-Drop's two passes are one
        rows = examples(4)
        with torch.no_grad():
            model.classifier.weight.copy_(
                model.classifier.weight[:1].expand_as(model.classifier.weight)
            )
            model.classifier.bias.zero_()
        if several:
            model.config.problem_type = "multi_label_classification"
            rows = [{**row, "labels": F.one_hot(row["labels"], LABELS).double()} for row in rows]
        made = trained(
            tmp_path / f"{several}",
            name,
            model,
            data=rows,
            method=settings,
            options={"processing_class": words},
        )
        penalties.append(first(made, "jachess/penalty"))
    assert abs(penalties[0]) < 1e-12 and penalties[1] > 1e-6


def test_shares_of_swapped_tokens(tmp_path: Path) -> None:
    """15 % of the tokens: half of them unknown, the others any word; special ones stay."""
    words = [*WORDS[:2], "<cls>", *(f"w{n}" for n in range(VOCABULARY - 3))]
    tokenizer = with_unknown(words, cls_token="<cls>")
    made = method_trainer(tmp_path, "corrupt-consistency", options={"processing_class": tokenizer})
    ids = torch.full((400, 40), 19)
    ids[:, 0], ids[:, 30:] = 2, 0
    mask = (ids != 0).long()
    found = made.method.corrupted({"input_ids": ids, "attention_mask": mask})["input_ids"]
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


def test_corruption_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="method='corrupt-augment' needs processing_class"):
        method_trainer(tmp_path, "corrupt-augment")


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
