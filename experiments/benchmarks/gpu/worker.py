"""One part, in this process: `python -m experiments.benchmarks.gpu.worker PART FILE SECONDS`, as the command starts it.

The file says before each job which one runs, so whoever has to end this process knows what to blame.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks import card, machine
from experiments.benchmarks.files import write
from experiments.benchmarks.gpu.compare import reason_of
from experiments.benchmarks.gpu.parts import PARTS, Part
from experiments.benchmarks.gpu.record import begin
from experiments.benchmarks.gpu.setting import Setting
from experiments.benchmarks.gpu.timing import METHOD
from fp8rl_jax.errors import UserError
from pallas_kernels.target import hopper_sms

FAULT, FAULT_MARK = 2, "fault: "
"""Exit code of a fault in what was given, and how its line begins: libraries write to standard error, too."""
UNUSABLE = 3
"""Exit code: the device answers no more; the job that broke it is recorded as failed, and a new process may go on."""


def run_part(part: Part, path: Path, setting: Setting, seconds: float, words: list[str] | None = None) -> int:
    """Runs the jobs that the file does not have yet, until they are done or `seconds` have passed.

    Returns:
        0, or UNUSABLE.

    Raises:
        UserError: no Hopper GPU, or a file that was not measured here.
    """
    if not setting.tiny and hopper_sms() is None:
        raise UserError(f"no Hopper GPU: JAX runs on {jax.devices()[0].device_kind!r}; its CUDA plugin or its driver is missing")
    deadline = time.monotonic() + seconds
    device = jax.devices()[0].device_kind
    facts = machine.facts("experiments.benchmarks.gpu", words)
    record = begin(path, part.name, device, setting.tiny, METHOD, facts)
    own = record["processes"][-1]
    own["card_before"] = card.state()
    with ExitStack() as stack:
        monitor = stack.enter_context(card.Monitor())
        jobs = part.jobs(setting, stack)
        done = record["results"].keys() | record["failed"].keys()
        left = [(label, job) for label, job in jobs if label not in done]
        for number, (label, job) in enumerate(left):
            record["skipped"] = [label for label, _ in left[number:]]
            if time.monotonic() > deadline:
                break
            record["running"] = label
            write(path, record)
            print(f"{part.name}: {label} ...", flush=True)
            _run(record, label, job, len(record["processes"]) - 1)
            gc.collect()  # device memory of this job, before the next one's
            record["running"], record["skipped"] = None, record["skipped"][1:]
            write(path, record)
            if not _usable():
                return UNUSABLE
    own["card_after"], own["card_during"] = card.state(), monitor.summary()
    record["complete"] = not record["skipped"]
    write(path, record)
    return 0


def _run(record: dict[str, Any], label: str, job: Callable[[], dict[str, Any]], process: int) -> None:
    """Runs one job, and records its result or why there is none."""
    start = time.monotonic()
    try:
        record["results"][label] = job() | {"process": process, "wall_seconds": time.monotonic() - start}
    except Exception as error:  # whatever a kernel, a compiler or a peer objects to is the result
        record["failed"][label] = reason_of(error)
        print(f"  failed: {record['failed'][label]}", flush=True)


def _usable() -> bool:
    """Whether the device still computes: after an illegal access it does not, for as long as the process lives."""
    try:
        return int(jax.block_until_ready(jnp.arange(8, dtype=jnp.int32) + 1).sum()) == 36
    except Exception:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.gpu.worker", description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("file", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--torch-python", default="python3")
    parser.add_argument("--words", type=json.loads, default=[], help="of the command that started this, for the record")
    arguments = parser.parse_args()
    setting = Setting(arguments.tiny, arguments.torch_python, arguments.profile)
    try:
        return run_part(PARTS[arguments.part], arguments.file, setting, arguments.seconds, arguments.words)
    except UserError as error:
        print(f"{FAULT_MARK}{error}", file=sys.stderr)
        return FAULT


if __name__ == "__main__":
    sys.exit(main())
