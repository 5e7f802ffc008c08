"""Settings that do nothing beside the others are said, in one line."""

from __future__ import annotations

import pytest
from tiny_run import RUN

import fp8rl_jax as fp8rl
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import leaves, tables
from fp8rl_jax.config.settings import with_settings
from fp8rl_jax.config.unused import _without_effect, unused_settings

TINY = RUN["model"]["init"]
BYPASS = {"rl.correction.method": "verl_bypass_ppo_clip"}


@pytest.mark.parametrize(
    ("settings", "of_use", "reason"),
    [
        ({"rollout.paged.slots": 8}, {"rollout.engine": "paged"}, "rollout.engine is 'static'"),
        ({"rollout.vllm.restarts": 1}, {"rollout.engine": "vllm"}, "rollout.engine is 'static'"),
        (
            {"rollout.support_size": 64},
            {"rollout.top_k": 9, "rl.correction.truncated_sampling": "replay"},
            "no support is replayed",
        ),
        ({"lora.alpha": 32.0}, {"lora.rank": 4}, "lora.rank is 0"),
        ({"lora.targets": ("*.q_proj",)}, {"lora.rank": 4}, "lora.rank is 0"),
        ({"model.init.experts_per_token": 3}, {"model.init.num_experts": 4}, "num_experts is 0"),
        ({"trainer.loss_scale.initial": 8.0}, {"compute_dtype": "float16"}, "loss is not scaled"),
        ({"rl.kl_estimator": "k2"}, {"rl.kl_coefficient": 0.1}, "rl.kl_coefficient is 0"),
        ({"rl.reward_kl.estimator": "k3"}, {"rl.reward_kl.coefficient": 0.1}, "coefficient is 0"),
        ({"rl.overlong.penalty": 0.5}, {"rl.overlong.buffer": 4}, "rl.overlong.buffer is 0"),
        (
            {"rl.dynamic_sampling.max_rounds": 3},
            *({"rl.dynamic_sampling.enabled": True}, "rl.dynamic_sampling.enabled is false"),
        ),
        ({"rl.clip_calibration.every": 5}, {"rl.clip_calibration.enabled": True}, "is false"),
        ({"rl.clip_high": 0.28}, {"trainer.updates_per_rollout": 2}, "every ratio is 1"),
        ({"rl.clip_high": 0.28}, BYPASS, "every ratio is 1"),
        ({"rl.advantage.estimator": "rloo", "rl.advantage.ddof": 0}, None, "by no deviation"),
        ({"rl.correction.max_weight": 3.0}, {"rl.correction.method": "token_tis"}, "no importance"),
        ({"rl.correction.max_weight": 3.0}, {"recipe": "fp8-rl"}, "no importance weights"),
        ({"rl.correction.denominator": "all"}, {"rl.correction.method": "k3"}, "reject is empty"),
        (
            {"rl.correction.bypass_loss": "reinforce"},
            {"rl.correction.mode": "bypass"},
            'is not "bypass"',
        ),
        ({"rl.correction.weights": "token"} | BYPASS, None, "has no importance weights"),
        ({"evaluation.samples": 4}, {"evaluation.temperature": 1.0}, "greedy samples are all the"),
        ({"tracking.wandb_name": "a"}, {"tracking.wandb": True}, "tracking.wandb is false"),
        ({"optimizer.final_ratio": 0.5}, {"optimizer.schedule": "linear"}, 'is "constant"'),
    ],
)
def test_what_does_nothing_is_said_until_it_does(settings, of_use, reason):
    (said,) = unused_settings(with_settings(RunConfig(), settings))
    key = list(settings)[0] if of_use is not None else said.split(" ")[0]
    assert said.startswith(f"{key} = ") and key in settings
    assert reason in said
    if of_use is not None:
        config = with_settings(RunConfig(), settings | of_use)
        assert key not in [line.split(" ")[0] for line in unused_settings(config)]


def test_a_session_says_them_once(caplog):
    policy, tokenizer = fp8rl.byte_policy(**TINY)
    settings = {"lora.alpha": 32.0, "optimizer.final_ratio": 0.5}
    session = fp8rl.Session(policy, tokenizer, compute_dtype="float32", **settings)
    (line,) = (line for line in caplog.messages if "do nothing" in line)
    assert line == (
        "settings that do nothing here: lora.alpha = 32.0 (lora.rank is 0); "
        'optimizer.final_ratio = 0.5 (optimizer.schedule is "constant")'
    )
    assert session.config.lora.alpha == 32.0


def test_a_run_of_defaults_has_none_and_rules_name_settings():
    assert unused_settings(RunConfig()) == []
    known = {key for key, _ in leaves(RunConfig)} | set(tables(RunConfig))
    assert {key for key, _ in _without_effect(RunConfig())} <= known
