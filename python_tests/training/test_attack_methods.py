"""`attack-augment`, on models small enough to try every swap of words."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from torch.nn import functional as F

from jachess_ext.lab.attack.tokens import TokenSwaps, steepest_swaps, swap_counts
from python_tests.smoothness.tiny_models import VOCABULARY, classifier

from .runs import SGD, examples, furthest, method_trainer, parameters, tensors
from .test_known_answers import word_tokenizer

WORDS = ["<pad>", "aa", "bb", *(f"word{chr(ord('a') + n)}" for n in range(VOCABULARY - 3))]
TOKENIZER = word_tokenizer(WORDS)
TOKENIZER.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
SYNONYMS = {word: [w for w in WORDS[3:] if w != word][:4] for word in WORDS[3:15]}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "synonyms.txt"
    path.write_text("".join(f"{word} {' '.join(of)}\n" for word, of in SYNONYMS.items()))
    return str(path)


def made(folder: Path, name: str, file: str, model: Any = None, **settings: Any) -> Any:
    method = {"synonyms": file, **settings.pop("method", {})}
    options = {"processing_class": TOKENIZER, **settings.pop("options", {})}
    return method_trainer(
        folder, name, model=model, method=method, options=options, **({"max_steps": 1} | settings)
    )


def known_ids(monkeypatch: pytest.MonkeyPatch, rows: list[dict], seed: int = 3) -> Tensor:
    """Let every attack end in the same ids, the rows' with some swapped."""
    ids = torch.stack([row["input_ids"] for row in rows])
    generator = torch.Generator().manual_seed(seed)
    new = torch.randint(3, VOCABULARY, ids.shape, generator=generator)
    swapped = torch.where(torch.rand(ids.shape, generator=generator) < 0.5, new, ids)
    assert (swapped != ids).any()

    def attacked(self: Any, run: Any, model: Any, inputs: Any) -> Tensor:
        order = [
            next(i for i, r in enumerate(ids) if torch.equal(r, x)) for x in inputs["input_ids"]
        ]
        return swapped[order]

    monkeypatch.setattr("jachess_ext.lab.attack.method.AttackAugment.attacked", attacked)
    return swapped


