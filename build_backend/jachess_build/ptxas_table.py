"""What ptxas says of every CUDA kernel, against the table kept in csrc/cuda/ptxas.csv.

    PYTHONPATH=build_backend python -m jachess_build.ptxas_table --check     # part of `make check`
    PYTHONPATH=build_backend python -m jachess_build.ptxas_table --update    # `make ptxas`

Every csrc/cuda/*.cu is compiled for each architecture of `ARCHS`; no GPU is needed. The check
fails where a kernel spills that does not spill in the table, where a hot kernel (`is_hot`) spills
at all, and where kernels and table differ in names. Register counts that grew are told, no more:
they depend on the compiler. Shared memory is the static part; what a launch adds is not in it.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .cuda import Toolkit, compile_command, find_toolkit

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "csrc" / "cuda" / "ptxas.csv"
CACHE = ROOT / "build" / "ptxas"
ARCHS = ("8.0", "9.0a", "10.0")
# The instances a step with q = 2 and second order runs, in the dtypes models train in.
HOT = re.compile(r"<(float|BFloat16), (.+, )?2, 1[,>]")
# Files whose kernels say it in another way.
HOT_OF: dict[str, re.Pattern[str]] = {
    # the number of streams is no template argument of these
    "jet_norms.cu": re.compile(r"<(float|BFloat16), "),
    "ntk_gram.cu": re.compile(r"<(float|BFloat16)>"),
    "sample_directions.cu": re.compile(r"<(float|BFloat16), "),
}
MEND = "run `make ptxas` and commit csrc/cuda/ptxas.csv with the kernels"


@dataclass(frozen=True, order=True)
class Kernel:
    """One kernel on one architecture: registers per thread, the rest in bytes.

    `stack` is local memory of any kind (spills, and arrays indexed at run time); `spill_stores` and
    `spill_loads` are counted once per instruction in the code, as ptxas does.
    """

    file: str
    kernel: str
    arch: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    @property
    def key(self) -> tuple[str, str, str]:
        """What names the row."""
        return self.file, self.kernel, self.arch

    @property
    def spills(self) -> bool:
        """Whether registers went to memory."""
        return self.spill_stores + self.spill_loads > 0

    def __str__(self) -> str:
        return f"{self.file}: {self.kernel} on {self.arch}"


def is_hot(kernel: Kernel) -> bool:
    """Whether the kernel takes part in a training step with q = 2, order 2, fp32 or bf16."""
    return HOT_OF.get(kernel.file, HOT).search(kernel.kernel) is not None


def readable_names(mangled: list[str]) -> dict[str, str]:
    """Each kernel's C++ name without namespaces, return type and parameters.

    nvcc puts a hash of the path into names of the unnamed namespace: c++filt leaves it out.
    """
    done = subprocess.run(
        ["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True
    )
    return dict(zip(mangled, map(_shorten, done.stdout.splitlines()), strict=True))


def _shorten(name: str) -> str:
    name = re.sub(r"\b(jachess|detail)::|\(anonymous namespace\)::", "", name)
    depth, end = 0, len(name)
    for at, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            end = at
            break
    return name[:end].removeprefix("void ")


_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def parse(file: str, output: str) -> list[Kernel]:
    """The kernels in what `-Xptxas -v` printed for one file.

    Raises:
        ValueError: an entry has no frame or register line, so ptxas' words have changed.
    """
    sections = _ENTRY.split(output)[1:]
    entries = list(zip(sections[0::3], sections[1::3], sections[2::3], strict=True))
    names = readable_names([mangled for mangled, _, _ in entries]) if entries else {}
    kernels = []
    for mangled, arch, text in entries:
        # Functions that are not inlined have a frame line of their own: the entry's comes with its
        # own name.
        own = text[text.find(f"Function properties for {mangled}") :]
        frame, used = _FRAME.search(own), _USED.search(text)
        if frame is None or used is None:
            raise ValueError(f"ptxas says nothing of the registers or the stack of {mangled}")
        stack, stores, loads = map(int, frame.groups())
        shared = int(used[2] or 0)
        kernels.append(
            Kernel(file, names[mangled], arch, int(used[1]), stack, stores, loads, shared)
        )
    return kernels


def compile_one(toolkit: Toolkit, source: Path, arch: str, cache: Path) -> str:
    """What ptxas prints for one source and architecture; kept until an input changes.

    Raises:
        SystemExit: nvcc refused the file; its output is shown.
    """
    target = cache / f"{source.stem}.{arch}.cubin"
    command = compile_command(toolkit, source, target, [arch], to="-cubin")
    digest = hashlib.sha256(repr((command, toolkit.release)).encode())
    for path in [source, *sorted(ROOT.glob("csrc/*.h")), *sorted(source.parent.glob("*.h"))]:
        digest.update(path.read_bytes())
    kept = cache / f"{source.stem}.{arch}.{digest.hexdigest()[:16]}.txt"
    if kept.exists():
        return kept.read_text()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"ptxas table: nvcc could not compile {source}:\n{done.stdout}")
    for stale in cache.glob(f"{source.stem}.{arch}.*.txt"):
        stale.unlink()
    target.unlink()
    kept.write_text(done.stdout)
    return done.stdout


def measure(
    toolkit: Toolkit, sources: list[Path], archs: tuple[str, ...] = ARCHS, cache: Path = CACHE
) -> list[Kernel]:
    """All kernels of all sources on all architectures, sorted, two compilers at a time."""
    cache.mkdir(parents=True, exist_ok=True)
    jobs = [(source, arch) for source in sources for arch in archs]
    with ThreadPoolExecutor(max_workers=2) as pool:
        texts = list(pool.map(lambda job: compile_one(toolkit, job[0], job[1], cache), jobs))
    pairs = zip(jobs, texts, strict=True)
    return sorted(kernel for (source, _), text in pairs for kernel in parse(source.name, text))


def as_csv(kernels: list[Kernel], compiler: str) -> str:
    """The table's text: the compiler's version as a comment, a header, a line per kernel."""
    text = io.StringIO()
    text.write(f"# {compiler}\n")
    names = [field.name for field in fields(Kernel)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(kernel) for kernel in kernels)
    return text.getvalue()


def from_csv(text: str) -> tuple[list[Kernel], str]:
    """The kernels and the compiler's version of a table."""
    first, *lines = text.splitlines()
    kernels = []
    for row in csv.DictReader(lines):
        numbers = {name: int(row[name]) for name in list(row)[3:]}
        kernels.append(Kernel(row["file"], row["kernel"], row["arch"], **numbers))
    return kernels, first.removeprefix("# ")


