"""A penalty of decisions per token is the mean over those the task decides, and over no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from jachess_ext.smoothness.decision import kl_divergence
from jachess_ext.training.methods import noise
from python_tests.smoothness.tiny_models import classifier


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


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_both_passes_have_the_same_decoder_inputs(family: str) -> None:
    model, given = seq2seq(family).eval(), batch(0)
    told = model(**noise.told_decoder(model, given)).logits
    assert not kl_divergence(model(**given).logits, told).abs().max() > 1e-6


@pytest.mark.parametrize("side", ["left", "right"])
def test_real_tokens_of_a_causal_model_without_labels(side: str) -> None:
    model = classifier("gpt2", head=tf.AutoModelForCausalLM)
    mask = torch.tensor([[1, 1, 1, 0]]) if side == "right" else torch.tensor([[0, 1, 1, 1]])
    apart = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    wanted = 5.5 if side == "right" else 55.0
    assert noise.row_mean(apart, {"attention_mask": mask}, model) == wanted
    prompted = torch.cat([torch.tensor([[1e6, 7.0]]), apart], 1)
    given = {"attention_mask": mask[:, mask[0].bool()]}
    assert noise.row_mean(prompted[:, :5], given, model) == (7.0 + 1 + 10) / 3


def test_a_batch_without_labels_has_no_penalty() -> None:
    given = batch(0)
    given["labels"].fill_(-100)
    assert noise.row_mean(torch.ones(2, 4), given, classifier("bert")) == 0.0
