"""The table of registers and spills: it reads ptxas rightly, and it can fail."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from jachess_build import ptxas_table
from jachess_build.cuda import find_toolkit
from jachess_build.ptxas_table import Kernel

NAME = "_ZN7jachess23_GLOBAL__N__aa_4_x_cu_b6kernelINS_8BFloat16ELi2ELi1EEEvPT_"
OUTPUT = f"""ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{NAME}' for 'sm_90a'
ptxas info    : Function properties for helper
    64 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for {NAME}
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers, 1280 bytes smem, 424 bytes cmem[0]
ptxas info    : Compiling entry function '{NAME}' for 'sm_80'
ptxas info    : Function properties for {NAME}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 424 bytes cmem[0]
"""
needs_names = pytest.mark.skipif(shutil.which("c++filt") is None, reason="needs c++filt")
COLD = Kernel("a.cu", "kernel<Half, 2, 1>", "sm_80", 32, 0, 0, 0, 0)
HOT = replace(COLD, kernel="kernel<BFloat16, 2, 1>")


@needs_names
def test_what_ptxas_prints_is_read() -> None:
    kernels = ptxas_table.parse("x.cu", OUTPUT)
    assert kernels == [
        Kernel("x.cu", "kernel<BFloat16, 2, 1>", "sm_90a", 48, 16, 8, 12, 1280),
        Kernel("x.cu", "kernel<BFloat16, 2, 1>", "sm_80", 32, 0, 0, 0, 0),
    ]
    assert ptxas_table.parse("x.cu", "ptxas info    : 0 bytes gmem\n") == []
    with pytest.raises(ValueError, match="says nothing of the registers"):
        ptxas_table.parse("x.cu", OUTPUT.replace("registers", "Register"))


def test_a_table_is_read_back() -> None:
    text = ptxas_table.as_csv([COLD, HOT], "nvcc V1.2.3")
    assert ptxas_table.from_csv(text) == ([COLD, HOT], "nvcc V1.2.3")


def test_which_kernels_are_hot() -> None:
    hot = ["f<float, 2, 1>", "f<BFloat16, float, 2, 1, 4>", "f<float, 2, 1, (Kind)3>"]
    cold = ["f<double, 2, 1>", "f<float, 2, 0, 1>", "f<float, 12, 1>", "f<float, 4, 6, 1>", "f"]
    assert all(ptxas_table.is_hot(replace(COLD, kernel=name)) for name in hot)
    assert not any(ptxas_table.is_hot(replace(COLD, kernel=name)) for name in cold)


def test_new_spills_and_other_kernels_fail_and_growth_is_told() -> None:
    assert ptxas_table.differences([COLD, HOT], [COLD, HOT]) == ([], [])
    spilling = replace(COLD, spill_stores=4, spill_loads=4)
    faults, told = ptxas_table.differences([spilling], [COLD])
    assert len(faults) == 1 and "newly spills" in faults[0] and not told
    assert ptxas_table.differences([spilling], [spilling]) == ([], [])
    assert ptxas_table.differences([COLD], [spilling]) == ([], [])  # better is no fault
    faults, told = ptxas_table.differences([replace(COLD, registers=64)], [COLD])
    assert not faults and "registers 32 -> 64" in told[0]
    for now, table in (([COLD, HOT], [COLD]), ([COLD], [COLD, HOT])):
        (fault,) = ptxas_table.differences(now, table)[0]
        assert "`make ptxas`" in fault and HOT.kernel in fault


def test_hot_kernels_may_never_spill() -> None:
    assert ptxas_table.hot_faults([COLD, HOT]) == []
    (fault,) = ptxas_table.hot_faults([COLD, replace(HOT, spill_loads=4)])
    assert "is hot and spills" in fault
    (fault,) = ptxas_table.hot_faults([COLD])
    assert "a.cu has kernels, but none" in fault


def _has_kernels(source: Path) -> bool:
    """Of its own, or in a header beside it (the norms share theirs)."""
    text = source.read_text()
    headers = [source.parent / name for name in re.findall(r'#include "([^"/]+)"', text)]
    texts = [text, *(header.read_text() for header in headers if header.is_file())]
    return any("__global__ void" in text for text in texts)


def test_the_kept_table_holds_every_file_and_no_hot_spill() -> None:
    kernels, compiler = ptxas_table.from_csv(ptxas_table.TABLE.read_text())
    assert compiler.startswith("nvcc V") and kernels == sorted(kernels)
    folder = ptxas_table.TABLE.parent
    sources = {path.name for path in folder.glob("*.cu") if _has_kernels(path)}
    assert {kernel.file for kernel in kernels} == sources
    assert ptxas_table.hot_faults(kernels) == []
    assert {kernel.arch for kernel in kernels} == {"sm_80", "sm_90a", "sm_100"}


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


@needs_names
def test_a_planted_spill_is_found(tmp_path: Path) -> None:
    """The same kernel with 16 values a thread, and with more than its 64 registers hold."""
    toolkit = find_toolkit()
    if toolkit is None:
        pytest.skip("no nvcc was found")
    source, found = tmp_path / "planted.cu", []
    for width in (16, 150):
        source.write_text(PLANTED.replace("WIDTH", str(width)))
        found.append(ptxas_table.measure(toolkit, [source], ("9.0a",), tmp_path))
    (kept,), (now,) = found
    assert kept.kernel == now.kernel == "kernel<float, 2, 1>"
    assert not kept.spills and now.spills
    assert ptxas_table.hot_faults([kept]) == []
    assert len(ptxas_table.hot_faults([now])) == 1
    assert "newly spills" in ptxas_table.differences([now], [kept])[0][0]
