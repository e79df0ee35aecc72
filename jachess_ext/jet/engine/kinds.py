"""Names of torch functions by kind: views, linear functions, sums, products, quotients.

`strides.py` uses the names to know which results are views, `complex_rules.py` which rules hold for
complex numbers, and `passes/dual.py` which functions are applied to the tangents as they are.
"""

_VIEWS = """
    view reshape flatten unflatten transpose swapaxes swapdims t permute movedim moveaxis unsqueeze
    squeeze expand broadcast_to narrow select split split_with_sizes chunk tensor_split unbind
    diagonal
"""
_COPIES = """
    __getitem__ unfold index_select gather take_along_dim flip roll repeat repeat_interleave tile
    tril triu contiguous clone to type float double sum mean cumsum neg negative
"""
VIEWS = frozenset(_VIEWS.split())
"""Functions that return a view of the first argument; their rules take the same view of the stack
of streams."""
LINEAR = frozenset(_COPIES.split())
"""Functions that are linear in the first argument and return no view."""
SUMS = frozenset(("add", "__add__", "__radd__", "sub", "subtract", "__sub__", "rsub", "__rsub__"))
PRODUCTS = frozenset(
    ("mul", "multiply", "__mul__", "__rmul__", "matmul", "bmm", "mm", "mv", "dot", "__matmul__")
)
QUOTIENTS = frozenset(("div", "divide", "true_divide", "__truediv__", "__div__"))
