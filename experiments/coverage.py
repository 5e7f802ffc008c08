"""What the statistics of paired runs claim, against simulated studies: `python -m
experiments.coverage`.

Studies are drawn whose truth is known, and judged by fp8rl_jax/statistics.py: how often an interval
holds the true difference, and how often a verdict is wrong. Writes
experiments/results/coverage.json and the tables of docs/statistics.md.

    normal      the difference of a pair is normal
    wide        the same, five times as wide
    skewed      its spread is an exponential's: most seeds a little better, few much worse
    tied        outcomes are k / 256, and seven pairs of ten have no difference but the arm's
    collapsing  of either arm, every fifth run drops to 0; others as in normal
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.figures import filled, table
from fp8rl_jax.statistics import (
    POWER,
    VERDICTS,
    Judgement,
    Look,
    detectable_difference,
    judge,
    smallest_gap,
)

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "experiments" / "results" / "coverage.json"
PAGE = ROOT / "docs" / "statistics.md"
STEP = 1 / 256
MARGIN = 5 * STEP
ALPHA = 0.05
SEEDS = (3, 5, 10)
LOOKS = ((6, 2), (9, 3), (10, 2))
"""Seeds at the last look, and how many looks."""
SPREAD = 0.01
"""Standard deviation of a pair's difference; outcomes of one arm spread by twice as much."""
COLLAPSE = 0.2


@dataclass(frozen=True)
class Arguments:
    """Simulated studies, their record and the tables of docs/statistics.md."""

    studies: int = 100_000
    """For each row of a table."""


type Draw = Callable[[np.random.Generator, tuple[int, ...], float], tuple[np.ndarray, np.ndarray]]
"""Outcomes [studies, 1 + arms, seeds], the baseline's first, of arms with this true difference;
and which collapsed."""


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], shift: float
) -> tuple[np.ndarray, np.ndarray]:
    """Seeds that differ by 0.02 in all arms, and arms by 0.01 in a seed."""
    return _arms(rng, shape, shift, rng.normal(0, SPREAD, shape)), np.zeros(shape, bool)


def wide(
    rng: np.random.Generator, shape: tuple[int, ...], shift: float
) -> tuple[np.ndarray, np.ndarray]:
    """Normal, with a spread beyond the margin."""
    return _arms(rng, shape, shift, rng.normal(0, 5 * SPREAD, shape)), np.zeros(shape, bool)


def skewed(
    rng: np.random.Generator, shape: tuple[int, ...], shift: float
) -> tuple[np.ndarray, np.ndarray]:
    """The same spread, from an exponential: few pairs in which the arm is much worse."""
    noise = SPREAD * (1 - rng.exponential(1, shape))
    return _arms(rng, shape, shift, noise), np.zeros(shape, bool)


def tied(
    rng: np.random.Generator, shape: tuple[int, ...], shift: float
) -> tuple[np.ndarray, np.ndarray]:
    """Counts of 256: differences of -1, 0 and +2 problems in 20, 70 and 10 % of the pairs."""
    noise = rng.choice([-1, 0, 2], shape, p=[0.2, 0.7, 0.1])
    noise[:, 0] = 0
    shifts = np.full((*shape[:-1], 1), round(shift / STEP))
    shifts[:, 0] = 0
    seeds = np.round(rng.normal(180, 5, (shape[0], 1, shape[2])))
    return (seeds + noise + shifts) * STEP, np.zeros(shape, bool)


def collapsing(
    rng: np.random.Generator, shape: tuple[int, ...], shift: float
) -> tuple[np.ndarray, np.ndarray]:
    """Normal, and a fifth of all runs, whatever the arm, ends at 0."""
    # what is left has to differ by more, for the means to differ by `shift`
    outcomes, _ = normal(rng, shape, shift / (1 - COLLAPSE))
    down = rng.random(shape) < COLLAPSE
    return np.where(down, 0.0, outcomes), down


def _arms(
    rng: np.random.Generator, shape: tuple[int, ...], shift: float, noise: np.ndarray
) -> np.ndarray:
    noise[:, 0], seeds = 0.0, rng.normal(0.7, 2 * SPREAD, (shape[0], 1, shape[2]))
    shifts = np.full((1, shape[1], 1), shift)
    shifts[:, 0] = 0.0
    return seeds + shifts + noise


EFFECTS: dict[str, Draw] = {
    "normal": normal,
    "wide": wide,
    "skewed": skewed,
    "tied": tied,
    "collapsing": collapsing,
}


