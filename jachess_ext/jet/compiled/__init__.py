"""Jets within ``torch.compile``.

Import these files only while dynamo traces: they import torch._dynamo, which takes seconds.
"""
