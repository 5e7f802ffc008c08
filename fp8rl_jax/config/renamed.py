"""What other projects call a setting, and what it is called here: renamed.toml.

A configuration that comes from another project is answered key by key: an unknown key that ends in
a name of that table gets a line with its key here.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

SOURCES: dict[str, dict[str, tuple[str, str]]] = {
    source: {name: (row, "") if isinstance(row, str) else tuple(row) for name, row in table.items()}
    for source, table in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    ).items()
}
"""Project -> name there -> (keys here, joined by "and"; how the values differ)."""


class Renamed(NamedTuple):
    """What an unknown key is called here."""

    sources: tuple[str, ...]
    """Whose name it is."""
    keys: tuple[str, ...]
    """The keys here that do what it does."""
    note: str
    """How the values differ; empty where they do not."""


def renamed(key: str, whole: bool = False) -> Renamed | None:
    """Look up what `key` is called here; None where no table has it.

    Args:
        key: dotted, with underscores; the longest end of it that is a name in a table counts.
        whole: only `key` as it is counts, not its ends.
    """
    parts = key.split(".")
    for start in range(1 if whole else len(parts)):
        name = ".".join(parts[start:])
        if sources := tuple(source for source, table in SOURCES.items() if name in table):
            keys, note = SOURCES[sources[0]][name]
            return Renamed(sources, tuple(keys.split(" and ")), note)
    return None
