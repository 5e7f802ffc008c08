"""Is what several processes learn what one learns: `python -m experiments.processes`.

`fp8rl train` of the demo on 4 simulated devices, in one process, in two and in four that are joined
by hand (docs/hosts.md), with the same mesh. Only the order of sums is another then. Of all rows of
metrics.jsonl the largest relative difference to one process, and how many samples are the same
text. Programs are compiled without optimization, since nothing is timed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.depth import short
from experiments.record import write
from fp8rl_jax.errors import UserError

ROOT = Path(__file__).parents[1]
DEVICES = 4
PROCESSES = (1, 2, 4)
METRICS = ("reward/mean", "loss", "optim/grad_norm", "mismatch/k3", "eval/accuracy")
SHARDED = ("--mesh.data=1", "--mesh.fsdp=2", "--mesh.tensor=2")
CASES = {
    "static engine": ("--recipe=fp8-rl", *SHARDED),
    "paged engine": ("--recipe=jet-rl", *SHARDED, "--rollout.engine=paged"),
    "copies": ("--recipe=fp8-rl", "--mesh.data=4"),
    "adapters": ("--recipe=fp8-rl", *SHARDED, "--lora.rank=8", "--optimizer.learning-rate=1e-3"),
    "experts": ("--recipe=jet-rl", "--mesh.data=1", "--mesh.expert=2", "--mesh.tensor=2"),
}
"""Flags of `fp8rl train`."""
SMALL = (
    "--rollout.prompts-per-step=16",
    "--rollout.samples-per-prompt=4",
    "--trainer.steps=5",
    "--evaluation.every=5",
    "--evaluation.examples=64",
    "--evaluation.batch-size=64",
    "--checkpoint.every=0",
)
XLA_FLAGS = (
    "--xla_force_host_platform_device_count={} --xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    # devices that wait for each other hold the threads that an operation of several would need
    "--xla_cpu_multi_thread_eigen=false --xla_cpu_collective_call_terminate_timeout_seconds=600"
)


@dataclass(frozen=True)
class Arguments:
    """Train in one process and in several, and compare."""

    output: str = "experiments/results/processes.json"
    """The record; cases that it has are kept."""
    cases: tuple[str, ...] = tuple(CASES)
    """Of the list above."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        return [
            f"--cases: {name} unknown (known: {', '.join(CASES)})"
            for name in self.cases
            if name not in CASES
        ]


def train(words: list[str], processes: int) -> None:
    """Run `fp8rl` in so many processes, which share the devices.

    Raises:
        UserError: one of them failed; the end of what it said.
    """
    joined: list[list[str]] = [[]]
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = f"127.0.0.1:{free.getsockname()[1]}"
        peers = [f"--mesh.coordinator={place}", f"--mesh.num-processes={processes}"]
        joined = [[*peers, f"--mesh.process-id={number}"] for number in range(processes)]
    environ = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": XLA_FLAGS.format(DEVICES // processes),
        "PJRT_NPROC": "16",
    }
    # files and not pipes: a full pipe would stop a process that the others wait for
    said = [tempfile.TemporaryFile("w+") for _ in joined]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "fp8rl_jax.cli.main", *words, *own],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
        for own, file in zip(joined, said, strict=True)
    ]
    codes = [process.wait() for process in started]
    for code, file in zip(codes, said, strict=True):
        file.seek(0)
        text = file.read()
        file.close()
        if code:
            raise UserError(f"status {code} of: fp8rl {' '.join(words)}: {text[-2000:]}")


def rows(run: Path) -> list[dict[str, Any]]:
    """Those of its metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def difference(one: Path, other: Path) -> dict[str, Any]:
    """How far a run is from that of one process.

    Returns:
        "largest": by metric the largest relative difference over the rows; "samples": how many
        lines of samples.jsonl there are, and "alike" how many of them are the same.
    """
    pairs = [*zip(rows(one), rows(other), strict=True)]
    largest = {
        name: short(max(_apart(x[name], y[name]) for x, y in pairs if name in x or name in y))
        for name in METRICS
    }
    texts = [(run / "samples.jsonl").read_text().splitlines() for run in (one, other)]
    alike = sum(x == y for x, y in zip(*texts, strict=True))
    return {"largest": largest, "samples": len(texts[0]), "alike": alike}


def _apart(x: float, y: float) -> float:
    return abs(x - y) / max(abs(x), abs(y)) if x != y else 0.0


def compared(name: str, folder: Path) -> dict[str, Any]:
    """A case in one process and in several."""
    experts = ["--model.init.num-experts=8"] if name == "experts" else []
    start = folder / ("start-experts" if experts else "start")
    demo = "experiments/runs/demo.toml"
    if not start.exists():
        train(["sft", demo, f"--sft.output={start}", *experts], 1)
    for processes in PROCESSES:
        print(f"{name}: {processes} of {PROCESSES[-1]} processes", file=sys.stderr)
        words = ["train", demo, f"--output={folder / str(processes)}", *SMALL, *CASES[name]]
        train([*words, f"--model.path={start / 'model'}"], processes)
    one = folder / "1"
    found = {
        "flags": [*SMALL, *CASES[name]],
        "rows": len(rows(one)),
        "reward": [short(row["reward/mean"]) for row in rows(one) if "reward/mean" in row],
        "processes": {str(n): difference(one, folder / str(n)) for n in PROCESSES[1:]},
    }
    for processes in PROCESSES:
        (folder / str(processes)).rename(folder / f"{name} {processes}")
    return found


def run(arguments: Arguments) -> None:
    """Case by case; the record is written after each."""
    path = Path(arguments.output)
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.cases:
            if name not in record["cases"]:
                record["cases"][name] = compared(name, Path(folder))
                record["made"] = facts("experiments.processes")
                write(path, record)


if __name__ == "__main__":
    sys.exit(run_command("processes", Arguments, run, sys.argv[1:]))
