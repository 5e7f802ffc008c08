"""Run directories, read and checked: config.toml, metrics.jsonl, samples.jsonl and run.json.

Only metrics.jsonl must be there. A run that is still going, or that was killed, may have left a
last line half written; that one is left out and the page says so. Any other damage is an error that
names the file and every damaged line: a page that skipped them would show curves that nobody can
trust.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8rl_jax.config.run import precision_text
from fp8rl_jax.errors import UserError

_COMPARISON_FILE = "compare.json"
_NAMED_DAMAGED_LINES = 10
_OF_A_SEED = ("seed", "output")
"""Keys that differ between the runs of one arm."""


@dataclass(frozen=True)
class Run:
    """One run directory."""

    name: str
    """The directory's name, or as much of its path as tells it from the others."""
    directory: Path
    metrics: list[dict[str, Any]]
    """One row a line of metrics.jsonl, in order: "step" and numbers; null and what is not finite
    are left out."""
    samples: list[dict[str, Any]]
    config: dict[str, Any]
    """config.toml flattened: {"rollout.temperature": 1.0, ...}; empty without that file."""
    config_text: str
    environment: dict[str, Any]
    """run.json flattened; empty without that file."""
    notes: list[str]
    """What a reader has to know about these files, one line each."""

    @property
    def label(self) -> str:
        """The name, with recipe and compute dtype; these alone where the name is the recipe's."""
        recipe, dtype = self.config.get("recipe"), self.config.get("compute_dtype")
        if recipe is None or dtype is None:
            return self.name
        text = precision_text(recipe, dtype)
        return text if self.name == recipe else f"{self.name} ({text})"

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Give steps and values of one metric, of the rows that have it."""
        rows = [row for row in self.metrics if key in row]
        return [row["step"] for row in rows], [row[key] for row in rows]


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed alone: one colour, one row of a table, one mean.

    Attributes:
        name: as legends and tables have it.
        runs: by seed; one that left no metrics is not among them.
        colour: number of the colour; arms of one colour differ in `dashes`.
        dashes: number of the dash pattern, or 0 for a full line.
        broken: places in `runs` of those that failed or collapsed, whose curves end with a cross.
    """

    name: str
    runs: list[Run]
    colour: int = 0
    dashes: int = 0
    broken: frozenset[int] = frozenset()

    @property
    def label(self) -> str:
        """The name, with recipe, compute dtype and the number of seeds where there are several."""
        text = replace(self.runs[0], name=self.name).label if self.runs else self.name
        return f"{text}, {len(self.runs)} seeds" if len(self.runs) > 1 else text


