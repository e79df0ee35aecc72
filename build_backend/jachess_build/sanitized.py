"""Tests of the C++ sources with the address, undefined-behaviour and thread sanitizers.

    PYTHONPATH=build_backend python -m jachess_build.sanitized       # `make sanitize`

The CPU operators are built once per sanitizer and exercised by the operators' own tests, in a
Python that has the sanitizer's runtime loaded first (LD_PRELOAD) and takes the library of
JACHESS_OPS_LIBRARY. Then the tests marked `sanitizers` run: the .cu sources in the CPU shim, and
planted faults, which must be found.

Torch itself is not instrumented: the sanitizers watch the operators' accesses, to torch's tensors
as to any memory. For the thread sanitizer, csrc/testing/parallel_for.cpp takes the place of
torch's parallel loop. Objects are kept in build/sanitized until a source, a header or a flag
changes.

Where all pass, csrc/sanitized.txt gets their last lines and a hash of what they depend on;
`--if-changed` (as in `.ci/run`) does nothing where the hash is that of the files as they are.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .extensions import STABLE_ABI_TARGET, cpu_sources

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CACHE = ROOT / "build" / "sanitized"
RECORD = CSRC / "sanitized.txt"


@dataclass(frozen=True)
class Sanitizer:
    """Flags of the compiler, the runtime to load first, and the runtime's options."""

    name: str
    flags: tuple[str, ...]
    runtime: str
    options: tuple[tuple[str, str], ...]

    def environment(self) -> dict[str, str]:
        """Return the environment of a program built with it."""
        return {**os.environ, **dict(self.options)}

    def preloading(self, library: Path) -> dict[str, str]:
        """Return the environment of a Python, itself not instrumented, that loads `library`."""
        # With the C++ library beside it: the runtime looks for __cxa_throw when it starts.
        found = [_output("g++", f"-print-file-name={n}") for n in (self.runtime, "libstdc++.so")]
        return {
            **self.environment(),
            "LD_PRELOAD": " ".join(found),
            "JACHESS_OPS_LIBRARY": str(library),
        }


SANITIZERS = {
    # Python and torch keep much for ever; the shim's fibers have stacks of their own.
    "address": Sanitizer(
        "address",
        ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        "libasan.so",
        (
            ("ASAN_OPTIONS", "detect_leaks=0:detect_stack_use_after_return=0"),
            ("UBSAN_OPTIONS", "print_stacktrace=1"),
        ),
    ),
    "thread": Sanitizer(
        "thread",
        ("-fsanitize=thread",),
        "libtsan.so",
        # Torch's own parallel loops are OpenMP's, whose barriers the sanitizer does not know.
        (("TSAN_OPTIONS", "halt_on_error=1:exitcode=66"), ("OMP_NUM_THREADS", "1")),
    ),
}


