"""Environments: problems that answer back. `module:Class` under task.kind = "environment", or a
class given in Python.

    class Guess:
        def __init__(self, largest=100): ...          # task.args
        def reset(self, seed): ...                    # -> the first prompt
        def step(self, text): ...                     # -> (observation, reward, done)

Turns are played by the reward workers, with their limits. A worker keeps nothing between two turns:
it makes the environment anew, resets it, steps through the earlier turns, and checks that it sees
what was seen then. So a worker may be killed at any time and any other can go on, and an
environment has to be a function of its seed and of the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import describe_fault, load_function
from fp8rl_jax.tasks.conversation import Conversation, MessageFault, read_messages
from fp8rl_jax.tasks.rewards import to_score

Message = dict[str, str]
_Content = str | Sequence[Message]
"""Text (the user's turn), or messages with role and content."""


class Environment(Protocol):
    """What a user's class has to have; `close`, where there is one, is called after every turn."""

    def reset(self, seed: int) -> _Content:
        """Start the problem of this seed; returns its prompt, the same for the same seed."""

    def step(self, text: str) -> tuple[_Content, float, bool]:
        """Take the model's answer; returns (observation, reward, whether it was the last turn).

        The observation of the last turn is not used.
        """


class EnvironmentFault(Exception):
    """An environment broke its protocol; the text says how."""


Turn = dict[str, Any]
"""What a turn led to: observation (list of messages), reward (float), done (bool); and metrics
({name: float}) of one that was the last, where the environment has some."""


def build_player(
    task: TaskConfig, objects: Mapping[str, Any] | None = None
) -> Callable[[Mapping[str, Any], Sequence[tuple[str, Sequence[Message]]], str], Turn]:
    """Build the function that plays one turn.

    (entry, earlier turns as (text, observation), text) -> what the turn led to.

    It raises `EnvironmentFault`, or whatever the environment raises.

    Raises:
        UserError: the class does not load.
    """
    make = _load_environment(task, objects)

    def play(
        entry: Mapping[str, Any], history: Sequence[tuple[str, Sequence[Message]]], text: str
    ) -> Turn:
        environment = make()
        try:
            if _prompt(environment.reset(entry["metadata"]["seed"])) != entry["question"]:
                raise EnvironmentFault(
                    "reset gave another prompt than at the start; it has to depend on the seed "
                    "alone"
                )
            for turn, (answer, observation) in enumerate(history, start=1):
                if _turn(environment.step(answer))["observation"] != list(observation):
                    raise EnvironmentFault(
                        f"step gave another observation when turn {turn} was played again; it "
                        "has to depend on the seed and on "
                        "the texts alone"
                    )
            return _turn(environment.step(text))
        finally:
            _close(environment)

    return play


def _load_environment(
    task: TaskConfig, objects: Mapping[str, Any] | None = None
) -> Callable[[], Environment]:
    """Load the class that the configuration names, as a function that makes one environment.

    `objects` has the class where it was given in Python.

    Raises:
        UserError: the class does not load or lacks a method. The returned function raises what the
            class raises.
    """
    cls = load_function(task.name, "task.name", objects)
    if missing := [name for name in ("reset", "step") if not callable(getattr(cls, name, None))]:
        raise UserError(
            f"task.name = {task.name!r} has no method {' and no method '.join(missing)}"
        )
    return lambda: cls(**task.args)


def first_prompts(
    task: TaskConfig, seeds: Iterable[int], objects: Mapping[str, Any] | None = None
) -> Iterator[tuple[int, str]]:
    """Yield (seed, first prompt) for each seed; `objects` as of `_load_environment`.

    Raises:
        UserError: the class does not load, raises, or gives no prompt.
    """
    make = _load_environment(task, objects)
    for seed in seeds:
        try:
            environment = make()
            prompt = _prompt(environment.reset(seed))
            _close(environment)
        # The user's class may raise anything, or call sys.exit.
        except (Exception, SystemExit) as fault:
            raise UserError(
                f"task.name = {task.name!r}, reset({seed}): {describe_fault(fault)}"
            ) from fault
        yield seed, prompt


def _close(environment: Environment) -> None:
    if (close := getattr(environment, "close", None)) is not None:
        close()


def _prompt(content: Any) -> str:
    if isinstance(content, str) and content.strip():
        return content
    if isinstance(content, str):
        raise EnvironmentFault("the prompt of reset is empty")
    try:
        return Conversation(read_messages(content))
    except MessageFault as fault:
        raise EnvironmentFault(f"the prompt of reset {fault}") from None


def _turn(result: Any) -> Turn:
    if not isinstance(result, tuple) or len(result) != 3:
        raise EnvironmentFault(
            f"step returned {type(result).__name__} instead of (observation, reward, done)"
        )
    content, reward, done = result
    if type(done) is not bool:
        raise EnvironmentFault(
            f"step returned done = {done!r:.40}, which is neither True nor False"
        )
    if done:
        return {"observation": [], "reward": to_score(reward), "done": True}
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    try:
        messages = read_messages(messages)
    except MessageFault as fault:
        raise EnvironmentFault(f"the observation of step: {fault}") from None
    if any(message["role"] in ("assistant", "system") for message in messages):
        raise EnvironmentFault("an observation has messages of the user and of tools only")
    return {
        "observation": list(messages),
        "reward": to_score(reward),
        "done": False,
    }
