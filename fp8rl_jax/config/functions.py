"""Settings that name a built-in function or one of the user's, and the settings beside them that
hold its arguments."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

from fp8rl_jax.functions import is_function_spec, is_python_spec, register


class Arguments(dict[str, float]):
    """{name: number}, never to be changed: a configuration that holds it is hashed, and compiled
    programs depend on it."""

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __reduce__(self):
        return Arguments, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise TypeError(
            "the arguments of a configuration cannot be changed; make another one with "
            "dataclasses.replace"
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


def settle(config: Any, name: str, arguments: str) -> None:
    """For `__post_init__` of a frozen dataclass: a Python function becomes its spec, and its
    arguments `Arguments`.

    Args:
        config: the dataclass.
        name: field of the function.
        arguments: field of its arguments.
    """
    function, given = getattr(config, name), getattr(config, arguments)
    if callable(function):
        object.__setattr__(config, name, register(function))
    if isinstance(given, dict):
        numbers = {
            key: float(value) if type(value) is int else value for key, value in given.items()
        }
        object.__setattr__(config, arguments, Arguments(numbers))


def is_users(function: Any) -> bool:
    """Whether a setting names a function of the user's, and none that is built in."""
    return isinstance(function, str) and (is_function_spec(function) or is_python_spec(function))


def function_faults(
    key: str, value: Any, built_in: Collection[str], arguments_key: str, arguments: Any
) -> Iterator[str]:
    """A line for each fault of a function's name and of its arguments.

    Args:
        key: of the function.
        value: name or spec, after `settle`; None is not set.
        built_in: names.
        arguments_key: of the arguments.
        arguments: after `settle`.
    """
    if not (value is None or is_users(value) or value in tuple(built_in)):
        names = ", ".join(map(repr, built_in))
        yield (
            f"{key}: {value!r} is none of {names}, and no module:function or "
            "path/to/file.py:function"
        )
    if not isinstance(arguments, dict):
        yield f"{arguments_key}: {arguments!r} must be a table of numbers"
        return
    for name, number in arguments.items():
        if not (
            isinstance(name, str)
            and name.isidentifier()
            and isinstance(number, float)
            and math.isfinite(number)
        ):
            yield f"{arguments_key}: {name} = {number!r} must be a name and a finite number"
    if arguments and not is_users(value):
        yield (
            f"{arguments_key}: {value or 'what is built in'} takes no arguments; they are for "
            f"a function of your own, in {key}"
        )
