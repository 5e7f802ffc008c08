"""`fp8rl gate`: one rollout of a run, no update, and whether its mismatch may be what it is."""

from __future__ import annotations

from fp8rl_jax.config.gate import GateRun
from fp8rl_jax.errors import UserError


def gate(config: GateRun) -> int:
    """Print what was measured; return 1 where a limit is missed.

    Raises:
        UserError: episodes of several turns, or fewer problems than prompts are asked for.
    """
    from dataclasses import replace

    from fp8rl_jax.cli.commands import progress, start_jax
    from fp8rl_jax.rollout.offline import check_writable, write_lines

    asked = config.gate
    if config.task.is_environment or config.task.kind == "text":
        raise UserError(
            f"task.kind = {config.task.kind!r}: the gate samples one completion of each prompt; "
            "give it a task of prompts"
        )
    if asked.json:
        check_writable(asked.json)
    start_jax()
    from fp8rl_jax.compare.gate import document, measure, summary
    from fp8rl_jax.training.setup import announce, build

    count = asked.prompts or config.rollout.prompts_per_step
    setup = build(replace(config, rollout=replace(config.rollout, prompts_per_step=count)))
    announce(setup, progress)
    if len(setup.train) < count:
        raise UserError(
            f"gate.prompts = {count}: there are {len(setup.train)} problems to train on"
        )
    found = measure(setup.session, setup.problems[:count], asked)
    if asked.json:
        what = {"recipe": config.recipe, "compute_dtype": config.compute_dtype}
        write_lines(asked.json, [what | document(found)])
    print(summary(found))
    return 1 if found.faults else 0
