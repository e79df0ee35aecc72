"""Counts what attention on CUDA does per tile of 64 x 32 scores, from machine code, without a GPU.

    python -m benchmarks.attention_sass

The kernels are compiled (nvcc; sm_90a, bfloat16) with line numbers, which change no instruction,
and disassembled (nvdisasm, of the wheel nvidia-cuda-nvdisasm or the toolkit): every instruction
then has the chain of source lines it comes from. A rule, the first whose pattern is found in the
text of that chain, says how often the instruction runs for a tile, over all warps: a number of
warps, or so often that the tensor cores' products or the asynchronous copies of that group come to
what a tile needs. Counted is a tile in the middle: rows aligned, no mask, no soft cap, no dropout,
no row centred anew; what runs once a block is left out. Shared memory is counted in passes of 128
bytes, asynchronous copies included, without bank conflicts.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ATTENTION = ROOT / "csrc" / "attention"
KERNEL_FOLDERS = (ATTENTION, ROOT / "csrc" / "cuda")
sys.path.insert(0, str(ROOT / "build_backend"))

from jachess_build.cuda import compile_command, find_toolkit, run  # noqa: E402

OTHERWISE = re.compile(
    r"if \((tile\.(dropped|changed)|!tile\.changed|!masked && !dropped)"
    r"|if \((rules\.softcap != 0|rules\.mask\.kind == MaskKind::none|__any_sync)"
    r"|if constexpr \(kNeeded\)|const auto next = |load_pieces<S, 1>"
)
"""Lines that open what a tile in the middle does not run: a block, or the rest of a function."""

# Variables: S streams, D entries of a head, T products of streams, `chunks` blocks that share
# resident tokens, each of which makes the scores; W warps' tiles per 64 x 32 scores; `sites` of
# products to scores and `outs` of products to results in a kernel; `copied` copies of streamed
# operands.
RULES = [
    (r"multiply_tokens", "sites * T * D * chunks / static['products']"),
    (r"multiply_weights", "outs * T * D / static['products']"),
    (r"load_pieces.*(for \(int r|copy_async_16|const bool inside|piece =|source \+=|to \+=)",
     "copied / static['copies']"),
    (r"", "W"),
]  # fmt: skip


@dataclass
class Part:
    """A kernel of attention for heads of D: its file, a pattern of its name, what rules read."""

    file: str
    kernel: str
    values: dict[str, int]


def parts_of(S: int, D: int) -> dict[str, list[Part]]:
    """Return the kernels of a direction, as the launchers choose them for S streams, heads of D."""

    def part(
        file: str, kernel: str, N: int, V: int, sites: int, outs: int, whole: bool, share: int = 1
    ) -> Part:
        chunks = -(-D // (V * share))
        values = {"S": S, "D": D, "T": {2: 3, 4: 9}[S], "sites": sites, "outs": outs}
        values |= {"chunks": chunks, "W": 4 * 32 // N * chunks}
        # Where two warps share 16 queries, a block has half of the resident tokens.
        copied = share * S * D // 8 * (chunks + (chunks if whole else 1))
        return Part(file, kernel, values | {"copied": copied})

    wide = S == 2 and D > 64
    V, N = (128 if wide else 64), (32 if S == 2 else 16)
    forward_N = 64 if S == 2 and not wide else N
    share = 2 if S == 4 and D > 64 else 1
    # Role, tile, products to scores, products to results
    roles = [(0, 16 if wide else N, 2, 1), (1, N, 2, 1), (2, N, 1, 1)]
    if S == 2 and not wide:
        roles = [(0, N, 2, 1), (3, N, 2, 2)]
    return {
        "forward": [
            part(
                "forward",
                f"forward_kernel<BFloat16, {S}, {forward_N}, {V}, {share}>",
                forward_N,
                V,
                1,
                1,
                False,
                share,
            )
        ],
        "backward": [
            part(
                "backward",
                rf"backward_kernel<BFloat16, {S}, {V}, .*\){role}>",
                n,
                V,
                sites,
                outs,
                True,
            )
            for role, n, sites, outs in roles
        ],
    }


@cache
def lines_of(path: str) -> list[str]:
    """Return the lines of a source."""
    return Path(path).read_text(encoding="utf-8").splitlines()


@cache
def left_out(path: str) -> frozenset[int]:
    """Return the numbers of the lines that a tile in the middle does not run."""
    if Path(path).resolve().parent not in KERNEL_FOLDERS:
        return frozenset()
    found, lines = set(), lines_of(path)
    for n, line in enumerate(lines):
        if not OTHERWISE.search(line):
            continue
        indent = len(line) - len(line.lstrip())
        if re.search(r"return( true)?;$", line):
            indent -= 2  # of the function's end
        elif not line.endswith("{"):
            found |= {n + 1, n + 2}
            continue
        last = next(m for m in range(n + 1, len(lines)) if re.match(rf" {{{indent}}}}}", lines[m]))
        found |= set(range(n + 2, last + 2))
    return frozenset(found)


def disassembler() -> str:
    """Return the path of nvdisasm.

    Raises:
        SystemExit: it is not installed.
    """
    wheels = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvdisasm"))
    path = shutil.which("nvdisasm") or (str(wheels[-1]) if wheels else None)
    if path is None:
        raise SystemExit("attention_sass: no nvdisasm: pip install nvidia-cuda-nvdisasm.")
    return path


@cache
def disassembly(file: str) -> dict[str, str]:
    """Compile an attention kernel's file with line numbers; the text of each kernel by name."""
    toolkit = find_toolkit()
    if toolkit is None:
        raise SystemExit("attention_sass: no nvcc was found: install a CUDA toolkit.")
    source = ATTENTION / f"{file}.cu"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        command = compile_command(toolkit, source, cubin, ["9.0a"], to="-cubin")
        done = run([*command, "-lineinfo"])
        if done.returncode != 0:
            raise SystemExit(f"attention_sass: nvcc could not compile {source}:\n{done.stdout}")
        text = run([disassembler(), "-c", "-gi", str(cubin)]).stdout
    sections = re.split(r"^\t\.section\t\.text\.", text, flags=re.MULTILINE)[1:]
    symbols = "\n".join(section.partition(",")[0] for section in sections)
    names = subprocess.run(["c++filt"], input=symbols, capture_output=True, text=True, check=True)
    plain = re.sub(r"jachess::|\(anonymous namespace\)::", "", names.stdout).splitlines()
    return dict(zip(plain, sections, strict=True))


