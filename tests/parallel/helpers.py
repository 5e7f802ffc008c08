"""Runs a script on simulated devices or in several processes, and returns what it printed.

A script prints one JSON object as its last line. It runs in a process of its own because jax fixes
the number of CPU devices when it starts; let one script make several checks, since a start costs
seconds.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_on_devices(script: Path, devices: int, *args: str, timeout: float = 180) -> dict[str, Any]:
    """The JSON object that `script *args` printed, run on `devices` simulated CPU devices."""
    return _finish([_start(script, devices, args)], timeout)[0]


def run_processes(
    script: Path, processes: int, devices: int, *args: str, timeout: float = 180
) -> list[dict[str, Any]]:
    """The JSON objects of `processes` copies of `script`, each with `devices` simulated CPU devices
    of its own.

    Each copy gets the arguments `coordinator num_processes process_id *args`, for `MeshConfig`.
    """
    return _finish(_start_joined(script, processes, devices, args), timeout)


def endings(
    script: Path, processes: int, devices: int, *args: str, timeout: float = 180
) -> list[tuple[int | None, str]]:
    """Like `run_processes` for processes that may fail: of each the exit code, None for one that
    ran until time was up or all others had ended, and what it said on standard error."""
    started = _start_joined(script, processes, devices, args)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        running = [process for process, _, _ in started if process.poll() is None]
        if not running or all(_is_stopped(process) for process in running):
            break
        time.sleep(0.05)
    codes = [process.poll() for process, _, _ in started]
    said = []
    for process, out, err in started:
        process.kill()
        process.wait()
        err.seek(0)
        said.append(err.read())
        out.close(), err.close()
    return list(zip(codes, said, strict=True))


def _is_stopped(process: subprocess.Popen) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _start_joined(script: Path, processes: int, devices: int, args: tuple[str, ...]) -> list:
    coordinator = f"127.0.0.1:{free_port()}"
    return [
        _start(script, devices, (coordinator, str(processes), str(i), *args), seed=i)
        for i in range(processes)
    ]


def _start(script: Path, devices: int, args: tuple[str, ...], seed: int = 0):
    environ = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    environ |= {
        "JAX_PLATFORMS": "cpu",
        # compiling, not running, is what these scripts wait for; and devices that wait for each
        # other in a collective hold the threads that an operation split over threads would need
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} "
        "--xla_backend_optimization_level=0"
        " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
        "--xla_cpu_multi_thread_eigen=false"
        " --xla_cpu_collective_call_terminate_timeout_seconds=200",
        # and there are as many threads as cores, unless this says more
        "PJRT_NPROC": "16",
        # processes that walked a set of names in different orders would compile different programs
        "PYTHONHASHSEED": str(seed),
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "tests"), environ.get("PYTHONPATH", "")]
        ),
    }
    # files and not pipes: a full pipe would stop a process that the others wait for
    out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    command = [sys.executable, "-X", "faulthandler", str(script), *args]
    return (
        subprocess.Popen(command, env=environ, stdout=out, stderr=err, stdin=subprocess.DEVNULL),
        out,
        err,
    )


def _finish(started: list, timeout: float) -> list[dict[str, Any]]:
    """Waits for all; when one fails or time is up, kills the rest, which would wait for it, and
    shows their words."""
    deadline = time.monotonic() + timeout
    try:
        while time.monotonic() < deadline:
            codes = [process.poll() for process, _, _ in started]
            if any(codes) or None not in codes:
                break
            time.sleep(0.05)
        codes = [process.poll() for process, _, _ in started]
        if not any(codes):  # all wait: each says where, on its way out
            for process in (process for process, _, _ in started if process.poll() is None):
                process.send_signal(signal.SIGABRT)
            time.sleep(2)
    finally:
        for process, _, _ in started:
            process.kill()
            process.wait()
    texts = []
    for _, out, err in started:
        out.seek(0), err.seek(0)
        texts.append((out.read(), err.read()))
        out.close(), err.close()
    if any(code != 0 for code in codes):
        told = "\n".join(
            f"process {i}, exit {code}:\n{out[-1000:]}{err[-6000:]}"
            for i, (code, (out, err)) in enumerate(zip(codes, texts, strict=True))
        )
        raise AssertionError(f"a process failed, or {timeout} s passed (exit None)\n{told}")
    return [json.loads(out.splitlines()[-1]) for out, _ in texts]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
