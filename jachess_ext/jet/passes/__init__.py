"""Passes: one run of a function on jets, or on dual tensors.

In: a function, its arguments and directions, which `eager.py` checks; out: the results with their
derivatives.  `scope.py` refuses operations of the function that would lose derivatives.
"""
