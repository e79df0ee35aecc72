"""Pretrains six small language models for `jachess select --models`, in about ten minutes a core.

    python -m benchmarks.make_zoo --text FILE_OR_FOLDER … --out zoo

Three BERT encoders and a GPT-2, a Llama and an OPT decoder (`zoo/members.py`), each a transformers
folder with its own tokenizer, trained from nothing on the text given: plain-text files, perhaps
gzip, some two million characters or more.  Stopped or killed, the same command goes on where it
was.  The table of what was made is printed, and written to zoo.json in the folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.zoo.make import RECORD, Plan, make_zoo
from benchmarks.zoo.members import MEMBERS
from benchmarks.zoo.text import read_corpus
from jachess_ext.commands.records import print_records
from jachess_ext.tasks.examples import DataError


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    members = [
        replace(member, steps=max(1, round(member.steps * options.length))) for member in MEMBERS
    ]
    try:
        corpus = read_corpus(options.text)
        plan = Plan(options.vocabulary, options.seed)
        records = make_zoo(members, corpus, options.out, plan, lambda line: print(line, flush=True))
    except (DataError, ValueError, OSError) as error:
        print(f"make_zoo: {error}", file=sys.stderr)
        return 2
    print_records(table(records))
    print(f"written to {options.out / RECORD}")
    return 0


def table(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is printed of each model; losses are of held-out text, in nats a token."""
    shown = ("name", "parameters", "objective", "steps", "tokens", "loss_before", "loss")
    seconds = ("seconds", "processor_seconds")
    return [
        {name: record[name] for name in shown} | {name: round(record[name], 1) for name in seconds}
        for record in records
    ]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.make_zoo", description=summary)
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        required=True,
        metavar="PATH",
        help="plain-text files, or folders of them (.txt, .raw, .tokens, .md, perhaps .gz)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens, default %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="default %(default)s")
    parser.add_argument(
        "--length", type=float, default=1.0, metavar="X", help="all pretraining times X"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
