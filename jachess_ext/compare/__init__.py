"""Comparisons of fine-tuning methods, and their reports."""
