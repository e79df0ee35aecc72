"""A method that transformers' Trainer has: here it gets a name in the comparison."""

from __future__ import annotations

from typing import Any

from .method import Method


class NEFTune(Method):
    """Uniform noise of size α / √(T d) on the token embeddings (Jain et al. 2023).

    The Trainer's own, which draws from torch's generator: dropout masks are not the plain run's.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        trainer.neftune_noise_alpha = self.settings.alpha
