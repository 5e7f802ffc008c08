"""Which benchmarks run on this machine, and the file that they leave."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from experiments.benchmarks import machine
from experiments.benchmarks.arguments import Arguments
from experiments.benchmarks.grpo import generation, grpo_step
from experiments.benchmarks.loop_overhead import loop_overhead
from experiments.benchmarks.peer import PeerSpec
from experiments.benchmarks.rounds import Plan
from experiments.benchmarks.trained_layer import Target, load_target, trained_layer
from experiments.benchmarks.uneven import uneven_generation
from experiments.benchmarks.workloads import CPU_WORKLOADS, GPU_WORKLOADS, Workload
from experiments.record import write
from fp8rl_jax.errors import UserError

Peers = dict[str, list[PeerSpec]]
"""Benchmark -> its peers."""
SCRIPTS = {
    "transformers": "transformers_generate.py",
    "vllm": "vllm_generate.py",
    "tunix": "tunix_grpo.py",
}
WANTED = {
    "generation": ("transformers", "vllm"),
    "uneven_generation": ("vllm",),
    "grpo_step": ("tunix",),
}
Job = tuple[str, Callable[[], dict[str, Any]]]
"""A benchmark on a workload: its label, and what runs it."""


def run(arguments: Arguments) -> None:
    """Run what `arguments` ask for on this machine's kind of device.

    Raises:
        UserError: a peer is missing or fails, or the file cannot be written.
    """
    if jax.default_backend() == "gpu":
        deadline = time.monotonic() + 60 * arguments.budget_minutes
        run_all(
            chosen(GPU_WORKLOADS, arguments),
            arguments,
            {},
            deadline,
            load_target(arguments.gpu_target),
        )
    else:
        workloads = chosen(CPU_WORKLOADS, arguments)
        run_all(
            workloads, arguments, choose_peers(arguments), target=load_target(arguments.gpu_target)
        )


def chosen(workloads: Sequence[Workload], arguments: Arguments) -> list[Workload]:
    """Those that `--workloads` names.

    Raises:
        UserError: a word is in no name.
    """
    for word in arguments.workloads:
        if not any(word in workload.name for workload in workloads):
            raise UserError(
                f"--workloads: {word!r} is in none of the names: "
                f"{', '.join(w.name for w in workloads)}"
            )
    return [
        w
        for w in workloads
        if not arguments.workloads or any(word in w.name for word in arguments.workloads)
    ]


def choose_peers(arguments: Arguments) -> Peers:
    """The peers of each benchmark.

    Raises:
        UserError: one that is required is not given, or its interpreter does not exist.
    """
    if arguments.peers == "none":
        return {}
    options = {
        "transformers": arguments.transformers_python,
        "vllm": arguments.vllm_python,
        "tunix": arguments.tunix_python,
    }
    chosen: Peers = {}
    for benchmark in arguments.benchmarks:
        for name in WANTED.get(benchmark, ()):
            option, python = f"--{name}-python", options[name]
            if not python and name != "vllm":
                raise UserError(
                    f"{option}: {benchmark} is compared with {name}; give its interpreter, or "
                    "--peers none"
                )
            if python and not os.access(python, os.X_OK):
                raise UserError(f"{option}: {python} is not there or cannot be run")
            if python:
                chosen.setdefault(benchmark, []).append(
                    PeerSpec(name, option, python, SCRIPTS[name])
                )
    return chosen


def run_all(
    workloads: Sequence[Workload],
    arguments: Arguments,
    peers: Peers,
    deadline: float | None = None,
    target: Target | None = None,
) -> None:
    """Run each benchmark on each workload, and write the file anew after each.

    Args:
        deadline: by time.monotonic(); benchmarks that would begin later are listed under "skipped".
        target: a GPU to compile for, too; see trained_layer.
    """
    path = Path(arguments.output)
    record = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "complete": False,
        **machine.facts(),
    }
    record |= {
        "rounds": arguments.rounds,
        "warmup": arguments.warmup,
        "benchmarks": [],
        "skipped": [],
    }
    write(path, record)
    for label, benchmark in _jobs(workloads, arguments, peers, target):
        if deadline is not None and time.monotonic() > deadline:
            record["skipped"].append(label)
            continue
        print(f"{label} ...", flush=True)
        began = time.monotonic()
        with machine.GpuMonitor() as monitor:
            entry = benchmark()
        entry["raw"]["wall_seconds"] = time.monotonic() - began
        record["benchmarks"].append(entry | ({"gpu": gpu} if (gpu := monitor.summary()) else {}))
        write(path, record)
        print_ratios(entry)
        gc.collect()  # device memory of the last benchmark, before the next one's
    write(path, record | {"complete": True})


def _jobs(
    workloads: Sequence[Workload], arguments: Arguments, peers: Peers, target: Target | None
) -> Iterator[Job]:
    plan, threads = Plan(arguments.rounds, arguments.warmup), arguments.threads
    for name in arguments.benchmarks:
        for workload in (w for w in workloads if w.recipes(name)):
            # peers load named models, and take their turns in those alone
            chosen, label = (
                peers.get(name, []) if workload.model else [],
                f"{name}, {workload.name}",
            )
            if name == "generation":
                yield label, lambda w=workload, p=chosen: generation(w, plan, p, threads)
            elif name == "uneven_generation":
                yield label, lambda w=workload, p=chosen: uneven_generation(w, plan, p, threads)
            elif name == "grpo_step":
                yield label, lambda w=workload, p=chosen: grpo_step(w, plan, p, threads)
            elif name == "trained_layer":
                yield label, lambda w=workload, t=target: trained_layer(w, plan, t)
            else:
                for recipe in workload.loop_recipes:
                    yield (
                        f"{label}, {recipe}",
                        lambda w=workload, r=recipe: loop_overhead(w, r, plan),
                    )


def print_ratios(entry: dict[str, Any]) -> None:
    """One line a ratio of seconds, and one line for all ratios of a part's bytes."""
    for ratio in entry["ratios"]:
        what = f"{ratio['over']} / {ratio['under']}, {ratio['part']}"
        print(f"  {what}: {ratio['median']:.3f} ({ratio['q1']:.3f}-{ratio['q3']:.3f})")
    lines: dict[str, list[str]] = {}
    for ratio in entry.get("byte_ratios", []):
        part, what = ratio["part"].split(", ")
        lines.setdefault(f"{ratio['over']} / {ratio['under']}, bytes of {part}", []).append(
            f"{what} {ratio['ratio']:.3f}"
        )
    for what, values in lines.items():
        print(f"  {what}: {', '.join(values)}")
