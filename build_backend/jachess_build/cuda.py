"""The CUDA toolkit, and the compilation of the torch-free .cu files with it.

nvcc is called here rather than through torch.utils.cpp_extension: a CPU build of torch knows no
CUDA, yet the same binary serves it and a CUDA torch (stable ABI, static CUDA runtime).
"""

import itertools
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# Ampere, Hopper with its own instructions, both Blackwells; the first also as PTX for what lies in
# between (11.0, Thor), the last for what follows.
DEFAULT_ARCHS = ("8.0+PTX", "9.0a", "10.0", "12.0+PTX")
OLDEST = (8, 0)


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: its nvcc, root folder, version (13, 0) and release, "nvcc V13.0.88"."""

    nvcc: str
    home: Path
    version: tuple[int, int]
    release: str = ""

    @property
    def version_text(self) -> str:
        """The version as text, such as '13.0'."""
        return f"{self.version[0]}.{self.version[1]}"


def find_toolkit() -> Toolkit | None:
    """Find the toolkit of $CUDA_HOME, of the nvcc on the path, of /usr/local/cuda, or of the wheels
    nvidia-cuda-nvcc and its like in this Python's site-packages.

    nvcc may be a wrapper script elsewhere than in its toolkit, so the root is read from
    `nvcc --dryrun`, not from nvcc's path.
    """
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    names = [f"{home}/bin/nvcc" for home in homes if home] + ["nvcc", "/usr/local/cuda/bin/nvcc"]
    names += _nvcc_of_wheels()
    nvcc = next((found for name in names if (found := shutil.which(name))), None)
    if nvcc is None:
        return None
    version = run([nvcc, "--version"]).stdout
    dry_run = run([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull]).stdout
    release = re.search(r"release (\d+)\.(\d+)", version)
    top = re.search(r"^#\$ TOP=(.+)$", dry_run, re.MULTILINE)
    if release is None or top is None:
        return None
    full = re.search(r"V\d+\.\d+\.\d+", version)
    name = f"nvcc {full[0]}" if full else f"nvcc {release[1]}.{release[2]}"
    return Toolkit(nvcc, Path(top[1].strip()).resolve(), (int(release[1]), int(release[2])), name)


def _nvcc_of_wheels() -> list[str]:
    """List nvidia/cu13/bin/nvcc and, until CUDA 12, nvidia/cuda_nvcc/bin/nvcc."""
    roots = [Path(path) / "nvidia" for path in dict.fromkeys([*site.getsitepackages(), *sys.path])]
    found = [path for root in roots for path in sorted(root.glob("cu*/bin/nvcc"), reverse=True)]
    return [str(path) for path in found]


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command and capture its status and output."""
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def choose(
    torch_cuda: str | None, gpus: Sequence[tuple[int, int]]
) -> tuple[Toolkit | None, list[str], str]:
    """Choose the CUDA kernels to build: the toolkit or None, the architectures, and why.

    They are built for $TORCH_CUDA_ARCH_LIST, else for the GPUs that are there, else, where
    JACHESS_FORCE_CUDA=1 asks for them, for `DEFAULT_ARCHS`.

    Args:
        torch_cuda: torch.version.cuda, None for a CPU build of torch.
        gpus: compute capabilities of the visible GPUs, such as (9, 0).

    Raises:
        SystemExit: JACHESS_FORCE_CUDA=1 cannot be satisfied, or contradicts
            JACHESS_FORCE_CPU=1; $TORCH_CUDA_ARCH_LIST names what the toolkit does not know.
    """
    force_cpu = os.environ.get("JACHESS_FORCE_CPU", "0") not in ("", "0")
    force_cuda = os.environ.get("JACHESS_FORCE_CUDA", "0") not in ("", "0")
    if force_cpu and force_cuda:
        raise SystemExit(
            "jachess_ext: JACHESS_FORCE_CPU and JACHESS_FORCE_CUDA are both set: unset one."
        )
    if force_cpu:
        return None, [], "CPU kernels only: JACHESS_FORCE_CPU is set."
    if torch_cuda is None and not force_cuda:
        return None, [], "CPU kernels only: torch is a CPU build."
    listed = _listed()
    if not (listed or gpus or force_cuda):
        return (
            *(None, []),
            "CPU kernels only: no GPU is visible here (JACHESS_FORCE_CUDA=1 builds CUDA kernels "
            "all the same, TORCH_CUDA_ARCH_LIST=9.0a those of one architecture).",
        )
    new = sorted({gpu for gpu in gpus if gpu >= OLDEST})
    if not (listed or new or force_cuda):
        shown = ", ".join(f"{major}.{minor}" for major, minor in sorted(set(gpus)))
        return (
            *(None, []),
            f"CPU kernels only: the GPU's compute capability is {shown}, and the CUDA kernels need "
            "8.0 or newer.",
        )
    toolkit = find_toolkit()
    if toolkit is None:
        reason = (
            "no nvcc was found: install a CUDA toolkit of torch's major version or set CUDA_HOME"
        )
    elif torch_cuda is not None and toolkit.version[0] != int(torch_cuda.split(".")[0]):
        reason = (
            f"the toolkit is CUDA {toolkit.version_text} but torch was built for CUDA "
            f"{torch_cuda}: point CUDA_HOME to a toolkit of the same major version"
        )
    else:
        archs = _buildable(listed, toolkit) if listed else architectures(new, known(toolkit))
        if archs:
            what = f"CPU kernels, and CUDA kernels for {' '.join(archs)}"
            if left := [arch for arch in listed if arch not in archs]:
                what += f" (not for {' '.join(left)}: the kernels need 8.0 or newer)"
            return toolkit, archs, f"{what} (toolkit {toolkit.version_text})."
        reason = "the CUDA kernels need an architecture from 8.0 on, and none is left that " + (
            "TORCH_CUDA_ARCH_LIST names" if listed else f"toolkit {toolkit.version_text} knows"
        )
    if force_cuda:
        raise SystemExit(f"jachess_ext: JACHESS_FORCE_CUDA is set, but {reason}.")
    return None, [], f"CPU kernels only: {reason}."


