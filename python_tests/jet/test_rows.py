"""`jx.laplacian` and its siblings refuse rows that depend on each other, and no others."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import jachess_ext as jx
from jachess_ext.jet.passes.eager import to_jets
from jachess_ext.jet.rows import passes as row_passes

N, D, MANY = 40, 3, 18
REFUSED = "depend on other rows"
Rows = Callable[[Tensor], Tensor]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def one_pair(x: Tensor, to: int, of: int) -> Tensor:
    return torch.cat([x[:to], x[to : to + 1] * x[of : of + 1], x[to + 1 :]])


def nearest(x: Tensor, k: int) -> Tensor:
    distances = torch.cdist(x, x)
    return x[distances.detach().topk(k + 1, largest=False).indices[:, 1:]].mean(1)


def in_groups(x: Tensor, size: int, f: Rows) -> Tensor:
    return torch.cat([f(part) for part in x.split(size)])


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


def of_layer(make: Callable[[int], Any]) -> Rows:
    def run(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        result = make(x.shape[-1]).to(x.dtype)(x)
        return result[0] if isinstance(result, tuple) else result

    return run


MIXING: dict[str, Rows] = {
    # statistics of the batch
    "mean": lambda x: x - x.mean(0),
    "mean, linear": lambda x: (x * x.mean(0)).sin(),
    "mean of everything": lambda x: x.sin() + x.mean(),
    "a thousandth of the mean": lambda x: x.sin() + 1e-3 * x.mean(0),
    "a billionth of the mean": lambda x: x.sin() + 1e-9 * x.mean(0),
    "one coordinate's mean": lambda x: x.sin() + x[:, 1:2].mean(),
    "last coordinate's mean": lambda x: x.sin() + x[:, -1:].mean(),
    "no value of it": lambda x: x + x.mean(0) - x.mean(0).detach(),
    "sum": lambda x: x.sum(0, keepdim=True).expand_as(x).sin(),
    "product": lambda x: x * x.tanh().prod(0),
    "variance": lambda x: x / x.var(0).sqrt(),
    "standard deviation": lambda x: x / x.std(),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch norm, a layer": of_layer(lambda d: nn.BatchNorm1d(d, track_running_stats=False)),
    "ghost batch norm": lambda x: in_groups(
        x, 16, lambda z: F.batch_norm(z, None, None, training=True)
    ),
    "layer norm of the batch": lambda x: F.layer_norm(x, x.shape),
    "instance norm over rows": lambda x: F.instance_norm(x.T[None])[0].T,
    "norm": lambda x: x / x.norm(),
    "norm by columns": lambda x: F.normalize(x, dim=0),
    "clipped by the norm": lambda x: (x * (8 / x.norm()).clamp(max=1)).sin(),
    "clipped by a column's norm": lambda x: x * (2 / x[:, :1].norm()).clamp(max=1),
    "covariance": lambda x: x @ torch.cov(x.T),
    "whitened": lambda x: x @ torch.linalg.inv(x.T @ x),
    "gram": lambda x: (x @ x.T) @ x,
    "softmax over rows": lambda x: x.softmax(0),
    "log-softmax over rows": lambda x: x.log_softmax(0),
    "logsumexp": lambda x: x - x.logsumexp(0),
    # order
    "median": lambda x: x - x.median(0).values,
    "maximum": lambda x: x - x.amax(0),
    "minimum of all": lambda x: x - x.min(),
    "largest size": lambda x: x / x.abs().max(),
    "sorted": lambda x: x.sort(0)[0] ** 3,
    "k-th": lambda x: x - x.kthvalue(5, 0).values,
    "quantile": lambda x: x.minimum(x.quantile(0.7, 0)),
    "threshold at the mean": lambda x: F.relu(x - x.mean()),
    "clamped by the third": lambda x: x.minimum(x.topk(3, 0).values[2]),
    "trimmed": lambda x: x.maximum(0.5 * x.sum(0)),
    "ranked by another": lambda x: x[x[:, 0].argsort()].sin(),
    # rows that are named
    "row 7": lambda x: x**3 - x[7] ** 3,
    "row 31": lambda x: x.sin() * x[31].cos(),
    "last row": lambda x: x - x[-1:],
    "first row": lambda x: x * x[0],
    "first row in the last": lambda x: one_pair(x, len(x) - 1, 0),
    "row 20 in row 3": lambda x: one_pair(x, 3, 20),
    "row 38 in row 39": lambda x: one_pair(x, 39, 38),
    "one coordinate of row 7": lambda x: x.sin() + x[7, 1],
    "from row 30 on": lambda x: torch.cat([x[:30], x[30:] - x[30:].mean(0)]),
    "a pair": lambda x: torch.cat([x[:24], x[24:26].flip(0), x[26:]]),
    # neighbours
    "next row": lambda x: x * x.roll(1, 0),
    "the row after next": lambda x: x * x.roll(2, 0),
    "eleven rows on": lambda x: x.sin() + x.roll(11, 0),
    "backwards": lambda x: x.flip(0).sin(),
    "mixup": lambda x: 0.7 * x + 0.3 * x.flip(0),
    "shuffled": lambda x: x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))],
    "rows before": lambda x: x.cumsum(0),
    "rows behind": lambda x: x.flip(0).cumsum(0).flip(0),
    "cumulative product": lambda x: x.tanh().cumprod(0),
    "differences": lambda x: torch.cat([x[:1], x.diff(dim=0)]),
    "smoothed": lambda x: F.avg_pool1d(x.T[None], 3, 1, 1)[0].T,
    "convolved": lambda x: F.conv1d(x.T[:, None], x.new_ones(1, 1, 3), padding=1)[:, 0].T,
    "triangle": lambda x: torch.ones(len(x), len(x), dtype=x.dtype).tril() @ x,
    "spectrum": lambda x: torch.fft.fft(x, dim=0).real,
    "recurrent over rows": of_layer(lambda d: nn.GRU(d, d)),
    "a mean of fours": lambda x: x - x.unflatten(0, (-1, 4)).mean(1).repeat_interleave(4, 0),
    "groups of eight from the second": lambda x: torch.cat(
        [x[:8], in_groups(x[8:], 8, lambda z: z - z.mean(0))]
    ),
    "halves": lambda x: torch.cat([x[:20] * x[20:], x[20:]]),
    "reshaped": lambda x: x.reshape(x.shape[1], -1).cumsum(-1).reshape(x.shape),
    "transposed": lambda x: x.T.reshape(x.shape).sin(),
    # company
    "attention": attention,
    "causal attention": lambda x: F.scaled_dot_product_attention(
        x[None], x[None], x[None], is_causal=True
    )[0],
    "attention by hand": lambda x: (x @ x.T).softmax(-1) @ x,
    "attention layer": of_layer(
        lambda d: nn.TransformerEncoderLayer(d, 1, 8, dropout=0.0, batch_first=True)
    ),
    "nearest": lambda x: x - nearest(x, 1),
    "three nearest": lambda x: x.sin() + nearest(x, 3),
    "distances": lambda x: x * torch.cdist(x, x).exp().sum(-1, keepdim=True),
    "kernel density": lambda x: x * (-(x[:, None] - x).square().sum(-1)).exp().mean(-1)[:, None],
    "moments of classes": lambda x: (
        x
        - x.new_zeros(2, x.shape[1]).index_add(0, torch.arange(len(x)) % 2, x)[
            torch.arange(len(x)) % 2
        ]
    ),
    "a matrix of rows": lambda x: (
        torch.linspace(0, 1, len(x) ** 2, dtype=x.dtype).reshape(len(x), -1) @ x
    ),
}
CALLS = ("laplacian", "hessian_diagonal", "divergence")


@pytest.mark.parametrize("size", [D, MANY])
@pytest.mark.parametrize("mix", MIXING)
def test_rows_that_depend_on_others_are_refused(mix: str, size: int) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        jx.laplacian(MIXING[mix], randn(N, size))


@pytest.mark.parametrize("call", CALLS[1:])
@pytest.mark.parametrize("mix", [*MIXING][::6])
def test_every_call_refuses_them(mix: str, call: str) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        getattr(jx, call)(MIXING[mix], randn(N, D))


class Switched(nn.Module):
    """Mixes rows where ``share`` is not 0."""

    def __init__(self, mix: Rows) -> None:
        super().__init__()
        self.mix, self.share = mix, 0.0
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (self.mix(x) if self.share else x.sin())


# ---- which calls are checked ---------------------------------------------------------------------


@pytest.fixture
def directions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many directions each pass has."""
    counts: list[int] = []

    def run(*args: Any) -> Any:
        jets = to_jets(*args)
        counts.append(len(jets[0].first))
        return jets

    monkeypatch.setattr(row_passes, "to_jets", run)
    return counts


