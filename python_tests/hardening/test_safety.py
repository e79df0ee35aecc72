"""What the package may not do: unpickle, run a model's own code, write a file in place."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import jachess_ext
from jachess_ext._io import DataError
from jachess_ext.compare.models import load_config, load_fine_tuned, load_head_model, load_model
from jachess_ext.compare.models import load_tokenizer as tokenizer_of
from jachess_ext.demo import ASSETS

PACKAGE = Path(jachess_ext.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
WRITERS = {"_io.py"}
"""Where files are opened to be written: whole or not at all."""
IN_MEMORY = {
    ("training/trainer.py", "save"),  # to a file that is moved into place
    ("commands/ntk.py", "savez"),  # to bytes
}


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    """(file, call, the called name's last part) of every call in the package."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                yield source.relative_to(PACKAGE).as_posix(), node, name


def keywords(call: ast.Call) -> dict[str, object]:
    return {
        word.arg: word.value.value
        for word in call.keywords
        if word.arg is not None and isinstance(word.value, ast.Constant)
    }


def imported() -> Iterator[tuple[str, str]]:
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            yield from ((source.name, name.partition(".")[0]) for name in names)


def test_the_scan_sees_the_package() -> None:
    """A scan of nothing would find nothing."""
    found = [name for _, _, name in calls()]
    assert len(SOURCES) > 80 and found.count("write_text") > 5 and "from_pretrained" in found


def test_nothing_is_unpickled() -> None:
    """numpy's and torch's readers are told so; torch writes tensors and numbers alone."""
    unsafe = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}
    assert not [pair for pair in imported() if pair[1] in unsafe]
    for file, call, name in calls():
        owner = getattr(getattr(call.func, "value", None), "id", "")
        if (owner, name) == ("torch", "load"):
            assert keywords(call).get("weights_only") is True, file
        if (owner, name) == ("np", "load"):
            assert keywords(call).get("allow_pickle") is False, file
        assert name != "read_pickle", file


def test_nothing_in_a_file_is_run() -> None:
    for file, call, name in calls():
        plain = isinstance(call.func, ast.Name)
        assert not (plain and name in ("eval", "exec", "compile", "__import__")), file
        assert keywords(call).get("shell") is not True, file
        owner = getattr(getattr(call.func, "value", None), "id", "")
        assert (owner, name) not in (("os", "system"), ("os", "popen")), file


def test_files_are_written_in_one_place_alone() -> None:
    """Everything goes through `_io`; models are saved below a name of their own."""
    for file, call, name in calls():
        owner = getattr(getattr(call.func, "value", None), "id", "")
        own = isinstance(call.func, ast.Name) and name in ("write_text", "write_bytes")
        if name in ("write_text", "write_bytes", "dump", "savetxt") and not own:
            raise AssertionError(f"{file} calls {name}")
        if name == "to_csv":  # without a path it gives the text
            assert not call.args and "path_or_buf" not in keywords(call), file
        if name == "savefig":
            assert isinstance(call.args[0], ast.Name), f"{file}: savefig to other than a buffer"
        if name in ("save", "savez", "savez_compressed", "save_file"):
            assert (file, name) in IN_MEMORY, f"{file} calls {name}"
        if name in ("open", "fdopen"):
            mode = _mode(call, 1 if isinstance(call.func, ast.Name) or owner == "os" else 0)
            assert file in WRITERS or not set(mode) & set("wax+"), f"{file} opens with {mode!r}"


def _mode(call: ast.Call, place: int) -> str:
    given = {word.arg: word.value for word in call.keywords}
    node = given.get("mode", call.args[place] if len(call.args) > place else None)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "r"


# A model's own code

MARKER_CODE = """
import pathlib
pathlib.Path({marker!r}).write_text("ran")
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast
class OwnConfig(BertConfig):
    model_type = "own-model"
class OwnModel(BertForSequenceClassification):
    config_class = OwnConfig
class OwnTokenizer(BertTokenizerFast):
    pass
"""


@pytest.fixture
def hostile_model(tmp_path: Path) -> Path:
    """The demo's model with an `auto_map` to code of its own, which leaves a marker."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((ASSETS / name).read_bytes())
    (folder / "own.py").write_text(MARKER_CODE.format(marker=str(tmp_path / "marker")))
    config = json.loads((ASSETS / "config.json").read_text())
    config |= {
        "model_type": "own-model",
        "architectures": ["OwnModel"],
        "auto_map": {
            "AutoConfig": "own.OwnConfig",
            "AutoModelForSequenceClassification": "own.OwnModel",
            "AutoModelForCausalLM": "own.OwnModel",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((ASSETS / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}
    settings["tokenizer_class"] = "OwnTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_models_own_code_is_not_run(hostile_model: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(ASSETS)
    for load in (
        lambda: load_config(hostile_model),
        lambda: load_model(hostile_model, 2, tokenizer, 0),
        lambda: load_head_model(hostile_model, "causal", tokenizer, 0),
        lambda: load_fine_tuned(hostile_model, 2, tokenizer),
        lambda: tokenizer_of(hostile_model),
    ):
        with contextlib.suppress(DataError):  # refused, or loaded without that code
            load()
        assert not (tmp_path / "marker").exists()


def test_the_marker_would_be_left(hostile_model: Path, tmp_path: Path) -> None:
    """The trap works: with leave to run code, transformers runs it."""
    from transformers import AutoConfig

    AutoConfig.from_pretrained(hostile_model, trust_remote_code=True)
    assert (tmp_path / "marker").read_text() == "ran"


def test_every_loading_call_refuses_remote_code() -> None:
    """By saying so: without the argument transformers asks on the terminal."""
    for file, call, name in calls():
        assert keywords(call).get("trust_remote_code", False) is False, file
        if name == "from_pretrained":
            assert "trust_remote_code" in keywords(call), file


def test_pickled_weights_are_refused(hostile_model: Path) -> None:
    """A model without safetensors is not loaded from a pickle."""
    folder = hostile_model
    (folder / "config.json").write_bytes((ASSETS / "config.json").read_bytes())
    weights = torch.nn.Linear(1, 1).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match="could not be loaded"):
        load_model(folder, 2, tokenizer_of(ASSETS), 0)
    with pytest.raises(DataError, match="could not be loaded"):
        load_fine_tuned(folder, 2, tokenizer_of(ASSETS))
