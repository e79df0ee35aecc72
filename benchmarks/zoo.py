"""Pretrains six small language models for `jachess select-live`, in about ten minutes a core.

    python -m benchmarks.zoo --text FILE_OR_FOLDER … --out zoo

Three BERT encoders and a GPT-2, a Llama and an OPT decoder (`MEMBERS`), each a transformers folder
with its own tokenizer, trained from nothing on the text given: plain-text files, perhaps gzip, some
two million characters or more.  Stopped or killed, the same command goes on where it was.  The
table of the models is printed, and written to zoo.json in the folder.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import pandas as pd
import tokenizers
import torch
import transformers
import tyro
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from jachess_ext._io import DataError, whole_folder, write_json
from jachess_ext.training.methods.weights import is_masked

# The tokenizers ---------------------------------------------------------------------------------

LONGEST = 128
"""Tokens a text is cut to (`model_max_length`)."""

WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BYTE_PAIR_SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
_FEWEST = 3  # times a character occurs, or it is unknown to a WordPiece vocabulary


def train_wordpiece(texts: Iterable[str], size: int, words: Sequence[str] = ()) -> Any:
    """A lower-casing WordPiece vocabulary as BERT has it: [CLS] text [SEP] pair [SEP].

    Args:
        texts: what it is trained on.
        size: tokens of the vocabulary, special ones and `words` among them.
        words: strings that stay one ordinary token wherever they stand.

    Returns:
        A transformers tokenizer; ids 0 to 4 are padding, unknown, class, separator and mask.

    Raises:
        ValueError: a size that the special tokens and words alone fill.
    """
    normalizer = normalizers.BertNormalizer(lowercase=True)
    texts = list(texts)
    core = tokenizers.Tokenizer(
        models.WordPiece(
            _wordpieces(texts, size - len(words), normalizer), unk_token=WORDPIECE_SPECIAL[1]
        )
    )
    core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    core.add_special_tokens(list(WORDPIECE_SPECIAL))
    core.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in words])
    _, _, start, end, _ = WORDPIECE_SPECIAL
    _frame(core, start, end)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    special = dict(zip(names, WORDPIECE_SPECIAL, strict=True))
    return _wrapped(core, **special, model_input_names=inputs)


def train_byte_pairs(texts: Iterable[str], size: int) -> Any:
    """A byte-level BPE vocabulary as GPT-2 has it, framed: <s> text </s> pair </s>.

    Args, raises: as `train_wordpiece`; the 256 bytes are part of the size.

    Returns:
        A transformers tokenizer; ids 0 to 3 are padding, unknown, start and end.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _check_size(size, len(BYTE_PAIR_SPECIAL) + len(alphabet))
    _, unknown, start, end = BYTE_PAIR_SPECIAL
    core = tokenizers.Tokenizer(models.BPE(unk_token=unknown))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    core.decoder = decoders.ByteLevel()
    special = list(BYTE_PAIR_SPECIAL)
    _train(core, texts, vocab_size=size, special_tokens=special, initial_alphabet=sorted(alphabet))
    _frame(core, start, end)
    names = ("pad_token", "unk_token", "bos_token", "eos_token")
    return _wrapped(core, **dict(zip(names, BYTE_PAIR_SPECIAL, strict=True)))


