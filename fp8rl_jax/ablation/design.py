"""The file of an ablation: the question, its arms, and what counts as an answer, fixed beforehand.

    question = "Does FP8 cost accuracy on the demo?"
    base = ["../runs/demo.toml"]          # run files, relative to this one
    seeds = 5                             # or a list
    baseline = "bf16"

    [metric]
    margin = 0.02                         # "no worse" is: not more than this behind the baseline

    [arms.bf16]
    recipe = "bf16"

    [arms.fp8-rl]
    recipe = "fp8-rl"
    "rl.clip_high" = 0.3                  # any setting of a run

In place of arms, [factors] crosses settings: recipe = ["bf16", "fp8-rl"] and max_new_tokens =
[8, 16] are four arms. Every arm becomes a whole `RunConfig` that is checked before anything runs.
Runs of one seed share problems, their order, sampling keys and initial weights, so that they can be
compared in pairs: arms that differ in their data or in the model they start from are refused unless
`allow` names the setting.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fp8rl_jax.config.files import laid_over, read_values
from fp8rl_jax.config.fingerprint import data_files, digest, flat, plain
from fp8rl_jax.config.recipe import PrecisionConfig
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.config.run import LoraConfig, ModelConfig, RunConfig
from fp8rl_jax.config.schema import (
    above,
    at_least,
    leaves,
    one_line,
    problems,
    quoted,
    tables,
    unknown_placeholders,
    validate,
)
from fp8rl_jax.config.settings import with_settings
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.python_objects import PythonReward, name_objects

SET_BY_RUNNER = {
    "seed": "the arms share seeds; give `seeds`",
    "output": "runs are written to OUTPUT/ARM-SEED; give `output`",
    "resume": "runs are resumed by themselves; take it out",
    "dry_run": "fp8rl ablate has --dry-run; take it out",
}
_SHARED = {
    "task": "data",
    "rollout.prompts_per_step": "data",
    "rollout.max_prompt_tokens": "data",
    "model": "the model they start from",
    "lora.path": "the model they start from",
    "sft.batch_size": "data",
    "sft.row_tokens": "data",
    "evaluation": "how they are measured",
}
"""Tables and settings that arms have in common, and what differs where they do not."""
_BY_PROBLEM = ("accuracy", "pass_at_k")
_OF_TEXT = ("loss", "perplexity")
_EVALUATED = tuple(
    f"{where}/{name}"
    for where in ("eval", "judged")
    for name in (*_BY_PROBLEM, "mean_length", "failed_rewards", *_OF_TEXT)
)


@dataclass(frozen=True)
class MetricConfig:
    """What is compared: the last value of a metric of a run."""

    name: str = "eval/accuracy"
    """Name in metrics.jsonl, such as eval/loss of runs on text; or judged/accuracy,
    judged/pass_at_k, judged/loss."""
    better: Literal["higher", "lower"] = "higher"
    """Which way is better."""
    margin: float | None = None
    """Difference to the baseline up to which an arm counts as no worse; it must be given."""
    over: Literal["seeds_and_problems", "seeds"] = "seeds_and_problems"
    """What the interval of an accuracy or a pass@k is over: seeds_and_problems: held-out problems
    stand for others like them, and are crossed with the seeds; seeds: these problems are all that
    is asked about."""

    @property
    def by_problem(self) -> bool:
        """Whether each held-out problem has a value of its own."""
        where, _, name = self.name.partition("/")
        return where in ("eval", "judged") and name in _BY_PROBLEM

    @property
    def over_problems(self) -> bool:
        """Whether the interval is over problems, too."""
        return self.by_problem and self.over == "seeds_and_problems"


@dataclass(frozen=True)
class CollapseConfig:
    """When a finished run counts as collapsed: by the last value of a metric."""

    metric: str = ""
    """Name in metrics.jsonl; empty: that of [metric]."""
    below: float | None = None
    """Collapsed where it ends below this."""
    above: float | None = None
    """Collapsed where it ends above this."""


@dataclass(frozen=True)
class AblationConfig:
    """The file of `fp8rl ablate`."""

    name: str = ""
    """Name of the study; empty: the file's, without its ending."""
    question: str = ""
    """The question, in a sentence, for the page."""
    base: tuple[str, ...] = ()
    """Run files that all arms begin with, the later over the earlier; relative to this file."""
    output: str = "runs/{name}"
    """Directory of the runs, the record and the page; {name} is the study's."""
    seeds: Any = 5
    """How many seeds, counted from 0, or a list of seeds."""
    baseline: str = ""
    """Arm that the others are compared with."""
    alpha: float = 0.05
    """Probability of a wrong verdict on any arm, over all looks."""
    looks: int = 1
    """How often a verdict may be reached: after equal parts of the seeds, with alpha spent over
    the looks (O'Brien-Fleming). Runs that are no longer needed are not started."""
    command: Literal["auto", "sft"] = "auto"
    """What a run is. auto: `fp8rl train`, or on text `fp8rl pretrain`. sft: supervised training on
    the task's answers, which may begin with the runs of another study: in `model.path` {arm} and
    {seed} are the run's own."""
    start: Literal["none", "shared", "per_seed"] = "none"
    """Warm start that makes the model of all arms: `fp8rl sft` of the base with its [sft] table,
    once for all seeds or once a seed."""
    judge: str = ""
    """Recipe under which every trained model is evaluated once more: what it has learned, without
    the error of its own rollout, as judged/accuracy, or of text judged/loss; empty: none."""
    allow: tuple[str, ...] = ()
    """Settings, or tables of them, that arms share unless they stand here: task, model,
    evaluation, lora.path, rollout.prompts_per_step, rollout.max_prompt_tokens, sft.batch_size,
    sft.row_tokens."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of all arms, over the base."""
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{name: settings of the arm}, over those of all."""
    factors: dict[str, Any] = field(default_factory=dict)
    """{setting: values}, crossed, in place of arms; an arm is named by its values."""
    recipes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Recipes of one's own, as in a run file."""
    metric: MetricConfig = MetricConfig()
    collapse: CollapseConfig = CollapseConfig()

    def problems(self) -> list[str]:
        """List every value that cannot work, one line each; empty where all is well."""
        margin, collapse = self.metric.margin, self.collapse
        faults = [
            above("alpha", self.alpha, 0.0, at_most=0.5),
            at_least("looks", self.looks, 1),
            "metric.margin: say beforehand how far an arm may fall behind the baseline and still "
            "count as no worse, such as 0.02"
            if margin is None
            else above("metric.margin", margin, 0.0),
            *(_seed_faults(self.seeds)),
            *unknown_placeholders("output", self.output, "name"),
        ]
        if collapse.metric and collapse.below is None and collapse.above is None:
            faults.append("collapse.metric: give collapse.below or collapse.above with it")
        for key, name in (("metric.name", self.metric.name), ("collapse.metric", collapse.metric)):
            where = name.partition("/")[0]
            if where == "judged" and not self.judge:
                faults.append(f"{key} = {name!r}: name the recipe that judges (judge)")
            if where in ("eval", "judged") and name not in _EVALUATED:
                near = difflib.get_close_matches(name, _EVALUATED, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_EVALUATED)}"
                faults.append(f"{key} = {name!r} is no metric of evaluation; {hint}")
        seeds = seeds_of(self.seeds)
        if len(seeds) == 1 and not self.metric.over_problems:
            faults.append(
                f"seeds: {self.metric.name!r} of one seed has no interval; give at least 2, or an "
                'accuracy over "seeds_and_problems"'
            )
        if seeds and self.looks > 1 and (len(seeds) % self.looks or len(seeds) == self.looks):
            faults.append(
                f"looks = {self.looks}: {len(seeds)} seeds are not that many equal parts of at "
                "least 2"
            )
        return [fault for fault in faults if fault]


