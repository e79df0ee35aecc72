"""Registers and spills of Triton's kernels, compiled for GPUs that need not be here (`make check`).

    PYTHONPATH=build_backend python -m jachess_build.triton_registers [--if-changed]

It compiles each kernel of `ops.attention_triton.TILES` with its tiles for each architecture, and
writes triton_registers.txt beside this file: a hash of the kernels and tiles, and a line for each.
Instructions are those of all warps for 64 x 32 scores of which none is hidden.
`--if-changed` does nothing where the hash is that of the files as they are, or without Triton.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("triton_registers.txt")
ARCHS = (80, 90, 100, 120)
MOST_SPILLED = 16
"""Bytes of a thread's registers that may lie in memory."""
MOST_COLUMNS = 512
"""Columns of tensor memory that a program of 10.0 may take."""
_FLOATS = ("mask", "y", "gy", "gq", "out", "p", "gs")


def digest() -> str:
    """Return a hash of the files on which the table depends."""
    folder = ROOT / "jachess_ext" / "ops"
    files = (folder / "attention_triton.py", folder / "attention_triton_kernels.py", Path(__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def compile_kernel(
    name: str, tile: Any, size: int, arch: int, descriptors: bool, **plan: Any
) -> Any:
    """Return what Triton makes of a kernel of `TILES` for bfloat16 heads of `size` numbers.

    Args:
        tile: as in `TILES`.
        arch: a compute capability, 90 for 9.0.
        plan: fields of a `Plan` other than the defaults.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from jachess_ext.ops import attention_triton_kernels as kernels

    of_keys = name in ("key_gradient", "value_gradient")
    kernel = kernels.key_gradient if of_keys else getattr(kernels, name)
    settings = kernels.Plan(
        tile.rows, tile.keys, size, size, stages=tile.stages, descriptors=descriptors, **plan
    )
    types: dict[str, Any] = dict.fromkeys(_FLOATS, "*bf16")
    types |= {"q": tile.rows, "k": tile.keys, "v": tile.keys, "gy": tile.rows}
    types = {
        key: value
        if isinstance(value, str)
        else f"tensordesc<bf16[1,1,1,{value},{size}]>"
        if descriptors
        else "*bf16"
        for key, value in types.items()
    }
    if descriptors and name == "score_jets":
        types |= dict.fromkeys(("p", "gs"), f"tensordesc<bf16[1,1,{tile.rows},{tile.keys}]>")
    if settings.mask == 1:
        types["mask"] = "*u8"
    strided = [x for x in ("q", "k", "v", "mask", "gy", "y", "gq", "out") if x in kernel.arg_names]
    types |= {
        **{"statistics": "*fp32", "delta": "*fp32", "seed": "*i64", "P": "constexpr"},
        **{"strides": (("i32",) * 4,) * len(strided), "sizes": ("i32",) * 5},
        **{"numbers": ("fp32", "fp32", "i32", "fp32"), "rectangle": ("i32",) * 5},
        "VALUES": "constexpr",
    }
    signature = {x: types[x] for x in kernel.arg_names}
    sixteen = [["tt.divisibility", 16]]
    attributes: dict[tuple[int, ...], Any] = {
        (n,): sixteen
        for n, x in enumerate(kernel.arg_names)
        if isinstance(types[x], str) and types[x].startswith("*")
    }
    place = kernel.arg_names.index("strides")
    attributes |= {(place, n, m): sixteen for n in range(len(strided)) for m in range(4)}
    constants: dict[str, Any] = {"P": settings}
    if of_keys:
        constants["VALUES"] = name == "value_gradient"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def dump(compiled: Any, option: str) -> str:
    """Return what cuobjdump prints of a kernel."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loop_length(compiled: Any) -> int:
    """Return the instructions of the first loop that multiplies matrices: that of tiles in which
    every query sees every key."""
    text = dump(compiled, "-sass")
    code = [(int(at, 16), x) for at, x in re.findall(r"^\s+/\*(\w{4,})\*/\s+(.*?);", text, re.M)]
    for end, instruction in code:
        branch = re.search(r"\bBRA\b.*?0x(\w+)", instruction)
        body = [x for at, x in code if branch and int(branch[1], 16) <= at <= end]
        if any("MMA" in x for x in body):
            return len(body)
    return 0


def usage(compiled: Any) -> dict[str, int]:
    """Return registers and bytes of stack of a thread, bytes of shared memory of a program, and its
    columns of tensor memory."""
    text = dump(compiled, "-res-usage")
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return {
        "registers": numbers["REG"],
        "stack": numbers["STACK"],
        "shared": compiled.metadata.shared,
        "columns": getattr(compiled.metadata, "tmem_size", None) or 0,
    }


def table() -> list[tuple[str, dict[str, int]]]:
    """Return a line and the usage of each kernel, size, architecture and way of loading."""
    from jachess_ext.ops.attention_triton import TILES

    rows = []
    for (name, streams, size), tiles in TILES.items():
        ways = [(arch, 0) for arch in ARCHS if size <= 64] + [(90, 1), (100, 2)]
        for square, (arch, way) in product((False, True) if streams == 3 else (False,), ways):
            tile, plan = tiles[way], {"streams": streams, "square": square}
            compiled = compile_kernel(name, tile, size, arch, way > 0, **plan)
            used = usage(compiled)
            warps_of_tiles = tile.warps * 64 * 32 / (tile.rows * tile.keys)
            used["instructions"] = round(loop_length(compiled) * warps_of_tiles)
            shape = f"{tile.rows} x {tile.keys}, {tile.warps} warps, {tile.stages} stages"
            loads = "descriptors" if way else "pointers"
            jet = f"{streams} streams{', a square' * square}"
            rows.append((f"{name} {size}, {jet}, sm_{arch}, {loads}, {shape}", used))
    return rows


def main(*arguments: str) -> int:
    """Write the table and return 1 if a kernel spills."""
    if "--if-changed" in arguments:
        if find_spec("triton") is None:
            print("triton: not installed, so its kernels were not compiled.")
            return 0
        if RECORD.exists() and digest() in RECORD.read_text():
            print("triton: no kernel has changed since triton_registers.txt was written.")
            return 0
    rows = table()
    lines = [f"{line}: " + ", ".join(f"{v} {k}" for k, v in used.items()) for line, used in rows]
    faults = [
        line
        for line, (_, used) in zip(lines, rows, strict=True)
        if used["stack"] > MOST_SPILLED or used["columns"] > MOST_COLUMNS
    ]
    for line in faults:
        print(f"triton: {line}: too much; take a smaller tile, or more warps", file=sys.stderr)
    if not faults:
        RECORD.write_text("\n".join([digest(), *lines, ""]))
    print(f"triton: {len(rows)} kernels: {len(faults)} faults.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