def _wordpieces(texts: Sequence[str], size: int, normalizer: Any) -> dict[str, int]:
    """Piece -> id: special tokens, characters alone and inside words, then merged pieces.

    The library numbers characters inside words (##e) in the order of a hash map that differs from
    run to run, and ties between merges fall by number.  Naming them as special tokens of a throw-
    away tokenizer fixes their numbers, and with them the vocabulary.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    letters = sorted(c for c, n in counts.items() if n >= _FEWEST and not c.isspace())
    first = [*WORDPIECE_SPECIAL, *letters, *("##" + letter for letter in letters)]
    _check_size(size, len(first))
    core = tokenizers.Tokenizer(models.BPE(continuing_subword_prefix="##"))
    core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    _train(
        core,
        texts,
        vocab_size=size,
        special_tokens=first,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        continuing_subword_prefix="##",
    )
    return core.get_vocab()


def _train(core: Any, texts: Iterable[str], **settings: Any) -> None:
    trainer = trainers.BpeTrainer(show_progress=False, **settings)
    core.train_from_iterator(texts, trainer)


def _check_size(size: int, fewest: int) -> None:
    if size <= fewest:
        raise ValueError(
            f"a vocabulary of {size} tokens has no room for words: {fewest} are special or single "
            "characters; ask for a few thousand"
        )


def _frame(core: Any, start: str, end: str) -> None:
    """Start and end tokens around a text, an end token after its pair."""
    core.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B:1 {end}:1",
        special_tokens=[(token, core.token_to_id(token)) for token in (start, end)],
    )


def _wrapped(core: Any, **settings: Any) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=LONGEST, **settings)


# The models --------------------------------------------------------------------------------------

DROPOUT = 0.1
"""Of fine-tuning, as published models have it; pretraining runs without."""


@dataclass(frozen=True)
class Member:
    """One model: `width` is the hidden size; `steps` and `rate` (the highest learning rate) are
    those of its pretraining."""

    name: str
    family: str
    width: int
    layers: int
    heads: int
    steps: int
    rate: float


MEMBERS = (
    Member("bert-32x1", "bert", 32, 1, 2, 4000, 4e-3),
    Member("bert-96x2", "bert", 96, 2, 4, 4000, 2e-3),
    Member("bert-192x4", "bert", 192, 4, 6, 800, 1e-3),
    Member("gpt2-64x2", "gpt2", 64, 2, 4, 2000, 3e-3),
    Member("llama-128x3", "llama", 128, 3, 4, 1200, 2e-3),
    Member("opt-160x2", "opt", 160, 2, 5, 400, 1e-3),
)
"""Sizes and lengths cross on purpose: the largest model is not the best trained one."""


def config_of(member: Member, tokenizer: Any, dropout: float) -> Any:
    """Return the model's configuration, with the tokenizer's vocabulary and special tokens.

    Llama has no dropout outside attention, and none of that when it is fine-tuned.
    """
    width = member.width
    own: dict[str, dict[str, Any]] = {
        "bert": {
            "intermediate_size": 4 * width,
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
        },
        "gpt2": {"embd_pdrop": dropout, "resid_pdrop": dropout, "attn_pdrop": dropout},
        "llama": {
            "num_key_value_heads": member.heads // 2,
            "intermediate_size": 8 * width // 3,
            "tie_word_embeddings": True,
        },
        "opt": {"ffn_dim": 4 * width, "word_embed_proj_dim": width, "dropout": dropout},
    }
    return AutoConfig.for_model(
        member.family,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        hidden_size=width,
        num_hidden_layers=member.layers,
        num_attention_heads=member.heads,
        max_position_embeddings=LONGEST,
        **own[member.family],
    )


# The text -----------------------------------------------------------------------------------------

ENDINGS = (".txt", ".raw", ".tokens", ".md")
"""Of the files read from a folder, perhaps with .gz after them."""
_HELD_OUT = 20  # the last paragraph in so many of every file, so the judged text is contiguous
_FEWEST_WORDS = 6


@dataclass(frozen=True)
class Corpus:
    """Paragraphs to train on and to judge on, and a digest of all of them."""

    train: list[str]
    held_out: list[str]

    @property
    def digest(self) -> str:
        """Changes with any character."""
        return sha256("\0".join([*self.train, "", *self.held_out]).encode()).hexdigest()[:16]


def read_corpus(sources: Sequence[Path]) -> Corpus:
    """Read every text file of the folders (in the order of their names), and the files named.

    Raises:
        DataError: nothing there, not readable as UTF-8 (perhaps gzip), or too little text.
    """
    files = [path for source in sources for path in _files(source)]
    train: list[str] = []
    held_out: list[str] = []
    for path in files:
        opened: Any = gzip.open if path.suffix == ".gz" else open
        try:
            with opened(path, "rt", encoding="utf-8-sig") as file:
                lines = list(paragraphs(file.read()))
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text: {error}") from None
        cut = len(lines) - len(lines) // _HELD_OUT
        train += lines[:cut]
        held_out += lines[cut:]
    if not held_out:
        raise DataError(
            f"{', '.join(map(str, sources))} has {len(train)} paragraphs of {_FEWEST_WORDS} words "
            f"or more; expected {_HELD_OUT} or more in a file, of English text"
        )
    return Corpus(train, held_out)


def paragraphs(text: str) -> Iterable[str]:
    """Yield lines with enough words; WikiText's marks (headings, @-@, <unk>) undone."""
    for line in text.splitlines():
        line = re.sub(r" @([-.,])@ ", r"\1", line.strip())
        line = re.sub(r"\s*<unk>\s*", " ", line)
        if len(line.split()) >= _FEWEST_WORDS and not line.startswith("="):
            yield line


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise DataError(f"{source} is neither a file nor a folder; expected text files (--text)")
    endings = (*ENDINGS, *(ending + ".gz" for ending in ENDINGS))
    names = sorted(path.name for path in source.iterdir() if path.name.lower().endswith(endings))
    files = [source / name for name in names if not name.lower().startswith("readme")]
    if not files:
        raise DataError(f"{source} has no file that ends in {', '.join(ENDINGS)} (or .gz after it)")
    return files


