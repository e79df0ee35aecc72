"""Functions of the rows of a batch: passes along groups of directions, and the checks of them.

`check.py` sees that rows do not depend on each other, `sameness.py` that a function which runs
several times is the same each time.
"""
