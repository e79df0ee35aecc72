"""What a model is judged on beside its score: slopes, temperature, changed texts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import jachess_ext as jx
from jachess_ext.lab.compare.judge import judge, slopes
from jachess_ext.lab.compare.noise import noisy_texts
from jachess_ext.lab.compare.settings import TEXT_NOISE, Conditions
from jachess_ext.lab.workbench.metrics import ACCURACY, MATTHEWS
from jachess_ext.lab.workbench.models import Encoded
from python_tests.smoothness.tiny_models import LABELS, VOCABULARY, classifier
from python_tests.training.runs import Padder


class Rows(Padder):
    """A tokenizer as far as judging needs one."""

    all_special_ids = (0,)
    pad_token_id = 0
    unk_token_id = 1

    def pad(self, rows: list[dict], **settings: str) -> dict[str, torch.Tensor]:
        return super().pad([{k: torch.tensor(v) for k, v in row.items()} for row in rows])


def encoded(lengths: list[int], seed: int = 0) -> Encoded:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids]
    return Encoded(rows, [n % LABELS for n in range(len(rows))], Rows("right"))


def test_one_answer_to_all_rows() -> None:
    """The most frequent class's share; of correlations 0."""
    model, data = classifier("bert").eval(), encoded([3] * (2 * LABELS + 1))
    shares = judge(model, data, ACCURACY, 1.0, Conditions().clean_only)
    assert shares.constant == 3 / (2 * LABELS + 1)
    assert judge(model, data, MATTHEWS, 1.0, Conditions().clean_only).constant == 0


def test_slopes_against_the_engine_and_the_margins_own_gradient() -> None:
    model, data = classifier("bert").eval(), encoded([4, 2, 5, 3])
    found = slopes(model, data, 4)
    batch = data.batch([0, 1, 2, 3])
    labels = batch.pop("labels")
    norms = jx.smoothness(model, batch, layers="logits", engine="exact", hessian=False).jacobian
    assert found["logit_jacobian"] == pytest.approx(norms.sum().item(), rel=1e-6)
    distances = []
    for row in range(4):
        count = int(batch["attention_mask"][row].sum())
        ids = batch["input_ids"][row : row + 1, :count]
        x = model.get_input_embeddings()(ids).detach().requires_grad_()
        z = model(inputs_embeds=x).logits[0]
        order = [z[c] for c in range(LABELS) if c != labels[row]]
        margin = z[labels[row]] - torch.stack(order).max()
        margin.backward()
        distances.append((margin / x.grad.norm()).item())
    assert found["margin_over_slope"] == pytest.approx(np.mean(distances), rel=1e-6)
    assert min(distances) < 0 < max(distances)
    assert slopes(model, data, 0) == {}


