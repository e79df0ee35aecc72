"""The method that docs/methods.md writes as an example trains as it says."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from jachess_ext.training import METHODS, parse_method
from jachess_ext.training.methods import base

from .runs import examples, first, method_trainer, tensors

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "methods.md"


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
