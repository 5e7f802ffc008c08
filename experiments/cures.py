"""Ways to let an update arrive, side by side, over learning rates and steps: `python -m
experiments.cures` (half an hour on one core).

Masters begin as a checkpoint's weights (SmolLM2-135M, some linears) and are moved step by step as
Adam moves them, by up to the learning rate: each weight by a direction that it keeps, and by one
that is drawn anew at every step. After each step a grid serves them:

    bfloat16                what both sides round to under bfloat16 compute
    e4m3                    blocks of 128 x 128, of a checkpoint that was quantized so
    e4m3 from bfloat16      the same blocks of float32 masters, of a checkpoint in bfloat16

and each cure rounds in its way:

    nearest     as all do without a cure
    dithered    masters drawn from their cells at the start, then to nearest (`model.dither`)
    hashed      stochastically, by a hash of the value (`precision.weight_rounding`; bfloat16 alone)
    stochastic  with draws of its own at every sync
    carried     to nearest, with the error of the last sync added before (error feedback, arXiv
                1901.09847), which both sides would have to keep: a float32 a weight

Of each: sync/arrived, noise and cosine (rollout.arrival), and what is between two syncs that the
step between them did not do, over the step: |(S' - S) - (M' - M)| / |M' - M|, `flicker`. `draws`
is what a float32 export of dithered masters has in it, over the weights: |M - W| / |W|. `borders`
is the share of a bfloat16 checkpoint's weights on the border of two cells of e4m3, by the rule of
scales. What the record has is kept, with the commit that made it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from experiments.behaviour import alike
from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.depth import short
from experiments.record import write
from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.errors import UserError
from fp8rl_jax.precision import dequantize, quantize
from fp8rl_jax.precision.rounding import dither, dither_blocks, dither_inside, round_by_hash
from fp8rl_jax.weights.load import load
from fp8rl_jax.weights.resolve import resolve_model
from pallas_kernels.quantize import expand_scales
from pallas_kernels.rounding import round_stochastic, rounded

BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
E4M3 = TensorFormat("e4m3", (128, 128))
TENSORS = (("q_proj", 0), ("up_proj", 14), ("down_proj", 29))
"""Linears, and layers."""
RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4)
STEPS = (1, 6, 20, 60, 200)
KEPT = {"in one direction": 1.0, "mostly at random": 0.3}
"""Part of a step's length in the direction that a weight keeps."""


