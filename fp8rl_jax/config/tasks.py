"""What the policy is trained on: a source of problems, the text of a prompt, and the reward of a completion."""

from __future__ import annotations

from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Literal

TEMPLATE_FIELDS = ("question", "answer", "metadata")


@dataclass(frozen=True)
class RewardConfig:
    """How one completion is scored, in worker processes that can be killed."""

    function: str = ""
    """`module:function` or `path/to/file.py:function`, called as reward(prompt=, completion=, answer=, metadata=);
    empty: reasoning-gym's own scorer, or exact match with the answer where kind is "module"."""
    extract: Literal["whole", "last_number"] = "whole"
    """What is scored: the completion without surrounding whitespace, or its last number (empty where it has none)."""
    partial_credit: bool = True
    """Use scores as they are; false: the reward is 1 where the score is at least 1, else 0.
    Accuracy counts scores of at least 1 either way."""
    timeout: float = 5.0
    """Seconds that one sample may take; then its worker is killed and the sample gets reward 0."""
    memory_limit_mib: int = 2048
    """MiB of address space that a worker may add to what it holds once the reward is imported (Linux only)."""
    num_workers: int = 2
    """Worker processes."""


@dataclass(frozen=True)
class TaskConfig:
    """Problems and their reward."""

    kind: Literal["reasoning_gym", "module"] = "reasoning_gym"
    """A reasoning-gym generator, or a Python function that returns a list of {"prompt", "answer"} dictionaries
    (their other keys become metadata)."""
    name: str = "chain_sum"
    """The generator's name, or `module:function` / `path/to/file.py:function`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Parameters of the generator, or keyword arguments of the function: args = { min_terms = 2, max_terms = 2 }."""
    train_size: int = 0
    """Training problems; 0: all that the held-out set leaves of a list, 1024 of a generator."""
    eval_size: int = 256
    """Held-out problems. They are drawn first, so the same seed holds out the same problems whatever train_size is."""
    seed: int = 0
    """Seed of the problems and of the split."""
    prompt_template: str = "{question}"
    """Text of the prompt: a str.format template over {question}, {answer} and {metadata[key]}."""
    system_prompt: str = ""
    """System message for models with a chat template; empty: none."""
    answer_template: str = "{answer}"
    """Target of supervised training, over the same fields."""
    reward: RewardConfig = RewardConfig()
    """Scoring."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        reward = self.reward
        checks = [
            (self.train_size >= 0, f"task.train_size = {self.train_size} must not be negative"),
            (self.eval_size >= 0, f"task.eval_size = {self.eval_size} must not be negative"),
            (self.seed >= 0, f"task.seed = {self.seed} must not be negative"),
            (bool(self.name), "task.name is empty; give a reasoning-gym generator or module:function"),
            (
                self.kind != "module" or is_function_spec(self.name),
                f"task.name = {self.name!r} must be module:function or path/to/file.py:function",
            ),
            (
                not reward.function or is_function_spec(reward.function),
                f"task.reward.function = {reward.function!r} must be module:function or path/to/file.py:function",
            ),
            (reward.timeout > 0, f"task.reward.timeout = {reward.timeout} must be a positive number of seconds"),
            (
                reward.memory_limit_mib >= 16,
                f"task.reward.memory_limit_mib = {reward.memory_limit_mib} must be at least 16",
            ),
            (reward.num_workers >= 1, f"task.reward.num_workers = {reward.num_workers} must be at least 1"),
        ]
        found = [message for holds, message in checks if not holds]
        for key in ("prompt_template", "answer_template"):
            found += [f"task.{key}: {fault}" for fault in template_faults(getattr(self, key))]
        return found


def is_function_spec(spec: str) -> bool:
    """Whether `spec` reads `module:function` or `path/to/file.py:function`."""
    module, separator, function = spec.rpartition(":")
    return bool(module and separator) and function.isidentifier()


def template_faults(template: str) -> list[str]:
    """Why `template` is no str.format template over TEMPLATE_FIELDS."""
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as fault:
        return [f"{template!r} is not a format template ({fault}); write a literal brace twice"]
    roots = [name.split(".")[0].split("[")[0] for name in fields]
    return [
        f"{{{name}}} is none of {{question}}, {{answer}}, {{metadata[key]}}; write a literal brace twice"
        for name, root in zip(fields, roots, strict=True)
        if root not in TEMPLATE_FIELDS
    ]
