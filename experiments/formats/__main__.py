"""All number formats side by side: `python -m experiments.formats`.

Each part has a file of its own in the folder of the records, so that parts may run beside each
other; what has been measured is on disk at once, and the same command goes on. docs/formats.md has
the page that `python -m experiments.figures` makes of them.

    mismatch    k3 of SmolLM2-135M served in a format (mismatch.py)
    errors      relative errors of weights, activations, K, V and gradients (errors.py)
    exact       both sides in the format, in exact mode: no difference at all (exact.py)
    attention   the same of formats inside of attention (attention.py)
    sums        products that add up alike in two orders (sums.py)
    learning    loss after supervised training of the demo in the format (learning.py)

A row that has been measured keeps a fingerprint of its quantizers; a record of other code is
refused. More is measured by larger flags alone: further batches, steps and seeds are further
entries, but other prompts, tokens or steps are another record (`--output`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.behaviour import alike
from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.formats.rows import BASELINE, Row, bits, chosen, fingerprint
from experiments.record import read, write
from fp8rl_jax.caching import keep_compiled_programs
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.errors import UserError

if TYPE_CHECKING:
    from experiments.formats.errors import Tensors

MODEL = "smollm2-135m"
PARTS = ("mismatch", "errors", "exact", "attention", "sums", "learning")


@dataclass(frozen=True)
class Arguments:
    """Measure number formats, part by part and row by row."""

    parts: tuple[str, ...] = PARTS
    """Of mismatch, errors, exact, attention, sums and learning."""
    rows: tuple[str, ...] = ()
    """Formats by name; default: all of experiments/formats/rows.py."""
    module: tuple[str, ...] = ()
    """Python files that register further formats, each a row more."""
    output: str = "experiments/results/formats"
    """Directory of PART.json; entries that are there are kept."""
    flows: tuple[str, ...] = ()
    """Of the mismatch: both, unified, weights, activations, given; default: the first three, and
    the rest for rows that have been measured in torch, too."""
    batches: int = 1
    """Of the mismatch: sets of prompts, each batch with other problems and other draws."""
    prompts: int = 4
    """Of each of ten tasks of reasoning-gym."""
    prompt_tokens: int = 24
    """The last ones of a prompt."""
    new_tokens: int = 16
    """Of each completion."""
    seeds: int = 5
    """Of the learning."""
    steps: int = 150
    """Supervised updates."""
    batch_size: int = 32
    """Examples an update."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        from experiments.formats.mismatch import FLOWS

        faults = [
            f"--parts: {name} unknown ({', '.join(PARTS)})"
            for name in self.parts
            if name not in PARTS
        ]
        faults += [
            f"--flows: {name} unknown ({', '.join(FLOWS)})"
            for name in self.flows
            if name not in FLOWS
        ]
        least = (
            "batches",
            "prompts",
            "prompt_tokens",
            "new_tokens",
            "seeds",
            "steps",
            "batch_size",
        )
        return faults + [
            f"--{name.replace('_', '-')}: {getattr(self, name)} must be at least 1"
            for name in least
            if getattr(self, name) < 1
        ]


