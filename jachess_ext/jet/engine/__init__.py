"""What a jet is: the stack of its streams, the memory it lies in, and the table of rules.

In: a torch function called with a `JetTensor` (`tensor.py`), which looks its rule up in
`registry.py`; out: the rule's result, laid out in memory as torch lays out its own (`strides.py`).
Nothing here knows a rule.
"""
