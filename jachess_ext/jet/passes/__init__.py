"""Passes: a pass is one run of a function on jets, or on dual tensors.

`eager.py` checks the arguments and directions, runs the function, and returns its results with
their derivatives.  `scope.py` refuses operations of the function that would lose derivatives.
"""
