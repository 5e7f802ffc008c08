"""Does a run survive whatever befalls it? `python -m experiments.chaos`, or `make chaos`.

Kills runs of a tiny policy at random moments (SIGKILL): at the start, while programs are compiled,
in every phase of a step, before the first checkpoint and behind it; with the paged engine, which
carries completions over, with adapters, and in two processes, of which one is killed. A supervisor
starts the same command again, by the exit statuses alone. What the run leaves must be, bit for bit,
what a run leaves that nothing befell: rows, samples, evaluations, model, and the state of training
(parameters, optimizer, what is carried over).

Then 500 steps, whose memory must stay within 2 % of what it was after a warm-up.
"""

from __future__ import annotations

import random
import resource
import shutil
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.benchmarks.machine import facts
from experiments.chaos.supervised import Aim, Started, left, survive
from experiments.command import run_command
from experiments.record import write
from fp8rl_jax.errors import UserError

RUN = "experiments/chaos/run.toml"
ARMS: dict[str, tuple[int, tuple[str, ...]]] = {
    "plain": (1, ()),
    "paged": (
        1,
        (
            *("--recipe", "fp8-rl", "--rl.correction.method", "token_tis"),
            *("--rollout.engine", "paged", "--rollout.paged.extra-prompts", "2"),
            *("--rollout.paged.slots", "8", "--rollout.paged.page-size", "4"),
        ),
    ),
    "adapters": (1, ("--recipe", "fp8-rl", "--lora.rank", "4")),
    "two processes": (2, ("--mesh.data", "1", "--mesh.fsdp", "2")),
}
"""Processes and flags of each kind of run."""
PHASES = ("gen", "reward", "train", "ckpt", "log", "eval", "sync")
_STEPS, _WARM, _WINDOW = 500, 100, 50