@dataclass(frozen=True)
class Arm:
    """One arm, as all its runs have it."""

    name: str
    settings: dict[str, Any]
    """What the file says about it, by dotted key."""
    config: RunConfig
    """Of seed 0; what the runner sets is left as it is."""


@dataclass(frozen=True)
class Design:
    """An ablation that has been read and checked."""

    file: AblationConfig
    name: str
    source: str
    """The file, as it was given."""
    directory: Path
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]
    base: RunConfig
    """What all arms begin with: the base and the settings of all."""
    objects: dict[str, Any] = field(default_factory=dict)
    """What was given in Python: {`<python>:NAME`: function or class, "dataset" and
    "eval_dataset": problems}."""

    def run_name(self, arm: Arm, seed: int) -> str:
        """Name a run and its directory."""
        return f"{arm.name}-{seed}"

    def command(self, arm: Arm) -> Literal["train", "pretrain", "sft"]:
        """Name what makes a run of an arm."""
        if self.file.command == "sft":
            return "sft"
        return "pretrain" if arm.config.task.kind == "text" else "train"

    def steps(self, arm: Arm) -> int:
        """Count the steps of a run."""
        config = arm.config
        return config.trainer.steps if self.command(arm) == "train" else config.sft.steps

    def evaluates(self, arm: Arm) -> bool:
        """Whether a run is evaluated behind its last step."""
        return self.command(arm) == "sft" or arm.config.evaluation.every > 0

    def model(self, arm: Arm, seed: int) -> ModelConfig:
        """Say where a run's policy comes from, where no warm start makes it."""
        model = arm.config.model
        path = model.path.replace("{arm}", arm.name).replace("{seed}", str(seed))
        return replace(model, path=path)

    def start_name(self, seed: int) -> str:
        """Name the warm start of a seed; empty where the model is given."""
        return {"none": "", "shared": "start", "per_seed": f"start-{seed}"}[self.file.start]

    def run_config(self, arm: Arm, seed: int) -> RunConfig:
        """Make the configuration of one run."""
        config = replace(
            arm.config,
            seed=seed,
            output=literal(self.directory / self.run_name(arm, seed)),
            dry_run=False,
            resume=False,
            model=self.model(arm, seed),
        )
        if start := self.start_name(seed):
            path = str(self.directory / start / "model")
            config = replace(config, model=replace(config.model, path=path))
        return config

    def start_config(self, seed: int) -> RunConfig:
        """Make the configuration of the warm start of a seed."""
        output = literal(self.directory / self.start_name(seed))
        seed = self.seeds[0] if self.file.start == "shared" else seed
        sft = replace(self.base.sft, output=output)
        return replace(self.base, seed=seed, output=output, sft=sft, dry_run=False, resume=False)

    def seeds_at(self, look: int) -> int:
        """Count the seeds that a look, from 1, has."""
        return len(self.seeds) * look // self.file.looks

    def fingerprint(self) -> dict[str, Any]:
        """Give what must not change between start and resume, as plain JSON by dotted key.

        Configurations as they were resolved, and contents of the files that the task names: a
        comment may change, and a base file that says the same in another way.
        """
        names = ("baseline", "alpha", "looks", "start", "judge")
        plan = {name: getattr(self.file, name) for name in names}
        if self.file.command != "auto":  # which studies of earlier versions do not name
            plan["command"] = self.file.command
        plan |= {"seeds": list(self.seeds), "arms": [arm.name for arm in self.arms]}
        plan |= {f"metric.{key}": value for key, value in vars(self.file.metric).items()}
        plan |= {f"collapse.{key}": value for key, value in vars(self.file.collapse).items()}
        for arm in self.arms:
            for key, value in flat(arm.config).items():
                if key not in SET_BY_RUNNER and value != _DEFAULTS.get(key):
                    plan[f"arms.{quoted(arm.name)}.{key}"] = plain(value)
            plan |= {f"file {file}": sha256 for file, sha256 in data_files(arm.config)}
        plan |= {f"object {name}": digest(value) for name, value in self.objects.items()}
        return plan