def judged(outcomes: np.ndarray, down: np.ndarray, look: Look | None = None) -> Judgement:
    """Verdicts of studies, as `compare_arms` gives them for one."""
    return judge(
        outcomes[:, 1:] - outcomes[:, :1],
        MARGIN,
        ALPHA,
        "higher",
        smallest_gap(outcomes.reshape(len(outcomes), -1)),
        down[:, 1:].sum(-1),
        down[:, 0].sum(-1),
        outcomes.shape[-1],
        np.zeros((len(outcomes), outcomes.shape[1] - 1), bool),
        look,
    )


def share(hits: np.ndarray) -> float:
    """Share of studies in which any arm was hit; hits: [studies, arms]."""
    return float(hits.any(-1).mean())


def of(verdicts: np.ndarray, *names: str) -> np.ndarray:
    """Where a verdict is one of these."""
    return np.isin(verdicts, [VERDICTS.index(name) for name in names])


def errors(effect: str, n: int, studies: int, arms: int = 1, looks: int = 1) -> dict[str, float]:
    """What is right and wrong of arms that are equal, and of arms that are worse by the margin.

    Returns:
        Shares of studies: `covered`, the interval holds the true difference, the less of both
        truths (looks: at the last, and all arms'); of equal arms `worse`, `better`, and
        `no worse`, which is right; of arms that are worse by the margin `no worse, false`. A wrong
        claim on any arm at any look counts.
    """
    found = {"covered": 1.0}
    for truth in (0.0, -MARGIN):
        rng = np.random.default_rng([sum(effect.encode()), n, arms, looks, truth < 0])
        outcomes, down = EFFECTS[effect](rng, (studies, 1 + arms, n), truth)
        claims: dict[str, np.ndarray] = {}
        for number in range(1, looks + 1):
            seen = n * number // looks
            at = judged(outcomes[..., :seen], down[..., :seen], Look(number, looks))
            for name in ("worse", "better", "no worse"):
                words = ("better", "no worse") if name == "no worse" else (name,)
                hits = of(at.verdict, *words)
                claims[name] = claims.get(name, np.zeros_like(hits)) | hits
        misses = (at.low > truth + 1e-12) | (at.high < truth - 1e-12)
        found["covered"] = min(found["covered"], 1 - share(misses))
        if truth == 0:
            found |= {name: share(hits) for name, hits in claims.items()}
        else:
            found["no worse, false"] = share(claims["no worse"])
    return found


def collapse(rate: float, n: int, studies: int) -> dict[str, float]:
    """Verdicts on an arm, otherwise equal, of which this share of runs drops to 0."""
    rng = np.random.default_rng([7, n, round(100 * rate)])
    outcomes, down = normal(rng, (studies, 2, n), 0.0)
    down[:, 1] = rng.random((studies, n)) < rate
    found = judged(np.where(down, 0.0, outcomes), down)
    return {
        "worse": share(of(found.verdict, "worse")),
        "can't tell": share(of(found.verdict, "can't tell")),
        "no worse": share(of(found.verdict, "no worse", "better")),
    }


def seen(n: int, studies: int) -> dict[str, float]:
    """The difference that n seeds see, in standard deviations; and how often they did."""
    difference = detectable_difference(1.0, n, ALPHA)
    assert difference is not None
    rng = np.random.default_rng([8, n])
    found = judged(*normal(rng, (studies, 2, n), SPREAD * difference))
    return {"detectable": difference, "seen": share(of(found.verdict, "better"))}


