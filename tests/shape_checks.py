"""The type checker behind the import hook in conftest.py: beartype on array annotations, and on
nothing else.

Shapes and dtypes are what the library's annotations promise at run time. Plain annotations are left
to the functions, which answer a wrong type with a clear line of their own, and tests ask for that
line. Constructors are left alone too: JAX rebuilds pytree dataclasses around placeholders. What has
no array among its annotations is not wrapped at all: that is most functions, and wrapping them took
a tenth of the tests' time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import isfunction
from typing import Any, get_args

import jaxtyping
from beartype import beartype
from jaxtyping import AbstractArray


def install(packages: Sequence[str]) -> None:
    """Check the arrays of every function of `packages` that is imported from here on."""
    whole = jaxtyping.jaxtyped

    def where_there_are_arrays(*, typechecker: Callable) -> Callable:
        def decorate(thing: Any) -> Any:
            return whole(thing, typechecker=typechecker) if _has_arrays(thing) else thing

        return decorate

    jaxtyping.jaxtyped = where_there_are_arrays  # what the hook puts in front of each definition
    jaxtyping.install_import_hook(packages, "shape_checks.check")


def check(function: Callable) -> Callable:
    """`function` with its array annotations checked at every call."""
    hints = function.__annotations__
    function.__annotations__ = {
        name: hint if _mentions_array(hint) else Any for name, hint in hints.items()
    }
    return beartype(function)


def _has_arrays(thing: Any) -> bool:
    if not isfunction(thing) or thing.__name__ == "__init__":
        return False
    return any(_mentions_array(_meant(hint, thing)) for hint in thing.__annotations__.values())


def _meant(annotation: Any, function: Callable) -> Any:
    """What an annotation stands for, at its function's definition as jaxtyping reads it; None where
    a name is not there yet."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, function.__globals__)
    except Exception:
        return None


def _mentions_array(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        return True
    return any(_mentions_array(part) for part in get_args(annotation))