def known(toolkit: Toolkit) -> list[tuple[int, int]]:
    """Return the capabilities that the toolkit compiles for, in order."""
    listed = run([toolkit.nvcc, "--list-gpu-code"]).stdout.split()
    numbers = [found for word in listed if (found := re.fullmatch(r"sm_(\d+)(\d)[af]?", word))]
    return sorted({(int(number[1]), int(number[2])) for number in numbers})


def architectures(
    gpus: Sequence[tuple[int, int]], supported: Sequence[tuple[int, int]]
) -> list[str]:
    """Return the architectures for these GPUs (none: `DEFAULT_ARCHS`), such as '9.0a'.

    A GPU that the toolkit does not know yet gets the PTX of the newest before it.

    Args:
        gpus: compute capabilities from `OLDEST` on.
        supported: of `known`; empty: everything.
    """
    if not gpus:
        found = [arch for arch in DEFAULT_ARCHS if not supported or _number(arch) in supported]
        plain = [arch for arch in found if not arch.endswith("a")]
        if plain and not plain[-1].endswith("+PTX"):  # for GPUs after the toolkit
            found[found.index(plain[-1])] += "+PTX"
        return found
    found = []
    for gpu in gpus:
        if not supported or gpu in supported:
            found.append("9.0a" if gpu == (9, 0) else f"{gpu[0]}.{gpu[1]}")
        elif before := [older for older in supported if OLDEST <= older < gpu]:
            found.append(f"{before[-1][0]}.{before[-1][1]}+PTX")
    whole = {arch.removesuffix("+PTX") for arch in found if arch.endswith("+PTX")}
    return [arch for arch in dict.fromkeys(found) if arch not in whole]


def _number(arch: str) -> tuple[int, int]:
    major, minor = arch.removesuffix("+PTX").rstrip("af").split(".")
    return int(major), int(minor)


def _buildable(listed: list[str], toolkit: Toolkit) -> list[str]:
    """Return those of $TORCH_CUDA_ARCH_LIST that the kernels can run on: from `OLDEST` on.

    Raises:
        SystemExit: the toolkit does not know one of them.
    """
    supported = known(toolkit)
    archs = [arch for arch in listed if _number(arch) >= OLDEST]
    unknown = [arch for arch in archs if supported and _number(arch) not in supported]
    if unknown:
        names = " ".join(f"{major}.{minor}" for major, minor in supported)
        raise SystemExit(
            f"jachess_ext: TORCH_CUDA_ARCH_LIST holds {unknown[0]}, which the CUDA "
            f"{toolkit.version_text} toolkit does not know: expected some of {names}, or take a "
            "newer toolkit (CUDA_HOME)."
        )
    return archs


def _listed() -> list[str]:
    """Return the architectures of $TORCH_CUDA_ARCH_LIST."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    for arch in listed:
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch):
            raise SystemExit(
                f"jachess_ext: TORCH_CUDA_ARCH_LIST holds {arch!r}; expected numbers such as "
                "'8.0 9.0a 12.0+PTX'."
            )
    return listed


def _arch_flags(archs: list[str]) -> list[str]:
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def kernel_files(csrc: Path) -> list[Path]:
    """Return the .cu files."""
    return sorted([*csrc.glob("attention/*.cu"), *csrc.glob("cuda/*.cu")])


def compile_command(
    toolkit: Toolkit, source: Path, target: Path, archs: list[str], to: str = "-c"
) -> list[str]:
    """Return the nvcc call for one .cu, to "-c", an object file, or "-cubin" (one architecture)."""
    command = [toolkit.nvcc, to, str(source), "-o", str(target), "-O3", "-std=c++17"]
    command += ["-Xcompiler", "-fPIC", "-Xptxas", "-v", "--expt-relaxed-constexpr"]
    return command + _arch_flags(archs)


def compile_kernels(
    toolkit: Toolkit, sources: list[Path], build_dir: Path, archs: list[str]
) -> list[str]:
    """Compile each .cu to an object file, one per core, and return the objects' paths.

    The report of ptxas on registers and spills goes beside each object, as `.ptxas.txt`.

    Raises:
        SystemExit: nvcc refused a file; its output is shown.
    """
    build_dir.mkdir(parents=True, exist_ok=True)

    started = itertools.count(1)

    def compile_one(source: Path) -> str:
        print(
            f"jachess_ext: compiling {next(started)} of {len(sources)} CUDA files for "
            f"{' '.join(archs)}: {source.name}",
            file=sys.stderr,
            flush=True,
        )
        target = build_dir / f"{source.stem}.cu.o"
        done = run(compile_command(toolkit, source, target, archs))
        if done.returncode != 0:
            raise SystemExit(f"jachess_ext: nvcc could not compile {source}:\n{done.stdout}")
        target.with_suffix(".ptxas.txt").write_text(done.stdout)
        return str(target)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


def library_dir(toolkit: Toolkit) -> Path:
    """Return the folder of the toolkit's libcudart_static.a.

    Raises:
        SystemExit: the toolkit has none.
    """
    for name in ("lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib"):
        if (toolkit.home / name / "libcudart_static.a").is_file():
            return toolkit.home / name
    raise SystemExit(
        f"jachess_ext: no libcudart_static.a under {toolkit.home}; install the toolkit's cudart "
        "development files, or set JACHESS_FORCE_CPU=1."
    )
