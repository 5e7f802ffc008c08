"""The study's file, study.toml: what is run, what is asked, and what counts as an answer.

It is the file of an ablation (docs/ablation.md) with three keys more: `lengths`, each the settings
of a block; `questions`; and `pilot`. Every arm is run at every length, unless its own `lengths`
names some. A cell is an arm at a length, and takes five lines:

    [arms.icepop-4]
    recipe = "rollout-x4"
    "rl.correction.method" = "icepop"
    lengths = ["64"]
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fp8rl_jax.ablation.design import AblationConfig, Arm, Design, read_design
from fp8rl_jax.config.files import read_config
from fp8rl_jax.config.fingerprint import data_files, flat, plain
from fp8rl_jax.errors import UserError


@dataclass(frozen=True)
class Question:
    """What is asked of some arms."""

    ask: str = ""
    """The question, in a sentence."""
    arms: tuple[str, ...] = ()
    """That are compared."""
    against: str = ""
    """With this one; empty: the baseline."""
    lengths: tuple[str, ...] = ()
    """At these, which share the error; empty: at all."""
    longer: bool = False
    """Compare the arms' differences at the second of two lengths with those at the first."""


@dataclass(frozen=True)
class StudyConfig(AblationConfig):
    """The file."""

    lengths: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{name of a length: settings of its runs}."""
    questions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{name: a `Question`}."""
    pilot: tuple[str, ...] = ()
    """Cells, LENGTH/ARM, of which --pilot runs the first seed."""


@dataclass(frozen=True)
class Cell:
    """An arm at a length."""

    length: str
    arm: Arm
    rules: str
    """What a run's outcome depends on besides its settings."""

    @property
    def name(self) -> str:
        """As records and `pilot` have it."""
        return f"{self.length}/{self.arm.name}"

    @property
    def digest(self) -> str:
        """Of its settings and files, which a run of it is only one with."""
        config = self.arm.config
        # of all the recipes, its own
        told = {key: plain(value) for key, value in flat(config).items() if key != "recipes"}
        told |= {"recipe": repr(config.resolved_recipe), "rules": self.rules}
        told |= {file: sha256 for file, sha256 in data_files(config)}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan:
    """The file, read and checked."""

    file: StudyConfig
    designs: dict[str, Design]
    """By length."""
    questions: dict[str, Question]

    @property
    def cells(self) -> dict[str, Cell]:
        """All cells, by name."""
        rules = f"{self.file.judge} {self.file.start} {self.file.metric.name} {self.file.collapse}"
        made = (
            Cell(length, arm, rules)
            for length, design in self.designs.items()
            for arm in design.arms
        )
        return {cell.name: cell for cell in made}

    @property
    def margin(self) -> float:
        """How far an arm may fall behind; `read_design` has refused a file without one."""
        assert self.file.metric.margin is not None
        return self.file.metric.margin

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of all cells."""
        return next(iter(self.designs.values())).seeds


def read_plan(path: Path) -> Plan:
    """Read and check the study.

    Raises:
        UserError: a line for each fault of the file and of every cell.
    """
    config = read_config(StudyConfig, path)
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    if not config.lengths:
        raise UserError(f"{path}: no lengths; give [lengths.NAME] with the settings of a block")
    own = {f.name for f in fields(StudyConfig)} - {f.name for f in fields(AblationConfig)}
    common = {key: value for key, value in table.items() if key not in own}
    common["base"] = [str(path.parent / file) for file in config.base]
    designs, faults = {}, list(_unknown(path, config))
    for length, settings in config.lengths.items():
        arms = {
            name: {key: value for key, value in arm.items() if key != "lengths"}
            for name, arm in config.arms.items()
            if length in arm.get("lengths", [length])
        }
        own_table = common | {"settings": config.settings | settings, "arms": arms, "name": length}
        # another set of arms has another directory, since a runner takes no other design there
        mark = hashlib.sha256(json.dumps(own_table, sort_keys=True).encode()).hexdigest()[:8]
        output = Path(config.output.format(name=path.stem)) / f"{length}-{mark}"
        try:
            designs[length] = replace(read_design(own_table, str(output)), source=str(path))
        except UserError as error:
            faults += [line.replace("the ablation", str(path)) for line in str(error).splitlines()]
    if faults:
        raise UserError("\n".join(dict.fromkeys(faults)))
    questions = {
        name: read_config(Question, _named(path, name, of)) for name, of in config.questions.items()
    }
    plan = Plan(config, designs, questions)
    if faults := list(_missing(path, plan)):
        raise UserError("\n".join(faults))
    return plan


def _named(path: Path, name: str, table: Mapping[str, Any]) -> Mapping[str, Any]:
    known = {f.name for f in fields(Question)}
    if unknown := sorted(table.keys() - known):
        raise UserError(
            f"{path}: questions.{name}: unknown key {unknown[0]}; known: {', '.join(sorted(known))}"
        )
    return table


def _unknown(path: Path, config: StudyConfig) -> Iterator[str]:
    """Lengths that arms name and the study has not."""
    for name, arm in config.arms.items():
        given = arm.get("lengths", [])
        for length in given if isinstance(given, list) else [given]:
            if length not in config.lengths:
                known = ", ".join(config.lengths)
                yield f"{path}: arms.{name}.lengths: {length!r} is none of {known}"


def _missing(path: Path, plan: Plan) -> Iterator[str]:
    """What questions and the pilot name and the study has not."""
    cells, baseline = plan.cells, plan.file.baseline
    for name in plan.file.pilot:
        if name not in cells:
            yield f"{path}: pilot: {name!r} is no cell; a cell is LENGTH/ARM"
    for name, question in plan.questions.items():
        lengths = question.lengths or tuple(plan.designs)
        if question.longer and len(lengths) != 2:
            yield f"{path}: questions.{name}: longer compares two lengths, and has {len(lengths)}"
        for length in lengths:
            for arm in (*question.arms, question.against or baseline):
                if f"{length}/{arm}" not in cells:
                    yield f"{path}: questions.{name}: {length}/{arm} is no cell"
