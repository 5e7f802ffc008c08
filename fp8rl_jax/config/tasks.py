"""What the policy is trained on: a source of problems, the text of a prompt, and the reward of a
completion, with the limits of the processes that compute it; or plain text."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from string import Formatter
from typing import Any, Literal

from fp8rl_jax.functions import is_function_spec, is_python_spec

_SHAPING_REWARDS = ("format", "length")
"""Built-in rewards that say nothing about the answer, so that they cannot count a completion as
correct by default."""
_BUILT_IN_REWARDS = ("exact", "math_verify", "reasoning_gym", *_SHAPING_REWARDS)


Extract = Literal["whole", "last_number", "answer_tag", "boxed", "after_hashes"]
_KINDS_OF_ROWS = ("module", "jsonl", "dataset", "python")
_ENVIRONMENTS = ("environment", "verifiers")
_TEMPLATE_FIELDS = ("question", "answer", "metadata")


@dataclass(frozen=True)
class RewardConfig:
    """How one completion is scored, in worker processes that can be killed."""

    function: str = ""
    """The one reward, `module:function` or `path/to/file.py:function`, called with those of
    prompt=, completion=, answer=, metadata= and the problem's columns that it has parameters for,
    or once a batch where it has a parameter `completions` (fp8rl_jax/tasks/rewards.py); empty:
    reasoning-gym's own scorer, or exact match with the answer for lists of problems.
    `<python>:NAME` is one that the run got in Python."""
    weights: dict[str, float] = field(default_factory=dict)
    """Several rewards: weights = { math_verify = 1.0, format = 0.1 } makes the reward their
    weighted sum. Names are exact, math_verify, reasoning_gym, format, length, or those of
    functions; a weight of 0 only logs. Empty: the one reward."""
    functions: dict[str, str] = field(default_factory=dict)
    """Functions that weights names: functions = { tone = "my_rewards.py:tone" }."""
    correct: str = ""
    """The reward that decides accuracy: a completion is correct where it is at least 1. Empty: the
    only one with a weight other than 0 that is neither format nor length."""
    extract: Extract = "whole"
    """What exact, reasoning_gym and functions score: the completion without surrounding whitespace,
    its last number in decimal digits, the inside of its last <answer></answer> or \\boxed{}, or the
    rest of the line after its last ####; empty where there is none, and where its last digits are
    no number of their own (3-4, 10:30, 2x). exact compares last numbers by value. The others see
    the whole completion."""
    format_pattern: str = ""
    """Regular expression for format, which is 1 where it matches the whole completion without
    surrounding whitespace, else 0; a dot matches line breaks too."""
    length_target: int = 0
    """Characters that length leaves unpunished."""
    length_limit: int = 0
    """Characters from where on length is -1; from the target to here it falls from 0 in a straight
    line."""
    partial_credit: bool = True
    """Use scores as they are; false: the reward that decides accuracy is 1 where it is at least 1,
    else 0."""
    timeout: float = 5.0
    """Seconds that one sample may take, all its rewards together, or a turn of an environment with
    the earlier ones that are played again; then its worker is killed and the sample has no reward.
    A batch reward may take this times its samples."""
    batch_size: int = 32
    """Completions that a batch reward gets in one call, at most. A worker's first call has one, so
    that a reward which hangs has its timeout and not the whole batch's."""
    sandbox: Literal["off", "process", "strict"] = "process"
    """What a worker may do (docs/sandbox.md). process: limits of memory, files and processes, and
    an environment without secrets; it isolates faults, not malice. strict: besides, no network, no
    writes outside a folder of its own, no influence on other processes (Linux 6.2 or later; refused
    where it is not possible). off: no limit but the timeout, and the whole environment."""
    network: bool = False
    """Whether rewards of sandbox = "strict" may use the network, as a judge behind an API must; the
    other kinds always may."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that rewards may read, such as ["JUDGE_API_KEY"], besides
    PATH, HOME, the locale and the like (docs/sandbox.md lists them)."""
    memory_limit_mib: int = 2048
    """MiB that a worker with all that it starts may add to what it holds once the rewards are
    imported; each process of them is held to as much address space (Linux only)."""
    file_limit_mib: int = 1024
    """MiB that a worker and what it starts may write into one file (Linux only)."""
    max_processes: int = 64
    """Processes that a worker may have running at one time, threads not counted; a fork beyond that
    fails (Linux only)."""
    num_workers: int = 2
    """Worker processes."""

    @property
    def specs(self) -> dict[str, str]:
        """{key: name} of the functions."""
        several = {f"task.reward.functions.{name}": spec for name, spec in self.functions.items()}
        return {"task.reward.function": self.function, **several}

    def components(self, kind: str) -> dict[str, float]:
        """Return {name: weight} of the rewards that are summed, for a task of this kind."""
        if self.weights:
            return dict(self.weights)
        if self.function:
            return {self.function.rpartition(":")[2]: 1.0}
        if kind in _ENVIRONMENTS:
            return {"environment": 1.0}
        return {"reasoning_gym" if kind == "reasoning_gym" else "exact": 1.0}

    def decides(self, kind: str) -> str:
        """Name the component that decides accuracy; empty where that is left open."""
        names = list(self.components(kind))
        if self.weights:
            names = [
                name
                for name, weight in self.weights.items()
                if weight and name not in _SHAPING_REWARDS
            ]
        return self.correct or (names[0] if len(names) == 1 else "")

    def faults(self, kind: str) -> Iterator[str]:
        """Yield a line for every value that cannot work for a task of this kind."""
        if self.function and not is_function_spec(self.function):
            yield (
                f"task.reward.function = {self.function!r} must be module:function or "
                "path/to/file.py:function"
            )
        yield from (
            _main_fault(key, spec, "reward")
            for key, spec in self.specs.items()
            if _is_in_main(spec)
        )
        yield from self._composition_faults(kind)
        yield from self._shaping_faults()
        if not self.timeout > 0:
            yield f"task.reward.timeout = {self.timeout} must be a positive number of seconds"
        least_of = {
            "batch_size": 1,
            "memory_limit_mib": 16,
            "file_limit_mib": 1,
            "max_processes": 1,
            "num_workers": 1,
        }
        for key, least in least_of.items():
            if getattr(self, key) < least:
                yield f"task.reward.{key} = {getattr(self, key)} must be at least {least}"
        if self.network and self.sandbox != "strict":
            yield (
                f'task.reward.network = true belongs to task.reward.sandbox = "strict"; under '
                f"{self.sandbox!r} rewards may use the network anyway: take it out"
            )
        if self.environment and self.sandbox == "off":
            yield (
                'task.reward.environment: rewards of task.reward.sandbox = "off" have the whole '
                "environment; take it out"
            )
        yield from (
            f"task.reward.environment: {name!r} is no name of a variable; give names alone, such "
            'as ["JUDGE_API_KEY"]'
            for name in self.environment
            if not name or "=" in name
        )

    def _composition_faults(self, kind: str) -> Iterator[str]:
        key = "task.reward.weights"
        if self.weights and self.function:
            yield (
                f"task.reward.function and {key} are both given; name the function in "
                "task.reward.functions instead"
            )
        if kind in _ENVIRONMENTS and (self.weights or self.function or self.extract != "whole"):
            yield (
                "task.reward: an environment rewards its own steps; take function, weights and "
                "extract out"
            )
        known = [*_BUILT_IN_REWARDS, *self.functions]
        for name, weight in self.weights.items():
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"give task.reward.functions.{name}"
                yield f"{key}.{name} is no built-in reward and no function; {hint}"
            # A flag's value has not been checked against the annotation.
            if type(weight) not in (int, float) or not math.isfinite(weight):
                yield f"{key}.{name} = {weight!r} must be a finite number"
        if self.weights and not any(self.weights.values()):
            yield f"{key}: every weight is 0, so every reward is 0; make one of them positive"
        if "reasoning_gym" in self.weights and kind != "reasoning_gym":
            yield f'{key}.reasoning_gym scores the problems of task.kind = "reasoning_gym" only'
        for name, spec in self.functions.items():
            if name in _BUILT_IN_REWARDS or not name.isidentifier():
                yield (
                    f"task.reward.functions.{name}: choose another name, an identifier that no "
                    "built-in reward has"
                )
            if not isinstance(spec, str) or not is_function_spec(spec):
                yield (
                    f"task.reward.functions.{name} = {spec!r} must be module:function or "
                    "path/to/file.py:function"
                )
            if name not in self.weights:
                yield (
                    f"task.reward.functions.{name} has no weight; give {key}.{name} (0: only "
                    "logged)"
                )
        names = ", ".join(self.components(kind))
        if self.correct and self.correct not in self.components(kind):
            yield f"task.reward.correct = {self.correct!r} is none of the rewards ({names})"
        elif not self.decides(kind) and any(self.weights.values()):
            yield (
                f"task.reward.correct: say which of {names} decides whether a completion is correct"
            )

    def _shaping_faults(self) -> Iterator[str]:
        if ("format" in self.weights) != bool(self.format_pattern):
            wanted = (
                "task.reward.weights.format"
                if self.format_pattern
                else "task.reward.format_pattern"
            )
            yield (
                "the format reward needs task.reward.format_pattern and "
                f"task.reward.weights.format; give {wanted} too"
            )
        try:
            with warnings.catch_warnings():
                # a pattern that a later Python will read otherwise
                warnings.simplefilter("error", FutureWarning)
                re.compile(self.format_pattern)
        except (re.error, RecursionError, OverflowError, FutureWarning) as fault:
            yield (
                f"task.reward.format_pattern = {self.format_pattern!r} is no regular "
                f"expression: {fault}"
            )
        if "length" not in self.weights and (self.length_target or self.length_limit):
            yield (
                "task.reward.length_target and length_limit need task.reward.weights.length; "
                "give it a weight too"
            )
        if "length" in self.weights and not 0 <= self.length_target < self.length_limit:
            yield (
                f"task.reward.length_target = {self.length_target} and task.reward.length_limit "
                f"= {self.length_limit}: the "
                "length reward needs 0 <= target < limit, in characters"
            )


