"""The card, through nvidia-smi: what it is, and what its clocks and power were while something
ran."""

from __future__ import annotations

import os
import subprocess
import tempfile
from typing import Any

from experiments.benchmarks.stats import spread

CARD = (
    "name",
    "driver_version",
    "compute_cap",
    "memory.total",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "mig.mode.current",
)
STATE = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu")


def present() -> bool:
    """Whether JAX will find an NVIDIA GPU, asked without starting JAX."""
    return not os.environ.get("JAX_PLATFORMS", "").startswith("cpu") and bool(_query(("name",)))


def about() -> dict[str, str]:
    """What the first card is and may do; empty without one."""
    lines = _query(CARD)
    return dict(zip(CARD, _fields(lines[0]), strict=True)) if lines else {}


def state() -> dict[str, str]:
    """What its clocks, power and temperature are now; empty without one."""
    lines = _query(STATE)
    return dict(zip(STATE, _fields(lines[0]), strict=True)) if lines else {}


class Monitor:
    """Reads `STATE` once a second while the context is open; does nothing where there is no
    card."""

    def __enter__(self) -> Monitor:
        self._output = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                [*_command(STATE), "--loop-ms=1000"],
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
        """Field -> median, quartiles, least and largest of its samples, in nvidia-smi's units (MHz,
        W, C, %)."""
        columns: dict[str, list[float]] = {field: [] for field in STATE}
        for line in self._lines:
            for field, text in zip(STATE, _fields(line), strict=False):
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
        asked = subprocess.run(
            _command(fields), capture_output=True, text=True, check=False, timeout=60
        )
    except FileNotFoundError:
        return []
    return asked.stdout.splitlines() if asked.returncode == 0 else []


def _fields(line: str) -> list[str]:
    return [field.strip() for field in line.split(",")]


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
