"""Hierarchical Bayes over rectified shapes: the method "bayes" of `select`."""

from .forecast import forecast

__all__ = ["forecast"]
