"""The word attack on planted models whose worst replacement is found by trying all."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from jachess_ext.lab.attack import Synonyms, attack_words
from python_tests.training.test_architectures import ARCHITECTURES, TOKENIZER, WORDS

WEIGHTS = {
    "[PAD]": 0.0, "[UNK]": 0.0, "good": 2.0, "fine": 0.6, "great": 2.5, "bad": -2.0, "poor": -0.5,
    "awful": -2.5, "film": 0.1, "movie": -0.2, "picture": 0.3, "a": 0.0, "the": 0.05, "of": 0.0,
}  # fmt: skip
SYNONYMS = Synonyms(
    {
        "good": ["great", "fine"],
        "bad": ["awful", "poor"],
        "film": ["movie", "picture"],
        "the": ["a"],
    }
)


def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WEIGHTS)}, unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]")


class Planted(nn.Module):
    """Logits ± the sum of the tokens' numbers: the first class where it is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(WEIGHTS), 1).double()
        with torch.no_grad():
            self.embed.weight.copy_(torch.tensor(list(WEIGHTS.values())).unsqueeze(1))
        self.asked = 0

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        self.asked += len(input_ids)
        score = (self.embed(input_ids).squeeze(-1) * attention_mask).sum(1)
        return SimpleNamespace(logits=torch.stack([score, -score], 1))


class Outputs(Planted):
    """Has logits of another shape, and a problem_type."""

    def __init__(self, problem: str | None, *shape: int) -> None:
        super().__init__()
        self.config, self.shape = SimpleNamespace(problem_type=problem), shape

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=torch.zeros(len(input_ids), *self.shape))


def score(words: list[str]) -> float:
    return sum(WEIGHTS.get(word.lower(), 0.0) for word in words)


ROWS = [
    ("the good film",),
    ("the good bad film",),
    ("a bad film of good film",),
    ("a poor picture",),
    ("good fine great",),
]


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_against_every_replacement(budget: int) -> None:
    """The model is a sum, so greedy is the worst of all: it wins exactly where some can."""
    model = Planted()
    labels = [0 if score(row[0].split()) > 0 else 1 for row in ROWS]
    for row, label in zip(ROWS, labels, strict=True):
        words = row[0].split()
        found = attack_words(
            model, tokenizer(), [row], [label], SYNONYMS, share=min(1.0, budget / len(words))
        )
        sign = 1 if label == 0 else -1
        choices = [[word, *SYNONYMS(word)] for word in words]
        least: dict[int, float] = {}
        for tried in itertools.product(*choices):
            changed = sum(a != b for a, b in zip(tried, words, strict=True))
            least[changed] = min(least.get(changed, 1e9), sign * score(list(tried)))
        fewest = [n for n in sorted(least) if least[n] < 0 and n <= budget]
        assert found.correct_before.tolist() == [True]
        assert found.correct_after.tolist() == [not fewest], row
        assert found.changed.tolist() == [fewest[0] if fewest else 0]
        after = found.rows[0][0].split()
        assert sum(a != b for a, b in zip(after, words, strict=True)) == found.changed[0]
        assert (sign * score(after) < 0) == bool(fewest)


def test_figures_queries_and_rows_left_alone() -> None:
    model = Planted()
    rows = [("the good bad film",), ("good fine great",), ("bad film",), ("of of of of",)]
    found = attack_words(model, tokenizer(), rows, [0, 0, 0, 0], SYNONYMS, share=0.25, tries=3)
    # score .15: one of four words may change; three words: none may; wrong before; no candidate
    assert found.correct_before.tolist() == [True, True, False, True]
    assert found.tried.tolist() == [True, False, False, False]
    assert found.rows[1:] == rows[1:]
    assert found.queries.tolist() == [4, 0, 0, 1]  # a gradient and three tries; a gradient
    assert model.asked == 4 + found.queries.sum()
    assert found.figures == {
        "accuracy": 0.75,
        "attacked": 0.5,
        "rows": 1.0,
        "changed": 1.0,
        "share": 0.25,
        "queries": 4.0,
    }


def test_whole_words_punctuation_and_case() -> None:
    """Words are replaced in the text, between its marks, and written as they were."""
    rows = [("The film: Good, 'bad'-- (FILM)!",), ("goodness film",)]
    words = Synonyms({"good": ["fine"], "film": ["movie"], "the": ["a"]})
    found = attack_words(Planted(), tokenizer(), rows, [0, 0], words, share=1.0)
    assert found.rows[0][0] == "The film: Fine, 'bad'-- (FILM)!"
    assert found.rows[1][0] == "goodness movie"


def test_pairs_are_attacked_in_both_texts() -> None:
    rows = [("the good film", "a bad film"), ("a film", "good bad")]
    found = attack_words(Planted(), tokenizer(), rows, [0, 0], SYNONYMS, share=0.4)
    assert found.correct_before.tolist() == [True, True]
    assert all(len(row) == 2 for row in found.rows)
    assert found.correct_after.tolist() == [False, False]
    assert found.rows[0][0] == "the fine film" and found.rows[0][1] == "a bad film"
    assert found.words.tolist() == [6, 4]


def test_words_cut_off_are_not_replaced_and_nothing_is_drawn() -> None:
    rows = [("a a a good bad film",)]
    makes = [
        attack_words(Planted(), tokenizer(), rows, [0], SYNONYMS, share=0.5, max_length=n)
        for n in (4, 4, 6)
    ]
    assert makes[0].rows == makes[1].rows == rows  # what is left, "a a a good", stays positive
    assert makes[2].rows[0][0].startswith("a a a ") and not makes[2].correct_after[0]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"labels": [0]}, "argument 2 is shorter"),
        ({"labels": [0, 0.5]}, "interpreted as an integer"),
        ({"labels": [0, -100]}, "index -100 is out of bounds"),
        ({"labels": [0, 5]}, "index 5 is out of bounds"),
        ({"rows": [("good",), "bad"]}, "a row is a string; expected a tuple"),
        ({"rows": [("good",), ("bad", None)]}, "expected string"),
        ({"model": Outputs("regression", 1)}, "problem_type is regression"),
        ({"model": Outputs("multi_label_classification", 2)}, "problem_type is multi_label"),
        ({"model": Outputs(None, 1)}, r"the logits have shape \[2, 1\]"),
        ({"model": Outputs(None, 2, 3)}, r"the logits have shape \[2, 2, 3\]"),
        ({"share": 0.0}, "share is 0.0"),
        ({"tries": 0}, "tries is 0"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "model": Planted(),
        "tokenizer": tokenizer(),
        "rows": [("good",), ("bad",)],
        "labels": [0, 1],
        "candidates": SYNONYMS,
    }
    with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
        attack_words(**{**given, **change})


@pytest.mark.parametrize("case", ["bart", "t5"])
def test_encoder_decoders_are_attacked(case: str) -> None:
    model = ARCHITECTURES[case]().eval()
    rows = [(f"{' '.join(words)} <eos>",) for words in itertools.permutations(WORDS[3:7], 3)]
    near = Synonyms({word: [other for other in WORDS[3:] if other != word] for word in WORDS[3:7]})
    with torch.no_grad():
        texts = TOKENIZER([text for (text,) in rows], return_tensors="pt")
        answers = model(**texts).logits.argmax(-1).tolist()
    found = attack_words(model, TOKENIZER, rows, answers, near, share=0.75)
    assert found.tried.all() and (found.queries > 1).all()


def test_outputs_that_are_not_finite() -> None:
    model = Planted()
    with torch.no_grad():
        model.embed.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        attack_words(model, tokenizer(), [("good",)], [0], SYNONYMS)
