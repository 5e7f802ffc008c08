"""The command for a card: its arithmetic, a rehearsal of what may go wrong there, its faults, and
all of it in miniature."""

import gc
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from experiments.benchmarks.gpu import (
    attention,
    checks,
    copying,
    decode,
    exact,
    figures,
    grouped,
    products,
    quantizers,
    runner,
    training,
)
from experiments.benchmarks.gpu import record as record_module
from experiments.benchmarks.gpu.__main__ import main
from experiments.benchmarks.gpu.checks import reference_of, same_bits, verdict
from experiments.benchmarks.gpu.figures import FIGURES, show
from experiments.benchmarks.gpu.jobs import PARTS, Job, Setting, arrays_of
from experiments.benchmarks.gpu.record import Folder
from experiments.benchmarks.gpu.runner import Clock as Time
from experiments.benchmarks.gpu.runner import Runner, Task
from experiments.benchmarks.gpu.timing import (
    PRODUCT,
    Clock,
    Prepared,
    by_name,
    call_seconds,
    calls_of,
    copies_of,
    leads_of,
    programs_of,
    repeated,
)
from experiments.benchmarks.gpu.worker import serve
from experiments.benchmarks.peer import Link, NoAnswer
from experiments.benchmarks.rounds import spread
from fp8rl_jax.errors import UserError
from pallas_kernels.backend import tracing_for
from pallas_kernels.check.cases import OPERATIONS, Case, cases_of
from pallas_kernels.check.sources import closure, fingerprint

MIB = 2**20
KERNELS = ("decode_attention", "write_cache", "blockwise_matmul", "quantize_r")


# timing


def test_a_call_is_what_more_programs_add():
    # 5 ms of products, then programs of 4 calls of 10 us: nothing of the 5 ms is left
    assert call_seconds(5e-3 + 1 * 40e-6, 5e-3 + 11 * 40e-6, programs=10, calls=4) == pytest.approx(
        10e-6
    )
    with pytest.raises(RuntimeError, match="nothing can be said"):
        call_seconds(5e-3, 5e-3, 10, 4)


def test_inputs_are_rotated_past_the_cache():
    for size in (1, 20 * MIB, 100 * MIB, 300 * MIB):
        copies = copies_of(size, cache_bytes=64 * MIB, most=10**9)
        assert (copies - 1) * size >= 4 * 64 * MIB  # read between two uses of the same copy
    assert copies_of(1024 * MIB, 64 * MIB) == 1 and copies_of(1, 64 * MIB) == 16


def test_few_programs_are_queued_of_long_ones_and_of_large_results():
    assert programs_of(1e-3, 0) == 14 and programs_of(5e-3, 0) == 4 and programs_of(1.0, 0) == 1
    assert programs_of(1e-3, 4 * 2**30) == 2 and programs_of(1e-3, 100 * 2**30) == 1


def test_short_calls_are_many_and_the_host_is_given_time_for_them():
    assert (
        calls_of(16, MIB) == 16
        and calls_of(4, 100 * MIB) == 16
        and calls_of(3, 184 * MIB) == 3
        and calls_of(1, 2**30) == 1
    )
    # 7 ms of products; a host that takes 5 ms needs one and a half times as much, and one that
    # takes 200 cannot have it
    assert leads_of(1e-3, 7e-3) == 1 and leads_of(5e-3, 7e-3) == 2 and leads_of(0.2, 7e-3) == 16


def test_repeated_calls_go_through_the_copies_in_turn():
    calls = repeated(lambda x: 2 * x, [(jnp.float32(1),), (jnp.float32(2),)], calls=5)
    assert [float(x) for x in calls] == [2, 4, 2, 4, 2]
    products = (
        jax.jit(partial(repeated, jax.jit(lambda x: x @ x), calls=6))
        .lower([(jnp.eye(4),)] * 3)
        .compile()
    )
    assert products.as_text().count(" dot(") == 6  # none is merged with one of the same inputs


def test_a_sample_says_whether_the_host_was_ahead(monkeypatch):
    clock = Clock(tiny=True)
    clock.ahead_seconds = 6e-3
    prepared = Prepared(
        lambda copies: copies, [(), ()], calls=2, short=1, long=5, about={}, leads=2
    )
    for queued, ahead in ((11e-3, 1.0), (13e-3, 0.0)):
        monkeypatch.setattr(
            clock, "_elapsed", lambda _, programs, queued=queued: (12e-3 + programs * 2e-4, queued)
        )
        assert clock.sample(prepared) == {"seconds": pytest.approx(1e-4), "ahead": ahead}


@pytest.mark.parametrize("late", [1, 3, 8])
def test_what_takes_no_time_in_one_sample_is_timed_more_often(monkeypatch, late):
    """So many T(short) are later than T(long): of the first, of five or of fifteen."""
    clock, delays = Clock(tiny=True), iter([1e-3] * late)
    prepared = Prepared(lambda copies: copies, [(), ()], calls=2, short=1, long=5, about={})

    def elapsed(_, programs):
        return 12e-3 + programs * 2e-4 + (next(delays, 0.0) if programs == 1 else 0.0), 0.0

    monkeypatch.setattr(clock, "_elapsed", elapsed)
    assert clock.sample(prepared)["seconds"] == pytest.approx(1e-4)
    monkeypatch.setattr(clock, "_elapsed", lambda *_: (12e-3, 0.0))
    with pytest.raises(RuntimeError, match="nothing can be said"):
        clock.sample(prepared)


