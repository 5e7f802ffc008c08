"""Runs that are stopped, killed, damaged or changed: what they say, how they end, and that the same
command goes on to the same bits."""

from __future__ import annotations

import getpass
import json
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from faults.started import ROOT, start, whole_lines
from tiny_run import EVEN_LETTERS, LEARNS, check_refused, faults, measured, train, write_run

from fp8rl_jax.config.training import CheckpointConfig
from fp8rl_jax.durable import write_durably
from fp8rl_jax.training.checkpoint import Checkpoints

EVALUATION = {"evaluation": {"every": 3, "examples": 8, "batch_size": 8}}
STEPS = 12
LONG = {"trainer": {"steps": STEPS}, "checkpoint": {"every": 4}}


@pytest.fixture
def run_file(tmp_path) -> str:
    return write_run(tmp_path, LEARNS, EVALUATION, LONG)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing befell."""
    place = tmp_path_factory.mktemp("whole")
    assert start(write_run(place, LEARNS, EVALUATION, LONG), place / "run").end() == 0
    return place / "run"


def check_same(one: Path, other: Path) -> None:
    """Both runs left the same rows, samples, evaluations, model and training state, bit for bit."""
    assert measured(one) == measured(other)
    for file in ("samples.jsonl", "evaluations.jsonl", "model/model.safetensors"):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    sums = [
        json.loads((run / f"checkpoints/{STEPS}/about/metadata").read_text())["checksums"]
        for run in (one, other)
    ]
    assert sums[0] == sums[1] and len(sums[0]) > 20


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        signal.SIGINT,
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_run_with_a_checkpoint(run_file, tmp_path, fault, request, number):
    """And of SIGTERM, that the run goes on to the bits of one that nothing befell."""
    run = start(run_file, tmp_path / "run", "--resume")
    run.wait_for(lambda: run.rows() >= 6)
    asked = time.monotonic()
    run.process.send_signal(number)
    assert run.end() == 75
    detected, recovered, again = time.monotonic() - asked, None, 0
    assert detected < 20
    last = run.said.splitlines()[-1]
    at = int(last.partition("before step ")[2].partition(";")[0])
    assert last == (
        f"fp8rl: {number.name}: stopped before step {at}; --resume goes on from the checkpoint of "
        f"step {at}"
    )
    assert at >= 6 and (tmp_path / f"run/checkpoints/{at}").is_dir()
    if number == signal.SIGTERM:
        resumed = start(run_file, tmp_path / "run", "--resume")
        recovered, again = resumed.caught_up(run.rows())
        assert resumed.end() == 0 and again == 0
        check_same(tmp_path / "run", request.getfixturevalue("whole"))
    fault("signal", last, status=75, detected=detected, recovered=recovered, lost=again)


@pytest.mark.parametrize(
    ("seconds", "signals", "code", "line"),
    [
        (0, [signal.SIGTERM, signal.SIGTERM], 143, "SIGTERM again: ended at once; it stands"),
        (0, [signal.SIGINT, signal.SIGHUP], 129, "SIGHUP again: ended at once; it stands"),
        (0.2, [signal.SIGTERM], 75, "SIGTERM: no checkpoint within 0.2 s; it stands"),
    ],
)
def test_the_second_signal_and_the_end_of_the_grace_time_wait_for_nothing(
    seconds, signals, code, line, fault
):
    """The main thread works on, and never looks whether it was asked."""
    program = f"""
from fp8rl_jax.training.stopping import stopping
with stopping({seconds}, lambda: "it stands") as stop:
    print("ready", flush=True)
    while True:
        sum(range(1000))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for number in signals:
        asked = time.monotonic()
        process.send_signal(number)
        time.sleep(0.1)
    process.wait(10)
    detected = time.monotonic() - asked
    _, said = process.communicate()
    assert process.returncode == code
    assert said.splitlines()[-1] == f"fp8rl: {line}"
    fault(
        "grace over" if code == 75 else "signal again",
        said.splitlines()[-1],
        status=code,
        detected=detected,
        lost="the steps since the last checkpoint",
    )


