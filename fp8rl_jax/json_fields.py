"""Typed reads from the JSON files of a Hugging Face directory: a wrong type is an error that names
the key."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

from fp8rl_jax.errors import UserError

_REQUIRED: Any = object()


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        UserError: the file is unreadable, not UTF-8, not JSON, or not an object.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class Fields:
    """A JSON object read key by key. A null counts as absent; an absent key without a default is an
    error.

    `prefix` stands before the key in messages, for objects that are nested in another.
    """

    def __init__(self, data: dict[str, Any], prefix: str = ""):
        self.data = data
        self.prefix = prefix

    def _get(self, key: str, default: Any) -> tuple[Any, bool]:
        value = self.data.get(key)
        if value is not None:
            return value, True
        if default is _REQUIRED:
            raise UserError(f"{self.prefix}{key} is missing")
        return default, False

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        value, present = self._get(key, default)
        if present and (not isinstance(value, int) or isinstance(value, bool)):
            raise UserError(f"{self.prefix}{key} must be an integer, got {value!r}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        value, present = self._get(key, default)
        if not present:
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # an integer of hundreds of digits
                if math.isfinite(value):
                    return float(value)
        raise UserError(f"{self.prefix}{key} must be a finite number, got {value!r}")

    def boolean(self, key: str, default: bool = False) -> bool:
        value, _ = self._get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.prefix}{key} must be true or false, got {value!r}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Return an integer or a list of them as a tuple; empty where the key is absent."""
        value, _ = self._get(key, [])
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in values):
            raise UserError(
                f"{self.prefix}{key} must be an integer or a list of integers, got {value!r}"
            )
        return tuple(values)

    def object(self, key: str) -> Fields:
        """Return a nested object; empty where the key is absent."""
        value, _ = self._get(key, {})
        if not isinstance(value, dict):
            raise UserError(f"{self.prefix}{key} must be an object, got {value!r}")
        return Fields(value, f"{self.prefix}{key}.")
