"""The texts that planted faults replace are in the sources: else a fault shows nothing."""

from __future__ import annotations

from pathlib import Path

from python_tests.faults.__main__ import all_faults
from python_tests.ops import test_sanitizers

ROOT = Path(__file__).resolve().parents[1]


def test_every_fault_can_be_put_back() -> None:
    for fault in all_faults():
        texts: dict[str, str] = {}
        for edit in fault.edits:
            text = texts.get(edit.file) or (ROOT / edit.file).read_text(encoding="utf-8")
            assert text.count(edit.mended) == 1, f"{fault.name}: {edit.mended!r} in {edit.file}"
            texts[edit.file] = text.replace(edit.mended, edit.faulty)


def test_faults_for_the_sanitizers_can_be_planted() -> None:
    source = ROOT / "csrc" / "cpu" / "softmax_jet.cpp"
    assert test_sanitizers.ROWS in source.read_text(encoding="utf-8")
