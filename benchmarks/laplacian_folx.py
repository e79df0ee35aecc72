"""folx (forward Laplacian, in JAX) on the networks of `benchmarks.laplacian`.

Run by ``benchmarks.laplacian --folx PYTHON`` with a Python that has jax and folx (tried: jax
0.10.2, folx 0.2.30); imports nothing of this project.  Arguments: a folder, in which network.npz
holds the points (``x_``) and the parameters by their names in torch; the number of heads.  Writes
values and gradients to results.npz there and a line to stdout; then answers each line of stdin,
"value" or "training step", with the seconds of one run, compiled before.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any


def _linear(p: dict[str, Any], name: str, x: Any) -> Any:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def _mlp(p: dict[str, Any], x: Any) -> Any:
    import jax.numpy as jnp

    *hidden, last = sorted({int(name.split(".")[0]) for name in p})
    for number in hidden:
        x = jnp.tanh(_linear(p, str(number), x))
    return _linear(p, str(last), x)[0]


def _transformer(p: dict[str, Any], x: Any, heads: int) -> Any:
    import jax
    import jax.numpy as jnp

    h = _linear(p, "enter", x[:, None]) + p["place"]
    for number in range(sum(name.startswith("mixers.") for name in p) // 2):
        parts = _linear(p, f"projections.{number}", h).reshape(len(x), 3, heads, -1)
        q, k, v = (parts[:, i].swapaxes(0, 1) for i in range(3))
        weights = jax.nn.softmax(q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5)
        mixed = (weights @ v).swapaxes(0, 1).reshape(len(x), -1)
        h = h + jnp.tanh(_linear(p, f"mixers.{number}", mixed))
    return _linear(p, "leave", h).mean()


def main() -> None:
    """Compile, write results, answer."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from folx import forward_laplacian

    folder, heads = Path(sys.argv[1]), int(sys.argv[2])
    arrays = {name: jnp.asarray(array) for name, array in np.load(folder / "network.npz").items()}
    x = arrays.pop("x_")

    def laplacian(p: dict[str, Any], x: Any) -> Any:
        def f(point: Any) -> Any:
            return _transformer(p, point, heads) if "place" in p else _mlp(p, point)

        return jax.vmap(forward_laplacian(f))(x).laplacian

    def loss(p: dict[str, Any], x: Any) -> Any:
        return (laplacian(p, x) ** 2).mean()

    runs = {"value": jax.jit(laplacian), "training step": jax.jit(jax.grad(loss))}
    values, gradients = (jax.block_until_ready(run(arrays, x)) for run in runs.values())
    np.savez(folder / "results.npz", value_=values, **gradients)
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        jax.block_until_ready(runs[line.strip()](arrays, x))
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
