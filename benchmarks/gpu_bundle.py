"""Makes the folder that travels to a rented GPU: sources and a prebuilt library.

    make gpu-bundle
    # there, in the folder: benchmarks/gpu_run.sh short, or tests and then figures

The library is built for one architecture and Python version, others than this machine's too: the
operators hold no Python, and the small module `_C` is compiled with that Python's headers. What
travels is the folder, and the checkout where the folder lies inside it: below 64 MiB in all, or
nothing is left. Where the checkout itself travels, only the library is missing there:
`--library jachess_ext` puts it into the checkout and makes no folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .common import ROOT, commit

PEERS = ROOT / "build" / "peers"  # wheels, see gpu_run.sh
LIMIT = 64 * 2**20
LEFT_OUT = ("benchmarks/results/", "docs/", "examples/", ".github/")


def tracked_files() -> list[str]:
    """Return the names of the files that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\0") if name]


def copy_sources(to: Path) -> None:
    """Copy the files that git tracks, without results and documentation, and write their commit."""
    for name in tracked_files():
        if not name.startswith(LEFT_OUT):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    (to / "COMMIT").write_text(commit() + "\n")


def suffix_and_headers(python: str) -> tuple[str, str]:
    """Return how another Python's extension modules end, and the folder of its headers.

    Raises:
        SystemExit: it cannot be run.
    """
    ask = "import sysconfig as s; print(s.get_config_var('EXT_SUFFIX'), s.get_path('include'))"
    try:
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"gpu_bundle: {python} cannot be run here ({error}); give --python one of the GPU "
            "machine's version"
        ) from None
    suffix, headers = done.stdout.split()
    return suffix, headers


def build_library(to: Path, arch: str, suffix: str, headers: str) -> None:
    """Build `_ops` and `_C` for an architecture and a Python into ``to``/jachess_ext.

    Raises:
        SystemExit: the build failed; its output is shown.
    """
    environment = {**os.environ, "JACHESS_FORCE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": arch}
    environment.pop("JACHESS_FORCE_CPU", None)
    with tempfile.TemporaryDirectory() as folder:
        call([sys.executable, "setup.py", "build_ext", "--build-lib", folder], to, environment)
        built = Path(folder) / "jachess_ext"
        own = sysconfig.get_config_var("EXT_SUFFIX")
        shutil.copy(built / f"_ops{own}", to / "jachess_ext" / f"_ops{suffix}")
        if suffix != own:
            compile_info(built, to, headers, to / "jachess_ext" / f"_C{suffix}")
        else:
            shutil.copy(built / f"_C{own}", to / "jachess_ext" / f"_C{suffix}")
    for library in (to / "jachess_ext").glob("*.so"):
        call(["strip", "--strip-unneeded", str(library)], to)
    shutil.rmtree(to / "build", ignore_errors=True)
    if PEERS.exists():
        shutil.copytree(PEERS, to / "build" / "peers")


def compile_info(built: Path, sources: Path, headers: str, target: Path) -> None:
    """Compile `_C` with another Python's headers, saying what the `_C` in ``built`` says."""
    import pybind11

    ask = "import _C; i = _C.build_info(); print(i['torch'], i['cuda'], i['cuda_archs'], sep='\\n')"
    torch, cuda, archs = subprocess.run(
        [sys.executable, "-c", ask], cwd=built, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    named = {"TORCH_VERSION": torch, "CUDA_VERSION": cuda, "CUDA_ARCHS": archs}
    command = ["c++", "-O2", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden"]
    command += [f'-DJACHESS_{name}="{value}"' for name, value in named.items()]
    command += [f"-I{headers}", f"-I{pybind11.get_include()}", "csrc/bindings.cpp"]
    call([*command, "-o", str(target)], sources)


def call(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    """Run a command; a SystemExit shows the output of one that fails."""
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(
            f"gpu_bundle: {command[0]} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )


def size_of(files: Iterable[Path]) -> int:
    """Return the bytes of those that are files."""
    return sum(path.stat().st_size for path in files if path.is_file())


def what_travels(bundle: Path) -> int:
    """Return the bytes of the bundle, and of the checkout's tracked files where it lies inside."""
    tracked = [ROOT / name for name in tracked_files()] if bundle.is_relative_to(ROOT) else []
    return size_of(bundle.rglob("*")) + size_of(tracked)


def main() -> None:
    """Make the bundle and print what travels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="python3.12", help="a Python of the GPU's version")
    parser.add_argument("--arch", default="9.0a")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-bundle")
    parser.add_argument("--library", type=Path, help="put the library alone into this folder")
    args = parser.parse_args()
    suffix, headers = suffix_and_headers(args.python)
    out = args.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    copy_sources(out)
    build_library(out, args.arch, suffix, headers)
    if args.library:
        for library in (out / "jachess_ext").glob("*.so"):
            print(shutil.copy(library, args.library), f"{library.stat().st_size / 2**20:.1f} MiB")
        shutil.rmtree(out)
        return
    size = what_travels(out)
    if size > LIMIT:
        shutil.rmtree(out)
        raise SystemExit(
            f"gpu_bundle: {size / 2**20:.1f} MiB travel; expected at most 64: leave files out."
        )
    print(f"{out}: {size_of(out.rglob('*')) / 2**20:.1f} MiB; {size / 2**20:.1f} MiB of 64 travel")


if __name__ == "__main__":
    main()