def read_design(
    source: str | Path | Mapping[str, Any],
    output: str = "",
    *,
    reward: PythonReward | None = None,
    dataset: Sequence[Any] | None = None,
    eval_dataset: Sequence[Any] | None = None,
    environment: type | None = None,
) -> Design:
    """Read and check an ablation.

    Args:
        source: the TOML file, or its contents as a dictionary.
        output: directory in place of the file's; {name} is the study's name.
        reward, dataset, eval_dataset, environment: Python objects of all arms, as `fp8rl.train`
            takes them; the problems as lists.

    Raises:
        UserError: a line for each fault of the file, of its base, and of every arm.
    """
    faults: list[str] = []
    is_file = not isinstance(source, Mapping)
    spoken = str(source) if is_file else "the ablation"
    values = read_values(AblationConfig, [str(source) if is_file else source], faults)
    if faults and not values:  # unreadable: what it lacks is no news
        raise UserError("\n".join(faults))
    file = laid_over(AblationConfig(), values, faults)
    faults += problems(file)
    faults += unknown_placeholders("output", output, "name")
    folder = Path(str(source)).parent if is_file else Path()
    run_files = [str(folder / Path(path).expanduser()) for path in file.base]
    base = laid_over(RunConfig(), read_values(RunConfig, run_files, faults), faults)
    base = replace(base, recipes=base.recipes | file.recipes)
    base = _changed(base, file.settings, "settings", faults)
    base, objects = _with_objects(
        base, reward, environment, {"dataset": dataset, "eval_dataset": eval_dataset}, faults
    )
    given = _given_arms(file, faults)
    faults += _baseline_faults(file.baseline, given) if given else []
    arms = list(_arms(given, base, faults))
    sound = []
    for arm in arms:
        own = _arm_faults(arm, file)
        faults += own
        sound += [] if own else [arm]
    faults += _judge_faults(file.judge, base, sound) if file.judge else []
    faults += _differences(file, arms)
    name = file.name or (Path(str(source)).stem if is_file else "ablation")
    if faults:
        prefixed = (fault if fault.startswith(spoken) else f"{spoken}: {fault}" for fault in faults)
        raise UserError("\n".join(dict.fromkeys(map(one_line, prefixed))))
    directory = Path((output or file.output).format(name=name)).expanduser()
    return Design(file, name, spoken, directory, seeds_of(file.seeds), tuple(arms), base, objects)


