"""`jachess ntk`: the kernel of a model on the texts of a file, saved, with a short report."""

from __future__ import annotations

import io
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor, nn

from .._io import DataError, require, write_bytes
from ..compare.models import load_config, load_head_model, load_model, load_tokenizer
from ..compare.tasks import open_text, read_records
from ..ntk import Measurement, Spectrum, label_alignment, measure_ntk
from ..ntk import ntk as plan_ntk
from ..smoothness.decision import NO_LABEL
from . import check_ending

Head = Literal["auto", "classifier", "causal", "masked", "seq2seq"]
Label = int | str | None
_MOST_CLASSES = 100_000  # rows of a new classifier head at most
# Ending of an architecture's name -> its head.
_ENDINGS = {
    "ForSequenceClassification": "classifier",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForConditionalGeneration": "seq2seq",
}


def ntk(
    model: tyro.conf.Positional[str],
    file: tyro.conf.Positional[Path],
    head: Head = "auto",
    text_column: str = "text",
    pair_column: str | None = None,
    label_column: str = "label",
    classes: int | None = None,
    samples: int = 64,
    max_length: int = 128,
    outputs: Literal["logits", "sum", "label"] | int = "logits",
    parameters: str | None = None,
    method: Literal["auto", "gram", "materialise", "per_sample", "explain"] = "auto",
    memory: float | None = None,
    dtype: Literal["float32", "float64", "bfloat16"] = "float32",
    seed: int = 0,
    device: str = "cpu",
    threads: int | None = None,
    out: Path = Path("ntk.npz"),
) -> None:
    """Save the neural tangent kernel of a model on the texts of a file.

    Args:
        model: Folder or hub id of a transformers model.
        file: .txt (a sample a line), .jsonl, .csv or .tsv, each also with .gz, or .parquet.
        head: Head of the model; auto: its own.
        text_column: Column of the texts.
        pair_column: Column of second texts.
        label_column: Column of the labels.
        classes: Number of classes of a classifier's new head.
        samples: Number of samples, taken from the start of the file.
        max_length: Number of tokens after which texts are cut.
        outputs: logits, sum, label, or a number of random projections.
        parameters: Regular expression: only parameters whose name it matches.
        method: How the kernel is computed; explain: print the plan and compute no kernel.
        memory: Memory budget in bytes, for example 2e9.
        dtype: Floating-point type of the model.
        seed: Seed of new heads and of random projections.
        device: cpu, cuda, cuda:1, …
        threads: Number of torch's threads.
        out: .npz or .safetensors file for ``theta`` [N, C, N, C], ``labels`` [N] if known, and
            the settings.

    Raises:
        DataError: Model or file cannot be used; the output file cannot be written.
        TypeError, ValueError, RuntimeError: As `jx.ntk`.
    """
    counts = {"samples": samples, "max-length": max_length, "classes": classes, "threads": threads}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise DataError(f"--{name} is {value}; expected at least 1")
    _check_writable(out)
    if threads is not None:
        torch.set_num_threads(threads)
    columns = (text_column, pair_column) if pair_column else (text_column,)
    texts, labels = read_samples(file, columns, label_column, samples)
    numbers = class_numbers(labels)
    tokenizer = load_tokenizer(model)
    network, own = _load(model, tokenizer, head, classes, numbers, seed)
    try:
        network = network.to(device=device, dtype=getattr(torch, dtype)).eval()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"--device {device} cannot be used: {reason}") from error
    numbers = numbers if own == "classifier" else None
    batch = _batch(texts, numbers, tokenizer, own, max_length)
    batch = {name: value.to(device) for name, value in batch.items()}
    settings: dict[str, Any] = {"outputs": outputs, "method": method, "seed": seed}
    settings["memory_budget"] = None if memory is None else int(memory)
    if parameters is not None:
        settings["parameters"] = _matching(parameters, network)
    if method == "explain":
        print(plan_ntk(network, batch, **settings))
        return
    start = time.perf_counter()
    measurement = measure_ntk(network, batch, **settings)
    seconds = time.perf_counter() - start
    about = {
        "model": model,
        "file": str(file),
        "head": own,
        "outputs": str(outputs),
        "method": method,
        "parameters": parameters or "",
        "seed": str(seed),
        "dtype": dtype,
        "max_length": str(max_length),
    }
    _save(out, measurement.theta.cpu().contiguous(), numbers, about)
    print(_summary(measurement, seconds, numbers))
    print(f"saved in {out}")


def _check_writable(out: Path) -> None:
    check_ending(out, ".npz", ".safetensors")
    if out.is_dir():
        raise DataError(f"--out {out} is a folder; expected a file name")
    folder = next(folder for folder in out.absolute().parents if folder.exists())
    if not folder.is_dir():
        raise DataError(f"--out {out}: {folder} is a file, not a folder")


def read_samples(
    file: Path, columns: Sequence[str], label_column: str, most: int
) -> tuple[list[tuple[str, ...]], list[Label]]:
    """Return the texts of a file's first samples, one or two each, and their labels.

    Raises:
        DataError: The file is missing, empty, of another format, or without the named columns.
    """
    if file.name.lower().endswith((".txt", ".txt.gz")):
        with open_text(file) as lines:
            samples: Iterator[tuple[tuple[str, ...], Label]]
            samples = (((line.strip(),), None) for line in lines if line.strip())
            chosen = list(islice(samples, most))
    else:
        chosen = list(islice(_samples_of_records(file, columns, label_column), most))
    if not chosen:
        raise DataError(f"{file} is empty; expected at least one text")
    return [texts for texts, _ in chosen], [label for _, label in chosen]


