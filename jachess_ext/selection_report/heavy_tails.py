"""Heavy-tail exponents of candidates that are folders here: NLPmetrics without a download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..evaluation.extras import require
from ..scaling.baselines import mean_exponent

LARGEST = 2**30
"""Bytes of weights; the spectra of larger models would take longer than the rest of the report."""


def exponents(models: Sequence[str]) -> dict[str, float]:
    """Mean exponent of each model whose weights lie in a folder, as model.safetensors.

    Models of the hub, of several files, above `LARGEST`, or without a matrix large enough are left
    out: the figure is a remark of the report, and not worth a download or an error.
    """
    found = {}
    for model in models:
        path = Path(model) / "model.safetensors"
        if not path.is_file() or path.stat().st_size > LARGEST:
            continue
        try:
            found[model] = mean_exponent(require("safetensors.torch").load_file(path))
        except ValueError:
            continue  # too small for a spectrum, or weights that are not finite
    return found
