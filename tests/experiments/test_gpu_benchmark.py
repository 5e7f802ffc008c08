"""The command for a card: its arithmetic, how it goes on after a crash, its faults, and all of it in miniature on the CPU."""

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from experiments.benchmarks.gpu import attention, copying, figures, grouped, products, quantizers, runner, training
from experiments.benchmarks.gpu.__main__ import main
from experiments.benchmarks.gpu.bounds import same_bits, verdict
from experiments.benchmarks.gpu.figures import FIGURES
from experiments.benchmarks.gpu.parts import PARTS
from experiments.benchmarks.gpu.profile import by_name
from experiments.benchmarks.gpu.record import begin
from experiments.benchmarks.gpu.references import reference_of
from experiments.benchmarks.gpu.setting import Setting, arrays_of
from experiments.benchmarks.gpu.table import show
from experiments.benchmarks.gpu.timing import Clock, Prepared, call_seconds, copies_of, programs_of, repeated
from experiments.benchmarks.gpu.worker import run_part
from experiments.benchmarks.stats import spread
from fp8rl_jax.errors import UserError
from pallas_kernels.check.cases import Case, cases_of
from pallas_kernels.target import tracing_for

MIB = 2**20


# timing


def test_a_call_is_what_more_programs_add():
    # 5 ms of products, then programs of 4 calls of 10 us: nothing of the 5 ms is left
    assert call_seconds(5e-3 + 1 * 40e-6, 5e-3 + 11 * 40e-6, programs=10, calls=4) == pytest.approx(10e-6)
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


def test_a_sample_says_whether_the_host_was_ahead(monkeypatch):
    clock = Clock(tiny=True)
    clock.ahead_seconds = 6e-3
    prepared = Prepared(lambda copies: copies, [(), ()], short=1, long=5, about={})
    for queued, ahead in ((5e-3, 1.0), (7e-3, 0.0)):
        monkeypatch.setattr(clock, "_elapsed", lambda _, programs, queued=queued: (6e-3 + programs * 2e-4, queued))
        assert clock.sample(prepared) == {"seconds": pytest.approx(1e-4), "ahead": ahead}


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
    assert verdict("matmul", QGMMA, want, want, sums) == {"difference": 0.0, "of_allowed": 0.0, "passed": True}
    assert verdict("matmul", QGMMA, rounded, want, sums)["passed"]
    assert not verdict("matmul", QGMMA, without_block, want, sums)["passed"]
    assert not verdict("matmul", QGMMA, np.where(want == want.max(), np.nan, want), want, sums)["passed"]
    on_device = verdict("matmul", QGMMA, jnp.asarray(without_block), jnp.asarray(want), jnp.asarray(sums))
    assert on_device["of_allowed"] == pytest.approx(verdict("matmul", QGMMA, without_block, want, sums)["of_allowed"], rel=1e-3)


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
    want = case.expected(*map(np.asarray, arrays))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * max(abs(want).max(), 1))


# parts: crashes, hangs, and going on

WORKER = """
import json, os, sys, time
path, jobs = sys.argv[1], sys.argv[2].split(",")
new = {"running": None, "results": {}, "failed": {}, "skipped": [], "complete": False, "counts": True}
record = json.load(open(path)) if os.path.exists(path) else new
def write():
    with open(path + ".new", "w") as file: json.dump(record, file)
    os.replace(path + ".new", path)
for job in jobs:
    if job in record["results"] or job in record["failed"]: continue
    if job == "refused": print("fault: no such thing\\nlast words", file=sys.stderr); sys.exit(2)
    if job == "lost": sys.exit("cannot import")
    record["running"] = job; write()
    if job == "crash": print("the last words", file=sys.stderr); os.abort()
    if job == "hang": time.sleep(60)
    if job == "unusable": record["failed"][job] = "broken"; record["running"] = None; write(); sys.exit(3)
    record["results"][job] = {}; record["running"] = None; write()
record["complete"] = True; write()
"""
PART = replace(PARTS["copy"], seconds=300.0, stall_seconds=1.0)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(runner, "RESTART_SECONDS", 0.0)


def run_fake(tmp_path, jobs, end=float("inf")):
    script, path, starts = tmp_path / "worker.py", tmp_path / "copy.json", []
    script.write_text(WORKER)

    def command(part, path, seconds):
        starts.append(seconds)
        return [sys.executable, "-S", "-E", str(script), str(path), jobs]

    fault = runner.run_part(PART, path, end, command, {"PATH": "/usr/bin:/bin"})
    return fault, json.loads(path.read_text()) if path.exists() else None, len(starts)


