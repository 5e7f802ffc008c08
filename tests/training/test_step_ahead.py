"""What a checkpoint holds of a step that is sampled ahead."""

from __future__ import annotations

from dataclasses import replace

import fp8rl_jax as fp8rl
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.training.checkpoint import difference
from fp8rl_jax.training.step_ahead import empty_rollout


def test_an_empty_batch_has_the_arrays_of_one_that_is_sampled():
    """Else a run would not go on from what it has saved: routes and supports among them."""
    policy, tokenizer = fp8rl.byte_policy(
        num_layers=1,
        hidden_size=32,
        intermediate_size=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        num_experts=4,
    )
    session = fp8rl.Session(
        policy,
        tokenizer,
        compute_dtype="float32",
        exact=False,
        router_replay=True,
        top_k=8,
        truncated_sampling="replay",
        prompts_per_step=2,
        samples_per_prompt=2,
        max_new_tokens=3,
    )
    prompts = session.encoder.batch([Example(i, "ab=", "", "", {}) for i in range(2)])
    made = session.rollout(prompts).rollout
    assert made.expert_ids is not None and made.support is not None
    assert difference(replace(made, metrics={}), empty_rollout(session.config, session)) == ""