def same(before: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whether two descriptions of a row are of one code; another machine's last bits may differ."""
    one, other = (of["fingerprint"] for of in (before, found))
    return alike(one, other) and before | {"fingerprint": other} == found


class Record:
    """PART.json, which is whole on disk after each entry.

    Args:
        path: of the file; what it has is kept.
        settings: of the measurement, the same for all entries.
        command: module that measures.

    Raises:
        UserError: what is there was measured with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], command: str = "experiments.formats"):
        self.path, self.command = path, command
        self.kept = read(path) or {}
        if (before := self.kept.get("settings", settings)) != settings:
            raise UserError(
                f"--output: {path.name} there was measured with {before}, and now {settings} are "
                "asked for; take these, or another folder"
            )
        self.kept |= {"settings": settings}
        self.entries: list[dict[str, Any]] = self.kept.setdefault("entries", [])
        self.rows: dict[str, Any] = self.kept.setdefault("rows", {})

    def describe(self, row: Row) -> None:
        """Keep what a row is.

        Raises:
            UserError: it was another, or its quantizers gave other numbers.
        """
        found: dict[str, Any] = {"activation": row.activation, "gradient": row.gradient}
        self.keep(row.name, found | {"bits": bits(row.name), "fingerprint": fingerprint(row)})

    def keep(self, name: str, found: dict[str, Any]) -> None:
        """Keep a description with a fingerprint; errors as of `describe`."""
        before = self.rows.setdefault(name, found)
        if not same(before, found):
            raise UserError(
                f"--output: {self.path.name} has {name} of other code ({before}; now {found}); "
                "measure it anew in another folder"
            )

    def has(self, **key: Any) -> bool:
        """Whether an entry is there."""
        return any(key.items() <= entry.items() for entry in self.entries)

    def add(self, **entry: Any) -> None:
        """Keep an entry, and write the file."""
        self.kept["made"] = facts(self.command)
        self.entries.append(entry | {"commit": self.kept["made"]["commit"]})
        write(self.path, self.kept)


def mismatch(arguments: Arguments, rows: list[Row]) -> None:
    """k3 of each row, batch by batch."""
    from experiments.formats.mismatch import FLOWS, IN_TORCH, Batch, flows_of, prompts
    from fp8rl_jax.weights.load import load
    from fp8rl_jax.weights.resolve import resolve_model

    settings = {"model": MODEL} | of(arguments, "prompts", "prompt_tokens", "new_tokens")
    record = Record(Path(arguments.output) / "mismatch.json", settings)
    policy, tokenizer = load(resolve_model(MODEL))
    for number in range(arguments.batches):
        given = prompts(tokenizer, number, arguments.prompts, arguments.prompt_tokens)
        batch = Batch(policy, given, number, arguments.new_tokens)
        for row in rows:
            record.describe(row)
            flows = arguments.flows or (FLOWS if row.name in IN_TORCH else FLOWS[:3])
            flows = [
                flow
                for flow in flows
                if flow in flows_of(row) and not record.has(row=row.name, flow=flow, batch=number)
            ]
            for flow, found in batch.measure(row, flows):
                print(f"{row.name}, {flow}, batch {number}", file=sys.stderr)
                record.add(row=row.name, flow=flow, batch=number, **found)


def errors(arguments: Arguments, rows: list[Row]) -> None:
    """Relative errors of each row, on both models."""
    from experiments.formats.errors import errors, tensors_of
    from experiments.formats.learning import problems_of, run_config, trained

    settings = {"model": MODEL} | of(arguments, "prompt_tokens", "steps", "batch_size")
    record = Record(Path(arguments.output) / "errors.json", settings)

    def of_demo():
        config = run_config(arguments.steps, arguments.batch_size)
        session, _ = trained(config, Recipe("formats"))
        encoder, held_out = session.encoder, problems_of(config)[1][:64]
        pairs = [(encoder.tokens(x), encoder.target(x)) for x in held_out]
        width = max(len(prompt) + len(target) for prompt, target in pairs)
        tokens = np.full((len(pairs), width), -1, np.int32)
        for row, (prompt, target) in zip(tokens, pairs, strict=True):
            row[: len(prompt) + len(target)] = [*prompt, *target]
        answered = np.arange(width) >= np.asarray([[len(prompt)] for prompt, _ in pairs])
        return tensors_of(session.weights, tokens, (tokens >= 0) & answered)

    for name, collect in {MODEL: partial(_of_model, arguments), "demo": of_demo}.items():
        if all(record.has(row=row.name, model=name) for row in rows):
            continue
        tensors = collect()
        for row in rows:
            record.describe(row)
            if not record.has(row=row.name, model=name):
                print(f"{row.name}, errors, {name}", file=sys.stderr)
                record.add(row=row.name, model=name, **errors(row, tensors))


def _of_model(arguments: Arguments) -> Tensors:
    """What the model multiplies."""
    from experiments.formats.errors import tensors_of
    from experiments.formats.mismatch import prompts
    from fp8rl_jax.weights.load import load
    from fp8rl_jax.weights.resolve import resolve_model

    policy, tokenizer = load(resolve_model(MODEL))
    given = prompts(tokenizer, 0, 1, arguments.prompt_tokens)
    real = np.arange(given.tokens.shape[1]) < np.asarray(given.lengths)[:, None]
    return tensors_of(policy, np.where(real, given.tokens, -1), real)


def sums(arguments: Arguments, rows: list[Row]) -> None:
    """Two orders of each row's products."""
    from experiments.formats.sums import alike

    settings = {"model": MODEL} | of(arguments, "prompt_tokens")
    record = Record(Path(arguments.output) / "sums.json", settings)
    if all(record.has(row=row.name) for row in rows):
        return
    tensors = _of_model(arguments)
    for row in rows:
        record.describe(row)
        if not record.has(row=row.name):
            print(f"{row.name}, sums", file=sys.stderr)
            record.add(row=row.name, alike=alike(row, tensors))


def exact(arguments: Arguments, rows: list[Row]) -> None:
    """Exact mode in each row."""
    from experiments.formats.exact import NEW, differences
    from experiments.formats.mismatch import prompts
    from fp8rl_jax.weights.load import load
    from fp8rl_jax.weights.resolve import resolve_model

    settings = {"model": MODEL} | of(arguments, "prompt_tokens")
    record = Record(Path(arguments.output) / "exact.json", settings)
    policy, tokenizer = load(resolve_model(MODEL))
    given = prompts(tokenizer, 0, 1, arguments.prompt_tokens)
    for row in rows:
        record.describe(row)
        if not record.has(row=row.name):
            print(f"{row.name}, exact", file=sys.stderr)
            record.add(row=row.name, **differences(policy, row, given, NEW))


def attention(arguments: Arguments, rows: list[Row]) -> None:
    """k3 and exact mode of formats inside of attention, whatever rows are asked for."""
    from experiments.formats.attention import ATTENTION
    from experiments.formats.exact import NEW, differences
    from experiments.formats.mismatch import Batch, prompts
    from fp8rl_jax.weights.load import load
    from fp8rl_jax.weights.resolve import resolve_model

    settings = {"model": MODEL} | of(arguments, "prompts", "prompt_tokens", "new_tokens")
    record = Record(Path(arguments.output) / "attention.json", settings)
    policy, tokenizer = load(resolve_model(MODEL))
    given = prompts(tokenizer, 0, arguments.prompts, arguments.prompt_tokens)
    few = prompts(tokenizer, 0, 1, arguments.prompt_tokens)
    batch = Batch(policy, given, 0, arguments.new_tokens)
    for row in ATTENTION:
        key = {"row": row.name, "roles": list(row.roles)}
        flows = [flow for flow in row.flows if not record.has(**key, flow=flow)]
        for flow, found in batch.measure(row, flows):
            print(f"{row.name}, {', '.join(row.roles)}, {flow}", file=sys.stderr)
            record.add(**key, flow=flow, **found)
        if "unified" in row.flows and not record.has(**key, flow="exact"):
            print(f"{row.name}, {', '.join(row.roles)}, exact", file=sys.stderr)
            record.add(**key, flow="exact", **differences(policy, row, few, NEW))


def learning(arguments: Arguments, rows: list[Row]) -> None:
    """Losses of each row, seed by seed."""
    from experiments.formats.learning import losses, run_config

    settings = of(arguments, "steps", "batch_size")
    record = Record(Path(arguments.output) / "learning.json", settings)
    config = run_config(arguments.steps, arguments.batch_size)
    for row in (Row(BASELINE), *rows):
        if row.name != BASELINE:
            record.describe(row)
        for seed in range(arguments.seeds):
            if not record.has(row=row.name, seed=seed):
                print(f"{row.name}, learning, seed {seed}", file=sys.stderr)
                in_row = replace(config, compute_dtype=row.dtype.name)
                record.add(row=row.name, seed=seed, **losses(in_row, row.unified, seed))


def of(arguments: Arguments, *names: str) -> dict[str, Any]:
    """Some of the arguments."""
    return {name: getattr(arguments, name) for name in names}


def run(arguments: Arguments) -> None:
    """Part by part, row by row."""
    keep_compiled_programs()
    rows = chosen(arguments.rows, arguments.module)
    for part in arguments.parts:
        MEASURES[part](arguments, rows)


MEASURES: dict[str, Callable[[Arguments, list[Row]], None]] = {
    "mismatch": mismatch,
    "errors": errors,
    "exact": exact,
    "attention": attention,
    "sums": sums,
    "learning": learning,
}


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("formats", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
