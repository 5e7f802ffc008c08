"""One process of an ablation: `python -m fp8rl_jax.ablation.process train CONFIG.toml`.

It is `fp8rl train CONFIG.toml`, `fp8rl sft` or `fp8rl pretrain`, on objects that were given in
Python besides, and with the judge's evaluation of the trained model behind it.
"""

from __future__ import annotations

import logging
import pickle
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fp8rl_jax.ablation.design import judged
from fp8rl_jax.ablation.record import JUDGED, write_json
from fp8rl_jax.caching import keep_compiled_programs
from fp8rl_jax.config.files import read_config
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import RESUMABLE, Interrupted, UserError
from fp8rl_jax.tasks.python_objects import arguments_again


@dataclass(frozen=True)
class Arguments:
    """What the process does."""

    command: Annotated[Literal["train", "pretrain", "sft"], tyro.conf.Positional]
    config: Annotated[str, tyro.conf.Positional]
    """The run's TOML file."""
    resume: bool = False
    """Go on from the last checkpoint."""
    objects: str = ""
    """Pickle of a problem list, a reward or an environment."""
    judge: str = ""
    """Recipe under which the trained model is evaluated; empty: none."""


def run(arguments: Arguments) -> None:
    """Train, and have the model judged.

    Raises:
        UserError: as `fp8rl train`, `fp8rl sft` and `fp8rl eval`.
    """
    from fp8rl_jax.training.loop import train
    from fp8rl_jax.training.setup import build
    from fp8rl_jax.training.sft import supervise

    config = replace(read_config(RunConfig, arguments.config), resume=arguments.resume)
    given = _given(config, arguments.objects)
    if arguments.command == "train":
        train(build(config, **given))
    else:
        model = replace(config.model, path="" if config.sft.from_scratch else config.model.path)
        supervise(build(replace(config, model=model), sampled=False, **given))
    if arguments.judge:
        _judge(config, arguments.judge, given)


def _given(config: RunConfig, path: str) -> dict[str, Any]:
    """The arguments of `build` that a pickle holds."""
    if not path:
        return {}
    objects = pickle.loads(Path(path).read_bytes())
    rows = {name: objects.pop(name, None) for name in ("dataset", "eval_dataset")}
    return arguments_again(config.task, objects) | rows


def _judge(config: RunConfig, recipe: str, given: dict[str, Any]) -> None:
    """Evaluate the trained model once more, under a recipe that all arms have in common."""
    from fp8rl_jax.training.evaluation import evaluate_held_out
    from fp8rl_jax.training.setup import build, reward_pool
    from fp8rl_jax.training.sft import evaluate_text

    setup = build(judged(config, recipe), sampled=False, **given)
    row: dict[str, Any] = {}
    if config.task.kind == "text":
        found = evaluate_text(setup)
    else:
        with reward_pool(setup) as pool:
            evaluation = evaluate_held_out(setup, pool)
        found, row = evaluation.metrics, evaluation.row
    metrics = {name.replace("eval/", "judged/"): value for name, value in found.items()}
    write_json(config.directory / JUDGED, {"recipe": recipe, **metrics, **row})


def main() -> int:
    """Exit code: 0, 2 for a fault in what was given, 75 for a run that was stopped."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("fp8rl").setLevel(logging.INFO)
    arguments = tyro.cli(Arguments)
    keep_compiled_programs()
    try:
        run(arguments)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"fp8rl: error: {line}", file=sys.stderr)
        return 2
    except Interrupted as end:
        print(f"fp8rl: {end}", file=sys.stderr)
        return RESUMABLE
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
