"""Names of torch functions by kind: views, linear functions, sums, products, quotients.

`strides.py` asks which results are views, `complex_rules.py` which rules hold for complex numbers,
and `passes/dual.py` which tangents are the function itself of tangents.
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
"""Functions that return a view of the first argument; the same view holds for the stack."""
LINEAR = frozenset(_COPIES.split())
"""Functions that are linear in the first argument, and no views."""
SUMS = frozenset(("add", "__add__", "__radd__", "sub", "subtract", "__sub__", "rsub", "__rsub__"))
PRODUCTS = frozenset(
    ("mul", "multiply", "__mul__", "__rmul__", "matmul", "bmm", "mm", "mv", "dot", "__matmul__")
)
QUOTIENTS = frozenset(("div", "divide", "true_divide", "__truediv__", "__div__"))