def test_kernels_of_a_trace_are_summed_by_name():
    found = by_name([("a", 1000.0), ("b", 9000.0), ("a", 3000.0)], calls=4)
    assert found == {"b": 2.25, "a": 1.0} and list(found) == ["b", "a"]


# checks

QGMMA = Case("x", lambda key: (), lambda: None, tolerance=1e-6, instruction="QGMMA")


def test_the_bound_allows_a_short_sum_and_no_missing_block():
    draw = np.random.default_rng(0)
    x, w = draw.normal(size=(64, 4096)), draw.normal(size=(4096, 64))
    want, sums = x @ w, abs(x) @ abs(w)
    rounded = want + sums * 2.0**-12
    without_block = want - x[:, :128] @ w[:128]
    assert verdict("matmul", QGMMA, want, want, sums) == {
        "difference": 0.0,
        "of_allowed": 0.0,
        "passed": True,
    }
    assert verdict("matmul", QGMMA, rounded, want, sums)["passed"]
    assert not verdict("matmul", QGMMA, without_block, want, sums)["passed"]
    assert not verdict("matmul", QGMMA, np.where(want == want.max(), np.nan, want), want, sums)[
        "passed"
    ]
    on_device = verdict(
        "matmul", QGMMA, jnp.asarray(without_block), jnp.asarray(want), jnp.asarray(sums)
    )
    assert on_device["of_allowed"] == pytest.approx(
        verdict("matmul", QGMMA, without_block, want, sums)["of_allowed"], rel=1e-3
    )


def test_without_a_tolerance_all_bits_count():
    exact, one = replace(QGMMA, instruction="", tolerance=0.0), np.ones(3, np.float32)
    assert verdict("quantize", exact, (one, one), (one, one), None)["passed"]
    assert not verdict("quantize", exact, (one, np.nextafter(one, 2)), (one, one), None)["passed"]


def test_same_bits_tells_zeros_apart_and_not_nans():
    nan, zero = jnp.array([jnp.nan, 1.0]), jnp.zeros(2, jnp.bfloat16)
    assert same_bits((nan, zero), (nan, zero)) and not same_bits(zero, -zero)


@pytest.mark.parametrize("name", ["groups-of-any-size", "none-of-the-rows", "gradient"])
def test_the_grouped_reference_goes_group_by_group(name):
    case = next(case for case in cases_of("grouped_matmul", "small") if case.name == name)
    arrays = arrays_of(case, jnp.zeros(2, jnp.uint32))
    got = reference_of("grouped_matmul", case)(arrays)
    want = case.expected(*jax.tree.map(np.asarray, arrays))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * max(abs(want).max(), 1))


def test_every_kernel_has_a_part_in_the_first_checks():
    assert tuple(checks.FIRST) == OPERATIONS
    found = set()
    for job in checks.jobs(Setting()):
        if job.first and job.label.startswith("small: "):
            program = lowered_case(job.run.args[2])
            calls = program.split("@mosaic_gpu_v2(")[1:]
            found |= {
                name
                for call in calls
                for name in re.findall(r"(?<![a-z_])([a-z][a-z_]*)_mosaic_gpu", call)
            } - {"stable"}
    assert found == {
        "blockwise_matmul",
        "blockwise_matmul_few_rows",
        "decode_attention",
        "grouped_matmul",
        "grouped_outer_product",
        "invariant_grouped_matmul",
        "invariant_matmul",
        "invariant_matmul_few_rows",
        "invariant_sum",
        "quantize_rms_norm",
        "quantize_rows",
        "quantize_rows_tokens",
        "quantize_square",
        "quantize_swiglu",
        "quantize_tokens",
        "regroup",
        "write_cache",
    }


def lowered_case(case: Case) -> str:
    shapes = jax.eval_shape(case.arguments, jax.random.key(0))
    with tracing_for(132):
        return (
            jax.jit(lambda *a: case.run(*a, backend="hopper"))
            .trace(*shapes)
            .lower(lowering_platforms=("cuda",))
            .as_text()
        )


def test_a_kernels_program_is_the_same_whatever_was_lowered_before():
    """Else no compiled program would be found in the cache again."""
    rows, weight = (
        case for case in cases_of("quantize", "small") if case.name in ("rows", "weight")
    )
    first = lowered_case(rows)
    lowered_case(weight)
    assert lowered_case(rows) == first


# a rehearsal: jobs that hang, crash, are wrong, or have no time; a fake clock, and workers that
# only say how long they take


