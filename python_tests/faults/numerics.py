"""Formulas of rules that overflowed, cancelled, or left their domain; variants without a rule."""

from __future__ import annotations

from . import PROGRAMS, Edit, Fault

RULES = "jachess_ext/jet/rules"
TESTS = "python_tests/jet/test_special_points.py"


FOUND = "python_tests/programs/test_found.py"


def _fault(name: str, file: str, mended: str, faulty: str, chosen: str, *others: str) -> Fault:
    """``others``: further tests than those ``chosen`` of `TESTS` that have to notice."""
    edit = Edit(f"{RULES}/{file}", mended, faulty)
    return Fault(f"numerics: {name}", (edit,), (f"{TESTS} -k '{chosen}'", *others))


def _found(name: str, file: str, mended: str, faulty: str, chosen: str) -> Fault:
    """One that random programs found; ``chosen`` of the small ones that are kept have to notice."""
    edit = Edit(f"{RULES}/{file}", mended, faulty)
    return Fault(f"numerics: {name}", (edit,), (f"{FOUND} -k '{chosen}'",))


FAULTS = [
    Fault(
        "numerics: storages within transforms of torch.func",
        (
            Edit(
                f"{RULES}/forward_mode.py",
                "    while functorch.is_functorch_wrapped_tensor(tensor):\n",
                "    while False:\n",
            ),
        ),
        ("python_tests/jet/test_operators_transformed.py -k kron",),
    ),
    _fault(
        "overflow of a loss of logits",
        "composite.py",
        "(1 - target) * input - F.logsigmoid(input)",
        "(1 + input.exp()).log() - input * target",
        "far_out and bce",
    ),
    _fault(
        "a norm squares in half precision",
        "pointwise.py",
        "    return x.float() if is_half(x) else x\n",
        "    return x\n",
        "squares and norm",
    ),
    _fault(
        "cosine before broadcasting",
        "norm.py",
        "    x1, x2 = torch.broadcast_tensors(x1, x2)",
        "    x1, x2 = x1, x2",
        "broadcasting and cosine",
        PROGRAMS,
    ),
    _fault(
        "nested lists as an index",
        "shape.py",
        "kinds = (Tensor, Integral, *_OF_VIEWS)",
        "kinds = (Tensor, Integral, list, *_OF_VIEWS)",
        "forms_of_an_index and nested",
        PROGRAMS,
    ),
    _fault(
        "logsumexp of tangents that share a constant",
        "softmax.py",
        "    centred = first - means\n",
        "    centred = first\n",
        "share_a_constant and logsumexp",
    ),
    Fault(
        "numerics: softmax of tangents that share a constant",
        (
            Edit(
                "jachess_ext/ops/softmax.py",
                "        cross = y[1 + j] * c[i]\n",
                "        cross = y[1 + j] * s[1 + i]\n",
            ),
        ),
        (f"{TESTS} -k 'share_a_constant and softmax and True'",),
    ),
    _fault(
        "log_softmax of tangents that share a constant",
        "softmax.py",
        "centred[j - 1] * centred[i - 1] + streams[ij])",
        "centred[j - 1] * streams[i] + streams[ij])",
        "share_a_constant and log_softmax",
    ),
    _fault(
        "logarithm of a negative base whose exponent is constant",
        "arithmetic.py",
        "    needed = _moves(exponent) | ((wide(base).real > 0) & value.isfinite())",
        "    needed = exponent.primal == exponent.primal",
        "far_out and full_like",
        PROGRAMS,
    ),
    _fault(
        "logarithm of zero beside a constant factor",
        "arithmetic.py",
        "        needed = _moves(y) | (z > 0)",
        "        needed = z == z",
        "far_out and xlogy",
    ),
    _fault(
        "sinc at zero",
        "pointwise.py",
        "    near = y.abs() < 1\n",
        "    near = y == 0\n",
        "test_sinc",
    ),
    _fault(
        "log of a sum with minus infinity",
        "arithmetic.py",
        "        gap = torch.where(infinite, 0, a.primal - b.primal)\n",
        "        gap = b.primal - a.primal\n",
        "far_out and logaddexp",
    ),
    _fault(
        "products of scatter_reduce",
        "memory.py",
        '    if reduce == "prod":\n',
        '    if reduce == "nothing":\n',
        "every_variant and scatter_reduce and prod",
    ),
    _fault(
        "cross entropy by chunks",
        "composite.py",
        'named | {"options": None}',
        "named",
        "every_variant and linear_cross_entropy",
    ),
    _fault(
        "forward mode in half precision",
        "forward_mode.py",
        "        if any(is_half(tensor) for tensor in tensors):\n",
        "        if False:\n",
        "far_out or squares",
    ),
    _fault(
        "a layer norm of large numbers",
        "norm.py",
        "    rows = rows / scale\n",
        "    scale = torch.ones_like(scale)\n",
        "norms_of_large_numbers",
    ),
    Fault(
        "numerics: activations far out",
        (
            Edit(
                "jachess_ext/ops/activation.py",
                "    b = x.clamp(-22, 22)  # σ(2u) is 0 or 1 to the last bit beyond\n",
                "    b = x\n",
            ),
        ),
        (f"{TESTS} -k 'saturated'",),
    ),
    _found(
        "an extreme value that is reached twice",
        "reduce.py",
        "        ties = (input.primal == value).to(input.dtype)\n",
        "        ties = (input.primal == value).to(input.dtype)\n"
        "        ties = ties * (ties.cumsum(dims[-1]) == 1)\n",
        "amax_of_a_tie or amax",
    ),
    _found(
        "the larger of two equal numbers",
        "arithmetic.py",
        "    return torch.where(input == other, 0.5 * chosen + 0.5 * rest, chosen)\n",
        "    return chosen\n",
        "maximum",
    ),
    _found(
        "hypot at the origin",
        "reduce.py",
        '@jet_rule("hypot")\n',
        '@jet_rule("hypot_")\n',
        "hypot",
    ),
    _fault(
        "logit beyond its ends, backward",
        "pointwise.py",
        "        x = x.masked_fill(outside, 0.5)  "
        "# backward through infinite slopes would be NaN\n",
        "",
        "logit_beyond",
    ),
    _found(
        "an index of one number, given as a tensor",
        "shape.py",
        "    return part.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)\n",
        "    return False\n",
        "index",
    ),
    _found(
        "products of no rows, backward",
        "linear.py",
        "        rows = grad.flatten(0, -2)\n",
        "        rows = grad.reshape(-1, grad.shape[-1])\n",
        "nothing",
    ),
]
