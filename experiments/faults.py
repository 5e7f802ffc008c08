"""What is injected, and what came of it: `python -m experiments.faults`.

Runs the tests that inject faults. Each tells what it saw by the fixture `fault` of
tests/conftest.py: what was said, the exit status, how soon, and what was lost. That is the record,
and docs/faults.md is its table.
"""

from __future__ import annotations

import ast
import contextlib
import getpass
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.benchmarks.machine import facts
from experiments.chaos.supervised import QUICK
from experiments.command import run_command
from experiments.record import write
from fp8rl_jax.durable import write_durably
from fp8rl_jax.errors import UserError

ROOT = Path(__file__).parents[1]
TOLD = "FP8RL_FAULTS"
"""The variable that names the file to which tests add a line a fault."""
ROWS = {
    "F1": "Killed",
    "F2": "Asked to stop",
    "F3": "Disk and checkpoint",
    "F4": "Resumed otherwise",
    "F5": "Rewards that give no number",
    "F6": "Rewards that hang, multiply or end",
    "F7": "Rewards that attack",
    "F8": "A rollout worker ends or hangs",
    "F9": "Numbers that are not finite",
    "F10": "What is served is not what was synced",
    "F11": "Damaged weights",
    "F12": "Wrong settings",
    "F13": "Problems that cannot be used",
    "F14": "Out of memory",
    "F15": "Several processes",
    "F16": "One folder, two runs; trackers",
    "F17": "Rollout and trainer disagree",
    "F18": "Memory of a long run",
}
FAULTS = {
    "killed early": ("F1", "SIGKILL before the first checkpoint"),
    "killed": ("F1", "SIGKILL at a random moment behind the first checkpoint"),
    "signal": ("F2", "SIGTERM, SIGINT or SIGHUP"),
    "signal again": ("F2", "a second signal, such as Ctrl-C twice"),
    "grace over": ("F2", "SIGTERM, and no checkpoint within `checkpoint.grace_seconds`"),
    "signal to one": ("F2", "SIGTERM to one of two processes"),
    "signal to both": ("F2", "SIGTERM to both of two processes"),
    "cut checkpoint": ("F3", "files of the newest checkpoint cut in half"),
    "flipped bit": ("F3", "one bit of a checkpoint flipped"),
    "full disk": ("F3", "no room for a checkpoint when the run starts"),
    "disk fills up": ("F3", "the disk fills up in a step"),
    "unwritable": ("F3", "a folder that cannot be written"),
    "power": ("F3", "power goes while a record is replaced"),
    "changed": ("F4", "another learning rate, seed, recipe, model, data, schedule"),
    "finished": ("F4", "`--resume` of a finished run"),
    "no number": ("F5", "raises; gives None, NaN, inf, 1e30, text"),
    "all fail": ("F5", "every reward of three steps fails"),
    "hangs": ("F6", "sleeps, ignores SIGTERM, forks, takes 50 GB, ends its process"),
    "hangs always": ("F6", "hangs at every sample from the first on"),
    "tree": ("F6", "4 processes of 300 MiB where the limit of all is 600 MiB"),
    "attack": ("F7", "writes, deletes, signals, connects under `strict`"),
    "server": ("F8", "vLLM's server (a replay of one) ends or hangs in a batch"),
    "blow-up": ("F9", "a learning rate of 1e30: three updates in a row are not finite"),
    "served bit": ("F10", "one bit of served weights or KV scales flipped"),
    "cut sync": ("F10", "a sync that is interrupted"),
    "safetensors": ("F11", "cut, overlapping, doubled, mistyped, huge headers of safetensors"),
    "settings": ("F12", "unknown keys, wrong types, numbers that do not fit each other"),
    "source": ("F13", "empty, too few, malformed rows"),
    "equal rewards": ("F13", "every reward of a run is the same"),
    "too large": ("F14", "a run that the device has no memory for"),
    "exhausted": ("F14", "an update, and a rollout, that ask for more than there is"),
    "peer killed": ("F15", "SIGKILL to a process that others wait for"),
    "peer stops": ("F15", "SIGSTOP to a process, or it hangs (bounds set to 3 and 4 s)"),
    "peer breaks": ("F15", "a process ends by an error of its own"),
    "missing": ("F15", "a process that never comes, then Ctrl-C"),
    "port": ("F15", "the coordinator's port is in use"),
    "two runs": ("F16", "a second run in the folder of the first"),
    "tracker": ("F16", "a tracker without its network"),
    "perturbed": ("F17", "the rollout's weights are the trainer's with 5 % noise"),
    "memory": ("F18", "60 steps: what Python and JAX hold, per step"),
}
"""Each fault that is injected: its row, and what it is."""
_HEAD = """# Faults, and what comes of them

Written by `python -m experiments.faults`, from `experiments/results/faults.json`: each line is what
the test beside it injected and saw. A time is the longest of so many injections, on a machine with
other work to do, and none is a bound: the bounds are in the tests. *Seen in*: from the fault to the
line, or to the end of the process. *Recovered in*: from the start of the same command until it was
where it had been, all compiling in it; where nothing has to be started again, until the batch was
whole. *Exit*: the status of the process, or 2 for what the command line prints as an error. Long
ones (30 kills, 500 steps of memory) are `make chaos`: `experiments/results/chaos.json`.

No line is of a GPU: what a card alone can do (an error of its memory, NCCL) was not injected.

| | fault | times | exit | seen in | recovered in | lost | says | test |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Arguments:
    """Injects every fault, and writes the record and its table."""

    output: str = "experiments/results/faults.json"
    """File of the record."""
    page: str = "docs/faults.md"
    """File of the table."""
    render: bool = False
    """Write the table of the record as it stands, and inject nothing."""


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 where a test failed or something was wrong in the words."""
    return run_command("faults", Arguments, run, argv)


