"""Pretrains the small BERT-type encoder that ships with the demo.

Text: docstrings of installed packages, cleaned and masked as the demo does it; files of the demo's
dev split are left out, and so is every sentence that occurs in one of them elsewhere. Objectives
are BERT's: masked words, and whether two runs of sentences come from the same docstring.

    python -m examples.pretrain_demo_encoder --out jachess_ext/lab/demo/assets --minutes 25
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForPreTraining, PreTrainedTokenizerFast

from benchmarks.zoo import WORDPIECE_SPECIAL as SPECIAL
from benchmarks.zoo import train_wordpiece
from examples.docstrings import NAME, file_sentences, is_dev_file, source_files
from jachess_ext._io import DataError
from jachess_ext.lab.demo import PACKAGES

TEXT_PACKAGES = (
    *PACKAGES,
    *("sympy", "networkx", "matplotlib", "pandas", "datasets", "huggingface_hub", "fontTools"),
    *("accelerate", "peft", "pip", "setuptools", "hypothesis", "pydantic", "PIL", "joblib"),
    *("mpmath", "pyarrow", "psutil", "jinja2", "fsspec", "pygments", "rich", "regex", "pytest"),
)
PAD, UNK, CLS, SEP, MASK = range(len(SPECIAL))
MASKED_SHARE = 0.2

Pair = tuple[list[int], list[int], bool]


def corpus(packages: Iterable[str]) -> list[list[str]]:
    """Sentences of every docstring outside the dev split; near-empty and repeated ones dropped."""
    held_out: set[str] = set()
    documents: list[list[str]] = []
    for package in packages:
        try:
            paths = source_files(package)
        except DataError:
            print(f"{package} is not installed: skipped")
            continue
        for path in paths:
            groups = file_sentences(package, path)
            if package in PACKAGES and is_dev_file(package, path):
                held_out.update(text for group in groups for text in group)
            else:
                documents += groups
    seen: set[str] = set(held_out)
    unique = []
    for group in documents:
        fresh = [text for text in dict.fromkeys(group) if text not in seen]
        seen.update(fresh)
        if fresh:
            unique.append(fresh)
    return unique


def pairs(documents: list[list[list[int]]], longest: int, rng: random.Random) -> list[Pair]:
    """One epoch of (first, second, belongs together) examples, as token ids without specials.

    Documents of several sentences are cut at random into two runs; half of the second runs are
    swapped for another document's. A single sentence stands alone half of the time.
    """
    room = longest - 3
    made: list[Pair] = []
    for document in documents:
        start = 0
        while start < len(document):
            length = 0
            end = start
            while end < len(document) and (end == start or length + len(document[end]) <= room):
                length += len(document[end])
                end += 1
            made.append(_cut(document[start:end], documents, room, rng))
            start = end
    return made


def _cut(
    sentences: list[list[int]], documents: list[list[list[int]]], room: int, rng: random.Random
) -> Pair:
    if len(sentences) > 1:
        at = rng.randrange(1, len(sentences))
        first, second = list(chain(*sentences[:at])), list(chain(*sentences[at:]))
        together = rng.random() < 0.5
    else:
        first, second, together = sentences[0], [], rng.random() < 0.5
    if not together:
        other = documents[rng.randrange(len(documents))]
        second = other[rng.randrange(len(other))]
    first = first[: room - 8]
    return first, second[: room - len(first)], together


def batches(examples: list[Pair], tokens: int, rng: random.Random) -> Iterator[list[Pair]]:
    """Batches of about `tokens` tokens, of examples of like length, in random order."""
    ordered = sorted(examples, key=lambda pair: len(pair[0]) + len(pair[1]) + rng.random() * 4)
    made: list[list[Pair]] = []
    batch: list[Pair] = []
    for pair in ordered:
        if batch and (len(batch) + 1) * (len(pair[0]) + len(pair[1]) + 3) > tokens:
            made.append(batch)
            batch = []
        batch.append(pair)
    made.append(batch)
    rng.shuffle(made)
    yield from made


def collate(batch: list[Pair]) -> dict[str, torch.Tensor]:
    """Padded `input_ids`, `token_type_ids`, `attention_mask` [B, T]; `together` [B], −100 alone."""
    rows, types = [], []
    for first, second, _ in batch:
        tail = [*second, SEP] if second else []
        rows.append([CLS, *first, SEP, *tail])
        types.append([0] * (len(first) + 2) + [1] * len(tail))
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [PAD] * (width - len(row)) for row in rows]),
        "token_type_ids": torch.tensor([row + [0] * (width - len(row)) for row in types]),
        "attention_mask": torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows]),
        "together": torch.tensor([int(not yes) if second else -100 for _, second, yes in batch]),
    }


def mask_words(
    ids: torch.Tensor, vocabulary: int, name: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """BERT's corruption: (corrupted ids, chosen positions), both [B, T]; 80 % mask, 10 % random."""
    chance = torch.rand(ids.shape, generator=generator)
    chosen = (chance < MASKED_SHARE) & (ids >= len(SPECIAL)) & (ids != name)
    kind = torch.rand(ids.shape, generator=generator)
    noise = torch.randint(len(SPECIAL), vocabulary, ids.shape, generator=generator)
    corrupted = torch.where(chosen & (kind < 0.8), MASK, ids)
    return torch.where(chosen & (kind > 0.9), noise, corrupted), chosen


