"""A study of a tiny policy: two arms, two seeds, two steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tomli_w
from tiny_run import EVEN_LETTERS, write_run


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Writes the study's file, with changes laid over it, and returns its path."""
    monkeypatch.chdir(tmp_path)
    write_run(
        tmp_path,
        EVEN_LETTERS,
        {
            "trainer": {"steps": 2},
            "evaluation": {"every": 2, "examples": 8, "batch_size": 8},
            "checkpoint": {"every": 1},
        },
    )

    def write(**changes: Any) -> str:
        plan = copy.deepcopy(PLAN) | changes
        path = tmp_path / "study.toml"
        path.write_text(tomli_w.dumps({k: v for k, v in plan.items() if v is not None}))
        return str(path)

    return write


PLAN = {
    "question": "Does FP8 cost anything?",
    "base": ["run.toml"],
    "output": "out",
    "seeds": 2,
    "baseline": "bf16",
    "metric": {"margin": 0.1},
    "arms": {"bf16": {"recipe": "bf16"}, "fp8": {"recipe": "fp8-rl"}},
}
