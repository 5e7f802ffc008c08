"""The JSON files that benchmarks leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fp8rl_jax.errors import UserError


def write(path: Path, record: dict[str, Any]) -> None:
    """Writes the file; a reader never sees half of one.

    Raises:
        UserError: the file cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        raise UserError(f"--output: {path} cannot be written ({error.strerror})") from error


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
