"""What the policy is trained on: a source of problems, the text of a prompt, and the reward of a
completion."""

from __future__ import annotations

from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Literal

from fp8rl_jax.config.rewards import RewardConfig, is_in_main, main_fault
from fp8rl_jax.functions import is_function_spec, is_python_spec

TEMPLATE_FIELDS = ("question", "answer", "metadata")


@dataclass(frozen=True)
class TaskConfig:
    """Problems and their reward."""

    kind: Literal["reasoning_gym", "module", "jsonl", "environment", "python"] = "reasoning_gym"
    """A reasoning-gym generator; a Python function that returns a list of {"prompt", "answer"}
    dictionaries (their other keys become metadata); files of such dictionaries, one JSON object a
    line; a class whose problems are conversations with it, of max_turns turns; or problems that the
    run got in Python, which a file cannot name."""
    name: str = "chain_sum"
    """The generator's name; `module:function` or `path/to/file.py:function`; the file's path or a
    pattern such as data/*.jsonl; `module:Class` or `path/to/file.py:Class`; of kind python what the
    problems were, such as "list of 800"."""
    args: dict[str, Any] = field(default_factory=dict)
    """Parameters of the generator, or keyword arguments of the function or class: args = {
    min_terms = 2, max_terms = 2 }."""
    eval_path: str = ""
    """Held-out problems of kinds jsonl and python, a path as name is of jsonl; at most eval_size of
    them are used (unset: 256), and training skips them all. Empty: they are taken out of name."""
    max_turns: int = 1
    """Completions of one episode, at most; other kinds than environment have one. Above 1 an
    episode's reward is the sum over its turns, what the environment says is masked from the loss,
    and rollout.max_prompt_tokens bounds the conversation."""
    train_size: int = 0
    """Training problems; 0: all that the held-out set leaves of a list, 1024 of a generator."""
    eval_size: int | None = None
    """Held-out problems; 0: none, which evaluation.every = 0 goes with. Unset: 256, and no more
    than a tenth of a list, or of a generator that runs out. They are drawn first, so the same seed
    holds out the same problems whatever train_size is."""
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

    @property
    def python_objects(self) -> dict[str, str]:
        """{key: `<python>:NAME`} of the functions and the class that the run got in Python."""
        specs = self.reward.specs | ({"task.name": self.name} if self.kind == "environment" else {})
        return {key: spec for key, spec in specs.items() if is_python_spec(spec)}

    @property
    def components(self) -> dict[str, float]:
        """{name: weight} of the rewards that are summed."""
        return self.reward.components(self.kind)

    @property
    def deciding_reward(self) -> str:
        """Name of the component that decides accuracy."""
        return self.reward.decides(self.kind)

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        wanted = "Class" if self.kind == "environment" else "function"
        checks = [
            (self.train_size >= 0, f"task.train_size = {self.train_size} must not be negative"),
            (
                self.eval_size is None or self.eval_size >= 0,
                f"task.eval_size = {self.eval_size} must not be negative",
            ),
            (self.seed >= 0, f"task.seed = {self.seed} must not be negative"),
            (
                bool(self.name),
                "task.name is empty; give a reasoning-gym generator, module:function or a file",
            ),
            (
                self.kind not in ("module", "environment") or is_function_spec(self.name),
                f"task.name = {self.name!r} must be module:{wanted} or path/to/file.py:{wanted}",
            ),
            (
                self.kind != "environment" or not is_in_main(self.name),
                main_fault("task.name", self.name, "environment"),
            ),
            (
                not self.eval_path or self.kind in ("jsonl", "python"),
                f'task.eval_path belongs to task.kind = "jsonl", and this one is {self.kind!r}',
            ),
            (
                not self.eval_path or self.eval_size != 0,
                f"task.eval_path = {self.eval_path!r} is not read while task.eval_size = 0; "
                "raise it or drop the path",
            ),
            (
                not self.args or self.kind not in ("jsonl", "python"),
                f'task.args: problems of task.kind = "{self.kind}" take no arguments; take them '
                "out",
            ),
            (self.max_turns >= 1, f"task.max_turns = {self.max_turns} must be at least 1"),
            (
                self.max_turns == 1 or self.kind == "environment",
                f'task.max_turns = {self.max_turns}: only task.kind = "environment" has several '
                "turns",
            ),
        ]
        found = [message for holds, message in checks if not holds] + list(
            self.reward.faults(self.kind)
        )
        for key in ("prompt_template", "answer_template"):
            found += [f"task.{key}: {fault}" for fault in template_faults(getattr(self, key))]
        return found


def template_faults(template: str) -> list[str]:
    """Why `template` is no str.format template over TEMPLATE_FIELDS."""
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as fault:
        return [f"{template!r} is not a format template ({fault}); write a literal brace twice"]
    roots = [name.split(".")[0].split("[")[0] for name in fields]
    return [
        f"{{{name}}} is none of {{question}}, {{answer}}, {{metadata[key]}}; write a literal "
        "brace twice"
        for name, root in zip(fields, roots, strict=True)
        if root not in TEMPLATE_FIELDS
    ]