def losses(
    model: BertForPreTraining, batch: dict[str, torch.Tensor], name: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Masked-word loss (the head runs on masked positions only), pair loss, and pair accuracy."""
    ids = batch["input_ids"]
    corrupted, chosen = mask_words(ids, model.config.vocab_size, name, generator)
    out = model.bert(
        corrupted,
        attention_mask=batch["attention_mask"],
        token_type_ids=batch["token_type_ids"],
    )
    words = cross_entropy(model.cls.predictions(out.last_hidden_state[chosen]), ids[chosen])
    logits = model.cls.seq_relationship(out.pooler_output)
    known = batch["together"] >= 0
    if not bool(known.any()):
        return words, logits.sum() * 0, 0.5
    right = (logits.argmax(-1) == batch["together"])[known].float().mean().item()
    return words, cross_entropy(logits, batch["together"]), right


def pretrain(
    model: BertForPreTraining, documents: list[list[list[int]]], name: int, args: argparse.Namespace
) -> list[tuple[float, int, float, float, float]]:
    """AdamW, linear warm-up and decay over the time given; rows of (minute, tokens, losses…)."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.98),
        eps=1e-6,
    )
    rng, generator = random.Random(args.seed), torch.Generator().manual_seed(args.seed)
    rows: list[tuple[float, int, float, float, float]] = []
    start, tokens = time.monotonic(), 0
    recent: list[tuple[float, float, float]] = []
    model.train()
    while True:
        for examples in batches(pairs(documents, args.length, rng), args.batch_tokens, rng):
            share = (time.monotonic() - start) / (60 * args.minutes)
            if share >= 1:
                return rows
            for group in optimiser.param_groups:
                group["lr"] = args.lr * min(share / 0.04, 1.0) * max(1 - share, 0.02)
            batch = collate(examples)
            words, together, right = losses(model, batch, name, generator)
            if not math.isfinite(words.item()):
                raise RuntimeError("the masked-word loss is not finite; lower --lr")
            (words + 0.5 * together).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            tokens += int(batch["attention_mask"].sum())
            recent.append((words.item(), together.item(), right))
            if len(recent) == args.log_every:
                means = (sum(column) / len(recent) for column in zip(*recent, strict=True))
                rows.append((share * args.minutes, tokens, *means))  # type: ignore[arg-type]
                print(
                    "{:6.2f} min {:9d} tokens  mlm {:.3f}  pair {:.3f} ({:.3f})".format(*rows[-1])
                )
                recent.clear()


def main() -> None:
    """Builds the corpus, the vocabulary and the model, pretrains, and saves everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=5000)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    documents = corpus(TEXT_PACKAGES)
    texts = (text for group in documents for text in group)
    tokenizer = train_wordpiece(texts, args.vocabulary, words=(NAME,))
    ids = [
        [tokenizer(text, add_special_tokens=False)["input_ids"] for text in group]
        for group in documents
    ]
    print(f"{len(ids)} docstrings, {sum(len(s) for d in ids for s in d)} tokens")
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.width,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=PAD,
    )
    model = BertForPreTraining(config)
    rows = pretrain(model, ids, tokenizer.convert_tokens_to_ids(NAME), args)
    save(model, tokenizer, rows, args.out)


def save(
    model: BertForPreTraining,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[tuple[float, int, float, float, float]],
    out: Path,
) -> None:
    """Encoder with pooler (no pretraining heads) in fp16, tokenizer, and the loss curve as csv."""
    out.mkdir(parents=True, exist_ok=True)
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.1
    model.bert.to(torch.float16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    with (out / "pretraining_loss.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["minutes", "tokens", "masked_word_loss", "pair_loss", "pair_accuracy"])
        writer.writerows([f"{row[0]:.2f}", row[1], *(f"{v:.4f}" for v in row[2:])] for row in rows)


if __name__ == "__main__":
    main()
