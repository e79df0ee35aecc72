"""`jachess doctor`, and imports that survive a missing or broken binary."""

import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from jachess_ext import doctor
from jachess_ext.ops import library
from jachess_ext.ops.library import STATE
from python_tests import processes

PACKAGE = Path(doctor.__file__).parent
USE = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from jachess_ext import ops
import torch
print([str(w.message) for w in caught if "jachess_ext" in str(w.message)])
print(ops.available("activation_jet", torch.device("cpu")))
x = torch.randn(4, 3)
print(torch.equal(ops.activation_jet(x, "gelu", 2), ops.activation_jet_reference(x, "gelu", 2)))
from jachess_ext import doctor
print("exit", doctor.main())
"""
IN_EACH = """
import os, sys, torch
for folder in {folders!r}:
    child = os.fork()
    if not child:
        os.chdir(folder)
        sys.path.insert(0, folder)
        sys.stdout = open("output", "w")
        exec({use!r})
        sys.stdout.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, folder
"""
WAYS = [(broken, in_checkout) for broken in (False, True) for in_checkout in (False, True)]


def make_copy(folder: Path, break_library: bool, in_checkout: bool) -> None:
    """A copy of the package whose operators' library is missing or broken."""
    target = folder / "jachess_ext"
    target.mkdir(parents=True)
    if in_checkout:
        (folder / "csrc").mkdir()
    shutil.copytree(PACKAGE / "ops", target / "ops", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("doctor.py", "torch_private.py", "_io.py"):
        shutil.copy(PACKAGE / name, target)
    (target / "__init__.py").write_text("")
    if break_library:
        (target / STATE.path.name).write_bytes(b"\x7fELF of another machine")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, bool], str]:
    """What `USE` prints with each copy, in forks of one process that has imported torch."""
    folders = {way: tmp_path_factory.mktemp("copy") for way in WAYS}
    for way, folder in folders.items():
        make_copy(folder, *way)
    code = IN_EACH.format(folders=[str(folder) for folder in folders.values()], use=USE)
    directory = tmp_path_factory.mktemp("nowhere")
    processes.run([sys.executable, "-c", code], cwd=directory, check=True)
    return {way: (folder / "output").read_text() for way, folder in folders.items()}


def test_this_installation_has_no_problems() -> None:
    report = doctor.report()
    assert report["operators"]["loaded"]
    assert "layer_norm_jet_backward (cpu)" in report["operators"]["kernels"]
    assert set(report["built"]) == {"torch", "compiler", "cpu", "cuda", "cuda_archs"}
    assert report["versions"]["torch"] is not None
    assert not any("operators" in text for text in report["problems"])


@pytest.mark.parametrize(("break_library", "in_checkout"), WAYS)
def test_import_survives_without_the_binary(
    outputs: dict[tuple[bool, bool], str], break_library: bool, in_checkout: bool
) -> None:
    """The remedy is one for who has a checkout, or a wheel."""
    output = outputs[break_library, in_checkout]
    reinstall = "`pip install --force-reinstall --no-deps jachess_ext`"
    assert output.count("`make build`") == 2 * in_checkout  # of the warning, and of doctor
    assert output.count(reinstall) == (0 if in_checkout else 2 * break_library)
    assert output.count("install a wheel") == (0 if in_checkout or break_library else 2)
    lines = output.splitlines()
    assert lines[0].count("jachess_ext:") == 1  # one warning
    assert ("do not load" if break_library else "are missing") in lines[0]
    assert lines[1:3] == ["False", "True"]
    if break_library:
        assert "operators     NOT loaded" in lines
        assert lines[-1] == "exit 1"
    else:  # the pure-Python installation is no problem
        assert "operators     none" in lines
        assert lines[-2:] == ["core ready: derivatives, smoothness, the NTK", "exit 0"]


def test_another_torch_than_built_against(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "build_info", lambda: {"torch": "2.10.0"})
    monkeypatch.setattr(library.torch, "__version__", "2.99.0")
    path = tmp_path / STATE.path.name
    path.write_bytes(b"not a library")
    state = library._load(path)
    assert state.kernels == frozenset()
    assert state.problem is not None
    start = "the compiled operators, built against torch 2.10.0, do not load with torch 2.99.0 ("
    assert state.problem.startswith(start)
    assert state.problem.endswith(f": run {library.REBUILD}.")


def test_a_torch_below_the_floor_is_one_sentence() -> None:
    version = "2.9.1+cpu"
    code = f"import torch; torch.__version__ = {version!r}; import jachess_ext"
    done = processes.run([sys.executable, "-c", code])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: jachess_ext needs torch 2.10 or newer, but torch {version} is installed: "
        "`pip install -U 'torch>=2.10'` (the package itself need not be built again)"
    )