class FakeTime:
    def __init__(self):
        self.seconds = 1000.0

    def now(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds


class FakeWorker:
    """Takes as long as `takes` says, and answers, hangs, crashes or breaks the device as `does`
    says; by label."""

    def __init__(self, rehearsal):
        self.rehearsal = rehearsal

    def receive(self, seconds):
        self.rehearsal.time.seconds += 5.0
        return {"device": self.rehearsal.device, "facts": {"commit": "c0ffee"}}

    def ask(self, request, seconds):
        rehearsal, label = self.rehearsal, request["label"]
        rehearsal.asked.append(
            (*([] if not request["compile_only"] else ["compile"]), request["part"], label)
        )
        does = "answer" if request["compile_only"] else rehearsal.does.get(label, "answer")
        takes = 1.0 if request["compile_only"] else rehearsal.takes.get(label, 5.0)
        if does == "hang" or takes > seconds:
            rehearsal.time.seconds += seconds
            raise NoAnswer("silence", silent=True)
        rehearsal.time.seconds += takes
        if does == "crash":
            raise NoAnswer("was killed by signal 6: the last words")
        if does == "end":
            raise KeyboardInterrupt  # of the whole command
        if does == "raise":
            rehearsal.does[label] = "answer"  # alone, the second time, it does not
            return {"failed": "RESOURCE_EXHAUSTED", "usable": True}
        if does == "wrong from the cache":
            rehearsal.does[label] = "wrong"
        if does == "fail":
            return {"failed": "no such shape", "usable": True}
        if does == "break":
            return {"failed": "illegal address", "usable": False}
        return {
            "result": {
                "passed": does != "wrong",
                "shape": [1, 1, 1],
                "forward": False,
                "weight_bytes": 0,
            },
            "usable": True,
        }

    def stderr(self):
        return "first words\nlast words"

    def kill(self):
        pass

    def close(self):
        pass


class Rehearsal:
    """Commands on one folder."""

    def __init__(self, path, jobs, does=None, takes=None):
        self.path, self.jobs, self.does, self.takes = path, jobs, does or {}, takes or {}
        self.device, self.time, self.asked, self.started = "NVIDIA H200", FakeTime(), [], []

    def command(self, seconds=1000.0, parts=tuple(PARTS)):
        self.asked, begun = [], self.time.now()

        def start(own):
            self.started.append(own)
            return FakeWorker(self)

        self.folder = Folder(self.path, self.jobs, counts=True)
        left = Runner(
            self.folder, start, seconds, 1, clock=Time(self.time.now, self.time.sleep)
        ).run(parts)
        assert self.time.now() - begun <= seconds
        return left

    def measured(self):
        """What the last command has run, but for compilations, and for the check that tells whether
        the cache is right."""
        return [asked for asked in self.asked if asked[0] != "compile" and asked[-1] != "small"]

    def read(self, part):
        return json.loads((self.path / f"{part}.json").read_text())


LATER = ("decode", "step", "quantize")
"""Parts without a job that is wanted first."""


def fake_jobs(**more):
    """Two checks, one of them small, and three jobs of every other part, the first wanted first;
    `more`: label -> changes."""
    jobs = {"checks": [fake_job("small", "matmul", first=True), fake_job("real", "matmul")]}
    for part in PARTS:
        if part != "checks":
            jobs[part] = [
                fake_job(f"{part} {i}", part, first=i == 0 and part not in LATER) for i in range(3)
            ]
    return {
        part: [replace(job, **more.get(job.label, {})) for job in found]
        for part, found in jobs.items()
    }


def fake_job(label, operation, **more):
    return Job(label, lambda: {}, (), operation, **more)


@pytest.fixture(autouse=True)
def no_card(monkeypatch):
    monkeypatch.setattr(runner.machine, "gpu_state", lambda: {})


def test_what_is_worth_most_comes_first(tmp_path):
    rehearsal = Rehearsal(tmp_path, fake_jobs())
    assert rehearsal.command() == {}
    measured = [label for *kind, _, label in rehearsal.asked if kind != ["compile"]]
    # the small check twice: where it was compiled, and from the cache
    first = [f"{part} 0" for part in ("copy", "matmul", "attention", "grouped", "formats")]
    assert measured[:7] == ["small", "small", *first]
    assert measured[7:13] == [f"{part} {i}" for part in ("decode", "step") for i in range(3)]
    assert measured[-1] == "real"
    compiled = [label for *kind, _, label in rehearsal.asked if kind == ["compile"]]
    assert (
        compiled[:5] == measured[2:7] and rehearsal.asked.index(("compile", "copy", "copy 0")) == 1
    )
    assert not [
        label for label in compiled if label.startswith(("decode", "step", "small", "real"))
    ]
    # what is timed has the card for itself, and most of its memory; what is not shares both
    assert rehearsal.started[2] == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}
    assert rehearsal.started[0] == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def test_a_job_that_hangs_crashes_fails_or_is_wrong_costs_itself_alone(tmp_path):
    does = {"matmul 0": "hang", "attention 1": "crash", "grouped 0": "fail", "quantize 1": "break"}
    rehearsal = Rehearsal(tmp_path, fake_jobs(), does | {"small": "wrong", "real": "raise"})
    assert rehearsal.command() == {}
    hung = rehearsal.read("matmul")["failed"]["matmul 0"]["reason"]
    assert hung == "took longer than 90 s: taken for one that hangs, and ended"
    assert set(rehearsal.read("matmul")["results"]) == {"matmul 1", "matmul 2"}
    assert (
        rehearsal.read("attention")["failed"]["attention 1"]["reason"]
        == "was killed by signal 6: the last words"
    )
    assert rehearsal.read("grouped")["failed"]["grouped 0"]["reason"] == "no such shape"
    assert rehearsal.read("quantize")["failed"]["quantize 1"]["reason"] == "illegal address"
    checked = rehearsal.read("checks")["results"]
    # what raised beside others, for want of memory perhaps, is tried again alone
    assert (
        not checked["small"]["passed"]
        and checked["real"]["passed"]
        and rehearsal.asked[-2:] == [("checks", "real")] * 2
    )
    asked = len(rehearsal.asked)
    assert (
        "==== attention: attention 1: was killed by signal 6"
        in (tmp_path / "workers.log").read_text()
    )
    # what failed is not tried again
    assert rehearsal.command() == {} and rehearsal.asked == [] and asked > 0


