"""`jachess finetune` and `jachess evaluate` as a user meets them."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from transformers import AutoTokenizer

from jachess_ext.lab.cli import main
from jachess_ext.lab.compare import finetune
from jachess_ext.lab.compare.settings import Grid
from jachess_ext.lab.workbench.models import load_config, load_tokenizer

SMALL = ("--recipe.epochs", "1", "--recipe.batch-size", "8", "--recipe.lr", "5e-3")
SMALL += ("--recipe.max-length", "16")


def command(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    tasks = ("--tasks", f"a={data}:{data}")
    return ["finetune", "--model", str(model), *tasks, "--out", str(out), *SMALL, *more]


def test_finetune_then_evaluate(
    tiny_model: Path,
    sentiment: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    more = ("--methods", "none", "l2", "--seeds", "0", "--save-models", "--recipe.lora")
    assert main(command(tiny_model, sentiment, out, *more)) == 0
    shown = capfd.readouterr()
    assert "l2" in shown.out and str(out / "report.html") in shown.out
    page = (out / "report.html").read_bytes()

    def refuse(*_: Any) -> None:
        raise AssertionError("evaluate trained a model")

    monkeypatch.setattr(finetune, "run", refuse)
    (out / "report.html").unlink()
    assert main(["evaluate", str(out)]) == 0
    assert (out / "report.html").read_bytes() == page, "the figures are redrawn as they were"
    models = sorted((out / "models").iterdir())
    assert [m.name.split("-")[2] for m in models] == ["l2", "none"]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Grid]:
    """Return the grid that options give."""

    def parse(*given: str) -> Grid:
        grids = []
        with monkeypatch.context() as patch:
            patch.setattr(finetune, "run_grid", lambda grid, *_, **__: grids.append(grid))
            with contextlib.suppress(TypeError):  # of the report: there are no records
                main(["finetune", *given])
        return grids[0]

    return parse


GIVEN = ("--model", "m", "--tasks", "t", "--methods", "r3f")


def test_values_by_name(parsed: Callable[..., Grid], tmp_path: Path) -> None:
    strengths = ("--tuning.strength", "0.001", "0.01", "--tuning.methods", "r3f=0.3", "r3f=1")
    grid = parsed(*GIVEN, *strengths, "sam,rho=0.1=2", "--shift", "t=a=x:y", "t=b", "u=c")
    assert grid.tuning.strength == (0.001, 0.01)
    assert grid.tuning.methods == {"r3f": (0.3, 1.0), "sam,rho=0.1": (2.0,)}
    assert grid.shift == {"t": ("a=x:y", "b"), "u": ("c",)}
    path = tmp_path / "g.json"
    content = {"tuning": {"strength": [0.5], "methods": {"l2": [0.1]}}, "recipe": {"lora": True}}
    path.write_text(json.dumps(content))
    over = parsed(*GIVEN, "--grid", str(path), "--tuning.methods", "r3f=1", "--recipe.no-lora")
    assert over.tuning.strength == (0.5,) and over.tuning.methods == {"r3f": (1.0,)}
    assert not over.recipe.lora and parsed(*GIVEN, f"--grid={path}").recipe.lora


def test_options_and_file_give_the_same_grid(parsed: Callable[..., Grid], tmp_path: Path) -> None:
    grid = parsed(*GIVEN, "--recipe.epochs", "2", "--conditions.texts", "case", "--seeds", "7")
    (tmp_path / "grid.json").write_text(json.dumps(asdict(grid)))
    assert parsed("--grid", str(tmp_path / "grid.json")) == grid


@pytest.mark.parametrize("text", ["much", "r3f=", "r3f=a", "=1"])
def test_bad_strengths(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["finetune", *GIVEN, "--tuning.methods", text])
    assert caught.value.code == 2 and "--tuning.methods" in capsys.readouterr().err


def refused(code: int, capfd: pytest.CaptureFixture[str], words: str, name: str) -> None:
    error = capfd.readouterr().err
    sentences = [line for line in error.splitlines() if line.startswith(f"jachess {name}: ")]
    assert code == 2 and len(sentences) == 1 and words in sentences[0], error
    assert "Traceback" not in error


NOWHERE = "there is no such folder"
OFFLINE = f"{NOWHERE}, no download of it, and the hub is not reached; expected a folder with"


@pytest.mark.parametrize(
    ("model", "words", "asked"),
    [
        ("no-one/no-such-model", OFFLINE, 1),
        ("/no/such/model", f"{NOWHERE}; expected a folder with", 0),
        ("no/such/model", f"{NOWHERE}; expected a folder with", 0),
        ("{}", "the folder has no config.json; expected a folder with", 0),
    ],
)
def test_a_model_that_is_nowhere(
    model: str,
    words: str,
    asked: int,
    sentiment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The hub is asked once, without a wait, and the sentence says what to give."""
    calls, waits = [], []

    def no_network(*address: Any, **_: Any) -> None:
        calls.append(address)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(time, "sleep", waits.append)
    given = command(Path(model.format(tmp_path)), sentiment, tmp_path / "out", "--methods", "none")
    given[2] = model.format(tmp_path)
    refused(main(given), capfd, words, "finetune")
    assert asked <= len(calls) <= 2 * asked and not waits  # once more by the library itself