def _with_objects(
    base: RunConfig, reward: Any, environment: Any, rows: dict[str, Any], faults: list[str]
) -> tuple[RunConfig, dict[str, Any]]:
    """The base naming what was given in Python, and these objects."""
    rows = {name: some for name, some in rows.items() if some is not None}
    for name, some in list(rows.items()):
        if not isinstance(some, list | tuple):
            faults.append(f"{name} is a {type(some).__name__}; give a list, which every run reads")
            del rows[name]
    try:
        task, objects = name_objects(base.task, reward, environment=environment, **rows)
    except UserError as error:
        faults += str(error).splitlines()
        return base, {}
    objects |= {name: list(some) for name, some in rows.items()}
    return replace(base, task=task), objects


def _judge_faults(judge: str, base: RunConfig, arms: Sequence[Arm]) -> list[str]:
    """What keeps the runs of sound arms from being judged."""
    try:
        _ = judged(base, judge).resolved_recipe
        for arm in arms:
            validate(judged(arm.config, judge))
    except UserError as error:
        return [f"judge: {line}" for line in str(error).splitlines()]
    return []


def judged(config: RunConfig, recipe: str) -> RunConfig:
    """Make the configuration under which a run's model is judged.

    Nothing of its own rollout's error is left, neither formats nor what `rollout.transform` does,
    and nothing that only training does. Adapters are in the model, and the recipe is as it stands,
    for all arms alike.
    """
    rollout = replace(
        config.rollout,
        transform="",
        transform_args={},
        steps_ahead=0,
        paged=replace(config.rollout.paged, extra_prompts=0),
    )
    return replace(
        config.under(recipe),
        model=replace(config.model, path=str(config.directory / "model")),
        lora=LoraConfig(),
        rl=RLConfig(),
        precision=PrecisionConfig(backend=config.precision.backend),
        rollout=rollout,
        resume=False,
    )