@pytest.mark.slow
def test_killed_at_random_moments_the_same_command_goes_on(run_file, whole, tmp_path, fault):
    """Before the first row, behind it, and wherever it is then."""
    draw, kills = random.Random(0), []
    for rows in (0, 1, 6, None):
        run = start(run_file, tmp_path / "run", "--resume")
        if kills:
            detected, before = kills[-1]
            recovered, again = run.caught_up(before)
            (said,) = (line for line in run.said.splitlines() if " at step " in line)
            told = {"status": -9, "detected": detected, "recovered": recovered, "lost": again}
            fault("killed" if "resuming" in said else "killed early", said, **told)
        if rows is None:
            break
        there = run.output.joinpath("run.lock").exists
        run.wait_for(lambda run=run, rows=rows, there=there: there() and run.rows() >= rows)
        time.sleep(draw.random() * 0.2)
        killed = time.monotonic()
        run.process.kill()
        assert run.end() == -signal.SIGKILL
        kills.append((time.monotonic() - killed, run.rows()))
    assert run.end() == 0, run.said
    check_same(tmp_path / "run", whole)
    # what was done again is kept, too
    assert whole_lines(tmp_path / "run" / "metrics-replaced.jsonl")


@pytest.mark.slow
def test_another_run_in_the_same_folder_is_refused(run_file, tmp_path, capsys, fault):
    run = start(run_file, tmp_path / "run", "--trainer.steps", "2000")
    run.wait_for(lambda: run.rows() >= 1)
    owner = f"{getpass.getuser()}@{socket.gethostname()}, process {run.process.pid}, since"
    told = f"is in use by another run ({owner}"
    asked = time.monotonic()
    line = check_refused(run_file, tmp_path / "run", capsys, ["--resume"], told)
    fault("two runs", line, status=2, detected=time.monotonic() - asked)
    run.process.kill()
    run.end()


def test_a_finished_run_is_left_as_it_is(tmp_path, caplog, fault):
    run_file, out = write_run(tmp_path, EVEN_LETTERS, EVALUATION), tmp_path / "run"
    assert train(run_file, out) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    asked = time.monotonic()
    assert train(run_file, out, "--resume") == 0
    (said,) = (line for line in caplog.messages if "is finished" in line)
    fault("finished", said, status=0, detected=time.monotonic() - asked)
    after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    del before[out / "run.lock"], after[out / "run.lock"]
    assert after == before
    # more steps of a constant learning rate are the same experiment; the old last row is kept
    assert train(run_file, out, "--resume", "--trainer.steps", "5") == 0
    assert [row["step"] for row in measured(out)] == [0, 1, 2, 3, 4, 5]
    assert [row["step"] for row in whole_lines(out / "metrics-replaced.jsonl")] == [4]


CHANGED = {
    "optimizer.learning_rate was 0.001 and is 0.5": ["--optimizer.learning-rate", "0.5"],
    "seed was 0 and is 1": ["--seed", "1"],
    "recipe was 'bf16' and is 'fp8-kv'": ["--recipe", "fp8-kv"],
    "the train problems has changed": ["--task.train-size", "32"],
    "optimizer.schedule was 'constant' and is 'linear'": ["--optimizer.schedule", "linear"],
    "model.init.num_layers was 1 and is 2": ["--model.init.num-layers", "2"],
}


def test_what_makes_another_experiment_is_named_and_wants_a_flag(tmp_path, capsys, caplog, fault):
    reward = tmp_path / "reward.py"
    reward.write_text("def score(completion, **_):\n    return len(set(completion)) / 6\n")
    run_file, out = (
        write_run(tmp_path, {"task": {"reward": {"function": f"{reward}:score"}}}),
        tmp_path / "run",
    )
    assert train(run_file, out, "--trainer.steps", "2") == 0
    settings = (out / "config.toml").read_bytes()
    for line, flags in CHANGED.items():
        asked = time.monotonic()
        assert train(run_file, out, "--trainer.steps", "2", "--resume", *flags) == 2
        said = [each for each in faults(capsys) if line in each]
        assert said, line
        fault("changed", said[0], status=2, detected=time.monotonic() - asked)
    assert (out / "config.toml").read_bytes() == settings
    reward.write_text("def score(completion, **_):\n    return 1.0\n")
    flags = ["--trainer.steps", "4", "--resume"]
    check_refused(run_file, out, capsys, flags, f"{reward} has changed")
    # where it runs and what it records may change
    assert train(run_file, out, *flags, "--resume-changed", "--tracking.samples", "2") == 0
    said = "resumed with a change: tracking.samples was 4 and is 2"
    assert said in caplog.text and f"{reward} has changed" in caplog.text
    record = json.loads((out / "run.json").read_text())
    assert set(record["changed"]) >= {f"{reward} has changed", "trainer.steps was 2 and is 4"}
    assert len(record["earlier"]) == 1


