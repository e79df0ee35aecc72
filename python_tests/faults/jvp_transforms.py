"""Attention's bias, and the general rule within transforms."""

from python_tests.faults import Edit, Fault

FAULTS = [
    Fault(
        name="attention: a bias that carries derivatives, beside others that do",
        edits=(
            Edit(
                "jachess_ext/jet/rules/attention.py",
                "if not isinstance(bias, JetTensor) and (bias is None or bias.ndim <= len(shape)):",
                "if bias is None or bias.ndim <= len(shape):",
            ),
        ),
        tests=(
            "python_tests/jet/test_attention_bias.py -k 'test_every_choice_of_what_moves and qkvb'",
            "python_tests/jet/test_attention_bias.py -k t5",
        ),
    ),
    Fault(
        name="attention: a bias that carries derivatives, alone",
        edits=(
            Edit(
                "jachess_ext/jet/rules/attention.py",
                "layout = common_layout(query, key, value, attn_mask)",
                "layout = common_layout(query, key, value)",
            ),
        ),
        tests=(
            "python_tests/jet/test_attention_bias.py::test_every_choice_of_what_moves[b-composed]",
        ),
    ),
    Fault(
        name="attention: a mask beside is_causal",
        edits=(
            Edit(
                "jachess_ext/jet/rules/attention.py",
                "return causal if mask is None else mask + causal",
                "return causal",
            ),
        ),
        tests=("python_tests/jet/test_attention_bias.py::test_a_mask_beside_is_causal",),
    ),
]
