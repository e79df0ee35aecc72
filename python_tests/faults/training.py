"""Faults of padding and of the methods of training."""

from python_tests.faults import Edit, Fault

_ACT = "python_tests/training/test_cannot_act.py"
_SAME = "python_tests/training/test_metamorphic.py"

FAULTS = [
    Fault(
        name="padding: what has the mask's shape is moved with the tokens",
        edits=(
            Edit(
                "jachess_ext/training/batches.py",
                "        return {**batch, ",
                "        batch = {n: v.flip(1) if v.shape == mask.shape else v "
                "for n, v in batch.items()}\n"
                "        return {**batch, ",
            ),
        ),
        tests=(f"{_SAME} -k 'none-gpt2-multi'",),
    ),
    Fault(
        name="padding: the Trainer counts targets that padding would have to tell",
        edits=(
            Edit(
                "jachess_ext/training/batches.py",
                "    told_by_padding[:, 1:] = before[:, :-1]\n",
                "",
            ),
        ),
        tests=(f"{_SAME} -k 'none-gpt2-causal'",),
    ),
    Fault(
        name="padding: positions are not told",
        edits=(
            Edit(
                "jachess_ext/training/batches.py",
                "if self._counts else batch",
                "if False else batch",
            ),
        ),
        tests=(f"{_SAME} -k 'none-gpt2-multi'",),
    ),
    Fault(
        name="padding: the token before a row's first is a decision",
        edits=(
            Edit(
                "jachess_ext/smoothness/decision.py",
                "streams[:, :, :-1], mask[:, 1:], mask[:, :-1]",
                "streams[:, :, :-1], mask[:, 1:], mask[:, 1:]",
            ),
        ),
        tests=(f"{_ACT} -k causal_decisions",),
    ),
    Fault(
        name="training: a task loss that is not finite",
        edits=(
            Edit(
                "jachess_ext/training/trainer.py",
                "        if self.args.fp16:\n            return True\n",
                "        if True:\n            return True\n",
            ),
        ),
        tests=(f"{_ACT} -k not_finite",),
    ),
    Fault(
        name="training: labels that are not called labels are not smoothed",
        edits=(
            Edit(
                "jachess_ext/training/methods/base.py",
                'elif "labels" not in trainer.label_names',
                'elif False and "labels" not in trainer.label_names',
            ),
        ),
        tests=(f"{_ACT} -k 'labels_of_another_name and smoothing'",),
    ),
    Fault(
        name="training: what a model reads beside its text is cut away to judge its padding",
        edits=(
            Edit(
                "jachess_ext/training/batches.py",
                "    return any(name in _parameters(model) and",
                "    return False and any(name in _parameters(model) and",
            ),
        ),
        tests=(f"{_ACT} -k 'judged_by_a_row'",),
    ),
]