def _is_in_main(spec: str) -> bool:
    """Say whether `spec` names something of a script or a notebook.

    The reward workers do not have its `__main__`.
    """
    return isinstance(spec, str) and spec.startswith("__main__:")


def _main_fault(key: str, spec: str, argument: str) -> str:
    """Say what to do about a spec of `__main__`."""
    name = spec.rpartition(":")[2]
    return (
        f"{key} = {spec!r}: the reward workers do not run your script or notebook; give "
        f"{argument}={name} in Python, or name the "
        f"file that it stands in: path/to/file.py:{name}"
    )


@dataclass(frozen=True)
class FieldsConfig:
    """Columns of rows that have other names than fp8rl_jax/tasks/sources.py lists. A dotted path
    goes into objects: reward_model.ground_truth."""

    prompt: str = ""
    """Column of the prompt: text, or a list of messages. Empty: one of the usual names."""
    answer: str = ""
    """Column of the right answer. Empty: one of the usual names."""

    @property
    def given(self) -> dict[str, str]:
        """{"prompt" or "answer": column} of those that are named."""
        return {name: column for name, column in vars(self).items() if column}


@dataclass(frozen=True)
class TaskConfig:
    """Problems and their reward."""

    kind: Literal[
        "reasoning_gym",
        "module",
        "jsonl",
        "dataset",
        "environment",
        "verifiers",
        "python",
        "text",
    ] = "reasoning_gym"
    """A reasoning-gym generator; a Python function that returns a list of {"prompt", "answer"}
    dictionaries (their other keys become metadata; they may have the names that TRL and verl give
    them); files of such dictionaries, as JSON lines, a JSON list or Parquet; a data set that
    Hugging Face's `datasets` loads, by name or path; a class whose problems are conversations with
    it, of max_turns turns; an environment of the library `verifiers`, likewise; or problems that
    the run got in Python, which a file cannot name. text: no problems, but text to learn by heart,
    of `fp8rl pretrain`."""
    name: str = "spell_backward"
    """The generator's name; `module:function` or `path/to/file.py:function`; the file's path or a
    pattern such as data/*.jsonl; what `datasets.load_dataset` takes ("openai/gsm8k", a folder, a
    file) or `save_to_disk` wrote; `module:Class` or `path/to/file.py:Class`; what
    `verifiers.load_environment` takes ("gsm8k"); of kind python what the problems were, such as
    "list of 800"; of kind text files or a pattern (one document each, or JSON lines with a `text`
    each), or a corpus that `fp8rl fetch` knows ("kjv")."""
    args: dict[str, Any] = field(default_factory=dict)
    """Parameters of the generator, or keyword arguments of the function, the class or the
    environment's `load_environment`: args = { min_word_len = 3, max_word_len = 4 }."""
    subset: str = ""
    """Configuration of a data set of kind dataset, such as "main" of openai/gsm8k; empty: its only
    one."""
    split: str = "train"
    """Split of it that is trained on; of kind verifiers "train" or "eval", which is the
    environment's data set for evaluation."""
    eval_split: str = ""
    """Split that is held out, as eval_path is: of that, or of name where that is empty; of kind
    verifiers "eval" or none."""
    eval_path: str = ""
    """Held-out problems, or text: files, as name is of jsonl or text; of kind dataset another data
    set, by name or path ("HuggingFaceH4/aime_2024"), its split train unless eval_split says
    otherwise; `<python>:NAME` were given in Python, as eval_dataset. At most eval_size of them are
    used (unset: 256, or all text), and training skips them all. Empty: they are taken out of
    name."""
    fields: FieldsConfig = FieldsConfig()
    """Columns under other names. All others are metadata, and a reward that has a parameter of a
    column's name gets it."""
    max_turns: int = 1
    """Completions of one episode, at most; other kinds than environments have one. Above 1 an
    episode's reward is the sum over its turns, what the environment says is masked from the loss,
    and rollout.max_prompt_tokens bounds the conversation."""
    train_size: int = 0
    """Training problems, or documents; 0: all that the held-out set leaves of a list, 1024 of a
    generator."""
    eval_size: int | None = None
    """Held-out problems; 0: none, which evaluation.every = 0 goes with. Unset: 256, and no more
    than a tenth of a list, or of a generator that runs out; of text a tenth, in whole documents
    where they are short enough. They are drawn first, so the same seed holds out the same problems
    whatever train_size is."""
    seed: int = 0
    """Seed of the problems and of the split."""
    prompt_template: str = "{question}"
    """Text of the prompt: a str.format template over {question}, {answer} and {metadata[key]}."""
    system_prompt: str = ""
    """System message for models with a chat template; empty: none."""
    answer_template: str = "{answer}"
    """Target of supervised training, over the same fields."""
    answer_extract: Extract = "whole"
    """What of a problem's answer is the result that rewards compare with, as task.reward.extract
    says of completions: after_hashes for GSM8K's solutions, which end in #### 42, boxed for MATH's.
    A problem in which nothing is found is refused. {answer} stays the whole answer."""
    reward: RewardConfig = RewardConfig()
    """Scoring."""

    @property
    def names_held_out(self) -> bool:
        """Whether held-out problems have a place of their own."""
        return bool(self.eval_path or self.eval_split)

    @property
    def is_environment(self) -> bool:
        """Whether its problems answer back: workers play turns, and score no completions."""
        return self.kind in _ENVIRONMENTS

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
        """List every value that cannot work, one line each; empty where all is well."""
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
                "task.name is empty; give a reasoning-gym generator, module:function, a file, a "
                "data set or an environment",
            ),
            (
                self.kind not in ("module", "environment") or is_function_spec(self.name),
                f"task.name = {self.name!r} must be module:{wanted} or path/to/file.py:{wanted}",
            ),
            (
                self.kind != "environment" or not _is_in_main(self.name),
                _main_fault("task.name", self.name, "environment"),
            ),
            (
                not self.eval_path
                or self.kind in _KINDS_OF_ROWS
                or (self.kind == "text" and not is_python_spec(self.eval_path)),
                f"task.eval_path = {self.eval_path!r} belongs to problems that are rows, and those "
                f'of task.kind = "{self.kind}" are none; take it out',
            ),
            (
                self.kind in ("dataset", "verifiers")
                or (self.subset, self.split, self.eval_split) == ("", "train", ""),
                'task.subset, task.split and task.eval_split belong to task.kind = "dataset", and '
                f"this one is {self.kind!r}",
            ),
            (
                self.kind != "verifiers"
                or (
                    not self.subset
                    and (self.split, self.eval_split)
                    in (("train", ""), ("train", "eval"), ("eval", ""))
                ),
                'task.kind = "verifiers": an environment has no task.subset, task.split is "train" '
                'or "eval", and task.eval_split "eval", beside a task.split of "train", or none',
            ),
            (
                not self.names_held_out or self.eval_size != 0,
                f"task.eval_path or task.eval_split = {self.eval_path or self.eval_split!r} is not "
                "read while task.eval_size = 0; raise it or take the other out",
            ),
            (
                not self.fields.given or self.kind in _KINDS_OF_ROWS,
                f'task.fields: problems of task.kind = "{self.kind}" have no columns; take it out',
            ),
            (
                not self.args or self.kind not in ("jsonl", "dataset", "python", "text"),
                f'task.args: problems of task.kind = "{self.kind}" take no arguments; take them '
                "out",
            ),
            (
                self.answer_extract == "whole"
                or self.kind not in ("reasoning_gym", *_ENVIRONMENTS),
                f'task.answer_extract: problems of task.kind = "{self.kind}" bring their own '
                "scorer; take it out",
            ),
            (self.max_turns >= 1, f"task.max_turns = {self.max_turns} must be at least 1"),
            (
                self.max_turns == 1 or self.is_environment,
                f'task.max_turns = {self.max_turns}: only task.kind = "environment" and '
                '"verifiers" have several turns',
            ),
        ]
        faults = [message for holds, message in checks if not holds] + list(
            self.reward.faults(self.kind)
        )
        for key in ("prompt_template", "answer_template"):
            faults += [f"task.{key}: {fault}" for fault in template_faults(getattr(self, key))]
        return faults


def template_faults(template: str) -> list[str]:
    """Say why `template` is no str.format template over question, answer and metadata."""
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as fault:
        return [f"{template!r} is not a format template ({fault}); write a literal brace twice"]
    roots = [name.split(".")[0].split("[")[0] for name in fields]
    return [
        f"{{{name}}} is none of {{question}}, {{answer}}, {{metadata[key]}}; write a literal "
        "brace twice"
        for name, root in zip(fields, roots, strict=True)
        if root not in _TEMPLATE_FIELDS
    ]
