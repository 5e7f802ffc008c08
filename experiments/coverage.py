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

Where problems stand for others, the truth is the mean over all problems that there could be:

    alike       the arm gains as much on every problem
    own         on each problem it gains another amount, by as much as runs differ there
    binary      an answer is right or wrong, the arm is better on some problems and worse on others

And answers from logits: of the problem, of the seed, of arm and seed, and of arm and problem.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.figures import filled, table
from experiments.record import write
from fp8rl_jax.statistics import (
    POWER,
    VERDICTS,
    Judgement,
    Look,
    detectable_difference,
    judge,
    over_problems,
    over_seeds,
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
PROBLEMS = 200


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
    gap = smallest_gap(outcomes.reshape(len(outcomes), -1))
    return judge(
        over_seeds(outcomes[:, 1:] - outcomes[:, :1], gap),
        MARGIN,
        ALPHA,
        "higher",
        down[:, 1:].sum(-1),
        down[:, 0].sum(-1),
        outcomes.shape[-1],
        np.zeros((len(outcomes), outcomes.shape[1] - 1), bool),
        look,
    )


def alike(rng: np.random.Generator, shape: tuple[int, ...], shift: float) -> np.ndarray:
    """Runs differ by 0.01, and on a problem by 0.3 besides."""
    return shift + rng.normal(0, SPREAD, (*shape[:-1], 1)) + rng.normal(0, 0.3, shape)


def own(rng: np.random.Generator, shape: tuple[int, ...], shift: float) -> np.ndarray:
    """The same, and each problem has a gain of its own that differs by 0.3."""
    studies, _, problems = shape
    return alike(rng, shape, shift) + rng.normal(0, 0.3, (studies, 1, problems))


def binary(rng: np.random.Generator, shape: tuple[int, ...], shift: float) -> np.ndarray:
    """Right in 40 to 80 %, and by the arm in a fifth more or less, problem by problem."""
    studies, _, problems = shape
    rate = rng.uniform(0.4, 0.8, (studies, 1, problems))
    of_arm = rate + shift + rng.choice([-0.2, 0.2], rate.shape)
    of_arm = of_arm + SPREAD * rng.choice([-1, 1], (*shape[:-1], 1))
    return (rng.random(shape) < of_arm) * 1.0 - (rng.random(shape) < rate)


CROSSED: dict[str, Callable[[np.random.Generator, tuple[int, ...], float], np.ndarray]] = {
    "alike": alike,
    "own": own,
    "binary": binary,
}
"""Differences of one arm, [studies, seeds, problems], with this mean over all problems."""


def over(effect: str, n: int, studies: int) -> dict[str, float]:
    """What is right and wrong where problems stand for others.

    Returns:
        Shares as `errors` gives them, `covered, seeds alone` of an interval that takes these
        problems for all, and `covered, one seed`.
    """
    found: dict[str, float] = {}
    batch = min(studies, 1000)
    for truth in (0.0, -MARGIN):
        drawn: dict[str, list[float]] = {}
        rng = np.random.default_rng([sum(effect.encode()), n, truth < 0])
        for _ in range(studies // batch):
            differences = CROSSED[effect](rng, (batch, n, PROBLEMS), truth)[:, None]
            one, plain, at = (
                _judged_over(part, crossed)
                for part, crossed in (
                    (differences[:, :, :1], True),
                    (differences, False),
                    (differences, True),
                )
            )
            claims = {
                "covered": holds(at, truth),
                "covered, seeds alone": holds(plain, truth),
                "covered, one seed": holds(one, truth),
            }
            claimed = share(of(at.verdict, "better", "no worse"))
            if truth == 0:
                claims |= {name: share(of(at.verdict, name)) for name in ("worse", "better")}
                claims["no worse"] = claimed
            else:
                claims["no worse, false"] = claimed
            for name, value in claims.items():
                drawn.setdefault(name, []).append(value)
        for name, values in drawn.items():
            found[name] = min(found.get(name, 1.0), float(np.mean(values)))
    return found


def _judged_over(differences: np.ndarray, crossed: bool, step: float = 1e-9) -> Judgement:
    """Verdicts on one arm of each study; differences: [studies, 1, seeds, problems]."""
    steps = np.full(len(differences), step)
    estimate = over_seeds(differences.mean(-1), steps)
    none = np.zeros(differences.shape[:2], int)
    return judge(
        over_problems(estimate, differences, steps) if crossed else estimate,
        MARGIN,
        ALPHA,
        "higher",
        none,
        none[:, 0],
        differences.shape[2],
        none > 0,
    )


ANSWERS = ((2, 50, 4, 0.0), (3, 50, 4, 0.0), (5, 50, 4, 0.0), (5, 1024, 1, 0.7), (10, 1024, 1, 0.7))
"""Seeds, problems, answers to each, and by how many logits the effect of the arm differs from
problem to problem."""


def answers(n: int, problems: int, samples: int, own: float, studies: int) -> dict[str, float]:
    """What is right and wrong where right answers are drawn from logits: of the problem (sd 1), of
    the seed (0.2), of arm and seed (0.05), and of arm and problem (`own`).

    Returns:
        Shares as `over` gives them, and `beyond`, of intervals that reach beyond 1, where
        `compare_arms` cuts them.
    """
    kept: dict[str, list[float]] = {}
    rng = np.random.default_rng([n, problems, samples, round(100 * own)])
    common = 1 + 0.2**2
    shifts = {truth: _shifted(common, 0.05**2 + own**2, truth) for truth in (0.0, -MARGIN)}
    batch = min(studies, 200)
    for truth, shift in shifts.items():
        for _ in range(studies // batch):
            base = rng.normal(0.5, 1, (batch, 1, problems)) + rng.normal(0, 0.2, (batch, n, 1))
            of_arm = rng.normal(shift, 0.05, (batch, n, 1)) + rng.normal(
                0, own, (batch, 1, problems)
            )
            right = [rng.binomial(samples, special.expit(x)) for x in (base, base + of_arm)]
            differences = ((right[1] - right[0]) / samples)[:, None]
            at = _judged_over(differences, crossed=True, step=1 / (problems * samples))
            claims = {"covered": holds(at, truth)}
            if truth == 0:
                claims |= {name: share(of(at.verdict, name)) for name in ("worse", "better")}
                claims["beyond"] = share((at.low < -1) | (at.high > 1))
            else:
                claims["no worse, false"] = share(of(at.verdict, "better", "no worse"))
            for name, value in claims.items():
                kept.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in kept.items()}


def _shifted(common: float, of_arm: float, truth: float) -> float:
    """The logit by which an arm is to be shifted for its rate of right answers to differ by
    `truth` in the mean over all seeds and problems."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)

    def rate(shift: float, variance: float) -> float:
        right = special.expit(0.5 + shift + np.sqrt(variance) * nodes)
        return float((weights * right).sum() / weights.sum())

    wanted, low, high = rate(0.0, common) + truth, -3.0, 3.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(middle, common + of_arm) < wanted else (low, middle)
    return low


def holds(found: Judgement, truth: float) -> float:
    """Share of studies in which the intervals of all arms hold the truth."""
    return 1 - share((found.low > truth + 1e-12) | (found.high < truth - 1e-12))


def hall(n: int, studies: int) -> dict[str, float]:
    """Hall's transformation (P. Hall, 1992), the usual remedy for skew: whether it holds the truth
    of skewed and of normal differences, and how much wider it is than t's there."""
    rng, found = np.random.default_rng([9, n]), {}
    critical = special.stdtrit(n - 1, 1 - ALPHA / 2)
    for effect, x in (
        ("skewed", 1 - rng.exponential(1, (studies, n))),
        ("normal", rng.normal(0, 1, (studies, n))),
    ):
        mean, deviation = x.mean(-1), x.std(-1, ddof=1)
        centred = x - mean[:, None]
        skew = (centred**3).mean(-1) / (centred**2).mean(-1) ** 1.5
        low, high = (
            mean - deviation * 3 / skew * (np.cbrt(1 + skew * (side / n**0.5 - skew / (6 * n))) - 1)
            for side in (critical, -critical)
        )
        found[effect] = float(((low <= 0) & (high >= 0)).mean())
        if effect == "normal":
            plain = 2 * critical * deviation / n**0.5
            found["width"] = float(np.mean(high - low) / plain.mean())
    return found


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
        found["covered"] = min(found["covered"], holds(at, truth))
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


def simulate(studies: int, answered: int | None = None) -> dict[str, Any]:
    """The record, but for what made it; `answered`: studies of answers, a fifth of `studies`."""
    answered = studies // 5 if answered is None else answered
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
        "problems": {
            effect: {str(n): over(effect, n, studies // 5) for n in SEEDS} for effect in CROSSED
        },
        "answers": {
            f"{n} x {problems} x {samples}": answers(n, problems, samples, own, answered)
            for n, problems, samples, own in ANSWERS
            if answered
        },
        "hall": {str(n): hall(n, studies) for n in SEEDS},
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
        return listed([percent(of_effect[effect][str(n)][key]) for n in SEEDS])

    def listed(values: list[str]) -> str:
        return f"{', '.join(values[:-1])} and {values[-1]}"

    def of_hall(key: str) -> str:
        rows = [record["hall"][str(n)] for n in SEEDS]
        return listed(
            [f"{row[key]:.2f} times" if key == "width" else percent(row[key]) for row in rows]
        )

    def of_problems(key: str) -> str:
        return listed([percent(record["problems"]["own"][str(n)][key]) for n in SEEDS])

    wrong = {
        name: max(row[key] for key in ("worse", "better", "no worse, false"))
        for name, row in record["answers"].items()
    }
    beyond = [percent(record["answers"][f"{n} x 50 x 4"]["beyond"]) for n in (2, 3, 5)]
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
            "No remedy for skew is used, since none brings few seeds to 95 %. Hall's "
            f"transformation holds the truth of these differences in {of_hall('skewed')}, and of "
            f"normal ones its intervals are {of_hall('width')} as wide as t's.",
            "Problems that stand for others: an interval over seeds alone holds their mean in "
            f"{of_problems('covered, seeds alone')} where each problem has a gain of its own; over "
            f"seeds and problems in {of_problems('covered')}.",
            "Answers: where arms differ from problem to problem, verdicts over 5 seeds and 1024 "
            f"problems are wrong in {percent(wrong['5 x 1024 x 1'])} of one kind instead of 2.5 %: "
            "Satterthwaite's degrees of freedom are estimated with the variance, and come out "
            "large where it came out small. With 10 seeds it is "
            f"{percent(wrong['10 x 1024 x 1'])}. To take nothing away would make it about 1 %, at "
            "the price of wider intervals everywhere. (400 studies of this kind had shown 5.2 %, "
            "the most of ten rows and with an interval of its own from 3.2 to 7.8 %.)",
            "Equal arms, 50 problems and four answers to each: with 2, 3 and 5 seeds the interval "
            f"of Student's t reaches beyond 1 in {listed(beyond)} of the studies. An accuracy's "
            "ends there.",
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
    crossed = (
        "covered",
        "covered, seeds alone",
        "covered, one seed",
        "no worse, false",
        "better",
        "no worse",
    )
    rows = [
        [effect, n, *(percent(row[key]) for key in crossed)]
        for effect, by_n in record["problems"].items()
        for n, row in by_n.items()
    ]
    head = [
        *(
            "gains",
            "seeds",
            "over seeds and problems",
            "over seeds alone",
            "one seed, over problems",
        ),
        *('"no worse", but worse by the margin', '"better", but equal', '"no worse", equal: right'),
    ]
    parts.append(
        f"{PROBLEMS} problems that stand for others: intervals that hold the mean over all that "
        f"there could be, and verdicts over seeds and problems.\n\n{table(head, rows)}"
    )
    keys = ("covered", "no worse, false", "worse", "better", "beyond")
    rows = [
        [name, f"{own:g}", *(percent(row[key]) for key in keys)]
        for (name, row), (*_, own) in zip(record["answers"].items(), ANSWERS, strict=True)
    ]
    head = [
        *("seeds x problems x answers", "effect differs by, logits", "over seeds and problems"),
        *('"no worse", but worse by the margin', '"worse", but equal', '"better", but equal'),
        "reaches beyond 1, before the cut",
    ]
    parts.append(f"Answers drawn from logits, over seeds and problems.\n\n{table(head, rows)}")
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
        f"{record['studies']:,} studies a row, of problems a fifth; margin {record['margin']:.4f}, "
        f"alpha {record['alpha']:g}; pairs differ with a standard deviation of {SPREAD:g}."
    )
    return "\n\n".join([findings(record), about, *parts]) + "\n"


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("coverage", Arguments, run, argv)


def run(arguments: Arguments) -> None:
    """Simulate, and write record and page."""
    record = {"made": facts("experiments.coverage"), **simulate(arguments.studies)}
    write(RECORD, record)
    PAGE.write_text(filled(PAGE.read_text(), tables(record)))
    print(tables(record))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
