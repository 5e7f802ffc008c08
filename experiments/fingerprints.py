"""Do the committed records still say what the code does? `python -m experiments.fingerprints`.

An ablation's record has a fingerprint of the code that made it (fp8rl_jax/ablation/behaviour.py);
some records that are no ablations' have one of golden runs of the recipes that they measured
(`measured`). Here it is taken again from the present code, for all records that have one or for
those that are named, and what differs is told, a line each; then the record has to be made again.

    python -m experiments.fingerprints --names demo --against runs/ablation/demo/ablation.json

compares two records instead: what the runs of another machine found with what the committed ones
did, by the verdict on each arm and by the interval of its outcomes over seeds. `make ablation` ends
with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.command import run_command
from fp8rl_jax.ablation.behaviour import differences, fingerprint
from fp8rl_jax.ablation.design import Design, read_design
from fp8rl_jax.errors import UserError
from fp8rl_jax.statistics import Interval, t_interval

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results"
ABLATIONS, RECORDS = ROOT / "experiments/ablations", RESULTS / "ablations"
OTHERS = ("depth/results", "fake_quantization", "gradients/results")
"""Records that are no ablations' and have a fingerprint, in experiments/results."""


@dataclass(frozen=True)
class Arguments:
    """Compare the committed records' fingerprints with the present code, or a record with one."""

    names: tuple[str, ...] = ()
    """Of records in experiments/results/ablations, or of those of `OTHERS`; default: all that have
    a fingerprint."""
    against: str = ""
    """ablation.json of other runs of the one that is named."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        if self.against and len(self.names) != 1:
            return ["--against: name the one record that it is compared with"]
        return []


def read_record(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        UserError: there is none.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is no record ({error})") from None


def measured(
    recipes: Iterable[str], dtypes: Sequence[str], record: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Give a record that is no ablation's its fingerprint, before anything is measured.

    Args:
        recipes, dtypes: what is measured, each recipe under each compute dtype.
        record: what there is already, where more is to be measured.

    Returns:
        {"arms": settings by name, "fingerprint": of them}, the record's "behaviour".

    Raises:
        UserError: the record has none, or of other recipes, or of other code.
    """
    arms = {
        f"{recipe}-{dtype}": {"recipe": recipe, "compute_dtype": dtype}
        for recipe in recipes
        for dtype in dtypes
    }
    before = (record or {}).get("behaviour")
    if record and (before or {}).get("arms") != arms:
        raise UserError("--output: the record there is of other recipes or dtypes; name another")
    (now,) = fingerprint(_of_arms(arms))
    if before and (lines := differences(before["fingerprint"], now)):
        raise UserError(f"--output: the record there is of other code; name another: {lines[0]}")
    return before or {"arms": arms, "fingerprint": now}


def _of_arms(arms: Mapping[str, Any]) -> Design:
    """An ablation of recipes, of which golden runs are made and no others."""
    settings = {"metric": {"margin": 1.0}, "baseline": next(iter(arms)), "arms": arms}
    return read_design({"name": "recipes", **settings})


def with_fingerprints() -> dict[str, tuple[Design, dict[str, Any], str]]:
    """All records with a fingerprint: the design that it is of, the fingerprint and the command."""
    found = {}
    for path in sorted(RECORDS.glob("*.json")):
        record = read_record(path)
        if "fingerprint" in record:
            design = read_design(ABLATIONS / f"{path.stem}.toml")
            found[path.stem] = design, record["fingerprint"], record["command"]
    for name in OTHERS:
        record = read_record(RESULTS / f"{name}.json")
        behaviour = record["behaviour"]
        command = " ".join(record["made"]["command"])
        found[name] = _of_arms(behaviour["arms"]), behaviour["fingerprint"], command
    return found


def stale(records: Mapping[str, tuple[Design, dict[str, Any], str]]) -> list[list[str]]:
    """Name what the present code does otherwise than the one that made each record, a line each.

    Args:
        records: some of `with_fingerprints`.
    """
    taken = fingerprint(*(design for design, *_ in records.values())) if records else []
    return [
        [
            f"{name}: {line}; it is a record of other code: {command}, and commit what it makes"
            for line in differences(before, now)
        ]
        for (name, (_, before, command)), now in zip(records.items(), taken, strict=True)
    ]


def unlike(committed: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Say in what two records of an ablation disagree, a line for each arm and each thing."""
    for record, other in ((committed, found), (found, committed)):
        if gone := {arm["name"] for arm in record["arms"]} - {arm["name"] for arm in other["arms"]}:
            yield f"{', '.join(sorted(gone))}: of one of the records only"
            return
    verdicts = [
        {row["arm"]: row["verdict"] for row in of["comparisons"]} for of in (found, committed)
    ]
    for arm, committed_verdict in verdicts[1].items():
        if (verdict := verdicts[0].get(arm, "without a verdict")) != committed_verdict:
            yield f"{arm} is {verdict!r}, and {committed_verdict!r} in the committed record"
    runs = {arm["name"]: arm["runs"] for arm in found["arms"]}
    for arm in committed["arms"]:
        here, there = outcomes(runs[arm["name"]]), outcomes(arm["runs"])
        if not (here.low <= there.high and there.low <= here.high):
            yield (
                f"{arm['name']} has {committed['metric']['name']} {_spoken(here)}, and "
                f"{_spoken(there)} in the committed record"
            )


def outcomes(runs: Sequence[Mapping[str, Any]]) -> Interval:
    """The interval of an arm's outcomes over seeds."""
    return t_interval([run["outcome"] for run in runs if run["outcome"] is not None])


def _spoken(x: Interval) -> str:
    return f"{x.mean:.3f} ({x.low:.3f} to {x.high:.3f})"


def run(arguments: Arguments) -> None:
    """Compare, and say what differs.

    Raises:
        UserError: there is no such record, or it has no fingerprint.
        SystemExit: status 1, where something differs.
    """
    if arguments.against:
        (name,) = arguments.names
        committed, found = (
            read_record(RECORDS / f"{name}.json"),
            read_record(Path(arguments.against)),
        )
        lines = [f"{name}: {line}" for line in unlike(committed, found)]
        agreed = f"{name}: agrees with the committed record in verdicts and outcomes"
    else:
        records = with_fingerprints()
        if missing := set(arguments.names) - set(records):
            raise UserError(f"--names: {', '.join(sorted(missing))}: no record with a fingerprint")
        records = {name: records[name] for name in arguments.names or records}
        lines = [line for each in stale(records) for line in each]
        agreed = f"{', '.join(records) or 'no record'}: made by code that behaves as this does"
    print("\n".join(lines) or agreed)
    if lines:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(run_command("fingerprints", Arguments, run, sys.argv[1:]))
