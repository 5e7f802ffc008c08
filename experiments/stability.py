"""Which learning rates floats of few bits still bear, and whether sharpness warns before the loss
(arXiv 2405.18710): `python -m experiments.stability`.

A small policy learns to spell words backward, as in formats/learning.py, in each format and at each
learning rate, with the same seeds. The paper takes bits away from tensors as they are, without
scales: that is `unscaled_e4m3` and its like, of weights and activations, rounded to nearest, where
the paper cuts off; the same bits with a scale for each block stand beside them. Of every run the
losses and the sharpness of each step are kept. The same command goes on with what is missing.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from experiments.command import run_command
from experiments.depth import short
from experiments.formats.__main__ import Record, of
from experiments.formats.learning import run_config, trained
from experiments.formats.rows import BASELINE, Row
from fp8rl_jax.caching import keep_compiled_programs
from fp8rl_jax.precision import QTensor, register
from fp8rl_jax.precision.formats.grids import on_grid
from fp8rl_jax.precision.formats.minifloat import Minifloat
from fp8rl_jax.training.watch import Stability
from pallas_kernels.quantize import block_amax


@dataclass(frozen=True)
class Unscaled(Minifloat):
    """A tensor's numbers as they are, in few bits: what is too large saturates, what is too small
    is 0."""

    def quantize_with(self, x: Float[Array, "*batch m n"], draw: Array | None = None) -> QTensor:
        """Round; a block that is not finite has a scale that is none."""
        x = x.astype(jnp.float32)
        inside = jnp.clip(x, -self.largest, self.largest)
        values = on_grid(inside, self.mantissa, 2 - 2 ** (self.exponent - 1), draw)
        sound = jnp.isfinite(block_amax(x, self.block))
        return QTensor(self.stored(values), jnp.where(sound, 1.0, jnp.nan), self)

    @property
    def name(self) -> str:
        return f"{super().name}, no scale"


UNSCALED = {f"unscaled_e{x}m3": Unscaled(exponent=x, mantissa=3) for x in (5, 4, 3)}
NAMES = (BASELINE, *UNSCALED, "e4m3-1x128", "e2m1")
"""Formats of weights and activations in forward passes; output gradients are not quantized, as
unscaled ones would be 0."""


def rows() -> list[Row]:
    """What is trained; the formats without scales are known from here on."""
    for name, made in UNSCALED.items():
        register(name, made)
    return [Row(name, name) if name != BASELINE else Row(name) for name in NAMES]


@dataclass(frozen=True)
class Arguments:
    """Train in each format at each learning rate."""

    output: str = "experiments/results/stability"
    """Directory of runs.json; entries that are there are kept."""
    rates: tuple[float, ...] = (2e-3, 1e-2, 5e-2, 2e-1)
    """Learning rates."""
    seeds: int = 5
    steps: int = 120
    """Supervised updates."""
    batch_size: int = 16
    """Examples an update."""
    hidden_size: int = 64
    """Of the policy, two layers."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        least = ("seeds", "steps", "batch_size", "hidden_size")
        return [
            f"--{name.replace('_', '-')}: {getattr(self, name)} must be at least 1"
            for name in least
            if getattr(self, name) < 1
        ]


def run(arguments: Arguments) -> None:
    """Seed by seed, so that what is there of a seed is whole."""
    keep_compiled_programs()
    settings = of(arguments, "steps", "batch_size", "hidden_size")
    record = Record(Path(arguments.output) / "runs.json", settings, "experiments.stability")
    config = run_config(arguments.steps, arguments.batch_size)
    width = arguments.hidden_size
    model = replace(config.model.init, hidden_size=width, intermediate_size=9 * width // 4)
    config = replace(
        config,
        model=replace(config.model, init=model),
        trainer=replace(config.trainer, sharpness=True),
    )
    for seed in range(arguments.seeds):
        for row, rate in itertools.product(rows(), arguments.rates):
            if record.has(row=row.name, rate=rate, seed=seed):
                continue
            print(f"{row.name}, rate {rate:g}, seed {seed}", file=sys.stderr)
            optimizer = replace(config.sft.optimizer, learning_rate=rate)
            own = replace(config, seed=seed, sft=replace(config.sft, optimizer=optimizer))
            _, steps = trained(own, row.forward)
            stability = Stability(supervised=True)
            counted = [stability.see(metrics) for metrics in steps][-1]
            series = {
                key: [_finite(metrics[of_run]) for metrics in steps]
                for key, of_run in (("losses", "loss"), ("sharpness", "sharpness/0.001"))
            }
            record.add(row=row.name, rate=rate, seed=seed, **counted, **series)


def _finite(value: float) -> float | None:
    return short(np.float64(value)) if np.isfinite(value) else None


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("stability", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
