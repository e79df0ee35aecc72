"""What `import jachess_ext` loads, also with a torch that lacks something private."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cloudpickle
import pytest
import torch

import jachess_ext
from jachess_ext import torch_private

from .. import processes

PACKAGE = Path(jachess_ext.__file__).parent


def _run(code: str) -> str:
    done = processes.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- what is loaded -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start",
    ["import jachess_ext", "import jachess_ext.lab.cli", "import jachess_ext.torch_private"],
)
def test_neither_torch_nor_transformers_is_loaded(start: str) -> None:
    loaded = _run(f"{start}\nimport sys; print(*sys.modules)").split()
    assert not {"torch", "numpy", "transformers"} & set(loaded)
    ours = [name for name in loaded if name.startswith("jachess_ext.")]
    names = ("torch_private", "_io", "lab", "lab.cli")
    assert set(ours) <= {f"jachess_ext.{name}" for name in names}


def test_operators_load_with_torch_alone_and_derivatives_no_more_than_the_engine() -> None:
    """Nothing of the package beside them, and no distribution that torch has not loaded."""
    code = """
import sys, torch
before = {*sys.modules}
import jachess_ext.ops
print(*{*sys.modules} - before)
import jachess_ext as jx
jx.jet, jx.jvp
print(*sys.modules)
"""
    by_operators, by_derivatives = _run(code).splitlines()
    loaded = set(by_operators.split())
    ours = {name for name in loaded if name.startswith("jachess_ext")}
    assert {name.split(".")[1] for name in ours if "." in name} <= {"ops", "torch_private", "_C"}
    others = {name.split(".")[0] for name in loaded - ours}
    assert not {name for name in others if not name.startswith("_sysconfigdata")} - {
        *sys.stdlib_module_names
    }

    loaded = set(by_derivatives.split())
    parts = {name.split(".")[1] for name in loaded if name.startswith("jachess_ext.")}
    assert parts <= {"torch_private", "differentiable", "jet", "ops", "_C", "_ops"}
    assert "jachess_ext.differentiable.mode" not in loaded  # formulas alone
    assert not {"transformers", "torch._dynamo", "scipy", "sklearn", "matplotlib"} & loaded


def test_selection_loads_nothing_that_trains() -> None:
    code = """
import sys, pkgutil, importlib, jachess_ext.scaling as scaling
for module in pkgutil.iter_modules(scaling.__path__):
    importlib.import_module(f"{scaling.__name__}.{module.name}")
for name in scaling.__all__:
    getattr(scaling, name)
print(*sys.modules)
"""
    loaded = set(_run(code).split())
    assert not {"transformers", "datasets", "accelerate", "sklearn", "matplotlib"} & loaded
    parts = {name.split(".")[1] for name in loaded if name.startswith("jachess_ext.")}
    assert not {"training", "lab"} & parts


@pytest.mark.parametrize(
    ("more", "aside"),
    [
        ([], {"pandas", "matplotlib", "scipy.stats"}),
        (["--method", "rectified"], {"pandas", "matplotlib", "scipy.stats"}),
        (["--report", "page.html"], {"scipy.stats"}),
    ],
)
def test_select_loads_what_it_reads(more: list[str], aside: set[str], tmp_path: Path) -> None:
    rows = [f"{name},2.0,1.7,{last},1.3" for name, last in (("a", 1.5), ("b", 1.45))]
    table = tmp_path / "losses.csv"
    table.write_text("\n".join(["model,100,200,400,800", *rows]) + "\n")
    given = ["select", str(table), "--target", "6400", *more]
    code = f"""
