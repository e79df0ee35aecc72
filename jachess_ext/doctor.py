"""The command `jachess doctor`: versions, architectures of the build, problems and their fixes."""

import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, TypedDict

import torch

from ._io import TRAINING, missing
from .ops import build_info
from .ops.attention_triton import enabled
from .ops.library import IN_CHECKOUT, OLDEST_GPU, REBUILD, STATE
from .torch_private import TORCH_FLOOR, release

_SHOWN = ("transformers", "accelerate", "peft", "datasets", "scipy", "pandas", "matplotlib")
"""Distributions whose versions are shown, besides torch and numpy."""
_FLOORS = {"torch": TORCH_FLOOR, "transformers": (5, 2)}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _below_floor(name: str, version: str | None) -> str | None:
    """Return a sentence with the fix if a package is older than the oldest supported version;
    otherwise None."""
    if version is None or name not in _FLOORS or release(version) >= _FLOORS[name]:
        return None
    floor = ".".join(map(str, _FLOORS[name]))
    return f"{name} {version} is older than {floor}: `pip install -U '{name}>={floor}'`."


class _Device(TypedDict):
    name: str
    capability: str


class _Gpu(TypedDict):
    torch_cuda: str | None
    visible: list[_Device]


def _gpu() -> _Gpu:
    """Return torch's CUDA version (None for a CPU build), and the visible GPUs."""
    devices: list[_Device] = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        capability = "{}.{}".format(*torch.cuda.get_device_capability(i))
        devices.append({"name": torch.cuda.get_device_name(i), "capability": capability})
    return {"torch_cuda": torch.version.cuda, "visible": devices}


def _runs_on(archs: str, capability: str) -> bool:
    """Return whether code built for `archs` ('8.0 9.0a 10.0+PTX') runs on a GPU of `capability`.

    A binary runs on its own version and later minor versions ("9.0a": only on 9.0), PTX on its own
    version and all later ones.
    """
    gpu = tuple(map(int, capability.split(".")))
    for arch in archs.split():
        number = arch.removesuffix("+PTX")
        binary = tuple(map(int, number.rstrip("af").split(".")))
        is_portable = binary[0] == gpu[0] or arch.endswith("+PTX")
        if binary == gpu or (binary < gpu and is_portable and not number.endswith("a")):
            return True
    return False


def _cuda_problems(built: dict[str, str], gpu: _Gpu) -> list[str]:
    """Return a sentence with the fix for each GPU, driver or toolkit that is not used."""
    if not gpu["visible"]:
        if shutil.which("nvidia-smi") and gpu["torch_cuda"] is None:
            return [
                "This machine has an NVIDIA driver but torch is a CPU build: install a CUDA build "
                f"of torch (https://pytorch.org/get-started){', then `make build`' * IN_CHECKOUT}."
            ]
        return []
    devices = [device for device in gpu["visible"] if not _too_old(device)]
    if devices and ("activation_jet", "cuda") not in STATE.kernels:
        toolkit = f"the CUDA toolkit {gpu['torch_cuda']} (nvcc), then `make build`"
        remedy = toolkit if IN_CHECKOUT else "a wheel that has them"
        return [f"A GPU is visible but no CUDA kernels were built: install {remedy}."]
    archs = built.get("cuda_archs", "")
    return [
        f"{device['name']} has capability {device['capability']} but the kernels were built for "
        f"{archs}: {'run' if IN_CHECKOUT else 'install a wheel made with'} "
        f"`TORCH_CUDA_ARCH_LIST={device['capability']} make {'build' if IN_CHECKOUT else 'wheel'}`."
        for device in devices
        if not _runs_on(archs, device["capability"])
    ]


def _too_old(device: _Device) -> bool:
    return tuple(map(int, device["capability"].split("."))) < OLDEST_GPU


def _triton(gpu: _Gpu) -> str:
    """Return a sentence on Triton: its version, whether it is switched on, the GPUs on which its
    kernels run, and the time of the first call."""
    try:
        from triton import __version__ as version
    except ImportError:
        return "missing: attention runs without it"
    gpus = [
        f"{'does not serve' if _too_old(device) else 'serves'} {device['name']} "
        f"(sm {device['capability']})"
        for device in gpu["visible"]
    ]
    return (
        f"{version}, {'asked' if enabled() else 'not asked'} for by JACHESS_TRITON=1; "
        f"{', '.join(gpus) or 'no GPU to serve'}; the first call of each kind compiles its "
        "kernels, 2 to 10 seconds each, which Triton keeps in ~/.triton/cache or $TRITON_CACHE_DIR"
    )