class Table(nn.Module):
    """Logits of a row: the mean of its tokens' entries in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, LABELS).double()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.embed.weight.normal_(0, 3, generator=generator)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        mask = attention_mask.unsqueeze(-1)
        logits = (self.embed(input_ids) * mask).sum(1) / mask.sum(1)
        return type("Out", (), {"logits": logits})


def test_temperature_is_of_validation_rows_and_texts_are_judged() -> None:
    model = Table()
    dev, validation = encoded([3] * 30), encoded([4] * 40, seed=1)
    batch = validation.batch(list(range(40)))
    best = model(batch["input_ids"], batch["attention_mask"]).logits.argmax(1).tolist()
    right = [(y + (n % 4 == 0)) % LABELS for n, y in enumerate(best)]  # three of four
    validation = Encoded(validation.rows, right, validation.tokenizer)
    changed = Encoded(dev.rows[::-1], dev.labels, dev.tokenizer)
    conditions = Conditions(corruption=(1.0,), deltas=(), sequences=0, bf16=True)
    found = judge(
        *(model, dev, ACCURACY, 1.0, conditions), validation=validation, perturbed={"case": changed}
    )
    assert found.scaled is not None

    def outputs(data: Encoded, temperature: float) -> torch.Tensor:
        batch = data.batch(list(range(len(data))))
        return (model(batch["input_ids"], batch["attention_mask"]).logits / temperature).detach()

    grid = torch.linspace(0.1, 10, 2000)
    own = torch.tensor(validation.labels)
    losses = [nn.functional.cross_entropy(outputs(validation, t.item()), own) for t in grid]
    coolest = grid[torch.stack(losses).argmin()].item()
    assert found.scaled["temperature"] == pytest.approx(coolest, abs=0.01)
    p = outputs(dev, found.scaled["temperature"]).softmax(-1)
    labels = torch.tensor(dev.labels)
    expected = (p - torch.eye(LABELS)[labels]).square().sum(1).mean().item()
    assert found.scaled["brier"] == pytest.approx(expected, rel=1e-6)
    assert found.scaled["accuracy"] == found.accuracy == found.score
    reversed_right = (outputs(changed, 1.0).argmax(1) == torch.tensor(changed.labels)).double()
    assert found.perturbed == {"case": reversed_right.mean().item()}
    # all tokens unknown: one class for every row
    assert found.accuracies["corrupted 1.0"] == found.corrupted["1.0"] == pytest.approx(1 / 3)


TEXTS = ["the quick brown foxes jump over seven lazy sleeping dogs at noon"] * 400
WORDS = TEXTS[0].split()


@pytest.mark.parametrize("kind", TEXT_NOISE)
def test_a_seed_decides(kind: str) -> None:
    made = noisy_texts(TEXTS, kind, 0.2, 1)
    assert made == noisy_texts(TEXTS, kind, 0.2, 1) != noisy_texts(TEXTS, kind, 0.2, 2)
    assert noisy_texts(TEXTS, kind, 0.0, 1) == TEXTS
    assert len(made) == len(TEXTS) and all(made)


@pytest.mark.parametrize("kind", ["typos", "case", "punctuation"])
def test_the_share_of_changed_words(kind: str) -> None:
    made = [text.split() for text in noisy_texts(TEXTS, kind, 0.2, 0)]
    changeable = sum(len(word) > 2 for word in WORDS) if kind == "typos" else len(WORDS)
    count = sum(a != b for words in made for a, b in zip(words, WORDS, strict=True))
    expected = 0.2 * changeable * len(TEXTS)
    lost = 0.1 if kind == "typos" else 0.0  # a letter for itself, or two equal ones swapped
    assert expected * (1 - lost) - 4 * expected**0.5 < count < expected + 4 * expected**0.5


def test_typos_are_one_edit() -> None:
    kinds = Counter()
    for words in noisy_texts(TEXTS, "typos", 1.0, 0):
        for made, word in zip(words.split(), WORDS, strict=True):
            kinds[len(made) - len(word)] += 1
            if len(word) < 3:
                assert made == word
            if len(made) == len(word):
                apart = [i for i, (a, b) in enumerate(zip(made, word, strict=True)) if a != b]
                assert len(apart) < 3 and (len(apart) < 2 or sorted(made) == sorted(word))
            elif len(made) < len(word):
                assert any(made == word[:i] + word[i + 1 :] for i in range(len(word)))
            else:
                assert any(made == word[: i + 1] + word[i:] for i in range(len(word)))
    assert set(kinds) == {-1, 0, 1}


def test_what_each_kind_keeps() -> None:
    for text in noisy_texts(TEXTS, "case", 0.5, 0):
        assert text.lower() == TEXTS[0]
    for text in noisy_texts(TEXTS, "punctuation", 0.5, 0):
        assert text.translate(str.maketrans("", "", ",.!?;:-")) == TEXTS[0]
    moved = noisy_texts(TEXTS, "swaps", 0.3, 0)
    assert all(Counter(text.split()) == Counter(WORDS) for text in moved)
    assert noisy_texts(["a b c d e"], "swaps", 1.0, 0) == ["b a d c e"]
    assert noisy_texts(["good, bad ."], "punctuation", 1.0, 0)[0].startswith("good bad")