import os, sys
from jachess_ext.lab.cli import main
os.chdir({str(tmp_path)!r})
assert main({given!r}) == 0
print("loaded", *sys.modules)
"""
    loaded = set(_run(code).rpartition("loaded")[2].split())
    assert not {"torch", "transformers", "datasets", "sklearn"} & loaded and not aside & loaded
    parts = {name.split(".")[1] for name in loaded if name.startswith("jachess_ext.")}
    assert not {"training", "smoothness", "ntk"} & parts
    lab = {name.split(".")[2] for name in loaded if name.startswith("jachess_ext.lab.")}
    assert lab - {"workbench", "live"} == {"cli", "commands"}
    assert ("workbench" in lab) == ("live" in lab) == ("--report" in more)


STARTS = [
    "",
    "import jachess_ext.jet, jachess_ext.ntk.api, jachess_ext.smoothness.settings",
    "import jachess_ext.doctor, jachess_ext.training",
    """import jachess_ext
for name in jachess_ext.__all__:
    getattr(jachess_ext, name)
assert not [name for name in sys.modules if name.startswith("jachess_ext.lab")]""",
]


def test_a_name_that_is_also_a_subpackage_is_the_function() -> None:
    """However the package is met first: forks of one process, which has the libraries already.
    No public name loads the lab."""
    code = f"""
import gc, os, sys, torch, transformers.trainer
gc.freeze()
for start in {STARTS!r}:
    child = os.fork()
    if not child:
        exec(start)
        import jachess_ext
        for name in ("jet", "ntk", "smoothness"):
            named = getattr(jachess_ext, name)
            module = sys.modules["jachess_ext." + name]
            assert named is getattr(jachess_ext, name) is getattr(module, name), named
            assert callable(named)
        from jachess_ext import jet, ntk, smoothness
        assert callable(jet) and callable(ntk) and callable(smoothness)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, start
"""
    _run(code)


def test_every_public_name_is_there() -> None:
    for name in jachess_ext.__all__:
        if name != "LightningSmoothnessMonitor":  # needs lightning
            assert getattr(jachess_ext, name) is not None
    assert set(jachess_ext.__all__) <= set(dir(jachess_ext))
    with pytest.raises(AttributeError, match="has no attribute 'jett'"):
        jachess_ext.jett  # noqa: B018


def test_the_engine_is_first_met_by_the_compiler() -> None:
    code = """
import torch, jachess_ext as jx
model = torch.nn.Tanh()
step = torch.compile(lambda x, u: jx.jet(model, x, u).second, backend="eager")
x, u = torch.ones(2), torch.ones(2, 2)
expected = -2 * torch.tanh(x) * (1 - torch.tanh(x).square())
print(torch.allclose(step(x, u), expected.expand(1, 2)))
"""
    assert _run(code) == "True\n"


# ---- what travels to another process ------------------------------------------------------------


def _slope(x: torch.Tensor) -> torch.Tensor:
    return jachess_ext.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]


class _Actor:
    """As Ray's: a class whose methods use the global module, and which holds it."""

    def __init__(self) -> None:
        self.module = jachess_ext

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.module.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]


@contextmanager
def _by_value() -> Iterator[None]:
    """As functions of a script or notebook travel: whole, with the globals that they use."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


TRAVELLERS = {
    "lambda": lambda: lambda x: jachess_ext.jvp(torch.sin, (x,), (torch.ones_like(x),))[1],
    "function": lambda: _slope,
    "partial": lambda: functools.partial(_slope),
    "method": lambda: _Actor().run,
    "in a closure": lambda: (
        lambda jx: lambda x: jx.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]
    )(jachess_ext),
}


def test_functions_over_the_package_reach_another_process(tmp_path: Path) -> None:
    with _by_value():
        sent = {name: cloudpickle.dumps(make()) for name, make in TRAVELLERS.items()}
    (tmp_path / "functions").write_bytes(pickle.dumps(sent))
    code = f"""
