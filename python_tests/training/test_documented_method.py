"""docs/methods.md: its example trains as it says; settings and papers are those of the code."""

from __future__ import annotations

import importlib
import re
import textwrap
from pathlib import Path

import pytest
import torch

import jachess_ext.lab.attack  # noqa: F401  its method is one of METHODS
from jachess_ext.training import METHODS, parse_method
from jachess_ext.training.methods import JacHess, base

from .runs import examples, first, method_trainer, tensors

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "methods.md"
_SETTING = re.compile(r"`(\w+)` ([\w.-]*\w)")


def test_every_method_has_a_section_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A section lists each setting of a method with its default, JacHess' some of many."""
    monkeypatch.setattr(base, "METHODS", dict(METHODS))  # the examples register themselves
    importlib.reload(importlib.import_module("examples.controls"))
    text = DOCUMENT.read_text(encoding="utf-8")
    sections = re.split(r"^### `(.+)`$", text, flags=re.MULTILINE)[1:]
    found = dict(zip(sections[::2], sections[1::2], strict=True))
    modules = {name: method.__module__.split(".")[0] for name, method in base.METHODS.items()}
    ours = {name for name, module in modules.items() if module in ("jachess_ext", "examples")}
    assert found.keys() == ours
    for name, section in found.items():
        method = parse_method(name)
        _, _, listed = section.partition("\n## ")[0].partition("*Settings*")
        settings = dict(_SETTING.findall(listed.partition("*Cost*")[0]))
        pairs = [f"{setting}={value}" for setting, value in settings.items()]
        assert parse_method(",".join([name, *pairs])).settings == method.settings
        if not isinstance(method, JacHess):
            common = {"placebo", "dropout", "unlab_batch_size"}
            assert settings.keys() == method.settings.keys() - common, name


def test_papers_are_those_of_the_citation_file() -> None:
    """Titles, years and places of the papers stand in CITATION.cff and in BibTeX alike."""
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8").partition("references:")[2]
    papers = DOCUMENT.read_text(encoding="utf-8").partition("```bibtex\n")[2].split("\n}\n")[:2]
    for paper, entry in zip(papers, cited.split("  - type:")[1:], strict=True):
        fields = dict(re.findall(r"^  (\w+) = {(.*)},$", paper, re.MULTILINE))
        place = fields.get("journal") or fields["booktitle"]
        start, _, end = fields["pages"].partition("--")
        title = re.sub("[{}]", "", fields["title"])
        numbers = {"volume": fields["volume"], "start": start, "end": end, "year": fields["year"]}
        lines = [f"{name}: {number}\n" for name, number in numbers.items()]
        assert all(part in entry for part in (title, place, fields.get("doi", ""), *lines))
        assert fields["author"].count(" and ") + 1 == entry.count("family-names")


def test_the_documented_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "METHODS", dict(METHODS))  # it registers itself
    section = DOCUMENT.read_text(encoding="utf-8").partition("## A method of your own")[2]
    lines = [line for line in section.splitlines() if line.startswith("    ") or not line]
    exec(textwrap.dedent("\n".join(lines)), {"__name__": __name__})
    assert parse_method("confidence").settings == {
        "strength": 0.1,
        "placebo": False,
        "temperature": 1.0,
    }
    with pytest.raises(ValueError, match=r"temperature is 0\.0; expected a number above 0"):
        parse_method("confidence,temperature=0")
    rows = examples(4)  # one batch
    strong = {"strength": 0.2, "temperature": 2.0}
    made = method_trainer(tmp_path, "confidence", method=strong, data=rows, max_steps=1)
    with torch.no_grad():
        logits = made.model(**tensors(rows)).logits
    made.train()
    entropy = torch.distributions.Categorical(logits=logits / 2).entropy().mean()
    assert first(made, "jachess/penalty") == pytest.approx(-0.2 * float(entropy), rel=1e-6)
