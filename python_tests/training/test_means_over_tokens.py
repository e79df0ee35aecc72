"""Penalties of logits per token are means over the tokens that the task predicts, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf

import jachess_ext as jx
from jachess_ext.models import without_labels
from jachess_ext.smoothness import estimators
from jachess_ext.training import METHODS
from jachess_ext.training.batches import add_decoder_inputs
from jachess_ext.training.methods import noise
from python_tests.covering import pairs
from python_tests.smoothness.tiny_models import classifier

from .runs import trainer
from .test_architectures import (
    ARCHITECTURES,
    LOUD,
    OURS,
    TOKENIZER,
    TWO_STACKS,
    rows_of,
    without_dropout,
)


def seq2seq(family: str) -> Any:
    torch.manual_seed(0)
    common = {"vocab_size": 20, "d_model": 12, "pad_token_id": 0, "decoder_start_token_id": 2}
    if family == "t5":
        sizes = {"d_kv": 6, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
        return tf.T5ForConditionalGeneration(tf.T5Config(**common, **sizes))
    sides = {
        f"{s}_{n}": v
        for s in ("encoder", "decoder")
        for n, v in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
    }
    return tf.BartForConditionalGeneration(tf.BartConfig(**common, **sides, dropout=0.0))


def batch(more: int) -> dict[str, torch.Tensor]:
    """Inputs and labels with `more` columns of padding."""
    pad = torch.nn.functional.pad
    ids = torch.tensor([[4, 5, 6, 7], [8, 9, 0, 0]])
    labels = torch.tensor([[5, 6, 7, 3], [9, 3, -100, -100]])
    return {
        "input_ids": pad(ids, (0, more)),
        "attention_mask": pad((ids != 0).long(), (0, more)),
        "labels": pad(labels, (0, more), value=-100),
    }


@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "bert"])
@pytest.mark.parametrize("more", [0, 3])
def test_mean_over_the_labelled(family: str, more: int) -> None:
    heads = {"gpt2": tf.AutoModelForCausalLM, "bert": tf.AutoModelForTokenClassification}
    model = classifier(family, head=heads[family]) if family in heads else seq2seq(family)
    given = batch(more)
    apart = torch.arange(1.0, 1 + given["labels"].numel()).view_as(given["labels"]).square()
    shift = family == "gpt2"
    wanted = [
        apart[row, column - shift]
        for row, column in (given["labels"] != -100).nonzero().tolist()
        if column >= shift
    ]
    assert noise.row_mean(apart, given, model) == torch.stack(wanted).mean()
    prompted = torch.cat([torch.full((2, 5), 1e6), apart], 1)
    if not shift:
        assert noise.row_mean(prompted, given, model) == torch.stack(wanted).mean()


@pytest.mark.parametrize("side", ["left", "right"])
def test_real_tokens_of_a_causal_model_without_labels(side: str) -> None:
    model = classifier("gpt2", head=tf.AutoModelForCausalLM)
    mask = torch.tensor([[1, 1, 1, 0]]) if side == "right" else torch.tensor([[0, 1, 1, 1]])
    apart = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    wanted = 5.5 if side == "right" else 55.0
    assert noise.row_mean(apart, {"input_ids": mask, "attention_mask": mask}, model) == wanted
    prompted = torch.cat([torch.tensor([[1e6, 7.0]]), apart], 1)
    given = {name: mask[:, mask[0].bool()] for name in ("input_ids", "attention_mask")}
    assert noise.row_mean(prompted[:, :5], given, model) == (7.0 + 1 + 10) / 3


def test_a_batch_without_labels_has_no_penalty() -> None:
    given = batch(0)
    given["labels"].fill_(-100)
    assert noise.row_mean(torch.ones(2, 4), given, classifier("bert")) == 0.0


TRIED = {
    **{name: LOUD[name] for name in LOUD if name not in ("tapt", "recommended", *OURS)},
    "label-smoothing": {"smoothing": 0.3},
    "r3f": {"strength": 1.0, "noise": 0.5},
    **{name: {"swapped": 0.5} for name in ("corrupt-augment", "corrupt-consistency")},
    "attack-augment": {"swapped": 0.5, "synonyms": "embeddings"},
    **{name: {"strength": 1.0} for name in OURS},
}
CLIMBING = ("sam", "gradient-norm", "attack-augment")
"""Methods whose loss is no mean over decisions: what is added to one depends on the others."""
HEADS = ("bert", "bert-tokens", "llama-causal", "bart", "bart-seq2seq", "t5-seq2seq", "t5-tokens")


def padded(rows: list[dict], inputs: int, labels: int) -> dict[str, torch.Tensor]:
    """Collate rows as they are, with so many columns of padding."""
    batch: dict[str, torch.Tensor] = {}
    for name in rows[0]:
        values = [torch.as_tensor(row[name]) for row in rows]
        if values[0].ndim == 0:
            batch[name] = torch.stack(values)
            continue
        more = inputs if name in ("input_ids", "attention_mask") else labels
        width = max(len(value) for value in values) + more
        fill = -100 if name == "labels" else 0
        batch[name] = torch.stack(
            [torch.nn.functional.pad(v, (0, width - len(v)), value=fill) for v in values]
        )
    return batch


def loss_of(
    folder: Path, method: str, case: str, rows: list[dict], *, inputs: int = 0, labels: int = 0
) -> float:
    """The first loss, without dropout."""
    made = trainer(
        folder,
        METHODS[method](**TRIED[method]),
        model=without_dropout(ARCHITECTURES[case]().double()),
        data=rows,
        options={
            "processing_class": TOKENIZER,
            "data_collator": lambda rows: padded(rows, inputs, labels),
        },
        max_steps=1,
    )
    made.train()
    return made.state.log_history[0]["loss"]


def rows_for(case: str) -> list[dict]:
    rows = rows_of(case, (6, 4, 5, 6))
    for row in rows:
        row.pop("decoder_input_ids", None)
    return rows


def refused(method: str, case: str) -> str | None:
    return "embeds its tokens more than once" if method in OURS and case in TWO_STACKS else None


@pytest.fixture
def drawn_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directions are those of a wider batch, of which the batch's own columns are taken."""

    def wide(draw: Any) -> Any:
        def drawn(like: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            wider = like.new_zeros(like.shape[0], 16, *like.shape[2:])
            return draw(wider, *args, **kwargs)[..., : like.shape[1], :]

        return drawn

    monkeypatch.setattr(estimators, "draw_directions", wide(estimators.draw_directions))


@pytest.mark.parametrize("method, case", pairs(TRIED, HEADS, each=2))
@pytest.mark.usefixtures("drawn_per_token")
def test_padding_changes_no_loss(tmp_path: Path, method: str, case: str) -> None:
    """Of the inputs alone, of the labels alone; of tokens that have labels, both."""
    rows = rows_for(case)
    if (sentence := refused(method, case)) is not None:
        with pytest.raises(ValueError, match=sentence):
            loss_of(tmp_path, method, case, rows)
        return
    wanted = loss_of(tmp_path, method, case, rows)
    apart = "seq2seq" in case
    for inputs, labels in ((3, 0), (0, 3)) if apart else ((3, 3),):
        found = loss_of(tmp_path, method, case, rows, inputs=inputs, labels=labels)
        assert found == pytest.approx(wanted, rel=1e-5), (inputs, labels)


@pytest.mark.parametrize(
    "method, case",
    pairs(
        [name for name in TRIED if name not in CLIMBING],
        [case for case in HEADS if case not in ("bert", "bart")],
    ),
)
@pytest.mark.usefixtures("drawn_per_token")
def test_tokens_without_a_label_do_not_count(tmp_path: Path, method: str, case: str) -> None:
    """The loss of some tokens and that of the others have the loss of all for their mean."""
    if refused(method, case) is not None:
        pytest.skip("refused, which the test of padding sees")
    rows = rows_of(case, (6, 6, 6, 6))
    for row in rows:
        if "decoder_input_ids" in row:
            row["decoder_attention_mask"] = torch.ones_like(row["decoder_input_ids"])
    losses, counts = [], []
    for keeps in (lambda at: at % 3 == 0, lambda at: at % 3 > 0, lambda at: at >= 0):
        some = []
        for row in rows:
            at = torch.arange(len(row["labels"]))
            some.append({**row, "labels": row["labels"].masked_fill(~keeps(at), -100)})
        losses.append(loss_of(tmp_path, method, case, some))
        first = int("causal" in case)
        counts.append(sum(int((row["labels"][first:] != -100).sum()) for row in some))
    mean = (counts[0] * losses[0] + counts[1] * losses[1]) / counts[2]
    assert losses[2] == pytest.approx(mean, rel=1e-5)


def translator(name: str) -> Any:
    """A model of transformers that makes its decoder's inputs from the labels."""
    sizes: dict[str, Any] = {f"{side}_layers": 1 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 16 for side in ("encoder", "decoder")}
    sizes |= {"vocab_size": 20, "d_model": 12, "max_position_embeddings": 32, "dropout": 0.0}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    kind = getattr(tf, f"{name}MTModel" if name == "Marian" else f"{name}ForConditionalGeneration")
    sizes |= {
        "NllbMoe": {"num_experts": 2, "expert_capacity": 4},
        "Whisper": {"num_mel_bins": 4, "max_source_positions": 4, "max_target_positions": 16},
        "Speech2Text": {"input_feat_per_channel": 4, "conv_channels": 8},
        "FSMT": {"langs": ["en", "de"], "src_vocab_size": 20, "tgt_vocab_size": 20},
        "LED": {"attention_window": 4},
    }.get(name, {})
    torch.manual_seed(0)
    return kind(getattr(tf, f"{name}Config")(**sizes)).eval()


TRANSLATORS = ("M2M100", "Blenderbot", "NllbMoe", "Whisper", "Speech2Text")
WITH_A_METHOD = ("Marian", "MBart", "PLBart", "LED")


@pytest.mark.parametrize("name", [*TRANSLATORS, *WITH_A_METHOD])
def test_a_pass_without_labels_has_the_same_decoder_inputs(name: str) -> None:
    model, given = translator(name), batch(0)
    if name in ("Whisper", "Speech2Text"):
        shape = (2, 4, 8) if name == "Whisper" else (2, 16, 4)
        given = {"input_features": torch.randn(shape), "labels": given["labels"]}
    stated = add_decoder_inputs(model, given)
    assert stated.keys() - given.keys() == {"decoder_input_ids"}
    wanted, found = model(**given).logits, model(**without_labels(stated)).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["labels", "attention_mask"])
