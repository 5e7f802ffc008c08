"""Checks of single settings, as lines of text: a class collects what it finds and reports all of it
together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, get_args

from fp8rl_jax.errors import UserError


def report(*faults: str | None) -> None:
    """Raises UserError with one line for each fault; None stands for "this one is well"."""
    found = [fault for fault in faults if fault]
    if found:
        raise UserError("\n".join(found))


def one_of(key: str, value: Any, choices: Any) -> str | None:
    """A fault where `value` is none of a Literal's, or of a collection's, values."""
    allowed: Iterable = get_args(choices) or choices
    return (
        None if value in allowed else f"{key}: {value!r} is none of {', '.join(map(repr, allowed))}"
    )


def above(key: str, value: Any, bound: float, at_most: float = math.inf) -> str | None:
    """A fault where `value` is no number in (bound, at_most]."""
    limit = "" if at_most == math.inf else f" and at most {at_most:g}"
    within = _is_number(value) and bound < value <= at_most
    return None if within else f"{key}: {value!r} must be a number above {bound:g}{limit}"


def at_least(key: str, value: Any, bound: float) -> str | None:
    """A fault where `value` is no number of at least `bound`."""
    return (
        None
        if _is_number(value) and value >= bound
        else f"{key}: {value!r} must be a number of at least {bound:g}"
    )


def unless(holds: bool, message: str) -> str | None:
    """`message` where `holds` is false."""
    return None if holds else message


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
