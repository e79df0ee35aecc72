"""neural-tangents on an encoder of the sizes of `common.ENCODER`, written in plain JAX.

Run by `benchmarks.ntk --jax PYTHON` with a Python that has jax and neural-tangents (tried:
jax 0.4.38, neural-tangents 0.6.5); imports nothing of this project.  Prints a JSON list: seconds of
each round, compiled, the kernel [N, N, 2, 2] waited for.  The embedding tables are left out, in its
favour: with them the structured mode asks for 576 GB at N = 2, T = 8.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

WIDTH, LAYERS, HEADS, INNER, CLASSES = 384, 6, 12, 1536, 2


def _parameters(key: Any) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    count = iter(jax.random.split(key, 16 * LAYERS + 16))

    def dense(inputs: int, outputs: int) -> dict[str, Any]:
        weight = 0.02 * jax.random.normal(next(count), (inputs, outputs))
        return {"w": weight, "b": jnp.zeros(outputs)}

    def norm() -> dict[str, Any]:
        return {"g": jnp.ones(WIDTH), "b": jnp.zeros(WIDTH)}

    def block() -> dict[str, Any]:
        square = {name: dense(WIDTH, WIDTH) for name in ("q", "k", "v", "o")}
        return square | {
            "up": dense(WIDTH, INNER),
            "down": dense(INNER, WIDTH),
            "first": norm(),
            "second": norm(),
        }

    return {
        "norm": norm(),
        "blocks": [block() for _ in range(LAYERS)],
        "pooler": dense(WIDTH, WIDTH),
        "head": dense(WIDTH, CLASSES),
    }


def _encoder(parameters: dict[str, Any], x: Any) -> Any:
    """Logits [N, 2] of embedded tokens [N, T, 384]: BERT's order of layers, no padding."""
    import jax
    import jax.numpy as jnp

    def dense(p: dict[str, Any], x: Any) -> Any:
        return x @ p["w"] + p["b"]

    def norm(p: dict[str, Any], x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred**2).mean(-1, keepdims=True)
        return p["g"] * centred / jnp.sqrt(variance + 1e-12) + p["b"]

    def attention(p: dict[str, Any], x: Any) -> Any:
        n, t, _ = x.shape
        q, k, v = (dense(p[name], x).reshape(n, t, HEADS, -1) for name in ("q", "k", "v"))
        scores = jnp.einsum("nthd,nshd->nhts", q, k) / (WIDTH // HEADS) ** 0.5
        mixed = jnp.einsum("nhts,nshd->nthd", jax.nn.softmax(scores), v)
        return dense(p["o"], mixed.reshape(n, t, WIDTH))

    x = norm(parameters["norm"], x)
    for p in parameters["blocks"]:
        x = norm(p["first"], x + attention(p, x))
        inner = jax.nn.gelu(dense(p["up"], x), approximate=False)
        x = norm(p["second"], x + dense(p["down"], inner))
    return dense(parameters["head"], jnp.tanh(dense(parameters["pooler"], x[:, 0])))


def main() -> None:
    """Time the kernel in the structured mode."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--samples", type=int, required=True)
    options.add_argument("--tokens", type=int, required=True)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--threads", type=int, default=2)
    given = options.parse_args()
    os.sched_setaffinity(
        0, sorted(os.sched_getaffinity(0))[: given.threads]
    )  # before XLA's threads

    import jax
    import neural_tangents as nt
    from jax._src.interpreters import ad as inner
    from jax.interpreters import ad

    # neural-tangents 0.6.5 looks for these where jax had them once.
    ad.config = jax.config
    for name in ("source_info_util", "add_tangents", "backward_pass", "linearize"):
        setattr(ad, name, getattr(inner, name))

    kernel = jax.jit(
        nt.empirical_ntk_fn(
            lambda p, x: _encoder(p, x),
            trace_axes=(),
            vmap_axes=0,
            implementation=nt.NtkImplementation.STRUCTURED_DERIVATIVES,
        ),
        static_argnums=1,
    )
    key = jax.random.PRNGKey(0)
    x = 0.02 * jax.random.normal(key, (given.samples, given.tokens, WIDTH))
    parameters = _parameters(key)
    kernel(x, None, parameters).block_until_ready()
    seconds = []
    for _ in range(given.rounds):
        start = time.perf_counter()
        kernel(x, None, parameters).block_until_ready()
        seconds.append(time.perf_counter() - start)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
