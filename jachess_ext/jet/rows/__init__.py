"""Functions of the rows of a batch: passes along groups of directions, and their checks.

`check.py` checks that rows do not depend on each other, `sameness.py` that a function that runs
several times computes the same each time.
"""