@pytest.mark.slow
def test_a_blow_up_leaves_a_good_checkpoint_its_batch_and_its_row(tmp_path, capsys, fault):
    run_file, out = write_run(tmp_path, LEARNS), tmp_path / "run"
    every = ["--checkpoint.every", "1", "--trainer.abort-after-skips", "3"]
    assert train(run_file, out, "--trainer.steps", "3", *every) == 0
    capsys.readouterr()
    flags = [*every, "--trainer.steps", "20", "--optimizer.learning-rate", "1e30"]
    asked = time.monotonic()
    assert train(run_file, out, *flags, "--resume", "--resume-changed") == 2
    detected = time.monotonic() - asked
    (line,) = faults(capsys)
    assert "3 updates in a row were skipped" in line
    good = int(line.partition("last known good checkpoint: step ")[2])
    assert good <= 4 and (out / f"checkpoints/{good}").is_dir()
    skipped = [row["step"] for row in measured(out) if row.get("optim/skipped")]
    assert len(skipped) == 3 and measured(out)[-1]["step"] == skipped[-1]
    batch = np.load(out / f"skipped-step-{skipped[0]}.npz")
    assert batch["tokens"].shape == batch["mask"].shape and len(batch["texts"]) == 16
    again = measured(out)[-1]["step"] + 1 - good
    fault("blow-up", line, status=2, detected=detected, lost=again)


@pytest.mark.parametrize("value", ["float('nan')", "1e30 + len(completion)"])
def test_all_rewards_failing_stops_with_the_reason_and_its_last_row(tmp_path, capsys, fault, value):
    """1e30 would be no fault of its own, and its square is beyond float32: no advantage is left."""
    reward = tmp_path / "reward.py"
    reward.write_text(f"def score(completion, **_):\n    return {value}\n")
    run_file = write_run(tmp_path, {"task": {"reward": {"function": f"{reward}:score"}}})
    asked, told = time.monotonic(), "every reward failed in 3 steps in a row"
    line = check_refused(run_file, tmp_path / "run", capsys, [], told)
    fault("all fail", line, status=2, detected=time.monotonic() - asked, lost="three steps")
    assert [row["step"] for row in measured(tmp_path / "run")] == [0, 1, 2]


TREE = {"weight": np.linspace(-1, 1, 4096, dtype=np.float32), "count": np.full((1,), 7, np.int32)}


def test_no_flipped_bit_is_loaded(tmp_path, caplog, fault):
    """Each of 40, in a file drawn by its size: the checkpoint before is read, or what was saved."""
    kept = tmp_path / "kept"
    checkpoints = Checkpoints(kept, CheckpointConfig())
    checkpoints.save(1, jax.tree.map(np.zeros_like, TREE))
    checkpoints.save(2, TREE)
    checkpoints.close()
    files = [path for path in (kept / "2").rglob("*") if path.is_file()]
    draw, passed_over = random.Random(0), 0
    for number in range(40):
        place = tmp_path / f"{number}" / "checkpoints"
        shutil.copytree(kept, place)
        (file,) = draw.choices(files, [path.stat().st_size for path in files])
        data = bytearray(file.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (place / file.relative_to(kept)).write_bytes(data)
        caplog.clear()
        asked, again = time.monotonic(), Checkpoints(place, CheckpointConfig())
        step, found = again.restore(TREE)
        again.close()
        passed_over += step == 1
        fault(
            "flipped bit",
            caplog.messages[-1] if step == 1 else "",
            recovered=time.monotonic() - asked,
            lost="the damaged checkpoint" if step == 1 else "nothing",
        )
        for name, value in TREE.items():
            saved = value if step == 2 else np.zeros_like(value)
            np.testing.assert_array_equal(found[name], saved)
        assert len(list(place.parent.glob("checkpoint-2-damaged-*"))) == (step == 1)
    assert passed_over > 20


def test_a_checkpoint_without_checksums_is_read_with_a_warning(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    checkpoints.save(1, TREE)
    shutil.rmtree(tmp_path / "checkpoints" / "1" / "about")
    assert checkpoints.restore(TREE)[0] == 1 and "has no checksums" in caplog.text
    checkpoints.close()


def test_the_last_known_good_checkpoint_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    assert checkpoints.known_good is None
    for step in range(1, 7):
        checkpoints.save(step, TREE)
        if step == 2:
            checkpoints.mark_good()
    assert checkpoints.steps() == [2, 5, 6] and checkpoints.known_good == 2
    checkpoints.mark_good()
    checkpoints.save(7, TREE)
    assert checkpoints.steps() == [6, 7]
    checkpoints.close()


def test_a_full_disk_is_one_line_before_anything_is_computed(tmp_path, capsys, monkeypatch, fault):
    room = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: room)
    run_file = write_run(tmp_path, EVEN_LETTERS)
    asked, told = time.monotonic(), "a checkpoint needs 1.0 MB, and 0.1 MB"
    line = check_refused(run_file, tmp_path / "run", capsys, [], told)
    fault("full disk", line, status=2, detected=time.monotonic() - asked)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("output", ["/proc/self/run", "/dev/null/run"])
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys, fault, output):
    run_file = write_run(tmp_path, EVEN_LETTERS)
    asked, told = time.monotonic(), "the run directory cannot be written"
    line = check_refused(run_file, Path(output), capsys, [], told)
    fault("unwritable", line, status=2, detected=time.monotonic() - asked)


