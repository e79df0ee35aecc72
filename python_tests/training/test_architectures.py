"""Every method acts on every architecture, or an error says why not; settings are 1,000-fold."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from tokenizers import pre_tokenizers
from torch import Tensor, nn

from jachess_ext.models import gradient_of_tokens, hooked_embeddings, leaf_embeddings
from jachess_ext.training import METHODS
from jachess_ext.training.corruption import perturbed_embeddings
from python_tests.covering import pairs
from python_tests.smoothness.tiny_models import LABELS, VOCABULARY, classifier, randomise

from .runs import parameters, tensors, trainer
from .test_known_answers import word_tokenizer

WORDS = ["<pad>", "<mask>", "<eos>", *(f"word{chr(ord('a') + n)}" for n in range(VOCABULARY - 3))]
TOKENIZER = word_tokenizer(WORDS, mask_token="<mask>", eos_token="<eos>")
TOKENIZER.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()

OURS = ("jacobian", "cross-holder", "published", "jachess")
LOUD: dict[str, dict[str, Any]] = {
    "none": {},
    "recommended": {},
    "l2": {"strength": 1000.0},
    "tapt": {"tapt_lr": 1.0, "tapt_epochs": 1.0},
    "sam": {"rho": 1000.0},
    "gradient-norm": {"strength": 1.0},
    "label-smoothing": {"smoothing": 0.9},
    "r3f": {"strength": 1000.0, "noise": 1000.0},
    "corrupt-augment": {"swapped": 0.9, "unknown": 0.0},
    "corrupt-consistency": {"strength": 1000.0},
    "attack-augment": {"strength": 1000.0, "swapped": 0.9},
    **{name: {"strength": 1000.0} for name in OURS},
}
HOOKED = ("r3f", "attack-augment", "jachess")
"""Methods that reach the token embeddings within the model; the others are slow tests."""
SWAPPING = ("recommended", "corrupt-augment", "corrupt-consistency", "attack-augment")

_BART = {
    **{f"{stack}_layers": 1 for stack in ("encoder", "decoder")},
    **{f"{stack}_attention_heads": 2 for stack in ("encoder", "decoder")},
    **{f"{stack}_ffn_dim": 16 for stack in ("encoder", "decoder")},
    **{"d_model": 12, "max_position_embeddings": 16, "dropout": 0.1, "eos_token_id": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 2},
}
_T5 = {
    **{"d_model": 12, "d_kv": 6, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.1},
    **{"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0},
}


def stacks(kind: Any, config: Any, sizes: dict[str, Any], **more: Any) -> nn.Module:
    torch.manual_seed(0)
    model = kind(config(vocab_size=VOCABULARY, num_labels=LABELS, **sizes, **more))
    randomise(model)
    return model


ARCHITECTURES: dict[str, Any] = {
    "bert": lambda: classifier("bert", dropout=0.1),
    "bert-tokens": lambda: classifier("bert", dropout=0.1, head=tf.AutoModelForTokenClassification),
    "gpt2": lambda: classifier("gpt2", dropout=0.1),
    "llama-causal": lambda: classifier("llama", dropout=0.1, head=tf.AutoModelForCausalLM),
    "bart": lambda: stacks(tf.BartForSequenceClassification, tf.BartConfig, _BART),
    "bart-untied": lambda: stacks(
        tf.BartForSequenceClassification, tf.BartConfig, _BART, tie_word_embeddings=False
    ),
    "bart-seq2seq": lambda: stacks(tf.BartForConditionalGeneration, tf.BartConfig, _BART),
    "t5": lambda: stacks(tf.T5ForSequenceClassification, tf.T5Config, _T5),
    "t5-tokens": lambda: stacks(tf.T5ForTokenClassification, tf.T5Config, _T5),
    "t5-seq2seq": lambda: stacks(tf.T5ForConditionalGeneration, tf.T5Config, _T5),
}


def two_berts() -> nn.Module:
    encoder, decoder = (classifier("bert", dropout=0.1).config for _ in range(2))
    decoder.is_decoder = decoder.add_cross_attention = True
    config = tf.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    torch.manual_seed(0)
    model = tf.EncoderDecoderModel(config)
    randomise(model)
    return model


ARCHITECTURES["bert2bert-seq2seq"] = two_berts
EMBEDDED = ("bert", "llama-causal", "bart-seq2seq", "t5-tokens", "t5-seq2seq")
"""Architectures that take inputs_embeds in training."""
TWO_STACKS = ("bart", "bart-untied", "bart-seq2seq", "bert2bert-seq2seq", "t5", "t5-seq2seq")
CASES = [*ARCHITECTURES, *(f"{name}+embeds" for name in EMBEDDED)]


def rows_of(case: str, lengths: tuple[int, ...] = (6,) * 8) -> list[dict]:
    """Rows that end with the token 2, by which BART and T5 find the end."""
    name, _, embeds = case.partition("+")
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number, length in enumerate(lengths):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        ids[-1] = 2
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "tokens" in name:
            row["labels"] = ids % LABELS
        elif "causal" in name:
            row["labels"] = ids
        elif "seq2seq" in name:
            row["labels"] = ids.flip(0)[:4]
            row["decoder_input_ids"] = torch.cat([ids.new_tensor([2]), row["labels"][:-1]])
        else:
            row["labels"] = torch.tensor(number % LABELS)
        if embeds:
            del row["input_ids"]
            row["inputs_embeds"] = torch.randn(length, 12, generator=generator)
        rows.append(row)
    return rows


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def run(folder: Path, case: str, method: str, **settings: Any) -> tuple[list[float], Tensor]:
    """The losses logged, and all weights at the end."""
    made = trainer(
        folder,
        METHODS[method](**LOUD[method]),
        model=ARCHITECTURES[case.partition("+")[0]]().float(),
        data=settings.pop("data", None) or rows_of(case),
        unlabelled=rows_of(case),
        options={"processing_class": TOKENIZER, "data_collator": tf.default_data_collator},
        **({"optim": "sgd", "learning_rate": 0.01, "max_grad_norm": 1.0} | settings),
    )
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return losses, torch.cat([p.flatten() for p in parameters(made.model).values()])


@cache
def plain(case: str) -> tuple[list[float], Tensor]:
    return run(Path(), case, "none")


def refusal(case: str, method: str) -> str | None:
    """What the error says where a method cannot act; None where it acts."""
    name, _, embeds = case.partition("+")
    if method == "tapt" and name.startswith("t5"):
        return "needs a language model of the family 't5'"
    if method == "tapt" and name.startswith("bert2bert"):
        return "needs a language model of the family 'encoder-decoder'"
    if embeds and method in (*SWAPPING, "tapt"):
        return "input_ids"
    if method in OURS and name in TWO_STACKS:
        return "embeds its tokens more than once"
    return None


@pytest.mark.parametrize(
    "method, case",
    pairs(
        [m for m in LOUD if m != "none"], CASES, each=2, slow=[m for m in LOUD if m not in HOOKED]
    ),
)
def test_every_method_acts_or_says_why_not(tmp_path: Path, method: str, case: str) -> None:
    sentence = refusal(case, method)
    if sentence is not None:
        with pytest.raises(ValueError, match=sentence):
            run(tmp_path, case, method)
        return
    (losses, weights), (without, before) = run(tmp_path, case, method), plain(case)
    assert weights.isfinite().all()
    moved = [abs(a - b) / b for a, b in zip(losses, without, strict=True)]
    assert max(moved) > 1e-3 or (weights - before).norm() > 1e-4 * before.norm()
    if method in HOOKED:
        assert moved[0] > 1e-3


@pytest.mark.parametrize("method", HOOKED)
def test_prompt_tuning(tmp_path: Path, method: str) -> None:
    def prompted() -> Any:
        config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
        return peft.get_peft_model(classifier("bert", dtype=torch.float32), config)

    def loss(name: str) -> float:
        torch.manual_seed(0)
        made = trainer(
            tmp_path,
            METHODS[name](**LOUD[name]),
            model=prompted(),
            data=rows_of("bert"),
            options={"processing_class": TOKENIZER, "data_collator": tf.default_data_collator},
            max_steps=1,
        )
        made.train()
        return made.state.log_history[0]["loss"]

    if method == "jachess":
        with pytest.raises(ValueError, match=r"\(prompt tuning\) cannot be measured"):
            loss(method)
    else:
        assert abs(loss(method) - loss("none")) > 1e-3


@pytest.mark.parametrize("case", ["bart-seq2seq", "t5-seq2seq", "bart-seq2seq+embeds"])
def test_noise_of_both_stacks(case: str) -> None:
    """The model's own loss of embeddings that are moved by as much."""

    def moved(x: Tensor) -> Tensor:
        return x + torch.linspace(-1, 1, x.numel()).reshape(x.shape)

    model = without_dropout(ARCHITECTURES[case.partition("+")[0]]().double())
    batch = tensors(rows_of(case, (6, 6)))
    if "+" in case:
        batch["inputs_embeds"] = batch["inputs_embeds"].double()
    with hooked_embeddings(model, lambda x, real: moved(x), batch) as noisy:
        loss = model.train()(**noisy).loss
    table = model.get_input_embeddings()
    x = batch.pop("inputs_embeds") if "+" in case else table(batch.pop("input_ids"))
    y = table(batch.pop("decoder_input_ids"))
    expected = model(**batch, inputs_embeds=moved(x), decoder_inputs_embeds=moved(y)).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", ["bart", "t5", "bert", "t5-tokens"])