def test_a_model_that_the_hub_does_not_have(
    sentiment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def missing(*_: Any, **__: Any) -> None:
        error = huggingface_hub.errors.RepositoryNotFoundError
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "model_info", missing)
    given = command(Path("no-such"), sentiment, tmp_path / "out", "--methods", "none")
    refused(main(given), capfd, "and none that you can read on the hub; expected", "finetune")


def test_a_downloaded_model_is_loaded_without_the_hub(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "models--some-one--tiny"
    shutil.copytree(tiny_model, home / "snapshots" / "1")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("1")

    def no_network(*_: Any, **__: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub, "model_info", no_network)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert load_config("some-one/tiny").hidden_size == load_config(tiny_model).hidden_size
    assert load_tokenizer("some-one/tiny").vocab_size > 0


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (["sgd"], "unknown method 'sgd'"),
        (["jachess-train,layers=7"], "layers is [7], but the model has blocks 0 to 1"),
        (["sam,rho=-1"], "rho is -1.0"),
    ],
)
def test_bad_methods(
    tiny_model: Path,
    sentiment: Path,
    tmp_path: Path,
    methods: list[str],
    words: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    given = command(tiny_model, sentiment, tmp_path / "out", "--methods", *methods)
    refused(main(given), capfd, words, "finetune")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("missing", "method", "words"),
    [
        (("mask_token",), "tapt", "the tokenizer has no mask token"),
        (("pad_token", "unk_token", "mask_token"), "none", "no token to pad with"),
        (("unk_token", "mask_token"), "none", "no unknown and no mask token to corrupt texts with"),
    ],
)
def test_tokenizers_that_lack_a_token(
    tiny_model: Path,
    sentiment: Path,
    tmp_path: Path,
    missing: tuple[str, ...],
    method: str,
    words: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for name in missing:
        setattr(tokenizer, name, None)
    tokenizer.save_pretrained(model)
    given = command(model, sentiment, tmp_path / "out", "--methods", method)
    refused(main(given), capfd, words, "finetune")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["evaluate", "/nowhere/at/all"], "cannot be read"),
        (["finetune", "--grid", "/nowhere.json"], "cannot be read"),
        (["finetune", *GIVEN, "--processes", "0"], "--processes is 0; expected at least 1"),
    ],
)
def test_bad_commands(given: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    refused(main(given), capfd, words, given[0])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--model", "m", "--tasks", "t"], "--methods"),
        ([*GIVEN, "--recipe.lr", "fast"], "--recipe.lr"),
        ([*GIVEN, "--recipe.epochs", "0"], "epochs is 0.0; expected more than 0"),
        ([*GIVEN, "--strengths", "1"], "--strengths"),
    ],
)
def test_bad_options(given: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["finetune", *given])
    error = capfd.readouterr().err
    assert caught.value.code == 2 and words in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "expected an object"),
        ('{"rate": 1}', "the grid has no setting 'rate'"),
        ('{"seeds": [1, 1]}', "seeds is [1, 1]; expected some, each of them once"),
    ],
)
def test_bad_grid_files(
    content: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "g.json").write_text(content)
    given = ["finetune", *GIVEN, "--grid", str(tmp_path / "g.json")]
    refused(main(given), capfd, words, "finetune")
