"""Tiny models of every supported family, built offline from configurations, and inputs for them.

Weights are random but not small, so that second derivatives stand far above round-off; the
weights and biases of normalisations are random too, so that no factor of one hides a mistake.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    BertConfig,
    DebertaV2Config,
    DeepseekV3Config,
    DistilBertConfig,
    ElectraConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    ModernBertConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    RobertaConfig,
    T5Config,
    T5EncoderModel,
    ViTConfig,
)

BATCH, TOKENS = 2, 6
WEIGHT_SCALE = 0.3
PADDINGS = ("none", "right", "left")
ATTENTIONS = ("eager", "sdpa")

_SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
_NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = {**_SIZES, **_NO_DROPOUT}
_GROUPED = {**_SIZES, **_SPECIAL, "num_attention_heads": 4, "num_key_value_heads": 2}
_OPT = {
    **{key: value for key, value in _SIZES.items() if key != "intermediate_size"},
    **_SPECIAL,
    "ffn_dim": 12,
    "dropout": 0.0,
}
_DEBERTA = {
    **_ENCODER,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 4,
    "norm_rel_ebd": "layer_norm",
}
_T5 = {"vocab_size": 20, "d_model": 16, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 4}


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        make_config: a fresh configuration, every dropout rate zero.
        attentions: implementations transformers offers; the others it must itself refuse.
        kinked: whether the model has ReLUs or routing, so that differences must not step over one.
        make_model: builds the model; ``AutoModel.from_config`` unless the family has no such form.
        takes: the keyword of ``forward`` that carries the continuous input.
    """

    make_config: Callable[[], PreTrainedConfig]
    attentions: tuple[str, ...] = ATTENTIONS
    kinked: bool = False
    make_model: Callable[..., PreTrainedModel] = AutoModel.from_config
    takes: str = "inputs_embeds"