# Pretraining --------------------------------------------------------------------------------------

_WARM_UP = 0.06
_JUDGED = 64  # blocks of held-out text at most
_SEED_OF_MASKS = 12345  # of the held-out text: the same words are masked for every model


@dataclass(frozen=True)
class Recipe:
    """How the models are trained: AdamW, linear warm-up and decay.

    Attributes:
        block: tokens of a row, its start and end tokens among them.
        rows: of a batch.
        masked: share of an encoder's tokens that are predicted.
    """

    block: int = LONGEST
    rows: int = 4
    masked: float = 0.2


def blocks(texts: Sequence[str], tokenizer: Any, length: int) -> Tensor:
    """Return token ids [blocks, length]: the texts end to end, cut, each between start and end.

    Raises:
        ValueError: less text than one block.
    """
    start = tokenizer.cls_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    # verbose=False: texts longer than the model's are cut here, so no warning is due
    rows = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    stream = torch.tensor([token for row in rows for token in [*row, end]])
    inner = length - 2
    count = len(stream) // inner
    if count == 0:
        raise ValueError(f"the text has {len(stream)} tokens, less than one block of {inner}")
    cut = stream[: count * inner].reshape(count, inner)
    column = torch.ones(count, 1, dtype=torch.long)
    return torch.cat([start * column, cut, end * column], 1)


def pretrain(
    model: nn.Module,
    tokenizer: Any,
    rows: Tensor,
    steps: int,
    rate: float,
    recipe: Recipe,
    seed: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train in place; batches and masks depend on the seed alone.

    Args:
        rate: the learning rate at its highest.
        on_step: told the step, from 1, and its loss.

    Raises:
        FloatingPointError: a loss that is not finite.
    """
    collate = _collator(model, tokenizer, recipe, seed)
    optimiser = torch.optim.AdamW(_groups(model), lr=rate, betas=(0.9, 0.98), eps=1e-6)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _share(step, steps))
    model.train()
    for step, places in zip(range(steps), _batches(len(rows), recipe.rows, seed), strict=False):
        loss = loss_of(model, collate(list(rows[places])))
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"the loss of step {step} is not finite; lower the rate")
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        on_step(step + 1, loss.item())


@torch.no_grad()
def held_out_loss(model: nn.Module, tokenizer: Any, rows: Tensor, recipe: Recipe) -> float:
    """Return the mean loss in nats a predicted token, over held-out rows spread evenly."""
    collate = _collator(model, tokenizer, recipe, _SEED_OF_MASKS)
    model.eval()
    total = count = 0.0
    for part in rows[:: -(-len(rows) // _JUDGED)].split(recipe.rows):
        batch = collate(list(part))
        predicted = float((batch["labels"][:, _first(model) :] != -100).sum())
        total += loss_of(model, batch).item() * predicted
        count += predicted
    return total / count


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean loss of predicted tokens; an encoder's head runs on those alone."""
    ids, labels = batch["input_ids"], batch["labels"]
    if not is_masked(model.config):
        return cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    chosen = labels != -100
    hidden = model.base_model(ids).last_hidden_state[chosen]
    return cross_entropy(model.cls(hidden), labels[chosen])


def _first(model: Any) -> int:
    """Return the first place predicted: a decoder predicts nothing at its start token."""
    return 0 if is_masked(model.config) else 1


def _collator(model: Any, tokenizer: Any, recipe: Recipe, seed: int) -> Any:
    masked = is_masked(model.config)
    share = recipe.masked if masked else None
    return DataCollatorForLanguageModeling(tokenizer, masked, mlm_probability=share, seed=seed)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]