@dataclass(frozen=True)
class Arguments:
    """Kills runs at random moments, and compares what they leave; then watches the memory."""

    output: str = "experiments/results/chaos.json"
    """File of the record."""
    kills: int = 30
    """Kills in all, at least one for each kind of run."""
    seed: int = 0
    """Fixes the moments: step, phase, seconds behind its begin, and which process."""
    directory: str = "runs/chaos"
    """Where the runs go; emptied first."""
    steps: int = _STEPS
    """Steps of the run whose memory is watched."""

    def problems(self) -> list[str]:
        """A line for each number that is too small."""
        faults = []
        if self.kills < len(ARMS):
            faults.append(f"--kills: {self.kills} must be at least {len(ARMS)}")
        if self.steps < _WARM + 2 * _WINDOW:
            faults.append(f"--steps: {self.steps} must be at least {_WARM + 2 * _WINDOW}")
        return faults


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 where a run did not survive."""
    return run_command("chaos", Arguments, run, argv)


def run(arguments: Arguments) -> None:
    """Kill, compare, watch; write the record and print.

    Raises:
        UserError: a run left something else, ended in another way, or grew.
    """
    place, path = Path(arguments.directory).absolute(), Path(arguments.output)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    began = time.monotonic()
    made = facts("experiments.chaos", sys.argv[1:])
    kills: list[dict[str, Any]] = []
    for number, arm in enumerate(ARMS):
        count = len(range(number, arguments.kills, len(ARMS)))
        kills += arm_kills(arm, place, count, arguments.seed)
    soak = watched(place, arguments.steps)
    record = {
        "made": made,
        "seed": arguments.seed,
        "kills": kills,
        "memory": soak,
        "seconds": round(time.monotonic() - began),
    }
    write(path, record)
    print(f"{len(kills)} kills survived; memory of {soak['steps']} steps {soak['growth']:+.2%}")
    if abs(soak["growth"]) > 0.02:
        raise UserError(f"the memory changed by {soak['growth']:+.2%} after its warm-up")


def arm_kills(arm: str, place: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """Kill a run of one kind `count` times.

    Raises:
        UserError: what it leaves is not what a run leaves that nothing befell.
    """
    processes, flags = ARMS[arm]
    name = arm.replace(" ", "-")

    def start(output: Path) -> Started:
        words = ["train", RUN, "--output", str(output), "--resume", *flags]
        return Started(words, output, processes)

    whole, output = place / f"{name}-whole", place / name
    reference = start(whole)
    if any(statuses := reference.wait()):
        raise UserError(f"{arm}: the run ended with {statuses}: {reference.said()[-3000:]}")
    aims = drawn(random.Random(f"{seed} {arm}"), reference, count)
    kills, _ = survive(lambda: start(output), output, aims)
    expected, found = left(whole), left(output)
    if different := [name for name, value in expected.items() if found[name] != value]:
        raise UserError(f"{arm}: {', '.join(different)} differ after {count} kills")
    for kill in kills:
        print(
            f"{arm}: process {kill['process']} in step {kill['step']} ({kill['phase']}), seen in "
            f"{kill['detected']} s, {kill['steps_lost']} steps done again",
            flush=True,
        )
    return [{"arm": arm, **kill} for kill in kills]


def drawn(draw: random.Random, reference: Started, count: int) -> list[Aim]:
    """Moments for `count` kills, in the order of their steps.

    The first is at the start, the second while programs are compiled, the third before the first
    checkpoint; then phases in turn.

    Args:
        reference: a run to the end, for how long each phase takes.
    """
    moves = reference.told[0].moves
    lengths: dict[str, list[float]] = defaultdict(list)
    for (begin, _, phase), (end, _, _) in zip(moves, moves[1:], strict=False):
        lengths[phase].append(end - begin)
    first = next(at for at, step, _ in moves if step >= 0)
    processes, last = len(reference.processes), moves[-1][1]
    # one that is killed before it has joined is waited for, and is to be started again alone
    start = Aim(0, "start", 0.0, 1) if processes > 1 else Aim(-1, "start", draw.uniform(0.2, first))
    aims = [
        start,
        Aim(0, "compile", draw.uniform(0, 0.05), draw.randrange(processes)),
    ]
    phases = draw.sample(PHASES, len(PHASES))
    # the last checkpoint is written in the last step, the last evaluation behind it
    steps = sorted(draw.randrange(3, last - 2) for _ in range(count - 3))
    for number, step in enumerate([1, *steps]):
        phase = phases[number % len(phases)]
        seconds = draw.uniform(0, statistics.median(lengths[phase]))
        aims.append(Aim(step, phase, seconds, draw.randrange(processes)))
    return aims[:count]


def watched(place: Path, steps: int) -> dict[str, Any]:
    """Resident memory of a run of many steps.

    It rises a little behind the warm-up, ever more slowly: blocks that were freed and that glibc
    keeps in its heap. What is in use stays (tests/faults/test_runs.py counts it).

    Returns:
        MiB of each tenth step; `before` and `after` are medians of 50 steps behind the warm-up and
        at the end.
    """
    output = place / "memory"
    flags = ["--trainer.steps", str(steps), "--evaluation.every", "50", "--checkpoint.every", "50"]
    started = Started(["train", RUN, "--output", str(output), *flags], output)
    of_step = resident(started, steps)
    if any(statuses := started.wait()):
        raise UserError(f"{steps} steps ended with {statuses}: {started.said()[-3000:]}")
    before = statistics.median(of_step[_WARM : _WARM + _WINDOW])
    after = statistics.median(of_step[-_WINDOW:])
    return {
        "steps": steps,
        "warm_up": _WARM,
        "mib": [round(x, 1) for x in of_step[::10]],
        "before": round(before, 1),
        "after": round(after, 1),
        "growth": round(after / before - 1, 5),
    }


def resident(started: Started, steps: int) -> list[float]:
    """MiB of the first process at the begin of each step."""
    path, found = Path(f"/proc/{started.processes[0].pid}/statm"), []
    for step in range(steps):
        started.until(lambda step=step: started.told[0].where[0] >= step)
        found.append(int(path.read_text().split()[1]) * resource.getpagesize() / 2**20)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