def instructions(section: str) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Each instruction's opcode and its chain of (file, line), the outermost first."""
    chain: list[tuple[str, int]] = []
    found: list[tuple[str, int]] = []
    for line in section.splitlines():
        if place := re.match(r'\t//## File "([^"]*)", line (\d+)', line):
            found.append((place[1], int(place[2])))
        elif code := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:\{ *)?(?:@!?U?P\d+ )?([A-Z]\S+)", line):
            chain, found = (found[::-1] or chain), []
            yield code[1].rstrip(";"), chain


def counts_of(opcode: str) -> Counter[str]:
    """What one instruction adds; of shared memory, passes without bank conflicts."""
    counts = Counter(instructions=1)
    if re.match(r"[HDIQ]MMA", opcode):
        counts["products"] = 1
    elif opcode.startswith("LDGSTS"):  # 16 bytes a lane
        counts.update(copies=1, shared=4)
    elif opcode.startswith("LDSM"):  # LDSM.16.M88.4: four matrices of 128 bytes
        counts["shared"] = int(opcode.rpartition(".")[2])
    elif re.match(r"(LDS|STS)(\.|$)", opcode):
        counts["shared"] = 4 if ".128" in opcode else 2 if ".64" in opcode else 1
    return counts


def work(part: Part) -> Counter[str]:
    """Return what a tile costs in one kernel: instructions, products, shared, all warps'."""
    kernels = disassembly(part.file)
    section = next(text for name, text in kernels.items() if re.search(part.kernel, name))
    source = lines_of(str(ATTENTION / f"{part.file}.cu"))
    first = next(n for n, line in enumerate(source, 1) if line == "  mainloop(")
    last = next(n for n, line in enumerate(source, 1) if n > first and line.endswith("});"))
    groups: dict[str, Counter[str]] = {}
    for opcode, chain in instructions(section):
        if opcode == "NOP" or not chain or not first <= chain[0][1] <= last:
            continue
        if any(line in left_out(file) for file, line in chain):
            continue
        path = " > ".join(lines_of(file)[line - 1].strip() for file, line in chain)
        times = next(times for pattern, times in RULES if re.search(pattern, path))
        groups.setdefault(times, Counter()).update(counts_of(opcode))
    total: Counter[str] = Counter()
    for times, counts in groups.items():
        factor = eval(times, {}, {**part.values, "static": counts})
        for name in ("instructions", "products", "shared"):
            total[name] += round(factor * counts[name])
    return total


def main() -> None:
    """Print the table."""
    print("| | S | D | products | shared memory | instructions |")
    print("|---" * 6 + "|")
    for direction in ("forward", "backward"):
        for S in (2, 4):
            for D in (64, 128):
                total = sum((work(part) for part in parts_of(S, D)[direction]), Counter[str]())
                cells = (f"{total[name]:,}" for name in ("products", "shared", "instructions"))
                print(f"| {direction} | {S} | {D} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
