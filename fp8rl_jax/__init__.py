"""FP8 reinforcement learning of language models in JAX.

    import fp8rl_jax as fp8rl

    policy, tokenizer = fp8rl.load("smollm2-135m")
    session = fp8rl.Session(
        policy, tokenizer, "fp8-rl", samples_per_prompt=8, max_new_tokens=64, learning_rate=1e-5
    )
    for step in range(20):
        rollout = session.rollout(prompts)
        metrics = session.update(rollout, [reward(text) for text in rollout.texts])
    session.save("out")

Names are imported when they are first used: `import fp8rl_jax` starts no backend. With several
processes call `jax.distributed.initialize()` before `load`.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Recipe": "config.recipe",
    "recipe": "config.recipe",
    "RunConfig": "config.run",
    "UserError": "errors",
    "byte_policy": "weights.load",
    "load": "training.source",
    "RewardPool": "tasks.sandbox.pool",
    "Run": "training.runs",
    "evaluate": "training.runs",
    "train": "training.runs",
    "Session": "training.session",
    "Live": "training.live",
    "Ablation": "ablation.runner",
    "ablate": "ablation.runner",
}
_MODULES = ("rl",)

__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"fp8rl_jax.{_HOMES[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"fp8rl_jax.{name}")
    else:
        raise AttributeError(f"module 'fp8rl_jax' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
