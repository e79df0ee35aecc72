"""Methods that hold on to the weights before training: L2-SP and WiSE-FT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .method import Batch, Method
from .penalties import half_squares


class _Start(Method):
    """Keeps a copy of the pretrained weights that are trained.

    Those of modules the checkpoint lacked (the new head; `load_model` leaves their names in the
    attribute ``drawn_modules``) are no knowledge to hold on to, and stay out of it.  A model
    without that attribute counts as pretrained throughout.

    Raises:
        ValueError: nothing that is trained is pretrained.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        # Now, not when training begins: by then a checkpoint may have been loaded.
        model = trainer.accelerator.unwrap_model(trainer.model)
        drawn = getattr(model, "drawn_modules", ())
        self.start = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name.rpartition(".")[0] not in drawn
        }
        if not self.start:
            raise ValueError(
                f"method={self.settings.method!r} holds on to pretrained weights, and none of the "
                "model's trained ones is; load it from a checkpoint, or use another method"
            )

    def moved(self, model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        """Each kept parameter as it is, and as it was."""
        found = dict(self.trainer.accelerator.unwrap_model(model).named_parameters())
        return [(found[name], value) for name, value in self.start.items()]


class L2SP(_Start):
    """½ Σ (θ − θ₀)² over pretrained weights (Li et al. 2018, *Explicit Inductive Bias*, L²-SP).

    Their second term, weight decay of the new head, is left out.
    """

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Any) -> Tensor:
        """In float32 or wider."""
        return half_squares(now - start for now, start in self.moved(model))


class WiSEFT(_Start):
    """After training, θ₀ + a (θ − θ₀) for pretrained weights (Wortsman et al. 2022, WiSE-FT).

    The head is the fine-tuned one: theirs starts as a zero-shot classifier, which a pretrained
    encoder has not.  Checkpoints within the run hold the weights before the interpolation.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
            raise ValueError(
                "method='wise-ft' interpolates weights, and a product of adapters is not linear in "
                "them; fine-tune without adapters"
            )

    @torch.no_grad()
    def end(self, model: nn.Module) -> None:
        """Puts the interpolated weights into the model."""
        for now, start in self.moved(model):
            now.copy_(torch.lerp(start, now, self.settings.mix))
