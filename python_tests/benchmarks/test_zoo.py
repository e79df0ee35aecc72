"""The zoo at tiny budgets: whole models, resumed and deterministic; losses against formulas."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from benchmarks import zoo as command
from benchmarks.zoo import (
    Corpus,
    Member,
    Plan,
    Recipe,
    blocks,
    held_out_loss,
    loss_of,
    make_zoo,
    paragraphs,
    read_corpus,
    train_byte_pairs,
    train_wordpiece,
)
from jachess_ext._io import DataError
from jachess_ext.lab.workbench.models import load_model, load_tokenizer

TINY = (
    Member("bert", "bert", 8, 1, 2, 3, 1e-3),
    Member("gpt2", "gpt2", 8, 1, 2, 3, 1e-3),
    Member("llama", "llama", 16, 1, 4, 3, 1e-3),
    Member("opt", "opt", 8, 1, 2, 3, 1e-3),
)
PLAN = Plan(vocabulary=320, seed=3, recipe=Recipe(block=16, rows=2))
DRAW = random.Random(0)
WORDS = ["river", "flows", "clock", "ticks", "owl", "calls", "fire", "burns", "Orchards"]
TEXTS = [" ".join(DRAW.choices(WORDS, k=16)) + " ." for _ in range(240)]
CORPUS = Corpus(TEXTS[:200], TEXTS[200:])


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("zoo")
    make_zoo(TINY, CORPUS, folder, PLAN, lambda line: None)
    return folder


@pytest.mark.parametrize("member", TINY, ids=lambda member: member.name)
def test_every_model_can_be_fine_tuned(zoo: Path, member: Member) -> None:
    tokenizer = load_tokenizer(zoo / member.name)
    model = load_model(zoo / member.name, 3, tokenizer, seed=0)
    batch = tokenizer(["the owl calls", "the"], padding=True, return_tensors="pt")
    assert tokenizer.pad_token_id == 0 and tokenizer.unk_token_id == 1
    assert model(**batch).logits.shape == (2, 3) and model.config.hidden_size == member.width
    trained = load_file(zoo / member.name / "model.safetensors")
    loaded = dict(model.named_parameters())
    shared = [name for name in trained if name in loaded]
    assert len(shared) >= len(loaded) - 5, "the pretrained weights are those that are loaded"
    assert all(torch.equal(trained[name], loaded[name]) for name in shared)
    records = json.loads((zoo / "zoo.json").read_text())["models"]
    (record,) = (each for each in records if each["name"] == member.name)
    kind = AutoModelForMaskedLM if member.family == "bert" else AutoModelForCausalLM
    whole = kind.from_pretrained(zoo / member.name)
    assert record["parameters"] == sum(p.numel() for p in whole.parameters())
    again = held_out_loss(whole, tokenizer, blocks(CORPUS.held_out, tokenizer, 16), PLAN.recipe)
    assert record["loss"] == pytest.approx(again, rel=1e-6)


def test_order_and_interruptions_change_nothing(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_zoo(TINY[2:], CORPUS, tmp_path, PLAN, lambda line: None)
    (tmp_path / ".partial-bert").mkdir()
    (tmp_path / ".partial-bert" / "config.json").write_text("half")
    make_zoo(TINY, CORPUS, tmp_path, PLAN, lambda line: None)
    for member in TINY:
        one, other = (load_file(f / member.name / "model.safetensors") for f in (zoo, tmp_path))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), member.name
    assert not list(tmp_path.glob(".partial*"))
    said: list[str] = []
    monkeypatch.setattr(command, "pretrain", None)
    make_zoo(TINY, CORPUS, tmp_path, PLAN, said.append)
    assert said == [f"{member.name} is there already" for member in TINY]


def test_another_recipe_or_folder_does_not_pass_for_this_one(zoo: Path, tmp_path: Path) -> None:
    other = Corpus(CORPUS.train[1:], CORPUS.held_out)
    for plan, corpus, what in ((Plan(320, 4, PLAN.recipe), CORPUS, "plan"), (PLAN, other, "text")):
        with pytest.raises(DataError, match=f"made with another {what}; remove it or give another"):
            make_zoo(TINY, corpus, zoo, plan, lambda line: None)
    (tmp_path / "bert").mkdir()
    with pytest.raises(DataError, match="not made by this script"):
        make_zoo(TINY, CORPUS, tmp_path, PLAN, lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


@pytest.mark.parametrize("member", TINY[:2], ids=lambda member: member.name)
def test_losses_are_those_of_the_library(zoo: Path, member: Member) -> None:
    """Oracle: cross entropy of all logits, and for decoders transformers' own shifted loss."""
    masked = member.family == "bert"
    kind = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    model = kind.from_pretrained(zoo / member.name).eval()
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, len(load_tokenizer(zoo / member.name)), (3, 16), generator=draw)
    labels = ids if not masked else torch.where(torch.rand(3, 16, generator=draw) < 0.3, ids, -100)
    found = loss_of(model, {"input_ids": ids, "labels": labels})
    if masked:
        logits = model(ids).logits.double()
        picked = torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]
        expected = -picked[labels >= 0].mean()
    else:
        expected = model(input_ids=ids, labels=labels).loss.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_the_held_out_loss_weighs_tokens_not_batches(zoo: Path) -> None:
    """Oracle: every block judged alone, the same masks, one mean over all predicted tokens."""
    tokenizer = load_tokenizer(zoo / "gpt2")
    model = AutoModelForCausalLM.from_pretrained(zoo / "gpt2").eval()
    rows = blocks(CORPUS.held_out, tokenizer, 16)[:5]
    with torch.no_grad():
        nats = [cross_entropy(model(row[None]).logits[0, :-1], row[1:]).item() for row in rows]
    found = held_out_loss(model, tokenizer, rows, PLAN.recipe)  # batches of 2, 2 and 1
    assert found == pytest.approx(sum(nats) / 5, rel=1e-5)


