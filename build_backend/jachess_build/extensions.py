"""The two extension modules: `_ops` (operators, torch's stable ABI) and `_C` (pybind11)."""

import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext

from . import cuda

ROOT = Path(__file__).resolve().parents[2]
# The oldest torch whose stable ABI the operators use: one binary for every torch from it on.
STABLE_ABI_TARGET = "0x020a000000000000"
_STATUS = "jachess_ext-ninja "


def cpu_sources(csrc: Path) -> list[Path]:
    """Return the sources of the operators' library on the CPU."""
    return sorted([csrc / "library.cpp", csrc / "attention" / "cpu.cpp", *csrc.glob("cpu/*.cpp")])


def say(sentence: str) -> None:
    """Print the progress of the build: pip shows it with -v, make always."""
    print(f"jachess_ext: {sentence}", file=sys.stderr, flush=True)


@contextmanager
def _short_progress() -> Iterator[None]:
    """Shorten ninja's lines, which hold whole commands, to a count and the file's name."""
    sys.stdout.flush()
    kept, (reading, writing) = os.dup(1), os.pipe()

    def pass_on() -> None:
        with os.fdopen(reading, errors="replace") as lines:
            for line in lines:
                if line.startswith(_STATUS):
                    status, _, command = line.removeprefix(_STATUS).partition("|")
                    source = re.search(r"/(\w+\.cpp)\b", command)
                    say(f"compiling {status}{': ' + source[1] if source else ''}")
                else:
                    os.write(kept, line.encode())

    thread = threading.Thread(target=pass_on)
    thread.start()
    before = os.environ.get("NINJA_STATUS")
    os.environ["NINJA_STATUS"] = f"{_STATUS}%s of %t, %f done|"
    os.dup2(writing, 1)
    os.close(writing)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)  # closes the last writing end, which ends the thread
        thread.join()
        os.close(kept)
        if before is None:
            del os.environ["NINJA_STATUS"]
        else:
            os.environ["NINJA_STATUS"] = before


def _build_command() -> type[build_ext]:
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):
        """BuildExtension that runs ninja always: setuptools overlooks changed headers and flags."""

        def finalize_options(self) -> None:
            super().finalize_options()
            self.force = True

        def build_extensions(self) -> None:
            with _short_progress():
                super().build_extensions()

    return Build


def extension_arguments() -> dict[str, Any]:
    """Return the `ext_modules` and `cmdclass` arguments of `setup()`.

    Raises:
        SystemExit: torch cannot be imported, there is no compiler, or JACHESS_FORCE_CUDA asks for
            the impossible.
    """
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        raise SystemExit(
            f"jachess_ext: building needs torch, and importing it failed ({error}): install it "
            "first (`pip install torch`), or let plain `pip install .` find or fetch it."
        ) from error

    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        raise SystemExit(
            f"jachess_ext: no C++ compiler was found ({compiler}): install one (Debian: apt "
            "install g++), take a built wheel, or set JACHESS_SKIP_EXTENSIONS=1 for an "
            "installation without compiled operators, which is slower."
        )
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_capability(index) for index in range(seen)]
    toolkit, archs, decision = cuda.choose(torch.version.cuda, gpus)
    say(f"building for torch {torch.__version__}: {decision}")
    sources = cpu_sources(ROOT / "csrc")
    objects: list[str] = []
    info = {"JACHESS_TORCH_VERSION": str(torch.__version__)}
    # --no-as-needed: the stable ABI's symbols are resolved from libtorch when loaded.
    link = ["-Wl,--no-as-needed", "-ltorch"] if sys.platform == "linux" else ["-ltorch"]
    if toolkit is not None:
        kernels = cuda.kernel_files(ROOT / "csrc")
        objects = cuda.compile_kernels(toolkit, kernels, ROOT / "build" / "cuda", archs)
        sources += list(ROOT.glob("csrc/cuda/*.cpp"))
        link += [f"-L{cuda.library_dir(toolkit)}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        info["JACHESS_CUDA_VERSION"] = toolkit.version_text
        info["JACHESS_CUDA_ARCHS"] = " ".join(archs)

    ops = cpp_extension.CppExtension(
        "jachess_ext._ops",
        # setuptools refuses absolute source paths in a source distribution
        [str(path.relative_to(ROOT)) for path in sorted(sources)],
        extra_objects=objects,
        extra_compile_args=[
            "-O3",
            "-g0",
            "-fopenmp-simd",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-fvisibility=hidden",
            "-Wno-psabi",
            f"-DTORCH_TARGET_VERSION={STABLE_ABI_TARGET}",
        ],
        extra_link_args=link,
        py_limited_api=True,
    )
    # The name of a py_limited_api module would promise any Python: true of `_ops`, which holds no
    # Python at all, but the plain suffix keeps both modules' names alike.
    ops.py_limited_api = False
    bindings = Extension(
        "jachess_ext._C",
        ["csrc/bindings.cpp"],
        include_dirs=cpp_extension.include_paths(),
        extra_compile_args=["-O2", "-g0", "-fvisibility=hidden", "-std=c++17"],
        define_macros=[(name, f'"{value}"') for name, value in info.items()],
        language="c++",
    )
    return {"ext_modules": [ops, bindings], "cmdclass": {"build_ext": _build_command()}}