def train(f: Rows, steps: int, x: Tensor | None = None) -> None:
    for _ in range(steps):
        jx.laplacian(f, randn(N, D) if x is None else x).laplacian.sum().backward()


@pytest.mark.parametrize("size", [D, MANY])
def test_every_call_is_checked_but_those_of_a_training_loop(
    size: int, directions: list[int]
) -> None:
    net, x = Switched(torch.sin), randn(4, size)
    for _ in range(70):
        jx.laplacian(net, x)
    with torch.no_grad():
        jx.laplacian(net, x)
    assert directions == [size + 1] * 71
    for call in CALLS:
        for chunk_size in (None, 2):
            getattr(jx, call)(torch.cos, x, check=False, chunk_size=chunk_size)
    assert max(directions[71:]) == size


@pytest.mark.parametrize("made_anew", [False, True])
def test_the_calls_of_a_training_loop_that_are_checked(
    made_anew: bool, directions: list[int]
) -> None:
    """A function made anew at each step, over the same network and another batch, is the same."""
    net = Switched(torch.sin)
    for _ in range(200):
        time = randn(N, 1)
        train((lambda x, time=time: net(x + time)) if made_anew else net, 1)
    checked = [step for step, count in enumerate(directions, 1) if count > D]
    assert checked == [1, 2, 4, 8, 16, 32, 64, 128, 192]
    directions.clear()
    train(net, 20, randn(N, 20))
    assert directions == [21] * 20
    jx.laplacian(net, randn(N, D))  # after a backward
    jx.laplacian(net, randn(N, D))
    assert directions[21:] == [D + 1]


