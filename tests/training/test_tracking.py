from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from fp8rl_jax.compiling import Compiling
from fp8rl_jax.config.training import TrackingConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.training.console import (
    COLUMNS,
    SFT_COLUMNS,
    LiveConsole,
    PlainConsole,
    TimeLeft,
    clock_text,
    console_tracker,
)
from fp8rl_jax.training.tracking import JsonLines, JsonlTracker, Trackers, View, make_tracker

METRICS = {
    "reward/mean": 0.5,
    "eval/accuracy": 0.25,
    "completions/mean_length": 6.0,
    "entropy": 1.5,
    "mismatch/k3": 1.3e-4,
    "sync/arrived": 0.994,
    "time/step": 0.75,
}


class Clock:
    """Time that moves when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_one_line_on_disk_at_once(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl", clock=lambda: 12.34567)
    tracker.log(0, {"reward/mean": 0.5, "optim/skipped_steps": 0})
    assert rows_of(tmp_path / "m.jsonl") == [
        {"step": 0, "time": 12.346, "reward/mean": 0.5, "optim/skipped_steps": 0}
    ]
    tracker.log(1, {"reward/mean": jnp.float32(0.25), "entropy": np.float64(1.5)})
    assert rows_of(tmp_path / "m.jsonl")[1] == {
        "step": 1,
        "time": 12.346,
        "reward/mean": 0.25,
        "entropy": 1.5,
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), jnp.float32(jnp.nan)])
def test_what_is_not_finite_is_null(tmp_path, value):
    JsonlTracker(tmp_path / "m.jsonl").log(0, {"kl": value})
    assert rows_of(tmp_path / "m.jsonl")[0]["kl"] is None


def test_resuming_leaves_every_step_once(tmp_path):
    path = tmp_path / "m.jsonl"
    first = JsonlTracker(path)
    for step in range(8):
        first.log(step, {"x": step})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 8, "ti')
    resumed = JsonlTracker(path, start_step=5)
    for step in range(5, 10):
        resumed.log(step, {"x": 10 * step})
    rows = rows_of(path)
    assert [row["step"] for row in rows] == list(range(10))
    assert [row["x"] for row in rows] == [0, 1, 2, 3, 4, 50, 60, 70, 80, 90]


def test_a_row_that_was_cut_off_is_not_kept_even_where_it_parses(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}')
    JsonlTracker(path, start_step=2).log(2, {})
    assert [row["step"] for row in rows_of(path)] == [0, 2]


def test_a_fresh_start_empties_the_file(tmp_path):
    (tmp_path / "m.jsonl").write_text("anything\n")
    JsonlTracker(tmp_path / "m.jsonl").log(0, {})
    assert [row["step"] for row in rows_of(tmp_path / "m.jsonl")] == [0]


@pytest.mark.parametrize("line", ["nonsense", "3", '{"x": 1}', '{"step": null}'])
def test_a_damaged_record_is_refused_and_kept(tmp_path, line):
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"m.jsonl: line 2 is not a JSON object with a step"):
        JsonlTracker(path, start_step=3)
    assert path.read_bytes() == before


def test_samples_of_a_step_are_lines_too(tmp_path):
    path = tmp_path / "samples.jsonl"
    for start in (0, 1):
        samples = JsonLines(path, start)
        samples.write(
            [{"step": 1, "completion": "é\n", "reward": float("nan"), "tokens": [1, 2]}] * 2
        )
    samples.write([{"step": 1, "completion": "last"}])
    assert [row["completion"] for row in rows_of(path)] == ["é\n", "é\n", "last"]
    assert rows_of(path)[0] == {"step": 1, "completion": "é\n", "reward": None, "tokens": [1, 2]}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_line(tmp_path, monkeypatch):
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    monkeypatch.setattr(tracker._lines, "_file", open("/dev/full", "ab", buffering=0))
    with pytest.raises(
        UserError, match=r"m.jsonl: cannot be written: No space left on device; .*resume=True"
    ):
        tracker.log(0, {"x": 1.0})
    with pytest.raises(UserError, match=r"m.jsonl: cannot be written: No such file or directory"):
        JsonlTracker(tmp_path / "missing" / "m.jsonl")


class Broken:
    def __init__(self):
        self.calls = Counter()

    def log(self, step, metrics):
        self.calls["log"] += 1
        raise ConnectionError("no route to host")

    def close(self):
        self.calls["close"] += 1


def test_a_view_that_fails_is_warned_about_once_and_the_record_goes_on(tmp_path, capsys, fault):
    broken = Broken()
    tracker = Trackers([JsonlTracker(tmp_path / "m.jsonl"), View("Weights & Biases", broken)])
    for step in range(3):
        tracker.log(step, METRICS)
    tracker.close()
    assert len(rows_of(tmp_path / "m.jsonl")) == 3
    assert broken.calls == {"log": 1}
    error = capsys.readouterr().err
    assert error.count("warning: Weights & Biases failed") == 1
    assert "ConnectionError: no route to host" in error
    (said,) = (line for line in error.splitlines() if "Weights & Biases failed" in line)
    fault("tracker", said, lost="the tracker's view; the record is whole")


def test_plain_lines_show_the_columns_in_line(tmp_path):
    clock, stream = Clock(), io.StringIO()
    console = PlainConsole(20, stream=stream, clock=clock)
    for step in range(3):
        clock.now += 2.0
        console.log(step, METRICS if step != 1 else {"reward/mean": 0.625})
    header, first, second, third = stream.getvalue().splitlines()
    assert (
        header.split()
        == "step reward held-out length entropy mismatch k3 arrives s/step left".split()
    )
    assert first.split() == [
        "0",
        "0.500",
        "0.250",
        "6.0",
        "1.500",
        "1.3e-04",
        "0.99",
        "0.75",
        "0:38",
    ]
    assert second.split() == ["1", "0.625", *["-"] * 6, "0:36"]
    assert third.split()[-1] == "0:34"
    assert len({len(line) for line in (header, first, second, third)}) == 1
    for heading, word in (("reward", "0.500"), ("entropy", "1.500"), ("left", "0:38")):
        assert header.index(heading) + len(heading) == first.index(word) + len(word)


def test_other_columns(tmp_path):
    stream = io.StringIO()
    PlainConsole(3, stream=stream, columns=SFT_COLUMNS).log(0, {"loss": 1.25, "reward/mean": 0.5})
    header, line = stream.getvalue().splitlines()
    assert header.split() == "step loss held-out grad norm left".split()
    assert line.split()[:4] == ["0", "1.2500", "-", "-"]


def test_the_header_comes_back():
    stream = io.StringIO()
    console = PlainConsole(100, stream=stream, header_every=3)
    for step in range(7):
        console.log(step, METRICS)
    assert [i for i, line in enumerate(stream.getvalue().splitlines()) if "reward" in line] == [
        0,
        4,
        8,
    ]


def test_a_terminal_gets_the_rows_and_a_bar():
    clock, stream = Clock(), io.StringIO()
    terminal = Console(file=stream, force_terminal=True, width=40, color_system=None)
    console = LiveConsole(4, console=terminal, clock=clock)
    for step in range(4):
        clock.now += 30.0
        console.log(step, METRICS)
    console.close()
    text = stream.getvalue()
    assert text.count("1.3e-04") == 4
    assert "held-out" in text and "step 4/4" in text and "0:00 left" in text


def test_pipes_get_plain_lines(monkeypatch):
    assert isinstance(console_tracker(3), PlainConsole)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    live = console_tracker(3)
    live.close()
    assert isinstance(live, LiveConsole)


def test_time_left_follows_the_recent_pace():
    clock = Clock()
    left = TimeLeft(100, 10, clock, window=2)
    assert left.at(9) is None
    seen = []
    for step, seconds in ((10, 60.0), (11, 2.0), (12, 2.0)):
        clock.now += seconds
        seen.append(left.at(step))
    assert seen == [89 * 60.0, 88 * 31.0, 87 * 2.0]
    assert left.at(12) == 87 * 2.0
    assert left.at(99) == left.at(100) == 0.0


def test_what_compiles_long_is_said_and_not_counted():
    clock, said, told = Clock(), [], threading.Event()

    def say(line):
        said.append(line)
        told.set()

    compiling, part = Compiling(0.05, say, clock), "/jax/core/compile/{}_duration".format
    left = TimeLeft(10, 0, compiling.steady)
    # functions traced inside of others, and a program that is there at once
    for now, what, seconds, program in (
        *((3.0, "jaxpr_trace", 2.0, "inner"), (6.0, "jaxpr_trace", 5.0, "update_program")),
        *((7.0, "jaxpr_to_mlir_module", 1.0, "jit(short)"), (7.0, "backend_compile", 0.0, "short")),
        (8.0, "jaxpr_to_mlir_module", 1.0, "jit(update_program)"),
    ):
        clock.now = now
        compiling.take(part(what), seconds, fun_name=program)
    assert told.wait(20)
    clock.now = 48.0
    compiling.take(part("backend_compile"), 40.0, fun_name="jit(update_program)")
    compiling.take("/jax/other", 7.0)
    assert said == ["compiling the update ...", "compiled the update in 40 s"]
    assert compiling.seconds == 47.0
    clock.now = 50.0
    assert left.at(0) == 9 * 3.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0, "0:00"), (59.6, "1:00"), (61, "1:01"), (90061, "25:01:01")],
)
def test_times_read_as_on_a_clock(seconds, text):
    assert clock_text(seconds) == text


def test_columns_name_metrics_that_the_record_has():
    assert {name for _, name, _ in COLUMNS} == set(METRICS)


@pytest.mark.parametrize(("key", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_extra_is_named_before_the_run(tmp_path, monkeypatch, key, package):
    monkeypatch.setitem(sys.modules, package, None)
    config = TrackingConfig(**{key: True})
    with pytest.raises(UserError, match=rf"^tracking.{key}: .*{package} .*pip install {package}$"):
        make_tracker(tmp_path, config, total_steps=3)


def test_tensorboard_gets_every_metric(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs the extra [trackers]")
    from tensorboardX.proto.event_pb2 import Event

    tracker = make_tracker(tmp_path, TrackingConfig(tensorboard=True), total_steps=2)
    tracker.log(0, METRICS)
    tracker.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    seen = {}
    for record in tf_records(file.read_bytes()):
        for value in Event.FromString(record).summary.value:
            seen[value.tag] = value.simple_value
    assert seen == pytest.approx(METRICS)


SAMPLES = [
    {"prompt": f"*{i}* | 1\n\n# x", "completion": "é" * 3000, "answer": "", "reward": i / 2}
    for i in range(40)
]


def shown(tracker):
    tracker.show(0, [])
    tracker.show(3, SAMPLES)
    tracker.log(3, METRICS)
    tracker.close()


def test_tensorboard_shows_samples_as_text(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs the extra [trackers]")
    from tensorboardX.proto.event_pb2 import Event

    shown(make_tracker(tmp_path, TrackingConfig(tensorboard=True), total_steps=4))
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [Event.FromString(record) for record in tf_records(file.read_bytes())]
    texts = [
        (event.step, value.tensor.string_val[0].decode())
        for event in events
        for value in event.summary.value
        if value.tag.startswith("samples")
    ]
    ((step, text),) = texts
    assert step == 3 and text.count("completion:\n\n    ééé") == 32 == text.count("---") + 1
    assert "prompt:\n\n    *0* | 1\n    \n    # x\n\ncompletion:" in text
    assert "é" * 2000 + " ... (3,000 characters)\n\nanswer:" in text and "é" * 2001 not in text
    assert "reward:\n\n    15.5" in text


class FakeWandb:
    """What a run logs to Weights & Biases."""

    class errors:
        Error = ConnectionError

    def __init__(self):
        self.logged = []

    def init(self, **_):
        return SimpleNamespace(
            log=lambda values, step: self.logged.append((step, values)), finish=lambda: None
        )

    def Table(self, columns, data):
        return columns, data


def test_wandb_shows_samples_as_a_table(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    shown(make_tracker(tmp_path, TrackingConfig(wandb=True), total_steps=4))
    (step, values), (again, metrics) = fake.logged
    columns, data = values["samples"]
    assert step == again == 3 and metrics == METRICS
    assert columns == ["prompt", "completion", "answer", "reward"] and len(data) == 32
    prompt, completion, answer, reward = data[31]
    assert (prompt, answer, reward) == ("*31* | 1\n\n# x", "", 15.5)
    assert completion == "é" * 2000 + " ... (3,000 characters)"


def tf_records(data):
    """The payloads of a TFRecord file: length uint64, its CRC, payload, its CRC."""
    while data:
        length = int.from_bytes(data[:8], "little")
        yield data[12 : 12 + length]
        data = data[16 + length :]


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (TrackingConfig(), []),
        (TrackingConfig(samples=-1), ["tracking.samples"]),
        (TrackingConfig(wandb=True, wandb_project=""), ["tracking.wandb_project"]),
        (TrackingConfig(wandb_project=""), []),
    ],
)
def test_values_that_cannot_work_are_listed(config, keys):
    assert [problem.split()[0] for problem in config.problems()] == keys
