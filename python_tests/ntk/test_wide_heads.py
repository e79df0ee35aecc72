"""Heads over a vocabulary compute what f reads and no more, and the kernel is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

import jachess_ext as jx
from jachess_ext.lab.demo import peak_mebibytes
from jachess_ext.ntk import measure_ntk
from jachess_ext.ntk import outputs as outputs_module
from jachess_ext.ntk.outputs import OutputMap, Samples

from ..smoothness.tiny_models import randomise
from .models import END, LANGUAGE_MODELS, PAD, VOCABULARY, language_batch, language_model
from .oracles import error

LENGTHS = [7, 4, 5]


def _narrowed(model: nn.Module, outputs: Any, samples: dict[str, Any]) -> OutputMap:
    return OutputMap(model, outputs).with_narrow_head([Samples.of(samples)])


@pytest.fixture
def whole_heads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel by way of whole logits."""

    def compute(*arguments: Any, **settings: Any) -> Tensor:
        with monkeypatch.context() as patched:
            patched.setattr(outputs_module, "output_head", lambda model: None)
            return jx.ntk(*arguments, **settings)

    return compute


@pytest.mark.parametrize(
    ("name", "tied", "outputs"),
    [
        *((name, True, "label") for name in LANGUAGE_MODELS),
        *(("bert", False, "label"), ("bart", False, "label"), ("gpt2", True, 3), ("t5", True, 3)),
    ],
)
def test_every_family_narrows_its_head(
    name: str, tied: bool, outputs: Any, whole_heads: Any
) -> None:
    model, samples = language_model(name, tied), language_batch(LENGTHS)
    narrow = _narrowed(model, outputs, samples)
    assert narrow.is_narrow
    with torch.no_grad():
        torch.testing.assert_close(
            narrow(samples), OutputMap(model, outputs)(samples), rtol=1e-12, atol=1e-12
        )
    found = jx.ntk(model, samples, outputs=outputs)
    # transformers' norms round cotangents to float32, whose size differs between the two ways
    assert error(found, whole_heads(model, samples, outputs=outputs)) < 1e-7


def _gemma() -> nn.Module:
    """Its logits are capped: 30 tanh(z / 30)."""
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        intermediate_size=16,
        final_logit_softcapping=0.5,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=END,
    )
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config)
    randomise(model)
    return model.double().eval()


def test_capped_logits(whole_heads: Any) -> None:
    model, samples = _gemma(), language_batch(LENGTHS)
    assert _narrowed(model, "label", samples).is_narrow
    found = jx.ntk(model, samples, outputs="label")
    assert error(found, whole_heads(model, samples, outputs="label")) < 1e-7


class Normalised(nn.Module):
    """Log probabilities: every logit depends on all of the words'."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(input_ids))).log_softmax(-1)


def test_logits_that_depend_on_all_words_stay_whole(whole_heads: Any) -> None:
    torch.manual_seed(2)
    model, samples = Normalised().double(), language_batch(LENGTHS)
    assert not _narrowed(model, "label", samples).is_narrow
    assert _narrowed(model, "sum", samples).is_narrow  # one token alone is enough here
    found = jx.ntk(model, samples, outputs="label")
    assert torch.equal(found, whole_heads(model, samples, outputs="label"))


@pytest.mark.parametrize("name", ["gpt2", "bert", "bart"])
def test_label_takes_no_dense_cotangent(name: str) -> None:
    """Rows of the head's gradient, for the words that are labels, whether tied or not."""
    for tied in (True, False):
        model, samples = language_model(name, tied), language_batch(LENGTHS)
        report = measure_ntk(model, samples, outputs="label").report
        head = model.get_output_embeddings()
        names = {id(p): n for n, p in model.named_parameters()}
        assert report.form_of(names[id(head.weight)]) == "matches"
        if head.bias is not None:
            assert report.form_of(names[id(head.bias)]) == "matches"


def test_the_model_is_left_as_it_was() -> None:
    model, samples = language_model("bart", True), language_batch(LENGTHS)
    constant, logits = model.final_logits_bias, model(**samples).logits
    jx.ntk(model, samples, outputs="label")
    assert model.final_logits_bias is constant
    assert "forward" not in vars(model.get_output_embeddings())
    assert torch.equal(model(**samples).logits, logits)


def test_a_constant_that_is_not_zero_stays(whole_heads: Any) -> None:
    model, samples = language_model("bart", True), language_batch(LENGTHS)
    model.final_logits_bias.normal_()
    found = jx.ntk(model, samples, outputs="label")
    assert error(found, whole_heads(model, samples, outputs="label")) < 1e-7


def test_a_label_beyond_the_vocabulary_is_refused_wherever_it_stands() -> None:
    model, samples = language_model("gpt2", True), language_batch(LENGTHS)
    samples["labels"][2, 3] = VOCABULARY
    with pytest.raises(ValueError, match=f"label {VOCABULARY} is not one of the {VOCABULARY}"):
        jx.ntk(model, samples, outputs="label")


def test_memory_does_not_hold_logits_of_all_tokens() -> None:
    """16 × 64 × 10,000 logits alone are 39 MiB; the whole kernel takes less."""
    config = GPT2Config(vocab_size=10_000, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    model = GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 10_000, (16, 64))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    assert peak_mebibytes(lambda: jx.ntk(model, batch, outputs="label")) < 39