def test_old_packages_are_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "4.57.1")
    problems = doctor.report()["problems"]
    assert any("transformers 4.57.1 is older than 5.2" in text for text in problems)


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        ("8.0", "8.9", True),
        ("8.6", "8.0", False),
        ("8.0", "9.0", False),
        ("8.0+PTX", "9.0", True),
        ("9.0a", "10.0", False),
        ("8.0 9.0a 10.0+PTX", "12.0", True),
        ("8.0 9.0a 10.0+PTX", "7.5", False),
        ("8.0+PTX 9.0a 10.0 12.0+PTX", "11.0", True),
    ],
)
def test_which_gpus_a_build_serves(archs: str, capability: str, runs: bool) -> None:
    assert doctor._runs_on(archs, capability) == runs


@pytest.mark.parametrize("in_checkout", [False, True])
def test_gpu_problems(monkeypatch: pytest.MonkeyPatch, in_checkout: bool) -> None:
    monkeypatch.setattr(doctor, "IN_CHECKOUT", in_checkout)
    gpu = {"torch_cuda": "13.0", "visible": [{"name": "H200", "capability": "9.0"}]}
    bare = doctor.STATE._replace(kernels=frozenset())
    monkeypatch.setattr(doctor, "STATE", bare)
    (problem,) = doctor._cuda_problems({}, gpu)
    assert problem == "A GPU is visible but no CUDA kernels were built: install " + (
        "the CUDA toolkit 13.0 (nvcc), then `make build`."
        if in_checkout
        else "a wheel that has them."
    )
    built = bare._replace(kernels=frozenset({("activation_jet", "cuda")}))
    monkeypatch.setattr(doctor, "STATE", built)
    (problem,) = doctor._cuda_problems({"cuda_archs": "8.0"}, gpu)
    remedies = ("install a wheel made with", "wheel"), ("run", "build")
    start, target = remedies[in_checkout]
    assert problem.endswith(f"for 8.0: {start} `TORCH_CUDA_ARCH_LIST=9.0 make {target}`.")
    assert doctor._cuda_problems({"cuda_archs": "9.0a"}, gpu) == []
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    (problem,) = doctor._cuda_problems({}, {"torch_cuda": None, "visible": []})
    assert problem.endswith("get-started), then `make build`." if in_checkout else "get-started).")


@pytest.mark.parametrize("built", [True, False])
def test_a_gpu_below_the_floor_is_a_note(monkeypatch: pytest.MonkeyPatch, built: bool) -> None:
    gpu = {"torch_cuda": "12.6", "visible": [{"name": "T4", "capability": "7.5"}]}
    kernels = frozenset({("activation_jet", "cuda")} if built else ())
    monkeypatch.setattr(doctor, "STATE", doctor.STATE._replace(kernels=kernels))
    monkeypatch.setattr(doctor, "_gpu", lambda: gpu)
    report = doctor.report()
    assert not report["problems"]
    assert sum("T4 has capability 7.5" in note for note in report["notes"]) == 1


@pytest.mark.parametrize("asked", ["1", "0"])
def test_triton_and_what_its_first_call_costs(
    asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = [{"name": "T4", "capability": "7.5"}, {"name": "H200", "capability": "9.0"}]
    monkeypatch.setattr(doctor, "_gpu", lambda: {"torch_cuda": "13.0", "visible": gpus})
    monkeypatch.setenv("JACHESS_TRITON", asked)
    triton = ModuleType("triton")
    triton.__version__, triton.__spec__ = "3.99", ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", triton)
    doctor.main()
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("Triton  "))
    assert line.startswith(
        f"Triton        3.99, {'asked' if asked == '1' else 'not asked'} for by JACHESS_TRITON=1; "
        "does not serve T4 (sm 7.5), serves H200 (sm 9.0); the first call of each kind compiles"
    )
    monkeypatch.setattr(doctor, "_gpu", lambda: {"torch_cuda": None, "visible": []})
    assert "; no GPU to serve; " in doctor.report()["triton"]
    monkeypatch.setitem(sys.modules, "triton", None)
    assert doctor.report()["triton"].startswith("missing")


def test_it_runs_without_transformers() -> None:
    """And a command that needs it says so in a sentence."""
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from jachess_ext.lab.cli import main\n"
        "print('codes', main(['doctor']), main(['demo']))"
    )
    done = processes.run([sys.executable, "-c", code])
    assert "operators  " in done.stdout and done.stdout.endswith("codes 0 2\n"), done
    assert "core ready" in done.stdout
    assert "jachess demo: " in done.stderr and "Traceback" not in done.stderr
