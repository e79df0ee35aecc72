"""The kernel Θ of a run's model on a few rows: measured, written and read."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._io import DataError, write_bytes
from ..compare.models import Encoded
from ..ntk import Measurement, Spectrum, measure_ntk, ntk_loss
from ..scaling.predictive import Array

KERNELS = "kernels"
"""The folder of the files of Θ, in that of a live selection."""
FORWARD = 2.0
"""Operations per parameter and token; a backward pass to the inputs costs as much, to the weights
too."""


@torch.no_grad()
def residual_of(model: Any, probe: Encoded) -> torch.Tensor:
    """Return f(X) − y: logits minus one-hot labels (or the numbers), [n, C], fp64 on the CPU."""
    batch = _on_device(model, probe)
    labels = batch.pop("labels").cpu()
    logits = model(**batch).logits.double().cpu()
    if labels.is_floating_point():
        return logits - labels[:, None]
    return logits - torch.nn.functional.one_hot(labels, logits.shape[1])


def _on_device(model: Any, probe: Encoded) -> dict[str, torch.Tensor]:
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in probe.batch(range(len(probe))).items()}


def measured(
    model: Any, probe: Encoded, residual: torch.Tensor, t: float, rate: float, path: Path
) -> dict[str, Any]:
    """Measure Θ and F, write the kernel's file, and return that part of a run's record.

    The training loss is a mean, so η of Eq. 9 is the learning rate over the rows n of the probe:
    gradient flow on (1/n) Σ_i ½‖f(x_i) − y_i‖² moves f by −(η/n) Θ (f − y) a step.

    Args:
        residual: of the model before training, see `residual_of`.
        t: of the record.
        rate: the learning rate.
        path: of the file.
    """
    found = measure_ntk(model, _on_device(model, probe), outputs="logits", progress=False)
    theta = found.theta.float().cpu()
    spectrum = _spectrum(theta)
    file = io.BytesIO()
    np.savez(
        file,
        theta=theta.numpy(),
        residual=residual.numpy(),
        eigenvalues=spectrum.eigenvalues.numpy(),
        labels=np.asarray(probe.labels),
    )
    write_bytes(path, file.getvalue())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = sum(len(row["input_ids"]) for row in probe.rows)
    return {
        "kernel": path.name,
        "kernel_loss": float(ntk_loss(spectrum, residual, t, rate / len(residual))),
        "residual_square": float(residual.square().sum()),
        "probe_square": float(residual_of(model, probe).square().sum()),
        "probe_flops": _flops(found, parameters, tokens),
    }


def _spectrum(theta: torch.Tensor) -> Spectrum:
    with warnings.catch_warnings():
        # In single precision a kernel of low rank always has eigenvalues a little below 0.
        warnings.filterwarnings("ignore", "jachess_ext.ntk: .* round-off", RuntimeWarning)
        return Spectrum.of(theta)


def _flops(measured: Measurement, parameters: int, tokens: int) -> float:
    """Count forward passes for r, Θ and the residual after training, a backward pass an output,
    and the contractions."""
    report = measured.report
    passes = FORWARD * parameters * tokens * (3 + report.outputs)
    counted = (
        choice.cost.gram_flops if choice.form == "A" else choice.cost.materialise_flops
        for choice in report.choices
        if choice.cost is not None  # norms and embeddings are small
    )
    return passes + report.blocks * sum(counted)


def read_kernel(folder: Path, record: dict[str, Any]) -> dict[str, Array]:
    """Read what a run left of Θ in the folder of a live selection.

    Returns:
        theta: Θ as `jx.ntk` gives it, [n, C, n, C], float32.  residual: r, [n, C], float64.
        eigenvalues: of Θ, ascending, [n·C], float64.  labels: [n].

    Raises:
        DataError: the run has none, or its file is missing or not whole.
    """
    if record["kernel"] is None:
        raise DataError(f"the run {record['run']} has no kernel: none was asked for")
    path = folder / KERNELS / record["kernel"]
    try:
        with np.load(path, allow_pickle=False) as arrays:
            kernel = {name: arrays[name] for name in arrays.files}
        n, c = kernel["residual"].shape
        if kernel["theta"].shape != (n, c, n, c) or kernel["eigenvalues"].shape != (n * c,):
            raise ValueError(f"a kernel of shape {list(kernel['theta'].shape)}")
        return kernel
    except Exception as error:  # zipfile and numpy raise many kinds
        raise DataError(f"its kernel {path} cannot be read ({error})") from error


def kernel_of(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Return the kernel of a run as `Search.kernels` has it."""
    kernel = read_kernel(folder, record)
    return {
        "theta": _spectrum(torch.from_numpy(kernel["theta"])),
        "residual": torch.from_numpy(kernel["residual"]),
        "t": record["time"],
        "lr": record["learning_rate"] / len(kernel["labels"]),
    }