def available() -> bool:
    """Return whether g++ and its sanitizers' runtimes are installed."""
    if shutil.which("g++") is None or sys.platform != "linux":
        return False
    names = [sanitizer.runtime for sanitizer in SANITIZERS.values()]
    return all(Path(_output("g++", f"-print-file-name={name}")).is_absolute() for name in names)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def compile_objects(sources: Sequence[Path], flags: Sequence[str], cache: Path) -> list[Path]:
    """Compile each source, .cpp or .cu, as C++ to an object file; unchanged ones are reused.

    Raises:
        RuntimeError: g++ refused a source; its output is shown.
    """
    cache.mkdir(parents=True, exist_ok=True)
    headers = hashlib.sha256()
    for folder in dict.fromkeys(source.parent.parent for source in sources):
        for header in sorted(folder.rglob("*.h")):
            headers.update(header.read_bytes())

    def compile_one(source: Path) -> Path:
        command = ["g++", *flags, "-x", "c++", "-c", str(source)]
        key = hashlib.sha256(repr(command).encode() + headers.digest() + source.read_bytes())
        target = cache / f"{source.stem}.{key.hexdigest()[:16]}.o"
        if not target.exists():
            partial = target.with_suffix(f".{os.getpid()}.tmp")
            done = subprocess.run(
                [*command, "-o", str(partial)], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise RuntimeError(f"g++ could not compile {source}:\n{done.stderr}")
            partial.replace(target)
        return target

    # One process at a time: workers of a parallel test run wait for the first one's objects.
    with (cache / "lock").open("w") as lock, ThreadPoolExecutor(max_workers=2) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return list(pool.map(compile_one, sources))


def link(objects: Sequence[Path], target: Path, flags: Sequence[str]) -> Path:
    """Link `objects` into `target`, a program or (with "-shared") a library.

    Raises:
        RuntimeError: g++ refused; its output is shown.
    """
    command = ["g++", *flags, *map(str, objects), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"g++ could not link {target.name}:\n{done.stderr}")
    return target


def build_operators(
    sanitizer: Sanitizer,
    target: Path,
    csrc: Path = CSRC,
    sources: Sequence[Path] | None = None,
    cache: Path = CACHE,
) -> Path:
    """Build the operators' library with a sanitizer, as `target`.

    Args:
        csrc: the source tree; a copy of it where a test plants a fault.
        sources: beside csrc/library.cpp; all of the CPU's by default.

    Raises:
        RuntimeError: g++ refused a source.
    """
    from torch.utils import cpp_extension

    chosen = [csrc / "library.cpp", *sources] if sources else cpu_sources(csrc)
    link_flags = ["-shared", *sanitizer.flags]
    if sanitizer.name == "thread":
        chosen.append(csrc / "testing" / "parallel_for.cpp")
        link_flags.append("-Wl,-Bsymbolic-functions")  # ours, not libtorch's
    # Unoptimised, so that nothing wrong is optimised away; one clone of each function.
    flags = ["-std=c++20", "-O0", "-g1", "-fPIC", "-fopenmp-simd", "-fno-math-errno", "-Wno-psabi"]
    flags += ["-DJACHESS_NO_CLONES", f"-DTORCH_TARGET_VERSION={STABLE_ABI_TARGET}"]
    flags += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    objects = compile_objects(chosen, [*flags, *sanitizer.flags], cache / sanitizer.name)
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    return link(objects, target, [*link_flags, "-Wl,--no-as-needed", *libraries, "-ltorch"])


# All tests of the operators but those of autograd and of the compiler, which take long and call the
# kernels as the others do, and of peak memory, which a sanitizer's own memory hides.
CHOSEN = (
    "not gradient and not opcheck and not compile and not derivative and not finite and not memory"
)


def start_tests(
    arguments: Sequence[str], environment: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start pytest in a process of its own, with one thread and its output in `log`."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def report(name: str, process: subprocess.Popen[bytes], log: Path) -> str | None:
    """Wait for `process` and print the last line of its output, or all of it where it failed.

    Returns:
        The line; None where the process failed.
    """
    status = process.wait()
    text = log.read_text(errors="replace").strip()
    last = f"{name}: {text.splitlines()[-1]}"
    print(f"sanitizers: {f'{name}: {text}' if status else last}", flush=True)
    return None if status else last


def digest(csrc: Path = CSRC) -> str:
    """Return a hash of the files on which the result depends: the sources, the tests, this file."""
    sources = sorted(file for file in csrc.rglob("*") if file.suffix in (".h", ".cpp", ".cu"))
    tests = sorted((ROOT / "python_tests" / "ops").glob("*.py"))
    total = hashlib.sha256()
    for file in (*sources, *tests, Path(__file__)):
        total.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def main(*arguments: str) -> int:
    """Build with every sanitizer, run the operators' tests and return 1 if any fails."""
    if "--if-changed" in arguments and RECORD.exists() and digest() in RECORD.read_text():
        print(f"sanitizers: nothing has changed since all passed ({RECORD.relative_to(ROOT)}).")
        return 0
    if not available():
        print("sanitizers: no g++ with their runtimes was found, so nothing was checked.")
        return 0
    CACHE.mkdir(parents=True, exist_ok=True)
    # The composite is torch's products, around operators that the other tests call.
    tests = [
        "python_tests/ops",
        "--ignore=python_tests/ops/test_attention_chunks.py",
        "-m",
        "not slow and not cuda and not sanitizers",
        "-k",
        CHOSEN,
    ]
    running = []
    for sanitizer in SANITIZERS.values():  # the second is built while the first one's tests run
        library = build_operators(sanitizer, CACHE / f"_ops_{sanitizer.name}.so")
        log = CACHE / f"{sanitizer.name}.log"
        name = f"the CPU operators with {' '.join(sanitizer.flags)}"
        running.append((name, start_tests(tests, sanitizer.preloading(library), log), log))
    before = digest()
    results: dict[str, str | None] = {}
    for place, (name, process, log) in enumerate(running):
        results[name] = report(name, process, log)
        if place == 0:  # the address sanitizer is the faster, and leaves a core to the shim's tests
            shim, log = ["python_tests", "-m", "sanitizers and not slow"], CACHE / "shim.log"
            name = "CUDA kernels in the shim, and planted faults"
            running.append((name, start_tests(shim, dict(os.environ), log), log))
    failed = [name for name, line in results.items() if line is None]
    if failed:
        print(f"sanitizers: {'; '.join(failed)}: failed, see above.")
        return 1
    RECORD.write_text("\n".join([before, *filter(None, results.values()), ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
