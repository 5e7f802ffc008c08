"""FP4 training (arXiv 2501.17116) on small models: `python -m experiments.fp4`.

    snr       of SmolLM2's activations in FP4, as they are, clamped to quantiles, and compensated,
              beside the values of the paper's table
    learning  loss after supervised training of the demo (formats/learning.py): straight-through,
              with the differentiable estimator, with clamped outliers, with both

The same command goes on with what is not in the record yet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments.command import run_command
from experiments.depth import short
from experiments.formats.__main__ import MODEL, Record, of
from experiments.formats.errors import tensors_of
from experiments.formats.learning import losses, run_config
from experiments.formats.mismatch import prompts
from experiments.formats.rows import BASELINE
from fp8rl_jax.caching import keep_compiled_programs
from fp8rl_jax.config.formats import parse_format
from fp8rl_jax.config.recipe import RECIPES, Recipe, TrainerFormats
from fp8rl_jax.precision import Format
from fp8rl_jax.precision.formats.fp4 import FP4, ClampedFP4
from fp8rl_jax.weights.load import load
from fp8rl_jax.weights.resolve import resolve_model

PARTS = ("snr", "learning")


def _learned() -> dict[str, Recipe]:
    whole, plain = replace(RECIPES["fp4"], name="fp4-study"), parse_format("fp4")
    straight = {"weight_gradient_estimator": "straight_through"}
    unclamped = {
        "trainer": TrainerFormats(plain, plain),
        "rollout": replace(whole.rollout, activation=plain),
        "saved_activation": plain,
    }
    return {
        BASELINE: Recipe(BASELINE),
        "both": whole,
        "straight through": replace(whole, **unclamped, **straight),
        "estimator": replace(whole, **unclamped),
        "clamping": replace(whole, **straight),
    }


LEARNED = _learned()


@dataclass(frozen=True)
class Arguments:
    """Measure FP4 training, part by part."""

    parts: tuple[str, ...] = PARTS
    """Of snr and learning."""
    output: str = "experiments/results/fp4"
    """Directory of PART.json; entries that are there are kept."""
    prompt_tokens: int = 24
    """Of the SNR: the last ones of each of ten prompts."""
    seeds: int = 5
    """Of the learning."""
    steps: int = 150
    """Supervised updates."""
    batch_size: int = 32
    """Examples an update."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        faults = [
            f"--parts: {x} unknown ({', '.join(PARTS)})" for x in self.parts if x not in PARTS
        ]
        least = ("prompt_tokens", "seeds", "steps", "batch_size")
        return faults + [
            f"--{name.replace('_', '-')}: {getattr(self, name)} must be at least 1"
            for name in least
            if getattr(self, name) < 1
        ]


def ways(rows: int, columns: int) -> dict[tuple[str, str], Format]:
    """FP4 by what shares scale and quantiles, and by what is done to outliers."""
    found: dict[tuple[str, str], Format] = {}
    for shared, block in (("token", (1, columns)), ("tensor", (rows, columns))):
        found[shared, "as it is"] = FP4(block)
        of = "row" if shared == "token" else "tensor"
        for alpha in (0.999, 0.99, 0.97):
            for kept in (False, True):
                name = f"{alpha:g} {'compensated' if kept else 'clamped'}"
                found[shared, name] = ClampedFP4(block, alpha=alpha, of=of, compensated=kept)
    return found


def snr(x: Float[np.ndarray, "layers m n"], made: Format) -> float:
    """10 log10(sum x^2 / sum (x - q)^2) of each layer's matrix; the median over layers."""
    quantized = np.asarray(jax.jit(lambda x: made.quantize(x).dequantize())(jnp.asarray(x)))
    wide, off = x.astype(np.float64), quantized.astype(np.float64) - x
    ratios = (wide**2).sum((1, 2)) / (off**2).sum((1, 2))
    return short(10 * np.log10(np.median(ratios)))


def fingerprint() -> dict[str, float]:
    """What each way makes of fixed numbers with outliers."""
    drawn = np.random.RandomState(0)
    x = (drawn.normal(size=(2, 144, 160)) * np.exp(drawn.normal(size=(2, 144, 160)))).astype(
        np.float32
    )
    return {", ".join(key): snr(x, made) for key, made in ways(144, 160).items()}


def measure_snr(arguments: Arguments) -> None:
    """Each kind of activation, in each way."""
    settings = {"model": MODEL} | of(arguments, "prompt_tokens")
    record = Record(Path(arguments.output) / "snr.json", settings, "experiments.fp4")
    record.keep("ways", {"fingerprint": fingerprint()})
    if record.entries:
        return
    policy, tokenizer = load(resolve_model(MODEL))
    given = prompts(tokenizer, 0, 1, arguments.prompt_tokens)
    real = np.arange(given.tokens.shape[1]) < np.asarray(given.lengths)[:, None]
    tensors = tensors_of(policy, np.where(real, given.tokens, -1), real)["activation"]
    for kind, x in tensors.items():
        found: dict[str, dict[str, float]] = {"token": {}, "tensor": {}}
        for (shared, way), made in ways(*x.shape[1:]).items():
            found[shared][way] = snr(x, made)
        record.add(kind=kind, **found)


def measure_learning(arguments: Arguments) -> None:
    """Each arm, seed by seed: an arm is compared on the seeds that all have."""
    settings = of(arguments, "steps", "batch_size")
    record = Record(Path(arguments.output) / "learning.json", settings, "experiments.fp4")
    config = run_config(arguments.steps, arguments.batch_size)
    for seed in range(arguments.seeds):
        for name, recipe in LEARNED.items():
            if not record.has(arm=name, seed=seed):
                print(f"{name}, learning, seed {seed}", file=sys.stderr)
                record.add(arm=name, seed=seed, **losses(config, recipe, seed))


MEASURES: dict[str, Callable[[Arguments], Any]] = {"snr": measure_snr, "learning": measure_learning}


def run(arguments: Arguments) -> None:
    """Part by part."""
    keep_compiled_programs()
    for part in arguments.parts:
        MEASURES[part](arguments)


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("fp4", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
