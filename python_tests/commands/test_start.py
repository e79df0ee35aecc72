"""What the command line imports for its help, and which messages of libraries it leaves out."""

from __future__ import annotations

import importlib.util
import logging
import sys
from subprocess import CompletedProcess

import pytest

from jachess_ext import cli, doctor
from jachess_ext._io import quiet_libraries
from jachess_ext.cli import _COMMANDS
from python_tests import processes

Capture = pytest.CaptureFixture[str]

# What is not installed is imported with an error, as sys.modules has it.
HELP = """
import sys
missing, *arguments = sys.argv[1:]
sys.modules.update({name: None for name in missing.split()})
from jachess_ext.cli import main
try:
    sys.exit(main(arguments))
finally:
    heavy = ("torch", "transformers", "numpy", "torchao", "bitsandbytes", "peft", "scipy", "tyro")
    print("imported:", *(name for name in heavy if sys.modules.get(name)))
"""
EXTRAS = (
    "transformers peft accelerate datasets safetensors sklearn scipy pandas matplotlib joblib tqdm"
)
# As in the command, once transformers and peft look what else is installed.
LIBRARIES = """
from jachess_ext.cli import main
main(["select", "/no/such/table.csv", "--target", "9"])
import transformers.quantizers.auto, peft, torchao, bitsandbytes
"""


def start(missing: str, *arguments: str) -> CompletedProcess[str]:
    return processes.run([sys.executable, "-c", HELP, missing, *arguments])


def test_help_imports_no_heavy_library() -> None:
    done = start("", "--help")
    assert done.returncode == 0 and not done.stderr
    assert "usage: jachess" in done.stdout and all(name in done.stdout for name in _COMMANDS)
    assert done.stdout.splitlines()[-1] == "imported:"


@pytest.mark.parametrize("command", _COMMANDS)
def test_help_needs_no_extra_but_the_command_line_s(command: str) -> None:
    done = start(EXTRAS, command, "--help")
    assert done.returncode == 0 and not done.stderr
    assert f"usage: jachess {command}" in done.stdout
    if command in ("finetune", "evaluate", "select", "select-live", "doctor"):
        assert "torch" not in done.stdout.splitlines()[-1]


def test_without_the_command_line_s_library() -> None:
    done = start("tyro", "select", "t.csv", "--target", "9")
    assert done.returncode == 2
    assert done.stderr == (
        "jachess select: tyro is needed for this and not installed: pip install 'jachess-ext[hf]'\n"
    )
    doctor = start(f"tyro {EXTRAS}", "doctor")
    assert "platform" in doctor.stdout and not doctor.stderr


def test_ctrl_c_is_a_word(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "main", stop)
    assert cli.main(["doctor"]) == 130 and capsys.readouterr().err == "stopped\n"


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
