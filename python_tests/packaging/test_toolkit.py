"""When CUDA kernels are built, and for which GPUs: those that are there, or those asked for."""

import os
from pathlib import Path

import pytest
from jachess_build import cuda, extensions


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "JACHESS_FORCE_CPU",
        "JACHESS_FORCE_CUDA",
        "CUDA_HOME",
        "CUDA_PATH",
        "TORCH_CUDA_ARCH_LIST",
    ):
        monkeypatch.delenv(name, raising=False)


def fake_toolkit(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Make find_toolkit answer with a toolkit of this version, or with none."""
    found = None
    if version is not None:
        major, minor = map(int, version.split("."))
        found = cuda.Toolkit("nvcc", Path("/toolkit"), (major, minor))
    monkeypatch.setattr(cuda, "find_toolkit", lambda: found)
    monkeypatch.setattr(cuda, "known", lambda toolkit: [])


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
    chosen, archs, sentence = cuda.choose(torch_cuda, [(9, 0)])
    assert (chosen is not None) == built == bool(archs)
    assert words in sentence


@pytest.mark.parametrize(
    ("toolkit", "switches", "words"),
    [
        ("12.8", ("CUDA",), "toolkit is CUDA 12.8"),
        (None, ("CUDA",), "no nvcc"),
        ("13.0", ("CUDA", "CPU"), "both set"),
    ],
)
def test_insisting_on_cuda_fails_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, toolkit: str | None, switches: tuple[str, ...], words: str
) -> None:
    fake_toolkit(monkeypatch, toolkit)
    for switch in switches:
        monkeypatch.setenv(f"JACHESS_FORCE_{switch}", "1")
    with pytest.raises(SystemExit, match=words):
        cuda.choose("13.0", [(9, 0)])


def install_nvcc(path: Path, home: Path) -> None:
    """A script in the place of an nvcc that says where its real home is."""
    path.parent.mkdir(parents=True)
    path.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo "release 13.0, V13.0.88"; else\n'
        f'echo "#$ TOP={home}/bin/.."; fi\n'
    )
    path.chmod(0o755)


def test_a_wrapper_nvcc_tells_its_real_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = tmp_path / "real"
    (real / "bin").mkdir(parents=True)
    wrapper = tmp_path / "elsewhere" / "nvcc"
    install_nvcc(wrapper, real)
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
    install_nvcc(nvcc, nvcc.parents[1])
    which = cuda.shutil.which
    monkeypatch.setattr(
        cuda.shutil, "which", lambda name: which(name) if str(tmp_path) in name else None
    )
    assert cuda.find_toolkit() is None or str(tmp_path) not in cuda.find_toolkit().nvcc
    monkeypatch.setattr(cuda.site, "getsitepackages", lambda: [str(tmp_path)])
    toolkit = cuda.find_toolkit()
    assert toolkit is not None and toolkit.nvcc == str(nvcc)
    assert toolkit.home == nvcc.parents[1]


def nvcc_script(folder: Path, version: str, codes: str) -> cuda.Toolkit:
    """A toolkit whose nvcc is a script that knows these codes and no others."""
    script = folder / "nvcc"
    script.write_text(f'#!/bin/sh\n[ "$1" = --list-gpu-code ] && printf "%s\\n" {codes}\n')
    script.chmod(0o755)
    major, minor = map(int, version.split("."))
    return cuda.Toolkit(str(script), folder, (major, minor))


OLD = ("12.6", "sm_50 sm_75 sm_80 sm_86 sm_89 sm_90 sm_90a")
NEW = ("13.0", "sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_110 sm_103 sm_120 sm_121")


@pytest.mark.parametrize(
    ("toolkit", "gpus", "switches", "expected"),
    [
        (NEW, [], {}, "no GPU is visible"),
        (NEW, [(7, 5)], {}, "compute capability is 7.5"),
        (NEW, [(9, 0), (9, 0), (8, 6)], {}, ["8.6", "9.0a"]),
        (NEW, [(7, 5), (8, 9)], {}, ["8.9"]),
        (NEW, [(12, 9)], {}, ["12.1+PTX"]),
        (OLD, [(12, 0)], {}, ["9.0+PTX"]),
        (OLD, [(10, 0), (9, 0)], {}, ["9.0a", "9.0+PTX"]),
        (NEW, [], {"JACHESS_FORCE_CUDA": "1"}, ["8.0+PTX", "9.0a", "10.0", "12.0+PTX"]),
        (OLD, [], {"JACHESS_FORCE_CUDA": "1"}, ["8.0+PTX", "9.0a"]),
        (NEW, [(9, 0)], {"TORCH_CUDA_ARCH_LIST": "8.6;9.0a+PTX"}, ["8.6", "9.0a+PTX"]),
        (NEW, [], {"TORCH_CUDA_ARCH_LIST": "7.5 8.0"}, ["8.0"]),
        (NEW, [], {"TORCH_CUDA_ARCH_LIST": "7.5"}, "TORCH_CUDA_ARCH_LIST names"),
    ],
)
def test_what_is_built_for(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    toolkit: tuple[str, str],
    gpus: list[tuple[int, int]],
    switches: dict[str, str],
    expected: list[str] | str,
) -> None:
    """The GPUs that are there, or the list, or, where somebody insists, all that nvcc knows."""
    made = nvcc_script(tmp_path, *toolkit)
    monkeypatch.setattr(cuda, "find_toolkit", lambda: made)
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    chosen, archs, sentence = cuda.choose(f"{toolkit[0].split('.')[0]}.0", gpus)
    if isinstance(expected, str):
        assert chosen is None and archs == [] and sentence.startswith("CPU kernels only: ")
        assert expected in sentence
    else:
        assert chosen is made and archs == expected and " ".join(archs) in sentence


@pytest.mark.parametrize(("listed", "words"), [("Hopper", "Hopper"), ("8.0 10.0", "holds 10.0")])
def test_a_list_that_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listed: str, words: str
) -> None:
    made = nvcc_script(tmp_path, *OLD)
    monkeypatch.setattr(cuda, "find_toolkit", lambda: made)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    with pytest.raises(SystemExit, match=words):
        cuda.choose("12.6", [])


def test_flags() -> None:
    assert cuda._arch_flags(["8.6", "9.0a+PTX"]) == [
        "-gencode=arch=compute_86,code=sm_86",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]


def test_a_build_says_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = nvcc_script(tmp_path, *NEW)
    Path(made.nvcc).write_text("#!/bin/sh\nexit 0\n")
    cuda.compile_kernels(made, [Path("a.cu"), Path("b.cu")], tmp_path / "objects", ["9.0a"])
    lines = sorted(capsys.readouterr().err.splitlines())
    assert [line.rpartition(":")[0] for line in lines] == [
        f"jachess_ext: compiling {number} of 2 CUDA files for 9.0a" for number in (1, 2)
    ]


def test_ninja_is_short_progress(capfd: pytest.CaptureFixture[str]) -> None:
    """Its lines hold whole commands; what a compiler says besides is passed on."""
    with extensions._short_progress():
        status = os.environ["NINJA_STATUS"].replace("%s", "3").replace("%t", "12")
        os.write(1, f"{status.replace('%f', '2')}c++ -O3 -c /a/csrc/cpu/b_jet.cpp -o x\n".encode())
        os.write(1, b"b_jet.cpp:3: warning: unused\n")
    out, err = capfd.readouterr()
    assert err == "jachess_ext: compiling 3 of 12, 2 done: b_jet.cpp\n"
    assert out == "b_jet.cpp:3: warning: unused\n"
    assert "NINJA_STATUS" not in os.environ
