"""The jet tensor: its streams and their memory layout, and the table of rules.

A torch function that is called with a `JetTensor` (`tensor.py`) looks up its rule in `registry.py`
and returns the rule's result, with the memory layout of torch's own result (`strides.py`).  This
package contains no rule.
"""
