"""Run directories as training leaves them, with curves that can be predicted."""

from __future__ import annotations

import json
import math
from pathlib import Path

PROMPT = "What is <b>3</b> + 5? & \"quote\" <script>alert('prompt')</script>"


def write_run(directory: Path, recipe: str, steps: int = 60, k3: float = 2e-3) -> Path:
    """A run of `steps` steps whose reward goes from 0.2 to 0.9 in a straight line; evaluated every 10 steps."""
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
        {"step": step, "prompt": PROMPT, "completion": f"completion of step {step}", "answer": "8", "reward": 1.0}
        for step in (0, 30, steps - 1)
    ]
    samples.append({"step": 0, "prompt": "long", "completion": "x" * 3000, "answer": None, "reward": 0.125})
    (directory / "samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in samples))
    config = f'output = "{directory.name}"\nrecipe = "{recipe}"\n[trainer]\nsteps = {steps}\n[rollout]\ntemperature = 1.0\n'
    (directory / "config.toml").write_text(config)
    (directory / "run.json").write_text(json.dumps({"versions": {"jax": "0.11.2"}, "command": "fp8rl train"}))
    return directory
