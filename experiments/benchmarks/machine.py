"""What a measurement was made on: machine, versions, commit, command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.benchmarks import gpu

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "ml-dtypes", "fp8rl_jax")


def facts() -> dict[str, Any]:
    """Everything that identifies the place and the program; no path of the machine is in it."""
    import jax

    return {
        "command": ["python", "-m", "experiments.benchmarks", *map(_shortened, sys.argv[1:])],
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "machine": {
            "processor": _processor(),
            "threads": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": platform.platform(),
            "load_average": os.getloadavg(),
            "devices": [f"{device.platform}: {device.device_kind}" for device in jax.devices()],
            "gpu": gpu.card(),
        },
    }


def limit_threads(threads: int) -> None:
    """Keeps this process, and those that it starts, on `threads` processors; to be called before JAX makes its threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def _shortened(word: str) -> str:
    """Results are published; where a machine keeps its files is not part of them."""
    return f".../{Path(word).name}" if word.startswith("/") else word


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def _git(*words: str) -> str:
    asked = subprocess.run(["git", "-C", Path(__file__).parent, *words], capture_output=True, text=True, check=False)
    return asked.stdout.strip()