def test_a_cache_that_gives_wrong_kernels_is_not_used(tmp_path):
    rehearsal = Rehearsal(tmp_path, fake_jobs(), {"small": "wrong from the cache"})
    assert rehearsal.command() == {}
    assert rehearsal.read("checks")["results"]["small"]["passed"]
    fresh = [own.get("JAX_ENABLE_COMPILATION_CACHE") == "false" for own in rehearsal.started]
    assert fresh[:3] == [False] * 3 and all(fresh[3:]) and len(fresh) > 4
    compiled = [asked[-1] for asked in rehearsal.asked if asked[0] == "compile"]
    # nothing more once that is known
    assert compiled == [
        f"{part} 0" for part in ("copy", "matmul", "attention", "grouped", "formats")
    ]


def test_an_operation_that_hangs_twice_waits_for_the_next_command(tmp_path):
    rehearsal = Rehearsal(
        tmp_path, fake_jobs(), {"small": "hang", "matmul 0": "hang", "matmul 1": "hang"}
    )
    left = rehearsal.command()
    assert left["matmul"] == "2 left: 2 jobs of matmul hung or crashed in this command" and left[
        "checks"
    ].startswith("1 left: 2")
    assert set(left) == {"matmul", "checks"} and rehearsal.read("step")["complete"]
    assert rehearsal.command() == {} and set(rehearsal.read("matmul")["failed"]) == {
        "matmul 0",
        "matmul 1",
    }


def test_a_command_begins_nothing_that_it_might_not_end_and_the_next_goes_on(tmp_path):
    takes = {f"step {i}": 200.0 for i in range(3)} | {"matmul 0": 60.0}
    rehearsal = Rehearsal(
        tmp_path, fake_jobs(**{f"step {i}": {"seconds": 240.0} for i in range(3)}), takes=takes
    )
    left = rehearsal.command(540.0)
    # 200 s of the first, and less than 240 s are left for another
    assert left["step"] == "2 left: out of time"
    assert (
        rehearsal.read("step")["left"] == ["step 1", "step 2"]
        and rehearsal.read("step")["failed"] == {}
    )
    # what fits still runs
    assert rehearsal.read("copy")["complete"] and ("matmul", "matmul 1") in rehearsal.asked
    seen = rehearsal.measured()
    while left:
        left = rehearsal.command(540.0)
        again = rehearsal.measured()
        assert again and not set(again) & set(seen)
        seen += again
    assert all(rehearsal.read(part)["complete"] for part in PARTS)
    assert (
        len(rehearsal.read("step")["commands"]) > 1
        and rehearsal.read("step")["results"]["step 2"]["command"] > 0
    )
    assert rehearsal.command(60.0) == {}


def test_a_command_that_ends_mid_way_keeps_what_was_measured(tmp_path):
    rehearsal = Rehearsal(tmp_path, fake_jobs(), {"attention 0": "end"})
    with pytest.raises(KeyboardInterrupt):
        rehearsal.command()
    assert rehearsal.read("copy")["results"]["copy 0"]["passed"] and rehearsal.read("matmul")[
        "left"
    ] == ["matmul 1", "matmul 2"]
    assert not (tmp_path / "attention.json").exists() and (tmp_path / "figures.json").exists()
    rehearsal.does = {}
    assert rehearsal.command() == {} and rehearsal.read("attention")["failed"] == {}
    assert ("copy", "copy 0") not in rehearsal.asked


def test_what_the_end_of_the_command_cuts_off_is_not_blamed(tmp_path):
    rehearsal = Rehearsal(tmp_path, fake_jobs(**{"copy 0": {"seconds": 200.0}}), {"copy 0": "hang"})
    slow = Runner(
        Folder(tmp_path, rehearsal.jobs, True), lambda own: FakeWorker(rehearsal), 250.0, 1
    )
    slow.clock, slow.end = (
        Time(rehearsal.time.now, rehearsal.time.sleep),
        rehearsal.time.now() + 100.0,
    )
    slow._longest["copy", False] = 20.0  # so it may well be done in 40
    slow.run_alone([Task("copy", rehearsal.jobs["copy"][0])])
    assert slow.folder.left("copy") == rehearsal.jobs["copy"] and not slow.hangs


def test_a_change_of_one_kernel_puts_aside_what_depends_on_it(tmp_path, monkeypatch):
    versions = {"pallas_kernels.matmul": "one", "pallas_kernels.quantize": "one"}
    monkeypatch.setattr(
        record_module, "fingerprint", lambda modules: ",".join(map(versions.get, modules))
    )
    jobs = fake_jobs()
    depends = {"matmul": ("pallas_kernels.matmul",), "quantize": ("pallas_kernels.quantize",)}
    jobs |= {
        part: [replace(job, sources=sources) for job in jobs[part]]
        for part, sources in depends.items()
    }
    rehearsal = Rehearsal(tmp_path, jobs, {"matmul 1": "fail"})
    assert rehearsal.command() == {}
    versions["pallas_kernels.matmul"], rehearsal.does = "two", {}
    before = {part: rehearsal.read(part) for part in PARTS if part != "matmul"}
    assert rehearsal.command() == {} and rehearsal.measured() == [
        ("matmul", f"matmul {i}") for i in range(3)
    ]
    assert before == {part: rehearsal.read(part) for part in PARTS if part != "matmul"}
    matmul = rehearsal.read("matmul")
    assert matmul["failed"] == {} and matmul["outdated"].keys() == matmul["results"].keys()
    assert {found["sources"] for found in matmul["results"].values()} == {"two"}


