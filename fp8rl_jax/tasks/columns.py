"""Columns of rows that a configuration names: task.fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from fp8rl_jax.config.tasks import FieldsConfig
from fp8rl_jax.errors import UserError, listing

_SHOWN = 20


def value_at(record: Mapping[str, Any], path: str) -> Any:
    """Return what stands at a dotted path of a row; None where there is nothing.

    A column whose own name is `path` goes before one of an object's.
    """
    if path in record:
        return record[path]
    column, _, rest = path.partition(".")
    inner = record.get(column)
    return value_at(inner, rest) if rest and isinstance(inner, Mapping) else None


def columns_of(record: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of a row's columns; of an object those of its own ones."""
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            yield from columns_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def listed(columns: Iterable[str], wanted: str) -> str:
    """Write which columns there are, and which is near to the one that is wanted."""
    there = list(columns)
    near = get_close_matches(wanted, there, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"{meant}there are {listing(there, _SHOWN)}" if there else "there are none"


class NamedColumns:
    """Which columns of task.fields the rows have had so far.

    Args:
        fields: those that are looked for.
        of: what the rows are, for the message.
    """

    def __init__(self, fields: FieldsConfig, of: str) -> None:
        self._missing, self._of = dict(fields.given), of
        self._there: dict[str, None] = {}

    def see(self, record: Any) -> None:
        """Look at one more row."""
        if self._missing and isinstance(record, Mapping):
            self._there |= dict.fromkeys(columns_of(record))
            self._missing = {
                name: path for name, path in self._missing.items() if value_at(record, path) is None
            }

    def check(self) -> None:
        """Refuse columns that no row had.

        Raises:
            UserError: a line for each, with the columns that there are. Nothing where there was no
                row at all.
        """
        if self._missing and self._there:
            raise UserError(
                "\n".join(
                    f"task.fields.{name} = {path!r}: {self._of} has no such column; "
                    f"{listed(self._there, path)}"
                    for name, path in self._missing.items()
                )
            )
