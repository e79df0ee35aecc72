"""Load pretrained models and tokenizers without remote code; encode texts as batches."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor

from ..._io import DataError, require
from .tasks import Examples, Task

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Batch = dict[str, Tensor]
Model: TypeAlias = "PreTrainedModel | PeftModel"
"""A model of transformers, or one with peft's adapters."""


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer, with a padding token.

    Raises:
        DataError: the tokenizer cannot be loaded, or has no token to pad with.
        MissingExtra: transformers is not installed.

    Examples:
        >>> from jachess_ext.lab.demo import ASSETS
        >>> load_tokenizer(ASSETS).tokenize("a good film")
        ['a', 'good', 'fil', '##m']
    """
    tokenizer: PreTrainedTokenizerBase = _pretrained("AutoTokenizer", source, "tokenizer")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise DataError(f"the tokenizer of {source} has no token to pad with")
    return tokenizer


def load_config(source: str | Path) -> PreTrainedConfig:
    """Load a model's configuration; for errors see `load_tokenizer`."""
    return _pretrained("AutoConfig", source)  # type: ignore[no-any-return]


def load_model(
    source: str | Path,
    outputs: int,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    is_regression: bool = False,
) -> PreTrainedModel:
    """Load a sequence classifier in fp32; weights missing in the checkpoint are drawn by `seed`.

    The model's attribute `drawn_modules` lists the modules with drawn weights, mostly the head.

    Args:
        outputs: number of classes, or of numbers to predict.
        is_regression: whether the loss is the squared error.

    Raises:
        DataError: the model cannot be loaded (no such path, no network, no safetensors, …).
        MissingExtra: transformers is not installed.

    Examples:
        >>> from jachess_ext.lab.demo import ASSETS
        >>> model = load_model(ASSETS, 2, load_tokenizer(ASSETS), seed=0)
        >>> model.config.num_labels, model.drawn_modules
        (2, ('classifier',))
    """
    return _load(
        "AutoModelForSequenceClassification",
        source,
        tokenizer,
        seed,
        num_labels=outputs,
        problem_type="regression" if is_regression else "single_label_classification",
        ignore_mismatched_sizes=True,
    )


def load_head_model(
    source: str | Path, head: str, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """Load a language model in fp32; for errors see `load_model`.

    Args:
        head: "causal", "masked" or "seq2seq".
    """
    heads = {"causal": "CausalLM", "masked": "MaskedLM", "seq2seq": "Seq2SeqLM"}
    return _load(f"AutoModelFor{heads[head]}", source, tokenizer, seed)


def _load(
    auto: str, source: str | Path, tokenizer: PreTrainedTokenizerBase, seed: int, **settings: Any
) -> PreTrainedModel:
    logging = require("transformers").utils.logging
    torch.manual_seed(seed)  # transformers draws missing weights from torch's generator
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # no warning of a new head, which is intended
    logging.disable_progress_bar()
    try:
        model, report = _pretrained(
            auto,
            source,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            **settings,
        )
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
    model.config.pad_token_id = tokenizer.pad_token_id
    # Modules whose weights are missing in the checkpoint, or have another shape there.
    mismatched = [key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]]
    drawn = {key.rpartition(".")[0] for key in [*report["missing_keys"], *mismatched]}
    # Trainer and peft do not distinguish drawn weights from loaded ones, but LoRA has to train the
    # head, and a penalty towards the pretrained weights must exclude it: both use this attribute.
    model.drawn_modules = tuple(sorted(drawn))
    return model  # type: ignore[no-any-return]


def _pretrained(auto: str, source: str | Path, kind: str = "model", **settings: object) -> Any:
    """Return ``auto.from_pretrained(source)`` of transformers, or raise DataError.

    Args:
        auto: name of the class, such as "AutoModelForMaskedLM".
        kind: noun for the message.
    """
    if not Path(source).exists():
        settings["local_files_only"] = _hub_unreachable(str(source))
    try:
        factory = getattr(require("transformers"), auto)
        return factory.from_pretrained(source, trust_remote_code=False, **settings)
    except Exception as error:  # the library raises errors of many types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if settings.get("local_files_only"):
            _hub_unreachable.cache_clear()  # the next attempt checks again
            reason = f"{_NO_FOLDER}, no download of it, and the hub is not reached; {_EXPECTED}"
        elif Path(source).is_dir() and not (Path(source) / "config.json").exists():
            reason = f"the folder has no config.json; {_EXPECTED}"
        raise DataError(f"the {kind} {str(source)!r} could not be loaded: {reason}") from error


_NO_FOLDER = "there is no such folder"
_EXPECTED = (
    "expected a folder with config.json, model.safetensors and the tokenizer's files, or a hub id "
    "such as google-bert/bert-base-uncased and a network to download it"
)