@pytest.mark.parametrize("width", [3, 9])
def test_labels_of_other_tokens_than_the_logits_are_refused(name: str, width: int) -> None:
    """As in CTC, whose logits are of frames: neither cropped nor taken for a prompt's."""
    given = {"input_values": torch.ones(2, 50), name: torch.ones(2, width, dtype=torch.long)}
    with pytest.raises(ValueError, match="does not match the model's logits"):
        noise.row_mean(torch.ones(2, 6), given, classifier("bert"))
    if width > 6:
        given["input_ids"] = given[name]
        with pytest.raises(ValueError, match="does not match the model's logits"):
            noise.row_mean(torch.ones(2, 6), given, classifier("bert"))


@pytest.mark.parametrize("shape", [(), (2, 3, 4)])
def test_logits_of_neither_rows_nor_tokens_are_refused(shape: tuple[int, ...]) -> None:
    """As in segmentation, whose logits are [B, C, H, W]: their classes are not the last."""
    with pytest.raises(ValueError, match=f"logits have {len(shape) + 1} dimensions"):
        noise.row_mean(
            torch.ones(shape), {"pixel_values": torch.ones(2, 3, 8, 8)}, classifier("bert")
        )


def test_adding_decoder_inputs_changes_no_label() -> None:
    """FSMT's method writes padding over labels of -100, which then would count."""
    given = batch(3)
    before = given["labels"].clone()
    stated = add_decoder_inputs(translator("FSMT"), given)
    assert torch.equal(stated["labels"], before)
    assert stated["decoder_input_ids"].min() >= 0