def test_a_folder_of_another_device_size_or_time_is_refused(tmp_path):
    rehearsal = Rehearsal(tmp_path, fake_jobs())
    rehearsal.command(parts=("copy",))
    rehearsal.device = "NVIDIA H100"
    with pytest.raises(
        UserError, match="has device 'NVIDIA H200', and this is 'NVIDIA H100'; give another folder"
    ):
        rehearsal.command()
    with pytest.raises(UserError, match="has counts True, and this is False"):
        Folder(tmp_path, fake_jobs(), counts=False)
    for text, message in (("[", "cannot be read"), ("{}", "is no record of this command")):
        (tmp_path / "copy.json").write_text(text)
        with pytest.raises(UserError, match=message):
            rehearsal.command()


# the same with processes


WORKER = """
import json, os, sys, time
folder, number = sys.argv[1:]
print(json.dumps({"fault": "no such card"} if number == "faulty" else {"device": "fake", "facts": {}}), flush=True)
for line in sys.stdin:
    label = json.loads(line)["label"]
    if label == "crash": print("the last words", file=sys.stderr, flush=True); os.abort()
    if label == "hang": time.sleep(60)
    if label == "nonsense": print("nonsense", flush=True); continue
    if label.startswith("pair"):
        open(os.path.join(folder, label), "w").close()
        other = os.path.join(folder, {"pair a": "pair b", "pair b": "pair a"}[label])
        while not os.path.exists(other): time.sleep(0.01)
    print(json.dumps({"result": {}, "usable": True}), flush=True)
"""


def real_runner(tmp_path, jobs, faulty=(), absent=()):
    tmp_path.mkdir(exist_ok=True)
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    numbers = iter(range(100))

    def start(own):
        number = next(numbers)
        word = "faulty" if number in faulty else str(number)
        if number in absent:
            return Link([sys.executable, "-S", "-E", "-c", "import nothing_of_the_kind"], {})
        return Link(
            [sys.executable, "-S", "-E", str(script), str(tmp_path), word],
            {"PATH": "/usr/bin:/bin"} | own,
        )

    jobs = {part: jobs if part == "checks" else [] for part in PARTS}
    return Runner(Folder(tmp_path / "out", jobs, False), start, 500.0, 2)


def test_processes_run_together_and_each_job_is_blamed_for_itself(tmp_path):
    labels = {
        "pair a": 30.0,
        "pair b": 30.0,
        "crash": 30.0,
        "hang": 1.0,
        "nonsense": 30.0,
        "last": 30.0,
    }
    runner = real_runner(
        tmp_path, [fake_job(label, label, seconds=seconds) for label, seconds in labels.items()]
    )
    assert runner.run(["checks"]) == {}
    found = json.loads((tmp_path / "out" / "checks.json").read_text())
    assert set(found["results"]) == {"pair a", "pair b", "last"}  # the pair waits for each other
    assert found["failed"]["crash"]["reason"] == "was killed by signal 6: the last words"
    assert (
        found["failed"]["hang"]["reason"]
        == "took longer than 1 s: taken for one that hangs, and ended"
    )
    assert found["failed"]["nonsense"]["reason"] == "answered b'nonsense', which is no JSON object"


def test_a_fault_ends_the_command_at_once(tmp_path):
    begun = time.monotonic()
    with pytest.raises(UserError, match="^no such card$"):
        real_runner(tmp_path, [fake_job("hang", "x"), fake_job("last", "x")], faulty=(1,)).run(
            ["checks"]
        )
    assert time.monotonic() - begun < 30
    assert not (tmp_path / "out" / "checks.json").exists()  # what was ended with it is not blamed


def test_a_worker_that_does_not_start_leaves_its_jobs_to_others(tmp_path):
    jobs = [fake_job("a", "a"), fake_job("b", "b"), fake_job("c", "c")]
    assert real_runner(tmp_path / "one", jobs, absent=(0,)).run(["checks"]) == {}
    left = real_runner(tmp_path / "all", jobs, absent=range(100)).run(["checks"])
    assert left["checks"].startswith(
        "3 left: no process to run it: ended with status 1: ModuleNotFoundError"
    )


# sources


