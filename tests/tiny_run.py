"""Runs of a tiny policy that spells words backward: their run file, how they are started, and what
they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fp8rl_jax.cli.main import main

RUN = {
    "compute_dtype": "float32",
    "model": {
        "init": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_layers": 1,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
        }
    },
    "task": {
        # not of reasoning-gym, whose import takes longer than a tiny step
        "kind": "module",
        "name": f"{Path(__file__).with_name('tiny_words.py')}:backward",
        "args": {"words": 128, "letters": 3},
        "train_size": 64,
        "eval_size": 8,
        "reward": {"num_workers": 1},
    },
    "rollout": {
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_prompt_tokens": 6,
        "max_new_tokens": 6,
    },
    "optimizer": {"learning_rate": 1e-3},
    "trainer": {"steps": 4},
    "evaluation": {"every": 0},
    "checkpoint": {"every": 2},
}
EVEN_LETTERS = {
    "task": {
        "reward": {
            "function": f"{Path(__file__).with_name('parallel') / 'rewards.py'}:even_letters"
        }
    }
}
"""A reward that random weights earn a part of, and that differs between the samples of a prompt."""
LEARNS = EVEN_LETTERS | {
    "rollout": {"stop_token_ids": list(range(64))},
    "optimizer": {"learning_rate": 1e-2},
}
"""Steps that move far; a quarter of all bytes end a completion."""
CARRIES = LEARNS | {
    "rollout": {
        "stop_token_ids": list(range(24)),
        "max_new_tokens": 20,
        "engine": "paged",
        "paged": {"extra_prompts": 2, "slots": 8, "page_size": 4},
    },
    "rl": {"correction": {"method": "token_tis"}},
}
"""A tenth of all bytes end a completion; what is long is carried over."""


def write_run(directory: Path, *changes: dict[str, Any]) -> str:
    """The path of a run file in `directory`: RUN with `changes` laid over it, one after the other;
    None takes a key out."""
    config = RUN
    for change in changes:
        config = _laid_over(config, change)
    path = directory / "run.toml"
    path.write_text(tomli_w.dumps(config))
    return str(path)


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    joined = below | {
        key: _laid_over(below.get(key, {}), value) if isinstance(value, dict) else value
        for key, value in above.items()
    }
    return {key: value for key, value in joined.items() if value is not None}


def train(run_file: str, output: Path, *flags: str) -> int:
    """The exit code of `fp8rl train`."""
    return main(["train", run_file, "--output", str(output), *flags])


def metric_rows(directory: Path) -> list[dict[str, Any]]:
    """What a run measured, a row a step."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def measured(directory: Path) -> list[dict[str, Any]]:
    """`metric_rows` as a repetition must give them again: without times and what follows from
    them."""
    return [
        {name: value for name, value in row.items() if not name.startswith(("time", "perf/"))}
        for row in metric_rows(directory)
    ]


def column(directory: Path, name: str) -> np.ndarray:
    """One metric, a value a step."""
    return np.array([row[name] for row in metric_rows(directory)])


def faults(capsys) -> list[str]:
    """The lines in which a command said what was wrong."""
    return [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("fp8rl: error:")
    ]


def check_refused(run_file: str, output: Path, capsys, flags: list[str], message: str) -> str:
    """`fp8rl train` with `flags` is refused in one line that holds `message`; gives the line."""
    assert train(run_file, output, *flags) == 2
    (line,) = faults(capsys)
    assert message in line
    return line
