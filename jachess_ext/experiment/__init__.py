"""Comparing methods over tasks and seeds: a grid of runs, its results file, tables and report."""
