"""`jachess ntk`: the kernel of a model on the texts of a file, saved, with a short report."""

from __future__ import annotations

import io
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from torch import nn

from .._io import DataError, write_bytes
from ..compare.models import encode, load_config, load_head_model, load_model, load_tokenizer
from ..compare.tasks import Examples, read_records
from ..ntk import Measurement, Spectrum, label_alignment, measure_ntk
from ..ntk import ntk as plan_ntk
from ..smoothness.decision import NO_LABEL
from . import check_ending, use_device

Head = Literal["auto", "classifier", "causal", "masked", "seq2seq"]
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
    parameters: str = "",
    method: Literal["auto", "gram", "materialise", "per_sample", "explain"] = "auto",
    memory: float | None = None,
    dtype: Literal["float32", "float64", "bfloat16"] = "float32",
    seed: int = 0,
    device: str = "cpu",
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
        device: cpu, cuda or cuda:N.
        out: .npz file for ``theta`` [N, C, N, C], ``labels`` [N] if known, and the settings.

    Raises:
        DataError: Model or file cannot be used.
        TypeError, ValueError, RuntimeError: As `jx.ntk`.
    """
    check_ending(out, ".npz")
    if samples < 1:
        raise DataError(f"--samples is {samples}; expected at least 1")
    use_device(device)
    columns = (text_column, pair_column) if pair_column else (text_column,)
    texts, labels = read_samples(file, columns, label_column, samples)
    numbers = class_numbers(labels)
    tokenizer = load_tokenizer(model)
    network, own = _load(model, tokenizer, head, classes, numbers, seed)
    place = "cpu" if device == "cpu" else "cuda"
    network = network.to(device=place, dtype=getattr(torch, dtype)).eval()
    rows = encode(texts, tokenizer, max_length)
    batch = rows.collate(rows.rows)
    numbers = numbers if own == "classifier" else None
    if own != "classifier":
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, NO_LABEL)
    elif numbers is not None:
        batch["labels"] = torch.tensor(numbers)
    batch = {name: value.to(place) for name, value in batch.items()}
    settings: dict[str, Any] = {"outputs": outputs, "method": method, "seed": seed}
    settings["memory_budget"] = None if memory is None else int(memory)
    if parameters:
        try:
            wanted = re.compile(parameters)
        except re.error as error:
            raise DataError(f"--parameters {parameters!r}: {error}") from error
        settings["parameters"] = lambda name, parameter: wanted.search(name) is not None
    if method == "explain":
        print(plan_ntk(network, batch, **settings))
        return
    start = time.perf_counter()
    measurement = measure_ntk(network, batch, **settings)
    seconds = time.perf_counter() - start
    about = {"model": model, "file": str(file), "head": own, "outputs": str(outputs)}
    about |= {"method": method, "parameters": parameters, "seed": str(seed), "dtype": dtype}
    about["max_length"] = str(max_length)
    arrays = {"theta": measurement.theta.cpu().numpy(), "about": np.array(json.dumps(about))}
    if numbers is not None:
        arrays["labels"] = np.array(numbers)
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    write_bytes(out, content.getvalue())
    print(_summary(measurement, seconds, numbers))
    print(f"saved in {out}")


def read_samples(
    file: Path, columns: Sequence[str], label_column: str, most: int
) -> tuple[Examples, list[Any]]:
    """Return the texts of a file's first samples, and their labels, None where there is none.

    Args:
        columns: of the texts, and perhaps of second texts.
        most: how many samples at most.

    Raises:
        DataError: the file is missing, empty, of another format, or without the named columns.
    """
    records = read_records(file)[:most]
    if not records:
        raise DataError(f"{file} is empty; expected at least one text")
    for number, record in enumerate(records, start=1):
        if not all(isinstance(record.get(column), str) for column in columns):
            raise DataError(
                f"{file}: record {number} has no text in column "
                f"{' or '.join(map(repr, columns))}; choose with --text-column and --pair-column"
            )
    first, *second = ([record[column] for record in records] for column in columns)
    labels = [record.get(label_column) for record in records]
    return Examples(first, second[0] if second else None, []), labels


def class_numbers(labels: Sequence[Any]) -> list[int] | None:
    """Return labels as class numbers, names in sorted order; None if a sample has no label.

    Whole numbers are those of classes already: of a trained head's, all need not be there.

    Raises:
        DataError: a label is negative or too large to be the number of a class.
    """
    if not all(isinstance(x, (int, str)) and not isinstance(x, bool) for x in labels):
        return None
    if not all(re.fullmatch(r"-?[0-9]{1,18}", str(label)) for label in labels):
        names = sorted(set(map(str, labels)))
        return [names.index(str(label)) for label in labels]
    numbers = [int(label) for label in labels]
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
