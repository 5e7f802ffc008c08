"""Run directories as training leaves them, with curves that can be predicted, and the results of a
comparison."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

LAYERS = 9
PROMPT = "What is <b>3</b> + 5? & \"quote\" <script>alert('prompt')</script>"


def write_run(
    directory: Path,
    recipe: str,
    steps: int = 60,
    k3: float = 2e-3,
    dtype: str = "float32",
    seed: int | None = None,
    lift: float = 0.0,
) -> Path:
    """A run of `steps` steps whose reward goes from 0.2 to 0.9 in a straight line; evaluated every
    10 steps. `lift` is added to rewards and accuracies."""
    directory.mkdir(parents=True)
    rows = []
    for step in range(steps):
        part = step / (steps - 1)
        row = {
            "step": step,
            "time": 1.7e9 + step,
            "reward/mean": 0.2 + 0.7 * part + lift,
            "mismatch/k3": k3 * (1 + 0.3 * math.sin(step)),
            "rollout/stale_tokens": 0.1 * (step > 0),
            "sync/arrived": 0.9 + 0.1 * part,
            "sync/noise": 3.0 - part,
            "mismatch/token_mult_prob_error": 1 + 10 * k3,
            "entropy": 1.2 - part,
            "completions/mean_length": 9 - 4 * part,
            "time/step": 2.0 if step else 30.0,
            "time/gen": 1.0,
            "time/train": 0.5,
            "time/sync": 0.1,
            "perf/tok_per_s_gpu": (1000.0 + 1000 * lift) if step else 60.0,
            "perf/memory_peak_gib": 7.25,
        }
        if step % 10 == 0 or step == steps - 1:
            accuracy = 0.3 + 0.6 * part + lift
            low, high = accuracy - 0.05, accuracy + 0.05
            row |= {"eval/accuracy": accuracy, "eval/accuracy_low": low, "eval/accuracy_high": high}
        rows.append(row)
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    samples: list[dict[str, Any]] = [
        {
            "step": step,
            "prompt": PROMPT,
            "completion": f"completion of step {step}",
            "answer": "8",
            "reward": 1.0,
        }
        for step in (0, 30, steps - 1)
    ]
    samples.append(
        {"step": 0, "prompt": "long", "completion": "x" * 3000, "answer": None, "reward": 0.125}
    )
    (directory / "samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in samples))
    top = f'output = "{directory.name}"\nrecipe = "{recipe}"\ncompute_dtype = "{dtype}"\n'
    top += "" if seed is None else f"seed = {seed}\n"
    config = f"{top}[trainer]\nsteps = {steps}\n[rollout]\ntemperature = 1.0\n"
    (directory / "config.toml").write_text(config)
    (directory / "run.json").write_text(
        json.dumps({"versions": {"jax": "0.11.2"}, "command": "fp8rl train"})
    )
    return directory


WHY = "step 30: <b>loss</b> is not a number"
METHODS = "Arms are held against bf16 seed by seed & adjusted by <i>Holm</i>."


def write_ablation(directory: Path, arms=("bf16", "fp8-rl", "jet-rl"), seeds=5, steps=60) -> Path:
    """An ablation: arm i's accuracy is i percent lower, seeds spread by 1 percent, and in the last
    arm one run collapsed half way and one has no directory. Returns the record."""
    directory.mkdir(parents=True, exist_ok=True)
    entries = []
    for index, arm in enumerate(arms):
        runs = []
        for seed in range(seeds):
            run = {"seed": seed, "directory": f"{arm}-{seed}", "status": "finished", "why": ""}
            lift = 0.01 * (seed - (seeds - 1) / 2 + 0.3 * math.sin(7 * seed + index)) - 0.01 * index
            series = {"eval/accuracy": {"steps": [0, steps], "values": [0.2, 0.9 + lift]}}
            run |= {"series": series, "devices": ["cpu:cpu"], "commit": "c0ffee"}
            runs.append(run | {"outcome": 0.9 + lift})
            length = steps
            if index and index == len(arms) - 1 and seed == 1:
                runs[-1] |= {"status": "failed", "why": WHY, "outcome": None}
                continue
            if index and index == len(arms) - 1 and seed == 3:
                runs[-1] |= {"status": "collapsed", "why": "reward under 0.1", "outcome": 0.1}
                length = steps // 2
            k3 = 2e-3 * (index + 1) * (1 + 0.05 * math.sin(seed))
            run = write_run(directory / f"{arm}-{seed}", arm, steps, k3, seed=seed, lift=lift)
            lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
            (run / "metrics.jsonl").write_text("".join(lines[:length]))
        settings = {"recipe": arm, "rollout.temperature": 1.0}
        entries.append(
            {"name": arm, "recipe": arm, "compute_dtype": "float32", "settings": settings}
            | {"runs": runs}
        )
    comparisons = [
        {
            "arm": arm,
            "baseline": arms[0],
            "n": seeds,
            "difference": {"mean": -0.01 * index, "low": -0.034, "high": 0.013, "n": seeds},
            "correlation": 0.9,
            "detectable": 0.03,
            "verdict": "no worse",
            "more_pairs": None,
            "collapsed": 0,
            "baseline_collapsed": 0,
            "alpha": 0.05,
            "problems": 0,
            "sentence": f"{arm} - {arms[0]}: {-0.01 * index:.3f} (-0.034, 0.013), {seeds} seeds: "
            "no worse within 0.04",
        }
        for index, arm in enumerate(arms)
        if index
    ]
    record = {
        "version": 2,
        "name": "demo <b>",
        "question": "Does FP8 cost accuracy here, and does it buy time?",
        "baseline": arms[0],
        "metric": {"name": "eval/accuracy", "better": "higher", "margin": 0.04},
        "judge": "",
        "alpha": 0.05,
        "look": [1, 1],
        "seeds": list(range(seeds)),
        "arms": entries,
        "comparisons": comparisons,
        "methods": METHODS,
        "command": "fp8rl ablate demo.toml",
        "made": "2026-01-01T00:00:00+00:00",
    }
    path = directory / "ablation.json"
    path.write_text(json.dumps(record))
    return path


def numbers(error):
    """A difference whose relative error is `error`."""
    return {
        "elements": 8,
        "differing": float(error > 0),
        "relative_error": error,
        "snr_db": None,
        "max_abs": error,
    }


def operation(name, own, output, cause=""):
    return {
        "name": name,
        "cause": cause,
        "detail": "",
        "output": numbers(output),
        "own": numbers(own),
        "operands": {},
    }


def write_comparison(directory, detail="weight: e4m3 against <b>float32</b>"):
    """Every layer: q_proj in another format, attention another sum, o_proj equal by itself, a norm
    that is equal."""
    directory.mkdir(parents=True, exist_ok=True)
    operations = [
        operation("input_layernorm", 0.0, 0.0),
        operation("q_proj", 1e-2, 1e-2, "format"),
        operation("attention", 1e-7, 1e-2, "reduction"),
        operation("o_proj", 0.0, 2e-2),
    ]
    sides = [
        {
            "model": "m",
            "recipe": "fp8-rollout",
            "phase": "rollout",
            "compute_dtype": "float32",
            "exact": False,
        },
        {
            "model": "m",
            "recipe": "fp8-rollout",
            "phase": "trainer",
            "compute_dtype": "bfloat16",
            "exact": True,
        },
    ]
    logprobs = {
        "tokens": 6,
        "differing": 1.0,
        "mean_abs": 0.1,
        "max_abs": 0.25,
        "k3": 0.0125,
        "row": 0,
        "position": 2,
        "a": -1.0,
        "b": -1.25,
        "token": 7,
        "text": " <i>",
    }
    results = {
        "kind": "fp8rl compare",
        "version": 1,
        "equal": False,
        "sides": sides,
        "tokens": {"rows": 1, "prompt": 5, "completion": 6, "rows_given": 1, "given": 11},
        "first": [
            {
                "name": "layers.0.q_proj",
                "cause": "format",
                "detail": detail,
                "where": "prompt and completion",
            }
        ],
        "linears": [
            {
                "names": [f"layers.{i}.q_proj" for i in range(LAYERS)],
                "a": "e4m3-128x128 weights, e4m3-1x128 activations",
                "b": None,
            },
            {"names": [f"layers.{i}.k_proj" for i in range(LAYERS)], "a": None, "b": None},
        ],
        "quantized_on_one_side": {"a": [f"layers.{i}.q_proj" for i in range(LAYERS)], "b": []},
        "logprobs": logprobs,
        "recorded": {"key": "<b>", "a": logprobs, "b": logprobs | {"k3": 0.031}},
        "layers": [
            {
                "name": f"layers.{i}",
                "rerouted": None,
                "input": numbers(0.0 if not i else 1e-2),
                "operations": operations,
            }
            for i in range(LAYERS)
        ],
        "start": operation("embed_tokens", 0.0, 0.0),
        "end": [operation(name, 0.0, 2e-2) for name in ("norm", "logprobs")],
    }
    path = directory / "compare.json"
    path.write_text(json.dumps(results))
    return path
