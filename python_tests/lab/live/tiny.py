"""Tiny models, labelled sentences and plain text for live selections."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from jachess_ext.lab.cli import main
from python_tests.lab.demo.conftest import WORDS, save_tiny_model

NOUNS = [word for word in WORDS if word not in ("good", "fine", "bad", "poor")]


def save_model(folder: Path, width: int, seed: int) -> Path:
    """A BERT of one layer with the tiny model's tokenizer."""
    save_tiny_model(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=5 + len(WORDS),
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=2 * width,
        initializer_range=0.2,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int, seed: int) -> Path:
    """Six words, one of them good or bad, a tenth of the labels wrong."""
    draw = random.Random(seed)
    lines = ["text,label"]
    for _ in range(count):
        good = draw.random() < 0.5
        words = [draw.choice(NOUNS) for _ in range(5)]
        words.insert(draw.randrange(6), draw.choice(["good", "fine"] if good else ["bad", "poor"]))
        label = good != (draw.random() < 0.1)
        lines.append(f"{' '.join(words)},{'good' if label else 'bad'}")
    path.write_text("\n".join(lines) + "\n")
    return path


def save_decoder(folder: Path, width: int, seed: int, merges: int = 0) -> Path:
    """A GPT-2 of one layer, with a byte-level tokenizer that has learnt so many merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters) + 1 + merges,
        special_tokens=["<end>"],
        initial_alphabet=letters,
        show_progress=False,
    )
    core.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", bos_token="<end>", model_max_length=32
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=24,
        n_embd=width,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def write_text(path: Path, count: int, seed: int) -> Path:
    """A piece of three to nine words a line, the same noun again and again within a piece."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        noun, verb = draw.choice(["film", "book"]), draw.choice(["is", "was"])
        each = [f"the {noun} {verb} very {draw.choice(['good', 'bad', 'fine'])}" for _ in range(2)]
        lines.append(" and ".join(each[: draw.randint(1, 2)]) + "é")
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return path


def _quietly(arguments: list[str]) -> None:
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    main(arguments)


def killed(arguments: list[str], out: Path, runs: int, wait: float = 0.0) -> bool:
    """Whether a command was still at work in its folder when it was killed (with -9).

    It is killed `wait` seconds after so many of its runs have ended.
    """
    process = multiprocessing.get_context("fork").Process(target=_quietly, args=(arguments,))
    process.start()
    while process.is_alive() and len(list(out.glob("runs/*.json"))) < runs:
        time.sleep(0.01)
    process.join(timeout=wait)
    alive = process.is_alive()
    process.kill()
    process.join()
    return alive