def run(arguments: Arguments) -> None:
    """Inject, write, and say where.

    Raises:
        UserError: a place cannot be written, a record is none, a test failed, or one told nothing.
    """
    output, page_path = Path(arguments.output), Path(arguments.page)
    for flag, path in (("--output", output), ("--page", page_path)):
        if path.is_dir() or not path.parent.is_dir():
            why = "is a folder" if path.is_dir() else "is in a folder that does not exist"
            raise UserError(f"{flag}: {path} {why}")
    if not arguments.render:
        record = injected()
        write(output, record)
    write_durably(page_path, page(read(output)))
    print(f"{page_path}: {len(FAULTS)} faults")


def injected() -> dict[str, Any]:
    """Run the tests; gives the record."""
    began = time.monotonic()
    made = facts("experiments.faults", sys.argv[1:])
    known = tests()
    if untested := FAULTS.keys() - known.keys():
        raise UserError(f"no test injects {', '.join(sorted(untested))}")
    nodes = sorted({node for found in known.values() for node in found})
    with tempfile.TemporaryDirectory() as place:
        told, base = Path(place, "told"), Path(place, "base")
        command = [sys.executable, "-m", "pytest", "-q", f"--basetemp={base}", *nodes]
        environ = os.environ | {TOLD: str(told), "XLA_FLAGS": QUICK}
        if subprocess.run(command, cwd=ROOT, env=environ).returncode:
            raise UserError("a test failed, as printed above; nothing was written")
        lines = [json.loads(line) for line in told.read_text().splitlines()]
        for line in lines:
            line["said"] = cleaned(line["said"], base)
    if silent := FAULTS.keys() - {line["fault"] for line in lines}:
        raise UserError(f"nothing was told of {', '.join(sorted(silent))}: tests were skipped")
    return {"made": made, "injected": lines, "seconds": round(time.monotonic() - began)}


def tests() -> dict[str, list[str]]:
    """The tests that inject each fault, as pytest names them.

    Read from `fault("NAME", ...)`, or `fault("NAME" if ... else "OTHER", ...)`.
    """
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for test in ast.parse(path.read_text()).body:
            if not isinstance(test, ast.FunctionDef):
                continue
            node = f"{path.relative_to(ROOT).as_posix()}::{test.name}"
            for call in ast.walk(test):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "fault":
                    which = call.args[0]
                    either = [which.body, which.orelse] if isinstance(which, ast.IfExp) else [which]
                    for name in either:
                        found.setdefault(ast.literal_eval(name), []).append(node)
    return found


def cleaned(text: str, base: Path) -> str:
    """One line that names no place, user or process of this machine."""
    text = re.sub(rf"{re.escape(str(base))}/[^/\s]+/", "", text).replace(f"{ROOT}/", "")
    text = text.replace(f"{getpass.getuser()}@{socket.gethostname()}", "USER@HOST")
    text = re.sub(r"process \d{3,}, since [^)]*\)", "process N, since ...)", text)
    text = re.sub(r"(127\.0\.0\.1):\d+", r"\1", text)
    return " ".join(text.split())


def read(path: Path) -> dict[str, Any]:
    """A record.

    Raises:
        UserError: there is none, or not one of these faults.
    """
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--output: {path} is no record ({error})") from None
    names: set[str] = set()
    with contextlib.suppress(TypeError, KeyError):
        names = {line["fault"] for line in record["injected"]}
    if names != FAULTS.keys():
        others = ", ".join(sorted(names ^ FAULTS.keys()))
        raise UserError(f"--output: {path} is of other faults ({others}); inject them again")
    return record


def page(record: dict[str, Any]) -> str:
    """The table of a record."""
    lines = []
    for row, title in ROWS.items():
        lines.append(f"| **{row}** | **{title}** | | | | | | | |")
        for name, (of_row, what) in FAULTS.items():
            if of_row == row:
                told = [line for line in record["injected"] if line["fault"] == name]
                lines.append(f"| | {what} | {_cells(told)} |")
    made = record["made"]
    machine = made["machine"]
    foot = (
        f"\n{machine['processor']}, {machine['threads']} threads, load "
        f"{machine['load_average'][0]:.1f} at the start; commit {made['commit'][:10]}; "
        f"{len(record['injected'])} injections in {record['seconds']} s.\n"
    )
    return _HEAD + "\n".join(lines) + "\n" + foot


def _cells(told: list[dict[str, Any]]) -> str:
    exits = sorted({line["status"] for line in told if line["status"] is not None})
    lost = list(dict.fromkeys(line["lost"] for line in told if isinstance(line["lost"], str)))
    if steps := [line["lost"] for line in told if isinstance(line["lost"], int)]:
        lost.append(f"steps done again: {max(steps)}" if max(steps) else "nothing")
    said = next((line["said"] for line in told if line["said"]), "").replace("|", "\\|")
    cells = [
        str(len(told)),
        ", ".join(map(str, exits)) or "goes on",
        _longest(told, "detected"),
        _longest(told, "recovered"),
        "; ".join(dict.fromkeys(lost)),
        f"`` {said} ``" if said else "",
        "<br>".join(dict.fromkeys(f"`{line['test']}`" for line in told)),
    ]
    return " | ".join(cells)


def _longest(told: list[dict[str, Any]], name: str) -> str:
    seconds = [line[name] for line in told if line[name] is not None]
    if not seconds:
        return ""
    return f"{max(seconds):.2f} s" if max(seconds) >= 0.01 else "< 0.01 s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
