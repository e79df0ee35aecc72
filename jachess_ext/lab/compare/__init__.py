"""Comparison of fine-tuning methods over tasks and seeds: resumable runs, evaluation, report."""
