"""What a sync and a rollout cost with each rollout engine, and what mismatch it leaves: `python -m
experiments.engines --vllm-python PYTHON --output FILE`.

The engines take turns. In a round each of them gets the same weights, which have moved a little,
and completes the same prompts; what it sampled is scored by the trainer with those weights. No
completion ends before its length, so that all do the same work. What is learned through them is
another question: `experiments/ablations/vllm_addition.toml`.

    static, paged   our own samplers, in this process
    files           a vLLM server, which gets its weights as files
    dlpack          vLLM in this process, which gets them in memory: run this with the Python of
                    `make vllm-in-process`

A sync is a run's own: of vLLM its parity check is a part. Times are those of a machine, ratios
within a round are what can be compared.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.machine import facts
from experiments.benchmarks.rounds import Laps, Plan, interleave, ratio, series, spread
from experiments.command import run_command
from experiments.record import write
from experiments.vllm_engine import MOVED, distance, moved, vllm_version
from fp8rl_jax.config.recipe import PrecisionConfig
from fp8rl_jax.config.run import RolloutConfig, RunConfig
from fp8rl_jax.config.schema import validate
from fp8rl_jax.config.vllm import VllmConfig
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import to_host
from fp8rl_jax.rollout.calibration import calibrate_on_prompts
from fp8rl_jax.rollout.engine import local_engine, pad_prompts
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import SyncContext
from fp8rl_jax.rollout.vllm.engine import VllmEngine
from fp8rl_jax.tokenizers.tokenizer import Tokenizer
from fp8rl_jax.weights.load import load
from fp8rl_jax.weights.resolve import resolve_model

EngineName = Literal["static", "paged", "files", "dlpack"]
PARTS = ("sync", "gen", "seconds")


@dataclass(frozen=True)
class Arguments:
    """Syncs and rollouts of each engine in turns, and one JSON file."""

    output: str
    """JSON file."""
    engines: tuple[EngineName, ...] = ("static", "paged", "files", "dlpack")
    """Those that take turns; the others are compared with the first."""
    vllm_python: str = ""
    """Interpreter with vLLM, of `files` (`make vllm` makes one for a CPU)."""
    model: str = "smollm2-135m"
    """As `fp8rl compare` takes it."""
    recipe: str = "bf16"
    """Of all engines."""
    compute_dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    """Of all engines."""
    compiled: bool = False
    """rollout.vllm.compiled."""
    rounds: int = 5
    """Timed rounds."""
    warmup: int = 1
    """Rounds before them, in which programs are compiled and servers start."""
    prompts: int = 32
    """Of random tokens."""
    prompt_tokens: int = 32
    """Of each prompt."""
    new_tokens: int = 32
    """Of each completion; a prompt has one."""
    vllm_arguments: tuple[str, ...] = field(default_factory=tuple)
    """More arguments of vLLM, such as --gpu-memory-utilization=0.4."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        checks = [
            (len(self.engines) >= 2, "--engines: name at least two"),
            (len({*self.engines}) == len(self.engines), "--engines: each one once"),
            (
                ("files" in self.engines) == bool(self.vllm_python),
                "--vllm-python: give it with files among --engines, and only then",
            ),
            (self.rounds >= 1, f"--rounds: {self.rounds} must be at least 1"),
            (
                self.warmup >= 1,
                f"--warmup: {self.warmup} must be at least 1, or compilation is timed",
            ),
        ]
        return [message for holds, message in checks if not holds]


