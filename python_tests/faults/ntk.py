"""The neural tangent kernel."""

from python_tests.faults import Edit, Fault

FAULTS = [
    Fault(
        name="ntk: samples that depend on one another, by their outputs",
        edits=(
            Edit(
                "jachess_ext/ntk/capture.py",
                "            _require_same_values(outputs, samples, rows, f.detach())\n"
                "        parts",
                "            pass\n        parts",
            ),
        ),
        tests=("python_tests/ntk/test_mixing.py -k 'anywhere and (detached or inputs)'",),
    ),
    Fault(
        name="ntk: samples that depend on one another, by the gradients of a block",
        edits=(
            Edit(
                "jachess_ext/ntk/capture.py",
                "    if separation is not None:\n        separation.require()\n",
                "",
            ),
        ),
        tests=("python_tests/ntk/test_mixing.py -k 'anywhere and gradients'",),
    ),
    Fault(
        name="ntk: gradients that are round-off are taken for another sample's",
        edits=(
            Edit(
                "jachess_ext/ntk/capture.py",
                "            factors[sample] = 0.0\n",
                "            factors[sample] = 0.5\n",
            ),
        ),
        tests=("python_tests/ntk/test_mixing.py -k round_off",),
    ),
    Fault(
        name="ntk: samples are run again in the order in which they came",
        edits=(
            Edit(
                "jachess_ext/ntk/capture.py",
                "places = list(range(count))[::-1]",
                "places = list(range(count))",
            ),
        ),
        tests=("python_tests/ntk/test_mixing.py -k came_sorted",),
    ),
    Fault(
        name="ntk: a parameter without a dimension",
        edits=(
            Edit(
                "jachess_ext/ntk/capture.py",
                "gradients[key].unsqueeze(-1).flatten(2)",
                "gradients[key].flatten(2)",
            ),
        ),
        tests=("python_tests/ntk/test_mixing.py -k any_shape",),
    ),
]