def seeds_of(value: Any) -> tuple[int, ...]:
    """Give the seeds that `seeds` stands for; none where it is unsound."""
    if _seed_faults(value):
        return ()
    return tuple(range(value)) if isinstance(value, int) else tuple(value)


# what fingerprints leave out; earlier studies have another default task
_DEFAULTS = flat(RunConfig()) | {"task.name": "chain_sum"}
_KEYS = dict(leaves(RunConfig))
_TABLES = set(tables(RunConfig))


def _seed_faults(value: Any) -> list[str]:
    if type(value) is int:
        return [f"seeds = {value}: give at least 1"] if value < 1 else []
    if not isinstance(value, list | tuple) or any(type(x) is not int or x < 0 for x in value):
        return [f"seeds: expected a number of seeds or a list of them, got {value!r}"]
    if not value:
        return ["seeds = []: give at least 1"]
    double = [x for x in value if list(value).count(x) > 1]
    return [f"seeds: {double[0]} is given twice"] if double else []


def literal(path: Path) -> str:
    """Write a path for `RunConfig.output`, which is a format string."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _settings(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value); TOML reads rl.clip_high = 0.3 as a table."""
    for name, value in given.items():
        key = prefix + name
        if isinstance(value, Mapping) and key in _TABLES:
            yield from _settings(value, f"{key}.")
        else:
            yield key, value


def _full_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """{dotted key: value}, where `max_new_tokens` may stand for rollout.max_new_tokens."""
    full = {}
    for name, value in settings.items():
        last = [key for key in _KEYS if key.rpartition(".")[2] == name]
        full[name if name in _KEYS or len(last) != 1 else last[0]] = value
    return full


def _changed(
    config: RunConfig, given: Mapping[str, Any], where: str, faults: list[str]
) -> RunConfig:
    """`config` with settings over it; every fault gets a line that says where it is."""
    settings = dict(_settings(given))
    faults += [f"{where}.{key}: {SET_BY_RUNNER[key]}" for key in settings if key in SET_BY_RUNNER]
    try:
        return with_settings(
            config, {key: value for key, value in settings.items() if key not in SET_BY_RUNNER}
        )
    except UserError as error:
        faults += [f"{where}.{line}" for line in str(error).splitlines()]
        return config


