"""The first example of docs/ntk.md, run as it stands on a tiny model."""

import re
from pathlib import Path

import torch

from .models import LABELS, batch, classifier

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "ntk.md"


def test_the_example_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)[0]
    names: dict = {
        "model": classifier("bert"),
        "batch": batch([5, 4, 6]),
        "other": batch([3, 4], seed=2),
        "residual": torch.ones(3 * LABELS),
        "t": torch.tensor([0.0, 1.0]),
        "lr": 0.1,
    }
    exec(compile(code, str(DOCUMENT), "exec"), names)
    assert names["theta"].shape == (3, LABELS, 3, LABELS)
    assert names["measured"].report.difference < 1e-9
