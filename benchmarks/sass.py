"""Counts what a CUDA kernel does per tile, from its machine code: no GPU is needed.

    python -m benchmarks.sass csrc/cuda/attention_jet_forward.cu --kernel "BFloat16.*2"
    python -m benchmarks.sass … --trips 0x2f40=3 0x3010=4     # how often the inner loops run

Every kernel whose readable name matches is compiled for one architecture and disassembled (nvcc;
nvdisasm, of the wheel nvidia-cuda-nvdisasm or the toolkit). Printed are its registers, spills and
bytes of code, and the tree of its loops. A loop's line has, for one warp going through it once with
its inner loops as often as ``--trips`` says (once, where it does not): instructions; products on
the tensor cores; passes over the shared memory, of 128 bytes each, for loads and for stores;
accesses to global memory. A loop is named by the address of its first instruction. Code that a
branch may skip counts as if it ran, but for addresses that ``--skip FIRST-LAST`` leaves out.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "build_backend"))

from jachess_build.cuda import compile_command, find_toolkit, run  # noqa: E402

INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:\{ *)?(?:@!?U?P\d+ )?(\S+)(.*)")
COLUMNS = ("instructions", "products", "shared loads", "shared stores", "global")


@dataclass
class Loop:
    """A loop of the machine code; the kernel itself is the outermost.

    Attributes:
        first, last: addresses of its first and last instruction.
        counts: of `COLUMNS`, without the loops inside.
    """

    first: int
    last: int
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))
    inner: list[Loop] = field(default_factory=list)

    def total(self, trips: dict[int, int]) -> dict[str, int]:
        """The counts of one passage, the inner loops as often as `trips` says."""
        total = dict(self.counts)
        for loop in self.inner:
            for name, count in loop.total(trips).items():
                total[name] += trips.get(loop.first, 1) * count
        return total


def passes(opcode: str) -> int:
    """How many passes over the shared memory a load or store takes, without bank conflicts."""
    if opcode.startswith("LDSM"):  # LDSM.16.M88.4: four matrices of 128 bytes
        return int(opcode.rpartition(".")[2])
    return 4 if ".128" in opcode else 2 if ".64" in opcode else 1


def count(counts: dict[str, int], opcode: str) -> None:
    """Add one instruction to the counts."""
    counts["instructions"] += 1
    if re.match(r"[HDIQ]MMA", opcode):
        counts["products"] += 1
    elif re.match(r"LDSM?(\.|$)", opcode):
        counts["shared loads"] += passes(opcode)
    elif re.match(r"STS(\.|$)", opcode):
        counts["shared stores"] += passes(opcode)
    elif re.match(r"(LDG|STG|LDGSTS)(\.|$)", opcode):
        counts["global"] += 1


def loops_of(code: str, skipped: Sequence[range] = ()) -> Loop:
    """The tree of loops of one kernel's disassembly.

    A loop is what lies between the target of a branch backwards and that branch.
    """
    labels: dict[str, int] = {}
    waiting: list[str] = []
    instructions: list[tuple[int, str, str]] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            waiting.append(label[1])
        elif parts := re.match(
            r"\s*/\*([0-9a-f]{4,})\*/\s+(?:\{ *)?(?:@!?U?P\d+ )?(\S+)(.*)", line
        ):
            address = int(parts[1], 16)
            labels.update((name, address) for name in waiting)
            waiting.clear()
            instructions.append((address, parts[2].rstrip(";"), parts[3]))
    ends: dict[int, int] = {}
    for address, opcode, rest in instructions:
        target = re.search(r"`\((\.L_x_\d+)\)", rest)
        if opcode.startswith("BRA") and target and labels[target[1]] < address:
            start = labels[target[1]]  # a branch to itself is the padding after the end
            ends[start] = max(ends.get(start, 0), address)
    whole = Loop(0, instructions[-1][0])
    path = [whole]
    for address, opcode, _ in instructions:
        while address > path[-1].last:
            path.pop()
        if address in ends:
            loop = Loop(address, min(ends[address], path[-1].last))
            path[-1].inner.append(loop)
            path.append(loop)
        if opcode != "NOP" and not any(address in places for places in skipped):
            count(path[-1].counts, opcode)
    return whole


def show(loop: Loop, trips: dict[int, int], depth: int = 0) -> None:
    """Print a loop and those inside it that hold products or shared memory."""
    total = loop.total(trips)
    name = "  " * depth + (f"loop {loop.first:#x}" if depth else "whole")
    times = f"x {trips[loop.first]}" if loop.first in trips else ""
    print(f"{name:24}{times:6}" + "".join(f"{total[column]:15}" for column in COLUMNS))
    for inner in loop.inner:
        show(inner, trips, depth + 1)


def disassembler() -> str:
    """Return the path of nvdisasm.

    Raises:
        SystemExit: it is not installed.
    """
    wheels = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvdisasm"))
    path = shutil.which("nvdisasm") or (str(wheels[-1]) if wheels else None)
    if path is None:
        raise SystemExit("sass: no nvdisasm was found: pip install nvidia-cuda-nvdisasm.")
    return path


def main() -> None:
    """Compile, disassemble and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a .cu file")
    parser.add_argument("--kernel", default="", help="a regular expression for the readable name")
    parser.add_argument("--arch", default="9.0a")
    parser.add_argument("--trips", nargs="*", default=[], metavar="ADDRESS=TIMES")
    parser.add_argument("--skip", nargs="*", default=[], metavar="FIRST-LAST")
    parser.add_argument("--define", action="append", default=[], help="a macro for nvcc")
    args = parser.parse_args()
    toolkit = find_toolkit()
    if toolkit is None:
        raise SystemExit("sass: no nvcc was found: install a CUDA toolkit or set CUDA_HOME.")
    trips = {int(place, 16): int(times) for place, times in (t.split("=") for t in args.trips)}
    ends = [[int(end, 16) for end in places.split("-")] for places in args.skip]
    skipped = [range(first, last + 1) for first, last in ends]
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        command = compile_command(toolkit, args.source, cubin, [args.arch], to="-cubin")
        done = run([*command, *(f"-D{macro}" for macro in args.define)])
        if done.returncode != 0:
            raise SystemExit(f"sass: nvcc could not compile {args.source}:\n{done.stdout}")
        text = run([disassembler(), "-c", str(cubin)]).stdout
    resources = dict(
        re.findall(r"Compiling entry function '(\w+)'.*\n(?:.*\n)?(.*\n.*)", done.stdout)
    )
    for section in re.split(r"^\t\.section\t\.text\.", text, flags=re.MULTILINE)[1:]:
        symbol = section.partition(",")[0]
        name = subprocess.run(
            ["c++filt", symbol], capture_output=True, text=True, check=True
        ).stdout.strip()
        short = re.sub(r"jachess::|\(anonymous namespace\)::|^void |\(.*\)$", "", name)
        if not re.search(args.kernel, short):
            continue
        said = resources.get(symbol, "")
        registers = re.search(r"Used (\d+) registers", said)
        spilled = re.search(r"(\d+) bytes spill stores", said)
        tree = loops_of(section, skipped)
        print(
            f"\n{short}: {registers[1] if registers else '?'} registers, "
            f"{spilled[1] if spilled else '?'} bytes spilled, {tree.last + 16} bytes of code"
        )
        print(" " * 30 + "".join(f"{column:>15}" for column in COLUMNS))
        show(tree, trips)


if __name__ == "__main__":
    main()