@pytest.mark.parametrize("train", [train_wordpiece, train_byte_pairs])
def test_tokenizers_frame_texts_and_blocks_cut_them_end_to_end(train: Any) -> None:
    tokenizer = train(TEXTS, 320)
    assert train(TEXTS, 320).get_vocab() == tokenizer.get_vocab() and len(tokenizer) <= 320
    rows = blocks(TEXTS[:30], tokenizer, 12)
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    expected = []
    for text in TEXTS[:30]:
        expected += [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
    whole = tokenizer(TEXTS[0], TEXTS[1])["input_ids"]
    assert whole.count(end) == 2 and whole[-1] == end
    assert (rows[:, 0] == whole[0]).all() and (rows[:, -1] == end).all()
    assert rows[:, 1:-1].flatten().tolist() == expected[: 10 * len(rows)]
    assert len(expected) - 10 * len(rows) < 10


def test_text_files_are_found_and_split(tmp_path: Path) -> None:
    lines = [f"line number {n} of a file of text" for n in range(40)]
    (tmp_path / "b.txt").write_text("\n".join(lines))
    (tmp_path / "a.raw.gz").write_bytes(gzip.compress("\n".join(lines).upper().encode()))
    (tmp_path / "README.md").write_text("a file about the files in this folder")
    corpus = read_corpus([tmp_path])
    assert corpus.train == [line.upper() for line in lines[:38]] + lines[:38]
    assert corpus.held_out == [line.upper() for line in lines[38:]] + lines[38:]
    assert corpus.digest != read_corpus([tmp_path / "b.txt"]).digest
    heading = " = A heading of more than six words = \n"
    text = heading + " well @-@ known <unk> of 1 @,@ 000 days he was\nab\n"
    assert list(paragraphs(text)) == ["well-known of 1,000 days he was"]
