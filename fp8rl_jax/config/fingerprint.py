"""What an experiment is: its settings as they were resolved, and the contents of the files and
objects that they name. A run that goes on is compared with what it was."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from inspect import getsource
from pathlib import Path
from typing import Any

from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import fields_of

_OF_A_START = (
    *("output", "resume", "resume_changed", "dry_run"),
    *("mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.expert"),
    *("mesh.coordinator", "mesh.num_processes", "mesh.process_id"),
)
FREE = (
    "mesh",
    "plan",
    "sft",
    "tracking",
    "checkpoint",
    "evaluation.every",
    "trainer.abort_after_skips",
    "trainer.abort_after_failed_rewards",
    "rollout.vllm",
    "rollout.paged.slots",
    "rollout.paged.page_size",
    "rollout.paged.cache_tokens",
    "rollout.paged.prefill_tokens",
    "rollout.paged.decode_steps",
    "task.reward.num_workers",
    "task.reward.sandbox",
    "task.reward.network",
    "task.reward.environment",
)
"""Keys and tables that a run may be resumed with other values of: where it runs and what it
records, not what it computes. On another mesh sums have another order."""
FREE_SUPERVISED = (
    *(key for key in FREE if key not in ("sft", "evaluation.every")),
    *("evaluation", "optimizer", "rl", "task.reward", "trainer.steps"),
)
"""The same of supervised training, which [sft] is what and nothing is sampled in."""
_GONE = {
    f"{table}optimizer.{moment}_moment": "float32"
    for table in ("", "sft.")
    for moment in ("first", "second")
}
"""Settings of an earlier version, and the value that is what is done without them."""


def fingerprint(config: RunConfig, objects: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Give what a run is, as plain JSON.

    Every setting by dotted key, those of one start left out; the SHA-256 of files that the task
    names, as "file PATH"; and of objects given in Python, as "object NAME".
    """
    plan = {key: plain(value) for key, value in flat(config).items() if key not in _OF_A_START}
    plan |= {f"file {file}": sha256 for file, sha256 in data_files(config)}
    return plan | {f"object {name}": digest(value) for name, value in (objects or {}).items()}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name what differs between two fingerprints, one line each."""
    before = {key: x for key, x in before.items() if key not in _GONE or x != _GONE[key]}
    lines = []
    for key in dict.fromkeys([*before, *now]):
        kind, _, name = key.partition(" ")
        if kind in ("file", "object") and before.get(key) != now.get(key):
            lines.append(f"{name} has changed")
        elif before.get(key) != now.get(key):
            lines.append(f"{key} was {_said(before, key)} and is {_said(now, key)}")
    return lines


def is_free(key: str, now: Mapping[str, Any], free: tuple[str, ...] = FREE) -> bool:
    """Say whether a setting may change where a run goes on, given those that it has now.

    Args:
        free: `FREE`, or of a supervised run `FREE_SUPERVISED`.
    """
    if any(key == table or key.startswith(f"{table}.") for table in free):
        return True
    # more steps of a constant learning rate are the same experiment, carried on
    table = {"trainer.steps": "optimizer", "sft.steps": "sft.optimizer"}.get(key)
    return table is not None and now.get(f"{table}.schedule") == "constant"


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a configuration to {dotted key: value}; dictionaries in it stay as they are."""
    values = {}
    for name in fields_of(type(config)):
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values


def data_files(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (path, SHA-256) of the files that a run's data and code come from, where they are
    files: what its task names, functions of its own and what registers formats."""
    task, rl = config.task, config.rl
    specs = [task.name, task.eval_path, *task.reward.specs.values(), *config.formats]
    specs += [rl.objective, rl.advantage.estimator, rl.correction.weights or "", rl.selection]
    specs.append(config.rollout.transform)
    for spec in specs:
        for pattern in (spec, spec.rpartition(":")[0]):
            path = Path(pattern).expanduser()
            if pattern and path.is_file():
                yield str(path), hashlib.sha256(path.read_bytes()).hexdigest()


def digest(value: Any) -> str:
    """SHA-256 of problems, or of the text of a function or class, which says the same in another
    process; empty where there is no text."""
    try:
        text = json.dumps(value, default=str) if isinstance(value, list) else getsource(value)
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()


def plain(value: Any) -> Any:
    """Lists for tuples, as JSON reads them back."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _said(plan: Mapping[str, Any], key: str) -> str:
    return repr(plan[key]) if key in plan else "the default"