def prompted(task: str) -> Any:
    kinds = {"CAUSAL_LM": "llama-causal", "SEQ_CLS": "bert"}
    torch.manual_seed(0)
    config = peft.PromptTuningConfig(task_type=task, num_virtual_tokens=2)
    return peft.get_peft_model(without_dropout(ARCHITECTURES[kinds[task]]().double()), config)


@pytest.mark.parametrize("method", ["label-smoothing", "recommended"])
@pytest.mark.parametrize("task", ["SEQ_CLS", "CAUSAL_LM"])
def test_smoothing_with_a_prompt(tmp_path: Path, method: str, task: str) -> None:
    """A sentence, or for `recommended` what is left of it, with a warning."""
    case = "bert" if task == "SEQ_CLS" else "llama-causal"
    given = {
        "model": prompted(task),
        "data": rows_of(case),
        "unlabelled": rows_of(case),
        "options": {"processing_class": TOKENIZER, "data_collator": tf.default_data_collator},
        "max_steps": 1,
    }
    if method == "label-smoothing":
        with pytest.raises(ValueError, match=r"prompt tuning.*use smoothing=0 or another method"):
            trainer(tmp_path, method, **given)
        return
    with pytest.warns(UserWarning, match="leaves out label smoothing: with prompt tuning"):
        made = trainer(tmp_path, method, **given)
    assert made.train().training_loss > 0


def test_ntk_of_a_prompt() -> None:
    with pytest.raises(ValueError, match=r"learned by peft \(prompt.*use LoRA"):
        jx.ntk(prompted("SEQ_CLS").eval(), {"input_ids": torch.tensor([[4, 5], [6, 7]])})
