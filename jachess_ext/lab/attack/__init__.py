"""Attacks on text classifiers: words replaced by synonyms until the model's answer changes."""

from .candidates import NEAREST, Candidates, NearestRows, Synonyms, candidates_from, read_synonyms
from .method import AttackAugment  # noqa: F401  which makes it one of METHODS
from .words import Attacked, attack_words

__all__ = [
    "NEAREST",
    "Attacked",
    "Candidates",
    "NearestRows",
    "Synonyms",
    "attack_words",
    "candidates_from",
    "read_synonyms",
]
