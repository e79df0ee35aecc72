"""Counts what attention does per tile of 64 x 32 scores, from machine code, for two versions.

    git archive ea7250a csrc | tar x -C /tmp/before
    python -m benchmarks.attention_sass /tmp/before          # before, and this tree: a table

Both versions' kernels are compiled (bfloat16) with line numbers, which change no instruction, and
disassembled: every instruction then has the chain of source lines it comes from. A rule, the first
whose pattern is found in the text of that chain, says how often the instruction runs for a tile,
over all warps: a number of warps, or so often that the tensor cores' products or the asynchronous
copies of that group come to what a tile needs. Counted is a tile in the middle: rows aligned, no
mask, no soft cap, no dropout, no row centred anew; what runs once a block is left out. Shared
memory is counted in passes of 128 bytes, asynchronous copies included, without bank conflicts.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.sass import ROOT, compile_command, count, disassembler, find_toolkit, run

Rules = list[tuple[str, Any]]
UNIT_LINES = r"tiles.h:1(39|4\d|5[0-3]):"  # of the innermost loop
# Before: a block of eight warps, units of 32 x 16 scores, 32 x 32 results. Variables: S streams,
# D entries of a head, T products of streams, blocks per 64 x 32 scores, sites (calls compiled).
BEFORE: Rules = [
    (r"load_tile\((a|b),", 0),
    (rf"multiply_scores.*{UNIT_LINES}", "sites*T*D/static['products']"),
    (r"multiply_scores.*tiles.h:13[678]:", "T*4"),
    (r"multiply_scores", "S*4"),
    (r"(any = |ScorePlace p|int n = threadIdx.*queries)", 0),
    (r"load_tile.*(to = \*source|to\[i\])", 0),
    (r"load_tile.*tiles.h:(8[6-9]|9[0-3]):", "8*blocks"),
    (r"load_tile", "blocks*2*S*D/8/static['copies']"),
    (r"load_query_jets", 8),
    (r"softcap_derivatives|pointwise_jet_backward|uncapped", 0),
    (r"cap_score.*> (?!.*if \(softcap == A\(0\)\))", 0),
    (r"mask_value.*>(?!.*switch)", 0),
    (r"dropout_factor.*>(?!.*keep_from == 0)", 0),
    (r"forward.cu:1(1[3-9]|2\d|3[01]):", 0),
    (r"(load|store)_element", "elements*S/4"),
    (r"differentiate_scores", "elements"),
    (r"Sums::place", "8*blocks"),
    (r"scale_rows", "S*2*D/32/4"),
    (r"(sums|to)\.add.*tiles.h:22[345]:", "T*2*D/32/units"),
    (r"(sums|to)\.add", "outputs*T*D/static['products']"),
    (r"", "8*blocks"),
]
# After: a warp has 16 rows and N columns; wider heads are shared out over `chunks` blocks, each of
# which makes the scores. W: warps' tiles per 64 x 32 scores.
AFTER: Rules = [
    (r"multiply_tokens", "sites*T*D*chunks/static['products']"),
    (r"multiply_weights", "T*D/static['products']"),
    (r"centre_rows|cap_score|tile\.(added|factor|score)", 0),
    (r"softcap_derivatives|pointwise_jet_backward|uncapped", 0),
    (r"tile\.fill.*(masked =|dropped =|!masked|tile_within|last_query|rules\.(left|right))", "W"),
    (r"tile\.fill.*>", 0),
    (r"(any = |ScorePlace p|int n = threadIdx.*queries)", 0),
    (r"load_jets", "W"),
    (r"load_tile.*\*to = inside", 0),
    (r"load_tile.*(int group =|int threads =|int pieces|int down|start >= down)", "W"),
    (r"load_tile", "copied/static['copies']"),
    (r"", "W"),
]


@dataclass
class Part:
    """A kernel of one version: its name, the first and last text of its loop, what rules read."""

    file: str
    kernel: str
    begin: str
    end: str
    rules: Rules
    values: dict[str, int]


def parts_before(S: int, D: int) -> dict[str, list[Part]]:
    """Return the kernels of the version with units of output, forward and backward."""
    common = {"S": S, "D": D, "T": {2: 3, 4: 9}[S]}
    forward = {"blocks": 1, "sites": 1, "elements": 8, "units": 4, "outputs": 1}
    parts = {
        "forward": [
            Part("forward", "BFloat16, 64, 2, 1", "while (key < args.rules.keys)", "key = next;",
                 [(r"^\S+cu:(29[89]|30\d|318|319|320):", 0), *BEFORE], common | forward)
        ],
        "backward": [],
    }  # fmt: skip
    for keys in (False, True):
        outputs = 2 if keys else 1
        values = {"blocks": 2, "sites": 2, "elements": 64, "units": 4 // outputs}
        parts["backward"].append(
            Part("backward", f"tiles_kernel<BFloat16, 2, 1, {str(keys).lower()}>",
                 "const ScorePlace place = {batch, head, of_keys", "write_sums<rows, Sums, T>(sums",
                 BEFORE, common | values | {"outputs": outputs})
        )  # fmt: skip
    return parts


def parts_after(S: int, D: int) -> dict[str, list[Part]]:
    """Return the kernels of the version with a strip a warp."""
    N, common = 32 if S == 2 else 16, {"S": S, "D": D, "T": {2: 3, 4: 9}[S]}

    def part(file: str, kernel: str, N: int, V: int, sites: int, wide: int) -> Part:
        chunks = -(-D // V)
        values = {"chunks": chunks, "W": 4 * 32 // N * chunks, "sites": sites}
        copied = {"copied": S * D // 8 * (chunks + (chunks if wide else 1))}
        return Part(file, kernel, "  go_over(", "      });", AFTER, common | values | copied)

    V, forward_N = 128 if S == 2 and D > 64 else 64, 64 if S == 2 and D <= 64 else N
    roles = [(0, 2), (1, 2), (2, 1)]
    return {
        "forward": [
            part("forward", f"forward_kernel<BFloat16, {S}, {forward_N}, {V}>", forward_N, V, 1, 0)
        ],
        "backward": [
            part("backward", rf"tiles_kernel<BFloat16, {S}, 64, .*\){role}>", N, 64, sites, 1)
            for role, sites in roles
        ],
    }


@cache
def lines_of(path: str) -> list[str]:
    """Return the lines of a source."""
    return Path(path).read_text(encoding="utf-8").splitlines()


@cache
def disassembly(tree: Path, file: str) -> dict[str, str]:
    """Compile an attention kernel's file with line numbers; the text of each kernel by name."""
    toolkit = find_toolkit()
    if toolkit is None:
        raise SystemExit("attention_sass: no nvcc was found: install a CUDA toolkit.")
    source = tree / "csrc" / "cuda" / f"attention_jet_{file}.cu"
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


