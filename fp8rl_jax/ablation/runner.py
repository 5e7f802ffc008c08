"""The queue of an ablation: every run a process as `fp8rl train` is one, several at a time, gone on
with after a kill at any moment.

A run is finished when its last row and its model are there, and then it never runs again. One that
was cut off goes on from its last checkpoint; one that failed says why, keeps nobody else from
running, and is tried again the next time.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import json
import logging
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fp8rl_jax.ablation.behaviour import differences, fingerprint, sources
from fp8rl_jax.ablation.design import Arm, Design, literal, read_design
from fp8rl_jax.ablation.preflight import Preflight, last_line, model_of_shape, preflight
from fp8rl_jax.ablation.record import (
    has_model,
    make_record,
    note,
    read_comparison,
    read_rows,
    run_state,
    shared_settings,
    write_json,
)
from fp8rl_jax.caching import program_dir
from fp8rl_jax.config.files import dump_toml
from fp8rl_jax.config.fingerprint import changes
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.settings import with_settings
from fp8rl_jax.durable import locked
from fp8rl_jax.errors import UserError
from fp8rl_jax.report.ablation import text, write_page
from fp8rl_jax.statistics import Comparison
from fp8rl_jax.tasks.python_objects import PythonReward
from fp8rl_jax.tasks.sandbox.pickling import pack
from fp8rl_jax.training.loop import ROWS
from fp8rl_jax.training.source import checkpoint_steps

_log = logging.getLogger("fp8rl")
_FP8RL = (sys.executable, "-m", "fp8rl_jax.cli.main")
_PROCESS = (sys.executable, "-m", "fp8rl_jax.ablation.process")
_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec little is allowed
_POLL_SECONDS = 0.5
_PAGE_SECONDS = 60.0
_LINE_SECONDS = 60.0
"""Between lines about runs at work, where there is no terminal to draw a table on."""
_GRACE_SECONDS = 10.0
"""Between the signal that asks a process to end and the one that makes it."""


@dataclass(frozen=True)
class Ablation:
    """An ablation's results: its directory, record and page."""

    directory: Path

    @property
    def record(self) -> dict[str, Any]:
        """ablation.json."""
        return json.loads((self.directory / "ablation.json").read_text(encoding="utf-8"))

    @property
    def comparisons(self) -> dict[str, Comparison]:
        """Each arm but the baseline, compared with it; empty before the first look."""
        return {row["arm"]: read_comparison(row) for row in self.record["comparisons"]}

    @property
    def page(self) -> Path:
        """The HTML page."""
        return self.directory / "ablation.html"

    def table(self) -> str:
        """Write verdicts, arms and runs that failed as text, as the page has them."""
        return text(self.directory / "ablation.json")


def ablate(
    source: str | Path | Mapping[str, Any],
    *,
    jobs: int = 1,
    output: str = "",
    reward: PythonReward | None = None,
    dataset: Sequence[Any] | None = None,
    eval_dataset: Sequence[Any] | None = None,
    environment: type | None = None,
    report: Callable[[str], None] = print,
) -> Ablation:
    """Run what is missing of an ablation, and compare its arms, as `fp8rl ablate` does.

    Args:
        source: the TOML file, or its contents as a dictionary (docs/ablation.md).
        jobs: runs at one time.
        output: directory in place of the file's.
        reward: function, or {name: function}, of all arms, in place of what task.reward names; it
            may live in a notebook's cell, as `fp8rl.train` takes it.
        dataset: problems of all arms, as a list, in place of those that task names.
        eval_dataset: held-out problems of all arms, as a list.
        environment: class of all arms, for episodes of several turns.
        report: receives lines about runs that begin and end.

    Returns:
        The ablation; its runs that failed are in the table with the reason.

    Raises:
        UserError: a line for each fault of the design; or it has changed since its runs began.
    """
    design = read_design(
        source,
        output,
        reward=reward,
        dataset=dataset,
        eval_dataset=eval_dataset,
        environment=environment,
    )
    return Runner(design, jobs, report).run()


@dataclass
class Job:
    """A process that is still to run: a run, or a warm start."""

    name: str
    command: str
    """"train", "pretrain" or "sft"."""
    config: RunConfig
    needs: str = ""
    """Name of the warm start that must be there first."""
    arm: Arm | None = None
    seed: int = 0

    @property
    def steps(self) -> int:
        """Steps of the whole job."""
        train = self.command == "train"
        return self.config.trainer.steps if train else self.config.sft.steps


