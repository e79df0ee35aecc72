"""A check that no CUDA kernel spills registers to memory (`make check`; needs nvcc, no GPU).

    PYTHONPATH=build_backend python -m jachess_build.spills [ARCHITECTURE ...]

It compiles every .cu of csrc for each architecture named, by default for `ARCHS`.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .cuda import Toolkit, compile_command, find_toolkit, kernel_files, run

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "spills"
ARCHS = ("8.0", "9.0a", "10.0", "12.0")
_SPILL = re.compile(r"spilled to local memory in function '(\w+)', (.*)")


def compile_one(toolkit: Toolkit, source: Path, arch: str, cache: Path) -> str:
    """Return the output of ptxas for one source and architecture, cached until an input changes.

    Raises:
        SystemExit: nvcc refused the file; its output is shown.
    """
    target = cache / f"{source.stem}.{arch}.cubin"
    command = compile_command(toolkit, source, target, [arch], to="-cubin")
    command += ["-Xptxas", "-warn-spills"]
    digest = hashlib.sha256(repr((command, toolkit.release)).encode())
    headers = (ROOT.glob(f"csrc/{folder}*.h") for folder in ("", "attention/", "cuda/"))
    for path in [source, *sorted(path for paths in headers for path in paths)]:
        digest.update(path.read_bytes())
    kept = cache / f"{source.stem}.{arch}.{digest.hexdigest()[:16]}.txt"
    if kept.exists():
        return kept.read_text()
    done = run(command)
    if done.returncode != 0:
        raise SystemExit(f"spills: nvcc could not compile {source}:\n{done.stdout}")
    for stale in cache.glob(f"{source.stem}.{arch}.*.txt"):
        stale.unlink()
    target.unlink()
    kept.write_text(done.stdout)
    return done.stdout


def spills(
    toolkit: Toolkit, sources: list[Path], archs: tuple[str, ...] = ARCHS, cache: Path = CACHE
) -> list[str]:
    """Return a line for each kernel that spills, sorted: file, architecture, kernel, bytes."""
    cache.mkdir(parents=True, exist_ok=True)
    jobs = [(source, arch) for source in sources for arch in archs]
    with ThreadPoolExecutor(max_workers=2) as pool:
        texts = list(pool.map(lambda job: compile_one(toolkit, job[0], job[1], cache), jobs))
    found = [
        f"{source.name}, {arch}: {name}: {size}"
        for (source, arch), text in zip(jobs, texts, strict=True)
        for name, size in _SPILL.findall(text)
    ]
    if not found:
        return []
    readable = subprocess.run(
        ["c++filt"], input="\n".join(found), capture_output=True, text=True, check=True
    )
    return sorted(readable.stdout.splitlines())


def main(archs: tuple[str, ...] = ARCHS) -> int:
    """Compile for these architectures, print the spills and return the exit status."""
    toolkit = find_toolkit()
    if toolkit is None:
        print("spills: no nvcc was found, so the CUDA kernels were not compiled.")
        return 0
    sources = kernel_files(ROOT / "csrc")
    found = spills(toolkit, sources, archs)
    # `__cuda_…` are the compiler's own helpers, which no kernel here can shrink.
    faults = [line for line in found if ": __cuda_" not in line]
    for line in faults:
        print(f"spills: {line}; take fewer elements a thread, or split the kernel", file=sys.stderr)
    print(f"spills: {len(sources)} files on {', '.join(archs)}: {len(faults)} faults.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or ARCHS))
