"""The neural tangent kernel of a classifier on the texts of a file, saved, with a short report.

    python -m examples.ntk_of_a_file MODEL texts.jsonl --samples 64 --out kernel.npz
    python -m examples.ntk_of_a_file --tiny    # the demo's encoder on eight of its sentences

MODEL is a folder or hub id; the file has the columns ``text`` and ``label`` (numbers of classes) in
any format that `datasets` reads.  kernel.npz gets ``theta`` [N, C, N, C] and ``labels`` [N].
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from jachess_ext.lab.demo import ASSETS, docstring_task
from jachess_ext.ntk import Spectrum, label_alignment, measure_ntk

FORMATS = {"jsonl": "json", "tsv": "csv"}  # ending -> the name of its reader, where they differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(ASSETS))
    parser.add_argument("file", nargs="?")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--out", default="kernel.npz")
    parser.add_argument("--tiny", action="store_true", help="for a test: nothing is saved")
    options = parser.parse_args()
    if options.tiny:
        rows = docstring_task(12, 6).train
        texts, labels = list(rows.texts), list(rows.labels)
    elif options.file is None:
        parser.error("give a model and a file, or --tiny")
    else:
        ending = options.file.removesuffix(".gz").rpartition(".")[2]
        table = load_dataset(FORMATS.get(ending, ending), data_files=options.file, split="train")
        table = table.select(range(min(options.samples, len(table))))
        texts, labels = list(table["text"]), list(table["label"])

    torch.manual_seed(0)  # of a new head
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSequenceClassification.from_pretrained(
        options.model, num_labels=1 + max(labels)
    ).eval()
    batch = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
    measurement = measure_ntk(model, dict(batch) | {"labels": torch.tensor(labels)})

    theta = measurement.theta
    values = Spectrum.of(theta, tolerance=1e-3).eigenvalues
    rank = values.sum() ** 2 / values.square().sum()
    aligned = label_alignment(theta, torch.tensor(labels))
    if not options.tiny:
        np.savez(options.out, theta=theta.numpy(), labels=np.array(labels))
    print(
        f"{len(texts)} samples, trace {values.sum():.4g}, effective rank {rank:.1f} of "
        f"{len(values)}, alignment with the labels {aligned:.3f}; against a plain backward pass: "
        f"relative difference {measurement.report.difference:.1e}"
    )


if __name__ == "__main__":
    main()
