"""Strides, shared memory, writes in place, and what outlives a pass."""

from python_tests.faults import PROGRAMS, Edit, Fault

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
            PROGRAMS,
        ),
    ),
    Fault(
        name="memory: what torch answered for a tensor given twice is taken for two tensors",
        edits=(Edit(STRIDES, "_key(named), _sharing(tensors))", "_key(named))"),),
        tests=("python_tests/jet/test_strides.py -k share_memory_are",),
    ),
    Fault(
        name="memory: a result that shares memory with an argument is left so",
        edits=(
            Edit(
                STRIDES,
                "return streams.is_contiguous() and (not memories or "
                "memory_of(result) not in memories - {None})",
                "return streams.is_contiguous()",
            ),
        ),
        tests=("python_tests/jet/test_strides.py -k masked.sum",),
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
        tests=("python_tests/jet/test_writes.py -k through_an_index", PROGRAMS),
    ),
    Fault(
        name="writes: views of a buffer that is given new memory fall apart",
        edits=(
            Edit(
                STRIDES,
                "        source = renewed[id(_base(view))]\n",
                "        source = renewed[id(_base(view))].clone()\n",
            ),
        ),
        tests=("python_tests/programs/test_found.py -k buffer",),
    ),
    Fault(
        name="writes: a detached tensor is left behind in the old memory",
        edits=(Edit(STRIDES, "    if memory in run.given_out:\n", "    if False:\n"),),
        tests=("python_tests/programs/test_found.py -k 'detached and from'",),
    ),
    Fault(
        name="strides: inputs of a pass are made contiguous",
        edits=(
            Edit(
                STRIDES,
                "    if x.is_contiguous() or transformed():\n",
                "    if True:\n",
            ),
        ),
        tests=(
            "python_tests/jet/test_input_strides.py -k reach",
            "python_tests/programs/test_found.py -k 'transposed or gaps'",
        ),
    ),
    Fault(
        name="writes: into an input that is expanded",
        edits=(
            Edit(
                "jachess_ext/jet/rules/streamwise.py",
                "    refuse_expanded(target)\n",
                "",
            ),
        ),
        tests=("python_tests/jet/test_input_strides.py -k into_an_expanded",),
    ),
    Fault(
        name="writes: a batch norm that is refused has counted the batch",
        edits=(Edit("jachess_ext/jet/rules/norm.py", "        _uncount_the_batch()\n", ""),),
        tests=("python_tests/jet/test_input_strides.py -k batch_norm",),
    ),
    Fault(
        name="writes: a batch norm that is refused has changed its statistics",
        edits=(
            Edit(
                "jachess_ext/jet/dual.py",
                "_CHANGES_A_MODEL = (F.batch_norm, F.instance_norm)\n",
                "_CHANGES_A_MODEL = ()\n",
            ),
        ),
        tests=("python_tests/jet/test_input_strides.py -k 'batch_norm and target'",),
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
                TENSOR,
                "        if jet.jet_layout.run is run:\n            del _PENDING.jets[key]\n",
                "        pass\n",
            ),
        ),
        tests=("python_tests/jet/test_kept.py -k failed",),
    ),
]