def _share(step: int, steps: int) -> float:
    """Return the share of the highest rate: up over the first steps, then down to zero."""
    warm = max(1.0, _WARM_UP * steps)
    return min((step + 1) / warm, (steps - step) / max(steps - warm, 1.0))


def _batches(rows: int, size: int, seed: int) -> Iterator[Tensor]:
    """Yield places of rows, epoch after epoch, without end."""
    shuffle = random.Random(seed)
    queue: list[int] = []
    while True:
        while len(queue) < size:
            epoch = list(range(rows))
            shuffle.shuffle(epoch)
            queue += epoch
        yield torch.tensor(queue[:size])
        del queue[:size]


# The zoo ------------------------------------------------------------------------------------------

RECORD = "zoo.json"
"""In every model's folder: how it was made. In the zoo's own: all of them together."""


@dataclass(frozen=True)
class Plan:
    """What decides a model's weights, apart from the machine's arithmetic."""

    vocabulary: int = 4096
    seed: int = 0
    recipe: Recipe = field(default_factory=Recipe)


Say = Callable[[str], None]
_SAID_AT_ONCE: Say = partial(print, flush=True)


def make_zoo(
    members: Sequence[Member],
    corpus: Corpus,
    out: Path,
    plan: Plan,
    say: Say = _SAID_AT_ONCE,
) -> list[dict[str, Any]]:
    """Make what is not there yet; return a record a model, and write them to `out`.

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
            masked = member.family == "bert"
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
    """Return the record of a finished model, or None where there is none yet."""
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
    """Return a tokenizer, and the blocks to train on and to judge on."""
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
        steps=member.steps,
        rate=member.rate,
        recipe=plan.recipe,
        seed=seed,
        on_step=_progress(member, say),
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
    auto: Any = (
        transformers.AutoModelForMaskedLM
        if is_masked(config)
        else transformers.AutoModelForCausalLM
    )
    return auto.from_config(config)


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


# The command --------------------------------------------------------------------------------------


def main(
    text: tuple[Path, ...],
    out: Path,
    vocabulary: int = 4096,
    seed: int = 0,
    threads: int = 1,
    length: float = 1.0,
) -> int:
    """Make the zoo; the exit code.

    Args:
        text: plain-text files, or folders of them (.txt, .raw, .tokens, .md, perhaps .gz).
        out: the zoo's folder.
        vocabulary: tokens of each vocabulary.
        seed: of weights, batches and masks.
        threads: CPU threads.
        length: all pretraining times this.
    """
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    members = [replace(each, steps=max(1, round(each.steps * length))) for each in MEMBERS]
    try:
        plan = Plan(vocabulary=vocabulary, seed=seed)
        records = make_zoo(members, read_corpus(text), out, plan)
    except (DataError, ValueError, OSError) as error:
        print(f"zoo: {error}", file=sys.stderr)
        return 2
    shown = ["name", "parameters", "objective", "steps", "tokens", "loss_before", "loss"]
    table = pd.DataFrame(records)[[*shown, "seconds", "processor_seconds"]]
    print(table.to_string(index=False, float_format=lambda x: f"{x:#.4g}"))
    print(f"written to {out / RECORD}")
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
