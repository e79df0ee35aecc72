"""Live selections of causal language models: windows, bits per byte, what is refused, the end."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from jachess_ext.lab.cli import main
from jachess_ext.lab.live import LiveSettings, choice, read_selection
from jachess_ext.lab.live.language import load_text, text_task, windows
from jachess_ext.lab.live.plan import make_plan
from jachess_ext.lab.live.trial import run
from jachess_ext.lab.workbench.models import load_tokenizer
from jachess_ext.lab.workbench.settings import Recipe
from jachess_ext.scaling import Ask

from .tiny import save_decoder, save_model, write_text

Given = dict[str, Any]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Paths of two decoders whose tokenizers differ."""
    folder = tmp_path_factory.mktemp("decoders")
    narrow, wide = save_decoder(folder / "bytes", 8, 1), save_decoder(folder / "words", 16, 2, 20)
    return str(narrow), str(wide)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The task of 120 pieces to train on and 30 to judge on."""
    folder = tmp_path_factory.mktemp("text")
    return f"{write_text(folder / 'train.txt', 120, 0)}:{write_text(folder / 'dev.txt', 30, 1)}"


@pytest.fixture
def given(decoders: tuple[str, str], text: str) -> Given:
    recipe = Recipe(epochs=1.0, batch_size=4, lr=1e-2, max_length=16)
    settings = LiveSettings(sizes=(8, 16, 32), recipe=recipe)
    return {"models": decoders, "task": text, "settings": settings}


def bits_per_byte(folder: str, pieces: list[str], length: int) -> float:
    """A token at a time, each from the tokens of its window before it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    nats = 0.0
    for piece in pieces:
        tokens = [tokenizer.eos_token_id, *tokenizer(piece)["input_ids"]]
        for place in range(1, len(tokens)):
            start = (place - 1) // (length - 1) * (length - 1)
            with torch.no_grad():
                logits = model(torch.tensor([tokens[start:place]])).logits[0, -1].double()
            nats -= float(logits.log_softmax(-1)[tokens[place]])
    return nats / math.log(2) / sum(len(piece.encode()) for piece in pieces)


def test_bits_per_byte_are_those_of_the_definition(given: Given, tmp_path: Path) -> None:
    settings = replace(given["settings"], dev_size=5)
    plan = make_plan(**given | {"settings": settings})
    found = {}
    for model in given["models"]:
        record = run(plan.trial(Ask(model, 0)))
        assert record.error is None and record.dev_rows == 5
        expected = bits_per_byte(model, list(plan.task.dev.texts), 16)
        assert record.scores["bpb"] == pytest.approx(expected, rel=1e-5)
        assert record.scores["perplexity"] == pytest.approx(math.exp(record.dev_loss))
        found[model] = record
    a, b = found.values()
    tokens = [r.judging_flops / 2 / r.parameters for r in (a, b)]
    assert tokens[0] > 1.5 * tokens[1], "the second tokenizer has whole words"


def test_every_token_is_predicted_once(decoders: tuple[str, str]) -> None:
    tokenizer = load_tokenizer(decoders[0])
    pieces = ["the film is very good", "a", "é" * 16]
    for end in (False, True):
        data = windows(text_task(pieces, ["b"]).train, tokenizer, 8, predicts_end=end)
        assert max(len(row["input_ids"]) for row in data.rows) == 8
        batch = data.batch(range(len(data)))
        predicted = (batch["labels"][:, 1:] != -100).sum()
        assert predicted == sum(len(piece.encode()) + end for piece in pieces)
        assert (batch["labels"] == batch["input_ids"])[batch["attention_mask"] == 1].all()
    for row, after in zip(data.rows, data.rows[1:], strict=False):
        starts = after["input_ids"][0] == tokenizer.eos_token_id
        assert starts or after["input_ids"][0] == row["input_ids"][-1]


