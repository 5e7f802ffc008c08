"""What a measurement was made on: machine, versions, commit, command."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from experiments.benchmarks import card

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "flax",
    "optax",
    "numpy",
    "ml-dtypes",
    "fp8rl_jax",
)


def facts(
    module: str = "experiments.benchmarks", words: Sequence[str] | None = None
) -> dict[str, Any]:
    """Everything that identifies the place and the program; no path of the machine is in it.

    Args:
        module, words: what `python -m` ran, and with which arguments; default: this process's own.
    """
    import jax

    return {
        "command": [
            "python",
            "-m",
            module,
            *map(_shortened, sys.argv[1:] if words is None else words),
        ],
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {
            "processor": _processor(),
            "threads": len(os.sched_getaffinity(0)),
            "memory_gib": round(
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
            ),
            "system": platform.platform(),
            "load_average": os.getloadavg(),
            "devices": [f"{device.platform}: {device.device_kind}" for device in jax.devices()],
            "gpu": card.about(),
        },
    }


def limit_threads(threads: int) -> None:
    """Keeps this process, and those that it starts, on `threads` processors; to be called before
    JAX makes its threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def _versions() -> dict[str, str]:
    """Of those packages that are installed; the repository itself need not be."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _shortened(word: str) -> str:
    """Results are published; where a machine keeps its files is not part of them."""
    return f".../{Path(word).name}" if word.startswith("/") else word


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def _git(*words: str) -> str:
    """What git says; empty where there is no git, or no repository."""
    try:
        asked = subprocess.run(
            ["git", "-C", Path(__file__).parent, *words],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return ""
    return asked.stdout.strip()
