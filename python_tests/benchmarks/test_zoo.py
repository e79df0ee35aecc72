"""The zoo at tiny budgets: whole models, resumed and deterministic; losses against formulas."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from benchmarks import make_zoo as command
from benchmarks.make_zoo import (
    MEMBERS,
    Corpus,
    Member,
    Plan,
    Recipe,
    blocks,
    held_out_loss,
    loss_of,
    make_zoo,
    paragraphs,
    pretrain,
    read_corpus,
)
from benchmarks.vocabulary import train_byte_pairs, train_wordpiece
from examples.docstrings import file_sentences, source_files
from jachess_ext._io import DataError
from jachess_ext.compare.models import load_model, load_tokenizer
from python_tests import processes

TINY = (
    Member("bert", "bert", 8, 1, 2, 3, 1e-3),
    Member("gpt2", "gpt2", 8, 1, 2, 3, 1e-3),
    Member("llama", "llama", 16, 1, 4, 3, 1e-3),
    Member("opt", "opt", 8, 1, 2, 3, 1e-3),
)
PLAN = Plan(vocabulary=320, seed=3, recipe=Recipe(block=16, rows=2))


def sentences(count: int, seed: int = 0) -> list[str]:
    """Made-up text."""
    draw = random.Random(seed)
    pairs = [("river", "flows"), ("clock", "ticks"), ("owl", "calls"), ("fire", "burns")]
    made = []
    for _ in range(count):
        chosen = [draw.choice(pairs) for _ in range(4)]
        made.append(" ".join(f"the {noun} {verb} and" for noun, verb in chosen) + " rests .")
    return made


CORPUS = Corpus(sentences(200), sentences(40, seed=1))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("zoo")
    make_zoo(TINY, CORPUS, folder, PLAN, lambda line: None)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("member", TINY, ids=lambda member: member.name)
def test_every_model_can_be_fine_tuned(zoo: Path, member: Member) -> None:
    tokenizer = load_tokenizer(zoo / member.name)
    model = load_model(zoo / member.name, 3, tokenizer, seed=0)
    batch = tokenizer(["the owl calls", "the"], padding=True, return_tensors="pt")
    assert tokenizer.pad_token_id == 0 and tokenizer.unk_token_id == 1
    assert model(**batch).logits.shape == (2, 3)
    assert model.config.hidden_size == member.width
    assert model.config.num_hidden_layers == member.layers
    trained = weights(zoo / member.name)
    loaded = dict(model.named_parameters())
    shared = [name for name in trained if name in loaded]
    assert len(shared) >= len(loaded) - 5, "the pretrained weights are those that are loaded"
    assert all(torch.equal(trained[name], loaded[name]) for name in shared)


def test_records_are_beside_the_models(zoo: Path) -> None:
    records = json.loads((zoo / "zoo.json").read_text())["models"]
    assert [record["name"] for record in records] == [member.name for member in TINY]
    for record in records:
        assert record == json.loads((zoo / record["name"] / "zoo.json").read_text())
        assert record["tokens"] == 3 * 2 * 16 and record["steps"] == 3
        assert record["loss"] > 0 and record["processor_seconds"] > 0
        kind = AutoModelForMaskedLM if record["family"] == "bert" else AutoModelForCausalLM
        model = kind.from_pretrained(zoo / record["name"])
        assert record["parameters"] == sum(p.numel() for p in model.parameters())
        tokenizer = load_tokenizer(zoo / record["name"])
        held_out = blocks(CORPUS.held_out, tokenizer, 16)
        again = held_out_loss(model, tokenizer, held_out, PLAN.recipe)
        assert record["loss"] == pytest.approx(again, rel=1e-6)


def test_order_and_interruptions_change_nothing(zoo: Path, tmp_path: Path) -> None:
    make_zoo(TINY[2:], CORPUS, tmp_path, PLAN, lambda line: None)
    (tmp_path / ".partial-bert").mkdir()
    (tmp_path / ".partial-bert" / "config.json").write_text("half")
    make_zoo(TINY, CORPUS, tmp_path, PLAN, lambda line: None)
    for member in TINY:
        assert_same_weights(zoo / member.name, tmp_path / member.name)
    assert not list(tmp_path.glob(".partial*"))


def test_a_finished_model_is_not_trained_again(
    zoo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(zoo, tmp_path, dirs_exist_ok=True)
    (tmp_path / "zoo.json").unlink()
    said: list[str] = []
    monkeypatch.setattr(command, "pretrain", None)
    records = make_zoo(TINY, CORPUS, tmp_path, PLAN, said.append)
    assert said == [f"{member.name} is there already" for member in TINY]
    assert json.loads((tmp_path / "zoo.json").read_text())["models"] == records


def test_an_error_while_saving_leaves_no_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(command, "write_json", fail)
        with pytest.raises(OSError, match="disk full"):
            make_zoo(TINY[:1], CORPUS, tmp_path, PLAN, lambda line: None)
    assert not (tmp_path / "bert").exists()
    make_zoo(TINY[:1], CORPUS, tmp_path, PLAN, lambda line: None)
    assert (tmp_path / "bert").is_dir() and not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize(
    "plan, corpus, what",
    [
        (Plan(320, 4, PLAN.recipe), CORPUS, "plan"),
        (PLAN, Corpus(CORPUS.train[1:], CORPUS.held_out), "text"),
    ],
)
def test_another_recipe_does_not_pass_for_this_one(
    zoo: Path, plan: Plan, corpus: Corpus, what: str
) -> None:
    with pytest.raises(DataError, match=f"made with another {what}; remove it or give another"):
        make_zoo(TINY, corpus, zoo, plan, lambda line: None)


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
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
def test_blocks_are_the_text_end_to_end(train: Any) -> None:
    texts = sentences(30)
    tokenizer = train(texts, 320)
    rows = blocks(texts, tokenizer, 12)
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    expected = []
    for text in texts:
        expected += [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
    whole = tokenizer(texts[0])["input_ids"]
    assert (rows[:, 0] == whole[0]).all() and (rows[:, -1] == whole[-1]).all()
    assert rows[:, 1:-1].flatten().tolist() == expected[: 10 * len(rows)]
    assert len(expected) - 10 * len(rows) < 10
    with pytest.raises(ValueError, match="less than one block"):
        blocks(texts[:1], tokenizer, 128)


@pytest.mark.parametrize("member", [TINY[0], TINY[2]], ids=lambda member: member.name)
def test_pretraining_learns(member: Member) -> None:
    """Texts of one word each: a word is known from its neighbours, unknown (ln 8) without them."""
    draw = random.Random(0)
    words = ["river", "flows", "clock", "ticks", "owl", "calls", "fire", "burns"]
    texts = [" ".join([draw.choice(words)] * 13) for _ in range(300)]
    tokenizer = (train_wordpiece if member.family == "bert" else train_byte_pairs)(texts, 320)
    torch.manual_seed(0)
    wide = Member("", member.family, 32, 1, 4, 0, 0)
    model = command._language_model(command.config_of(wide, tokenizer, dropout=0.0))
    recipe = Recipe(block=16, rows=8)
    rows = blocks(texts, tokenizer, 16)
    before = held_out_loss(model, tokenizer, rows[::9], recipe)
    pretrain(model, tokenizer, rows, steps=100, rate=1e-2, recipe=recipe, seed=0)
    after = held_out_loss(model, tokenizer, rows[::9], recipe)
    assert before > 3.0 and after < 1.5, (before, after)


def test_wikitext_marks_are_undone() -> None:
    heading = " = A heading of more than six words = \n"
    text = heading + " well @-@ known <unk> of 1 @,@ 000 days he was\nab\n"
    assert list(paragraphs(text)) == ["well-known of 1,000 days he was"]


def test_text_files_are_found_and_split(tmp_path: Path) -> None:
    lines = [f"line number {n} of a file of text" for n in range(40)]
    (tmp_path / "b.txt").write_text("\n".join(lines))
    (tmp_path / "a.raw.gz").write_bytes(gzip.compress("\n".join(lines).upper().encode()))
    (tmp_path / "README.md").write_text("a file about the files in this folder")
    corpus = read_corpus([tmp_path])
    assert corpus.train == [line.upper() for line in lines[:38]] + lines[:38]
    assert corpus.held_out == [line.upper() for line in lines[38:]] + lines[38:]
    assert read_corpus([tmp_path / "b.txt"]).train == lines[:38]
    assert corpus.digest != read_corpus([tmp_path / "b.txt"]).digest


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "has no file that ends in"),
        (b"too short\n", "0 paragraphs of 6 words"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
    ],
)
def test_text_that_cannot_be_used(
    tmp_path: Path, content: bytes | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    assert command.main(["--text", str(tmp_path), "--out", str(tmp_path / "zoo")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "zoo").exists()


def test_the_command_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("\n".join(sentences(400)))
    monkeypatch.setattr(command, "MEMBERS", TINY)
    arguments = ["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "zoo")]
    assert command.main([*arguments, "--length", "0.4", "--vocabulary", "320"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if line.split()[0] == "name")
    row = next(line for line in lines if line.split()[0] == "opt")
    assert head.split()[4:7] == ["tokens", "loss_before", "loss"]
    assert row.split()[4:6] == ["1", str(4 * 128)], "0.4 × 3 steps is one"


def test_six_models_of_two_kinds_that_differ() -> None:
    encoders = [member for member in MEMBERS if member.family == "bert"]
    assert len(encoders) == 3 and len(MEMBERS) == 6
    assert len({(m.width, m.layers) for m in MEMBERS}) == 6 and len({m.name for m in MEMBERS}) == 6
    assert all(32 <= m.width <= 192 and 1 <= m.layers <= 4 for m in MEMBERS)
    by_size = sorted(encoders, key=lambda m: m.width)
    assert by_size[-1].steps < by_size[0].steps, "the ranking shall not be that of the sizes"


def docstrings(path: Path) -> Path:
    """Real text that is on every machine, as one file."""
    texts = [
        " ".join(group)
        for package in ("torch", "transformers")
        for file in source_files(package)[:400]
        for group in file_sentences(package, file)
    ]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_real_zoo_killed_once(tmp_path: Path) -> None:
    """The six models at a tenth of their length on real text; kill -9 loses the model begun."""
    text, out = docstrings(tmp_path / "text.txt"), tmp_path / "zoo"
    arguments = ["--text", str(text), "--out", str(out), "--length", "0.1"]
    call = [sys.executable, "-m", "benchmarks.make_zoo", *arguments]
    root = Path(__file__).parents[2]
    with processes.started(call, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("bert-96x2: step"):
                break
        process.kill()
        process.stdout.close()
    kept = out / "bert-32x1" / "model.safetensors"
    assert [path.name for path in out.iterdir()] == ["bert-32x1"]
    written, content = kept.stat().st_mtime_ns, kept.read_bytes()
    time.sleep(0.01)
    again = processes.run(call, cwd=root, check=True)
    assert "bert-32x1 is there already" in again.stdout
    assert kept.stat().st_mtime_ns == written and kept.read_bytes() == content
    records = json.loads((out / "zoo.json").read_text())["models"]
    assert [record["name"] for record in records] == [member.name for member in MEMBERS]
    for record in records:
        assert record["loss"] < record["loss_before"] - 0.5, record
        load_model(out / record["name"], 2, load_tokenizer(out / record["name"]), seed=0)
