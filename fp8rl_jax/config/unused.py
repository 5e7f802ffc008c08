"""Settings that do nothing beside the others: a run says them in one line.

They are not refused: a file's settings of an engine or a correction are for the arms and flags that
choose it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import leaves, show
from fp8rl_jax.functions import is_users


def unused_settings(config: RunConfig) -> list[str]:
    """List what is set to another value than its default and has no effect, and why.

    Args:
        config: a sound one.
    """
    default, keys, found = RunConfig(), dict(leaves(RunConfig)), {}
    for table, reason in _without_effect(config):
        for key in keys:
            if key == table or key.startswith(f"{table}."):
                value = _value(config, key)
                if value != _value(default, key):
                    found.setdefault(key, f"{key} = {show(value)} ({reason})")
    return list(found.values())


def _value(config: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _without_effect(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key or table that nothing reads, why)."""
    rollout, rl, lora, init = config.rollout, config.rl, config.lora, config.model.init
    correction = rl.correction.resolve(config.resolved_recipe.correction)
    bypass = correction.value("mode") == "bypass"
    reinforced = bypass and correction.value("bypass_loss") == "reinforce"
    unweighted = correction.value("weights") == "none" or (bypass and not reinforced)
    scaling = config.trainer.loss_scale.resolve(config.compute_dtype)
    ratio_is_one = config.trainer.updates_per_rollout == 1 and not (
        bypass or is_users(rl.objective)
    )
    clips, engine = "rl.clip_low rl.clip_high rl.dual_clip", f"rollout.engine is {rollout.engine!r}"
    dynamic = (
        "trainer.loss_scale.growth_factor trainer.loss_scale.backoff_factor "
        "trainer.loss_scale.growth_interval"
    )
    weighing = (
        "rl.correction.bounds rl.correction.max_weight rl.correction.min_weight "
        "rl.correction.batch_normalize"
    )
    # (whether it holds, keys and tables that nothing reads then, why)
    rules: list[tuple[bool, str, str]] = [
        (rollout.engine != "paged", "rollout.paged", engine),
        (rollout.engine != "vllm", "rollout.vllm", engine),
        (rollout.engine == "vllm", "rollout.decode_layers", engine),
        (config.support_size(1) == 0, "rollout.support_size", "no support is replayed"),
        (lora.rank == 0, "lora", "lora.rank is 0"),
        (
            bool(config.model.path) and not config.sft.from_scratch,
            "model.init",
            "model.path names the model",
        ),
        (
            init.num_experts == 0,
            "model.init.experts_per_token",
            "model.init.num_experts is 0",
        ),
        (scaling is None, f"trainer.loss_scale.initial {dynamic}", "the loss is not scaled"),
        (
            scaling is not None and scaling.mode == "static",
            dynamic,
            'trainer.loss_scale.mode is "static"',
        ),
        (rl.kl_coefficient == 0, "rl.kl_estimator rl.kl_gradient", "rl.kl_coefficient is 0"),
        (
            rl.reward_kl.coefficient == 0,
            "rl.reward_kl.estimator",
            "rl.reward_kl.coefficient is 0",
        ),
        (rl.overlong.buffer == 0, "rl.overlong.penalty", "rl.overlong.buffer is 0"),
        (
            not rl.dynamic_sampling.enabled,
            "rl.dynamic_sampling.max_rounds",
            "rl.dynamic_sampling.enabled is false",
        ),
        (not rl.acceptance.enabled, "rl.acceptance", "rl.acceptance.enabled is false"),
        (
            not rl.clip_calibration.enabled,
            "rl.clip_calibration",
            "rl.clip_calibration.enabled is false",
        ),
        (rl.objective in ("reinforce", "p3o"), clips, f'rl.objective is "{rl.objective}"'),
        (
            reinforced,
            f"rl.objective rl.ratio {clips}",
            "rl.correction.bypass_loss takes its place",
        ),
        (ratio_is_one, f"rl.ratio {clips}", "with one update a rollout every ratio is 1"),
        (
            rl.advantage.estimator in ("dr_grpo", "rloo"),
            "rl.advantage.epsilon rl.advantage.ddof",
            "the estimator divides by no deviation",
        ),
        (unweighted, weighing, "there are no importance weights"),
        (
            bypass and not reinforced,
            "rl.correction.weights",
            'bypass_loss "ratio" has no importance weights',
        ),
        (
            not correction.value("reject"),
            "rl.correction.inverse_k1 rl.correction.denominator",
            "rl.correction.reject is empty",
        ),
        (
            unweighted and not correction.value("reject"),
            "rl.correction.overflow",
            "there is no correction",
        ),
        (not bypass, "rl.correction.bypass_loss", 'rl.correction.mode is not "bypass"'),
        (
            config.evaluation.temperature == 0,
            "evaluation.samples",
            "greedy samples are all the same",
        ),
        (
            not config.tracking.wandb,
            "tracking.wandb_project tracking.wandb_name tracking.wandb_mode",
            "tracking.wandb is false",
        ),
        *(
            (
                _value(config, table).schedule == "constant",
                f"{table}.final_ratio",
                f'{table}.schedule is "constant"',
            )
            for table in ("optimizer", "sft.optimizer")
        ),
    ]
    for holds, keys, reason in rules:
        if holds:
            yield from ((key, reason) for key in keys.split())
