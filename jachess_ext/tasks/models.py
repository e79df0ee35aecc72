"""Loading the model to fine-tune: any classifier or regressor, by name or path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..evaluation.extras import require
from ..evaluation.robustness import unknown_token_id
from .examples import DataError

_LANGUAGE_MODELS = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}


def load_tokenizer(source: str | Path) -> Any:
    """The model's tokenizer, with a padding token.

    Raises:
        DataError: it cannot be loaded.
        MissingExtra: transformers is not installed.
    """
    transformers = require("transformers")
    tokenizer = _pretrained(transformers.AutoTokenizer, source, "tokenizer")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise DataError(f"the tokenizer of {source} has no token to pad with")
    return tokenizer


def check_corruptible(tokenizer: Any, source: str | Path) -> None:
    """Whether texts can be corrupted with a token of the tokenizer (`unknown_token_id`).

    Raises:
        DataError: it has no token for that.
    """
    try:
        unknown_token_id(tokenizer)
    except ValueError as error:
        raise DataError(f"{source}: {error}") from error


def load_config(source: str | Path) -> Any:
    """The model's configuration.

    Raises:
        DataError: it cannot be loaded.
        MissingExtra: transformers is not installed.
    """
    return _pretrained(require("transformers").AutoConfig, source)


def load_model(
    source: str | Path, outputs: int, tokenizer: Any, seed: int, *, regression: bool = False
) -> Any:
    """A sequence classifier in fp32; a head it lacks is drawn from `seed`.

    Its attribute `drawn_modules` has the names of what was drawn.

    Args:
        outputs: classes, or numbers to predict.
        regression: whether its loss is the squared error.

    Raises:
        DataError: it cannot be loaded (no such path, no network, no safetensors, …).
        MissingExtra: transformers is not installed.
    """
    return _load(
        "AutoModelForSequenceClassification",
        source,
        tokenizer,
        seed,
        num_labels=outputs,
        problem_type="regression" if regression else "single_label_classification",
        ignore_mismatched_sizes=True,
    )


def load_head_model(source: str | Path, head: str, tokenizer: Any, seed: int) -> Any:
    """A language model in fp32.

    Args:
        head: "causal", "masked" or "seq2seq".

    Raises:
        DataError, MissingExtra: as `load_model`.
    """
    return _load(_LANGUAGE_MODELS[head], source, tokenizer, seed)


def _load(kind: str, source: str | Path, tokenizer: Any, seed: int, **settings: Any) -> Any:
    transformers = require("transformers")
    torch.manual_seed(seed)
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # that the head is new is no warning here
    transformers.utils.logging.disable_progress_bar()
    try:
        model, report = _pretrained(
            *(getattr(transformers, kind), source),
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            **settings,
        )
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
        transformers.utils.logging.enable_progress_bar()
    model.config.pad_token_id = tokenizer.pad_token_id
    # whose weights the checkpoint lacks, or has in another shape
    mismatched = [key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]]
    drawn = {key.rpartition(".")[0] for key in [*report["missing_keys"], *mismatched]}
    model.drawn_modules = tuple(sorted(drawn))
    return model


def load_fine_tuned(source: str | Path, outputs: int, tokenizer: Any) -> Any:
    """A model as it was fine-tuned, head included; LoRA adapters are applied.

    Raises:
        DataError: it cannot be loaded, was saved without a head, or has another number of outputs.
        MissingExtra: transformers (or, for adapters, peft) is not installed.
    """
    adapters = (Path(source) / "adapter_config.json").is_file()
    settings: dict[str, Any]
    if adapters:
        auto = require("peft").AutoPeftModelForSequenceClassification
        settings = {"num_labels": outputs}
    else:
        auto = require("transformers").AutoModelForSequenceClassification
        settings = {"output_loading_info": True, "use_safetensors": True}
    found = _pretrained(auto, source, dtype=torch.float32, **settings)
    model, report = (found, {}) if adapters else found
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise DataError(
            f"the model {str(source)!r} has no trained head (its checkpoint lacks {missing[0]}); "
            "give a fine-tuned one"
        )
    if model.config.num_labels != outputs:
        raise DataError(
            f"the model {str(source)!r} has {model.config.num_labels} outputs, the task {outputs}"
        )
    model.config.pad_token_id = tokenizer.pad_token_id
    return model.eval()


def _pretrained(auto: Any, source: str | Path, what: str = "model", **settings: Any) -> Any:
    try:
        return auto.from_pretrained(source, trust_remote_code=False, **settings)
    except Exception as error:  # the library raises many kinds; to the user they are one
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if str(source).startswith(("/", "./", "../", "~")) and not Path(source).exists():
            reason = "there is no such folder"
        raise DataError(f"the {what} {str(source)!r} could not be loaded: {reason}") from error
