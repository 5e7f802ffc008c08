"""Look for an operation of exact mode whose bits depend on the batch:

    python -m experiments.invariant --seeds 100

Each operation, on one CPU device or one Hopper GPU, is drawn at random shapes and compared with
itself: other rows beside a row, one to all of them, another place, another layout of the same rows,
as a part of a larger program and in a loop. Prints each shape at which a bit differs, and exits
with 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.record import write
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import DEFAULT_ROPE_THETA
from fp8rl_jax.precision import exact_compute
from pallas_kernels import invariant

_COMPUTE = exact_compute()()


@dataclass(frozen=True)
class Case:
    """A function of rows.

    Attributes:
        function: of the arrays in `rows`, whose first axis is the rows'.
        rows: arrays [m, 1, ...] of layouts that a layer has.
    """

    name: str
    shape: str
    seed: int
    function: Callable[..., Any]
    rows: tuple[jax.Array, ...]


def _width(rng: np.random.Generator) -> int:
    widths = (rng.integers(1, 64), rng.integers(64, 700), 64 * rng.integers(1, 32))
    return int(rng.choice(widths))


def _draw(rng, dtype, most_rows: int):
    """Shapes, and a function that draws numbers over a few powers of ten."""
    m = int(rng.integers(20, most_rows))

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.normal(size=shape) * np.exp(rng.normal(size=shape)), dtype)

    return m, normal


def _dot(rng, dtype, most, replaced=None):
    (m, normal), k, n = _draw(rng, dtype, most), _width(rng), _width(rng)
    w = normal(n, k)
    return lambda x: (replaced or invariant.dot)(x, w), (normal(m, 1, k),), (k, n)


def _row_sum(rng, dtype, most, replaced=None):
    (m, normal), n = _draw(rng, dtype, most), int(rng.choice([_width(rng), rng.integers(1, 9000)]))
    return replaced or invariant.row_sum, (normal(m, 1, n, dtype=jnp.float32),), (n,)


def _rms_norm(rng, dtype, most):
    (m, normal), n, heads = _draw(rng, dtype, most), _width(rng), int(rng.choice([0, 1, 3, 8]))
    gain = normal(n)
    shape = (m, 1, heads, n) if heads else (m, 1, n)
    return lambda x: _COMPUTE.rms_norm(x, gain, 1e-5), (normal(*shape),), shape[1:]


def _gated(rng, dtype, most):
    (m, normal), n = _draw(rng, dtype, most), _width(rng)
    kind = str(rng.choice(["silu", "gelu_pytorch_tanh"]))
    return partial(_COMPUTE.gated, activation=kind), (normal(m, 1, n), normal(m, 1, n)), (kind, n)


def _rotate(rng, dtype, most):
    (m, normal), half, heads = (
        _draw(rng, dtype, most),
        int(rng.choice([4, 8, 32, 64])),
        int(rng.integers(1, 10)),
    )
    frequencies = DEFAULT_ROPE_THETA ** (-jnp.arange(half) / half)
    places = jnp.asarray(rng.integers(0, 9000, (m, 1)))

    def turn(x, places):
        return _COMPUTE.rotate(x, _COMPUTE.rope_tables(frequencies, places))

    return turn, (normal(m, 1, heads, 2 * half), places), (heads, 2 * half)


def _logprob(rng, dtype, most):
    (m, normal), n = _draw(rng, dtype, most), int(rng.choice([259, 8192, rng.integers(2, 9000)]))
    tokens, temperature = jnp.asarray(rng.integers(0, n, (m, 1))), float(rng.uniform(0.5, 1.5))
    logits = 4 * normal(m, 1, n, dtype=jnp.float32)
    return partial(_COMPUTE.logprob, temperature=temperature), (logits, tokens), (n,)


def _routing(rng, dtype, most):
    (m, normal), k, experts = _draw(rng, dtype, most), _width(rng), int(rng.integers(2, 129))
    router, per_token = normal(experts, k) / k**0.5, min(experts, int(rng.integers(1, 9)))

    def route(x):
        best, ids = jax.lax.top_k(_COMPUTE.routing(x, router), per_token)
        return _COMPUTE.normalize(best), ids

    return route, (normal(m, 1, k),), (k, experts, per_token)


def _combine(rng, dtype, most):
    (m, normal), n, k = _draw(rng, dtype, most), _width(rng), int(rng.integers(1, 9))
    weights = jnp.abs(normal(m, 1, k, dtype=jnp.float32))
    return _COMPUTE.combine, (weights, normal(m, 1, k, n)), (k, n)


def _experts(rng, dtype, most):
    """A product of rows that are sorted by group."""
    (m, normal), k, n = _draw(rng, dtype, most), _width(rng), _width(rng)
    groups = int(rng.integers(2, 17))
    w, group = normal(groups, n, k), jnp.asarray(rng.integers(0, groups, (m, 1)))

    def product(x, group):
        order, ids = jnp.argsort(group.reshape(-1)), group.reshape(-1)
        sizes = jnp.zeros(groups, jnp.int32).at[ids].add(1)
        out = _COMPUTE.product(x.reshape(-1, k)[order], w, sizes)
        return jnp.zeros_like(out).at[order].set(out).reshape(*group.shape, n)

    return product, (normal(m, 1, k), group), (groups, n, k)


def _adapted(rng, dtype, most):
    """What a low-rank adapter adds, and a residual."""
    (m, normal), n = _draw(rng, dtype, most), _width(rng)
    add = partial(_COMPUTE.add_scaled, factor=float(rng.uniform(0.1, 2)))

    def function(x, y, z):
        return _COMPUTE.add(add(x, y), _COMPUTE.scale(z, 0.37))

    return function, tuple(normal(m, 1, n) for _ in range(3)), (n,)


OPERATIONS: dict[str, Callable[..., tuple]] = {
    "dot": _dot,
    "row_sum": _row_sum,
    "rms_norm": _rms_norm,
    "gated": _gated,
    "rotate": _rotate,
    "logprob": _logprob,
    "routing": _routing,
    "combine": _combine,
    "experts": _experts,
    "adapted": _adapted,
}


def draw(name: str, seed: int, dtype: jnp.dtype, most_rows: int, replaced=None) -> Case:
    """Draw a case of an operation.

    Args:
        most_rows: from 20 up to these.
        replaced: a function that is tried in place of "dot" or "row_sum".
    """
    rng = np.random.default_rng([seed, *name.encode()])
    given = () if replaced is None else (replaced,)
    function, rows, shape = OPERATIONS[name](rng, dtype, most_rows, *given)
    return Case(name, f"{shape} {dtype} rows {len(rows[0])}", seed, function, rows)


def differences(case: Case) -> list[str]:
    """Find the companies in which a row of the case has other bits."""
    rng, m = np.random.default_rng(case.seed), len(case.rows[0])
    run, found = jax.jit(case.function), []
    whole = _bits(run(*case.rows))
    for count in sorted({1, 2, 3, 7, 8, 17, int(rng.integers(2, m)), m}):
        chosen = rng.permutation(m)[:count]
        few = _bits(run(*(x[chosen] for x in case.rows)))
        found += [f"{count} rows"] * (not _same(few, [x[chosen] for x in whole]))
    half = m // 2 * 2

    def halves(x):
        return x[:half].reshape(2, half // 2, *x.shape[2:])

    layouts = {
        "[2, m / 2]": run(*map(halves, case.rows)),
        "a loop": jax.jit(lambda *rows: jax.lax.map(lambda part: case.function(*part), rows))(
            *(x[:half].reshape(2, half // 2, *x.shape[1:]) for x in case.rows)
        ),
        "a program": jax.jit(partial(_among_others, case.function))(*(x[:half] for x in case.rows)),
    }
    for name, out in layouts.items():
        flat = [x.reshape(half, *y.shape[1:]) for x, y in zip(_bits(out), whole, strict=True)]
        found += [name] * (not _same(flat, [x[:half] for x in whole]))
    return found


def _among_others(function, *rows):
    """The function where a compiler would like to do more at once: behind a scaling by a power of
    two that is undone, before sums, and with a second use."""
    scaled = [x * 2 if jnp.issubdtype(x.dtype, jnp.floating) else x + 1 for x in rows]
    back = [x / 2 if jnp.issubdtype(x.dtype, jnp.floating) else x - 1 for x in scaled]
    out = function(*back)
    others = jax.tree.map(lambda x: (jnp.tanh(x.astype(jnp.float32)) + x * 3).sum(-1), out)
    gradient = jax.grad(lambda x: jnp.sum(jax.tree.leaves(function(x, *back[1:]))[0] * 0.5))(
        back[0]
    )
    return jax.lax.optimization_barrier((out, others, gradient))[0]


def _bits(out: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(out)]


def _same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class Arguments:
    """Look for an operation whose bits depend on the batch."""

    seeds: int = 20
    """Shapes of each operation and dtype."""
    first: int = 0
    """First seed."""
    most_rows: int = 2000
    """A case has from 20 up to these."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Of the rows."""
    output: str = ""
    """JSON file of the result."""


def main(argv: list[str]) -> int:
    """Exit code: 0; 1 where a bit differs, 2 for a fault in what was given."""
    return run_command("invariant", Arguments, run, argv)


def run(arguments: Arguments) -> None:
    """Try, print and write.

    Raises:
        UserError: the machine is not one that batch-invariant operations are for.
    """
    if not invariant.is_available():
        raise UserError("operations are batch-invariant on one CPU device or one Hopper GPU alone")
    counts, failed = {}, []
    for name in OPERATIONS:
        for dtype in arguments.dtypes:
            for seed in range(arguments.first, arguments.first + arguments.seeds):
                case = draw(name, seed, jnp.dtype(dtype), arguments.most_rows)
                if found := differences(case):
                    failed.append({"operation": name, "shape": case.shape, "differs": found})
                    print(name, case.shape, "differs for", ", ".join(found), flush=True)
                jax.clear_caches()
            counts[f"{name} {dtype}"] = arguments.seeds
            print(f"{name} {dtype}: {arguments.seeds} shapes", flush=True)
    if arguments.output:
        made = facts("experiments.invariant")
        write(Path(arguments.output), {"shapes": counts, "failed": failed, "made": made})
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
