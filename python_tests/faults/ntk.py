"""The neural tangent kernel."""

from python_tests.faults import Edit, Fault

FAULTS = [
    Fault(
        name="ntk: samples that depend on one another, by their outputs",
        edits=(
            Edit(
                "jachess_ext/ntk/capture.py",
                "            require_separate(watched, outputs, samples, rows, f.detach())\n",
                "            pass\n",
            ),
        ),
        tests=("python_tests/ntk/test_mixing.py -k larger",),
    ),
    Fault(
        name="ntk: samples that depend on one another, by their gradients",
        edits=(
            Edit(
                "jachess_ext/ntk/probe.py",
                "            _require_separate_gradients(watched, f, signs, calls)\n",
                "            pass\n",
            ),
        ),
        tests=("python_tests/ntk/test_mixing.py -k 'gradients'",),
    ),
    Fault(
        name="ntk: a parameter without a dimension",
        edits=(
            Edit(
                "jachess_ext/ntk/calls.py",
                "found[key].unsqueeze(-1).flatten(2)",
                "found[key].flatten(2)",
            ),
        ),
        tests=("python_tests/ntk/test_mixing.py -k any_shape",),
    ),
]
