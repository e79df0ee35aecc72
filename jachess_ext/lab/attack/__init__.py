# ruff: noqa: F401  the names are imported from here
"""Attacks on text classifiers: words replaced by synonyms until the model's answer changes."""

from .candidates import NEAREST, Candidates, NearestRows, Synonyms, candidates_from, read_synonyms
from .method import AttackAugment  # makes it one of METHODS
from .words import Attacked, attack_words
