"""A pass with replaced embeddings has the model's own outputs, loss, gradients and state."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration, ViTConfig, ViTModel

import jachess_ext as jx
from jachess_ext.smoothness.estimators import run_model
from python_tests.covering import pairs

from .tiny_models import (
    DECODERS,
    ENCODERS,
    PAD,
    classifier,
    parameter_gradients,
    token_batch,
    with_positions,
)

ENGINES = ("jet", "reverse")
SETTINGS: dict[str, Any] = {"weights": "uniform", "directions": 2, "dimensions": 2, "seed": 0}


def penalised(model: nn.Module, batch: dict, **settings: Any):
    return jx.JacHess(model, **(SETTINGS | {"layers": [1], "scope": "last"} | settings))(batch)


@pytest.mark.parametrize(
    "name, way",
    pairs(ENCODERS + DECODERS, [*product(["eager", "sdpa"], ["right", "left"], ENGINES)], each=2),
)
def test_output_loss_and_gradients_are_the_models_own(name: str, way: tuple[str, str, str]) -> None:
    attention, side, engine = way
    # Eager OPT and Llama cast masked scores to float32, where float64's minimum is −∞: left padding
    # gives their own forward pass NaN in float64.
    single = name in ("llama", "opt")
    model = classifier(name, attention=attention, dtype=torch.float32 if single else torch.float64)
    batch = token_batch([5, 3], side=side)
    plain = model(**batch, output_hidden_states=True)
    output = penalised(model, batch, engine=engine).model_output
    close = {"rtol": 1e-5, "atol": 1e-6} if single else {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(output.logits, plain.logits, **close)
    torch.testing.assert_close(output.loss, plain.loss, **close)
    real = batch["attention_mask"].bool()
    for ours, theirs in zip(output.hidden_states, plain.hidden_states, strict=True):
        torch.testing.assert_close(ours[real], theirs[real], **close)
    expected = parameter_gradients(plain.loss, model)
    for key, gradient in parameter_gradients(output.loss, model).items():
        torch.testing.assert_close(gradient, expected[key], **close, msg=lambda m, k=key: k + m)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_pool_at_the_last_real_token(name: str, side: str) -> None:
    """Given inputs_embeds a decoder cannot see padding and would pool at the last position."""
    model = classifier(name, dtype=torch.float32)
    batch = token_batch([5, 3], side=side)
    output = penalised(model, batch).model_output
    last = 2 if side == "right" else 4
    pooled = model.score(output.hidden_states[-1][1, last])
    torch.testing.assert_close(output.logits[1], pooled, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_embeddings_in_the_batch(name: str, engine: str) -> None:
    model = classifier(name)
    ids = token_batch([4, 4])
    x = model.get_input_embeddings()(ids["input_ids"]).detach().requires_grad_()
    batch = {"inputs_embeds": x[:1], "attention_mask": ids["attention_mask"][:1]}
    result = penalised(model, batch, engine=engine)
    same = {key: value[:1] for key, value in ids.items() if key != "labels"}
    by_ids = penalised(model, same, engine=engine)
    torch.testing.assert_close(result.loss, by_ids.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(result.model_output.logits, by_ids.model_output.logits)
    (gradient,) = torch.autograd.grad(result.loss, x)
    assert gradient[0].abs().sum() > 0 and gradient[1].eq(0).all()


def test_roberta_counts_positions_from_its_padding() -> None:
    """RoBERTa derives position ids from input_ids; with inputs_embeds it could not."""
    model = classifier("roberta")
    short, padded = token_batch([3]), token_batch([3], side="left", total=6)
    results = [penalised(model, batch) for batch in (short, padded)]
    torch.testing.assert_close(results[0].loss, results[1].loss, rtol=1e-10, atol=0)
    states = [result.model_output.hidden_states[-1][0, -3:] for result in results]
    torch.testing.assert_close(states[0], states[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("training", [True, False])
def test_modes_buffers_and_parameters_are_untouched(training: bool, engine: str) -> None:
    model = classifier("bert").train(training)
    model.bert.embeddings.eval()
    modes = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    penalised(model, token_batch([4, 3]), engine=engine)
    assert [module.training for module in model.modules()] == modes
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[key], value) for key, value in state.items())
    assert all(p.grad is None for p in model.parameters())


def test_the_batch_is_not_changed() -> None:
    batch = token_batch([4, 3])
    copy = {key: value.clone() for key, value in batch.items()}
    penalised(classifier("gpt2"), batch)
    assert batch.keys() == copy.keys()
    assert all(torch.equal(batch[key], value) for key, value in copy.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_has_one_mask_for_all_streams(engine: str) -> None:
    """With the generator in one state, output and loss in training mode are the plain pass's."""
    model = classifier("bert", dropout=0.3).train()
    batch = token_batch([5, 3])
    torch.manual_seed(3)
    plain = model(**batch)
    torch.manual_seed(3)
    output = penalised(model, batch, engine=engine).model_output
    torch.testing.assert_close(output.loss, plain.loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_encoder_decoder_is_refused(engine: str) -> None:
    sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    batch = {"input_ids": torch.tensor([[3, 4, 5]]), "labels": torch.tensor([[3, 4]])}
    with pytest.raises(ValueError, match=r"encoder-decoder.*get_encoder\(\)"):
        jx.smoothness(model, batch, engine=engine)
    result = jx.smoothness(model.get_encoder(), {"input_ids": batch["input_ids"]}, engine=engine)
    assert result.jacobian.shape == (1,)


class NoStates(nn.Module):
    """A classifier outside transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed(input_ids)


class IgnoresTheSwitch(NoStates):
    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: torch.Tensor, **_: Any) -> dict:  # type: ignore[override]
        return {"logits": self.embed(input_ids).sum(1)}


class NoEmbeddingLayer(NoStates):
    def forward(self, input_ids: torch.Tensor, output_hidden_states: bool = False) -> dict:  # type: ignore[override]
        x = self.embed(input_ids)
        return {"hidden_states": (x, x.tanh())}


class UnusedEmbeddingLayer(NoEmbeddingLayer):
    def get_input_embeddings(self) -> nn.Module:
        return nn.Embedding(20, 4)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "model, sentence",
    [
        (NoStates, "no hidden states; expected a transformers model"),
        (IgnoresTheSwitch, "no hidden states; expected a transformers model"),
        (NoEmbeddingLayer, r"NoEmbeddingLayer has no get_input_embeddings\(\); pass inputs_embeds"),
        (UnusedEmbeddingLayer, r"did not call the layer that get_input_embeddings\(\) returns"),
    ],
)
def test_models_that_cannot_be_measured(model: type, sentence: str, engine: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        jx.smoothness(model(), {"input_ids": torch.tensor([[3, 4]])}, engine=engine)


def test_a_model_for_images_is_refused() -> None:
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8)
    with pytest.raises(ValueError, match="neither input_ids nor inputs_embeds"):
        jx.smoothness(ViTModel(config), {"pixel_values": torch.zeros(1, 3, 8, 8)})


def test_no_head_on_primals_for_logits() -> None:
    """With through_head the logits are jets, and the loss is plain all the same."""
    model = classifier("gpt2")
    batch = token_batch([4, 2])
    plain = model(**batch)
    result = penalised(model, batch, layers="logits", scope="all")
    torch.testing.assert_close(result.model_output.loss, plain.loss, rtol=1e-12, atol=0)
    assert type(result.model_output.loss) is torch.Tensor
    assert type(result.model_output.logits) is torch.Tensor


def test_run_model_hands_out_the_embeddings() -> None:
    model, batch = classifier("bert"), with_positions(token_batch([3, 2], total=4))
    assert (batch["input_ids"] == PAD).any()
    result = run_model(model, batch, lambda x, mask: x)
    torch.testing.assert_close(result.embeddings, model.get_input_embeddings()(batch["input_ids"]))
    assert torch.equal(result.mask, batch["attention_mask"].bool())
