"""The records that studies and benchmarks write: JSON files, mostly in experiments/results."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp8rl_jax.ablation.record import write_json
from fp8rl_jax.durable import locked
from fp8rl_jax.errors import UserError

LOCKS = Path(__file__).parents[1] / ".cache" / "records"


def read(path: Path) -> dict[str, Any] | None:
    """What `write` left; None where there is no file.

    Raises:
        UserError: the file cannot be read, or is no such record.
    """
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"--output: {path} cannot be read ({error})") from None
    if not isinstance(record, dict):
        raise UserError(f"--output: {path} holds no record")
    return record


def write(path: Path, record: dict[str, Any]) -> None:
    """Write the file in one piece: a reader gets the old or the new one.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, record)
    except OSError as error:
        raise UserError(f"--output: {path} cannot be written ({error.strerror})") from error


@contextmanager
def changed(path: Path) -> Generator[dict[str, Any]]:
    """Change a record that several commands write: it is read, and written at the end, while no
    other does. Empty where there is none.

    Raises:
        UserError: as `read` and `write`.
    """
    with locked(LOCKS / path.name, wait=True):
        record = read(path) or {}
        yield record
        write(path, record)
