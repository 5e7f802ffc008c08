"""Do the committed records still say what the code does? `python -m experiments.fingerprints`.

An ablation's record has a fingerprint of the code that made it (fp8rl_jax/ablation/behaviour.py);
some records that are no ablations' have one of golden runs of the recipes that they measured
(behaviour.py). Here it is taken again from the present code, for all records that have one or for
those that are named, and what differs is told, a line each; then the record has to be made again.

    python -m experiments.fingerprints --names demo --against runs/ablation/demo/ablation.json

compares two records instead: what the runs of another machine found with what the committed ones
did, by the verdict on each arm and by the interval of its outcomes over seeds. `make ablation` ends
with it.

    python -m experiments.fingerprints --names compare/jet-rl/compare --anew

makes records of `ARMS` again, each by the command that stands in it, with their fingerprints.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import fp4, fp8_lm, stability
from experiments.behaviour import behaviour, of_arms
from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.formats.attention import ATTENTION
from experiments.formats.rows import BFLOAT16, ROWS
from experiments.record import write
from fp8rl_jax.ablation.behaviour import differences, fingerprint
from fp8rl_jax.ablation.design import Design, read_design
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.durable import write_durably
from fp8rl_jax.errors import UserError
from fp8rl_jax.statistics import Interval, t_interval

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results"
ABLATIONS, RECORDS = ROOT / "experiments/ablations", RESULTS / "ablations"
_FLOAT32 = {"compute_dtype": "float32"}
_BF16 = {"bf16": {"recipe": "bf16"} | _FLOAT32}
_EXACT = {"recipe": "jet-rl", "precision": {"exact": True}} | _FLOAT32


def _own(recipes: Mapping[str, Recipe], **settings: Any) -> dict[str, dict[str, Any]]:
    """An arm of each recipe of a study's own."""
    return {
        name.replace(", ", "-").replace(" ", "_"): {"recipe": "own"}
        | {"recipes": {"own": made.table()}, "precision": {"exact": False}}
        | _FLOAT32
        | settings
        for name, made in recipes.items()
    }


ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "compare/bf16/compare": _BF16 | {"bfloat16": {"recipe": "bf16", "compute_dtype": "bfloat16"}},
    "compare/fp8-rollout/compare": _BF16 | {"fp8-rollout": {"recipe": "fp8-rollout"} | _FLOAT32},
    "compare/jet-rl/compare": _BF16
    | {"jet-rl": {"recipe": "jet-rl", "precision": {"exact": False}} | _FLOAT32},
    "compare/jet-rl-exact/compare": _BF16 | {"jet-rl": _EXACT},
    "exact/identity": {"bf16": _EXACT | {"recipe": "bf16"}, "jet-rl": _EXACT},
    "exploration": _BF16
    | {
        weight: {"recipe": "served", "lora": {"rank": 8, "base": "rollout"}}
        | {"recipes": {"served": {"base": "w4a16", "rollout": {"weight": weight}}}}
        | _FLOAT32
        for weight in ("e4m3-128x128", "nvfp4", "int4-1x128")
    },
    "formats/attention": _own(
        {"-".join([row.name, *row.roles]): row.rollout_only for row in ATTENTION}
    ),
    "formats/learning": _BF16
    | _own({row.name: row.unified for row in ROWS})
    | {BFLOAT16: {"recipe": "bf16", "compute_dtype": "bfloat16"}},
    "fp4/learning": _own(fp4.LEARNED),
    "fp8_lm": _own({name: fp8_lm.of_arm(name) for name in fp8_lm.ARMS}),
    "stability/runs": _own(
        {row.name: row.forward for row in stability.rows()},
        formats=["experiments/formats/unscaled.py"],
    ),
    "sampling_replay": {
        recipe: {"recipe": recipe, "rl": {"correction": {"truncated_sampling": "replay"}}}
        | _FLOAT32
        for recipe in ("bf16", "fp8-rl")
    },
}
ARMS |= {
    "compare/moe-jet-rl-exact/compare": ARMS["compare/jet-rl-exact/compare"],
    "compare/vllm-bfloat16/compare": ARMS["compare/bf16/compare"],
    "compare/vllm-float32/compare": ARMS["compare/bf16/compare"],
    "vllm_engine": ARMS["compare/bf16/compare"] | {"fp8-kv": {"recipe": "fp8-kv"} | _FLOAT32},
}
"""What records measure that are no ablations' and whose commands take no fingerprint; one that is
compared with it where that is one recipe."""
OTHERS = (
    *("depth/results", "fake_quantization", "gradients/results"),
    *(ARMS.keys() - {"formats/learning"}),
)
"""Records that are no ablations' and have a fingerprint, in experiments/results."""


@dataclass(frozen=True)
class Arguments:
    """Compare the committed records' fingerprints with the present code, or a record with one."""

    names: tuple[str, ...] = ()
    """Of records in experiments/results/ablations, or of those of `OTHERS`; default: all that have
    a fingerprint."""
    against: str = ""
    """ablation.json of other runs of the one that is named."""
    anew: bool = False
    """Make the records again that are named, with the fingerprints of the present code."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        if self.against and len(self.names) != 1:
            return ["--against: name the one record that it is compared with"]
        if self.anew and (self.against or not self.names or set(self.names) - set(ARMS)):
            return [f"--anew: give it alone, with --names of {', '.join(ARMS)}"]
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


def make_anew(name: str) -> None:
    """Make a record of `ARMS` again by its own command; what it prints goes into a .txt beside it
    if there is one.

    Raises:
        UserError: the command failed, or wrote nothing there; the record is the one that it was.
    """
    path = RESULTS / f"{name}.json"
    before = path.read_text()
    words = read_made(json.loads(before))["command"]
    module = ["fp8rl_jax.cli.main", *words[1:]] if words[0] == "fp8rl" else words[2:]
    taken, here = behaviour(ARMS[name]), facts()
    path.unlink()
    try:
        done = subprocess.run(
            [sys.executable, "-m", *module],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UserError(f"{name}: status {done.returncode} of: {shlex.join(words)}")
        record = read_record(path)
        if path.with_suffix(".txt").exists():
            path.with_suffix(".txt").write_text(done.stdout)
    except BaseException:
        path.write_text(before)
        raise
    record["behaviour"] = taken
    read_made(record).update({key: here[key] for key in ("commit", "uncommitted_changes")})
    if path.read_text().count("\n") > 1:
        write(path, record)
    else:  # compare's are as long as their tokens, and in one line
        write_durably(path, json.dumps(record) + "\n")


def read_made(record: dict[str, Any]) -> dict[str, Any]:
    """Of what a record was made: it stands in "made", or beside what was measured."""
    return record.get("made", record)


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
        of, command = record["behaviour"], " ".join(read_made(record)["command"])
        found[name] = of_arms(of["arms"]), of["fingerprint"], command
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
    if arguments.anew:
        for name in arguments.names:
            make_anew(name)
            print(f"{name}: made again", flush=True)
        return
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
