"""Tokenizers trained here: special tokens, frames, round trips, sizes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vocabulary import train_byte_pairs, train_wordpiece
from jachess_ext.compare.models import load_tokenizer

WORDS = ("harbour", "lantern", "quietly", "marching", "seven", "Orchards", "remain", "unlit")
SHUFFLE = random.Random(0)
TEXTS = [" ".join(SHUFFLE.choices(WORDS, k=9)) + "." for _ in range(200)]
TRAINERS = {"wordpiece": train_wordpiece, "byte pairs": train_byte_pairs}
Train = Callable[..., Any]


@pytest.fixture(params=TRAINERS)
def train(request: pytest.FixtureRequest) -> Train:
    return TRAINERS[request.param]


def test_special_tokens_are_where_they_are_said_to_be(train: Train, tmp_path: Path) -> None:
    made = train(TEXTS, 320)
    made.save_pretrained(tmp_path)
    for tokenizer in (made, load_tokenizer(tmp_path)):
        assert tokenizer.pad_token_id == 0 and tokenizer.unk_token_id == 1
        assert len(tokenizer) <= 320 and tokenizer.model_max_length == 128


def test_texts_and_pairs_are_framed() -> None:
    wordpiece, pairs = train_wordpiece(TEXTS, 320), train_byte_pairs(TEXTS, 320)
    assert wordpiece("seven remain", "unlit").tokens() == (
        ["[CLS]", "seven", "remain", "[SEP]", "unlit", "[SEP]"]
    )
    assert wordpiece("seven remain", "unlit")["token_type_ids"] == [0, 0, 0, 0, 1, 1]
    tokens = pairs("seven", "unlit").tokens()
    assert tokens[0] == "<s>" and tokens[-1] == "</s>" and tokens.count("</s>") == 2
    assert pairs.decode(pairs("seven remain")["input_ids"], skip_special_tokens=True).strip() == (
        "seven remain"
    )


def test_bytes_never_seen_are_kept_and_characters_never_seen_are_unknown() -> None:
    pairs, wordpiece = train_byte_pairs(TEXTS, 320), train_wordpiece(TEXTS, 320)
    ids = pairs("Ω zebra", add_special_tokens=False)["input_ids"]
    assert pairs.decode(ids).strip() == "Ω zebra" and pairs.unk_token_id not in ids
    assert wordpiece.unk_token_id in wordpiece("Ω")["input_ids"]


def test_whole_words_stay_one_token() -> None:
    tokenizer = train_wordpiece(TEXTS, 100, words=("[NAME]",))
    assert len(tokenizer) <= 100
    assert "[NAME]" in tokenizer.tokenize("seven [NAME] remain")


def test_a_vocabulary_without_room_is_refused(train: Train) -> None:
    with pytest.raises(ValueError, match="no room for words"):
        train(TEXTS, 5)


def test_training_twice_gives_one_vocabulary(train: Train) -> None:
    assert train(TEXTS, 300).get_vocab() == train(TEXTS, 300).get_vocab()
