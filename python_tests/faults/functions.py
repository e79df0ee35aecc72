"""Faults with autograd Functions, with a newer torch, and with what the import loads."""

from python_tests.faults import Edit, Fault

_FUNCTIONS = "python_tests/jet/test_functions.py"
_IMPORTS = "python_tests/packaging/test_imports.py"

FAULTS = [
    Fault(
        name="functions: two threads at once leave torch.compile switched off",
        edits=(
            Edit(
                "jachess_ext/jet/context.py",
                "            if not self._inside:\n                self._stance = torch",
                "            if True:\n                self._stance = torch",
            ),
        ),
        tests=("python_tests/jet/test_compile.py -k two_threads",),
    ),
    Fault(
        name="functions: refused only where gradients are off",
        edits=(
            Edit(
                "jachess_ext/jet/tensor.py",
                "    if not forward_mode_is_on():",
                "    if not torch.is_grad_enabled():",
            ),
        ),
        tests=(f"{_FUNCTIONS} -k '_gradients_on and test_a_function_is_refused'",),
    ),
    Fault(
        name="functions: one that returns a jet as it came passes within inference mode",
        edits=(
            Edit(
                "jachess_ext/jet/registry.py",
                "    if returned_as_it_came or not off_since_the_beginning:",
                "    if not off_since_the_beginning:",
            ),
        ),
        tests=(f"{_FUNCTIONS} -k '_as_it_came and inference_mode'",),
    ),
    Fault(
        name="functions: a pass that begins inside is refused",
        edits=(
            Edit(
                "jachess_ext/jet/layout.py",
                "            surrounding=surrounding_functions(),",
                "            surrounding=None,",
            ),
        ),
        tests=(
            f"{_FUNCTIONS} -k test_a_pass_may_begin_and_end_inside_a_function",
            f"{_FUNCTIONS} -k reentrant_checkpoint",
        ),
    ),
    Fault(
        name="functions: any of them passes inside a Function where the pass began",
        edits=(
            Edit(
                "jachess_ext/jet/registry.py",
                "    if len(forwards) > (surrounding or 0):",
                "    if surrounding is None and forwards:",
            ),
        ),
        tests=(f"{_FUNCTIONS} -k test_a_function_inside_such_a_pass_is_refused",),
    ),
    Fault(
        name="functions: a class made later is not known by its code",
        edits=(
            Edit(
                "jachess_ext/jet/registry.py",
                "_forward_codes(torch.autograd.Function.__subclasses__()[-1])",
                "_forward_codes(torch.autograd.Function)",
            ),
        ),
        tests=(f"{_FUNCTIONS} -k 'inference_mode'",),
    ),
    Fault(
        name="functions: inference mode inside a pass of targets",
        edits=(
            Edit(
                "jachess_ext/jet/dual.py",
                "    with torch.inference_mode(False), torch.no_grad():",
                "    with torch.no_grad():",
            ),
        ),
        tests=(f"{_FUNCTIONS} -k test_inference_mode_inside_a_pass",),
    ),
    Fault(
        name="imports: the package loads torch at once",
        edits=(
            Edit(
                "jachess_ext/__init__.py",
                "_require_torch()  # first, since",
                "from .jet import jvp as _jvp\n\n_require_torch()  # first, since",
            ),
        ),
        tests=(f"{_IMPORTS} -k test_neither_torch_nor_transformers_is_loaded",),
    ),
    Fault(
        name="imports: a subpackage takes the name of its function",
        edits=(Edit("jachess_ext/__init__.py", "_sys.modules[__name__].__class__ = _Package", ""),),
        tests=(f"{_IMPORTS} -k test_a_name_that_is_also_a_subpackage",),
    ),
    Fault(
        name="imports: something private of torch is touched at import",
        edits=(
            Edit(
                "jachess_ext/jet/rules/composite.py",
                '@jet_rule(built_in("_pack_padded_sequence"))',
                "@jet_rule(torch_private.autograd, torch_private.pack_padded_sequence)",
            ),
        ),
        tests=(f"{_IMPORTS} -k test_a_torch_without_any_of_them",),
    ),
]
