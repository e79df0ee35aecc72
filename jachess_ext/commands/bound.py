"""`jachess bound`: the PAC-Bayes diagnostic of a fine-tuned model, layer by layer."""

from __future__ import annotations

import argparse
from typing import Any

from torch import Tensor, nn

from ..scaling import Bound, pac_bayes
from ..tasks.examples import DataError
from .ntk_data import class_numbers, load, make_batch, read_samples
from .records import print_records, write_records


def run(options: argparse.Namespace) -> None:
    """Measures, prints, writes.

    Raises:
        DataError: a model or the file cannot be used.
        ValueError: nothing to compare, or no loss.
    """
    samples = read_samples(options)
    labels = class_numbers(samples)
    model, tokenizer, head = load(options, labels)
    if head == "classifier" and labels is None:
        raise DataError(f"{options.file} has no labels, and the loss of a classifier needs them")
    before = _pretrained(model, options.pretrained)
    batches = [
        make_batch([sample], None if labels is None else [labels[place]], tokenizer, head, options)
        for place, sample in enumerate(samples[: options.samples])
    ]
    found = pac_bayes(
        model,
        before,
        batches,
        len(samples),
        epsilon=options.epsilon,
        loss_bound=options.loss_bound,
        steps=options.steps,
    )
    _report(found, len(batches), options)


def _pretrained(model: nn.Module, source: str) -> dict[str, Tensor]:
    """The state dict of the model before, without what its files do not hold (a new head)."""
    kind: Any = type(model)
    try:
        before, info = kind.from_pretrained(
            source,
            trust_remote_code=False,
            config=model.config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            use_safetensors=True,
        )
    except Exception as error:  # the library raises many kinds; to the user they are one
        reason = str(error).splitlines()[0]
        raise DataError(f"the pretrained model {source} could not be loaded: {reason}") from error
    other = {*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])}
    return {name: value for name, value in before.state_dict().items() if name not in other}


def _report(found: Bound, measured: int, options: argparse.Namespace) -> None:
    records = [dict(vars(layer)) for layer in found.layers]
    facts = {name: value for name, value in vars(found).items() if name != "layers"}
    facts |= {"total": found.total, "dominant": found.dominant, "phase": found.phase}
    if options.out is not None:
        write_records(options.out, records, **facts, epsilon=options.epsilon, measured=measured)
    print(f"{measured} of {found.samples} examples measured, mean loss {found.train_loss:.4g}")
    print_records(records)
    if found.new:
        print(f"new, so not in the sum: {', '.join(found.new)}")
    print(
        f"(1+ε) loss {found.empirical:.4g} + curvature {found.curvature:.4g} + n^(-3/4) "
        f"{found.remainder:.4g} (its constant is open) = {found.total:.4g}"
    )
    print(f"largest term: {found.dominant}; the paper's reading: {found.phase} phase")
    if options.out is not None:
        print(f"written to {options.out}")
