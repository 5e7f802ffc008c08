"""A part's record: what its file holds, how it goes on, and what it is not to be mixed with."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.benchmarks.files import read, write
from fp8rl_jax.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


def begin(path: Path, part: str, device: str, tiny: bool, method: str, facts: dict[str, Any]) -> dict[str, Any]:
    """The file's record, or a new one, with this process added to it.

    Raises:
        UserError: the file was measured on another device, in the other size, or with other kernels.
    """
    own = {"started": datetime.now(UTC).isoformat(timespec="seconds"), **facts}
    new = {
        "part": part,
        "device": device,
        "counts": not tiny,
        "sources": sources(),
        "complete": False,
        "method": method,
        "processes": [],
        "running": None,
        "results": {},
        "failed": {},
        "skipped": [],
    }
    record = read(path) or new
    for key in ("part", "device", "counts", "sources"):
        if record.get(key) != new[key]:
            raise UserError(f"--output: {path} has {key} {record.get(key)!r}, and this is {new[key]!r}; give another folder")
    record |= {"complete": False, "running": None}
    record["processes"].append(own)
    return record


def blame(path: Path, reason: str) -> bool:
    """Records the job that was running as failed; False where none was."""
    record = read(path)
    if record is None or record["running"] is None:
        return False
    record["failed"][record["running"]] = reason
    record["skipped"] = [label for label in record["skipped"] if label != record["running"]]
    record["running"] = None
    write(path, record)
    return True


def sources(root: Path = ROOT) -> str:
    """A hash of the kernels: figures of two versions are not mixed in one file."""
    digest = hashlib.sha256()
    for file in sorted((root / "pallas_kernels").rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
