"""Registers of Triton's kernels are those of the kernels as they are."""

from __future__ import annotations

import pytest
from jachess_build import triton_registers


def test_the_table_is_of_these_kernels() -> None:
    digest, *lines = triton_registers.RECORD.read_text().splitlines()
    assert digest == triton_registers.digest(), "run python -m jachess_build.triton_registers"
    assert len(lines) > 20 and all(" registers, " in line for line in lines)


def test_a_kernel_that_spills_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {"registers": 255, "stack": 0, "shared": 0, "columns": 0}
    too_much = ({"stack": 17}, {"columns": 640})
    for fault in too_much:
        monkeypatch.setattr(triton_registers, "table", lambda f=fault: [("kernel", used | f)])
        before = triton_registers.RECORD.read_text()
        assert triton_registers.main() == 1
        assert triton_registers.RECORD.read_text() == before
