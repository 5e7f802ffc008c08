"""What a measurement was made on: machine, versions, commit, command; and the GPU, through
nvidia-smi: what it is, and what its clocks and power were while something ran."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from experiments.benchmarks.rounds import spread

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
            "gpu": gpu(),
        },
    }


def limit_threads(threads: int) -> None:
    """Keep this process, and those that it starts, on `threads` processors.

    To be called before JAX makes its threads.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def _versions() -> dict[str, str]:
    """Of those packages that are installed; the repository itself need not be."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


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
        answer = subprocess.run(
            ["git", "-C", Path(__file__).parent, *words],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return ""
    return answer.stdout.strip()


GPU_FIELDS = (
    "name",
    "driver_version",
    "compute_cap",
    "memory.total",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "mig.mode.current",
)
GPU_STATE = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu")


def has_gpu() -> bool:
    """Whether JAX will find an NVIDIA GPU, asked without starting JAX."""
    return not os.environ.get("JAX_PLATFORMS", "").startswith("cpu") and bool(_query(("name",)))


def gpu() -> dict[str, str]:
    """What the first card is and may do; empty without one."""
    lines = _query(GPU_FIELDS)
    return dict(zip(GPU_FIELDS, _fields(lines[0]), strict=True)) if lines else {}


def gpu_state() -> dict[str, str]:
    """What its clocks, power and temperature are now; empty without one."""
    lines = _query(GPU_STATE)
    return dict(zip(GPU_STATE, _fields(lines[0]), strict=True)) if lines else {}


class GpuMonitor:
    """Reads `GPU_STATE` once a second while the context is open; does nothing where there is no
    card."""

    def __enter__(self) -> GpuMonitor:
        self._output = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                [*_command(GPU_STATE), "--loop-ms=1000"],
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                stdin=subprocess.DEVNULL,
            )
        except FileNotFoundError:
            self._process = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._output.seek(0)
        self._lines = self._output.read().decode(errors="replace").splitlines()
        self._output.close()

    def summary(self) -> dict[str, Any]:
        """Summarize each field: median, quartiles, least and largest of its samples.

        In nvidia-smi's units (MHz, W, C, %).
        """
        columns: dict[str, list[float]] = {field: [] for field in GPU_STATE}
        for line in self._lines:
            for field, text in zip(GPU_STATE, _fields(line), strict=False):
                if _is_number(text):
                    columns[field].append(float(text))
        return {
            field: {**spread(v), "least": min(v), "largest": max(v)}
            for field, v in columns.items()
            if v
        }


def _command(fields: tuple[str, ...]) -> list[str]:
    return [
        "nvidia-smi",
        "--id=0",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader,nounits",
    ]


def _query(fields: tuple[str, ...]) -> list[str]:
    try:
        answer = subprocess.run(
            _command(fields), capture_output=True, text=True, check=False, timeout=60
        )
    except FileNotFoundError:
        return []
    return answer.stdout.splitlines() if answer.returncode == 0 else []


def _fields(line: str) -> list[str]:
    return [field.strip() for field in line.split(",")]


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
