"""`jachess ntk`: the kernel of a model on the texts of a file, saved, with a short report."""

from __future__ import annotations

import argparse
import io
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .._io import DataError, require, write_bytes
from ..ntk import Measurement, Spectrum, label_alignment, measure_ntk, ntk
from .ntk_data import class_numbers, load, make_batch, read_samples


def run(options: argparse.Namespace) -> None:
    """Computes, saves and prints.

    Raises:
        DataError: model or file cannot be used; the output file cannot be written.
        TypeError, ValueError, RuntimeError: as `jx.ntk`.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    _require_writable(options.out)
    samples = read_samples(options, options.samples)
    labels = class_numbers(samples)
    model, tokenizer, head = load(options, labels)
    batch = make_batch(samples, labels, tokenizer, head, options)
    settings = _settings(options, model)
    if options.method == "explain":
        print(ntk(model, batch, **settings))
        return
    start = time.perf_counter()
    found = measure_ntk(model, batch, **settings)
    seconds = time.perf_counter() - start
    classes = labels if head == "classifier" else None
    _save(options, found, head, classes)
    print(_summary(found, options, seconds, classes))


def _settings(options: argparse.Namespace, model: nn.Module) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "outputs": options.outputs,
        "method": options.method,
        "memory_budget": options.memory,
        "seed": options.seed,
    }
    if options.parameters is not None:
        try:
            pattern = re.compile(options.parameters)
        except re.error as error:
            raise DataError(
                f"--parameters {options.parameters!r} is no regular expression: {error}"
            ) from error
        if not any(pattern.search(name) for name, _ in model.named_parameters()):
            raise DataError(f"--parameters {options.parameters!r} matches no parameter's name")
        settings["parameters"] = lambda name, parameter: bool(pattern.search(name))
    return settings


def _require_writable(out: Path) -> None:
    if out.is_dir():
        raise DataError(f"--out {out} is a folder; expected a file name")
    for folder in out.absolute().parents:
        if folder.exists():
            if not folder.is_dir():
                raise DataError(f"--out {out}: {folder} is a file, not a folder")
            return


def _save(
    options: argparse.Namespace, found: Measurement, head: str, labels: list[int] | None
) -> None:
    """Both formats hold ``theta`` [N, C, N, C], ``labels`` [N] if known, and what it is of."""
    about = {
        "model": options.model,
        "file": str(options.file),
        "head": head,
        "outputs": str(options.outputs),
        "method": options.method,
        "parameters": options.parameters or "",
        "seed": str(options.seed),
        "dtype": options.dtype,
        "max_length": str(options.max_length),
    }
    tensors = {"theta": found.theta.cpu().contiguous()}
    if labels is not None:
        tensors["labels"] = torch.tensor(labels)
    if options.out.suffix == ".safetensors":
        content = require("safetensors.torch").save(tensors, metadata=about)
    else:
        file = io.BytesIO()
        arrays = {name: value.numpy() for name, value in tensors.items()}
        np.savez(file, **arrays, about=np.array(json.dumps(about)))  # type: ignore[arg-type]
        content = file.getvalue()
    try:
        write_bytes(options.out, content)
    except OSError as error:
        raise DataError(f"{options.out} cannot be written: {error.strerror}") from error


def _summary(
    found: Measurement, options: argparse.Namespace, seconds: float, labels: list[int] | None
) -> str:
    report, theta = found.report, found.theta
    values = Spectrum.of(theta, tolerance=1e-3).eigenvalues
    total = float(values.sum())
    rank = total**2 / float(values.square().sum()) if total else 0.0
    forms = Counter(report.form_of(name) for choice in report.choices for name in choice.names)
    lines = [
        f"NTK of {report.samples} samples, {report.outputs} outputs, "
        f"{report.parameters:,} parameters: {seconds:.1f} s, {report.blocks} pairs of blocks",
        f"forms: {', '.join(f'{form} {count}' for form, count in sorted(forms.items()))}",
        f"trace {total:.4g}; largest eigenvalue {float(values[-1]):.4g} "
        f"({float(values[-1]) / total if total else 0:.1%} of it); effective rank {rank:.1f} "
        f"of {len(values)}",
    ]
    if labels is not None and len(set(labels)) > 1:
        lines.append(
            f"alignment with the labels {label_alignment(theta.cpu(), torch.tensor(labels)):.3f}"
        )
    lines.append(f"against a plain backward pass: relative difference {report.difference:.1e}")
    lines.append(f"saved in {options.out}")
    return "\n".join(lines)
