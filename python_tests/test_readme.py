"""The README's training loop, run as it stands on a tiny model."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig

import jachess_ext as jx

README = Path(__file__).resolve().parents[1] / "README.md"


def tiny_model() -> torch.nn.Module:
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, initializer_range=0.2,
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config)


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(5, 40, (count, 4, 6))
    mask, labels = torch.ones_like(ids[0]), torch.tensor([0, 1, 0, 1])
    return [{"input_ids": row, "attention_mask": mask, "labels": labels} for row in ids]


def test_the_loop_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the pretrained name and the data are replaced."""
    torch.manual_seed(0)
    code = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)[0]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 15
    assert "loader = ..." in code
    model = tiny_model()
    before = [p.detach().clone() for p in model.parameters()]
    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", lambda name: model)
    names: dict = {"data": batches(6)}
    exec(compile(re.sub(r"loader = \.\.\..*", "loader = data", code), str(README), "exec"), names)
    assert isinstance(names["reg"], jx.JacHess)
    assert names["reg"].step == 6
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert all(changed[:3])
    assert all(torch.isfinite(p).all() for p in model.parameters())