def hot_faults(kernels: list[Kernel]) -> list[str]:
    """A sentence for each hot kernel that spills, and for each file in which none is hot."""
    faults = [
        f"{kernel} is hot and spills ({kernel.spill_stores} bytes stored, {kernel.spill_loads} "
        "loaded); expected none: take fewer elements a thread, or split the kernel"
        for kernel in kernels
        if is_hot(kernel) and kernel.spills
    ]
    cold = {kernel.file for kernel in kernels} - {k.file for k in kernels if is_hot(k)}
    faults += [
        f"{file} has kernels, but none whose template arguments say fp32 or bf16, q = 2 and one "
        "pair; expected <T, ..., q, P, ...>, or a pattern of the file's own in HOT_OF"
        for file in sorted(cold)
    ]
    return faults


def differences(kernels: list[Kernel], table: list[Kernel]) -> tuple[list[str], list[str]]:
    """What fails, and what is only told, where `kernels` differ from the kept `table`."""
    now = {kernel.key: kernel for kernel in kernels}
    before = {kernel.key: kernel for kernel in table}
    faults = [f"{now[key]} is not in the table: {MEND}" for key in sorted(now.keys() - before)]
    gone = sorted(before.keys() - now)
    faults += [f"{before[key]} is in the table but no longer compiled: {MEND}" for key in gone]
    told = []
    for key in sorted(now.keys() & before):
        new, old = now[key], before[key]
        if new.spills and not old.spills:
            faults.append(
                f"{new} newly spills ({new.spill_stores} bytes stored, {new.spill_loads} loaded, "
                f"{new.registers} registers; before {old.registers} and no spill); expected none: "
                "take fewer elements a thread, or split the kernel"
            )
        elif new.registers > old.registers or new.spill_loads > old.spill_loads:
            told.append(
                f"{new}: registers {old.registers} -> {new.registers}, bytes spilled "
                f"{old.spill_loads} -> {new.spill_loads}"
            )
    return faults, told


def main(argv: list[str] | None = None) -> int:
    """Compile, compare or write; the exit status."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = arguments.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="compare with the table")
    mode.add_argument("--update", action="store_true", help="write the table")
    chosen = arguments.parse_args(argv)
    toolkit = find_toolkit()
    if toolkit is None:
        print("ptxas table: no nvcc was found, so the CUDA kernels were not compiled.")
        return 0
    sources = sorted(TABLE.parent.glob("*.cu"))
    kernels = measure(toolkit, sources)
    faults = hot_faults(kernels)
    if chosen.update:
        TABLE.write_text(as_csv(kernels, toolkit.release))
    else:
        table, compiler = from_csv(TABLE.read_text())
        found, told = differences(kernels, table)
        faults += found
        if told and compiler != toolkit.release:
            print(f"ptxas table: it was made by {compiler}; here is {toolkit.release}.")
        for line in told:
            print(f"ptxas table: {line}")
    for line in faults:
        print(f"ptxas table: {line}.", file=sys.stderr)
    spilling = sum(kernel.spills for kernel in kernels)
    print(
        f"ptxas table: {len(kernels)} kernels of {len(sources)} files on {len(ARCHS)} "
        f"architectures, {sum(map(is_hot, kernels))} hot, {spilling} spill, {len(faults)} faults."
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