import pathlib, pickle
sent = pickle.loads(pathlib.Path({str(tmp_path / "functions")!r}).read_bytes())
functions = {{name: pickle.loads(text) for name, text in sent.items()}}
import torch, jachess_ext
x = torch.ones(2)
print([name for name, function in functions.items() if not function(x).allclose(x.cos())])
"""
    assert _run(code) == "[]\n"


def test_ray() -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    ray.init(num_cpus=1, include_dashboard=False)
    try:
        with _by_value():
            task = ray.remote(_slope).remote(torch.ones(1))
            actor = ray.remote(_Actor).remote().run.remote(torch.ones(1))
            slopes = ray.get([task, actor])
    finally:
        ray.shutdown()
    assert torch.allclose(torch.stack(slopes), torch.ones(2, 1).cos())


def test_a_copy_of_the_package_is_the_package() -> None:
    protocols = 0, pickle.HIGHEST_PROTOCOL
    copies = [pickle.loads(pickle.dumps(jachess_ext, protocol)) for protocol in protocols]
    copies += [copy.copy(jachess_ext), copy.deepcopy({"jx": [jachess_ext]})["jx"][0]]
    assert all(copied is jachess_ext for copied in copies)


def test_public_names_travel() -> None:
    for name in jachess_ext.__all__:
        if "Lightning" not in name:
            named = getattr(jachess_ext, name)
            assert cloudpickle.loads(cloudpickle.dumps(named)) is named, name


# ---- what torch does not promise ----------------------------------------------------------------

# Without these there is no torch of today: torch.func and nn.Module are made of the first two.
_NEEDED = {"torch.utils._pytree", "torch.Tensor._make_wrapper_subclass"}
_WITHOUT = """
import sys, warnings
import torch, torch.func, torch.nn.utils.rnn, torch.utils.checkpoint

def hide(path):
    place, _, name = path.rpartition(".")
    owner = torch_private.find(place)
    if hasattr(owner, "__dict__") and name in vars(owner):
        delattr(owner, name)
    sys.modules[path] = None

import importlib.util
spec = importlib.util.spec_from_file_location("torch_private", {file!r})
torch_private = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torch_private)
for path in {paths!r}:
    hide(path)
import jachess_ext as jx
jx.jet, jx.jvp, jx.ntk, jx.smoothness, jx.ops, jx.JacHess
"""


def _private_paths() -> list[str]:
    """List the private names of torch in the package's source, jet/compiled's aside."""
    names = set(torch_private._PATHS.values())
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name != "compiled":  # torch.compile's own interface, imported as it traces
            pattern = r"torch(?:\.\w+)*\.(?:_[a-z]\w*|_C)(?:\.\w+)*"
            names |= set(re.findall(pattern, file.read_text()))
    of_extensions = {"torch.utils.cpp_extension", "torch._dynamo", "torch._C"}
    return sorted(name for name in names - of_extensions if "._dynamo" not in name)


def test_private_names_are_found() -> None:
    paths = _private_paths()
    assert "torch._C._is_fwd_grad_enabled" in paths or "torch._C._autograd" in paths
    assert len(paths) >= len(torch_private._PATHS)


def test_a_torch_without_any_of_them_can_be_imported_with() -> None:
    paths = sorted(set(_private_paths()) - _NEEDED)
    _run(_WITHOUT.format(file=torch_private.__file__, paths=paths))


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(set(_private_paths()) - _NEEDED))
def test_a_torch_without_one_of_them_can_be_imported_with(path: str) -> None:
    _run(_WITHOUT.format(file=torch_private.__file__, paths=[path]))


def test_what_needs_a_missing_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(torch_private._PATHS))
    monkeypatch.delitem(vars(torch_private), name, raising=False)
    monkeypatch.setitem(torch_private._PATHS, name, "torch._C._gone.for_good")
    with pytest.raises(torch_private.MissingPrivate, match=r"has no torch\._C\._gone\.for_good,"):
        getattr(torch_private, name)


def test_functions_are_refused_without_the_switch() -> None:
    code = """
import torch
del torch._C._is_fwd_grad_enabled
import jachess_ext as jx
class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            return torch.round(x)
x = torch.ones(2)
print(torch.allclose(jx.jet(torch.sin, x, torch.ones(1, 2)).first[0], torch.cos(x)))
try:
    jx.jet(Straight.apply, x, torch.ones(1, 2))
except RuntimeError as error:
    print(error)
"""
    first, second = _run(code).splitlines()
    assert first == "True"
    assert second.startswith("a jet went into the torch.autograd.Function __main__.Straight")