def work(tree: Path, part: Part) -> Counter[str]:
    """Return what a tile costs in one kernel: instructions, products, shared, all warps'."""
    kernels = disassembly(tree, part.file)
    section = next(text for name, text in kernels.items() if re.search(part.kernel, name))
    main = str(tree / "csrc" / "cuda" / f"attention_jet_{part.file}.cu")
    source = lines_of(main)
    first = next(n for n, line in enumerate(source, 1) if part.begin in line)
    last = next(n for n, line in enumerate(source, 1) if n > first and part.end in line)
    groups: dict[int, Counter[str]] = {}
    for opcode, chain in instructions(section):
        if opcode == "NOP" or not chain or not first <= chain[0][1] < last:
            continue
        texts = (f"{Path(f).name}:{n}: {lines_of(f)[n - 1].strip()}" for f, n in chain)
        path = " > ".join(texts)
        rule = next(n for n, (pattern, _) in enumerate(part.rules) if re.search(pattern, path))
        counts = dict.fromkeys(("instructions", "products", "shared loads", "shared stores"), 0)
        counts |= {"global": 0, "copies": int(opcode.startswith("LDGSTS"))}
        count(counts, opcode)
        groups.setdefault(rule, Counter()).update(counts)
    total: Counter[str] = Counter()
    for rule, counts in groups.items():
        times = eval(str(part.rules[rule][1]), {}, {**part.values, "static": counts})
        shared = counts["shared loads"] + counts["shared stores"] + 4 * counts["copies"]
        total["instructions"] += round(times * counts["instructions"])
        total["products"] += round(times * counts["products"])
        total["shared"] += round(times * shared)
    return total


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="a folder with csrc/ of ea7250a")
    before = parser.parse_args().before.resolve()
    print("| | S | D | products | shared memory | | instructions | |")
    print("|---" * 8 + "|")
    for direction in ("forward", "backward"):
        for S in (2, 4):
            for D in (64, 128):
                old, new = Counter[str](), Counter[str]()
                for part in parts_before(S, D)[direction]:
                    old.update(work(before, part))
                for part in parts_after(S, D)[direction]:
                    new.update(work(ROOT, part))
                cells = [f"{old['products']:,} → {new['products']:,}"]
                for name in ("shared", "instructions"):
                    cells += [f"{old[name]:,} → {new[name]:,}", f"{new[name] / old[name]:.0%}"]
                print(f"| {direction} | {S} | {D} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