def test_training_lowers_the_loss_and_costs_six_n_d(given: Given, tmp_path: Path) -> None:
    plan = make_plan(**given)
    model = given["models"][1]
    job = plan.trial(Ask(model, 64))
    before, after = (run(j) for j in (plan.trial(Ask(model, 0)), job))
    assert after.error is None and after.scores["bpb"] < 0.9 * before.scores["bpb"]
    tokenizer = load_tokenizer(model)
    rows = windows(job.task.train, tokenizer, 16, predicts_end=True).rows
    tokens = sum(len(row["input_ids"]) for row in rows)
    assert after.training_flops == 6 * after.parameters * tokens
    assert after.steps == math.ceil(len(rows) / 4)
    (candidate,) = (c for c in plan.candidates if c.model == model)
    assert candidate.training_flops(64, job.recipe) == pytest.approx(after.training_flops, rel=0.1)
    lora = run(replace(job, recipe=replace(job.recipe, lr=0.1, lora=True)))
    assert lora.error is None and lora.scores["bpb"] < before.scores["bpb"]


def test_files_folders_and_what_is_empty(tmp_path: Path, decoders: tuple[str, str]) -> None:
    (tmp_path / "train.txt").write_text("one\n\n two \n")
    with gzip.open(tmp_path / "dev.txt.gz", "wt") as file:
        file.write("three\n")
    for spec in (str(tmp_path), f"{tmp_path}/train.txt:{tmp_path}/dev.txt.gz"):
        task = load_text(f"name={spec}")
        assert (task.train.texts, task.dev.texts, task.name) == (["one", "two"], ["three"], "name")
    (tmp_path / "none.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="text is empty; expected pieces of text"):
        make_plan(decoders, f"{tmp_path}/none.txt:{tmp_path}/dev.txt.gz")
    with pytest.raises(ValueError, match="the dev text is empty"):
        text_task(["a"], [" "])


def test_text_is_ranked_by_bits_per_byte_alone(given: Given) -> None:
    settings = replace(given["settings"], rank_by="loss")
    with pytest.raises(ValueError, match="rank_by is 'loss'; expected one of bpb"):
        make_plan(**given | {"settings": settings})


def test_models_that_are_no_language_models(given: Given, tmp_path: Path) -> None:
    """An encoder, one that translates, a tokenizer that loses words, half a checkpoint."""
    encoder = save_model(tmp_path / "encoder", 8, 0)
    lossy = Path(shutil.copytree(given["models"][0], tmp_path / "lossy"))
    content = json.loads((lossy / "tokenizer.json").read_text())
    (lossy / "tokenizer.json").write_text(
        json.dumps(
            content
            | {"normalizer": {"type": "Replace", "pattern": {"String": "film"}, "content": ""}}
        )
    )
    translator = Path(shutil.copytree(given["models"][0], tmp_path / "t5"))
    small = T5Config(vocab_size=300, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(small).save_pretrained(translator)
    plan = make_plan(
        **given | {"models": tuple(map(str, (*given["models"], encoder, lossy, translator)))}
    )
    assert tuple(each.model for each in plan.candidates) == given["models"]
    said = plan.search.unusable
    assert "is no causal language model: what bert predicts depends on later" in said[str(encoder)]
    assert "loses" in said[str(lossy)] and "bits per byte cannot be compared" in said[str(lossy)]
    assert "could not be loaded" in said[str(translator)] and "T5Config" in said[str(translator)]


def test_from_text_to_a_page(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "out"
    words = f"select-live --task {given['task']} --sizes 8 16 32 --keep-winner --out {out}"
    how = "--recipe.epochs 1 --recipe.batch-size 4 --recipe.lr 1e-2 --recipe.max-length 16"
    arguments = [*words.split(), "--models", *given["models"], *how.split()]
    assert main(arguments) == 0
    selection = read_selection(out)
    assert selection.rank_by == "bpb" and selection.best == given["models"][1]
    told = {(a.model, a.rows): r.loss for a, r in selection.search.results.items()}
    for record in selection.records:
        assert told[record.model, record.size] == record.scores["bpb"]
    winner = selection.winner
    assert winner is not None
    kept = bits_per_byte(str(out / "winner"), load_text(given["task"]).dev.texts, 16)
    assert winner.scores["bpb"] == pytest.approx(kept, rel=1e-5)
    printed = capsys.readouterr().out
    assert "bpb" in printed and "of the target 120" in printed and "perplexity" in printed
    assert "bpb</th>" in (out / "report.html").read_text(encoding="utf-8")
    monkeypatch.setattr(choice, "run", lambda job: pytest.fail("a finished run was repeated"))
    assert main(arguments) == 0 and read_selection(out) == selection
