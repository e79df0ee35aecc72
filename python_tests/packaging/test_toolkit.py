"""When CUDA kernels are built: the toolkit and the switches decide, never a visible GPU."""

from pathlib import Path

import pytest
from jachess_build import cuda

DRY_RUN = """#$ _SPACE_=
#$ TOP={top}
"""


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JACHESS_FORCE_CPU", "JACHESS_FORCE_CUDA", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


def fake_toolkit(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Make find_toolkit answer with a toolkit of this version, or with none."""
    found = None
    if version is not None:
        major, minor = map(int, version.split("."))
        found = cuda.Toolkit("nvcc", Path("/toolkit"), (major, minor))
    monkeypatch.setattr(cuda, "find_toolkit", lambda: found)


@pytest.mark.parametrize(
    ("torch_cuda", "toolkit", "switch", "built", "words"),
    [
        ("13.0", "13.1", None, True, "toolkit 13.1"),
        ("13.0", "12.8", None, False, "toolkit is CUDA 12.8 but torch was built for CUDA 13.0"),
        ("13.0", None, None, False, "no nvcc was found"),
        (None, "13.0", None, False, "torch is a CPU build"),
        (None, "13.0", "CUDA", True, "toolkit 13.0"),
        ("13.0", "13.0", "CPU", False, "JACHESS_FORCE_CPU is set"),
    ],
)
def test_decision(
    monkeypatch: pytest.MonkeyPatch,
    torch_cuda: str | None,
    toolkit: str | None,
    switch: str | None,
    built: bool,
    words: str,
) -> None:
    fake_toolkit(monkeypatch, toolkit)
    if switch:
        monkeypatch.setenv(f"JACHESS_FORCE_{switch}", "1")
    chosen, sentence = cuda.choose_toolkit(torch_cuda)
    assert (chosen is not None) == built
    assert words in sentence


@pytest.mark.parametrize(
    ("torch_cuda", "toolkit", "words"),
    [("13.0", "12.8", "toolkit is CUDA 12.8"), ("13.0", None, "no nvcc"), (None, None, "no nvcc")],
)
def test_insisting_on_cuda_fails_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, torch_cuda: str | None, toolkit: str | None, words: str
) -> None:
    fake_toolkit(monkeypatch, toolkit)
    monkeypatch.setenv("JACHESS_FORCE_CUDA", "1")
    with pytest.raises(SystemExit, match=words):
        cuda.choose_toolkit(torch_cuda)


def test_contradicting_switches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACHESS_FORCE_CUDA", "1")
    monkeypatch.setenv("JACHESS_FORCE_CPU", "1")
    with pytest.raises(SystemExit, match="both set"):
        cuda.choose_toolkit(None)


def test_a_wrapper_nvcc_tells_its_real_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = tmp_path / "real"
    (real / "bin").mkdir(parents=True)
    wrapper = tmp_path / "elsewhere" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo "release 13.0, V13.0.88"; else\n'
        f'echo "#$ TOP={real}/bin/.."; fi\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:/usr/bin:/bin")
    toolkit = cuda.find_toolkit()
    assert toolkit is not None
    assert toolkit.home == real
    assert toolkit.version == (13, 0)
    with pytest.raises(SystemExit, match="libcudart_static"):
        cuda.library_dir(toolkit)


def test_the_nvcc_of_the_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where there is none on the path: pip install nvidia-cuda-nvcc, as a bare machine has it."""
    nvcc = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo "release 13.0, V13.0.88"; else\n'
        f'echo "#$ TOP={nvcc.parent}/.."; fi\n'
    )
    nvcc.chmod(0o755)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    which = cuda.shutil.which
    monkeypatch.setattr(
        cuda.shutil, "which", lambda name: which(name) if str(tmp_path) in name else None
    )
    assert cuda.find_toolkit() is None or str(tmp_path) not in cuda.find_toolkit().nvcc
    monkeypatch.setattr(cuda.site, "getsitepackages", lambda: [str(tmp_path)])
    toolkit = cuda.find_toolkit()
    assert toolkit is not None and toolkit.nvcc == str(nvcc)
    assert toolkit.home == nvcc.parents[1]


def test_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert cuda.architectures() == list(cuda.DEFAULT_ARCHS)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6;9.0a+PTX")
    assert cuda.architectures() == ["8.6", "9.0a+PTX"]
    assert cuda._arch_flags(cuda.architectures()) == [
        "-gencode=arch=compute_86,code=sm_86",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(SystemExit, match="Hopper"):
        cuda.architectures()