def test_a_result_depends_on_what_it_imports_and_on_nothing_else(tmp_path):
    files = {
        "pallas_kernels/__init__.py": "from pallas_kernels.a import f\nfrom pallas_kernels.b "
        "import g",
        "pallas_kernels/a/__init__.py": "from pallas_kernels.a.api import f",
        "pallas_kernels/a/api.py": "from pallas_kernels import shared\nfrom pallas_kernels.b "
        "import scale\n"
        "def f():\n    from pallas_kernels.a import kernel",
        "pallas_kernels/a/kernel.py": "import pallas_kernels.shared",
        "pallas_kernels/b/__init__.py": "from pallas_kernels.b.api import g, scale",
        "pallas_kernels/b/api.py": "def g():\n    from pallas_kernels.b import kernel\ndef "
        "scale(): pass",
        "pallas_kernels/b/kernel.py": "X = 1",
        "pallas_kernels/shared.py": "import jax",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    names = ("a", "a.api", "a.kernel", "b.api", "shared")
    assert closure(["pallas_kernels.a"], tmp_path) == {f"pallas_kernels.{name}" for name in names}
    assert "pallas_kernels.b.kernel" in closure(["pallas_kernels.a", "pallas_kernels.b"], tmp_path)
    assert closure(["pallas_kernels"], tmp_path) >= {
        "pallas_kernels.a.kernel",
        "pallas_kernels.b.kernel",
    }


def test_a_fix_in_one_kernel_keeps_the_figures_of_the_others():
    jobs = {(part, job.label): job for part in PARTS for job in PARTS[part].jobs(Setting())}

    def on(module):
        return {
            name for name, job in jobs.items() if f"pallas_kernels.{module}" in closure(job.sources)
        }

    whole = {"checks", "decode", "step", "exact"}  # and the library's own loops
    of_attention = on("decode_attention.hopper")
    assert {part for part, _ in of_attention} == whole | {"attention"}
    assert all("attention" in label for part, label in of_attention if part == "checks")
    of_quantizers = on("quantize.hopper")
    # matmul has them timed with it
    assert {part for part, _ in of_quantizers} == whole | {"matmul", "quantize"}
    assert all(": quantize " in label for part, label in of_quantizers if part == "checks")
    assert {part for part, _ in on("matmul.hopper")} == whole | {"matmul", "grouped", "formats"}
    assert {part for part, _ in on("cache_write.hopper")} == whole


def test_comments_do_not_make_a_result_outdated(tmp_path):
    for text, same in (("X = 1\n", True), ("# why\nX  =  1\n", True), ("X = 2\n", False)):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        (root / "experiments").mkdir(parents=True)
        (root / "experiments" / "a.py").write_text(text)
        found = fingerprint(["experiments.a"], root)
        first = found if text == "X = 1\n" else first
        assert (found == first) == same


# the command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: --output"),
        (
            ["--output", "x", "--parts", "copy", "speed"],
            "argument --parts: invalid choice: 'speed' (choose from 'checks',",
        ),
        (
            ["--output", "x", "--tiny", "--parts", "copy", "--minutes", "x"],
            "argument --minutes: invalid float value: 'x'",
        ),
        (["--output", "x", "--minutes", "0"], "--minutes: 0.0 must be above 0"),
        (["--output", "/proc/nowhere", "--tiny"], "--output: /proc/nowhere cannot be written"),
        (["--output", "x"], "JAX_PLATFORMS=cpu keeps JAX from the GPU; unset it, or give --tiny"),
    ],
)
def test_faults_are_one_line(capsys, monkeypatch, words, message):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("benchmarks.gpu: error: ") and message in line


@pytest.mark.parametrize(
    ("smi", "message"),
    [
        ("exit 9", "no NVIDIA GPU: nvidia-smi names none"),
        (
            'echo "NVIDIA A100, 1, 8.0, 1, 1, 1, 1, Disabled"',
            "no Hopper GPU: NVIDIA A100 has compute capability 8.0",
        ),
        ('echo "NVIDIA H200, 1, 9.0, 1, 1, 1, 1, Disabled"', "its CUDA plugin is missing"),
    ],
)
def test_without_a_hopper_gpu_it_says_what_is_missing(tmp_path, capsys, monkeypatch, smi, message):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\n{smi}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--output", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not (tmp_path / "out").exists()


def records(**changes):
    """As the parts leave them, with figures just as good as they must be."""

    def result(over, under, value, **more):
        ratio = {"over": over, "under": under, "part": "seconds", "median": value}
        return {"ratios": [ratio], "seconds": {}, "tflops": {}, **more}

    few = result(
        "XLA bf16", "fp8", 1.6, shape=[16, 24576, 4096], forward=True, weight_bytes=24576 * 4096
    )
    many = result(
        "XLA bf16", "fp8", 1.95, shape=[4096, 4096, 4096], forward=True, weight_bytes=4096 * 4096
    )
    slow = result(
        "XLA bf16", "fp8", 1.4, shape=[4096, 1024, 4096], forward=True, weight_bytes=1024 * 4096
    )
    few["bytes_per_second"] = {"fp8": spread([3e12])}
    found = {
        "copy": {"8 GiB": {"bytes_per_second": {"copy": spread([4e12])}}},
        "matmul": {"few": few, "many": many, "slow": slow},
        "grouped": {"8-groups": result("fp8 dense", "fp8 grouped", 0.9)},
    }
    return {
        part: {"counts": True, "results": results, "failed": {}, "left": []} | changes
        for part, results in found.items()
    }


def statuses(records):
    return {figure.name: (figure.measured(records), figure.status(records)) for figure in FIGURES}


def test_the_table_takes_the_least_and_calls_nothing_met_that_was_not_measured():
    found = statuses(records())
    assert found["matmul, M=4096, Qwen3-8B / XLA bf16, quantized beforehand"] == (
        (1.4, "slow"),
        "missed",
    )
    assert found["matmul, M=1..128, weights of 64 MB and more: bytes / copy"] == (
        (75.0, "few"),
        "met",
    )
    assert found["grouped, 8 groups, M=4096 in all / dense of the same work"] == (
        (0.9, "8-groups"),
        "met",
    )
    assert found["decode attention, FP8 KV: bytes / copy"] == (None, "not measured")
    without = records()
    del without["matmul"]["results"]["slow"]
    assert statuses(without)["matmul, M=4096, Qwen3-8B / XLA bf16, quantized beforehand"] == (
        (1.95, "many"),
        "met, aim too",
    )
    assert {status for _, status in statuses(records(counts=False)).values()} == {"not measured"}
    parts = (training, exact, decode)
    labels = [job.label for part in parts for job in part.jobs(Setting(tiny=True))]
    assert len(FIGURES) == 14 and {figures.STEP, figures.EXACT, figures.DECODE} <= set(labels)