def _samples_of_records(
    file: Path, columns: Sequence[str], label_column: str
) -> Iterator[tuple[tuple[str, ...], Label]]:
    for number, record in enumerate(read_records(file), start=1):
        texts: Any = tuple(record.get(column) for column in columns)
        if not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"{file}: record {number} has no text in column "
                f"{' or '.join(map(repr, columns))}; choose with --text-column and --pair-column"
            )
        label: Any = record.get(label_column)
        known = isinstance(label, (int, str)) and not isinstance(label, bool)
        yield texts, label if known else None


def class_numbers(labels: Sequence[Label]) -> list[int] | None:
    """Return labels as class numbers, names in sorted order; None if a sample has no label.

    Raises:
        DataError: A label is negative or too large to be the number of a class.
    """
    if any(label is None for label in labels):
        return None
    if not all(re.fullmatch(r"-?[0-9]{1,18}", str(label)) for label in labels):
        order = {name: i for i, name in enumerate(sorted(set(map(str, labels))))}
        return [order[str(label)] for label in labels]
    numbers = [int(str(label)) for label in labels]
    bad = next((number for number in numbers if not 0 <= number < _MOST_CLASSES), None)
    if bad is not None:
        raise DataError(
            f"the label {bad} cannot be the number of a class; expected 0 to {_MOST_CLASSES - 1}, "
            "or names"
        )
    return numbers


def _load(
    source: str,
    tokenizer: Any,
    head: Head,
    classes: int | None,
    labels: list[int] | None,
    seed: int,
) -> tuple[nn.Module, str]:
    """Return a model and its head, which is not "auto"."""
    config = load_config(source)
    names = getattr(config, "architectures", None) or ()
    heads = (h for name in names for ending, h in _ENDINGS.items() if name.endswith(ending))
    own = next(heads, None)
    wanted = head if head != "auto" else own or "classifier"
    if wanted != "classifier":
        return load_head_model(source, wanted, tokenizer, seed), wanted
    keep = own == "classifier" and classes is None
    count = config.num_labels if keep else classes or 1 + max([1, *(labels or ())])
    return load_model(source, count, tokenizer, seed), wanted


def _batch(
    texts: Sequence[tuple[str, ...]],
    labels: list[int] | None,
    tokenizer: Any,
    head: str,
    max_length: int,
) -> dict[str, Tensor]:
    """Return a batch for `jx.ntk`; the labels of language models are the tokens themselves."""
    length = min(max_length, tokenizer.model_max_length)
    if hasattr(tokenizer, "padding_side"):
        tokenizer.padding_side = "right"
    columns = [list(column) for column in zip(*texts, strict=True)]
    batch = dict(
        tokenizer(*columns, padding=True, truncation=True, max_length=length, return_tensors="pt")
    )
    if head != "classifier":
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, NO_LABEL)
    elif labels is not None:
        batch["labels"] = torch.tensor(labels)
    return batch


def _matching(pattern: str, model: nn.Module) -> Any:
    """Return a predicate for the parameters whose name the regular expression matches."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise DataError(f"--parameters {pattern!r} is no regular expression: {error}") from error
    if not any(compiled.search(name) for name, _ in model.named_parameters()):
        raise DataError(f"--parameters {pattern!r} matches no parameter's name")
    return lambda name, parameter: bool(compiled.search(name))


def _save(out: Path, theta: Tensor, labels: list[int] | None, about: dict[str, str]) -> None:
    tensors = {"theta": theta}
    if labels is not None:
        tensors["labels"] = torch.tensor(labels)
    if out.suffix == ".safetensors":
        content = require("safetensors.torch").save(tensors, metadata=about)
    else:
        file = io.BytesIO()
        arrays = {name: value.numpy() for name, value in tensors.items()}
        np.savez(file, **arrays, about=np.array(json.dumps(about)))  # type: ignore[arg-type]
        content = file.getvalue()
    write_bytes(out, content)


def _summary(measurement: Measurement, seconds: float, labels: list[int] | None) -> str:
    report, theta = measurement.report, measurement.theta
    values = Spectrum.of(theta, tolerance=1e-3).eigenvalues
    total = float(values.sum())
    rank = total**2 / float(values.square().sum()) if total else 0.0
    forms = Counter(report.form_of(name) for choice in report.choices for name in choice.names)
    lines = [
        f"NTK of {report.samples} samples, {report.outputs} outputs, "
        f"{report.parameters:,} parameters: {seconds:.1f} s, {report.blocks} pairs of blocks",
        f"forms: {', '.join(f'{form} {count}' for form, count in sorted(forms.items()))}",
        f"trace {total:.4g}; largest eigenvalue {float(values[-1]):.4g} "
        f"({100 * float(values[-1]) / total if total else 0:.1f} % of it); effective rank "
        f"{rank:.1f} of {len(values)}",
    ]
    if labels is not None and len(set(labels)) > 1:
        aligned = label_alignment(theta.cpu(), torch.tensor(labels))
        lines.append(f"alignment with the labels {aligned:.3f}")
    lines.append(f"against a plain backward pass: relative difference {report.difference:.1e}")
    return "\n".join(lines)
