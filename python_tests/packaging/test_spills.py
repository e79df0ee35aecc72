"""A kernel whose registers go to memory is found, and refused."""

import shutil
from pathlib import Path

import pytest
from jachess_build import spills
from jachess_build.cuda import find_toolkit

PLANTED = """
template <typename T, int q, int P>
__global__ void __launch_bounds__(1024) kernel(const T* x, T* y) {
  T values[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) values[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < WIDTH; ++i)
    y[i * 1024 + threadIdx.x] = values[i] * values[(7 * i + 3) % WIDTH];
}
template __global__ void kernel<float, 2, 1>(const float*, float*);
"""


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="needs c++filt")
@pytest.mark.skipif(find_toolkit() is None, reason="no nvcc was found")
def test_a_planted_spill_is_found(tmp_path: Path) -> None:
    """The same kernel with 16 values a thread, and with more than its 64 registers hold."""
    toolkit = find_toolkit()
    assert toolkit is not None
    source, found = tmp_path / "planted.cu", []
    for width in (16, 150):
        source.write_text(PLANTED.replace("WIDTH", str(width)))
        found.append(spills.spills(toolkit, [source], ("9.0a",), tmp_path))
    assert found[0] == []
    (line,) = found[1]
    assert line.startswith("planted.cu, 9.0a: void kernel<float, 2, 1>(")
    assert "bytes spill stores" in line


def test_a_fault_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["a.cu, 8.0: __cuda_sm20_div_u64: 8 bytes"]
    monkeypatch.setattr(spills, "find_toolkit", lambda: object())
    monkeypatch.setattr(spills, "spills", lambda *_: lines)
    assert spills.main() == 0
    lines.append("a.cu, 8.0: void kernel<float, 2, 1>(int): 8 bytes")
    assert spills.main() == 1
    assert "kernel<float, 2, 1>(int): 8 bytes; take fewer" in capsys.readouterr().err