class Turns:
    """An engine's side: calling it with a round's number moves the weights, syncs and samples.

    Attributes:
        distances: from the trainer's log-probabilities, of each round.
    """

    def __init__(self, name: str, policy: Policy, tokenizer: Tokenizer, arguments: Arguments):
        config = run_config(name, arguments)
        validate(config)
        self.policy, self.recipe = policy, config.resolved_recipe
        self.engine = (
            VllmEngine(config, self.recipe, tokenizer)
            if config.rollout.engine == "vllm"
            else local_engine(config, self.recipe)
        )
        self.dtype = jnp.dtype(config.compute_dtype)
        self.sampling = Sampling(arguments.new_tokens)
        size = arguments.prompts, arguments.prompt_tokens
        rows = np.random.default_rng(0).integers(policy.config.vocab_size, size=size).tolist()
        self.prompts = pad_prompts(rows, list(range(len(rows))), arguments.prompt_tokens)
        self.distances: list[dict[str, float]] = []

    def __call__(self, number: int) -> dict[str, float]:
        """Seconds of the sync, of the rollout ("gen"), and of both."""
        weights, scales = moved(self.policy, number), None
        if self.recipe.quantizes_cache:
            scales = calibrate_on_prompts(weights, self.prompts, self.recipe, self.dtype)
        jax.block_until_ready((weights, scales))
        laps = Laps()
        self.engine.sync(weights, SyncContext(scales=scales))
        self.engine.wait()
        laps.end("sync")
        rollout = self.engine.generate(self.prompts, 1, self.sampling, jax.random.key(number))
        laps.end("gen", rollout)
        if not np.all(to_host(rollout.mask)):
            raise RuntimeError("a completion ended early, though nothing ends one but its length")
        self.distances.append(distance(weights, rollout, self.recipe, self.dtype))
        return laps.seconds


def run_config(name: str, arguments: Arguments) -> RunConfig:
    """The run whose engine a side is."""
    ours = name in ("static", "paged")
    vllm = VllmConfig(
        python=arguments.vllm_python if name == "files" else "",
        transport="dlpack" if name == "dlpack" else "files",
        compiled=arguments.compiled,
        arguments=arguments.vllm_arguments,
    )
    rollout = RolloutConfig(
        arguments.prompts,
        1,
        arguments.prompt_tokens,
        arguments.new_tokens,
        engine=name if ours else "vllm",
        vllm=VllmConfig() if ours else vllm,
    )
    return RunConfig(
        recipe=arguments.recipe,
        compute_dtype=arguments.compute_dtype,
        precision=PrecisionConfig(exact=False),  # vLLM promises no bits
        rollout=rollout,
    )


def run(arguments: Arguments) -> None:
    """Make the engines, have them take turns, and write the file."""
    policy, tokenizer = load(resolve_model(arguments.model))
    version = None
    if arguments.vllm_python:
        version = vllm_version(arguments.vllm_python)
    elif "dlpack" in arguments.engines:
        version = vllm_version(sys.executable)
    sides = {name: Turns(name, policy, tokenizer, arguments) for name in arguments.engines}
    try:
        timed = interleave(dict(sides), Plan(arguments.rounds, arguments.warmup))
    finally:
        for side in sides.values():
            if isinstance(side.engine, VllmEngine):
                side.engine.stop()
    first, *others = arguments.engines
    tokens = arguments.prompts * arguments.new_tokens
    counted = {name: side.distances[arguments.warmup :] for name, side in sides.items()}
    rounds = [each.seconds for each in timed.rounds]
    given = asdict(arguments) | {"model": Path(arguments.model).name}
    del given["vllm_python"], given["output"]  # paths of this machine
    write(
        Path(arguments.output),
        facts("experiments.engines")
        | {
            "vllm": version,
            "arguments": given,
            "moved": MOVED,
            "ratios": [
                ratio(timed.rounds, other, first, part) for other in others for part in PARTS
            ],
            "sync_share": {
                name: spread([of[name]["sync"] / of[name]["seconds"] for of in rounds])
                for name in sides
            },
            "distances": counted,
            "raw": asdict(timed)
            | {
                "tokens_per_second": {
                    name: spread([tokens / x for x in series(timed.rounds, name, "gen")])
                    for name in sides
                }
            },
        },
    )


if __name__ == "__main__":
    sys.exit(run_command("engines", Arguments, run, sys.argv[1:]))