def test_augment_is_the_mean_of_row_and_copy(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, model, other = examples(4), classifier("bert"), classifier("bert")
    swapped = known_ids(monkeypatch, rows)
    made(tmp_path, "attack-augment", file, model, data=rows).train()
    batch = tensors(rows)
    ((other(**batch).loss + other(**{**batch, "input_ids": swapped}).loss) / 2).backward()
    for new, old in zip(parameters(model).values(), other.parameters(), strict=True):
        slope = torch.zeros_like(old) if old.grad is None else old.grad
        expected = old.detach() - SGD["learning_rate"] * slope
        torch.testing.assert_close(new, expected, rtol=1e-7, atol=1e-9)


class Additive(torch.nn.Module):
    """Logit of the first class: a number for each token, added up; so every gradient is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 1).double()
        with torch.no_grad():
            numbers = torch.randn(VOCABULARY, 1, generator=torch.Generator().manual_seed(0))
            self.embed.weight.copy_(numbers)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def losses(self, ids: Tensor, labels: Tensor) -> Tensor:
        score = self.embed(ids).sum((1, 2))
        return F.cross_entropy(torch.stack([score, -score], 1), labels, reduction="none")


def table_of(file: str) -> TokenSwaps:
    from jachess_ext.lab.attack import read_synonyms

    return TokenSwaps(TOKENIZER, read_synonyms(file), VOCABULARY)


@pytest.mark.parametrize("count", [1, 2])
def test_steepest_swaps_are_the_worst_of_all(file: str, count: int) -> None:
    """Where the logits are a sum over tokens, the gradient's choice is the worst of all swaps."""
    model = Additive()
    ids = torch.tensor([[3, 4, 5, 16], [6, 7, 3, 8], [17, 18, 19, 16]])
    labels = torch.tensor([0, 1, 0])
    options = table_of(file).options(ids, torch.ones_like(ids))
    x = model.embed(ids).detach().requires_grad_()
    score = x.sum((1, 2))
    loss = F.cross_entropy(torch.stack([score, -score], 1), labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, x)
    found = steepest_swaps(ids, options, gradient, model.embed, torch.full((3,), count))
    for row in range(3):
        worst, of = -1.0, None
        choices = [sorted({int(ids[row, t]), *options[row, t].tolist()}) for t in range(4)]
        for tried in itertools.product(*choices):
            other = torch.tensor([tried])
            if int((other[0] != ids[row]).sum()) <= count:
                value = model.losses(other, labels[row : row + 1]).item()
                if value > worst:
                    worst, of = value, other[0]
        assert torch.equal(found[row], of)
    assert torch.equal(found[2], ids[2])  # words without a synonym stay


def test_options_are_the_single_tokens_of_whole_words() -> None:
    from jachess_ext.lab.attack import Synonyms
    from jachess_ext.lab.demo import ASSETS
    from jachess_ext.lab.workbench.models import load_tokenizer

    tokenizer = load_tokenizer(ASSETS)
    words = Synonyms({"fil": ["good", "bad"], "good": ["bad", "film", "great", "good"]})
    swaps = TokenSwaps(tokenizer, words, len(tokenizer), count=3)
    batch = tokenizer(["a good film", "good"], padding=True, return_tensors="pt")
    ids = batch["input_ids"]
    assert tokenizer.tokenize("film") == ["fil", "##m"]
    options = swaps.options(ids, batch["attention_mask"])
    single = [w for w in ("bad", "great") if len(tokenizer.tokenize(w)) == 1]
    assert single, "the demo's tokenizer has one of these"
    wanted = tokenizer.convert_tokens_to_ids(single)
    good = tokenizer.convert_tokens_to_ids("good")
    for row, place in (ids == good).nonzero().tolist():
        assert options[row, place].tolist() == [*wanted, *[good] * (3 - len(wanted))]
    others = ids != good
    assert torch.equal(options[others], ids[others].unsqueeze(-1).expand(-1, 3))


def test_number_of_swapped_tokens() -> None:
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [3, 4, 0, 0, 0, 0, 0, 0, 0, 0]])
    assert swap_counts(ids, (ids != 0).long(), torch.tensor([0]), 0.3).tolist() == [3, 1]


def test_the_second_swap_follows_the_gradient_after_the_first(tmp_path: Path, file: str) -> None:
    """The second swap of two is chosen by the gradient after the first, written out."""
    rows, model = examples(4, tokens=12), classifier("bert")
    trained = made(tmp_path, "attack-augment", file, model, method={"swapped": 0.2, "steps": 2})
    batch = tensors(rows)
    embed = model.get_input_embeddings()
    run = lambda b: ((o := model(**b)).loss, o)  # noqa: E731
    found = trained.method.attacked(run, model, batch)
    options = table_of(file).options(batch["input_ids"], batch["attention_mask"])
    ids = batch["input_ids"]
    for _ in range(2):
        x = embed(ids).detach().requires_grad_()
        rest = {k: v for k, v in batch.items() if k != "input_ids"}
        (gradient,) = torch.autograd.grad(model(inputs_embeds=x, **rest).loss, x)
        new = ids.clone()
        for row in range(4):
            gains = {
                (((embed.weight[o] - embed.weight[ids[row, t]]) @ gradient[row, t]).item(), t, o)
                for t in range(12)
                for o in options[row, t].tolist()
                if ids[row, t] == batch["input_ids"][row, t] and o != ids[row, t]
            }
            gain, place, other = max(gains)
            if gain > 0:
                new[row, place] = other
        ids = new
    assert torch.equal(found, ids)
    assert ((found != batch["input_ids"]).sum(1) == 2).any()


def test_batches_and_masks_are_those_of_the_plain_run(tmp_path: Path, file: str) -> None:
    """With strength 0 it is plain training, dropout masks included."""
    plain = method_trainer(
        tmp_path / "none", "none", model=classifier("bert", dropout=0.3), max_steps=2
    )
    plain.train()
    trained = made(
        tmp_path / "attack",
        "attack-augment",
        file,
        classifier("bert", dropout=0.3),
        method={"strength": 0.0},
        max_steps=2,
    )
    trained.train()
    assert furthest(plain.model, trained.model) < 1e-12
