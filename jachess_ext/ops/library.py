"""Loads the compiled operators and says which of them can run where.

A missing or broken binary must not break the import: one sentence is warned, with the fix, and
`available` answers False, so that callers use the pure-torch formulas.
"""

import os
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

from .. import torch_private

_FIX = "rebuild it with `make build`, or `pip install --no-build-isolation -e .`"
_GET = "install a wheel built for this Python and platform, or build it with `make build`"
_WITH_BACKWARD = (
    *("activation_jet", "attention_jet", "gated_activation_jet", "jet_mean_squares"),
    *("layer_norm_jet", "rms_norm_jet", "softmax_jet"),
)
_OPERATORS = (
    *("ntk_gram", "sample_directions"),
    *(name + end for name in _WITH_BACKWARD for end in ("", "_backward")),
)


@dataclass(frozen=True)
class LibraryState:
    """What became of the compiled operators.

    Attributes:
        path: the library that was looked for.
        problem: one sentence with the fix, or None when every operator was loaded.
        kernels: pairs (operator, device type) that have a compiled kernel.
    """

    path: Path
    problem: str | None
    kernels: frozenset[tuple[str, str]]


def library_path() -> Path:
    """Where the build puts the operators' library for this Python.

    JACHESS_OPS_LIBRARY names another one: a build of the same operators with sanitizers, say.
    """
    if given := os.environ.get("JACHESS_OPS_LIBRARY"):
        return Path(given)
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return Path(__file__).resolve().parents[1] / f"_ops{suffix}"


def build_info() -> dict[str, Any]:
    """What was built, from the module `_C`; {} where it is missing or broken.

    Keys: torch, compiler, cpu, cuda ("" for none), cuda_archs.
    """
    try:
        from .._C import build_info as compiled_build_info
    except ImportError:
        return {}
    return dict(compiled_build_info())


def _load(path: Path) -> LibraryState:
    if not path.is_file():
        problem = f"the compiled operators are missing ({path.name} is not in {path.parent})"
        return LibraryState(path, f"{problem}: {_GET}.", frozenset())
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        built = build_info().get("torch", "")
        origin = f", built against torch {built}," if built else ""
        problem = f"the compiled operators{origin} do not load with torch {torch.__version__}"
        problem = f"{problem} ({reason})"
        return LibraryState(path, f"{problem}: {_FIX}.", frozenset())
    missing = [name for name in _OPERATORS if not hasattr(torch.ops.jachess, name)]
    if missing:
        problem = f"{path.name} is older than this source and lacks {', '.join(missing)}"
        return LibraryState(path, f"{problem}: {_FIX}.", frozenset())
    try:
        has_kernel = torch_private.dispatch_has_kernel
    except torch_private.MissingPrivate as error:
        return LibraryState(path, f"{error}.", frozenset())
    kernels = frozenset(
        (name, key.lower())
        for name in _OPERATORS
        for key in ("CPU", "CUDA")
        if has_kernel(f"jachess::{name}", key)
    )
    return LibraryState(path, None, kernels)


STATE = _load(library_path())
if STATE.problem is not None:
    warnings.warn(
        f"jachess_ext: {STATE.problem} Until then formulas in torch "
        "are used, which are as right but slower, and attention needs memory that grows with the "
        "square of the tokens.",
        RuntimeWarning,
        stacklevel=2,
    )


def loaded() -> bool:
    """Whether the compiled operators are registered in `torch.ops.jachess`."""
    return STATE.problem is None


def available(name: str, device: torch.device | str) -> bool:
    """Whether the compiled operator `name` has a kernel for `device` that can be used here.

    Not within forward-mode AD and the transforms of torch.func: custom operators give *zero*
    tangents to forward mode without a word (docs/how_it_works.md, traps), where the pure-torch
    reference is right.

    Args:
        name: without namespace, such as "activation_jet".
        device: a torch.device or its name; only its type counts.

    Returns:
        False also where the library is missing or broken.
    """
    if transformed():
        return False
    kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    return (name, kind) in STATE.kernels


def transformed() -> bool:
    """Whether a transform of torch.func or a level of forward-mode AD is active."""
    # Of the ways to ask, this one also answers rightly while dynamo traces (torch 2.13).
    nested = torch_private.functorch.get_dynamic_layer_stack_depth()
    return nested > 0 or forward_ad._current_level >= 0
