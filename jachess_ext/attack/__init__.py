"""Attacks on text classifiers: words replaced by synonyms until the model's answer changes."""

from .candidates import NEAREST, Candidates, NearestRows, Synonyms, candidates_from, read_synonyms
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
