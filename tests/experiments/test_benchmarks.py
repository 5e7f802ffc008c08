"""The standing benchmark: its statistics, its faults, and the GPU's suite in a tiny shape on the
CPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmarks import machine, rounds, suite, uneven
from experiments.benchmarks.__main__ import main
from experiments.benchmarks.arguments import Arguments
from experiments.benchmarks.grpo import make_session
from experiments.benchmarks.rounds import Plan, Round, interleave, ratio, series, spread
from experiments.benchmarks.workloads import (
    CPU_WORKLOADS,
    GPU_WORKLOADS,
    Shape,
    Uneven,
    Workload,
    random_prompts,
)
from fp8rl_jax.models.config import PolicyConfig

# the prompts of the loop's task have 44 tokens
SMALL = Shape(prompts=2, samples=2, prompt_tokens=64, new_tokens=3)
TINY = Workload(
    name="tiny",
    config=PolicyConfig(
        "qwen3", 320, 48, 80, 1, 4, 2, 12, tie_word_embeddings=True, max_position_embeddings=128
    ),
    compute_dtype="float32",
    generation=SMALL,
    step=SMALL,
    loop=SMALL,
    generation_recipes=("bf16", "fp8-rl"),
    step_recipes=("fp8-rl", "bf16"),
    loop_recipes=("fp8-rl",),
    absolute=True,
)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(rounds, "SETTLE_SECONDS", 0.0)


def made(pairs):
    return [Round({"a": {"seconds": a, "gen": a / 2}, "b": {"seconds": b}}, 0.0) for a, b in pairs]


def test_spread_is_numpys_and_a_hand_count():
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "iqr": 2.0}
    assert spread([1.0, 2.0]) == {"median": 1.5, "q1": 1.25, "q3": 1.75, "iqr": 0.5}
    values = np.random.default_rng(0).lognormal(size=17)
    found = spread(values)
    assert found["median"] == pytest.approx(np.median(values))
    assert found["iqr"] == pytest.approx(np.subtract(*np.percentile(values, [75, 25])))


def test_ratios_are_of_pairs_not_of_medians():
    timed = made([(2.0, 1.0), (9.0, 3.0), (4.0, 8.0)])
    found = ratio(timed, "a", "b")
    assert found["pairs"] == [2.0, 3.0, 0.5] and found["median"] == 2.0
    assert found["median"] != np.median(series(timed, "a", "seconds")) / np.median(
        series(timed, "b", "seconds")
    )
    assert (found["over"], found["under"], found["part"]) == ("a", "b", "seconds")


def test_rounds_take_turns_and_warm_up_apart():
    calls = []
    sides = {
        name: lambda i, name=name: calls.append((i, name)) or {"seconds": 1.0} for name in "abc"
    }
    timed = interleave(sides, Plan(rounds=2, warmup=1))
    assert calls == [
        (0, "a"),
        (0, "b"),
        (0, "c"),
        (1, "b"),
        (1, "c"),
        (1, "a"),
        (2, "c"),
        (2, "a"),
        (2, "b"),
    ]
    assert len(timed.warmup) == 1 and [list(r.seconds) for r in timed.rounds] == [
        ["b", "c", "a"],
        ["c", "a", "b"],
    ]


def test_memory_of_a_side_is_its_own_peak():
    """Not that of the side before it, in the same process or in another."""
    sides = {
        "large": lambda number: {"seconds": float(np.ones(2**25).sum())},  # 256 MiB
        "small": lambda number: {"seconds": 1.0},
        "elsewhere": lambda number: {"seconds": 1.0},
    }
    with subprocess.Popen(["sleep", "60"]) as process:
        known = {"large": os.getpid(), "small": os.getpid(), "elsewhere": process.pid}
        timed = interleave(sides, Plan(rounds=2, warmup=1), processes=known)
        process.kill()
    for round in timed.rounds:
        peaks = round.peak_bytes
        assert 240 * 2**20 < peaks["large"] - peaks["small"] < 280 * 2**20
        assert 0 < peaks["elsewhere"] < 16 * 2**20


@pytest.mark.slow
def test_gpu_suite_in_a_tiny_shape(tmp_path):
    output = tmp_path / "new" / "out.json"
    suite.run_all([TINY], Arguments(str(output), rounds=2), {})
    record = json.loads(output.read_text())
    assert (
        record["complete"]
        and record["commit"]
        and record["versions"]["jax"]
        and record["skipped"] == []
    )
    generation, step, loop = record["benchmarks"]
    for entry in record["benchmarks"]:
        assert len(entry["raw"]["rounds"]) == 2 and len(entry["raw"]["warmup"]) == 1
        assert all(len(r["pairs"]) == 2 and r["median"] > 0 for r in entry["ratios"])
    assert generation["tokens_per_second"].keys() == {"fp8rl_jax/bf16", "fp8rl_jax/fp8-rl"}
    assert step["seconds"]["fp8rl_jax/bf16"].keys() == {"seconds", "gen", "train", "sync"}
    assert step["seconds"]["fp8rl_jax/fp8-rl"].keys() == {
        "seconds",
        "gen",
        "train",
        "calibrate",
        "sync",
    }
    assert [r["part"] for r in step["ratios"]] == ["seconds", "gen", "train", "sync"]
    round = step["raw"]["rounds"][0]["seconds"]["fp8rl_jax/fp8-rl"]
    assert round.pop("seconds") > sum(round.values()) > 0  # the rest: advantages, mismatch, metrics
    assert loop["seconds"].keys() == {"loop", "direct"} and loop["seconds"]["loop"].keys() >= {
        "seconds",
        "gen",
        "sync",
    }
    assert loop["target"] == 1.1 and loop["raw"]["rounds"][0]["seconds"]["loop"]["seconds"] > 0


@pytest.mark.slow
def test_times_of_a_cpu_are_raw_data(tmp_path):
    output = tmp_path / "out.json"
    suite.run_all(
        [replace(TINY, absolute=False)], Arguments(str(output), ("generation",), rounds=1), {}
    )
    (entry,) = json.loads(output.read_text())["benchmarks"]
    assert "seconds" not in entry and "tokens_per_second" not in entry
    assert entry["raw"]["seconds"]["fp8rl_jax/bf16"]["seconds"]["median"] > 0


@pytest.mark.slow
def test_sides_name_engines(tmp_path):
    output = tmp_path / "out.json"
    tiny = replace(TINY, generation_recipes=("static/bf16", "static/fp8-rl"))
    suite.run_all([tiny], Arguments(str(output), ("generation",), rounds=1), {})
    (entry,) = json.loads(output.read_text())["benchmarks"]
    assert list(entry["sides"]) == ["fp8rl_jax/static/bf16", "fp8rl_jax/static/fp8-rl"]
    session = make_session(tiny, SMALL, "static/bf16-plain", tiny.load_policy())
    assert (session.config.recipe, session.config.rollout.engine) == ("bf16", "static")
    assert session.config.precision.exact is False


def test_lengths_are_log_normal_and_the_same_for_all():
    shape = CPU_WORKLOADS[0].uneven
    logs = np.log(shape.lengths)
    assert len(shape.lengths) == shape.rows == 256
    assert shape.lengths.max() == shape.new_tokens == 20 * np.median(shape.lengths)
    assert shape.lengths.min() >= 1 and shape.tokens == shape.lengths.sum()
    np.testing.assert_array_equal(shape.lengths, replace(shape).lengths)
    assert abs(np.mean(logs) - np.log(shape.median)) < 0.1 and 0.8 < np.std(logs) < 1.2
    assert 0.6 < np.mean(abs(logs - np.mean(logs)) < np.std(logs)) < 0.75  # a normal's: 0.68
    order = np.argsort(shape.lengths)
    assert abs(np.corrcoef(order, np.arange(256))[0, 1]) < 0.2  # the prompts are in no order


UNEVEN = replace(
    TINY,
    name="uneven",
    uneven=Uneven(prompts=8, samples=2, prompt_tokens=4, new_tokens=9, median=3),
    uneven_recipes=("static/bf16", "paged/bf16"),
)


@pytest.mark.slow
def test_uneven_generation_in_a_tiny_shape(tmp_path, monkeypatch):
    monkeypatch.setattr(uneven, "BATCHES", (3, 4, 8, 16, 32))  # 3: samples apart; 32: too many
    output = tmp_path / "out.json"
    suite.run_all([UNEVEN], Arguments(str(output), ("uneven_generation",), rounds=2), {})
    (entry,) = json.loads(output.read_text())["benchmarks"]
    assert entry["benchmark"] == "uneven_generation" and entry["shape"]["median"] == 3
    (pair,) = entry["ratios"]
    assert (pair["over"], pair["under"]) == ("fp8rl_jax/static/bf16", "fp8rl_jax/paged/bf16")
    static, paged = entry["raw"]["engines"].values()
    assert list(static["tried"]) == ["4", "8", "16"] and not paged["tried"]
    assert static["tried"][str(static["rows"])] == min(static["tried"].values())
    assert len(static["metrics"]) == 3  # of the warm-up, too
    assert paged["rows"] == 16 and paged["metrics"][0]["rollout/decode_steps"] == 9
    rounds_of = [r["seconds"]["fp8rl_jax/static/bf16"]["seconds"] for r in entry["raw"]["rounds"]]
    assert entry["tokens_per_second"]["fp8rl_jax/static/bf16"]["median"] == pytest.approx(
        np.mean([UNEVEN.uneven.tokens / seconds for seconds in rounds_of])
    )


def test_batches_that_fit_the_cache(monkeypatch):
    shape, config = UNEVEN.uneven, UNEVEN.config
    monkeypatch.setattr(uneven, "BATCHES", (2, 4, 8, 16))
    row = 13 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    monkeypatch.setattr(uneven, "CACHE_BYTES", 8 * row)
    assert uneven._fitting(config, shape, "float32") == [2, 4, 8]
    assert uneven._fitting(config, shape, "bfloat16") == [2, 4, 8, 16]


def test_a_completion_of_another_length_is_an_error(monkeypatch):
    session = make_session(UNEVEN, UNEVEN.uneven, "static/bf16", UNEVEN.load_policy())
    side = uneven.UnevenRollout(session, random_prompts(UNEVEN.uneven, 320), UNEVEN.uneven)
    assert side(0)["seconds"] > 0
    generate = session.engine.generate
    monkeypatch.setattr(
        session.engine, "generate", lambda *a, limits: generate(*a, limits=limits + 1)
    )
    with pytest.raises(RuntimeError, match="another length"):
        side(1)


def test_past_the_deadline_nothing_begins(tmp_path):
    output = tmp_path / "out.json"
    suite.run_all([TINY], Arguments(str(output)), {}, deadline=0.0)
    record = json.loads(output.read_text())
    assert record["benchmarks"] == []
    assert record["skipped"] == [
        "generation, tiny",
        "grpo_step, tiny",
        "loop_overhead, tiny, fp8-rl",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [],
            "--transformers-python: generation is compared with transformers; give its "
            "interpreter, or --peers none",
        ),
        (["--benchmarks", "grpo_step"], "--tunix-python: grpo_step is compared with tunix"),
        (
            ["--transformers-python", "/nowhere/python"],
            "--transformers-python: /nowhere/python is not there",
        ),
        (["--peers", "none", "--tunix-python", "x"], "--peers none contradicts --tunix-python"),
        (
            ["--peers", "none", "--workloads", "Qwen3", "GPT"],
            "--workloads: 'GPT' is in none of the names: SmolLM2-135M-Instruct",
        ),
        (["--rounds", "0"], "--rounds: 0 must be at least 1"),
    ],
)
def test_faults_are_one_line(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.setattr(machine, "limit_threads", lambda threads: None)
    assert main(["--output", str(tmp_path / "out.json"), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not list(tmp_path.iterdir())


def test_workloads_are_chosen_by_a_word_of_their_name():
    words = ("Qwen3", "experts")
    names = [w.name for w in suite.chosen(CPU_WORKLOADS, Arguments("x", workloads=words))]
    assert names == ["Qwen3-0.6B's shape", "the demo with experts, exact"]
    assert suite.chosen(CPU_WORKLOADS, Arguments("x")) == list(CPU_WORKLOADS)


def test_card_and_monitor_read_nvidia_smi(tmp_path, monkeypatch):
    assert machine.gpu() == {} or "name" in machine.gpu()
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        '#!/bin/sh\ncase "$*" in\n*name*) echo "NVIDIA H200, 1.2.3, 9.0, 143771, 1980, 3201, '
        '700.00, Disabled";;\n'
        '*) echo "1980, 3201, 350.5, 40, 99"; echo "1500, 3201, [N/A], 41, 97"; exec sleep '
        "30;;\nesac\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("JAX_PLATFORMS")
    assert (
        machine.has_gpu()
        and machine.gpu()["name"] == "NVIDIA H200"
        and machine.gpu()["compute_cap"] == "9.0"
    )
    with machine.GpuMonitor() as monitor:
        while not Path(f"/proc/{monitor._process.pid}/comm").read_text().startswith("sleep"):
            pass
    seen = monitor.summary()
    assert seen["clocks.sm"]["least"] == 1500 and seen["clocks.sm"]["largest"] == 1980
    assert seen["power.draw"]["median"] == 350.5


def test_record_names_no_place_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["x", "--tunix-python", f"{tmp_path}/venv/bin/python", "--rounds", "3"]
    )
    found = machine.facts()
    assert found["command"][3:] == ["--tunix-python", ".../python", "--rounds", "3"]
    assert str(Path.home()) not in json.dumps(found)


def test_workloads_fit_the_models():
    for workload in GPU_WORKLOADS:
        assert 0.5e9 < workload.describe()["parameters"] < 2.1e9
        assert workload.step.prompts % workload.micro_batch_prompts == 0
    prompts = random_prompts(SMALL, 100)
    assert len(
        {tuple(row) for row in prompts.tokens}
    ) == SMALL.prompts and prompts.lengths.tolist() == [64, 64]
    assert prompts.tokens.min() >= 25 and SMALL.rows == 4 and SMALL.tokens == 12