def simulate(studies: int) -> dict[str, Any]:
    """The record, but for what made it."""
    return {
        "studies": studies,
        "margin": MARGIN,
        "alpha": ALPHA,
        "errors": {
            effect: {str(n): errors(effect, n, studies) for n in SEEDS} for effect in EFFECTS
        },
        "arms": {
            effect: {str(n): errors(effect, n, studies, arms=3) for n in SEEDS}
            for effect in ("normal", "wide", "skewed")
        },
        "looks": {
            effect: {str(n): errors(effect, n, studies, looks=looks) for n, looks in LOOKS}
            for effect in ("normal", "skewed")
        },
        "collapse": {
            str(rate): {str(n): collapse(rate, n, studies) for n in SEEDS}
            for rate in (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
        },
        "seen": {str(n): seen(n, studies) for n in (2, 3, 4, 5, 6, 8, 10, 15, 20)},
    }


def percent(x: float) -> str:
    """A share as it stands in the page."""
    return f"{100 * x:.1f} %"


def findings(record: dict[str, Any]) -> str:
    """Where the statistics do less than they claim, in words."""
    of_effect, collapses = record["errors"], record["collapse"]

    def each(effect: str, key: str) -> str:
        shares = [percent(of_effect[effect][str(n)][key]) for n in SEEDS]
        return f"{', '.join(shares[:-1])} and {shares[-1]}"

    seeds = f"{', '.join(map(str, SEEDS[:-1]))} and {SEEDS[-1]}"
    normal = max(
        row[key]
        for part in ("errors", "arms", "looks")
        for effect in ("normal", "wide")
        for row in record[part].get(effect, {}).values()
        for key in ("worse", "better", "no worse, false")
    )
    return "\n".join(
        f"- {line}"
        for line in (
            f"Normal differences: no kind of wrong claim is made in more than {percent(normal)} of "
            "the studies, over arms and looks.",
            f"Skewed differences: with {seeds} seeds the interval of 95 % holds the truth in "
            f'{each("skewed", "covered")}, and "no worse" is wrong in '
            f"{each('skewed', 'no worse, false')} instead of 2.5 %. Where an arm is now and then "
            "much worse, few seeds flatter it. A skew the other way makes "
            '"worse" as wrong as "better" is here.',
            f"Ties: with {seeds} seeds the interval holds the truth in {each('tied', 'covered')}.",
            "Collapse: few seeds do not show a rare one. An arm that collapses in "
            f"10 % of its runs is called no worse by "
            f"{percent(collapses['0.1']['5']['no worse'])} of the studies with 5 seeds, and by "
            f"{percent(collapses['0.1']['10']['no worse'])} with 10: those in which it did not. At "
            f"80 %, {percent(collapses['0.8']['5']['worse'])} of those with 5 seeds "
            'say "worse".',
            '"Can\'t tell" is not "no worse": of two equal arms whose pairs differ by half of the '
            f"margin, {percent(of_effect['normal']['3']['no worse'])} of the studies with 3 seeds "
            "say no worse.",
        )
    )


def tables(record: dict[str, Any]) -> str:
    """What the page takes from the record, in Markdown."""
    heads = [
        "seeds",
        "the interval holds the truth",
        '"no worse", but worse by the margin',
        '"worse", but equal',
        '"better", but equal',
        '"no worse", equal: right',
    ]
    keys = ("covered", "no worse, false", "worse", "better", "no worse")
    parts = []
    for title, part in (
        ("One arm against the baseline.", "errors"),
        ("Three arms against one baseline: any of them.", "arms"),
        ("Several looks: at any of them.", "looks"),
    ):
        looks = {str(n): f"{n}, in {count} looks" for n, count in LOOKS}
        rows = [
            [effect, looks[n] if part == "looks" else n, *(percent(row[key]) for key in keys)]
            for effect, by_n in record[part].items()
            for n, row in by_n.items()
        ]
        parts.append(f"{title}\n\n{table(['effect', *heads], rows)}")
    rows = [
        [
            percent(float(rate)),
            n,
            *(percent(row[key]) for key in ("worse", "can't tell", "no worse")),
        ]
        for rate, by_n in record["collapse"].items()
        for n, row in by_n.items()
    ]
    head = ["runs of the arm that collapse", "seeds", '"worse"', '"can\'t tell"', '"no worse"']
    parts.append(f"An arm that collapses, and a baseline that never does.\n\n{table(head, rows)}")
    rows = [
        [n, f"{row['detectable']:.2f}", percent(row["seen"])] for n, row in record["seen"].items()
    ]
    head = ["seeds", "sees a difference of (standard deviations of a pair's)", "was seen in"]
    parts.append(f"What so many seeds see in {POWER:.0%} of all studies.\n\n{table(head, rows)}")
    about = (
        f"{record['studies']:,} studies a row, margin {record['margin']:.4f}, alpha "
        f"{record['alpha']:g}; pairs differ with a standard deviation of {SPREAD:g}."
    )
    return "\n\n".join([findings(record), about, *parts]) + "\n"


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("coverage", Arguments, run, argv)


def run(arguments: Arguments) -> None:
    """Simulate, and write record and page."""
    record = {"made": facts("experiments.coverage"), **simulate(arguments.studies)}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(filled(PAGE.read_text(), tables(record)))
    print(tables(record))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