@dataclass
class Working:
    """A process that runs a job."""

    job: Job
    process: subprocess.Popen
    slot: int
    began: float
    stack: contextlib.ExitStack
    first: tuple[int, float] | None = None
    """(step, time) of the first row that was seen."""
    row: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Steps that its rows tell of."""
        return min(self.row.get("step", -1) + 1, self.job.steps)

    @property
    def left(self) -> float:
        """Seconds that its steps still take, by the pace since the first row; 0: not known."""
        if self.first is None or self.row["step"] <= self.first[0]:
            return 0.0
        pace = (time.monotonic() - self.first[1]) / (self.row["step"] - self.first[0])
        return max(self.job.steps - self.row["step"], 0) * pace

    @property
    def expected(self) -> float:
        """Seconds of the whole run, by its steps so far; 0: not known, or a warm start."""
        return self.left and time.monotonic() - self.began + self.left if self.job.arm else 0.0


class Runner:
    """An ablation in progress.

    Args:
        design: what to run.
        jobs: processes at one time.
        report: receives lines.
    """

    def __init__(self, design: Design, jobs: int = 1, report: Callable[[str], None] = print):
        if jobs < 1:
            raise UserError(f"jobs: {jobs} must be at least 1")
        self.design, self.jobs, self.report = design, jobs, report
        self.logs, self._objects = design.directory / "logs", design.directory / "objects.pickle"
        self.resolved: dict[str, dict[str, Any]] = {}
        noted = (self._noted(arm, seed) for arm, seed in self._pairs())
        self._seconds = [seconds for seconds in noted if seconds is not None]
        self._devices, self._drawn = _devices(), time.monotonic()

    def check(self) -> dict[str, Preflight]:
        """Check the arms on the devices; nothing is written.

        Raises:
            UserError: an arm cannot work, or the design is another than that of its runs.
        """
        self._stored()
        return preflight(self.design)

    def prepare(self) -> None:
        """Write what all runs go by: the fingerprints, and each run's configuration.

        Settings that are `auto` are resolved the first time, and kept.

        Raises:
            UserError: as `check`.
        """
        design, stored = self.design, self._stored()
        if stored:
            self._raise_seeds(stored)
            self.resolved = stored["resolved"]
        else:
            self.resolved = {name: each.resolved for name, each in preflight(design).items()}
            objects = pack(design.objects)
            stored = {
                "fingerprint": design.fingerprint(),
                "resolved": self.resolved,
                "sources": sources(),  # of no later code than what is measured
                "behaviour": self._behaviour(),
            }
            try:
                (design.directory / "configs").mkdir(parents=True, exist_ok=True)
                if objects:
                    self._objects.write_bytes(objects)
                write_json(design.directory / "design.json", stored)
            except OSError as error:
                raise self._unwritable(error) from error
        for job in self._jobs(design.seeds, everything=True):
            path = self._config_path(job)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text() != dump_toml(job.config):
                path.write_text(dump_toml(job.config))

    @contextlib.contextmanager
    def _lock(self, name: str, wait: bool = False) -> Generator[int | None]:
        """`locked` of one of this ablation's locks."""
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context(locked(self.logs / f"{name}.lock", wait))
            except OSError as error:
                raise self._unwritable(error) from error
            yield lock

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"{self.design.directory}: cannot be written ({error.strerror}); choose another output"
        )

    def run(self) -> Ablation:
        """Run what is missing, look by look, and write the record and the page after each run.

        Raises:
            UserError: as `prepare`; or another process runs this ablation; or the code behaves
                otherwise than when its runs began.
            KeyboardInterrupt: after its processes have ended; the next call goes on.
        """
        design = self.design
        with self._lock("ablation") as lock:
            if lock is None:
                raise UserError(f"{design.directory}: another process runs this ablation")
            self.prepare()
            try:
                for look in range(1, design.file.looks + 1):
                    self._work(self._jobs(design.seeds[: design.seeds_at(look)]))
                    record = self.write()
                    verdicts = [row["verdict"] for row in record["comparisons"]]
                    if look < design.file.looks and verdicts and "can't tell" not in verdicts:
                        self.report(
                            f"look {look} of {design.file.looks} tells; the other seeds are not run"
                        )
                        break
            except KeyboardInterrupt:
                self.write()
                self.report(f"stopped; go on with: fp8rl ablate {design.source}")
                raise
        return Ablation(design.directory)

    def collect(self) -> Ablation:
        """Write the record and the page of what is there, and run nothing.

        Raises:
            UserError: the design has changed since its runs began, or none has.
        """
        stored = self._stored()
        if not stored:
            raise UserError(f"{self.design.directory}: no run of this ablation is there yet")
        self._raise_seeds(stored)
        self.resolved = stored["resolved"]
        self.write()
        return Ablation(self.design.directory)

    def run_one(self, name: str) -> None:
        """Run one run or warm start, for an element of a job array; no record is written.

        Raises:
            UserError: no run has this name; its warm start is missing; or it failed.
        """
        jobs = {job.name: job for job in self._jobs(self.design.seeds, everything=True)}
        if name not in jobs:
            raise UserError(f"--run: {name!r} is none of {', '.join(jobs)}")
        with self._lock("prepare", wait=True):
            self.prepare()
        job = next((job for job in self._jobs(self.design.seeds) if job.name == name), None)
        if job is None:
            self.report(f"{name}: finished already")
            return
        if job.needs and not has_model(self.design, job.needs):
            raise UserError(f"--run: {name} starts from {job.needs}, which is not there yet")
        self.jobs = 1
        self._work([job], record=False)
        if why := note(self.design, name).get("why"):
            raise UserError(f"{name}: {why}")

    def write(self, page_after: float = 0.0) -> dict[str, Any]:
        """Write ablation.json and the page; give the record.

        Args:
            page_after: seconds since the last page before which none is drawn: it takes the
                processor from the runs.
        """
        record = make_record(self.design, self.resolved)
        path = self.design.directory / "ablation.json"
        write_json(path, record)
        if time.monotonic() - self._drawn >= page_after:
            write_page(path)
            self._drawn = time.monotonic()
        return record

    def plan(self, checks: Mapping[str, Preflight], timed: Mapping[str, float] = {}) -> str:
        """Write what would be run, and what it takes, for `--dry-run`.

        Args:
            checks: of `check`.
            timed: of `timed`.
        """
        design, lines = self.design, []
        shared = shared_settings({name: each.resolved for name, each in checks.items()})
        for arm in design.arms:
            own = checks[arm.name].resolved.items() - shared.items()
            values = [*arm.settings.items(), *sorted(own)]
            settings = ", ".join(f"{key} = {value!r}" for key, value in values)
            states = [run_state(design, arm, seed).status for seed in design.seeds]
            over = sum(status in ("finished", "collapsed") for status in states)
            lines.append(f"{arm.name}: {settings}; {len(states)} runs, {over} of them finished")
        if shared:
            lines.append(
                "auto: " + ", ".join(f"{key} = {value!r}" for key, value in shared.items())
            )
        todo = self._jobs(design.seeds)
        runs = [job for job in todo if job.arm]
        starts = f", after {len(todo) - len(runs)} warm start(s)" if len(todo) > len(runs) else ""
        lines.append(
            f"{len(runs)} of {len(design.arms) * len(design.seeds)} runs to do{starts}, "
            f"{self.jobs} at a time, into {design.directory}"
        )
        lines.append(_disk(design, checks))
        if self._seconds:
            lines.append(f"about {_time_text(self._left(len(runs)))}, as earlier runs took")
        elif timed:
            seconds = sum(timed[job.arm.name] for job in runs if job.arm)
            lines.append(
                f"about {_time_text(seconds / min(self.jobs, max(len(runs), 1)))}, by the first "
                "steps of each arm: less, since later runs share what these compile; more, where "
                "runs beside each other slow each other"
            )
        return "\n".join(lines)

    def timed(self, steps: int) -> dict[str, float]:
        """Run the first steps of each arm's first seed, and give the seconds that a whole run
        takes by them; nothing of them stays.

        The model of a warm start that trains from scratch has random weights here.

        Raises:
            UserError: one of them failed.
        """
        design, seconds = self.design, {}
        packed = pack(design.objects)
        for arm in design.arms:
            with tempfile.TemporaryDirectory(prefix="fp8rl-timed-") as folder:
                config = replace(
                    arm.config,
                    output=folder + "/run",
                    model=model_of_shape(design, arm),
                    trainer=replace(arm.config.trainer, steps=steps),
                    sft=replace(arm.config.sft, steps=steps),
                    evaluation=replace(arm.config.evaluation, every=1),
                    checkpoint=replace(arm.config.checkpoint, every=0),
                )
                path = Path(folder, "run.toml")
                path.write_text(dump_toml(config))
                words = [*_PROCESS, design.command(arm), str(path)]
                if packed:
                    objects = Path(folder, "objects.pickle")
                    objects.write_bytes(packed)
                    words += ["--objects", str(objects)]
                began = time.monotonic()
                done = subprocess.run(
                    words,
                    capture_output=True,
                    text=True,
                    check=False,
                    env=os.environ | self._environment(0),
                )
                if done.returncode:
                    raise UserError(f"arms.{arm.name}: {last_line(done.stderr + done.stdout)}")
                whole = time.monotonic() - began
                rows = read_rows(config.directory)
                seconds[arm.name] = whole + _later(design.steps(arm), arm.config, rows)
        return seconds

    def slurm(self, gpus: int = 0, time_limit: str = "") -> str:
        """Write the scripts of a SLURM job array, an element a run; give how to submit them.

        Args:
            gpus: of each element; 0: what the cluster gives.
            time_limit: of each element, as sbatch takes it; empty: the cluster's.

        Raises:
            UserError: as `prepare`.
        """
        self.prepare()
        self.logs.mkdir(parents=True, exist_ok=True)  # SLURM drops output that has no folder
        asked = [f"#SBATCH --gpus={gpus}"] if gpus else []
        asked += [f"#SBATCH --time={time_limit}"] if time_limit else []
        design = self.design
        jobs = self._jobs(design.seeds, everything=True)
        starts = [job.name for job in jobs if not job.arm]
        runs = [job.name for job in jobs if job.arm]
        scripts = {"start": starts, "runs": runs} if starts else {"runs": runs}
        for name, elements in scripts.items():
            (design.directory / f"{name}.sbatch").write_text(self._script(name, elements, asked))
        paths = {name: shlex.quote(str(design.directory / f"{name}.sbatch")) for name in scripts}
        after = f"--dependency=afterok:$(sbatch --parsable {paths['start']}) " if starts else ""
        return f"sbatch {after}{paths['runs']}\n{self._command('--collect')}  # then"

    def _script(self, name: str, elements: list[str], asked: list[str]) -> str:
        return "\n".join(
            [
                "#!/bin/bash",
                f"#SBATCH --job-name={self.design.name}-{name}",
                f"#SBATCH --array=0-{len(elements) - 1}",
                f"#SBATCH --output={self.logs}/slurm-%A-%a.txt",
                *asked,
                f"cd {shlex.quote(os.getcwd())}",
                f"runs=({' '.join(map(shlex.quote, elements))})",
                self._command('--run "${runs[$SLURM_ARRAY_TASK_ID]}"'),
                "",
            ]
        )

    def _command(self, flags: str) -> str:
        python = shlex.join(_FP8RL)
        output = shlex.quote(literal(self.design.directory))
        return f"{python} ablate {shlex.quote(self.design.source)} --output {output} {flags}"

    def _pairs(self) -> Iterator[tuple[Arm, int]]:
        """Seed by seed, so that what was cut off has all arms of the first seeds."""
        return ((arm, seed) for seed in self.design.seeds for arm in self.design.arms)

    def _noted(self, arm: Arm, seed: int) -> float | None:
        return note(self.design, self.design.run_name(arm, seed)).get("seconds")

    def _stored(self) -> dict[str, Any]:
        """design.json, where it is there and of this design, which may have more seeds."""
        path = self.design.directory / "design.json"
        if not path.exists():
            return {}
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            before, now = stored["fingerprint"], json.loads(json.dumps(self.design.fingerprint()))
            if now["looks"] == 1 and now["seeds"][: len(before["seeds"])] == before["seeds"]:
                before = before | {"seeds": now["seeds"]}
            lines = changes(before, now)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: cannot be read ({error}); choose another output") from None
        if lines:
            raise self._other(lines)
        return stored

    def _raise_seeds(self, stored: dict[str, Any]) -> None:
        """Note where seeds were added behind those that design.json has."""
        before, seeds = stored["fingerprint"]["seeds"], list(self.design.seeds)
        if before == seeds:
            return
        self.report(f"seeds raised from {len(before)} to {len(seeds)}, which the record says")
        stored["fingerprint"]["seeds"] = seeds
        stored["raised_from"] = [*stored.get("raised_from", []), len(before)]
        write_json(self.design.directory / "design.json", stored)

    def _other(self, changed: list[str]) -> UserError:
        """What to say where an ablation has become another."""
        told = (f"{self.design.source}: {line} since its runs began" for line in changed)
        where = self.design.directory
        return UserError("\n".join([*told, f"{where}: put it back, or choose another output"]))

    def _agree(self) -> None:
        """Refuse to start a run with code that behaves otherwise than it did when the runs began;
        of those that are older than the fingerprint nothing is known.

        Raises:
            UserError: a line for each thing that has changed.
        """
        stored = self._stored()
        if not stored.get("behaviour") or stored["sources"] == (now := sources()):
            return
        if lines := differences(stored["behaviour"], self._behaviour()):
            raise self._other(lines)
        write_json(self.design.directory / "design.json", stored | {"sources": now})

    def _behaviour(self) -> dict[str, Any]:
        _log.info("%s: golden runs of its arms, for the record", self.design.source)
        (found,) = fingerprint(self.design)
        for name, numbers in found["golden"].items():
            if "fault" in numbers:
                _log.warning("%s has no golden run: %s", name, numbers["fault"])
        return found

    def _jobs(self, seeds: tuple[int, ...], everything: bool = False) -> list[Job]:
        """What is to run for these seeds, in order; `everything`: what is finished, too."""
        design, jobs = self.design, {}
        for seed in seeds:
            start = design.start_name(seed)
            if start and (everything or not has_model(design, start)):
                jobs[start] = Job(start, "sft", design.start_config(seed))
            for arm in design.arms:
                if not everything and run_state(design, arm, seed).status in (
                    "finished",
                    "collapsed",
                ):
                    continue
                config = with_settings(
                    design.run_config(arm, seed), self.resolved.get(arm.name, {})
                )
                name = design.run_name(arm, seed)
                jobs[name] = Job(name, design.command(arm), config, start, arm, seed)
        return list(jobs.values())

    def _config_path(self, job: Job) -> Path:
        return self.design.directory / "configs" / f"{job.name}.toml"

    def _work(self, waiting: list[Job], record: bool = True) -> None:
        """Run jobs until none is left."""
        working: list[Working] = []
        total, failed = len(waiting), set()
        done = 0
        screen = _Screen(self, total)
        try:
            with screen:
                while waiting or working:
                    for job in [job for job in waiting if job.needs in failed]:
                        waiting.remove(job)
                        self._note(job, f"its warm start {job.needs} failed")
                        done += 1
                    free = [
                        slot for slot in range(self.jobs) if slot not in {w.slot for w in working}
                    ]
                    going = {each.job.name for each in working}
                    ready = [
                        job
                        for job in waiting
                        if not job.needs
                        or (job.needs not in going and has_model(self.design, job.needs))
                    ]
                    for slot, job in zip(free, ready, strict=False):
                        waiting.remove(job)
                        if started := self._start(job, slot):
                            working.append(started)
                            screen.say(f"{job.name}: started")
                        else:
                            screen.say(f"{job.name}: another process is running it")
                            done += 1
                    for each in working:
                        _update(each, read_rows(self.design.directory / each.job.name))
                    screen.show(working, done, self._left(len(waiting), working))
                    time.sleep(_POLL_SECONDS)
                    for each in [w for w in working if w.process.poll() is not None]:
                        working.remove(each)
                        done += 1
                        line, whole = self._end(each)
                        if not whole:
                            failed.add(each.job.name)
                        left = self._left(len(waiting), working)
                        about = f"; about {_time_text(left)} left" if left else ""
                        screen.say(f"{line} ({done} of {total}{about})")
                        if record and each.job.arm:
                            with contextlib.suppress(UserError):  # said at the end
                                self.write(page_after=_PAGE_SECONDS)
        finally:
            _end_all(working)

    def _start(self, job: Job, slot: int) -> Working | None:
        """Start a job's process; None where another process runs it."""
        self._agree()
        directory = self.design.directory / job.name
        words = [*_PROCESS, job.command, str(self._config_path(job))]
        words += ["--objects", str(self._objects)] if self.design.objects else []
        stack = contextlib.ExitStack()
        lock = stack.enter_context(self._lock(job.name))
        if lock is None:
            stack.close()
            return None
        if job.arm and self.design.file.judge:
            words += ["--judge", self.design.file.judge]
        if checkpoint_steps(directory):
            words.append("--resume")
        else:  # killed before its first checkpoint
            for rows in ROWS:
                (directory / rows).unlink(missing_ok=True)
        (self.logs / f"{job.name}.json").unlink(missing_ok=True)
        log = stack.enter_context((self.logs / f"{job.name}.log").open("wb"))
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | self._environment(slot),
            pass_fds=(lock,),
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        return Working(job, process, slot, time.monotonic(), stack)

    def _environment(self, slot: int) -> dict[str, str]:
        """Devices of a slot, one cache of compiled programs for all runs, and where modules are."""
        cache = {"JAX_COMPILATION_CACHE_DIR": str(program_dir())}
        least = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        more = {} if "JAX_COMPILATION_CACHE_DIR" in os.environ else cache | least
        if self.design.objects:  # which may be pickled by the name of a module that is found here
            more["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        if self.jobs == 1 or not self._devices:
            return more
        share = max(len(self._devices) // self.jobs, 1)
        first = slot * share % len(self._devices)
        more["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices[first : first + share])
        several = -(-self.jobs // len(self._devices))
        if several > 1:
            more.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / several:.2f}")
        return more

    def _end(self, each: Working) -> tuple[str, bool]:
        """Note how a process ended: a line about it, and whether it is whole."""
        each.stack.close()
        job, code = each.job, each.process.returncode
        seconds = time.monotonic() - each.began
        if code:
            text = (self.logs / f"{job.name}.log").read_text(encoding="utf-8", errors="replace")
            why = last_line(text)
            if code < 0:
                why = f"killed by {signal.Signals(-code).name}; its last line: {why}"
            self._note(job, why)
            return f"{job.name}: failed: {why}", False
        self._note(job, "", seconds)
        if job.arm is None:
            return f"{job.name}: finished in {_time_text(seconds)}", True
        self._seconds.append(seconds)
        state = run_state(self.design, job.arm, job.seed)
        metric = self.design.file.metric.name
        for key, name in (
            ("metric.name", metric),
            ("collapse.metric", self.design.file.collapse.metric),
        ):
            if name and not name.startswith(("eval/", "judged/")) and name not in state.row:
                near = difflib.get_close_matches(name, state.row, n=1)
                hint = f"did you mean {near[0]}?" if near else "metrics.jsonl has all names."
                raise UserError(
                    f"{self.design.source}: {key}: {job.name} has not measured {name!r}; {hint} "
                    f"Remove {self.design.directory} and begin anew"
                )
        what = state.why if state.outcome is None else f"{metric} {state.outcome:.4g}"
        if state.status == "collapsed":
            what = state.why
        return f"{job.name}: {state.status} in {_time_text(seconds)}: {what}", True

    def _note(self, job: Job, why: str, seconds: float | None = None) -> None:
        text = {"why": why} if why else {"seconds": round(seconds or 0.0, 3)}
        write_json(self.logs / f"{job.name}.json", text)

    def _left(self, waiting: int, working: Sequence[Working] = ()) -> float:
        """Seconds until all is done, about, from runs that have ended or from the first steps of
        those that are at work; 0 where neither is there."""
        known = self._seconds or [each.expected for each in working if each.expected]
        if not known:
            return 0.0
        mean, now = sum(known) / len(known), time.monotonic()
        at_work = sum(max((each.expected or mean) - (now - each.began), 0.0) for each in working)
        return (mean * waiting + at_work) / min(self.jobs, max(waiting + len(working), 1))


class _Screen:
    """What a person sees: a live table on a terminal, plain lines elsewhere."""

    def __init__(self, runner: Runner, total: int) -> None:
        self.runner, self.total = runner, total
        self.console = Console(force_jupyter=False)
        # Jupyter sets FORCE_COLOR, by which its cells pass for terminals
        terminal = self.console.is_terminal and not Console().is_jupyter
        terminal = terminal and runner.report is print
        self.live = Live(console=self.console, auto_refresh=False) if terminal else None
        self.has_told = bool(runner._seconds)
        self.told = time.monotonic()

    def __enter__(self) -> _Screen:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.update("")
            self.live.stop()

    def say(self, line: str) -> None:
        if self.live:
            self.console.print(line, markup=False, highlight=False)
        else:
            self.runner.report(line)
            sys.stdout.flush()  # a pipe keeps pages of what is printed back

    def show(self, working: list[Working], done: int, left: float) -> None:
        if not self.live:
            if left and not self.has_told:
                self.has_told = True
                self.say(f"about {_time_text(left)} for what is left, by the first steps")
            if time.monotonic() - self.told >= _LINE_SECONDS:
                self.told = time.monotonic()
                for each in working:
                    log = self.runner.logs / f"{each.job.name}.log"
                    self.say(f"{each.job.name}: {_doing(each, log)}")
            return
        grid = Table("arm", "seed", "step", "reward", "mismatch k3", "left", box=None)
        for each in working:
            job = each.job
            grid.add_row(
                job.arm.name if job.arm else job.name,
                str(job.seed) if job.arm else "",
                f"{each.step}/{job.steps}",
                _number(each.row.get("reward/mean"), ".3f"),
                _number(each.row.get("mismatch/k3"), ".1e"),
                _time_text(each.left),
            )
        about = f"; about {_time_text(left)} left for all" if left else ""
        grid.caption = f"{done} of {self.total} done{about}"
        self.live.update(grid, refresh=True)


def _doing(each: Working, log: Path) -> str:
    """Where a process is: its step, and what it compiles or about what is left."""
    where = f"step {each.step} of {each.job.steps}" if each.row else "no step yet"
    said = last_line(log.read_text(encoding="utf-8", errors="replace"))
    if said.startswith("compiling "):
        return f"{where}, {said}"
    return f"{where}, about {_time_text(each.left)} left" if each.left else where


def _update(each: Working, rows: list[dict[str, Any]]) -> None:
    """Take the newest row; times count from the first row that this process wrote."""
    now = time.monotonic()
    if rows and rows[-1] != each.row:
        each.row = rows[-1]
        each.first = each.first or (each.row["step"], now)


def _later(steps: int, config: RunConfig, rows: list[dict[str, Any]]) -> float:
    """Seconds that a whole run takes beyond its first steps, which were timed with an evaluation
    each."""
    first = [row for row in rows[1:] if "time/step" in row and row.get("time/train")]
    evaluating = statistics.median(row.get("time/eval", 0.0) for row in first)
    stepping = statistics.median(row["time/step"] - row.get("time/eval", 0.0) for row in first)
    every = config.evaluation.every
    evaluations = -(-steps // every) + 1 if every else 0
    return max(steps - len(first) - 1, 0) * stepping + (evaluations - len(first) - 2) * evaluating


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else ""


def _time_text(seconds: float) -> str:
    if not seconds:
        return ""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _disk(design: Design, checks: Mapping[str, Preflight]) -> str:
    """About what checkpoints and models will take."""
    total = 0.0
    for arm in design.arms:
        check, every, steps = (
            checks[arm.name],
            arm.config.checkpoint.every,
            arm.config.trainer.steps,
        )
        if not check.checkpoint_bytes:
            return "disk: not known, for runs with adapters"
        kept = min(arm.config.checkpoint.keep, -(-steps // every) if every else 1)
        total += len(design.seeds) * (kept * check.checkpoint_bytes + check.model_bytes)
    one = max(check.checkpoint_bytes for check in checks.values())
    free = shutil.disk_usage(_existing(design.directory)).free
    return (
        f"disk: about {total / 1e9:.2g} GB for all runs ({one / 1e9:.2g} GB a checkpoint); "
        f"{free / 1e9:.3g} GB are free"
    )


def _existing(path: Path) -> Path:
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def _devices() -> list[str]:
    """GPUs that runs may be spread over, by the names that CUDA_VISIBLE_DEVICES takes."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in given.split(",") if name]
    if not shutil.which("nvidia-smi") or os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    asked = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    lines = [line for line in asked.stdout.splitlines() if line.startswith("GPU ")]
    return [str(number) for number in range(len(lines))]


def _end_with_parent() -> None:
    """In the child: be asked to end where the runner is killed (PR_SET_PDEATHSIG)."""
    _LIBC.prctl(1, signal.SIGTERM)


def _end_all(working: list[Working]) -> None:
    """End the processes that are left, with all that they started."""
    for each in working:
        _signal(each, signal.SIGINT)
    deadline = time.monotonic() + _GRACE_SECONDS
    for each in working:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.process.wait(max(deadline - time.monotonic(), 0.1))
        _signal(each, signal.SIGKILL)
        each.process.wait()
        each.stack.close()


def _signal(each: Working, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(each.process.pid, number)
