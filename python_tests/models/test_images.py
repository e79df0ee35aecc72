"""Unmodified image models of diffusers and timm: J u and D²f[u, w] against differences in float64.

Tiny, with random weights; text, class and time enter as constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jachess_ext as jx

from . import oracles
from .zoo import randomise

Case = tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]
TIME = torch.tensor([3, 40])


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _diffusers() -> Any:
    return pytest.importorskip("diffusers", reason="diffusers is not installed")


def _dit() -> Case:
    model = _diffusers().DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=4,
        in_channels=2,
        out_channels=4,
        num_layers=2,
        norm_num_groups=2,
        sample_size=4,
        patch_size=2,
        num_embeds_ada_norm=5,
    )
    labels = torch.tensor([1, 2])
    return model, _random(2, 2, 4, 4), lambda x: model(x, TIME, class_labels=labels).sample


def _unet_with_text() -> Case:
    model = _diffusers().UNet2DConditionModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
    )
    text = _random(2, 3, 8)
    return model, _random(2, 2, 8, 8), lambda x: model(x, TIME, encoder_hidden_states=text).sample


def _sd3() -> Case:
    model = _diffusers().SD3Transformer2DModel(
        sample_size=4,
        patch_size=2,
        in_channels=2,
        out_channels=2,
        num_layers=2,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=8,
        pooled_projection_dim=8,
        pos_embed_max_size=4,
    )
    text = {"encoder_hidden_states": _random(2, 3, 8), "pooled_projections": _random(2, 8)}
    return model, _random(2, 2, 4, 4), lambda x: model(x, timestep=TIME, **text).sample


def _flux() -> Case:
    model = _diffusers().FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    )
    places = torch.tensor([[0, row, column] for row in range(2) for column in range(2)])
    given = {
        "encoder_hidden_states": _random(2, 3, 8),
        "pooled_projections": _random(2, 8),
        "timestep": torch.tensor([0.3, 0.4], dtype=torch.float64),
        "img_ids": places.double(),
        "txt_ids": torch.zeros(3, 3, dtype=torch.float64),
    }
    return model, _random(2, 4, 4), lambda x: model(x, **given).sample


def _timm_vit() -> Case:
    pytest.importorskip("torchvision", reason="timm needs torchvision, of torch's own build")
    timm = pytest.importorskip("timm", reason="timm is not installed")
    size = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = timm.models.vision_transformer.VisionTransformer(**size, num_classes=5)
    return model, _random(2, 3, 8, 8), model


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("build", [_dit, _unet_with_text, _sd3, _flux, _timm_vit])
def test_image_model_agrees_with_differences(build: Callable[[], Case]) -> None:
    torch.manual_seed(0)
    model, x, function = build()
    randomise(model)
    model.double().eval()
    u, w = _random(2, *x.shape)
    with oracles.Float64Casts():
        jet = jx.jet(function, x, torch.stack([u, w]))
        with torch.no_grad():
            value = function(x)

        def outputs(point: Tensor) -> list[Tensor]:
            return [function(point)]

        first = [oracles.first_difference(outputs, x, d)[0] for d in (u, w)]
        second = oracles.mixed_difference(outputs, x, u, w)[0]
    assert jet.primal.dtype == torch.float64
    assert oracles.relative_error(jet.primal, value) < 1e-12
    for along in (0, 1):
        assert oracles.relative_error(jet.first[along], first[along]) < 1e-8
    assert oracles.relative_error(jet.second[0], second) < 1e-6
    assert second.norm() > 1e-2 * first[0].norm(), "too flat to test anything"