# what only a card runs: its programs, traced and lowered here


@pytest.mark.parametrize(
    ("module", "kernels"),
    [
        (
            products,
            {
                "fp8": True,
                "fp8, x quantized in it": True,
                "XLA bf16": False,
                "cuBLASLt fp8, per tensor": False,
            },
        ),
        (grouped, {"fp8 grouped": True, "fp8 dense": True, "XLA bf16, ragged": False}),
        (attention, {"fp8 cache": True, "bf16 cache": True, "XLA bf16": False}),
        (quantizers, {"ours": True, "XLA": False}),
        (copying, {"copy": False, "read": False}),
    ],
)
def test_the_programs_for_a_card_are_lowered_for_one(monkeypatch, module, kernels):
    """Of each part's first job, at its real shape; cuDNN alone is asked for its version as it is
    traced, and is not here."""
    lowered = {}

    def lower(setting, works, *_, **__):
        for name, work in works.items():
            if name != attention.CUDNN:
                inputs = jax.eval_shape(work.arguments, jax.random.key(0, impl="rbg"))
                with tracing_for(132):
                    program = jax.jit(partial(repeated, jax.jit(work.run))).trace([inputs] * 2)
                    text = program.lower(lowering_platforms=("cuda",)).as_text()
                lowered[name] = "mosaic_gpu" in text
                # a kernel's program is compiled while others are; one that XLA makes of its
                # libraries' products is not
                assert (PRODUCT.search(text) is not None) == (
                    name not in ("copy", "read", "XLA") and not lowered[name]
                )
        return {"ratios": [], "seconds": {}}

    monkeypatch.setattr(module, "compare", lower)
    module.jobs(Setting())[0].run()
    assert lowered == kernels


def test_the_decode_loop_is_lowered_for_a_card(monkeypatch):
    """One layer at the real shape: every side attends and writes by our kernels, and those with FP8
    weights multiply by them."""
    found = {}

    def lower(setting, works, *_, **__):
        for name, work in works.items():
            inputs = jax.eval_shape(work.arguments, jax.random.key(0, impl="rbg"))
            program = jax.jit(work.run).trace(*inputs)
            text = program.lower(lowering_platforms=("cuda",)).as_text()
            found[name] = {kernel for kernel in KERNELS if kernel in text}
        return {"ratios": [], "seconds": {}}

    monkeypatch.setattr(decode, "compare", lower)
    monkeypatch.setattr(decode, "device_memory", lambda: 0)
    with tracing_for(132):
        jobs = {job.label: job for job in decode.jobs(Setting())}
        jobs[figures.DECODE].run()
        assert set(found) == {"bf16", "FP8 weights and cache"}
        result = jobs[f"{figures.DECODE}, by part"].run()
    assert result["layers"] == 1
    always = {"decode_attention", "write_cache"}
    products = always | {"blockwise_matmul", "quantize_r"}
    assert found == {
        "bf16": always,
        "FP8 weights": products,
        "FP8 cache": always,
        "FP8 weights and cache": products,
    }
    read = result["read_bytes"]
    scales = 3 * 4
    assert read["bf16"] - read["FP8 cache"] == 128 * 2048 * 2 * 8 * 128 - scales


# all of it, in miniature


def test_layers_are_as_many_as_fit():
    h200, h100 = (training.workload_for(int(gigabytes * 0.92e9)) for gigabytes in (151, 85))
    assert 10 <= h200.config.num_layers <= 20 and 4 <= h100.config.num_layers <= 8
    assert "of 36 layers" in h200.name and h200.step_recipes == ("bf16", "fp8-e2e-kv")
    assert training.layers_for(10**9, 10**9, 10**8) == 1


