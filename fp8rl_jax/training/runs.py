"""A whole run from Python, and what it leaves."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from fp8rl_jax.config.files import read_config, run_directory
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import show
from fp8rl_jax.config.settings import with_settings
from fp8rl_jax.errors import UserError, listing
from fp8rl_jax.tasks.python_objects import PythonReward
from fp8rl_jax.training.evaluation import evaluate_held_out
from fp8rl_jax.training.live import SHOWN, draw
from fp8rl_jax.training.loop import train as train_setup
from fp8rl_jax.training.setup import build, reward_pool
from fp8rl_jax.training.sft import evaluate_text
from fp8rl_jax.training.source import trained_settings
from fp8rl_jax.training.text import Text
from fp8rl_jax.training.tracking import Callback

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Run:
    """A run directory: metrics.jsonl, samples.jsonl, evaluations.jsonl, config.toml, checkpoints/,
    model/."""

    directory: Path

    @property
    def model(self) -> Path:
        """The trained model, for `fp8rl.load`."""
        return self.directory / "model"

    @property
    def metrics(self) -> dict[str, Float[np.ndarray, " rows"]]:
        """A column for each metric and one for "step", a row for each line of metrics.jsonl, NaN
        where a line has no such number: what `pandas.DataFrame` takes.

        Raises:
            UserError: there is no record, or it is damaged.
        """
        path = self.directory / "metrics.jsonl"
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from None
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: np.array([_number(row.get(name)) for row in rows]) for name in names}

    def plot(self, names: str | Sequence[str] = SHOWN) -> Figure:
        """Plot metrics over steps, one panel each; of several names those that were not measured
        are left out.

        Args:
            names: one or several of `metrics`.

        Raises:
            UserError: it measured none of them.
        """
        metrics, asked = self.metrics, [names] if isinstance(names, str) else list(names)
        names = [name for name in asked if np.isfinite(metrics.get(name, np.nan)).any()]
        if not names:
            raise UserError(f"{self.directory}: {_unmeasured(asked, metrics)}")
        return draw(metrics, names)


def train(
    config: RunConfig | str | Path | None = None,
    *,
    reward: PythonReward | None = None,
    dataset: Sequence[Any] | Iterable[Any] | None = None,
    eval_dataset: Sequence[Any] | Iterable[Any] | None = None,
    environment: type | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Run:
    """Train as `fp8rl train` does.

    Rewards run in worker processes; the run directory gets metrics, samples, checkpoints,
    evaluation, the model.

    Args:
        config: its settings, or the TOML file that has them.
        reward: function, or a list of them or {name: function}, summed with task.reward.weights,
            in place of what task.reward names. It may live in a notebook's cell:
            `def reward(completion, answer, **_)` returns a number; fp8rl_jax/tasks/rewards.py has
            both forms.
        dataset: problems in place of those that task names: dictionaries with "prompt" and
            "answer", or prompts alone; a list, or a `datasets.Dataset`.
        eval_dataset: held-out problems, likewise; without them some of `dataset` are held out
            (task.eval_size).
        environment: class in place of the one that task names, for episodes of several turns.
        callbacks: each is called as f(step, metrics) with every row of metrics.jsonl, in the
            process that writes it. One that returns True ends the run behind that step, with a
            checkpoint and the model; what one raises ends it as a fault does.
        settings: single settings over `config`, as `Session` takes them.

    Raises:
        UserError: naming the key, file or tensor; or the run directory holds a run already.
    """
    if callable(callbacks) or not all(map(callable, callbacks)):
        raise UserError(
            f"callbacks: expected a list of functions of (step, metrics), got {show(callbacks)}"
        )
    config = _settled(config, settings)
    setup = build(
        config,
        reward=reward,
        dataset=dataset,
        environment=environment,
        eval_dataset=eval_dataset,
    )
    train_setup(setup, callbacks=callbacks)
    return Run(setup.directory)


def evaluate(
    config: RunConfig | str | Path | None = None,
    *,
    reward: PythonReward | None = None,
    dataset: Sequence[Any] | Iterable[Any] | None = None,
    eval_dataset: Sequence[Any] | Iterable[Any] | None = None,
    environment: type | None = None,
    **settings: Any,
) -> dict[str, float]:
    """Compute held-out metrics of a model, as `fp8rl eval` prints them.

    Under a recipe's rollout formats; arguments as in `train`. A run's directory, or the config.toml
    in it, stands for what it has trained.

    Raises:
        UserError: as `train`; or nothing is held out.
    """
    config = _settled(config, settings, trained=True)
    setup = build(
        config,
        sampled=False,
        reward=reward,
        dataset=dataset,
        environment=environment,
        eval_dataset=eval_dataset,
    )
    if not len(setup.held_out):
        raise UserError("task.eval_size = 0 holds out no problem to evaluate on; raise it")
    if isinstance(setup.held_out, Text):
        return evaluate_text(setup)
    with reward_pool(setup) as pool:
        return evaluate_held_out(setup, pool).metrics


def _settled(
    config: RunConfig | str | Path | None, settings: dict[str, Any], trained: bool = False
) -> RunConfig:
    run = run_directory(config) if trained and isinstance(config, str | Path) else None
    if isinstance(config, str | Path):
        config = read_config(RunConfig, config, *([] if run is None else [trained_settings(run)]))
    before = RunConfig() if config is None else config
    found = with_settings(before, settings)
    asked = settings.keys() & {"exact", "precision.exact"}
    return found if run is None or asked else found.with_exact_of(before)


def _unmeasured(asked: Sequence[str], metrics: Mapping[str, Any]) -> str:
    """What to say where there is nothing to draw."""
    known = sorted(name for name in metrics if np.isfinite(metrics[name]).any())
    if not known:
        return "no step is recorded yet"
    near = [close[0] for name in asked if (close := difflib.get_close_matches(name, known, n=1))]
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {listing(known, 12)}"
    return f"{listing(asked)}: not measured; {hint}"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else np.nan