@functools.cache
def _hub_unreachable(source: str) -> bool:
    """Return whether the hub is unreachable, so that only downloaded files can be loaded.

    Checked once before all files, since transformers retries each of them for half a minute.

    Raises:
        DataError: ``source`` is not a hub id, or the hub has no such model.
    """
    from huggingface_hub import errors, model_info

    try:
        if source.startswith(("/", "./", "../", "~")):
            raise errors.HFValidationError
        model_info(source, timeout=5)
    except (errors.HFValidationError, errors.RepositoryNotFoundError) as error:
        where = "" if isinstance(error, ValueError) else ", and none that you can read on the hub"
        raise DataError(
            f"the model {source!r} could not be loaded: {_NO_FOLDER}{where}; {_EXPECTED}"
        ) from error
    except errors.HfHubHTTPError:
        return False  # the hub is reachable: loading the model raises an error with the reason
    except Exception:  # of the HTTP library, which depends on huggingface_hub's version
        return True
    return False


def model_version(model: str) -> str:
    """Return a digest of a local model's files, or the commit of a model on the hub.

    Raises:
        DataError: the model's configuration cannot be loaded.
    """
    folder = Path(model)
    if not folder.is_dir():
        return str(getattr(load_config(model), "_commit_hash", None))
    suffixes = (".json", ".txt", ".model", ".safetensors")
    return _digest(path for path in sorted(folder.iterdir()) if path.suffix in suffixes)


def content_digest(path: Path) -> str:
    """Return a digest of the content of a file, or of all files in a folder."""
    return _digest(sorted(filter(Path.is_file, path.iterdir())) if path.is_dir() else [path])


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Encoded:
    """Tokenised examples; a batch is padded on the right to its longest example."""

    rows: list[dict[str, list[int]]]
    labels: Sequence[float]
    tokenizer: PreTrainedTokenizerBase

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, object]:
        """Return an example as a dict of its tokens, and its label under "labels"."""
        return {**self.rows[index], "labels": self.labels[index]}

    def collate(self, items: Sequence[Mapping[str, object]]) -> Batch:
        """Return a batch of items of `__getitem__`: tokens [B, T], and labels [B] if all items have
        one.

        Labels are int64 if they are integers (classes), else float32 (regression).
        """
        tokens = [{k: v for k, v in item.items() if k != "labels"} for item in items]
        rows = cast("list[dict[str, list[int]]]", tokens)
        # Padded on the right, since encoders' heads use the first token.
        batch = dict(self.tokenizer.pad(rows, padding_side="right", return_tensors="pt"))
        if all("labels" in item for item in items):
            batch["labels"] = torch.tensor([item["labels"] for item in items])
        return batch

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return a batch of the examples at `indices`; see `collate`."""
        return self.collate([self[i] for i in indices])

    def in_order(self, size: int) -> Iterator[Batch]:
        """Yield batches of `size` examples in their present order; the last may be smaller."""
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))

    def by_length(self) -> Encoded:
        """Return the same examples sorted by length, so that batches have little padding."""
        order = sorted(range(len(self)), key=lambda i: len(self.rows[i]["input_ids"]))
        return Encoded(
            [self.rows[i] for i in order], [self.labels[i] for i in order], self.tokenizer
        )


def encode(examples: Examples, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Encoded:
    """Tokenise examples, truncated to `max_length` tokens or to the tokenizer's own lower limit.

    Examples:
        >>> from jachess_ext.lab.demo import ASSETS
        >>> films = Examples(["a good film", "a bad film"], None, [1, 0])
        >>> rows = encode(films, load_tokenizer(ASSETS), max_length=16)
        >>> rows.batch([0, 1])["labels"]
        tensor([1, 0])
    """
    if not len(examples):
        return Encoded([], examples.labels, tokenizer)  # tokenizers fail on an empty list
    columns = tokenizer(
        *map(list, zip(*examples.rows, strict=True)),
        truncation=True,
        max_length=min(max_length, tokenizer.model_max_length),
    )
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values())]  # noqa: B905
    return Encoded(rows, examples.labels, tokenizer)


def check_tokens(
    drawn: Task,
    whole: Task,
    tokenizer: PreTrainedTokenizerBase,
    parts: Sequence[str] = ("train", "unlabelled", "dev"),
) -> None:
    """Check that every row has at least one token.

    An empty text has no tokens if the tokenizer adds no special tokens, as for many decoders.

    Args:
        drawn: the task with the rows to use.
        whole: the task with all its rows, by which the message numbers them.
        parts: the parts of the task to check.

    Raises:
        DataError: a row has no token.
    """
    for part in parts:
        rows = getattr(drawn, part).rows
        if not rows or tokenizer.num_special_tokens_to_add(pair=len(rows[0]) == 2):
            continue
        ids = tokenizer(*map(list, zip(*rows, strict=True)))["input_ids"]
        empty = next((row for row, tokens in zip(rows, ids, strict=True) if not tokens), None)
        if empty is not None:
            raise DataError(
                f"{whole.name}: row {getattr(whole, part).rows.index(empty) + 1} of its {part} "
                "rows is empty for the model, whose tokenizer makes no token of "
                f"{' and '.join(map(repr, empty))}; expected some text in each: leave that row out"
            )
