"""`attn_implementation="jachess"`, against the same models on torch's math attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vmap

import jachess_ext as jx
from python_tests.models.oracles import math_attention

transformers = pytest.importorskip("transformers")
pytest.importorskip("jachess_ext.training")

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
GROUPED = SMALL | {"num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral": ("Mistral", GROUPED | {"sliding_window": 4}),
    "Bert": ("Bert", SMALL | NO_DROPOUT),
    "ModernBert": ("ModernBert", SMALL | {"local_attention": 4, "pad_token_id": 0}),
}
IDS = torch.randint(3, 40, (3, 10), generator=torch.Generator().manual_seed(0))
PADDING = torch.ones(3, 10, dtype=torch.long)
PADDING[1, 7:] = 0
PADDING[2, 4:] = 0
Weights = dict[str, Tensor]


def model_of(name: str, implementation: str) -> torch.nn.Module:
    family, settings = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}Model")._from_config(
        config, attn_implementation=implementation
    )
    return model.double().eval()  # type: ignore[no-any-return]


def program(name: str, implementation: str) -> tuple[Callable[..., Tensor], Weights, Weights]:
    """Return a loss of weights, ids and padding; the weights; and a direction."""
    model = model_of(name, implementation)
    weights = {key: p.detach() for key, p in model.named_parameters() if "pooler" not in key}
    along = {key: (50 * p).cos() for key, p in weights.items()}

    def loss(weights: Weights, ids: Tensor = IDS, padding: Tensor = PADDING) -> Tensor:
        y = functional_call(model, weights, kwargs={"input_ids": ids, "attention_mask": padding})[0]
        return (y.sin() * padding[..., None]).mean()

    return loss, weights, along


def flat(weights: Weights) -> Tensor:
    return torch.cat([x.flatten() for x in weights.values()])


def by_double_backward(loss: Callable[..., Tensor], weights: Weights, along: Weights) -> Weights:
    leaves = {key: x.clone().requires_grad_() for key, x in weights.items()}
    slopes = torch.autograd.grad(loss(leaves), list(leaves.values()), create_graph=True)
    product = torch.stack([(g * along[key]).sum() for g, key in zip(slopes, leaves, strict=True)])
    products = torch.autograd.grad(product.sum(), list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, products, strict=True))


PRODUCTS: dict[str, Callable[[Callable[..., Tensor], Weights, Weights], Weights]] = {
    "jvp(grad)": lambda loss, weights, along: jvp(grad(loss), (weights,), (along,))[1],
    "jvp(jacrev)": lambda loss, weights, along: jvp(jacrev(loss), (weights,), (along,))[1],
    "grad(jvp)": lambda loss, weights, along: grad(
        lambda weights: jvp(loss, (weights,), (along,))[1]
    )(weights),
    "create_graph": by_double_backward,
}


@cache
def expected_product(name: str) -> Tensor:
    with math_attention():
        return flat(by_double_backward(*program(name, "sdpa")))


@pytest.mark.parametrize("way", PRODUCTS)
@pytest.mark.parametrize("name", MODELS)
def test_hessian_products(name: str, way: str) -> None:
    expected = expected_product(name)
    with_layer_norm = name != "Mistral" and way != "create_graph"
    if with_layer_norm:
        with pytest.raises(RuntimeError, match=r"within jx\.differentiable"):
            PRODUCTS[way](*program(name, "jachess"))
        with jx.differentiable():
            result = flat(PRODUCTS[way](*program(name, "jachess")))
    else:
        result = flat(PRODUCTS[way](*program(name, "jachess")))
    # Rotary embeddings and some norms round to float32.
    assert (result - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_samples_with_their_padding(name: str) -> None:
    loss, weights, _ = program(name, "jachess")
    per_sample = vmap(grad(lambda w, ids, padding: loss(w, ids[None], padding[None])), (None, 0, 0))
    result = per_sample(weights, IDS, PADDING)
    torchs, weights, _ = program(name, "sdpa")
    for n in range(3):
        expected = flat(grad(torchs)(weights, IDS[n : n + 1], PADDING[n : n + 1]))
        error = (flat({key: x[n] for key, x in result.items()}) - expected).norm()
        assert error < 1e-5 * expected.norm()


@pytest.mark.parametrize("saves", [False, True])
def test_training_is_that_with_sdpa(saves: bool) -> None:
    def weights(implementation: str) -> Tensor:
        config = transformers.LlamaConfig(**GROUPED)
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM._from_config(
            config, attn_implementation=implementation
        ).train()
        if saves:
            model.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(3):
            torch.manual_seed(step)
            model(input_ids=IDS, attention_mask=PADDING, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights("jachess"), weights("sdpa"))


def test_masks_reach_the_model() -> None:
    for name in MODELS:
        expected, result = (
            model_of(name, implementation)(input_ids=IDS, attention_mask=PADDING)[0]
            for implementation in ("sdpa", "jachess")
        )
        assert torch.equal(result, expected)


def test_a_family_without_sdpa_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=4)
    model = transformers.BloomModel._from_config(config, attn_implementation="jachess")
    with pytest.raises(ValueError, match='load the model with "eager"'):
        model(input_ids=IDS, attention_mask=PADDING)


def test_keys_picked_by_number_are_refused() -> None:
    from jachess_ext.training.attention import attention

    heads = torch.ones(1, 1, 2, 4)
    with pytest.raises(ValueError, match="has no indices"):
        attention(torch.nn.Identity(), heads, heads, heads, None, indices=torch.zeros(1))
