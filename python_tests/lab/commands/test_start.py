"""What the command line imports for its help, and which messages of libraries it leaves out."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import jachess_ext
from jachess_ext import doctor
from jachess_ext._io import DISTRIBUTIONS, quiet_libraries
from jachess_ext.lab import cli
from jachess_ext.lab.cli import COMMANDS
from python_tests import processes

Capture = pytest.CaptureFixture[str]

# What is not installed is imported with an error, as sys.modules has it.
HELP = """
import sys
missing, commands, *arguments = sys.argv[1:]
sys.modules.update({name: None for name in missing.split()})
from jachess_ext.lab.cli import main
heavy = ("torch", "transformers", "numpy", "torchao", "bitsandbytes", "peft", "scipy", "tyro")
for command in commands.split() or [None]:
    try:
        code = main([command, *arguments] if command else arguments)
    except SystemExit as end:
        code = end.code
    print("imported:", *(name for name in heavy if sys.modules.get(name)))
    if code:
        sys.exit(code)
"""
EXTRAS = (
    "transformers peft accelerate datasets safetensors sklearn scipy pandas matplotlib joblib tqdm"
)
# As in the command, once transformers and peft look what else is installed.
LIBRARIES = """
from jachess_ext.lab.cli import main
main(["select", "/no/such/table.csv", "--target", "9"])
import transformers.quantizers.auto, peft, torchao, bitsandbytes
"""


def start(missing: str, *arguments: str) -> CompletedProcess[str]:
    return processes.run([sys.executable, "-c", HELP, missing, *arguments])


def test_help_imports_no_heavy_library() -> None:
    done = start("", "", "--help")
    assert done.returncode == 0 and not done.stderr
    assert "usage: jachess" in done.stdout and all(name in done.stdout for name in COMMANDS)
    assert done.stdout.splitlines()[-1] == "imported:"


def test_help_needs_no_extra_but_the_command_line_s() -> None:
    """Of one command after another in a process; the last may import torch."""
    light = [name for name in COMMANDS if name != "demo"]
    done = start(EXTRAS, " ".join([*light, "demo"]), "--help")
    assert done.returncode == 0 and not done.stderr
    shown = done.stdout.split("imported:")
    for command, text, imported in zip([*light, "demo"], shown, shown[1:], strict=False):
        assert f"usage: jachess {command}" in text
        assert command == "demo" or "torch" not in imported.splitlines()[0]


OPTIONS = {
    "select": ("t.csv", "--target", "9"),
    "select --out": ("t.csv", "--target", "9", "--out", "o.csv"),
    "select --report": ("t.csv", "--target", "9", "--report", "p.html"),
    "select-live": ("--models", "a", "b", "--task", "t.csv:d.csv"),
    "finetune": ("--model", "m", "--tasks", "t", "--methods", "none"),
    "evaluate": ("results.jsonl",),
    "demo": ("--quick",),
}
NEEDS = {
    name.removeprefix("jachess "): needed for name, needed in cli.modules_needed().items() if needed
}
LACKED = [("select", ("scipy",)), ("finetune", ("sklearn",)), *NEEDS.items()]


@pytest.mark.parametrize(("command", "modules"), LACKED)
def test_what_a_command_lacks_is_one_line(
    command: str,
    modules: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """One module, or all that it needs: what is named is all that is missing."""
    monkeypatch.chdir(tmp_path)
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    name, _, option = command.partition(" ")
    assert cli.main([name, *OPTIONS[command]]) == 2
    packages = [DISTRIBUTIONS.get(module, module) for module in modules]
    assert capsys.readouterr().err == (
        f"jachess {name}: {option}{' ' * bool(option)}needs {', '.join(packages)}, which "
        f"{'are' if len(packages) > 1 else 'is'} not installed: pip install {' '.join(packages)}\n"
    )
    assert not list(tmp_path.iterdir())


def test_doctor_says_what_commands_need(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert cli.main(["doctor"]) in (0, 1)
    needing = re.findall("note: (.*) would need `pip install scipy`", capsys.readouterr().out)
    assert needing[0].split(", ") == [
        name for name, needed in cli.modules_needed().items() if needed
    ]


def test_select_needs_neither_tyro_nor_torch(tmp_path: Path) -> None:
    given = write_table(tmp_path / "t.csv", 2)[:-2]  # with the default method
    done = start("tyro transformers pandas matplotlib", "", *given)
    assert done.returncode == 0 and "model-0" in done.stdout, done.stderr
    assert "torch" not in done.stdout.splitlines()[-1]
    done = start("tyro scipy pandas matplotlib", "", *given, "--report", str(tmp_path / "p.html"))
    assert done.returncode == 2 and done.stderr == (
        "jachess select: --report needs scipy, pandas, matplotlib, which are not installed: "
        "pip install scipy pandas matplotlib\n"
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["selct"], "there is no command 'selct'; did you mean select?"),
        (["x"], "there is no command 'x'; there are demo, finetune"),
        (["select", "t.csv", "--target", "many"], "many"),
        (["select", "t.csv", "--target", "9", "--read", "size"], "--read takes pairs"),
    ],
)
def test_wrong_words(given: list[str], words: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(given)
    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"jachess_ext {jachess_ext.__version__}\n"


def test_ctrl_c_is_a_word(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def stop(commands: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "main", stop)
    assert cli.main(["doctor"]) == 130 and capsys.readouterr().err == "stopped\n"


def write_table(path: Path, models: int, name: str = "model") -> list[str]:
    """Returns the command that ranks these models."""
    rows = [f"{name}-{row},{2 + row},{1.5 + row},{1.2 + row},{1.1 + row}" for row in range(models)]
    path.write_text("\n".join(["name,100,200,400,800", *rows, ""]), encoding="utf-8")
    return ["select", str(path), "--target", "6400", "--method", "subtuning"]


@contextlib.contextmanager
def reader_gone(monkeypatch: pytest.MonkeyPatch, *streams: str) -> Iterator[None]:
    """The streams are a pipe that nobody reads, as after head; closing them must not fail."""
    read, write = os.pipe()
    os.close(read)
    with monkeypatch.context() as patch, open(write, "w", encoding="utf-8") as pipe:
        for stream in streams:
            patch.setattr(sys, stream, pipe)
        yield


@pytest.mark.parametrize("command", [(), ("evaluate",)])
def test_help_into_a_pipe_that_is_closed(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    with reader_gone(monkeypatch, "stdout", "stderr"), pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0 and capsys.readouterr().err == ""


@pytest.mark.parametrize("models", [3, 400])  # less and more than a buffer
def test_a_command_into_a_pipe_that_is_closed_ends_its_work(
    models: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    given = write_table(tmp_path / "t.csv", models)
    with reader_gone(monkeypatch, "stdout", "stderr"):
        assert cli.main([*given, "--out", str(tmp_path / "out.csv")]) == 0
        assert cli.main(["select", str(tmp_path / "none.csv"), "--target", "1"]) == 2
        assert cli.main(["doctor"]) == 0
    assert len((tmp_path / "out.csv").read_text().splitlines()) == models + 1
    assert capsys.readouterr().err == ""


def test_the_whole_process_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its exit, too, where Python flushes once more."""
    given = write_table(tmp_path / "t.csv", 3)
    with reader_gone(monkeypatch, "stdout"):
        done = processes.run([sys.executable, "-m", "jachess_ext", *given], stdout=sys.stdout)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_names_in_any_encoding(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the output cannot show is an escape, and nothing is lost of the rest."""
    given = write_table(tmp_path / "t.csv", 3, "ä-模型-\N{SNOWMAN}")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    assert cli.main(given) == 0
    shown = written.getvalue().decode(encoding)
    for character in "ä模型\N{SNOWMAN}":
        escaped = character.encode(encoding, "backslashreplace").decode(encoding)
        assert shown.count(escaped) >= 3
    assert "sizes up to 800" in shown


@pytest.mark.slow
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
