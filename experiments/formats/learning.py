"""Loss after supervised training of the demo's policy in each format, forward and backward.

The demo of experiments/runs/demo.toml: from random weights, its optimizer, words of 3 and 4 letters
spelled backward, float32 compute; of one seed all rows have the same start and the same examples. A
format of weights alone is trained straight through. What is compared is the mean negative
log-likelihood of a held-out answer's token: in the row's own formats, as it would be served, and of
the same weights with nothing quantized. Accuracy says less here: it saturates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.depth import short
from fp8rl_jax.cli.load import load_config
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.tasks.dataset import Dataset, Example, load_splits
from fp8rl_jax.training.session import Session
from fp8rl_jax.training.sft import demonstrations, mean_loss
from fp8rl_jax.training.source import load_model

DEMO = Path(__file__).parents[1] / "runs" / "demo.toml"
HELD_OUT = 256


def run_config(steps: int, batch_size: int, changes: Sequence[str] = ()) -> RunConfig:
    """The demo's configuration, from random weights.

    Args:
        steps, batch_size: of the supervised training.
        changes: further run files, the later over the earlier.
    """
    config = load_config(RunConfig, [str(DEMO), *changes], "formats")
    sft = replace(config.sft, steps=steps, batch_size=batch_size, cut_short=0.0)
    return replace(
        config,
        model=replace(config.model, path=""),
        precision=replace(config.precision, exact=False),
        sft=sft,
    )


_known: dict[str, tuple[Dataset, Dataset]] = {}


def problems_of(config: RunConfig) -> tuple[Dataset, Sequence[Example]]:
    """Those to train on, and those held out; made once."""
    key = repr(config.task)
    if key not in _known:
        _known[key] = load_splits(config.task)
    train, held_out = _known[key]
    return train, held_out.examples[:HELD_OUT]


def trained(config: RunConfig, recipe: Recipe) -> tuple[Session, list[dict[str, float]]]:
    """Train from random weights; returns the session and the metrics of each step."""
    policy, tokenizer = load_model(config)
    session = Session(policy, tokenizer, recipe, config=config)
    session.restart(config.sft.optimizer, config.sft.steps)
    problems, metrics = problems_of(config)[0], []
    for step in range(config.sft.steps):
        batch = problems.batch(step, config.sft.batch_size, config.seed)
        answers = demonstrations(session.encoder, batch, step, config)
        metrics.append(session.supervise(session.encoder.batch(batch), answers))
    return session, metrics


def losses(config: RunConfig, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Train under a recipe with a seed, and find its losses."""
    config = replace(config, seed=seed)
    session, metrics = trained(config, recipe)
    plain = replace(config, compute_dtype="float32")
    masters = Session(session.weights, session.tokenizer, Recipe("formats"), config=plain)
    return {
        "loss": short(held_out_loss(session)),
        "unquantized": short(held_out_loss(masters)),
        "last_step": short(np.float64(metrics[-1]["loss"])),
    }


def held_out_loss(session: Session) -> float:
    """Mean negative log-likelihood of the tokens of held-out answers, in the session's formats."""
    held_out = problems_of(session.config)[1]
    return mean_loss(session, held_out, len(held_out))