def in_a_list(net: Switched) -> Rows:
    nets = [net]
    return lambda x: nets[0](x)


class Solver:
    """A user's object around a net."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def residual(self, x: Tensor) -> Tensor:
        return self.net(x)

    __call__ = residual


NET: nn.Module = nn.Identity()


def by_global(x: Tensor) -> Tensor:
    return NET(x)


def set_global(net: nn.Module) -> None:
    global NET
    NET = net


FORMS: dict[str, Callable[[Any], Rows]] = {
    "module": lambda net: net,
    "function": lambda net: lambda x: net(x),
    "partial": lambda net: functools.partial(net.forward),
    "method": lambda net: Solver(net).residual,
    "object": lambda net: Solver(net),
    "object in a function": lambda net: functools.partial(lambda s, x: s.residual(x), Solver(net)),
    "list": in_a_list,
    "default": lambda net: lambda x, *, net=net: net(x),
    "global variable": lambda net: set_global(net) or by_global,
    "global variable of a global function": lambda net: set_global(net) or (lambda x: by_global(x)),
}


@pytest.mark.parametrize("form", FORMS)
def test_another_network_in_a_training_loop_is_checked(form: str) -> None:
    """By code alone all of a form would be one function."""
    train(FORMS[form](Switched(torch.sin)), 4)
    other = Switched(MIXING["mean"])
    other.share = 1.0
    for _ in range(3):
        with pytest.raises(ValueError, match=REFUSED):
            train(FORMS[form](other), 1)


def test_what_a_training_loop_shows_is_seen_at_once() -> None:
    def step(net: nn.Module, share: float) -> None:
        train(lambda x: net(x).sin() + share * x.mean(0), 1)

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0) if self.training else x

    net = nn.Sequential(nn.Linear(D, D).double(), Inner()).eval()
    for _ in range(4):
        step(net, 0.0)
    with pytest.raises(ValueError, match=REFUSED):
        step(net, 1.0)
    for _ in range(4):
        step(net, 0.0)
    with pytest.raises(ValueError, match=REFUSED):
        step(net.train(), 0.0)
    nets = in_a_list(switched := Switched(MIXING["mean"]))
    train(nets, 4)
    switched.share = 1.0
    with pytest.raises(ValueError, match=REFUSED):
        train(nets, 1)


@pytest.mark.parametrize("steps", [1, 20])
def test_what_it_does_not_show_is_seen_within_64_steps(steps: int) -> None:
    """A gate that an optimizer opens; most begin at 0, and open in the first step."""
    net, x = Switched(torch.sin), randn(N, D)
    gate = nn.Parameter(torch.zeros((), dtype=torch.float64))
    f = lambda x: net(x) + gate * x.mean(0)  # noqa: E731
    train(f, steps, x)
    with torch.no_grad():
        gate.fill_(1)
    with pytest.raises(ValueError, match=REFUSED):
        train(f, 64 if steps > 1 else 1, x)


def test_evaluation_after_training_is_checked() -> None:
    net = Switched(MIXING["mean"])
    train(net, 9)
    jx.laplacian(net, randn(N, D))
    net.share = 1.0
    with pytest.raises(ValueError, match=REFUSED):
        jx.laplacian(net, randn(N, D))


def test_other_points_are_seen() -> None:
    x, net = randn(N, D), Switched(torch.sin)
    f = lambda x: net(x) - x[8:].sum(0)  # noqa: E731
    train(f, 5, x[:8])
    with pytest.raises(ValueError, match=REFUSED):
        train(f, 1, x)


@pytest.mark.parametrize("size", [D, MANY])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("at", [0.0, 1.0, -3.0])
def test_rows_that_are_alike_hide_nothing(at: float, call: str, size: int) -> None:
    mixes = [lambda x: x * x.mean(0), lambda x: x * x[:, 1].var(), lambda x: x * (x - x[3]) ** 2]
    for mix in mixes:
        with pytest.raises(ValueError, match=REFUSED):
            getattr(jx, call)(mix, torch.full((N, size), at, dtype=torch.float64))
    for name in ("cube", "softmax", "table of rows", "not a number"):
        f = BY_ROWS[name]
        x = torch.full((N, size), at, dtype=torch.float64)
        getattr(jx, "laplacian" if call == "divergence" else call)(f, x)


# ---- functions by rows are never refused -------------------------------------------------------


def table_of(rows: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(-2, 2, rows, dtype=torch.float64).to(dtype)[:, None]


def net_of(make: Callable[[int], list[nn.Module]]) -> Rows:
    return of_layer(lambda size: nn.Sequential(*make(size)))


def deep(size: int) -> list[nn.Module]:
    hidden = [layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.ReLU())]
    return [nn.Linear(size, 16), *hidden, nn.Linear(16, 1)]


def transformer(size: int) -> list[nn.Module]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True)
    return [nn.Unflatten(1, (-1, 1)), nn.Linear(1, 8), layer, nn.Flatten()]


BY_ROWS: dict[str, Rows] = {
    "identity": lambda x: x,
    "sine": torch.sin,
    "zero": torch.zeros_like,
    "constant": lambda x: torch.ones(len(x), 2, dtype=x.dtype),
    "sum": lambda x: x.sum(-1),
    "cube": lambda x: (x**3).sum(-1),
    "steps": lambda x: x.round() + x.sign(),
    "pieces": lambda x: torch.where(x > 0.5, x.exp(), torch.zeros_like(x)),
    "few rows that are not constant": lambda x: x * (x > x.new_full((), 1.8)),
    "absolute": lambda x: x.abs().sum(-1),
    "maximum": lambda x: x.amax(-1),
    "sorted": lambda x: x.sort(-1)[0].cumsum(-1),
    "normalised": lambda x: F.normalize(x, dim=-1),
    "softmax": lambda x: x.softmax(-1),
    "log-softmax": lambda x: (30 * x).log_softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "large": lambda x: (x.clone() * 1e4).sin().sum(-1) * 1e4,
    "overflow": lambda x: (x * 300).exp(),
    "overflow of a slope": lambda x: (x * 1e4).square().sum(-1),
    "tiny": lambda x: (x * 1e-3).pow(4).sum(-1) * 1e-3,
    "cancelling": lambda x: (1e4 * x + x.sin()) - 1e4 * x,
    "cancelling to nothing": lambda x: x.exp() * x.neg().exp() + x.sin() ** 2 + x.cos() ** 2,
    "polynomial": lambda x: x**6 - 6 * x**5 + 15 * x**4 - 20 * x**3 + 15 * x**2 - 6 * x + 1,
    "infinite slopes": lambda x: F.relu(x).sqrt(),
    "not a number": lambda x: x.log(),
    "poles": lambda x: 1 / (x - x[:1].detach()),
    "scales by rows": lambda x: x.sin() * 10 ** (2 * table_of(len(x), x.dtype)),
    "table of rows": lambda x: (x * table_of(len(x), x.dtype)).cos(),
    "detached mean": lambda x: x.sin() * x.mean(0).detach(),
    "narrower inside": lambda x: x.to(torch.bfloat16).sin().to(x.dtype).sum(-1),
    "wider inside": lambda x: x.double().sin().to(x.dtype),
    "perceptron": net_of(lambda d: [nn.Linear(d, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()]),
    "deep": net_of(deep),
    "convolution": net_of(
        lambda d: [nn.Unflatten(1, (1, d)), nn.Conv1d(1, 4, 3, padding=1), nn.SiLU()]
    ),
    "transformer": net_of(transformer),
    "recurrent": lambda x: of_layer(lambda d: nn.GRU(1, 4, batch_first=True))(x[..., None]),
    "products": lambda x: (x[:, :, None] @ x[:, None]).flatten(1).sin(),
    "groups within a row": lambda x: x.unflatten(1, (-1, 3)).mean(-1),
    "eye": lambda x: torch.eye(len(x), dtype=x.dtype) @ x.sin(),
    # drawing
    "dropout": lambda x: F.dropout(x.sin(), 0.5),
    "noise": lambda x: x.sin() * torch.randn_like(x),
    "uniform": lambda x: (x + torch.rand(len(x), 1, dtype=x.dtype)).cos(),
    "coins": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BY_ROWS)
def test_functions_by_rows_are_never_refused(name: str, dtype: torch.dtype) -> None:
    for seed, (rows, size) in enumerate([(2, D), (7, MANY), (130, D), (130, MANY)]):
        x = randn(rows, size, seed=seed, dtype=dtype)
        for _ in range(2):
            jx.laplacian(BY_ROWS[name], x)
        for call in (jx.hessian_diagonal, jx.laplacian):
            named = {"chunk_size": 2} if size == D else {}
            call(BY_ROWS[name], x, directions=x.expand(3, rows, size), **named)


@pytest.mark.parametrize("name", ["perceptron", "transformer", "cancelling", "softmax"])
def test_functions_by_rows_are_not_refused_under_autocast(name: str) -> None:
    for size in (D, MANY):
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                jx.laplacian(BY_ROWS[name], randn(33, size, dtype=torch.float32))


def test_a_weak_mixture_in_half_precision_is_seen() -> None:
    for dtype in DTYPES[2:]:
        with pytest.raises(ValueError, match=REFUSED):
            jx.laplacian(lambda x: x.sin() + 1e-3 * x.mean(0), randn(N, D, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("size", [D, MANY])
def test_complex_results(size: int, dtype: torch.dtype) -> None:
    x = randn(N, size, dtype=dtype)
    for call in CALLS:
        for _ in range(2):
            getattr(jx, call)(lambda x: torch.complex(x.sin(), 1e3 * x.cos()), x)
            getattr(jx, call)(lambda x: torch.fft.fft(x * 1e3, dim=1), x)
        for mix in (
            lambda x: torch.complex(x.sin(), x.cos() - 1e-4 * x.mean(0)),
            lambda x: torch.fft.fft(x, dim=0),
            lambda x: torch.polar(x.exp(), x.roll(1, 0)),
        ):
            with pytest.raises(ValueError, match=REFUSED):
                getattr(jx, call)(mix, x)


@pytest.mark.parametrize("rows", [2, 3, 8, 9])
def test_every_pair_of_rows(rows: int) -> None:
    """Also by what looks into rounding, and at a graph's trace."""
    x = randn(rows, 2)
    for to in range(rows):
        for of in set(range(rows)) - {to}:
            with pytest.raises(ValueError, match=REFUSED):
                jx.laplacian(lambda x, to=to, of=of: one_pair(x, to, of), x)
            assert row_passes.rows_mix(lambda x, to=to, of=of: one_pair(x, to, of), x)
    assert not row_passes.rows_mix(torch.sin, x)


