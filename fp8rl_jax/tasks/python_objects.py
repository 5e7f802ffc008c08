"""Rewards, environments and problems that a run gets as Python objects instead of by name.

    build(config, reward=score, dataset=rows)

A configuration names them all the same, so that the run's config.toml says what happened:
`<python>:score` as the function, task.kind = "python" as the kind of the problems. Whoever goes on
with such a run from Python gives the objects again; the command line, which cannot, says so in one
line.

How functions and classes get to the reward workers is in fp8rl_jax/tasks/sandbox/pickling.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from fp8rl_jax.config.tasks import RewardConfig, TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import is_python_spec, python_spec

PythonReward = Callable[..., Any] | Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any]]
"""One function, or several, in a list by their own names; what each is called with is in
fp8rl_jax/tasks/rewards.py."""


def name_objects(
    task: TaskConfig,
    reward: PythonReward | None = None,
    dataset: Any = None,
    environment: type | None = None,
    eval_dataset: Any = None,
) -> tuple[TaskConfig, dict[str, Any]]:
    """Return the configuration that names what was given in Python.

    A task that names such objects already, because it comes from the config.toml of a run, gets the
    new ones in their place.

    Args:
        task: the other settings.
        reward: one function, which task.reward.weights may weigh by its name; or a list of them or
            {name: function}, summed with task.reward.weights, and with weights of 1.0 where there
            are none.
        dataset: problems, as `load_splits` takes them.
        environment: class of an environment, which task.args are the arguments of
            (fp8rl_jax/tasks/environment.py).
        eval_dataset: held-out problems, likewise.

    Returns:
        The configuration, and {`<python>:NAME`: function or class}.

    Raises:
        UserError: an object of another kind, or one in the place of something else that the
            configuration names.
    """
    objects: dict[str, Any] = {}
    if dataset is not None and environment is not None:
        raise UserError(
            "dataset and environment are both given, and an environment makes its own problems; "
            "give one of them"
        )
    if dataset is not None:
        task = replace(task, kind="python", name=_describe_dataset(dataset, "dataset"))
    if eval_dataset is not None:
        if task.names_held_out and not is_python_spec(task.eval_path):
            raise UserError(
                f"eval_dataset and task.eval_path or eval_split = "
                f"{task.eval_path or task.eval_split!r} are both given; take one of them out"
            )
        given = _describe_dataset(eval_dataset, "eval_dataset")
        task = replace(task, eval_path=python_spec(given))
    if environment is not None:
        if not isinstance(environment, type):
            raise UserError(f"environment must be a class, not {type(environment).__name__}")
        name = _name(environment)
        objects[python_spec(name)] = environment
        task = replace(task, kind="environment", name=python_spec(name))
    if reward is not None:
        task = replace(task, reward=_with_rewards(task.reward, reward, objects))
    return task, objects


def arguments_again(task: TaskConfig, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Give the `reward` and `environment` that `name_objects` made this task and these objects
    of."""
    rewards = task.reward
    named = {
        name: objects[spec] for name, spec in rewards.functions.items() if spec in objects
    } or objects.get(rewards.function)
    return {"reward": named, "environment": objects.get(task.name)}


def check_objects(task: TaskConfig, objects: Mapping[str, Any]) -> None:
    """Refuse a task that names objects that were given in Python and are not given again.

    Raises:
        UserError: one line for each.
    """
    missing = {key: spec for key, spec in task.python_objects.items() if spec not in objects}
    if missing:
        raise UserError("\n".join(not_given(key, spec) for key, spec in missing.items()))


def check_dataset(task: TaskConfig, dataset: Any, eval_dataset: Any = None) -> None:
    """Refuse a task that names problems which were given in Python and are not given again.

    Raises:
        UserError: with what to do.
    """
    if task.kind == "python" and dataset is None:
        raise UserError(
            f'task.kind = "python": the problems of this run ({task.name}) were given in Python; '
            "give dataset= again, or name "
            'their file with task.kind = "jsonl"'
        )
    if is_python_spec(task.eval_path) and eval_dataset is None:
        raise UserError(
            f"task.eval_path = {task.eval_path!r}: the held-out problems of this run were given in "
            "Python; give eval_dataset= again, or name their file"
        )


def not_given(key: str, spec: str) -> str:
    """Say what to do about an object that only Python can give."""
    argument, kind = ("environment", "Class") if key == "task.name" else ("reward", "function")
    return (
        f"{key} = {spec!r} was given in Python; give {argument}= again, or name a file in its "
        f"place: path/to/file.py:{kind}"
    )


def _with_rewards(config: RewardConfig, reward: Any, objects: dict[str, Any]) -> RewardConfig:
    named = isinstance(reward, Mapping)
    several = named or isinstance(reward, list | tuple)
    items = list(reward.items() if named else [(_name(f), f) for f in _listed(reward)])
    if not items:
        raise UserError("reward has no function; give one, or {name: function}")
    for name, function in items:
        if not callable(function) or not isinstance(name, str):
            given = type(function).__name__
            given = f"{{{name!r}: {given}}}" if named else f"[{given}]" if several else given
            raise UserError(
                f"reward must be a function, a list of them or {{name: function}}, not {given}"
            )
    functions = dict(items)
    if len(functions) < len(items):
        twice = next(name for name in functions if [x for x, _ in items].count(name) > 1)
        raise UserError(f"reward has two functions called {twice!r}; give {{name: function}}")
    specs = {name: python_spec(name) for name in functions}
    objects |= {specs[name]: function for name, function in functions.items()}
    if config.function and not is_python_spec(config.function):
        raise UserError(
            f"reward and task.reward.function = {config.function!r} are both given; take one of "
            "them out"
        )
    if taken := [
        name for name in specs if not is_python_spec(config.functions.get(name, python_spec(name)))
    ]:
        raise UserError(
            f"reward and task.reward.functions.{taken[0]} are both given; take one of them out"
        )
    if not several and not config.weights:
        return replace(config, function=python_spec(_name(reward)))
    weights = config.weights or dict.fromkeys(specs, 1.0)
    return replace(config, function="", functions=config.functions | specs, weights=weights)


def _describe_dataset(dataset: Any, argument: str) -> str:
    """What config.toml says of the problems: "list of 800", "generator"."""
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        wanted = "one of its values, such as its train split"
    elif isinstance(dataset, Set):
        wanted = "a list, which has an order"
    elif hasattr(dataset, "iloc"):  # pandas: its items are columns
        wanted = 'dataset.to_dict("records")'
    elif isinstance(dataset, str | bytes) or not (
        hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
    ):
        wanted = "a list of dictionaries or of prompts"
    else:
        count = length(dataset)
        return kind if count is None else f"{kind} of {count}"
    raise UserError(f"{argument} is a {kind}; give {wanted}")


def length(dataset: Any) -> int | None:
    """Count the problems that can be had by index.

    None of a generator and of a data set that is read as a stream.
    """
    try:
        return len(dataset) if hasattr(dataset, "__getitem__") else None
    except TypeError:
        return None


def _listed(reward: Any) -> Sequence[Any]:
    return reward if isinstance(reward, list | tuple) else [reward]


def _name(function: Any) -> str:
    function = unwrapped(function)
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else "reward"


def unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function
