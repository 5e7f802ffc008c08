"""What README and docs print, run: `python -m experiments.documents`, or `make night`.

A page's program runs in full, as it stands. So do its commands, in a folder where all files lie
that the pages print, and where what a page leaves to its reader has a stand-in: RUN.toml is a run
of a tiny policy, DIR a model that one left. Training stops after two updates; what whole runs do is
in their records. `NOT_HERE` has what needs more than this machine, and where that is tried.

What came of a page, its first fault or that it ran, is recorded in experiments/results/night.json
under the SHA-256 of what it prints; a test fails where a page has a fault, or prints something else
than the record's.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.command import run_command
from experiments.notebooks import ROOT, write_verdicts
from fp8rl_jax.errors import UserError

RUN = """
[model.init]
hidden_size = 128
intermediate_size = 256
num_layers = 3
num_heads = 2
num_kv_heads = 1
head_dim = 64
[task]
train_size = 64
eval_size = 4
[rollout]
prompts_per_step = 64
samples_per_prompt = 2
max_new_tokens = 8
[trainer]
steps = 2
[evaluation]
every = 0
"""
STUDY = """
base = ["RUN.toml"]
seeds = 2
baseline = "bf16"
metric.margin = 0.5
settings.evaluation.every = 2
[arms.bf16]
recipe = "bf16"
[arms.fp8-rl]
recipe = "fp8-rl"
"""
STAND_INS = {
    "RUN.toml": RUN,
    "FILE.toml": STUDY,
    "books/one.txt": "In the beginning was a small text.\n" * 400,
    "tokens.jsonl": '{"tokens": [97, 98, 61, 98, 97]}\n',
}
"""Files of a page's reader."""
MODEL = "runs/demo/bf16/model"
"""DIR."""
MADE_BEFORE = (
    "train RUN.toml --recipe bf16 --output runs/demo/bf16",
    "train RUN.toml --recipe fp8-rl --output runs/demo/fp8-rl",
    "train RUN.toml --lora.rank 16 --output runs/mine",
    "sft experiments/runs/demo.toml --sft.steps 2",
)
"""Runs that pages have behind them."""
NOT_HERE = {
    r"^ablate experiments/ablations/": "hours: its record is committed",
    r"--mesh\.coordinator": "two hosts: tests/parallel and tests/training run two processes",
    r"vllm|VLLM": "another environment: make test-vllm",
    r"Qwen/|verifiers": "the hub: tests/tasks has a stand-in, and make test-verifiers the library",
    r"--slurm|--collect": "what --jobs has made: tests/ablation",
    r"clip-ratio-high": "it is refused, which tests/test_docs.py has word for word",
}
"""What is not run, by what it says, and where it is tried."""
TWO_UPDATES = {
    "train": ["--trainer.steps", "2"],
    "pretrain": ["--sft.steps", "2"],
    "sft": ["--sft.steps", "2"],
}
_NUMBERS = itertools.count()
"""Of outputs: none is used twice."""


@dataclass(frozen=True)
class Arguments:
    """What to run."""

    pages: tuple[str, ...] = ()
    """Pages, such as README.md or docs/gate.md; by default all."""
    timeout: int = 1800
    """Seconds that a command or the program may take."""


@dataclass(frozen=True)
class Page:
    """What a page prints."""

    files: dict[str, str] = field(default_factory=dict)
    """Blocks whose first line is `# NAME`."""
    program: str = ""
    """The other blocks of Python, one after the other."""
    commands: list[list[str]] = field(default_factory=list)
    """The words behind `fp8rl` of each line of a block."""

    @property
    def runs(self) -> bool:
        """Whether there is anything to run."""
        return bool(self.program) or any(not elsewhere(words) for words in self.commands)

    def fingerprint(self) -> str:
        """Compute the SHA-256 of it."""
        text = json.dumps([self.files, self.program, self.commands])
        return hashlib.sha256(text.encode()).hexdigest()