def _given_arms(file: AblationConfig, faults: list[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, settings) of the arms, or of the factors' combinations."""
    if bool(file.arms) == bool(file.factors):
        faults.append(
            "arms and factors are both given; give one of them"
            if file.arms
            else "no arms; give [arms.NAME] or [factors]"
        )
        return []
    return list(file.arms.items() if file.arms else _crossed(file.factors, faults))


def _arms(
    given: list[tuple[str, Mapping[str, Any]]], base: RunConfig, faults: list[str]
) -> Iterator[Arm]:
    """Yield the arms whose settings are sound; the others' faults get a line each."""
    for name, settings in given:
        where = f"arms.{quoted(name)}"
        if not re.fullmatch(r"[A-Za-z0-9_+=][A-Za-z0-9_.+=-]*", name) or name == "start":
            faults.append(
                f"{where}: names a directory; use letters, digits and _ . + = -, and not start"
            )
        before = len(faults)
        config = _changed(base, settings, where, faults)
        if len(faults) == before:
            yield Arm(name, _full_keys(dict(_settings(settings))), config)


def _crossed(factors: Mapping[str, Any], faults: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    factors = dict(_settings(factors))
    unsound = [key for key, values in factors.items() if not isinstance(values, list) or not values]
    faults += [f"factors.{key}: expected a list of values" for key in unsound]
    if unsound:
        return
    for values in itertools.product(*factors.values()):
        settings = dict(zip(factors, values, strict=True))
        parts = [
            str(value) if key == "recipe" else f"{key.rpartition('.')[2]}={value}"
            for key, value in settings.items()
        ]
        yield re.sub(r"[^A-Za-z0-9_.+=-]", "_", "+".join(parts)), settings


def _baseline_faults(baseline: str, given: list[tuple[str, Mapping[str, Any]]]) -> list[str]:
    names = [name for name, _ in given]
    double = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    faults = [f"arms.{quoted(name)}: two arms have this name" for name in double]
    if baseline not in names:
        near = difflib.get_close_matches(baseline, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the arms are {', '.join(names)}"
        what = f"{baseline!r} is no arm" if baseline else "name the arm to compare with"
        faults.append(f"baseline: {what}; {hint}")
    if len(names) == 1:
        faults.append("arms: there is one; a comparison needs two")
    return faults


def _arm_faults(arm: Arm, file: AblationConfig) -> list[str]:
    """What keeps the runs of an arm from working, as far as its configuration says."""
    where, config, name = f"arms.{quoted(arm.name)}", arm.config, file.metric.name
    on_text, faults = config.task.kind == "text", []
    try:
        validate(config)
        config.samples_truncated()
    except UserError as error:
        faults += str(error).splitlines()
    for key, metric in (("metric.name", name), ("collapse.metric", file.collapse.metric)):
        if not metric.startswith(("eval/", "judged/")):
            continue
        measured = file.command == "sft" or config.evaluation.every
        if metric.startswith("eval/") and not measured:
            faults.append(f"evaluation.every = 0, and {key} = {metric!r} is measured there")
        has_loss = metric.partition("/")[2] in _OF_TEXT
        if has_loss and not on_text and (file.command != "sft" or metric.startswith("judged/")):
            faults.append(f"{key} = {metric!r} is not measured on problems; eval/accuracy is")
        if on_text and not has_loss:
            faults.append(f"{key} = {metric!r} is not measured on text; eval/loss is")
        if metric.endswith("/pass_at_k") and config.evaluation.samples == 1:
            faults.append(f"{key} = {metric!r} needs evaluation.samples above 1")
    if file.start != "none" and (on_text or file.command == "sft"):
        faults.append(
            f'start = "{file.start}": supervised runs have no warm start; set it to "none"'
        )
    if file.command == "sft" and on_text:
        faults.append('command = "sft": the task has text, and no answers; leave it "auto"')
    if file.start != "none" and "model.path" in arm.settings:
        faults.append(f'model.path: start = "{file.start}" makes the model; take one of them out')
    return [f"{where}: {fault}" for fault in faults]


def _differences(file: AblationConfig, arms: list[Arm]) -> list[str]:
    """Arms that differ by accident, and arms that do not differ."""
    faults = [
        f"allow: {name!r} is nothing that arms share; known: {', '.join(_SHARED)}"
        for name in file.allow
        if not any(_within(name, shared) for shared in _SHARED)
    ]
    baseline = [arm for arm in arms if arm.name == file.baseline]
    common = flat(baseline[0].config) if baseline else {}
    for arm in arms:
        own = flat(arm.config)
        for key in common:
            table = next((shared for shared in _SHARED if _within(key, shared)), None)
            if not table or own[key] == common[key]:
                continue
            if not any(_within(key, allowed) for allowed in file.allow):
                faults.append(
                    f"arms.{quoted(arm.name)}: {key} is {own[key]!r} and {common[key]!r} in the "
                    f"baseline, so they differ in {_SHARED[table]}; if that is the question, "
                    f'allow = ["{key}"]'
                )
    for one, other in itertools.combinations(arms, 2):
        if one.config == other.config:
            faults.append(f"arms {one.name} and {other.name} are the same run")
    return faults


def _within(key: str, table: str) -> bool:
    return key == table or key.startswith(f"{table}.")