@dataclass(frozen=True)
class Arguments:
    """What arrives under each cure."""

    model: str = "smollm2-135m"
    """As of `model.path`."""
    output: str = "experiments/results/arrival/cures.json"
    """The record."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        return []


class Grid(NamedTuple):
    """What weights are served on; each function gives float32."""

    checkpoint: Callable[[Array], Array]
    """What weights are in the file that training starts from."""
    nearest: Callable[[Array], Array]
    stochastic: Callable[[Array, Array], Array]
    dither: Callable[[Array], Array]


def _bfloat16(x: Array) -> Array:
    return rounded(x, BF16).astype(F32)


def _bfloat16_stochastic(x: Array, key: Array) -> Array:
    return round_stochastic(x, BF16, key).astype(F32)


def _e4m3(x: Array) -> Array:
    return dequantize(quantize(x, E4M3, "reference"))


def _e4m3_stochastic(x: Array, key: Array) -> Array:
    q = quantize(x, E4M3, "reference")
    # the largest value of a block is 448 up to a rounding of its scale
    scaled = jnp.clip(x / expand_scales(q.scales, q.block, x.shape[-2:]), -448.0, 448.0)
    drawn = round_stochastic(scaled, q.values.dtype, key)
    return dequantize(replace(q, values=drawn))


GRIDS = {
    "bfloat16": Grid(
        _bfloat16,
        _bfloat16,
        _bfloat16_stochastic,
        lambda x: dither(x, BF16, jnp.uint32(1)),
    ),
    "e4m3": Grid(
        _e4m3,
        _e4m3,
        _e4m3_stochastic,
        lambda x: dither_blocks(x, E4M3, F32, jnp.uint32(1)),
    ),
    "e4m3 from bfloat16": Grid(
        _bfloat16,
        _e4m3,
        _e4m3_stochastic,
        lambda x: dither_inside(x, E4M3, jnp.uint32(1)),
    ),
}
CURES = ("nearest", "dithered", "hashed", "stochastic", "carried")


@partial(jax.jit, static_argnames=("grid", "cure"))
def served(
    masters: Array, carried: Array, key: Array, *, grid: str, cure: str
) -> tuple[Array, Array]:
    """What a sync serves, float32, and what is carried over to the next one."""
    if cure == "hashed":
        return round_by_hash(masters, BF16).astype(F32), carried
    if cure == "stochastic":
        return GRIDS[grid].stochastic(masters, key), carried
    wanted = masters + carried
    now = GRIDS[grid].nearest(wanted)
    return now, wanted - now if cure == "carried" else carried


@jax.jit
def updated(direction: Array, rate: float, kept: float, key: Array) -> Array:
    """A step: of length `rate` at most."""
    other = jax.random.rademacher(key, direction.shape, F32)
    return rate * (kept * direction + (1 - kept) * other)


def followed(
    weights: Float[Array, "m n"],
    grid: str,
    cure: str,
    rate: float,
    kept: float,
    seed: int,
    steps: Sequence[int] = (),
) -> dict[int, dict[str, float]]:
    """Metrics after each of some steps.

    Args:
        weights: a checkpoint's.
        grid: of GRIDS.
        cure: of CURES.
        rate: learning rate.
        kept: of KEPT.
        seed: of directions and draws.
        steps: default STEPS.
    """
    steps = steps or STEPS
    sync = partial(served, grid=grid, cure=cure)
    keys = jax.random.split(jax.random.key(seed), 2 * max(steps) + 2)
    direction = jax.random.rademacher(keys[0], weights.shape, F32)
    start = GRIDS[grid].checkpoint(weights)
    if cure == "dithered":
        start = GRIDS[grid].dither(start)
    first, carried = sync(start, jnp.zeros_like(start), keys[1])
    moved, now, found = jnp.zeros_like(start), first, {}
    for number in range(1, max(steps) + 1):
        update, before = updated(direction, rate, kept, keys[2 * number]), now
        moved += update
        now, carried = sync(start + moved, carried, keys[2 * number + 1])
        if number in steps:
            found[number] = _metrics(moved, now - first, update, now - before)
    return found


def _metrics(*changes: Array) -> dict[str, float]:
    """Of the change of the masters since the start and of what is served, and both of a step."""
    m, s, update, step = (np.asarray(x, np.float64).ravel() for x in changes)
    both = np.sqrt((m @ m) * (s @ s))
    return {
        "arrived": float(s @ m / (m @ m)),
        "noise": float(np.linalg.norm(s - m) / np.linalg.norm(m)),
        "cosine": float(s @ m / both) if both else 0.0,
        "flicker": float(np.linalg.norm(step - update) / np.linalg.norm(update)),
    }


def _draws(grid: Grid, weights: Float[Array, "m n"]) -> float:
    begin = grid.checkpoint(weights)
    return float(jnp.linalg.norm(grid.dither(begin) - begin) / jnp.linalg.norm(begin))


def cures_of(grid: str) -> list[str]:
    """Those that a grid has."""
    return [cure for cure in CURES if cure != "hashed" or grid == "bfloat16"]


def fingerprint() -> dict[str, float]:
    """What each cure makes of fixed numbers in a few steps."""
    drawn = 0.05 * np.random.RandomState(0).standard_normal((144, 160))
    weights, found = jnp.asarray(drawn, F32), {}
    for grid in GRIDS:
        found[f"{grid}, draws"] = short(_draws(GRIDS[grid], weights))
        for cure in cures_of(grid):
            of_steps = followed(weights, grid, cure, 1e-4, 0.3, 0, (3,))
            found |= {f"{grid}, {cure}, {key}": short(x) for key, x in of_steps[3].items()}
    return found


def border(weights: Float[Array, "m n"], scale: str) -> float:
    """The share of weights that are as near to a code of E4M3 as to its neighbour."""
    fmt = replace(E4M3, scale=scale)
    q = quantize(_bfloat16(weights), fmt, "reference")
    scales = expand_scales(q.scales, q.block, weights.shape)
    codes = np.abs(np.asarray(_bfloat16(weights), np.float64) / np.asarray(scales, np.float64))
    least = float(jnp.finfo(q.values.dtype).smallest_normal)
    steps = codes / 2.0 ** (np.floor(np.log2(np.maximum(codes, least))) - 3)
    return float(np.mean(np.abs(steps % 1 - 0.5) < 1e-5))  # scales are float32


def run(arguments: Arguments) -> None:
    """Every grid, cure, learning rate and kind of movement; means over the tensors.

    Raises:
        UserError: the record there is of other code.
    """
    tensors = load(resolve_model(arguments.model))[0].stack.tensors()
    weights = [tensors[name].value[layer] for name, layer in TENSORS]
    path = Path(arguments.output)
    record: dict[str, Any] = (
        json.loads(path.read_text())
        if path.exists()
        else {"model": arguments.model, "tensors": TENSORS, "grids": {}, "draws": {}, "made": {}}
    )
    now = fingerprint()
    if not alike(record.setdefault("fingerprint", now), now):
        raise UserError("--output: the record there is of other code; name another")
    if "borders" not in record:
        record["borders"] = {
            scale: float(np.mean([border(x, scale) for x in weights]))
            for scale in ("float32", "power_of_two")
        }
        record["made"]["borders"] = facts("experiments.cures")
    for grid in (name for name in GRIDS if name not in record["grids"]):
        record["draws"][grid] = float(np.mean([_draws(GRIDS[grid], x) for x in weights]))
        cures = record["grids"].setdefault(grid, {})
        for cure in cures_of(grid):
            for movement, kept in KEPT.items():
                for rate in RATES:
                    runs = [
                        followed(x, grid, cure, rate, kept, number)
                        for number, x in enumerate(weights)
                    ]
                    cures.setdefault(cure, {}).setdefault(movement, {})[f"{rate:g}"] = {
                        str(step): {
                            key: float(np.mean([one[step][key] for one in runs]))
                            for key in runs[0][step]
                        }
                        for step in STEPS
                    }
            print(grid, cure, file=sys.stderr)
        record["made"][grid] = facts("experiments.cures")
        write(path, record)


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("cures", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
