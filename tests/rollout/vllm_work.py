"""The policies, prompts and settings of the work whose answers by vLLM are recorded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fp8rl_jax as fp8rl
from fp8rl_jax.cli.main import main
from fp8rl_jax.config.run import RolloutConfig, RunConfig
from fp8rl_jax.config.vllm import VllmConfig
from fp8rl_jax.rollout.engine import Prompts, pad_prompts
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.vllm.engine import VllmEngine
from fp8rl_jax.weights.load import byte_policy, save_policy

SIZES = dict(
    hidden_size=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    num_layers=2,
    intermediate_size=256,
)
ALIGNED = SIZES | dict(hidden_size=256, num_heads=4, num_kv_heads=2, intermediate_size=384)
WIDTH, NEW = 16, 12
STOPS = tuple(range(65, 85))
KEY = jax.random.key(3)


@cache
def policy(seed: int = 0) -> Any:
    """The policy, and one with 5 % of noise on each matrix."""
    made, _ = byte_policy(0, **SIZES)
    if not seed:
        return made
    noise = jax.random.key(seed)
    return jax.tree.map(lambda x: x + 0.05 * jnp.std(x) * jax.random.normal(noise, x.shape), made)


@cache
def blocky(seed: int = 0) -> Any:
    """A policy whose linears 128 divides, each block of 128 x 128 of another size; and its
    tokenizer."""
    made, tokenizer = byte_policy(0, **ALIGNED)
    rng = np.random.default_rng(seed)

    def scaled(x):
        if x.ndim < 3:
            return x
        sizes = 2.0 ** rng.integers(-3, 3, size=(len(x), x.shape[1] // 128, x.shape[2] // 128))
        return x * np.repeat(np.repeat(sizes, 128, 1), 128, 2).astype(np.float32)

    return jax.tree.map(scaled, made), tokenizer


def block_engine(**settings: Any) -> VllmEngine:
    """Of `blocky`, with linears in block FP8."""
    rollout = RolloutConfig(
        engine="vllm", max_prompt_tokens=WIDTH, max_new_tokens=NEW, vllm=VllmConfig(**settings)
    )
    config = RunConfig(recipe="fp8-rollout", compute_dtype="bfloat16", rollout=rollout)
    assert config.problems() == []
    return VllmEngine(config, config.resolved_recipe, blocky()[1])


def make_engine(recipe: str = "bf16", **settings: Any) -> VllmEngine:
    rollout = RolloutConfig(
        engine="vllm", max_prompt_tokens=WIDTH, max_new_tokens=NEW, vllm=VllmConfig(**settings)
    )
    config = RunConfig(recipe=recipe, compute_dtype="float32", rollout=rollout)
    assert config.problems() == []
    return VllmEngine(config, config.resolved_recipe, byte_policy(0, **SIZES)[1])


def prompts(longest: int = 6) -> Prompts:
    tokenizer = byte_policy(0, **SIZES)[1]
    rows = [tokenizer.encode(text) for text in ("1+2=", "hello"[:longest])]
    return pad_prompts(rows, [3, 4], WIDTH)


def sampling(temperature: float = 1.0, new: int = NEW) -> Sampling:
    ends = byte_policy(0, **SIZES)[1].eos_token_ids
    return Sampling(new, temperature, stop_token_ids=(*ends, *STOPS))


def make_session(rank: int = 0, **vllm: Any) -> fp8rl.Session:
    made, tokenizer = policy(), byte_policy(0, **SIZES)[1]
    settings = {f"rollout.vllm.{key}": value for key, value in vllm.items()}
    return fp8rl.Session(
        made,
        tokenizer,
        compute_dtype="float32",
        max_prompt_tokens=WIDTH,
        max_new_tokens=NEW,
        samples_per_prompt=4,
        stop_strings=("e", "st"),
        learning_rate=1e-3,
        **settings,
        **{"rollout.engine": "vllm", "lora.rank": rank},
    )


def compared(folder: Path, **vllm: Any) -> dict[str, Any]:
    """What `fp8rl compare --engine vllm` writes."""
    made, tokenizer = policy(), byte_policy(0, **SIZES)[1]
    save_policy(made, folder / "model", tokenizer, "float32")
    flags = [f"--vllm.{key}={value}" for key, value in vllm.items()]
    words = [*("--engine", "vllm", "--compute-dtype", "float32", "--max-tokens", "24"), *flags]
    written = folder / "compare.json"
    text = ["--text", "hello and more than that", "--json", str(written)]
    assert main(["compare", str(folder / "model"), *words, *text]) == 0
    return json.loads(written.read_text())


def steps(session: fp8rl.Session, count: int = 2) -> list[dict[str, float]]:
    """Metrics of GRPO steps that reward short completions."""
    found = []
    for _ in range(count):
        rollout = session.rollout(["1+2=", "hello"])
        found.append(session.update(rollout, [-float(len(row)) for row in rollout.tokens]))
    return found
