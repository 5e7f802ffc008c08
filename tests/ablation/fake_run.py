"""Stands for `python -m fp8rl_jax.cli.main` in tests of the queue: writes what a run leaves, fast.

FAKE_RUN in the environment is {run directory's name: what it does}: "fail", "nan", "die" (by a
signal, once, after its first checkpoint), "hang", "slow" (says what it compiles, then a step at a
time), "low" (accuracy), "no metric", "no problems", "other problems". Of a warm start ("start" in its name) nothing but the model is left.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import tomllib
from pathlib import Path

PROBLEMS = 1000
command, config_file, *flags = sys.argv[1:]
config = tomllib.loads(Path(config_file).read_text())
directory = Path((config["sft"]["output"] if command == "sft" else "") or config["output"])
does = json.loads(os.environ.get("FAKE_RUN", "{}")).get(directory.name, "")
directory.mkdir(parents=True, exist_ok=True)
with (directory / "starts.txt").open("a") as file:
    file.write(" ".join([command, *flags]) + "\n")
if does == "fail":
    print("fp8rl: error: rollout.top_k: the device has no such thing\n", file=sys.stderr)
    sys.exit(2)
if not directory.name.startswith("start"):
    if (directory / "metrics.jsonl").exists() != ("--resume" in flags):
        print("fp8rl: error: holds a run already, or none", file=sys.stderr)
        sys.exit(2)
    steps = config["trainer" if command == "train" else "sft"]["steps"]
    path = Path(config["model"].get("path", ""))
    if path.name == "model" and not (path / "config.json").exists():
        sys.exit("fp8rl: error: no model to start from")
    checkpoints = directory / "checkpoints"
    done = max((int(each.name) for each in checkpoints.glob("*") if each.name.isdigit()), default=0)
    if does == "slow":
        time.sleep(0.5)
        print("compiling the rollout ...", flush=True)
        time.sleep(0.5)
        print("compiled the rollout in 1 s", flush=True)
    with (directory / "metrics.jsonl").open("a") as file:
        for step in range(done, steps):
            print(json.dumps({"step": step, "reward/mean": 0.5}), file=file, flush=True)
            (checkpoints / str(step + 1)).mkdir(parents=True)
            if does == "die" and not flags:
                os.kill(os.getpid(), signal.SIGKILL)
            if does in ("hang", "slow"):
                time.sleep(60 if does == "hang" else 0.6)
        accuracy = 0.8 + 0.01 * config["seed"] + 0.002 * (config["recipe"] == "bf16")
        accuracy = {"nan": None, "low": 0.1}.get(does, accuracy)
        last = {"step": steps, "eval/accuracy": accuracy, "eval/problems": PROBLEMS}
        if command == "pretrain":
            last = {"step": steps, "eval/loss": 2.0 - (accuracy or 0.0), "eval/tokens": 1000}
        if does == "no metric":
            del last["eval/accuracy"]
        print(json.dumps(last), file=file)
    right = round(PROBLEMS * (accuracy or 0.0))
    row = {"problems": "others" if does == "other problems" else "these", "samples": 1}
    row["correct"] = [1] * right + [0] * (PROBLEMS - right)
    if does != "no problems":
        (directory / "evaluations.jsonl").write_text(json.dumps({"step": steps, **row}) + "\n")
    if "--judge" in flags:
        judged = {"recipe": flags[flags.index("--judge") + 1], "judged/accuracy": accuracy}
        (directory / "judged.json").write_text(json.dumps(judged | row))
(directory / "model").mkdir(exist_ok=True)
(directory / "model" / "config.json").write_text("{}")
