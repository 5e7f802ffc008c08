"""Run directories as training leaves them, with curves that can be predicted, and the results of a
comparison."""

from __future__ import annotations

import json
import math
from pathlib import Path

LAYERS = 9
PROMPT = "What is <b>3</b> + 5? & \"quote\" <script>alert('prompt')</script>"


def write_run(
    directory: Path, recipe: str, steps: int = 60, k3: float = 2e-3, dtype: str = "float32"
) -> Path:
    """A run of `steps` steps whose reward goes from 0.2 to 0.9 in a straight line; evaluated every
    10 steps."""
    directory.mkdir(parents=True)
    rows = []
    for step in range(steps):
        part = step / (steps - 1)
        row = {
            "step": step,
            "time": 1.7e9 + step,
            "reward/mean": 0.2 + 0.7 * part,
            "mismatch/k3": k3 * (1 + 0.3 * math.sin(step)),
            "mismatch/token_mult_prob_error": 1 + 10 * k3,
            "entropy": 1.2 - part,
            "completions/mean_length": 9 - 4 * part,
            "time/step": 2.0 if step else 30.0,
            "time/gen": 1.0,
            "time/train": 0.5,
            "time/sync": 0.1,
        }
        if step % 10 == 0 or step == steps - 1:
            accuracy = 0.3 + 0.6 * part
            low, high = accuracy - 0.05, accuracy + 0.05
            row |= {"eval/accuracy": accuracy, "eval/accuracy_low": low, "eval/accuracy_high": high}
        rows.append(row)
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    samples = [
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
    config = f"{top}[trainer]\nsteps = {steps}\n[rollout]\ntemperature = 1.0\n"
    (directory / "config.toml").write_text(config)
    (directory / "run.json").write_text(
        json.dumps({"versions": {"jax": "0.11.2"}, "command": "fp8rl train"})
    )
    return directory


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