def report(commands: Mapping[str, Sequence[str]] = {}) -> dict[str, Any]:
    """Return the facts that `jachess doctor` prints.

    Args:
        commands: command -> modules that it needs.

    Returns:
        A dict with the keys versions (of python and packages, None if missing); platform; built
        (the build information, {} if there is none); operators (path of their library, whether it
        is loaded, its kernels); pure (whether this installation has no compiled operators); gpu;
        triton (a sentence); and problems and notes (on optional things that are missing): sentences
        with the fix.
    """
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": _version("numpy"),
    }
    versions.update({name: _version(name) for name in _SHOWN})
    built, gpu = build_info(), _gpu()
    problems = [text for name, v in versions.items() if (text := _below_floor(name, v))]
    # Without the library's file there was no build, which is slower, but not a problem.
    is_pure = not STATE.path.is_file()
    if STATE.problem is not None and not is_pure:
        problems.append(STATE.problem[0].upper() + STATE.problem[1:])
    elif not built and not is_pure:
        problems.append(f"The module jachess_ext._C is missing or broken: run {REBUILD}.")
    problems += _cuda_problems(built, gpu)
    # Commands and modules that lack the same packages share one line, and one command to install.
    users: dict[str, list[str]] = {}
    for user, modules in {"jachess_ext.training": TRAINING, **commands}.items():
        users.setdefault(" ".join(missing(modules)), []).append(user)
    notes = [
        f"{', '.join(names)} would need `pip install {packages}`."
        for packages, names in users.items()
        if packages
    ]
    notes += [
        f"{device['name']} has capability {device['capability']} and the CUDA kernels need 8.0 or "
        "newer: formulas in torch are used there."
        for device in gpu["visible"]
        if _too_old(device)
    ]
    if is_pure:
        notes.append(
            "This is the installation without compiled operators: everything works, by formulas in "
            "torch, slower. For compiled ones: "
            + ("`make build`." if IN_CHECKOUT else "install a wheel for this Python.")
        )
    if not gpu["visible"]:
        notes.append("No GPU is visible: everything runs on the CPU.")
    return {
        "versions": versions,
        "platform": f"{platform.system()} {platform.machine()}",
        "built": built,
        "operators": {
            "library": str(STATE.path),
            "loaded": STATE.problem is None,
            "kernels": sorted(f"{name} ({device})" for name, device in STATE.kernels),
        },
        "pure": is_pure,
        "gpu": gpu,
        "triton": _triton(gpu),
        "problems": problems,
        "notes": notes,
    }


def main(commands: Mapping[str, Sequence[str]] = {}) -> int:
    """Print the report and return the exit code: 0 if there are no problems, else 1.

    Args:
        commands: command -> modules that it needs.
    """
    facts = report(commands)
    built, gpu = facts["built"], facts["gpu"]
    lines = [f"platform      {facts['platform']}"]
    lines += [f"{name:<14}{version or 'missing'}" for name, version in facts["versions"].items()]
    if built:
        cuda = f"CUDA {built['cuda']} for {built['cuda_archs']}" if built["cuda"] else "no CUDA"
        lines.append(
            f"built with    {built['compiler']} against torch {built['torch']} "
            f"(runs with any torch >= 2.10), CPU {built['cpu']}, {cuda}"
        )
    operators = facts["operators"]
    state_text = "none" if facts["pure"] else "loaded" if operators["loaded"] else "NOT loaded"
    lines += [f"operators     {state_text}", *(f"{'':<14}{name}" for name in operators["kernels"])]
    lines += [f"GPU           {d['name']} (sm {d['capability']})" for d in gpu["visible"]]
    lines.append(f"Triton        {facts['triton']}")
    lines += [f"problem: {text}" for text in facts["problems"]]
    lines += [f"note: {text}" for text in facts["notes"]]
    ready_text = "core ready: derivatives, smoothness, the NTK"
    print(*lines, "fix the problems above" if facts["problems"] else ready_text, sep="\n")
    return 1 if facts["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
