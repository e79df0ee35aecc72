"""`jachess ntk` as a user meets it: a file and a report, or one sentence and exit code 2."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

import jachess_ext as jx
from jachess_ext.cli import main
from jachess_ext.ntk import label_alignment
from python_tests import processes

WORDS = ["good", "bad", "film", "plot", "the", "a", "very", "dull", "bright", "long"]
TEXTS = ["the good film", "a very dull plot", "bright", "the long bad film a plot", "very good"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {word: i + 2 for i, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """An encoder without a head."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=12, n_embd=16, n_layer=1, n_head=2, n_positions=16, pad_token_id=0,
        bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl.gz"
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(TEXTS)]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return path


def _expected(kind: Any, folder: Path, tokenizer: Any, **settings: Any) -> tuple[Any, dict]:
    torch.manual_seed(0)
    model = kind.from_pretrained(folder, **settings).eval()
    batch = dict(tokenizer(TEXTS, padding=True, return_tensors="pt"))
    return model, batch


def test_a_classifier_from_start_to_end(
    encoder: Path, labelled: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """In a process of its own; the numbers are those of jx.ntk on the same model."""
    out = tmp_path / "new" / "kernel.npz"
    command = [sys.executable, "-m", "jachess_ext", "ntk", encoder, labelled, "--out", out]
    done = processes.run(command)
    assert done.returncode == 0, done.stderr
    model, batch = _expected(AutoModelForSequenceClassification, encoder, tokenizer, num_labels=2)
    expected = jx.ntk(model, batch)
    with np.load(out) as saved:
        np.testing.assert_allclose(saved["theta"], expected.numpy(), rtol=1e-4, atol=1e-5)
        assert saved["labels"].tolist() == [0, 1, 0, 1, 0]
        about = json.loads(str(saved["about"]))
    assert about["head"] == "classifier" and about["outputs"] == "logits"
    aligned = label_alignment(expected, torch.arange(5) % 2)
    assert "NTK of 5 samples, 2 outputs" in done.stdout
    assert f"alignment with the labels {aligned:.3f}" in done.stdout
    assert f"saved in {out}" in done.stdout
    assert [path.name for path in out.parent.iterdir()] == ["kernel.npz"]


def test_a_language_model(
    decoder: Path, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, out = tmp_path / "texts.txt", tmp_path / "kernel.npz"
    texts.write_text("\n\n".join(TEXTS) + "\nnot read\n")
    settings = ["--outputs", "label", "--samples", "5", "--dtype", "float64"]
    assert main(["ntk", str(decoder), str(texts), *settings, "--out", str(out)]) == 0
    model, batch = _expected(AutoModelForCausalLM, decoder, tokenizer)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    expected = jx.ntk(model.double(), batch | {"labels": labels}, outputs="label")
    with np.load(out) as saved:
        np.testing.assert_allclose(saved["theta"], expected.numpy(), rtol=1e-9, atol=1e-12)
        assert json.loads(str(saved["about"]))["head"] == "causal"
        assert sorted(saved) == ["about", "theta"]
    assert "alignment" not in capsys.readouterr().out


@pytest.mark.parametrize("options, words", [
    (["--method", "explain", "--parameters", "attention"], "GFLOP A"),
    (["--memory", "32768", "--outputs", "sum"], "6 pairs of blocks"),
    (["--outputs", "3", "--classes", "4", "--seed", "2"], "5 samples, 3 outputs"),
])  # fmt: skip
def test_options(
    options: list[str], words: str, encoder: Path, labelled: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "k.npz"
    assert main(["ntk", str(encoder), str(labelled), *options, "--out", str(out)]) == 0
    assert words in capsys.readouterr().out
    assert out.exists() == ("explain" not in options)


def _write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


BAD_FILES = [
    ("empty.txt", "", "is empty; expected at least one text"),
    ("rows.jsonl", '{"sentence": "a"}', "record 1 has no text in column 'text'"),
    ("rows.jsonl", "{", "line 1 is not JSON"),
    ("rows.doc", "a", "the name must end in"),
    ("texts.txt.gz", b"not gzip", "is not a whole gzip file"),
    ("texts.txt", b"\xff\xfe\xfa", "is not UTF-8"),
]


@pytest.mark.parametrize("name, content, words", BAD_FILES)
def test_bad_files(
    name: str, content: Any, words: str, encoder: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path, out = _write(tmp_path, name, content), tmp_path / "k.npz"
    _refused(["ntk", str(encoder), str(path), "--out", str(out)], words, capsys)
    assert not out.exists()


def _refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    sentences = [line for line in printed.err.splitlines() if line.startswith("jachess ntk: ")]
    assert len(sentences) == 1 and words in sentences[0]
    assert "Traceback" not in printed.err


BAD_OPTIONS = [
    (["--memory", "1024"], "memory_budget is 1024 bytes, too few for one sample"),
    (["--parameters", "nothing"], "no parameter to take the kernel over"),
    (["--parameters", "("], "unterminated subpattern"),
    (["--label-column", "none", "--outputs", "label"], "outputs='label' needs labels"),
    (["--device", "cuda:99"], "the device cuda:99 is not there"),
    (["--file-missing"], None),
    (["--outputs", "all"], None),
    (["--memory", "lots"], None),
    (["--out", "kernel.txt"], "ends in .npz"),
    (["--samples", "0"], "--samples is 0"),
]


@pytest.mark.parametrize("options, words", BAD_OPTIONS)
def test_bad_options(
    options: list[str], words: str | None, encoder: Path, labelled: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    arguments = ["ntk", str(encoder), str(labelled), "--out", str(tmp_path / "k.npz"), *options]
    if words is not None:
        _refused(arguments, words, capsys)
    else:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert not (tmp_path / "k.npz").exists()


def test_a_model_or_file_or_place_that_is_not_there(
    encoder: Path, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _refused(["ntk", str(tmp_path / "no"), str(labelled)], "could not be loaded", capsys)
    _refused(["ntk", str(encoder), str(tmp_path / "no.txt")], "cannot be read", capsys)
    (tmp_path / "folder.npz").mkdir()
    taken = ["ntk", str(encoder), str(labelled), "--out", str(tmp_path / "folder.npz")]
    _refused(taken, "Is a directory", capsys)