def read_page(path: Path) -> Page:
    """Read what a page prints."""
    text = path.read_text()
    files, program = {}, ""
    for kind, code in re.findall(r"^```(python|toml)\n(.*?)^```", text, re.M | re.S):
        name = re.match(r"# (\w+\.\w+)\n", code)
        if name:
            files[name[1]] = code[name.end() :]
        elif kind == "python":
            program += code
    lines = re.findall(r"^    (?:\S*/)?fp8rl (\w.*)$", text.replace("\\\n", " "), re.M)
    return Page(files, program, [shlex.split(line, comments=True) for line in lines])


def pages() -> dict[str, Page]:
    """Read README and docs, by their path in the repository."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): read_page(path) for path in paths}


def to_run() -> dict[str, Page]:
    """Give the pages that print something to run."""
    return {name: page for name, page in pages().items() if page.runs}


def elsewhere(words: Sequence[str]) -> str:
    """Say where a command is tried that is not run; empty where it is."""
    line = " ".join(words)
    return next((why for text, why in NOT_HERE.items() if re.search(text, line)), "")


def as_run(words: Sequence[str], number: int) -> list[str]:
    """A command with stand-ins, and with an output of its own where it names none."""
    kind = words[0]
    run = []
    for flag, word in zip(["", *words], words, strict=False):
        if word == "DIR" or word == "EXPORT":
            word = f"runs/out-{number}" if flag == "--output" else MODEL
        if word == "RUN.toml" and kind == "pretrain":
            word = "experiments/runs/pretraining.toml"
        run.append("train.jsonl" if word == "FILE" else word)
    own = "RUN.toml" in words and "--output" not in words
    if own and kind in ("train", "pretrain"):
        run += ["--output", f"runs/out-{number}"]
    return run + (TWO_UPDATES.get(kind, []) if len(words) > 1 else [])


def furnish(folder: Path) -> None:
    """Lay down what the pages print, and what they leave to their reader."""
    (folder / "experiments").symlink_to(ROOT / "experiments")
    files = {name: text for page in pages().values() for name, text in page.files.items()}
    rows = re.search(r"```json\n(.*?)```", (ROOT / "docs/guides/data.md").read_text(), re.S)
    assert rows
    for name, text in (STAND_INS | files | {"train.jsonl": rows[1]}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def faults(folder: Path, page: Page, timeout: int) -> Iterator[str]:
    """Run a page; yield a line for each thing that failed."""
    if page.program:
        (folder / "program.py").write_text(page.program)
        yield from _fault("its program", ["program.py"], folder, timeout)
    for words in page.commands:
        if not elsewhere(words):
            command = ["-m", "fp8rl_jax.cli.main", *as_run(words, next(_NUMBERS))]
            yield from _fault(f"fp8rl {shlex.join(words)}", command, folder, timeout)


def _fault(name: str, words: Sequence[str], folder: Path, timeout: int) -> Iterator[str]:
    print(f"  {name}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield f"{name}: not done after {timeout} s"
        return
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        yield f"{name}: status {done.returncode}: {said}"


def main(arguments: Arguments) -> None:
    """Run pages one after the other, and record each."""
    known = to_run()
    fingerprints = {name: page.fingerprint() for name, page in known.items()}
    if unknown := [name for name in arguments.pages if name not in known]:
        raise UserError(f"pages: {', '.join(unknown)}: none of {', '.join(known)}")
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), *path]))
        furnish(folder)
        for line in MADE_BEFORE:
            if lines := [*_fault(line, ["-m", "fp8rl_jax.cli.main", *line.split()], folder, 600)]:
                raise UserError(lines[0])
        for name in arguments.pages or known:
            lines = [*faults(folder, known[name], arguments.timeout)]
            print("\n".join([f"{name}: {'failed' if lines else 'ran'}", *lines]), flush=True)
            failed += [name] * bool(lines)
            write_verdicts("pages", {name: lines[0] if lines else "ran"}, fingerprints)
    if failed:
        raise UserError(f"did not run: {', '.join(failed)}")


if __name__ == "__main__":
    sys.exit(run_command("documents", Arguments, main, sys.argv[1:]))
