"""Equivalent batches train the same model by every method: with padding on either side and of any
width, with the rows in another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from jachess_ext.training import METHODS
from python_tests.smoothness.tiny_models import DECODERS, VOCABULARY, classifier, randomise

from .runs import assert_same_parameters, examples, method_trainer, parameters

KINDS = ("single", "multi", "regression", "causal")
WIDTH = 5
"""Of batches with padding, and of several labels a row: tokens and labels have one shape."""
NAMES = tuple(
    name for name in METHODS if name != "tapt" and "synonyms" not in METHODS[name].parameters()
)
"""TAPT's first stage is transformers' own collator, which draws by the batch's shape; methods that
swap words need a tokenizer that reads and writes words."""
QUICK = {
    "single": ("none",),
    "multi": ("none", "recommended", "r3f"),
    "regression": ("jachess", "recommended"),
    "causal": ("none", "label-smoothing", "sam", "r3f", "corrupt-consistency", "jachess"),
}
"""Methods whose tests are not slow, by kind of labels."""
DRAWLESS = ("none", "l2", "label-smoothing", "sam", "gradient-norm")
"""Methods without random numbers, for which the order of rows in a batch does not matter."""


class Collator:
    """Pads on one side; also a tokenizer as far as methods ask for one."""

    all_special_ids = (0, 1, 2)
    pad_token_id = 0
    unk_token_id = 2
    mask_token_id = None

    def __init__(self, side: str, width: int, *, reverse: bool = False):
        self.padding_side, self.width, self.reverse = side, width, reverse

    def __len__(self) -> int:
        return VOCABULARY

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        rows = rows[::-1] if self.reverse else rows
        filled = {"input_ids": 0, "attention_mask": 0}
        if isinstance(rows[0].get("labels"), list):
            filled["labels"] = -100
        batch = {
            name: self._padded([torch.as_tensor(row[name]) for row in rows], value)
            for name, value in filled.items()
        }
        if "labels" in rows[0] and "labels" not in batch:
            batch["labels"] = torch.stack([torch.as_tensor(row["labels"]) for row in rows])
        return batch

    def _padded(self, rows: list[torch.Tensor], value: int) -> torch.Tensor:
        made = torch.full((len(rows), self.width), value)
        for target, row in zip(made, rows, strict=True):
            place = slice(0, len(row)) if self.padding_side == "right" else slice(-len(row), None)
            target[place] = row
        return made


def rows_of(kind: str, *, labels: bool = True) -> list[dict]:
    rows = [row for n in (2, 4, 3) for row in examples(4, n, seed=n, labels=False)]
    rows = rows[::2] + rows[1::2]
    for number, row in enumerate(rows if labels else []):
        if kind == "causal":
            row["labels"] = row["input_ids"].tolist()
        elif kind == "multi":
            row["labels"] = (torch.arange(WIDTH) % (2 + number % 3) == 0).double()
        else:
            regression = kind == "regression"
            row["labels"] = torch.tensor(number / 3).double() if regression else number % 3
    return rows


def model_of(family: str, kind: str) -> Any:
    # eager attention in float64 gives NaN where a row of the mask is all padding
    model = classifier(family, attention="sdpa")
    config = model.config
    heads = {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM}
    config.num_labels = {"multi": WIDTH, "regression": 1}.get(kind, 3)
    torch.manual_seed(0)
    made = heads[family](config) if kind == "causal" else type(model)(config)
    randomise(made)
    return made.double().eval()


def run(folder: Path, name: str, family: str, kind: str, **how: Any) -> Any:
    """The trained model, or the error's text."""
    collator = Collator(how.pop("side", "right"), how.pop("width", WIDTH), **how)
    try:
        made = method_trainer(
            folder,
            name,
            model=model_of(family, kind),
            data=rows_of(kind),
            unlabelled=rows_of(kind, labels=False),
            options={"data_collator": collator, "processing_class": collator},
            max_steps=1,
        )
    except ValueError as error:
        return str(error)
    try:
        made.train()
    except ValueError as error:
        return str(error)
    return made.model


def assert_same(a: Any, b: Any, kind: str) -> None:
    if isinstance(a, str):
        assert a == b and kind in ("multi", "regression")
        assert "expected" in a or "use " in a, f"what to do is not said: {a}"
        return
    # transformers' language models and their losses go through float32
    exact = {"rtol": 1e-3, "atol": 2e-5} if kind == "causal" else {"rtol": 1e-6, "atol": 1e-8}
    assert_same_parameters(a, b, **exact)
    assert all(p.isfinite().all() for p in parameters(a).values())


def cases(*families: str) -> list[Any]:
    """Every method, kind and family."""
    return [
        pytest.param(
            name,
            family,
            kind,
            marks=[] if family == "gpt2" and name in QUICK[kind] else pytest.mark.slow,
        )
        for name in NAMES
        for family in families
        for kind in KINDS
        if kind != "causal" or family != "opt"
    ]


@pytest.mark.filterwarnings("error:the batches are padded on the left")
@pytest.mark.parametrize("name, family, kind", cases(*DECODERS))
def test_padding_side_and_width(tmp_path: Path, name: str, family: str, kind: str) -> None:
    right = run(tmp_path, name, family, kind, width=WIDTH + 2)
    assert_same(right, run(tmp_path, name, family, kind, side="left"), kind)
    refused = name == "label-smoothing" and kind in ("multi", "regression")
    assert isinstance(right, str) == refused


@pytest.mark.parametrize("name", DRAWLESS)
def test_order_of_rows(tmp_path: Path, name: str) -> None:
    first = run(tmp_path, name, "gpt2", "single")
    assert_same(first, run(tmp_path, name, "gpt2", "single", reverse=True), "single")


def test_a_head_that_reads_the_first_column_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="padded on the left, and BertForSequence.*padding_side"):
        run(tmp_path, "none", "bert", "single", side="left")
