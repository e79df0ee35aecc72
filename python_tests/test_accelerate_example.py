"""What a user copies from the Accelerate example must hold for other sizes than the example's."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader


def test_few_unlabelled_rows_do_not_cut_a_labelled_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 labelled batches beside 3 unlabelled ones: all 10, and every pass in its own order."""
    pytest.importorskip("accelerate")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    example = importlib.import_module("accelerate_loop")
    torch.manual_seed(0)
    free = DataLoader(range(12), 4, shuffle=True)  # type: ignore[arg-type]
    others = example.endless(free)
    seen = [other for _ in range(2) for _, other in zip(range(10), others, strict=False)]
    assert len(seen) == 20
    passes = [torch.cat(seen[i : i + 3]).tolist() for i in range(0, 18, 3)]
    assert all(sorted(one) == list(range(12)) for one in passes)
    assert len({tuple(one) for one in passes}) == 6