def test_a_job_that_crashes_hangs_or_breaks_the_device_costs_itself_alone(tmp_path):
    fault, record, starts = run_fake(tmp_path, "a,crash,b,unusable,c,hang,d")
    assert fault == "" and record["complete"] and starts == 4
    assert set(record["results"]) == set("abcd") and set(record["failed"]) == {"crash", "unusable", "hang"}
    assert record["failed"]["crash"] == "killed by signal 6: the last words"
    assert record["failed"]["hang"] == "took longer than 1 s: taken for one that hangs, and ended"


def test_what_fails_before_any_job_is_not_tried_again(tmp_path):
    assert run_fake(tmp_path, "lost") == ("ended with status 1: cannot import", None, 1)
    with pytest.raises(UserError, match="^no such thing$"):
        run_fake(tmp_path, "refused")


def test_what_is_cut_off_by_the_clock_is_not_blamed(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "ENDING_SECONDS", 0.3)
    fault, record, starts = run_fake(tmp_path, "a,hang", end=runner.time.monotonic() + 0.8)
    assert fault == "" and starts == 1 and record["failed"] == {} and record["running"] == "hang"


def test_complete_parts_are_not_run_again_and_those_without_time_are_named(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(runner, "run_part", lambda part, *_: ran.append(part.name) or "a fault")
    (tmp_path / "copy.json").write_text(json.dumps({"complete": True}))
    (tmp_path / "matmul.json").write_text(json.dumps({"complete": False}))
    setting = Setting(tiny=True)
    assert runner.run(["copy", "matmul"], tmp_path, setting, 1.0, []) == {"matmul": "a fault"} and ran == ["matmul"]
    assert runner.run(["copy", "matmul"], tmp_path, setting, 0.1, []) == {"matmul": "out of time"} and ran == ["matmul"]


def test_a_file_of_another_device_is_not_gone_on_with(tmp_path):
    path = tmp_path / "copy.json"
    path.write_text(json.dumps(begin(path, "copy", "NVIDIA H100", False, "", {}) | {"running": "a"}))
    assert begin(path, "copy", "NVIDIA H100", False, "", {})["running"] is None
    with pytest.raises(UserError, match="has device 'NVIDIA H100', and this is 'NVIDIA H200'; give another folder"):
        begin(path, "copy", "NVIDIA H200", False, "", {})
    path.write_text("[")
    with pytest.raises(UserError, match="cannot be read"):
        begin(path, "copy", "NVIDIA H100", False, "", {})


# the command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: --output"),
        (["--output", "x", "--parts", "copy", "speed"], "argument --parts: invalid choice: 'speed' (choose from 'checks',"),
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
        ('echo "NVIDIA A100, 1, 8.0, 1, 1, 1, 1, Disabled"', "no Hopper GPU: NVIDIA A100 has compute capability 8.0"),
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

    few = result("XLA bf16", "fp8", 1.6, shape=[16, 24576, 4096], forward=True, weight_bytes=24576 * 4096)
    many = result("XLA bf16", "fp8", 1.95, shape=[4096, 4096, 4096], forward=True, weight_bytes=4096 * 4096)
    slow = result("XLA bf16", "fp8", 1.4, shape=[4096, 1024, 4096], forward=True, weight_bytes=1024 * 4096)
    few["bytes_per_second"] = {"fp8": spread([3e12])}
    found = {
        "copy": {"8 GiB": {"bytes_per_second": {"copy": spread([4e12])}}},
        "matmul": {"few": few, "many": many, "slow": slow},
        "grouped": {"8-groups": result("fp8 dense", "fp8 grouped", 0.9)},
    }
    return {part: {"counts": True, "results": results, "failed": {}, "skipped": []} | changes for part, results in found.items()}


def statuses(records):
    return {figure.name: (figure.measured(records), figure.status(records)) for figure in FIGURES}


def test_the_table_takes_the_least_and_calls_nothing_met_that_was_not_measured():
    found = statuses(records())
    assert found["matmul, M=4096, Qwen3-8B / XLA bf16, quantized beforehand"] == ((1.4, "slow"), "missed")
    assert found["matmul, M=1..128, weights of 64 MB and more: bytes / copy"] == ((75.0, "few"), "met")
    assert found["grouped, 8 groups, M=4096 in all / dense of the same work"] == ((0.9, "8-groups"), "met")
    assert found["decode attention, FP8 KV: bytes / copy"] == (None, "not measured")
    without = records()
    del without["matmul"]["results"]["slow"]
    assert statuses(without)["matmul, M=4096, Qwen3-8B / XLA bf16, quantized beforehand"] == ((1.95, "many"), "met, aim too")
    assert {status for _, status in statuses(records(counts=False)).values()} == {"not measured"}
    assert len(FIGURES) == 10 and figures.STEP in dict(_fake_step_jobs())


# what only a card runs: its programs, traced and lowered here


@pytest.mark.parametrize(
    ("module", "kernels"),
    [
        (products, {"fp8": True, "fp8, x quantized in it": True, "XLA bf16": False, "cuBLASLt fp8, per tensor": False}),
        (grouped, {"fp8 grouped": True, "fp8 dense": True, "XLA bf16, ragged": False}),
        (attention, {"fp8 cache": True, "bf16 cache": True, "XLA bf16": False}),
        (quantizers, {"ours": True, "XLA": False}),
        (copying, {"copy": False, "read": False}),
    ],
)
def test_the_programs_for_a_card_are_lowered_for_one(tmp_path, monkeypatch, module, kernels):
    """Of each part's first job, at its real shape; cuDNN alone is asked for its version as it is traced, and is not here."""
    lowered = {}

    def lower(setting, clock, works, *_, **__):
        for name, work in works.items():
            if name != attention.CUDNN:
                inputs = jax.eval_shape(work.arguments, jax.random.key(0, impl="rbg"))
                with tracing_for(132):
                    program = jax.jit(partial(repeated, jax.jit(work.run))).trace([inputs] * 2)
                    lowered[name] = "mosaic_gpu" in program.lower(lowering_platforms=("cuda",)).as_text()
        return {"ratios": [], "seconds": {}}

    def first_job():
        with ExitStack() as stack:
            _, job = module.jobs(Setting(torch_python=str(tmp_path / "python")), stack)[0]
            return job()

    monkeypatch.setattr(module, "compare", lower)
    monkeypatch.setattr(module, "Clock", lambda tiny: None)
    first_job()
    assert lowered == kernels


# all of it, in miniature


def _fake_step_jobs():
    return [(label, job.args) for label, job in training.jobs(Setting(tiny=True), None)]


def test_layers_are_as_many_as_fit():
    h200, h100 = (training.workload_for(int(gigabytes * 0.92e9)) for gigabytes in (151, 85))
    assert 10 <= h200.config.num_layers <= 20 and 4 <= h100.config.num_layers <= 8
    assert "of 36 layers" in h200.name and h200.step_recipes == ("bf16", "fp8-e2e-kv")
    assert training.layers_for(10**9, 10**9, 10**8) == 1


def test_all_parts_in_miniature(tmp_path, monkeypatch, capsys):
    """Every part's own code, in this process; what `step` calls has tests of its own, and takes longer than all of these."""
    pair = {"over": figures.STEP_BF16, "under": figures.STEP_FP8, "part": "train", "median": 9.0}
    for name in ("grpo_step", "trained_layer"):
        monkeypatch.setattr(training, name, lambda workload, plan: {"workload": workload.describe(), "ratios": [pair]})
    found = {}
    for part in PARTS.values():
        path, setting = tmp_path / f"{part.name}.json", Setting(True, str(tmp_path / "python"), profile=part.name == "copy")
        assert run_part(part, path, setting, 100.0, ["--tiny"]) == 0
        found[part.name] = record = json.loads(path.read_text())
        assert record["complete"] and not record["counts"] and record["running"] is None and record["skipped"] == []
        assert record["processes"][0]["versions"]["jax"] and "T(long) - T(short)" in record["method"]
        assert record["failed"] == {}
    checked = found["checks"]["results"]
    assert all(result["passed"] for result in checked.values()) and checked["small: quantize rows"]["runs_equal"]
    copied = found["copy"]["results"]["8 GiB"]
    assert copied["bytes_per_second"]["copy"]["median"] > 0 and "no GPU" in copied["kernels"]["copy"]["failed"]
    (product,) = found["matmul"]["results"].values()
    assert product["seconds"].keys() == {"fp8", "fp8, x quantized in it", "XLA bf16", "cuBLASLt fp8, per tensor"}
    assert all("cannot be run" in reason for reason in product["failed"].values()) and len(product["failed"]) == 2
    assert len(product["raw"]["rounds"]) == 2 and len(product["ratios"]) == 6 and product["tflops"]["fp8"]["q1"] > 0
    (grouped,) = found["grouped"]["results"].values()
    assert {ratio["over"] for ratio in grouped["ratios"]} == {"fp8 dense", "XLA bf16, ragged"}
    show(found, Console(width=140))
    said = capsys.readouterr().out
    assert "not measured" in said and " met" not in said and "missed" not in said and "9.00x" in said


def test_the_command_starts_a_process_a_part_and_goes_on(tmp_path, capfd):
    words = ["--output", str(tmp_path / "out"), "--tiny", "--parts", "copy"]
    assert main(words) == 0 and "copy: 8 GiB ..." in capfd.readouterr().out
    assert main(words) == 0 and "copy: complete" in capfd.readouterr().out
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())["figures"]
    assert len(figures) == 10 and {row["status"] for row in figures} == {"not measured"}
    record = json.loads((tmp_path / "out" / "copy.json").read_text())
    assert record["processes"][0]["command"][:5] == ["python", "-m", "experiments.benchmarks.gpu", "--output", ".../out"]
    assert str(Path.home()) not in json.dumps(record)
