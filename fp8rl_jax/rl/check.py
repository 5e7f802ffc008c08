"""A look at the user's functions before anything is computed with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import check_unchanged, describe_fault, is_users
from fp8rl_jax.rl import advantages, objectives, weights
from fp8rl_jax.rl.advantages import group_advantages
from fp8rl_jax.rl.loss import LossInputs, policy_loss
from fp8rl_jax.rl.weights import importance_weights


def check_functions(config: RLConfig, samples_per_prompt: int = 4) -> None:
    """Traces objective, advantage estimator and importance weights that are not built in, on shapes
    alone; and the objective's gradient, so that one without a derivative is found here.

    Args:
        config: resolved or not.
        samples_per_prompt: n of the run.

    Raises:
        UserError: one line for each that does not import, was edited after it was loaded, does not
            take its arguments, raises an exception, or returns something else than it should.
    """
    # no two axes of the same length, or a wrong shape could look right
    prompts = 3 if samples_per_prompt == 2 else 2
    rows = prompts * samples_per_prompt
    shape = jax.ShapeDtypeStruct
    values, mask = shape((rows, rows + 1), jnp.float32), shape((rows, rows + 1), bool)
    rewards, valid, lengths = (shape((rows,), dtype) for dtype in (jnp.float32, bool, jnp.int32))
    reference = values if config.kl_coefficient > 0 or config.reward_kl.coefficient > 0 else None
    inputs = (values, rewards, mask, shape((), jnp.float32), values, values, reference, values)

    def loss(*inputs):
        return policy_loss(LossInputs(*inputs), config)

    def estimated(rewards, valid, lengths):
        return group_advantages(rewards, samples_per_prompt, config.advantage, valid, lengths)

    def weighted(log_ratio, mask):
        return importance_weights(log_ratio, mask, config.correction)

    checks = (
        (objectives.KEY, config.objective, jax.grad(loss, has_aux=True), inputs),
        (advantages.KEY, config.advantage.estimator, estimated, (rewards, valid, lengths)),
        (weights.KEY, config.correction.value("weights"), weighted, (values, mask)),
    )
    faults = []
    for key, name, function, arguments in checks:
        if not is_users(name):
            continue
        try:
            check_unchanged(name, key)
            jax.eval_shape(function, *arguments)
        except UserError as fault:
            faults.append(str(fault))
        # of the derivative, which is made after the function has returned
        except Exception as fault:
            faults.append(f"{key} = {name!r}: {describe_fault(fault)}")
    if faults:
        raise UserError("\n".join(faults))