def group_runs(runs: Sequence[Run], colours: int) -> list[Arm]:
    """Group runs whose configurations differ in `seed` (and in `output`) alone.

    A run without a config.toml, or with a seed that its group has already, stays alone.

    Args:
        runs: in the order in which the arms come.
        colours: how many there are before the next dash pattern is taken.
    """
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        shared = {key: run.config[key] for key in sorted(run.config) if key not in _OF_A_SEED}
        groups.setdefault(json.dumps(shared, default=str), []).append(place)
    places: list[list[int]] = []
    for group in groups.values():
        seeds = [runs[place].config.get("seed") for place in group]
        are_seeds = None not in seeds and len(set(seeds)) == len(seeds)
        places += [group] if are_seeds else [[place] for place in group]
    members = [
        sorted((runs[place] for place in group), key=lambda run: run.config.get("seed", 0))
        for group in sorted(places)
    ]
    names = [_shared_name([run.name for run in group]) for group in members]
    for place, group in enumerate(members):
        if names.count(names[place]) > 1:
            names[place] = ", ".join(run.name for run in group)
    return [
        Arm(name, group, index % colours, index // colours)
        for index, (name, group) in enumerate(zip(names, members, strict=True))
    ]


def _shared_name(names: list[str]) -> str:
    """Name a group: "bf16" of bf16-0 and bf16-1, "*/bf16" of 0/bf16 and 1/bf16."""
    if len(names) == 1:
        return names[0]
    first = os.path.commonprefix(names)
    last = os.path.commonprefix([name[len(first) :][::-1] for name in names])[::-1]
    stem = first.removesuffix("seed").rstrip("-_./ ")
    return stem if stem and not last else f"{first}*{last}"


def find_runs(directories: Iterable[Path]) -> list[Path]:
    """Find the run directories among `directories`.

    One without a metrics.jsonl stands for those right below it.

    Raises:
        UserError: a directory is not there, or neither is nor holds a run directory or a
            comparison; all such are named.
    """
    runs: dict[Path, None] = {}
    faults = []
    for directory in directories:
        if not directory.is_dir():
            faults.append(f"{directory}: no such directory")
            continue
        below = sorted(child for child in directory.iterdir() if child.is_dir())
        inside = [directory] if _is_run(directory) else [child for child in below if _is_run(child)]
        if not inside and not find_comparisons([directory]):
            faults.append(
                f"{directory}: no metrics.jsonl in it or in a directory right below it; give a "
                "run directory"
            )
        runs |= dict.fromkeys(path.resolve() for path in inside)
    if faults:
        raise UserError("\n".join(faults))
    return list(runs)


def find_comparisons(directories: Iterable[Path]) -> list[Path]:
    """Find the files `compare.json` in `directories` and right below them."""
    files: dict[Path, None] = {}
    for directory in directories:
        if directory.is_dir():
            below = sorted(child for child in directory.iterdir() if child.is_dir())
            places = (place / _COMPARISON_FILE for place in (directory, *below))
            files |= dict.fromkeys(path.resolve() for path in places if path.is_file())
    return list(files)


def read_runs(directories: list[Path]) -> list[Run]:
    """Read run directories, as `find_runs` returns them.

    Raises:
        UserError: a file is damaged or cannot be read; all such files of all runs are named.
    """
    runs, faults = [], []
    for directory, name in zip(directories, _names(directories), strict=True):
        try:
            runs.append(_read_run(directory, name))
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("\n".join(faults))
    return runs


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a table: {"rollout": {"top_k": 0}} becomes {"rollout.top_k": 0}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _is_run(directory: Path) -> bool:
    return (directory / "metrics.jsonl").is_file()


def _read_run(directory: Path, name: str) -> Run:
    notes: list[str] = []
    metrics = _json_lines(directory / "metrics.jsonl", _metrics_row, notes)
    if not metrics:
        raise UserError(f"{directory / 'metrics.jsonl'}: no step in it yet")
    samples_path, config_path, run_path = (
        directory / file for file in ("samples.jsonl", "config.toml", "run.json")
    )
    samples = _json_lines(samples_path, _sample_row, notes) if samples_path.exists() else []
    config_text = _text(config_path) if config_path.exists() else ""
    environment_text = _text(run_path) if run_path.exists() else "{}"
    notes += [
        f"no {path.name}" for path in (samples_path, config_path, run_path) if not path.exists()
    ]
    try:
        config = flatten(tomllib.loads(config_text))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{config_path}: not TOML: {error}") from None
    try:
        environment = _parse(environment_text)
        flat = flatten(environment) if isinstance(environment, dict) else None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{run_path}: not JSON: {error}") from None
    if flat is None:
        raise UserError(f"{run_path}: not a JSON object")
    if "inexact.step" in flat:
        notes.append(
            f"not exact: in step {flat['inexact.step']} a log-probability of the trainer was "
            f"{flat.get('inexact.difference'):.2g} from the rollout's"
        )
    wrong = "kernels.wrong."
    notes += [
        f"plain XLA in place of the kernels of {key.removeprefix(wrong)}, whose self-test did not "
        f"pass: {flat[key]}"
        for key in flat
        if key.startswith(wrong)
    ]
    return Run(name, directory, metrics, samples, config, config_text, flat, notes)


def _json_lines(
    path: Path, row_of: Callable[[Any], dict[str, Any]], notes: list[str]
) -> list[dict[str, Any]]:
    rows, faults = [], []
    lines = _text(path).split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(row_of(_parse(line)))
        except ValueError as error:
            is_unfinished = number == len(lines) and isinstance(error, json.JSONDecodeError)
            if is_unfinished:
                notes.append(f"{path.name}: line {number}, the last, is cut off and left out")
            else:
                reason = "not JSON" if isinstance(error, json.JSONDecodeError) else error
                faults.append(f"{path}: line {number}: {reason}; repair or remove the line")
    if len(faults) > _NAMED_DAMAGED_LINES:
        more = len(faults) - _NAMED_DAMAGED_LINES
        faults[_NAMED_DAMAGED_LINES:] = [f"{path}: {more} more damaged lines"]
    if faults:
        raise UserError("\n".join(faults))
    return rows


def _parse(text: str) -> Any:
    """json.loads, whose every fault is a ValueError; half of a surrogate pair is one, since no page
    can hold it."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("holds half of a surrogate pair, which is no character") from None
    return value


def _metrics_row(value: Any) -> dict[str, Any]:
    row = _with_step(value)
    for key, number in row.items():
        if number is not None and not isinstance(number, int | float):
            raise ValueError(f"{key} is {json.dumps(number)[:40]}, not a number")
        if isinstance(number, int) and abs(number) > sys.float_info.max:
            raise ValueError(f"{key} is beyond the range of a float")
    return {
        key: number for key, number in row.items() if number is not None and math.isfinite(number)
    }


def _sample_row(value: Any) -> dict[str, Any]:
    row = _with_step(value)
    if missing := [key for key in ("prompt", "completion") if key not in row]:
        raise ValueError(f"no {' and no '.join(missing)}")
    return row


def _with_step(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        raise ValueError('not a JSON object with a whole number as its "step"')
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _names(directories: list[Path]) -> list[str]:
    names = [directory.name for directory in directories]
    if len(set(names)) == len(names):
        return names
    common = os.path.commonpath([directory.parent for directory in directories])
    return [str(directory.relative_to(common)) for directory in directories]
