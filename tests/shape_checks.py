"""The type checker behind the import hook in conftest.py: beartype on array annotations, and on
nothing else.

Shapes and dtypes are what the library's annotations promise at run time. Plain annotations are left
to the functions, which answer a wrong type with a clear line of their own, and tests ask for that
line. Constructors are left alone too: JAX rebuilds pytree dataclasses around placeholders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def check(function: Callable) -> Callable:
    """`function` with its array annotations checked at every call."""
    if function.__name__ == "__init__":
        return function
    hints = function.__annotations__
    function.__annotations__ = {
        name: hint if _mentions_array(hint) else Any for name, hint in hints.items()
    }
    return beartype(function)


def _mentions_array(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        return True
    return any(_mentions_array(part) for part in get_args(annotation))