def _mixtral() -> PreTrainedConfig:
    """Experts one by one: the grouped matrix product knows neither float64 nor jets."""
    config = MixtralConfig(**_GROUPED, num_local_experts=3, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    return config


def _deepseek_v3() -> PreTrainedConfig:
    """A dense block, then experts whose router writes into a mask of its own."""
    config = DeepseekV3Config(
        **{**_GROUPED, "num_key_value_heads": 4},
        moe_intermediate_size=8,
        n_routed_experts=6,
        n_group=3,
        topk_group=2,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    )
    config._experts_implementation = "eager"
    return config


def _t5_encoder(config: PreTrainedConfig, attn_implementation: str) -> PreTrainedModel:
    """AutoModel would add the decoder; the public way to the encoder alone is its class."""
    return T5EncoderModel._from_config(config, attn_implementation=attn_implementation)


FAMILIES: dict[str, Family] = {
    "bert": Family(lambda: BertConfig(**_ENCODER)),
    "roberta": Family(lambda: RobertaConfig(**_ENCODER, pad_token_id=1)),
    "distilbert": Family(
        lambda: DistilBertConfig(
            vocab_size=20,
            dim=16,
            n_layers=2,
            n_heads=2,
            hidden_dim=24,
            max_position_embeddings=16,
            dropout=0.0,
            attention_dropout=0.0,
        )
    ),
    "deberta-v2": Family(
        lambda: DebertaV2Config(**_DEBERTA, share_att_key=True), attentions=("eager",)
    ),
    "deberta-v2-conv": Family(
        lambda: DebertaV2Config(**_DEBERTA, conv_kernel_size=3), attentions=("eager",)
    ),
    "electra": Family(lambda: ElectraConfig(**_ENCODER, embedding_size=12)),
    "modernbert": Family(
        lambda: ModernBertConfig(
            **{**_SIZES, "num_hidden_layers": 3},
            **_SPECIAL,
            cls_token_id=1,
            sep_token_id=2,
            local_attention=4,
            global_attn_every_n_layers=2,
        )
    ),
    "gpt2": Family(
        lambda: GPT2Config(
            vocab_size=20,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=16,
            bos_token_id=1,
            eos_token_id=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ),
    "opt": Family(lambda: OPTConfig(**_OPT, word_embed_proj_dim=16), kinked=True),
    "opt-post-norm": Family(
        lambda: OPTConfig(**_OPT, word_embed_proj_dim=12, do_layer_norm_before=False), kinked=True
    ),
    "llama": Family(lambda: LlamaConfig(**_GROUPED)),
    "mistral": Family(lambda: MistralConfig(**_GROUPED, sliding_window=3)),
    "qwen3": Family(lambda: Qwen3Config(**_GROUPED, head_dim=4)),
    "gemma2": Family(
        lambda: Gemma2Config(
            **_GROUPED,
            head_dim=4,
            sliding_window=3,
            query_pre_attn_scalar=4,
            attn_logit_softcapping=2.0,
        ),
        attentions=("eager",),
    ),
    "mixtral": Family(_mixtral, kinked=True),
    "deepseek-v3": Family(_deepseek_v3, kinked=True),
    "phi3": Family(lambda: Phi3Config(**_GROUPED)),
    "gpt-neox": Family(lambda: GPTNeoXConfig(**_SIZES, **_SPECIAL)),
    "t5": Family(lambda: T5Config(**_T5, dropout_rate=0.0), kinked=True, make_model=_t5_encoder),
    "t5-gated": Family(
        lambda: T5Config(**_T5, dropout_rate=0.0, feed_forward_proj="gated-gelu"),
        make_model=_t5_encoder,
    ),
    "vit": Family(
        lambda: ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=8,
            patch_size=4,
            num_channels=2,
            **_NO_DROPOUT,
        ),
        takes="pixel_values",
    ),
}


@dataclass
class Case:
    """A model with an input, padding and directions, ready to be expanded.

    Attributes:
        x: ``[B, T, d]`` embeddings, or ``[B, C, H, W]`` pixels.
        mask: ``[B, T]``, true at real tokens; for pixels all patches (and [CLS]) are real.
        directions: ``[q, *x.shape]``, zero at padded tokens.
    """

    model: PreTrainedModel
    family: Family
    x: Tensor
    mask: Tensor
    directions: Tensor
    extra: dict[str, Any] = field(default_factory=dict)

    def hidden_states(self, x: Tensor) -> tuple[Tensor, ...]:
        """Every layer's output, from the unmodified model."""
        return self.forward(x).hidden_states

    def forward(self, x: Tensor) -> Any:
        inputs = {self.family.takes: x, "output_hidden_states": True, **self.extra}
        return self.model(**inputs)


def build_model(
    name: str,
    attention: str = "eager",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    change_config: Callable[[PreTrainedConfig], None] | None = None,
) -> PreTrainedModel:
    """The family's model with random weights, in evaluation mode."""
    family = FAMILIES[name]
    config = family.make_config()
    if change_config is not None:
        change_config(config)
    torch.manual_seed(seed)
    model = family.make_model(config, attn_implementation=attention)
    randomise(model)
    return model.to(dtype).eval()


def randomise(model: nn.Module) -> None:
    """Matrices ~ N(0, WEIGHT_SCALE²); biases and normalisation weights moved by as much."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = WEIGHT_SCALE * torch.randn_like(parameter)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)


def build_case(
    name: str,
    attention: str = "eager",
    *,
    padding: str = "none",
    count: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    change_config: Callable[[PreTrainedConfig], None] | None = None,
) -> Case:
    """A `Case` with ``count`` directions; ``padding`` hides two tokens of the second row."""
    model = build_model(name, attention, seed=seed, dtype=dtype, change_config=change_config)
    return case_of(model, name, padding=padding, count=count, seed=seed)


def case_of(
    model: PreTrainedModel, name: str, *, padding: str = "none", count: int = 2, seed: int = 0
) -> Case:
    """A `Case` around a model built before (``name`` says which family it is of)."""
    family = FAMILIES[name]
    torch.manual_seed(1000 + seed)
    dtype = next(model.parameters()).dtype
    if family.takes == "pixel_values":
        config = model.config
        size = (BATCH, config.num_channels, config.image_size, config.image_size)
        x = torch.randn(size, dtype=torch.float64).to(dtype)
        patches = (config.image_size // config.patch_size) ** 2
        directions = torch.randn(count, *size, dtype=torch.float64).to(dtype)
        return Case(model, family, x, torch.ones(BATCH, 1 + patches).bool(), directions)
    width = model.get_input_embeddings().weight.shape[1]
    x = torch.randn(BATCH, TOKENS, width, dtype=torch.float64).to(dtype)
    directions = torch.randn(count, *x.shape, dtype=torch.float64).to(dtype)
    mask = padding_mask(padding)
    extra: dict[str, Any] = {} if padding == "none" else {"attention_mask": mask.long()}
    if "use_cache" in inspect.signature(model.forward).parameters:
        extra["use_cache"] = False
    return Case(model, family, x, mask, directions * mask[None, :, :, None], extra)


def padding_mask(padding: str) -> Tensor:
    """``[B, T]``, true at real tokens; the last row lacks two of them."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    if padding == "right":
        mask[-1, -2:] = False
    elif padding == "left":
        mask[-1, :2] = False
    return mask
