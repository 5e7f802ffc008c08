"""`python -m experiments.mismatch ...`: trains what is missing, then writes the record, the tables and the charts."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from experiments.mismatch.variants import ROOT, VARIANTS
from fp8rl_jax.cli.load import parse_arguments
from fp8rl_jax.errors import UserError


@dataclass(frozen=True)
class Arguments:
    """Mismatch of rollout and trainer, recipe by recipe."""

    variants: tuple[str, ...] = tuple(VARIANTS)
    """What is trained where it is not yet; none: only the record's tables and charts are made anew."""
    seeds: tuple[int, ...] = (0, 1)
    """One run of each variant a seed; they share the warm start."""
    runs: str = "runs/mismatch"
    """Directory of the runs, from the repository's root; their warm start lies where mismatch.toml says."""
    output: str = "experiments/results/mismatch"
    """Directory of results.json, summary.md and the charts."""
    threads: int = 1
    """Processors of a run."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        unknown = [name for name in self.variants if name not in VARIANTS]
        checks = [(not unknown, f"--variants: {', '.join(unknown)} unknown (known: {', '.join(VARIANTS)})")]
        checks += [(self.threads >= 1, f"--threads: {self.threads} must be at least 1")]
        return [message for holds, message in checks if not holds]


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    try:
        run(parse_arguments(Arguments, argv, "python -m experiments.mismatch"))
    except UserError as error:
        for line in str(error).splitlines():
            print(f"mismatch: error: {line}", file=sys.stderr)
        return 2
    return 0


def run(arguments: Arguments) -> None:
    """Seed by seed, so that a call that is cut off leaves all variants of the first seeds."""
    from experiments.mismatch import plots, runs, summary
    from experiments.mismatch.record import Record

    output, directory = ROOT / arguments.output, ROOT / arguments.runs
    record = Record(output / "results.json")
    start = runs.warm_start(arguments.threads) if arguments.variants else ""
    for seed in arguments.seeds:
        for variant in arguments.variants:
            place = runs.Place(variant, seed, directory / variant / f"seed{seed}")
            runs.train(place, arguments.threads)
            record.add(variant, seed, runs.read(place, start))
            record.write()
    if not record.runs:
        raise UserError(f"{record.path}: has no runs; name some with --variants")
    found = record.write()
    (output / "summary.md").write_text(summary.table(found))
    plots.draw_mismatch(record.runs, found, output / "mismatch.svg")
    plots.draw_learning(record.runs, output / "learning.svg")
    print(summary.table(found))
    if len(record.starts()) > 1:
        print(f"The runs started from {len(record.starts())} different policies: seeds and variants do not compare.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