def test_all_parts_in_miniature(tmp_path, monkeypatch, capsys):
    """Every part's own code, in this process; what `step` calls has tests of its own, and takes
    longer than all of these."""
    pair = {"over": figures.STEP_BF16, "under": figures.STEP_FP8, "part": "train", "median": 9.0}
    for name in ("grpo_step", "trained_layer"):
        monkeypatch.setattr(
            training,
            name,
            lambda workload, plan: {"workload": workload.describe(), "ratios": [pair]},
        )
    monkeypatch.setattr(training, "compile_step", lambda *_: {})
    # a worker has little to collect; a process with thousands of tests behind it takes seconds a job
    monkeypatch.setattr(gc, "collect", lambda: 0)
    setting = Setting(True, str(tmp_path / "python"), profile=True)
    jobs = {name: part.jobs(setting) for name, part in PARTS.items()}
    folder, answers = Folder(tmp_path / "out", jobs, counts=False), []
    tasks = [
        Task(part, job, only)
        for part in PARTS
        for job in jobs[part]
        for only in (True, False)[not PARTS[part].ahead :]
    ]
    requests = [
        {"part": part, "label": job.label, "compile_only": only} for part, job, only in tasks
    ]
    serve(setting, ["--tiny"], requests, answers.append)
    hello, *answers = answers
    assert hello["facts"]["versions"]["jax"] and len(answers) == len(tasks)
    assert all(answer.get("usable") and "failed" not in answer for answer in answers)
    for task, answer in zip(tasks, answers, strict=True):
        if task.compile_only:
            # products that XLA chooses by timing them are not compiled while others run
            timed = [name for name, compiled in answer["result"]["compiled"].items() if compiled]
            assert timed == (
                []
                if task.part in ("matmul", "grouped", "attention", "formats")
                else list(answer["result"]["compiled"])
            )
        else:
            folder.store(task.part, task.job, answer, hello, 1.0)
    found = {part: json.loads((tmp_path / "out" / f"{part}.json").read_text()) for part in PARTS}
    for of_part in found.values():
        assert (
            of_part["complete"]
            and not of_part["counts"]
            and of_part["failed"] == {}
            and of_part["left"] == []
        )
        assert (
            of_part["commands"][0]["versions"]["jax"] and "T(long) - T(short)" in of_part["method"]
        )
    checked = found["checks"]["results"]
    assert (
        all(result["passed"] for result in checked.values())
        and checked["small: quantize rows"]["runs_equal"]
    )
    copied = found["copy"]["results"]["8 GiB"]
    assert (
        copied["bytes_per_second"]["copy"]["median"] > 0
        and "no GPU" in copied["kernels"]["copy"]["failed"]
    )
    (product,) = found["matmul"]["results"].values()
    assert product["seconds"].keys() == {
        "fp8",
        "fp8, x quantized in it",
        "XLA bf16",
        "cuBLASLt fp8, per tensor",
    }
    assert (
        all("cannot be run" in reason for reason in product["failed"].values())
        and len(product["failed"]) == 2
    )
    assert (
        len(product["raw"]["rounds"]) == 2
        and len(product["ratios"]) == 6
        and product["tflops"]["fp8"]["q1"] > 0
    )
    (grouped,) = found["grouped"]["results"].values()
    assert {ratio["over"] for ratio in grouped["ratios"]} == {"fp8 dense", "XLA bf16, ragged"}
    show(found, Console(width=140))
    said = capsys.readouterr().out
    assert (
        "not measured" in said and " met" not in said and "missed" not in said and "9.00x" in said
    )


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """The library needs, or may need, these, and an image with JAX for CUDA does not have them."""
    missing = tmp_path / "missing"
    missing.mkdir()
    for name in ("tyro", "tomli_w", "reasoning_gym", "math_verify", "cloudpickle", "gguf"):
        (missing / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name}')\n")
    paths = [str(missing), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def test_the_command_starts_workers_on_a_bare_machine_and_goes_on(tmp_path, capfd, bare):
    words = ["--output", str(tmp_path / "out"), "--tiny", "--parts", "quantize"]
    command = [sys.executable, "-m", "experiments.benchmarks.gpu", *words]
    assert subprocess.run(command, check=False).returncode == 0
    assert "quantize: rows: done" in capfd.readouterr().out
    assert main(words) == 0 and "rows: done" not in capfd.readouterr().out
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())["figures"]
    assert len(figures) == 14 and {row["status"] for row in figures} == {"not measured"}
    record = json.loads((tmp_path / "out" / "quantize.json").read_text())
    assert record["commands"][0]["command"][:5] == [
        "python",
        "-m",
        "experiments.benchmarks.gpu",
        "--output",
        ".../out",
    ]
    assert str(Path.home()) not in json.dumps(record)


def test_what_is_compiled_ahead_is_not_compiled_again(tmp_path):
    """Programs of another process are in the cache, under the key that they are looked for."""
    setting = Setting(tiny=True)
    folder = Folder(
        tmp_path, {name: part.jobs(setting) for name, part in PARTS.items()}, counts=False
    )
    command = Runner(folder, partial(runner.start_worker, setting, [], folder.cache), 500.0, 1)
    task, product = (
        Task(part, folder.jobs[part][0], compile_only=True) for part in ("quantize", "matmul")
    )
    # no program of the product, for which XLA may time its libraries'
    assert command.run_parallel([task, product]) == []
    ahead = {file.name for file in folder.cache.glob("jit_repeated-*")}
    command.run_alone([task._replace(compile_only=False)])
    # ours and XLA's, which are one in miniature
    assert folder.left("quantize") == [] and len(ahead) == 1
    assert {file.name for file in folder.cache.glob("jit_repeated-*")} == ahead


def test_the_cache_is_kept_small_enough_to_travel(tmp_path):
    folder = Folder(tmp_path, {part: [] for part in PARTS}, counts=False)
    folder.cache.mkdir()
    for age, name in enumerate(("newest", "middle", "oldest")):
        (folder.cache / name).write_bytes(bytes(100))
        os.utime(folder.cache / name, (1e9 - age, 1e9 - age))
    folder.trim_cache(most=250)
    assert {file.name for file in folder.cache.iterdir()} == {"newest", "middle"}


@pytest.mark.slow
def test_a_step_runs_without_what_a_bare_machine_lacks_from_programs_compiled_before(
    tmp_path, bare
):
    setting = Setting(tiny=True)
    folder = Folder(
        tmp_path / "out", {name: part.jobs(setting) for name, part in PARTS.items()}, counts=False
    )

    def command(jobs):
        start = partial(runner.start_worker, setting, [], folder.cache)
        Runner(folder, start, 500.0, 1).run_alone([Task("step", job) for job in jobs])
        return {file.name for file in folder.cache.iterdir()}

    *programs, step, _ = folder.jobs["step"]
    compiled = command(programs)
    assert len([name for name in compiled if name.startswith("jit_update_program-")]) == 2
    assert command([step]) == compiled  # a new process, which compiles nothing
    assert (
        folder.records["step"]["failed"] == {} and figures.STEP in folder.records["step"]["results"]
    )
