"""Checking a tree of dataclasses, and the plain values (from TOML, or typed as flags) that are to
become one.

Values are checked against the annotations that the dataclasses carry: bool, int, float, str,
Literal, Optional, tuple, list, dict, and dataclasses inside one another. A setting is named by its
dotted key, such as "rollout.top_k". What an annotation cannot say, such as a bound, a class checks
itself: it collects lines of text (`above`, `one_of`, ...) and reports all of them at one time.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from string import Formatter
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fp8rl_jax.config.renamed import renamed
from fp8rl_jax.errors import UserError

NONE_TEXT = "none"
MAX_DEPTH = 50
"""Tables or lists inside one another in a setting, at most."""
_INT64 = range(-(2**63), 2**63)


class Mismatch(Exception):
    """A value that does not fit its annotation; the text says what was expected."""


@cache
def fields_of(tree: Any) -> dict[str, Any]:
    """Return {name: annotation} of a dataclass, annotations resolved and `Annotated` taken off."""
    hints = get_type_hints(tree)
    return {field.name: hints[field.name] for field in dataclasses.fields(tree) if field.init}


def leaves(tree: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, annotation) of every setting under a dataclass, tables left out."""
    for name, annotation in fields_of(tree).items():
        if dataclasses.is_dataclass(annotation):
            yield from leaves(annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, annotation


def tables(tree: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every table under a dataclass."""
    for name, annotation in fields_of(tree).items():
        if dataclasses.is_dataclass(annotation):
            yield prefix + name
            yield from tables(annotation, f"{prefix}{name}.")


def validate(config: Any) -> None:
    """Check a configuration that was made in Python as the command line does.

    Raises:
        UserError: one line for each fault: values of another type than their field's, and what
            `problems()` of the dataclasses find.
    """
    # a value of another type cannot be compared with a bound
    if faults := list(_misfits(config)) or list(problems(config)):
        raise UserError("\n".join(dict.fromkeys(map(one_line, faults))))


def _misfits(node: Any, prefix: str = "") -> Iterator[str]:
    """Yield a line for each setting whose value is not of its annotation's type."""
    for name, annotation in fields_of(type(node)).items():
        key, value = prefix + name, getattr(node, name)
        if dataclasses.is_dataclass(annotation) and isinstance(value, annotation):
            yield from _misfits(value, f"{key}.")
            continue
        try:
            convert(value, annotation)
        except Mismatch:
            yield f"{key}: expected {describe(annotation)}, got {show(value)}"


def problems(node: Any) -> Iterator[str]:
    """Yield what `problems()` of a dataclass and of those inside it find."""
    if hasattr(node, "problems"):
        yield from node.problems()
    for name in fields_of(type(node)):
        if dataclasses.is_dataclass(getattr(node, name)):
            yield from problems(getattr(node, name))


def convert(value: Any, annotation: Any) -> Any:
    """Convert `value` to the annotated type.

    An int, of 64 bits as TOML has it, is taken where a float is wanted; a bool is no number.

    Raises:
        Mismatch: it does not fit.
    """
    annotation, optional = _split_optional(annotation)
    if optional and (value is None or value == NONE_TEXT):
        return None
    origin, arguments = get_origin(annotation), get_args(annotation)
    if type(value) is int and value not in _INT64:
        raise Mismatch(annotation)
    if annotation is Any and type(value) is list:
        return [convert(item, Any) for item in value]
    if annotation is Any and type(value) is not dict:
        return value
    if origin is Literal:
        if not any(type(value) is type(choice) and value == choice for choice in arguments):
            raise Mismatch(annotation)
        return value
    if annotation is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise Mismatch(annotation)
        return float(value)
    if annotation in (bool, int, str) and type(value) is annotation:
        return value
    if origin in (tuple, list) and type(value) in (tuple, list):
        kinds = [arguments[0]] * len(value) if _is_uniform(annotation) else list(arguments)
        if len(kinds) == len(value):
            return origin(convert(item, kind) for item, kind in zip(value, kinds, strict=True))
    if (origin or annotation) in (dict, Any) and isinstance(value, dict):
        kind = arguments[1] if arguments else Any
        return {key: convert(item, kind) for key, item in value.items()}
    raise Mismatch(annotation)


def holds_tables(annotation: Any) -> bool:
    """Say whether a setting is a table whose entries are tables of their own, as [recipes] is."""
    return get_origin(annotation) is dict and get_origin(get_args(annotation)[1]) is dict


def is_deeper(value: Any, depth: int) -> bool:
    """Say whether tables and lists are nested in `value` more than `depth` times."""
    level = [value]
    for _ in range(depth):
        nested = [
            item.values() if type(item) is dict else item
            for item in level
            if type(item) in (dict, list)
        ]
        level = [inner for items in nested for inner in items]
    return any(type(item) in (dict, list) for item in level)


def convert_text(words: list[str], annotation: Any) -> Any:
    """Convert the words after a flag to the annotated type.

    Raises:
        Mismatch: they do not fit, or are too many or too few.
    """
    inner, optional = _split_optional(annotation)
    if optional and words in (["None"], [NONE_TEXT]):
        return None
    if get_origin(inner) in (tuple, list):
        kinds = [get_args(inner)[0]] * len(words) if _is_uniform(inner) else list(get_args(inner))
        if len(kinds) != len(words):
            raise Mismatch(inner)
        return get_origin(inner)(
            convert_text([word], kind) for word, kind in zip(words, kinds, strict=True)
        )
    if inner is bool and not words:
        return True
    if inner is bool or len(words) != 1:
        raise Mismatch(inner)
    if get_origin(inner) is Literal:
        choices = [choice for choice in get_args(inner) if str(choice) == words[0]]
        return convert(choices[0] if choices else words[0], inner)
    if inner in (int, float):
        try:
            return convert(inner(words[0]), inner)
        except ValueError:
            raise Mismatch(inner) from None
    return words[0]


def describe(annotation: Any) -> str:
    """Say in words what an annotation wants."""
    annotation, optional = _split_optional(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        text = f"one of {', '.join(json.dumps(choice) for choice in arguments)}"
    elif arguments and dataclasses.is_dataclass(arguments[0]):
        text = "a table of tables"
    elif origin in (tuple, list):
        kinds = arguments[:1] if _is_uniform(annotation) else arguments
        nouns = ", ".join(_NOUNS.get(kind, "value") for kind in kinds)
        text = f"a list of {nouns}{'s' * _is_uniform(annotation)}"
    elif holds_tables(annotation):
        text = "a table of tables"
    elif dataclasses.is_dataclass(annotation) or (origin or annotation) is dict:
        text = "a table"
    else:
        noun = _NOUNS.get(annotation, "value")
        text = f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
    return f'{text}, or "{NONE_TEXT}"' if optional else text


_NOUNS = {bool: "boolean", int: "integer", float: "finite number", str: "string"}


def unknown_key_hint(key: str, known: list[str], spell: Callable[[str], str] = str) -> str:
    """Write the end of the message about an unknown key: its name here, or the nearest keys.

    Args:
        key: dotted, as it was given.
        known: dotted keys that may be named.
        spell: how a key is written where this one stands, such as a flag.
    """
    key = key.replace("-", "_").lower()
    near = difflib.get_close_matches(
        key, [other for other in known if not key.startswith(f"{other}.")], n=1, cutoff=0.8
    )
    # A misspelled key goes before the end of a key that another project happens to use:
    # optimizer.beta is beta1.
    old = renamed(key, whole=True) or (None if near else renamed(key))
    if old and set(old.keys) <= set(known):
        owners = " and ".join(f"{source}'s" for source in old.sources)
        note = f" ({old.note})" if old.note else ""
        return f": {owners} name; here it is {' and '.join(map(spell, old.keys))}{note}"
    candidates = near or _namesakes(key, known)
    return f"; did you mean {' or '.join(map(spell, candidates))}?" if candidates else ""


def quoted(name: str) -> str:
    """Write one part of a dotted key as TOML does: in quotes where it is no bare word."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'


def one_line(text: str) -> str:
    """Escape line breaks and all else that is not printable.

    So a key or a value cannot make two lines of a message.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _namesakes(key: str, known: list[str]) -> list[str]:
    if same_name := [candidate for candidate in known if _name(candidate) == _name(key)]:
        return same_name[:3]
    if near := difflib.get_close_matches(key, known, n=1, cutoff=0.6):
        return near
    near_names = difflib.get_close_matches(
        _name(key), [_name(candidate) for candidate in known], n=1, cutoff=0.75
    )
    return [candidate for candidate in known if _name(candidate) in near_names][:3]


def show(value: Any) -> str:
    """Write a value as it was given, shortened where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python converts no integer of so many digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _name(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _split_optional(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, False
    rest = [part for part in get_args(annotation) if part is not type(None)]
    if len(rest) != 1:
        raise TypeError(
            f"unsupported annotation {annotation}: a setting has one type, or one type and None"
        )
    return rest[0], True


def _is_uniform(annotation: Any) -> bool:
    return get_origin(annotation) is list or get_args(annotation)[-1] is Ellipsis


def report(*faults: str | None) -> None:
    """Raise UserError with one line for each fault; None stands for "this one is well"."""
    lines = [fault for fault in faults if fault]
    if lines:
        raise UserError("\n".join(lines))


def one_of(key: str, value: Any, choices: Any) -> str | None:
    """Return a fault where `value` is none of a Literal's, or of a collection's, values."""
    allowed: Iterable = get_args(choices) or choices
    return (
        None if value in allowed else f"{key}: {value!r} is none of {', '.join(map(repr, allowed))}"
    )


def above(key: str, value: Any, bound: float, at_most: float = math.inf) -> str | None:
    """Return a fault where `value` is no number in (bound, at_most]."""
    limit = "" if at_most == math.inf else f" and at most {at_most:g}"
    within = _is_number(value) and bound < value <= at_most
    return None if within else f"{key}: {value!r} must be a number above {bound:g}{limit}"


def at_least(key: str, value: Any, bound: float) -> str | None:
    """Return a fault where `value` is no number of at least `bound`."""
    return (
        None
        if _is_number(value) and value >= bound
        else f"{key}: {value!r} must be a number of at least {bound:g}"
    )


def within(
    key: str, value: Any, low: float, high: float = math.inf, below: float = math.inf
) -> str | None:
    """Return a fault where `value` is no number in [low, high], and less than `below`."""
    limit = f"at most {high:g}" if below == math.inf else f"below {below:g}"
    holds = _is_number(value) and low <= value <= high and value < below
    return None if holds else f"{key}: {value!r} must be a number of at least {low:g} and {limit}"


def unknown_placeholders(key: str, text: str, *known: str) -> list[str]:
    """List a fault for each {placeholder} of a path that is not known, and for a lone brace."""
    fields = " and ".join(f"{{{name}}}" for name in known)
    try:
        names = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    except ValueError as error:
        return [f"{key} = {text!r}: {error}; write a brace twice, or one of {fields}"]
    return [
        f"{key} = {text!r}: unknown placeholder {{{name}}}; known: {fields}"
        for name in names
        if name not in known
    ]


def unless(holds: bool, message: str) -> str | None:
    """Return `message` where `holds` is false."""
    return None if holds else message


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
