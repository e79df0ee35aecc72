"""Makes the models one by one; a finished one is a folder that is whole, and is kept."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import transformers

from jachess_ext.evaluation.files import whole_folder
from jachess_ext.evaluation.report import write_json
from jachess_ext.tasks.examples import DataError
from jachess_ext.tasks.vocabulary import train_byte_pairs, train_wordpiece
from jachess_ext.training.methods.weights import is_masked

from .members import DROPOUT, ENCODERS, Member, config_of
from .pretrain import Recipe, blocks, held_out_loss, pretrain
from .text import Corpus

RECORD = "zoo.json"
"""In every model's folder: how it was made. In the zoo's own: all of them together."""


@dataclass(frozen=True)
class Plan:
    """What decides a model's weights, apart from the machine's arithmetic."""

    vocabulary: int = 4096
    seed: int = 0
    recipe: Recipe = field(default_factory=Recipe)


Say = Callable[[str], None]


def make_zoo(
    members: Sequence[Member], corpus: Corpus, out: Path, plan: Plan, say: Say = print
) -> list[dict[str, Any]]:
    """Makes what is not there yet; returns one record a model, and writes them to `out`.

    A model is written beside its place and renamed, so a killed run leaves whole models only, and
    the same call goes on with the next.  Each model's seed is its own, so that order and
    interruptions change nothing.

    Raises:
        DataError: a model of that name is there and was made from another plan or text.
    """
    out.mkdir(parents=True, exist_ok=True)
    wanted = {member.name: _facts(member, corpus, plan) for member in members}
    done = {name: _finished(out / name, facts) for name, facts in wanted.items()}
    shared: dict[bool, tuple[Any, ...]] = {}  # encoders' and decoders' tokenizer and blocks
    records = []
    for member in members:
        record = done[member.name]
        if record is None:
            masked = member.family in ENCODERS
            if masked not in shared:
                shared[masked] = _prepare(masked, corpus, plan)
            record = _make(member, shared[masked], out, plan, wanted[member.name], say)
        else:
            say(f"{member.name} is there already")
        records.append(record)
    write_json(out / RECORD, {"models": records})
    return records


def _facts(member: Member, corpus: Corpus, plan: Plan) -> dict[str, Any]:
    return {**asdict(member), "text": corpus.digest, "plan": asdict(plan)}


def _finished(folder: Path, facts: dict[str, Any]) -> dict[str, Any] | None:
    """The record of a finished model, or None where there is none yet."""
    path = folder / RECORD
    if not folder.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        different = [name for name, value in facts.items() if record.get(name) != value]
    except (OSError, ValueError, AttributeError):
        raise DataError(
            f"{folder} is there and was not made by this script (it has no readable {RECORD}); "
            "give another --out"
        ) from None
    if different:
        raise DataError(
            f"{folder} was made with another {different[0]}; remove it or give another --out"
        )
    return record


def _prepare(masked: bool, corpus: Corpus, plan: Plan) -> tuple[Any, ...]:
    """A tokenizer, and the blocks to train on and to judge on."""
    train = train_wordpiece if masked else train_byte_pairs
    tokenizer = train(corpus.train, plan.vocabulary)
    length = plan.recipe.block
    return tokenizer, *(blocks(part, tokenizer, length) for part in (corpus.train, corpus.held_out))


def _make(
    member: Member,
    shared: tuple[Any, ...],
    out: Path,
    plan: Plan,
    facts: dict[str, Any],
    say: Say,
) -> dict[str, Any]:
    tokenizer, rows, held_out = shared
    seed = plan.seed * 2**32 + crc32(member.name.encode())
    torch.manual_seed(seed)
    model = _language_model(config_of(member, tokenizer, dropout=0.0))
    before = held_out_loss(model, tokenizer, held_out, plan.recipe)
    start, processor = time.monotonic(), time.process_time()
    pretrain(
        model,
        tokenizer,
        rows,
        member.steps,
        member.rate,
        plan.recipe,
        seed,
        _progress(member, say),
    )
    record = {
        **facts,
        "parameters": sum(p.numel() for p in model.parameters()),
        "objective": "masked words" if is_masked(model.config) else "next word",
        "tokens": member.steps * plan.recipe.rows * plan.recipe.block,
        "loss_before": before,
        "loss": held_out_loss(model, tokenizer, held_out, plan.recipe),
        "seconds": time.monotonic() - start,
        "processor_seconds": time.process_time() - processor,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    _save(model, tokenizer, config_of(member, tokenizer, DROPOUT), out / member.name, record)
    say(f"{member.name}: loss {record['loss']:.3f} after {record['seconds']:.0f} s")
    return record


def _language_model(config: Any) -> Any:
    kind: Any = (
        transformers.AutoModelForMaskedLM
        if is_masked(config)
        else transformers.AutoModelForCausalLM
    )
    return kind.from_config(config)


def _progress(member: Member, say: Say) -> Callable[[int, float], None]:
    every = max(1, member.steps // 4)

    def on_step(step: int, loss: float) -> None:
        if step % every == 0 and step < member.steps:
            say(f"{member.name}: step {step} of {member.steps}, loss {loss:.3f}")

    return on_step


def _save(model: Any, tokenizer: Any, config: Any, folder: Path, record: dict[str, Any]) -> None:
    finished = _language_model(config)
    finished.load_state_dict(model.state_dict())
    with whole_folder(folder) as partial:
        finished.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_json(partial / RECORD, record)
