"""The texts that planted faults replace are in the sources: else a fault shows nothing."""

from __future__ import annotations

from python_tests.faults.__main__ import ROOT, all_faults, edited
from python_tests.ops import test_sanitizers


def test_every_fault_can_be_put_back() -> None:
    for fault in all_faults():
        assert edited(fault, ROOT)


def test_faults_for_the_sanitizers_can_be_planted() -> None:
    source = ROOT / "csrc" / "cpu" / "softmax_jet.cpp"
    assert test_sanitizers.ROWS in source.read_text(encoding="utf-8")