def test_gradient_of_tokens(case: str) -> None:
    """Every token stands in one place, so that its row of the table has its whole gradient."""
    model = ARCHITECTURES[case]().double().eval()
    ids = torch.tensor([[3, 4, 5, 6, 2]])
    labels = ids % LABELS if "tokens" in case else torch.tensor([1])
    model(input_ids=ids, labels=labels).loss.backward()
    weights = model.get_input_embeddings().weight
    assert weights.grad is not None
    wanted = weights.grad[ids]
    with leaf_embeddings(model, {"input_ids": ids, "labels": labels}) as (batch, leaves):
        loss = model(**batch).loss
    start = model.config.decoder_start_token_id if case == "bart" else None
    if start == 2:  # the decoder's first token is the row's last one
        wanted[:, -1] -= torch.autograd.grad(loss, leaves[1], retain_graph=True)[0][:, 0]
    torch.testing.assert_close(gradient_of_tokens(loss, leaves), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", ["gpt2", "bart-untied", "t5", "bert2bert-seq2seq"])
def test_noise_at_evaluation(case: str) -> None:
    model = ARCHITECTURES[case]().eval()
    row = {n: v.unsqueeze(0) for n, v in rows_of(case)[0].items()}
    outputs = []
    for delta in (0.0, 1000.0):
        with torch.no_grad(), perturbed_embeddings(model, delta, torch.Generator()):
            outputs.append(model(**row).logits)
    assert (outputs[1] - outputs[0]).abs().max() > 1e-2
    never = perturbed_embeddings(model, 1.0, torch.Generator())
    with pytest.raises(ValueError, match="did not call the layer"), never:
        pass


@pytest.mark.parametrize("stack", ["encoder", "both"])
def test_a_stack_that_is_not_reached(tmp_path: Path, stack: str) -> None:
    """Noise on the decoder alone would be half a method."""
    model = ARCHITECTURES["bart"]()
    stacks = [model.model.encoder] + ([model.model.decoder] if stack == "both" else [])
    for part in stacks:
        part.get_input_embeddings = lambda: nn.Embedding(3, 3)
    with pytest.raises(ValueError, match="did not call the layer that get_input_embeddings"):
        trainer(tmp_path, "r3f", model=model, data=rows_of("bart")).train()


def test_every_method_is_tested_here() -> None:
    own = {name for name, kind in METHODS.items() if kind.__module__.startswith("jachess_ext")}
    assert own == set(LOUD)
