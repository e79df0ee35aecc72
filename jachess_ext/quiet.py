"""What torchao and bitsandbytes say when transformers or peft imports them, kept from the user.

They tell of binaries that fit another GPU, Python or torch, and of calls their authors will have to
change: nothing that a user of `jachess` could do anything about.
"""

from __future__ import annotations

import logging
import re

# Logger → what is left out of it, from the start of the message.
_LEFT_OUT = {
    "torchao": r"Failed to load .*\.so|Skipping import of cpp extensions",
    "torch.utils._pytree": r"<enum '\w+'> is an Enum subclass and is now natively supported",
    "bitsandbytes.cextension": r"No prebuilt binary for |The installed version .* without GPU",
    "bitsandbytes.backends.cpu.ops": r"Failed to load CPU \w+ from kernels-community",
}


class _LeaveOut(logging.Filter):
    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = pattern

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING or not re.match(self.pattern, record.getMessage())

    def __eq__(self, other: object) -> bool:  # a logger takes equal filters once
        return isinstance(other, _LeaveOut) and other.pattern == self.pattern

    __hash__ = logging.Filter.__hash__


def quiet_libraries() -> None:
    """Leave these sentences out, and no others; imports nothing."""
    for name, pattern in _LEFT_OUT.items():
        logging.getLogger(name).addFilter(_LeaveOut(pattern))
