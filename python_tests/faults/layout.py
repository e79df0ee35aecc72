"""Strides, shared memory, writes in place, and what outlives a pass."""

from python_tests.faults import Edit, Fault

TENSOR = "jachess_ext/jet/tensor.py"
STRIDES = "jachess_ext/jet/strides.py"
FAULTS = [
    Fault(
        name="strides: results keep the strides that a rule gives them",
        edits=(
            Edit(
                TENSOR,
                "return as_torch_lays_out(func, args, named, result)",
                "return result",
            ),
        ),
        tests=(
            "python_tests/jet/test_strides.py -k tanh",
            "python_tests/jet/test_strides.py -k reduction_no_dim",
        ),
    ),
    Fault(
        name="memory: a result that shares memory with an argument is left so",
        edits=(
            Edit(
                STRIDES,
                "return streams.is_contiguous() and (not memories or "
                "_memory(result) not in memories - {None})",
                "return streams.is_contiguous()",
            ),
        ),
        tests=("python_tests/jet/test_strides.py -k reduction_no_dim",),
    ),
    Fault(
        name="writes: what a function read is written over before backward",
        edits=(
            Edit(
                "jachess_ext/jet/rules/streamwise.py",
                "    make_pending()\n    renew_memory(target)\n",
                "    make_pending()\n",
            ),
        ),
        tests=("python_tests/jet/test_writes.py -k through_an_index",),
    ),
    Fault(
        name="writes: into entries that overlap",
        edits=(Edit(STRIDES, "        if stride < reach:\n", "        if False:\n"),),
        tests=("python_tests/jet/test_writes.py -k overlapping",),
    ),
    Fault(
        name="kept: a tensor of an earlier pass is taken for one of this",
        edits=(
            Edit(TENSOR, "        check_pass(func, args, result)\n", ""),
            Edit(
                "jachess_ext/jet/api.py",
                "    if isinstance(tensor, DerivativeTensor) and "
                "tensor.layout_of_pass.run is not layout.run:\n",
                "    if False:\n",
            ),
        ),
        tests=("python_tests/jet/test_kept.py -k earlier", "python_tests/jet/test_kept.py -k told"),
    ),
    Fault(
        name="kept: a pass that failed leaves deferred jets behind",
        edits=(
            Edit(
                "jachess_ext/jet/deferred.py",
                "        if jet.jet_layout.run is run:\n            forget(jet)\n",
                "        pass\n",
            ),
        ),
        tests=("python_tests/jet/test_kept.py -k failed",),
    ),
]
