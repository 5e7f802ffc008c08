"""What the training loop adds to its own rollout, update and sync: rewards, advantages, metrics,
the record.

The real `Loop.run` runs. A stand-in for its tracker, which the loop calls at the end of every step,
stops the clock, runs one step directly on weights of its own, and starts the clock again. So the
two take turns in one process, with the same compiled programs, and nothing of the loop is left out
but checkpoints and evaluation, which are turned off.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.benchmarks.grpo import OPTIMIZER, GrpoStep
from experiments.benchmarks.record import Contest, result
from experiments.benchmarks.rounds import Plan, Round, load, settle, split
from experiments.benchmarks.workloads import Workload
from fp8rl_jax.cli.load import load_config
from fp8rl_jax.config.rl import LossConfig
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.training.loop import Loop
from fp8rl_jax.training.session import Session
from fp8rl_jax.training.setup import Setup, build
from fp8rl_jax.training.tracking import Tracker

EXPERIMENTS = Path(__file__).parent.parent
TARGET = 1.10
LOOP, DIRECT = "loop", "direct"
PARTS = ("gen", "train", "calibrate", "sync")


def loop_overhead(workload: Workload, recipe: str, plan: Plan) -> dict[str, Any]:
    """Time steps of the loop on the addition task, in the shape `workload.loop`.

    Returns:
        The entry; "target" is what the first ratio, loop over direct, should stay below.
    """
    with tempfile.TemporaryDirectory() as directory:
        setup = _loop_setup(workload, recipe, plan, directory)
        with RewardPool(setup.config.task) as pool:
            loop = Loop(setup, pool)
            loop.tracker = turns = _TakingTurns(loop.tracker, _direct(setup), plan)
            with contextlib.suppress(_LastRound):
                loop.run()
    about = {
        LOOP: {
            "settings": {
                "recipe": recipe,
                "task": "experiments/tasks/addition.py, scored by worker processes",
            }
        },
        DIRECT: {"settings": {"recipe": recipe, "parts": "Session.rollout, Session.update"}},
    }
    timed = Contest(split(turns.done, plan), [(LOOP, DIRECT)], about)
    entry = result("loop_overhead", workload, workload.loop, timed)
    return entry | {"target": TARGET}


class _LastRound(Exception):
    """Ends the loop after the last round, before it saves the model."""


class _TakingTurns:
    """The loop's own tracker, with a direct step after each call of `log`."""

    def __init__(self, tracker: Tracker, direct: GrpoStep, plan: Plan):
        self.tracker, self.direct, self.plan = tracker, direct, plan
        self.done: list[Round] = []
        self.resumed = time.perf_counter()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.tracker.log(step, metrics)
        seconds = {"seconds": time.perf_counter() - self.resumed}
        seconds |= {
            part: float(metrics[f"time/{part}"]) for part in PARTS if f"time/{part}" in metrics
        }
        settle()
        self.done.append(Round({LOOP: seconds, DIRECT: self.direct(step)}, load()))
        if len(self.done) == self.plan.warmup + self.plan.rounds:
            raise _LastRound
        settle()
        self.resumed = time.perf_counter()

    def close(self) -> None:
        self.tracker.close()


def _loop_setup(workload: Workload, recipe: str, plan: Plan, directory: str) -> Setup:
    """A run of the addition task with the optimizer and the loss of grpo_step, so that programs are
    compiled once for both.

    Its completions end by length alone, so every step does the same work.
    """
    shape = workload.loop
    flags = {
        "output": directory,
        "recipe": recipe,
        "compute-dtype": workload.compute_dtype,
        "model.path": workload.model,
        "task.name": f"{EXPERIMENTS / 'tasks' / 'addition.py'}:problems",
        "optimizer.learning-rate": OPTIMIZER.learning_rate,
        "optimizer.warmup-steps": OPTIMIZER.warmup_steps,
        "rl.clip-low": LossConfig().clip_low,
        "rl.clip-high": LossConfig().clip_high,
        "rollout.prompts-per-step": shape.prompts,
        "rollout.samples-per-prompt": shape.samples,
        "rollout.max-prompt-tokens": shape.prompt_tokens,
        "rollout.max-new-tokens": shape.new_tokens,
        "trainer.steps": plan.warmup + plan.rounds + 1,
        "trainer.micro-batch-prompts": workload.micro_batch_prompts,
        "trainer.remat": "layer" if workload.remat else "none",
        "evaluation.every": 0,
        "checkpoint.every": 0,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    config = load_config(
        RunConfig, [str(EXPERIMENTS / "runs" / "smollm2_addition.toml"), *words], "benchmarks"
    )
    setup = build(config)
    if not workload.model:
        setup.session = Session(workload.load_policy(), setup.session.tokenizer, config=config)
    setup.session.sampling = replace(setup.session.sampling, stop_token_ids=())
    return setup


def _direct(setup: Setup) -> GrpoStep:
    """The loop's step without the loop: same settings, same shapes, prompts of its first step,
    weights of its own."""
    loop, config = setup.session, setup.config
    session = Session(loop.policy, loop.tokenizer, config=config)
    session.sampling = loop.sampling
    return GrpoStep(
        session,
        loop.encoder.batch(setup.train.batch(0, config.rollout.prompts_per_step, config.seed)),
    )