def test_threads() -> None:
    """Four at once, each with a function of its own and one that all have."""
    shared, x, failures = nn.Sequential(nn.Linear(D, 8), nn.Tanh()).double(), randn(N, D), []

    def work() -> None:
        try:
            own = Switched(MIXING["mean"])
            for _ in range(30):
                jx.laplacian(shared, x)
                jx.laplacian(own, x)
            own.share = 1.0
            with pytest.raises(ValueError, match=REFUSED):
                jx.laplacian(own, x)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_no_number_is_drawn_and_a_stateful_net_is_called_once() -> None:
    net, x = nn.utils.parametrizations.spectral_norm(nn.Linear(D, 4)).double(), randn(N, D)
    other = copy.deepcopy(net)
    with torch.no_grad():
        other(x)
    state = torch.get_rng_state()
    jx.laplacian(net, x)
    assert torch.equal(torch.get_rng_state(), state)
    for one, two in zip(net.buffers(), other.buffers(), strict=True):
        assert torch.equal(one, two)


class Module(nn.Module):
    def __init__(self, call: str, net: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.call, self.net, self.settings = call, net, settings

    def forward(self, x: Tensor) -> Tensor:
        return getattr(jx, self.call)(self.net, x, **self.settings)[-1]


@pytest.mark.parametrize("call", CALLS)
def test_an_exported_program_asks_when_it_runs(call: str) -> None:
    """Nothing is read while export traces."""
    net, x = Switched(MIXING["mean"]), randn(N, D)
    found = torch.export.export(Module(call, net), (torch.zeros_like(x),)).module()(x)
    torch.testing.assert_close(found, getattr(jx, call)(net, x)[-1])
    net.share = 1.0
    program = torch.export.export(Module(call, net), (x,)).module()
    with pytest.raises(RuntimeError, match=REFUSED):
        program(x)


@pytest.mark.parametrize("kind", ["of one sign", "of both signs", "a tensor"])
def test_weights_in_an_exported_program(kind: str) -> None:
    """Both signs are one pass there, whose directions are not in the order of the coordinates."""
    net, x = Switched(MIXING["mean"]), randn(N, D)
    weights: Any = [float(i % 3 + 1) for i in range(D)]
    if kind != "of one sign":
        weights[1], weights[2] = -1.0, 0.0
    weights = torch.tensor(weights).double() if kind == "a tensor" else weights
    module = Module("laplacian", net, weights=weights)
    found = torch.export.export(module, (torch.zeros_like(x),)).module()(x)
    torch.testing.assert_close(found, jx.laplacian(net, x, weights=weights).laplacian)
    net.share = 1.0
    program = torch.export.export(module, (x,)).module()
    with pytest.raises(RuntimeError, match=REFUSED):
        program(x)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jacrev", "jacfwd", "jvp"])
@pytest.mark.parametrize("size", [D, MANY])
def test_within_transforms(transform: str, size: int) -> None:
    def run(share: Tensor) -> Tensor:
        mix = lambda x: (x.sin() * (1 + share)).cos() + on * share * x.mean(0)  # noqa: E731
        return jx.laplacian(mix, x)[2].sum()

    shares, x, on = torch.tensor([0.0, 1.0]).double(), randn(N, size), 0.0
    calls: dict[str, Callable[[], Any]] = {
        "vmap": lambda: torch.func.vmap(run)(shares),
        "grad": lambda: torch.func.grad(run)(shares[1]),
        "jacrev": lambda: torch.func.jacrev(run)(shares[1]),
        "jacfwd": lambda: torch.func.jacfwd(run)(shares[1]),
        "jvp": lambda: torch.func.jvp(run, (shares[1],), (shares[1],)),
    }
    for _ in range(3):
        calls[transform]()
    on = 1.0
    with pytest.raises(ValueError, match=REFUSED):
        calls[transform]()


def test_a_graph_asks_where_it_is_traced() -> None:
    for mixing in ("row 31", "row 20 in row 3", "a billionth of the mean", "mean, linear"):
        torch._dynamo.reset()
        net = Switched(MIXING[mixing])
        step = torch.compile(lambda x, net=net: jx.laplacian(net, x), backend="aot_eager")
        x = torch.zeros(N, D).double() if mixing == "mean, linear" else randn(N, D)
        step(x)
        net.share = 1.0
        with pytest.raises(ValueError, match=REFUSED):
            step(x)


def test_a_checkpoint_around_calls_of_a_training_loop() -> None:
    """Its second run of a call carries the streams of the first."""
    net = Switched(torch.sin)
    for _ in range(5):
        x = randn(N, D).requires_grad_()
        checkpoint(lambda x: jx.laplacian(net, x)[2], x, use_reentrant=False).sum().backward()
        torch.testing.assert_close(x.grad, -x.detach().cos())