@pytest.mark.slow
def test_a_disk_that_fills_up_is_one_line_and_the_run_goes_on_later(
    run_file, whole, tmp_path, fault
):
    run = start(run_file, tmp_path / "run")
    run.wait_for(lambda: run.rows() >= 5)
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (4000, 4000))
    full = time.monotonic()
    assert run.end() == 2
    detected, before = time.monotonic() - full, run.rows()
    (line,) = run.said.splitlines()
    assert "cannot be written: File too large" in line and "--resume goes on" in line
    resumed = start(run_file, tmp_path / "run", "--resume")
    recovered, again = resumed.caught_up(before)
    assert resumed.end() == 0
    check_same(tmp_path / "run", whole)
    told = {"detected": detected, "recovered": recovered, "lost": again}
    fault("disk fills up", line, status=2, **told)


class Disk:
    """What a disk has after a loss of power: data and names that were flushed, others perhaps."""

    def __init__(self, monkeypatch):
        self.events: list[tuple] = []
        names: dict[int, str] = {}
        import os

        for name in ("open", "write", "fsync", "replace"):
            monkeypatch.setattr(os, name, self._told(name, getattr(os, name), names))

    def _told(self, name, call, names):
        def told(*arguments, **options):
            result = call(*arguments, **options)
            if name == "open":
                names[result] = str(arguments[0])
                self.events.append(("open", str(arguments[0]), arguments[1]))
            elif name == "write":
                self.events.append(("write", names[arguments[0]], bytes(arguments[1])[:result]))
            elif name == "fsync":
                self.events.append(("fsync", names[arguments[0]]))
            else:
                self.events.append(("replace", *map(str, arguments)))
            return result

        return told

    def after(self, count: int, path: Path, old: bytes) -> bytes:
        """The worst that `path` may hold when power goes after `count` events: names change as soon
        as they may, data comes only when it must."""
        flushed, written = {str(path): old}, {str(path): old}
        for event in self.events[:count]:
            match event:
                case ("open", name, flags) if flags & 0o1000:  # O_TRUNC
                    written[name] = b""
                    flushed[name] = b""
                case ("write", name, data):
                    written[name] += data
                case ("fsync", name) if name in written:
                    flushed[name] = written[name]
                case ("replace", source, target):
                    flushed[target], written[target] = flushed[source], written[source]
        return flushed[str(path)]


def test_a_loss_of_power_leaves_the_old_text_or_the_new(tmp_path, monkeypatch, fault):
    path = tmp_path / "run.json"
    path.write_bytes(b"old")
    disk = Disk(monkeypatch)
    write_durably(path, "new text")
    found = [disk.after(count, path, b"old") for count in range(len(disk.events) + 1)]
    assert set(found) == {b"old", b"new text"} and found[-1] == b"new text"
    # the name itself is on the disk before the call returns
    assert disk.events[-1] == ("fsync", str(tmp_path))
    assert disk.after(len(disk.events), path, b"old") == path.read_bytes()
    monkeypatch.undo()
    for _ in found:
        fault("power", "")
