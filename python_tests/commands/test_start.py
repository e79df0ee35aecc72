"""The command line's start: what help imports, and what libraries say that nobody asked."""

from __future__ import annotations

import importlib.util
import logging
import sys

import pytest

from jachess_ext._io import quiet_libraries
from jachess_ext.cli import _COMMANDS
from python_tests import processes

HELP = """
import sys
sys.argv = ["jachess", *sys.argv[1:]]
from jachess_ext.cli import main
try:
    main()
finally:
    heavy = ("torch", "transformers", "numpy", "torchao", "bitsandbytes", "peft", "scipy")
    print("imported:", *(name for name in heavy if name in sys.modules))
"""
# As in the command, once transformers and peft look what else is installed.
LIBRARIES = """
from jachess_ext.cli import main
main(["select", "/no/such/table.csv", "--target", "9"])
import transformers.quantizers.auto, peft, torchao, bitsandbytes
"""


@pytest.mark.parametrize("command", ["", *_COMMANDS])
def test_help_imports_no_heavy_library(command: str) -> None:
    done = processes.run([sys.executable, "-c", HELP, *command.split(), "--help"])
    assert "usage: jachess" in done.stdout
    assert done.stdout.splitlines()[-1] == "imported:"
    assert done.returncode == 0 and not done.stderr


def test_libraries_say_nothing_of_their_own() -> None:
    for name in ("torchao", "bitsandbytes", "peft", "transformers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    done = processes.run([sys.executable, "-c", LIBRARIES])
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("jachess select: ")


def test_other_warnings_stay(caplog: pytest.LogCaptureFixture) -> None:
    quiet_libraries()
    quiet_libraries()
    torchao, pytree = logging.getLogger("torchao"), logging.getLogger("torch.utils._pytree")
    assert len(torchao.filters) == 1
    with caplog.at_level(logging.WARNING):
        torchao.warning("Failed to load /a/_C_x.so: Could not load this library: /a/_C_x.so")
        pytree.warning("<enum 'A'> is an Enum subclass and is now natively supported by torch.")
        processor = logging.getLogger("bitsandbytes.backends.cpu.ops")  # says so with AVX512-BF16
        processor.warning("Failed to load CPU gemm_4bit_forward from kernels-community: no kernels")
        torchao.warning("this weight is wrong")
        torchao.error("Failed to load /a/_C_x.so: the disk is broken")
        logging.getLogger("bitsandbytes.cextension").warning("BNB_CUDA_VERSION=1 is set")
    assert [record.getMessage() for record in caplog.records] == [
        "this weight is wrong",
        "Failed to load /a/_C_x.so: the disk is broken",
        "BNB_CUDA_VERSION=1 is set",
    ]
