"""Scaling laws of fine-tuning, and choosing a model to fine-tune from small subsets."""

from .fitted import FittedLaw, Transition
from .fitting import fit

__all__ = ["FittedLaw", "Transition", "fit"]
