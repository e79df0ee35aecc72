"""What the package may not do: unpickle, run a model's own code, write a file in place."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import jachess_ext
from jachess_ext._io import DataError
from jachess_ext.lab.demo import ASSETS
from jachess_ext.lab.workbench.models import load_config, load_head_model, load_model
from jachess_ext.lab.workbench.models import load_tokenizer as tokenizer_of

PACKAGE = Path(jachess_ext.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
CODE = {
    *("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"),
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "pd.read_pickle"),
    *("torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "load_state_dict_from_url"),
}
"""Modules and functions that run what they read."""
UNSAFE = {"weights_only": False, "allow_pickle": True, "trust_remote_code": True, "shell": True}
WRITERS = {
    "_io.py": {"write_text", "write_bytes", "open", "fdopen", "dump", "savetxt"},
    "commands/ntk.py": {"savez"},  # to bytes
}
"""Where files are opened to be written, whole or not at all, and the names that may be called."""


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Every call and import of the package, with its file."""
    kinds = (ast.Call, ast.Import, ast.ImportFrom)
    return [
        (source.relative_to(PACKAGE).as_posix(), node)
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, kinds)
    ]


def calls() -> Iterator[tuple[str, ast.Call, str, dict[str, object]]]:
    """(file, call, its name as written, constant keywords) of every call in the package."""
    for file, node in nodes():
        if isinstance(node, ast.Call):
            given = {
                word.arg: word.value.value
                for word in node.keywords
                if word.arg is not None and isinstance(word.value, ast.Constant)
            }
            yield file, node, ast.unparse(node.func), given


def test_nothing_that_is_read_is_run() -> None:
    """torch and numpy unpickle no code unless told to; transformers asks where it is not told."""
    found = list(calls())
    loading = [given for _, _, name, given in found if name.endswith(".from_pretrained")]
    assert len(SOURCES) > 80 and loading, "a scan of nothing finds nothing"
    assert all(given.get("trust_remote_code") is False for given in loading)
    for file, _, name, given in found:
        # From the identifiers of a function of the program, which it runs itself.
        allowed = (file, name) == ("jet/compiled/closures.py", "compile")
        assert allowed or name not in CODE, f"{file} calls {name}"
        assert not [word for word, value in UNSAFE.items() if given.get(word) is value], file
    for file, node in nodes():
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if not (isinstance(node, ast.ImportFrom) and node.level):
            assert not CODE & {name.partition(".")[0] for name in names}, file


def test_files_are_written_in_one_place_alone() -> None:
    """Everything goes through `_io`; models are saved below a name of their own."""
    named = {"write_text", "write_bytes", "dump", "savetxt", "save", "savez", "save_file"}
    for file, call, full, given in calls():
        owner, _, name = full.rpartition(".")
        allowed = WRITERS.get(file, set())
        if full == "safetensors.torch.save":  # to bytes
            continue
        if name in named and (owner or name not in ("write_text", "write_bytes")):
            assert name in allowed, f"{file} calls {full}"
        if name == "to_csv":  # without a path it gives the text
            assert not call.args and "path_or_buf" not in given, file
        if name == "savefig":
            assert isinstance(call.args[0], ast.Name), f"{file}: savefig to other than a buffer"
        if name in ("open", "fdopen"):
            place = 1 if owner in ("", "os", "gzip") else 0
            known = [a.value for a in call.args[place : place + 1] if isinstance(a, ast.Constant)]
            mode = str(given.get("mode", *known or ["r"]))
            assert name in allowed or not set(mode) & set("wax+"), f"{file} opens with {mode!r}"


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


def test_pickled_weights_are_refused(hostile_model: Path) -> None:
    """A model without safetensors is not loaded from a pickle."""
    folder = hostile_model
    (folder / "config.json").write_bytes((ASSETS / "config.json").read_bytes())
    weights = torch.nn.Linear(1, 1).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match="could not be loaded"):
        load_model(folder, 2, tokenizer_of(ASSETS), 0)
