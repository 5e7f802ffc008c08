"""The record of a run directory: who runs in it, with what, and how it went on.

run.lock      held by the process that writes here; says who it is
config.toml   the settings, resolved, of the newest start
run.json      versions, command, commit, devices, backend; each earlier start, and what was changed
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from fp8rl_jax import self_test
from fp8rl_jax.config.files import dump_toml
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.durable import locked, write_durably
from fp8rl_jax.errors import UserError
from pallas_kernels.backend import resolve

_log = logging.getLogger("fp8rl")
_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "ml-dtypes",
    "numpy",
    "fp8rl_jax",
)


@contextlib.contextmanager
def owned(directory: Path) -> Generator[None]:
    """Make a run directory, and let no other run write into it.

    Raises:
        UserError: it cannot be written, or another run is in it.
    """
    path = directory / "run.lock"
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(locked(path))
            if held is not None:
                owner = f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"
                os.truncate(held, 0)
                os.pwrite(held, f"{owner}, since {time.strftime('%F %T')}\n".encode(), 0)
        except OSError as error:
            raise UserError(
                f"{directory}: the run directory cannot be written ({error.strerror}); choose "
                "another output"
            ) from error
        if held is None:
            with contextlib.suppress(OSError):  # who holds it may have removed it
                owner = path.read_text().strip()
                raise UserError(
                    f"{directory} is in use by another run ({owner}); wait for its end, or choose "
                    "another output"
                )
        yield


def write_run_record(
    config: RunConfig, supervised: bool = False, changed: Sequence[str] = ()
) -> None:
    """Write config.toml (resolved) and run.json (versions, command, commit, devices, backend).

    A resumed run keeps the records of its earlier starts under "earlier".

    Args:
        supervised: whether it trains by `sft.*`, on given answers or on text.
        changed: what is other than before, a line each.

    Raises:
        UserError: they cannot be written, or run.json is damaged.
    """
    directory = config.directory
    record: dict[str, Any] = {
        "command": ["fp8rl", *sys.argv[1:]],
        "supervised": supervised,
        "started": time.time(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _PACKAGES},
        "commit": _commit(),
        "devices": [f"{d.platform}:{d.device_kind}" for d in jax.devices()],
        "processes": jax.process_count(),
        # of an operation that has all of them: what "auto" was
        "backend": resolve(config.precision.backend, "dot"),
        **self_test.record(),
    }
    if changed:
        record["changed"] = list(changed)
    if before := read_record(directory):
        record["earlier"] = [*before.pop("earlier", []), before]
    _write(directory / "config.toml", dump_toml(config))
    _write_record(directory, record)


def read_record(directory: Path) -> dict[str, Any]:
    """Read run.json; empty where there is none.

    Raises:
        UserError: it cannot be read.
    """
    path = directory / "run.json"
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not JSON ({error}); move it away") from error


def note(directory: Path, facts: Mapping[str, Any]) -> None:
    """Add facts to run.json: that a run is not exact though it was to be, or that it is finished.

    Raises:
        UserError: as `read_record`; or it cannot be written.
    """
    _write_record(directory, {**read_record(directory), **facts})


def _write_record(directory: Path, record: Mapping[str, Any]) -> None:
    _write(directory / "run.json", json.dumps(record, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    try:
        write_durably(path, text)
    except OSError as error:
        raise UserError(
            f"{path.parent}: the run's record cannot be written ({error.strerror}); free some "
            "space, or choose another output"
        ) from error


def _commit() -> str | None:
    here = Path(__file__).parent
    asked = subprocess.run(
        ["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or None
