"""The sanitizers' builds find a fault that was planted: a check that cannot fail is no check.

Faults are planted in a copy of csrc; that the operators as they are pass is what `make sanitize`
shows beside this.
"""

import shutil
import sys
from pathlib import Path

import pytest
from jachess_build import sanitized

from python_tests import processes

pytestmark = [
    pytest.mark.sanitizers,
    pytest.mark.skipif(not sanitized.available(), reason="needs g++ with its sanitizers"),
]

USE = """
import torch
torch.ops.load_library({library!r})
torch.ops.jachess.softmax_jet(torch.randn(4, 5, 7), 2, False)
print("ran to the end")
"""
ROWS = "for (int64_t at = begin * n; at < end * n; at += n) {"


@pytest.mark.parametrize(
    ("name", "fault", "finding"),
    [
        ("address", ROWS, None),
        (
            "address",
            "for (int64_t at = (begin + 1) * n; at < (end + 1) * n; at += n) {",
            "heap-buffer-overflow",
        ),
        ("thread", "for (int64_t at = 0; at < (end - begin) * n; at += n) {", "data race"),
    ],
    ids=["none", "out-of-bounds", "race"],
)
def test_a_planted_fault_is_found(
    tmp_path: Path, name: str, fault: str, finding: str | None
) -> None:
    """The softmax's rows, one too far, or all threads on the first ones."""
    csrc, sanitizer = tmp_path / "csrc", sanitized.SANITIZERS[name]
    shutil.copytree(sanitized.CSRC, csrc)
    source = csrc / "cpu" / "softmax_jet.cpp"
    assert ROWS in source.read_text()
    source.write_text(source.read_text().replace(ROWS, fault))
    library = sanitized.build_operators(sanitizer, tmp_path / "ops.so", csrc, [source], tmp_path)
    done = processes.run(
        [sys.executable, "-c", USE.format(library=str(library))],
        env=sanitizer.preloading(library),
    )
    if finding is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        assert finding in done.stderr
        assert "softmax_jet" in done.stderr  # where it lies
    assert ("ran to the end" in done.stdout) == (finding is None)
