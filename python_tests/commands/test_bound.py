"""`jachess bound` on a tiny encoder and its fine-tuned copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
)

from jachess_ext.cli import main
from jachess_ext.scaling import pac_bayes

WORDS = ["good", "bad", "film", "plot"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(fine-tuned classifier, the encoder before)."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {word: i + 2 for i, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=6,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
        num_labels=2,
    )
    before, after = BertModel(config), BertForSequenceClassification(config)
    state = {name: value + 0.02 for name, value in before.state_dict().items()}
    after.bert.load_state_dict(state)
    folder = tmp_path_factory.mktemp("bound")
    for name, model in (("after", after), ("before", before)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder / "after", folder / "before"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "d.csv"
    path.write_text("text,label\ngood film,1\nbad plot,0\nfilm,1\nbad film plot,0\n")
    return path


def test_report_and_file(
    folders: tuple[Path, Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b.json"
    after, before = folders
    given = ["--samples", "3", "--steps", "6", "--out", str(out)]
    assert main(["bound", str(after), str(before), str(data), *given]) == 0
    found = json.loads(out.read_text())
    names = [row["name"] for row in found["rows"]]
    assert names == ["bert.embeddings", "bert.encoder.layer.0", "bert.pooler"]
    assert found["new"] == ["classifier.weight", "classifier.bias"]
    assert found["samples"] == 4 and found["measured"] == 3
    model = AutoModelForSequenceClassification.from_pretrained(after).eval()
    ids = [torch.tensor([[2, 4]]), torch.tensor([[3, 5]]), torch.tensor([[4]])]
    batches = [
        {"input_ids": tokens, "labels": torch.tensor([label])}
        for tokens, label in zip(ids, (1, 0, 1), strict=True)
    ]
    old = BertModel.from_pretrained(before).state_dict()
    expected = pac_bayes(model, {f"bert.{k}": v for k, v in old.items()}, batches, 4, steps=6)
    assert found["curvature"] == pytest.approx(expected.curvature, rel=1e-3)
    assert found["empirical"] == pytest.approx(expected.empirical, rel=1e-5)
    printed = capsys.readouterr().out
    assert "3 of 4 examples measured" in printed and "phase" in printed


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (0, "none", "could not be loaded"),
        (1, "none", "could not be loaded"),
        (2, "none.csv", "cannot be read"),
    ],
)
def test_missing_inputs_are_one_sentence(
    place: int,
    value: str,
    words: str,
    folders: tuple[Path, Path],
    data: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    arguments = [str(folders[0]), str(folders[1]), str(data)]
    arguments[place] = str(tmp_path / value)
    assert main(["bound", *arguments]) == 2
    error = capfd.readouterr().err
    assert words in error and "Traceback" not in error


def test_a_classifier_needs_labels(
    folders: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.txt"
    path.write_text("good film\n")
    assert main(["bound", *map(str, folders), str(path)]) == 2
    assert "has no labels" in capfd.readouterr().err
