"""Statistics of paired runs: intervals, verdicts over arms, and how many seeds see what.

A study trains arms with the same seeds. Of one seed all arms share prompts, order, initial weights
and sampling keys, so an arm is compared with the baseline seed by seed: Student's t of the paired
differences. Where outcomes are means over held-out problems that stand for others like them, seeds
and problems are crossed random factors, and the interval is over both. With d the margin, written
so that larger is better, an arm is

    no worse    where the mean difference is above -d, at alpha / 2 on one side
    better      where it is above 0
    worse       where it is below 0, or where more of its runs were lost than of the baseline's
    can't tell  otherwise

Each of the three claims is a family of one hypothesis an arm, and Holm's procedure (1979) keeps the
probability of any wrong claim of a family below alpha / 2, whatever the arms have in common. With
looks, alpha is what they spend (Lan and DeMets, 1983). docs/statistics.md has the error rates that
this has in simulated studies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, get_args

import numpy as np
from scipy import special

from fp8rl_jax.errors import UserError

Verdict = Literal["no worse", "worse", "better", "can't tell"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
POWER = 0.8
"""Share of studies that see a detectable difference."""


@dataclass(frozen=True)
class Interval:
    """A mean and its interval.

    Attributes:
        mean: of the values; NaN of none.
        low, high: limits, in the values' unit; infinite where the values tell no spread.
        n: how many values.
    """

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Look:
    """One of several looks at a study, at equal numbers of seeds, fixed before it starts.

    Attributes:
        number: of this look, from 1.
        of: how many there will be at most.
    """

    number: int
    of: int

    def __post_init__(self):
        if not 1 <= self.number <= self.of:
            raise UserError(f"look: {self.number} of {self.of}; give a number from 1 to {self.of}")

    def spent(self, alpha: float) -> float:
        """Compute the error that the looks up to this one may spend, of both sides together.

        The spending function of O'Brien and Fleming's type (Lan and DeMets, Biometrika 1983), with
        alpha / 2 for each side.
        """
        return 2 * float(_spending(alpha / 2, self.number / self.of))

    def level(self, alpha: float) -> float:
        """Compute the two-sided level at which this look tests.

        Args:
            alpha: two-sided error of all looks together.
        """
        return _look_levels(self.of, alpha)[self.number - 1]


@dataclass(frozen=True)
class Comparison:
    """An arm against the baseline.

    Attributes:
        arm, baseline: names.
        n: seeds of the study, those without an outcome included.
        difference: mean of arm - baseline over the pairs that have both outcomes, with its t
            interval of level 1 - `alpha`.
        problems: held-out problems that the interval is over, besides the seeds or, of one seed,
            alone; 0: over seeds alone.
        correlation: Pearson's, of the pairs' outcomes; None below three pairs or without spread.
        detectable: true difference from 0 that such a study sees with a probability of 80 %; None
            where the spread is unknown, or where no outcomes can differ by so much.
        verdict: what may be claimed.
        more_pairs: about how many further seeds would tell, with a probability of 80 %, were mean
            and spread what was seen; 0 where only more problems would; None where the study tells,
            or where seeds would not help.
        collapsed, baseline_collapsed: runs that collapsed.
        alpha: 1 - level of the interval: what Holm and the look leave.
        failed, baseline_failed: runs without an outcome that did not collapse.
        saturated: the one outcome of all runs of both arms, at the end of what an accuracy can be
            or of a metric without a resolution, which therefore shows no difference; None: they
            differ.
        lost_p: one-sided p of Barnard's exact test that the arm loses (collapsed or failed) more
            runs than the baseline; None where no run was lost.
    """

    arm: str
    baseline: str
    n: int
    difference: Interval
    correlation: float | None
    detectable: float | None
    verdict: Verdict
    more_pairs: int | None
    collapsed: int
    baseline_collapsed: int
    alpha: float
    problems: int = 0
    failed: int = 0
    baseline_failed: int = 0
    lost_p: float | None = None
    saturated: float | None = None


class Estimate(NamedTuple):
    """Mean differences of arms and how far they may be off: float arrays of shape [..., arms]."""

    mean: np.ndarray
    pairs: np.ndarray
    """Those with both outcomes."""
    deviation: np.ndarray
    """Standard deviation over seeds, of ties at least that of rounding; inf: unknown."""
    of_problems: np.ndarray | float = 0.0
    """Variance of the mean that comes from the choice of problems."""
    degrees: np.ndarray | float = np.inf
    """Degrees of freedom of the standard error over seeds and problems."""

    @property
    def errors(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Standard errors of the mean, each with its degrees of freedom: over seeds, and over
        seeds and problems. A claim is made where both make it, so that taking problems in is never
        the bolder choice; of one pair the second is over problems alone."""
        pairs = np.maximum(self.pairs, 1)
        over_seeds = self.deviation / np.sqrt(pairs), np.maximum(pairs - 1, 1)
        if not np.ndim(self.of_problems):
            return [over_seeds]
        of_seeds = np.where(self.pairs < 2, 0.0, over_seeds[0] ** 2)
        return [over_seeds, (np.sqrt(of_seeds + self.of_problems), np.asarray(self.degrees))]


class Judgement(NamedTuple):
    """What `judge` finds: arrays of shape [..., arms]."""

    verdict: np.ndarray
    """Index into VERDICTS."""
    low: np.ndarray
    high: np.ndarray
    alpha: np.ndarray
    """1 - level of the interval."""


def t_interval(
    values: Sequence[float], level: float = 0.95, least: float = -math.inf, most: float = math.inf
) -> Interval:
    """Compute a mean and its interval from Student's t.

    Args:
        values: independent, of one distribution.
        level: probability that the interval holds the mean.
        least, most: what a value can be, 0 and 1 of an accuracy; the interval ends there.

    Returns:
        The interval; of fewer than two values it is infinite. Equal values give an interval of no
        width: where they are counts or rounded, `compare_arms` says more.
    """
    x = np.asarray(values, float)
    if len(x) < 2:
        return Interval(float(x[0]) if len(x) else math.nan, -math.inf, math.inf, len(x))
    half = special.stdtrit(len(x) - 1, (1 + level) / 2) * x.std(ddof=1) / len(x) ** 0.5
    low, high = max(x.mean() - half, least), min(x.mean() + half, most)
    return Interval(float(x.mean()), float(low), float(high), len(x))


def wilson_interval(rate: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Compute Wilson's score interval of a proportion (E. B. Wilson, 1927); z = 1.96: 95 %."""
    centre = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = (
        z / (1 + z * z / count) * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    )
    return max(centre - half, 0.0), min(centre + half, 1.0)


def exact_interval(count: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Compute the exact interval of a share of runs (Clopper and Pearson, 1934): it holds at least
    at its level, however few they are.

    Args:
        count: runs of which it is true.
        n: runs, at least 1.
    """
    tail = (1 - level) / 2
    low = float(special.betaincinv(count, n - count + 1, tail)) if count else 0.0
    high = float(special.betaincinv(count + 1, n - count, 1 - tail)) if count < n else 1.0
    return low, high


def compare_arms(
    outcomes: Mapping[str, Sequence[float | None]],
    baseline: str,
    margin: float,
    alpha: float = 0.05,
    better: str = "higher",
    collapsed: Mapping[str, Sequence[bool]] | None = None,
    look: Look | None = None,
    resolution: float | None = None,
    by_problem: Mapping[str, np.ndarray] | None = None,
    span: float = math.inf,
) -> dict[str, Comparison]:
    """Compare each arm with the baseline, seed by seed.

    Args:
        outcomes: of each arm, the primary metric of seed i at i; None (or a number that is not
            finite) where the run ended without one.
        baseline: the arm that the others are compared with.
        margin: the difference d of "no worse by more than d", in the metric's unit.
        alpha: two-sided error of the study.
        better: "higher" or "lower".
        collapsed: of each arm, which runs collapsed; their outcomes count as all others do.
        look: which of several looks this is; None: the only one.
        resolution: the smallest difference that two outcomes can have, such as 1 / problems; None:
            the smallest that two outcomes of the study have. Where differences are tied, they are
            taken to spread at least as two roundings do, resolution / sqrt(6): ties are no proof of
            no spread. Where all outcomes are equal and no resolution is given, or all are 0 or
            all 1, nothing is told: the metric could not have shown a difference.
        by_problem: of each arm, what each problem gave, float [seeds, problems], where outcomes
            are means over problems that stand for others; a row of NaN where there is no outcome.
            Intervals are then over seeds and problems; of one seed over problems alone, which
            tells nothing of other seeds.
        span: the largest difference that two outcomes can have, 1 of an accuracy. Intervals end
            there, which costs them nothing: the truth is never beyond.

    Returns:
        A comparison for each arm but the baseline, in the order of `outcomes`.

    Raises:
        UserError: no such baseline, seeds that differ between arms, or a setting out of range.
    """
    _check(outcomes, baseline, margin, alpha, better, collapsed, resolution, by_problem)
    if not span > 0:
        raise UserError(f"span: {span}; give a positive number in the metric's unit")
    names = [name for name in outcomes if name != baseline]
    if not names:
        return {}
    values = {
        name: np.array([math.nan if x is None else x for x in of_arm], float)
        for name, of_arm in outcomes.items()
    }
    values = {name: np.where(np.isfinite(x), x, math.nan) for name, x in values.items()}
    down = {
        name: np.array((collapsed or {}).get(name, [False] * len(x)), bool)
        for name, x in values.items()
    }
    failed = {name: int((np.isnan(x) & ~down[name]).sum()) for name, x in values.items()}
    lost = {name: int((np.isnan(x) | down[name]).sum()) for name, x in values.items()}
    n, of_baseline = len(values[baseline]), values[baseline]
    step = np.array(resolution or smallest_gap(np.concatenate(list(values.values()))))
    estimate = over_seeds(np.stack([values[name] - of_baseline for name in names]), step)
    problems = 0
    if by_problem is not None:
        problems = by_problem[baseline].shape[1]
        tables = np.stack([by_problem[name] - by_problem[baseline] for name in names])
        estimate = over_problems(estimate, tables, step)
    found = judge(
        estimate,
        margin,
        alpha,
        better,
        np.array([lost[name] for name in names]),
        np.array(lost[baseline]),
        n,
        np.array([np.isnan(values[name]).any() for name in names]),
        look,
    )
    comparisons = {}
    for i, name in enumerate(names):
        mean, pairs, deviation, of_problems, degrees = (
            float(np.broadcast_to(part, len(names))[i]) for part in estimate
        )
        level, verdict = float(found.alpha[i]), VERDICTS[int(found.verdict[i])]
        saturated = _saturated(values[name], of_baseline, resolution)
        if saturated is not None and verdict == "no worse":
            verdict = "can't tell"
        gain = mean if better == "higher" else -mean
        detectable = detectable_difference(
            deviation, int(pairs), level, of_problems=of_problems, degrees=degrees
        )
        low, high = float(found.low[i]), float(found.high[i])
        if math.isfinite(high):  # unknown stays unknown
            low, high = max(low, -span), min(high, span)
        seeds_help = verdict == "can't tell" and not np.isnan(values[name]).any()
        seeds_help = seeds_help and saturated is None
        comparisons[name] = Comparison(
            arm=name,
            baseline=baseline,
            n=n,
            difference=Interval(mean, low, high, int(pairs)),
            correlation=_correlation(values[name], of_baseline),
            detectable=None if detectable is None or detectable > span else detectable,
            verdict=verdict,
            more_pairs=_more_pairs(gain, deviation, of_problems, int(pairs), margin, level)
            if seeds_help
            else None,
            collapsed=int(down[name].sum()),
            baseline_collapsed=int(down[baseline].sum()),
            alpha=level,
            problems=problems,
            failed=failed[name],
            baseline_failed=failed[baseline],
            lost_p=lost_runs_p(lost[name], lost[baseline], n)
            if lost[name] or lost[baseline]
            else None,
            saturated=saturated,
        )
    return comparisons


def over_seeds(differences: np.ndarray, resolution: np.ndarray) -> Estimate:
    """Estimate mean differences from those of the seeds.

    Args:
        differences: arm - baseline, float [..., arms, seeds]; NaN: a pair without both outcomes.
        resolution: smallest difference of two outcomes, float [...]; NaN: all are equal.
    """
    known = ~np.isnan(differences)
    count = known.sum(-1)
    with np.errstate(invalid="ignore"):
        mean = np.where(known, differences, 0.0).sum(-1) / np.where(count > 0, count, np.nan)
    squares = np.where(known, (differences - mean[..., None]) ** 2, 0.0).sum(-1)
    # Differences that are all different spread by more than two roundings: no floor, so that an
    # estimated resolution, which is too large where outcomes are few, does no harm.
    step = np.where(np.isnan(resolution), np.inf, resolution)[..., None]
    ties = np.diff(np.sort(differences, axis=-1), axis=-1) <= 1e-6 * step[..., None]
    floor = np.where(ties.any(-1), step / math.sqrt(6), 0.0)
    deviation = np.maximum(np.sqrt(squares / np.maximum(count - 1, 1)), floor)
    return Estimate(mean, count, np.where(count < 2, np.inf, deviation))


def over_problems(estimate: Estimate, differences: np.ndarray, resolution: np.ndarray) -> Estimate:
    """Take the choice of problems into an estimate over seeds.

    Seeds and problems are crossed random factors of a table without replicates. The mean's variance
    is that over seeds plus what is left of the problems' mean square when that of the interaction
    is taken away (Cornfield and Tukey, 1956); its degrees of freedom are Satterthwaite's (1946),
    which are estimates themselves: docs/statistics.md says what that costs few seeds. Where nearly
    all is taken away, these are so few that an interval says nothing. Then nothing is taken away,
    if that makes the interval narrower: it errs on the safe side. Of one pair all that problems
    spread by is theirs, and where no problem differs the interval is that of the rule of three: 3
    of them.

    Args:
        estimate: of the same differences, over seeds.
        differences: arm - baseline on each problem, float [..., arms, seeds, problems]; NaN: a pair
            without both outcomes.
        resolution: as in `over_seeds`.
    """
    problems, pairs = differences.shape[-1], np.maximum(estimate.pairs, 1)
    known = ~np.isnan(differences)
    x = np.where(known, differences, 0.0)
    of_seed, of_problem = x.mean(-1, keepdims=True), x.sum(-2) / pairs[..., None]
    mean = of_problem.mean(-1)
    between = pairs * ((of_problem - mean[..., None]) ** 2).sum(-1) / (problems - 1)
    rest = x - of_seed - of_problem[..., None, :] + mean[..., None, None]
    degrees = (np.maximum(pairs - 1, 1)) * (problems - 1)
    within = np.where(known, rest**2, 0.0).sum((-2, -1)) / degrees
    of_problems = np.maximum(between - within, 0.0) / (pairs * problems)
    of_seeds = np.where(estimate.pairs < 2, 0.0, estimate.deviation) ** 2 / pairs
    spread = of_seeds**2 / np.maximum(pairs - 1, 1) + np.where(
        of_problems > 0,
        ((between / (pairs * problems)) ** 2 / (problems - 1))
        + (within / (pairs * problems)) ** 2 / degrees,
        0.0,
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        freedom = (of_seeds + of_problems) ** 2 / spread
        whole = between / (pairs * problems)
        squares = of_seeds**2 / np.maximum(pairs - 1, 1) + whole**2 / (problems - 1)
        of_whole = (of_seeds + whole) ** 2 / squares
        widths = [
            special.stdtrit(degrees, 0.975) * np.sqrt(of_seeds + variance)
            for variance, degrees in ((of_problems, freedom), (whole, of_whole))
        ]
    safe = (of_problems > 0) & ~(widths[0] <= widths[1])
    of_problems, freedom = np.where(safe, whole, of_problems), np.where(safe, of_whole, freedom)
    one, step = estimate.pairs < 2, np.where(np.isnan(resolution), np.inf, resolution)[..., None]
    alone = np.maximum(between / problems, (3 / special.ndtri(0.975) * step) ** 2)
    return estimate._replace(
        of_problems=np.where(one, alone, of_problems),
        degrees=np.where(one | ~np.isfinite(freedom), problems - 1, freedom),
    )


def judge(
    estimate: Estimate,
    margin: float,
    alpha: float,
    better: str,
    lost: np.ndarray,
    baseline_lost: np.ndarray,
    n: int,
    barred: np.ndarray,
    look: Look | None = None,
) -> Judgement:
    """Judge the arms of one study, or of many studies at once.

    Args:
        estimate: of their differences to the baseline, [..., arms].
        margin, alpha, better, look: as in `compare_arms`.
        lost: runs of the arm that collapsed or failed, int [..., arms].
        baseline_lost: of the baseline, int [...].
        n: seeds.
        barred: arms that cannot be called no worse, since a run has no outcome, bool [..., arms].
    """
    mean, few = estimate.mean, estimate.pairs < 2
    arms = mean.shape[-1]
    gain = mean if better == "higher" else -mean

    def p_below(distance: np.ndarray, unknown: np.ndarray) -> np.ndarray:
        """p of a mean at least this far above the limit, by the more cautious of the errors."""
        p = [2 * special.stdtr(degrees, -distance / error) for error, degrees in estimate.errors]
        return np.where(unknown, 1.0, np.max(p, axis=0))

    # Lost runs are a second way to "worse": each way has half of the error where there are any.
    baseline_lost = np.broadcast_to(baseline_lost[..., None], lost.shape)
    any_lost = (lost > 0) | (baseline_lost > 0)
    below = p_below(-gain, few)
    of_lost = 2 * _lost_p(lost, baseline_lost, n)
    p_worse = np.where(any_lost, 2 * np.minimum(below, of_lost), below)

    look = look or Look(1, 1)
    levels = np.array([look.level(alpha / (arms - rank)) for rank in range(arms)])
    no_worse, at_no_worse = holm(p_below(gain + margin, few | barred), levels)
    is_better, at_better = holm(p_below(gain, few | barred), levels)
    worse, at_worse = holm(p_worse, levels)
    at_worse = np.where(any_lost, at_worse / 2, at_worse)

    claims = {"better": is_better, "no worse": no_worse, "worse": worse}
    verdict = np.select(
        list(claims.values()),
        [VERDICTS.index(claim) for claim in claims],
        VERDICTS.index("can't tell"),
    )
    level = np.select(
        list(claims.values()),
        [at_better, at_no_worse, at_worse],
        np.minimum(at_no_worse, at_worse),
    )
    halves = [special.stdtrit(freedom, 1 - level / 2) * error for error, freedom in estimate.errors]
    half = np.where(few, halves[-1], np.max(halves, axis=0))
    unknown = ~np.isfinite(half)
    low, high = np.where(unknown, -np.inf, mean - half), np.where(unknown, np.inf, mean + half)
    return Judgement(verdict, low, high, level)


def holm(p: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reject hypotheses by Holm's procedure (S. Holm, 1979).

    Args:
        p: of each hypothesis of a family, float [..., hypotheses].
        levels: of the first, the second, ... rejection: alpha / m, alpha / (m - 1), ..., alpha.

    Returns:
        Which are rejected, bool; and the level at which each was tested, float; shapes as p.
    """
    order = np.argsort(p, axis=-1, kind="stable")
    passed = np.logical_and.accumulate(np.take_along_axis(p, order, -1) <= levels, axis=-1)
    stopped = levels[np.minimum(passed.sum(-1, keepdims=True), len(levels) - 1)]
    back = np.argsort(order, axis=-1, kind="stable")
    rejected = np.take_along_axis(passed, back, -1)
    return rejected, np.take_along_axis(np.where(passed, levels, stopped), back, -1)


def detectable_difference(
    deviation: float,
    n: int,
    alpha: float = 0.05,
    power: float = POWER,
    *,
    of_problems: float = 0.0,
    degrees: float = math.inf,
) -> float | None:
    """Compute the true difference that a paired t test of level alpha finds with this power.

    Args:
        deviation: standard deviation of the differences over seeds.
        n: pairs.
        alpha: two-sided level.
        power: probability to find it. The far side's rejections are left out.
        of_problems, degrees: as `Estimate` has them, where problems stand for others.

    Returns:
        The difference, in the unit of `deviation`; None below two pairs or where that is unknown.
    """
    if n < 2 or not math.isfinite(deviation):
        return None
    errors = [(deviation / math.sqrt(n), n - 1.0)]
    if of_problems:
        errors.append((math.sqrt(deviation**2 / n + of_problems), degrees))
    return max(error * _shift(freedom, alpha, power) for error, freedom in errors)


def _shift(degrees: float, alpha: float, power: float) -> float:
    """How many standard errors a t test has to be off its limit for this power."""
    critical = special.stdtrit(degrees, 1 - alpha / 2)
    return float(
        _root(lambda nc: 1 - special.nctdtr(degrees, nc, critical) - power, 0, 10 * critical + 10)
    )


@cache
def lost_runs_p(lost: int, baseline_lost: int, n: int) -> float:
    """Test whether an arm loses more runs than the baseline: Barnard's exact test, one-sided.

    Args:
        lost: runs of the arm, of n, that collapsed or failed.
        baseline_lost: of the baseline, of n.
        n: seeds.

    Returns:
        p, for a loss that is at least as one-sided (G. A. Barnard, 1945).
    """
    from scipy import stats

    if lost <= baseline_lost:
        return 1.0
    table = [[lost, baseline_lost], [n - lost, n - baseline_lost]]
    return float(stats.barnard_exact(table, alternative="greater").pvalue)


def sentence(comparison: Comparison, margin: float) -> str:
    """Say a comparison in one line.

    Args:
        comparison: of `compare_arms`.
        margin: that it was made with; numbers have one decimal more than it.

    Returns:
        "fp8-rl - bf16: 0.000 (95 %: -0.012, 0.013), 5 seeds: no worse within 0.02".
    """
    c, pairs = comparison, comparison.difference.n
    decimals = max(0, 1 - math.floor(math.log10(margin)))

    def number(x: float) -> str:
        return f"{round(x, decimals) + 0.0:.{decimals}f}"

    low, high = c.difference.low, c.difference.high
    facts = [number(c.difference.mean) if pairs else "no pair has both outcomes"]
    if math.isfinite(low):
        facts[0] += f" ({100 * (1 - c.alpha):.4g} %: {number(low)}, {number(high)})"
    seeds = f"{c.n} seed{'s' * (c.n > 1)}" if pairs in (0, c.n) else f"{pairs} of {c.n} seeds"
    facts.append(f"{seeds} x {c.problems} problems" if c.problems else seeds)
    for word, lost, of_baseline in (
        ("collapsed", c.collapsed, c.baseline_collapsed),
        ("failed", c.failed, c.baseline_failed),
    ):
        if lost or of_baseline:
            facts.append(f"{lost} of {c.n} {word} against {of_baseline} of {c.n}")
    end: str = c.verdict
    if c.verdict == "no worse":
        end += f" within {margin:g}"
    elif c.verdict == "can't tell" and c.saturated is not None:
        end += (
            f"; every run of both is at {c.saturated:g}, so that nothing could have been seen: "
            "another task or metric would"
        )
    elif c.verdict == "can't tell" and c.n == 1:
        over = "the interval is over problems alone" if math.isfinite(low) else "no interval"
        end += f"; one seed: {over}"
    elif c.more_pairs == 0:
        end += "; more problems would, more seeds would not"
    elif c.more_pairs is not None:
        end += f"; about {c.more_pairs} more seed{'s' * (c.more_pairs > 1)} would"
    return f"{c.arm} - {c.baseline}: {', '.join(facts)}: {end}"


def _check(outcomes, baseline, margin, alpha, better, collapsed, resolution, by_problem) -> None:
    if baseline not in outcomes:
        raise UserError(f"baseline: {baseline!r} is no arm (arms: {', '.join(outcomes)})")
    lengths = {name: len(values) for name, values in outcomes.items()}
    for name, marks in (collapsed or {}).items():
        if name not in outcomes:
            raise UserError(f"collapsed: {name!r} is no arm (arms: {', '.join(outcomes)})")
        if len(marks) != lengths[name]:
            raise UserError(
                f"collapsed: {len(marks)} runs of {name!r}, which has {lengths[name]} outcomes"
            )
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in lengths.items())
        raise UserError(f"outcomes: arms have other numbers of seeds ({counts}); None: no outcome")
    if not lengths[baseline]:
        raise UserError("outcomes: no seeds")
    if by_problem is not None:
        shapes = {name: np.shape(by_problem.get(name, ())) for name in outcomes}
        wanted = (lengths[baseline], *shapes[baseline][1:2])
        if len(wanted) < 2 or wanted[1] < 2 or set(shapes.values()) != {wanted}:
            told = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            raise UserError(
                f"by_problem: give [seeds, problems] of every arm, at least 2 problems; got {told}"
            )
    if not (margin > 0 and math.isfinite(margin)):
        raise UserError(f"margin: {margin}; give a positive number in the metric's unit")
    if not 0 < alpha < 1:
        raise UserError(f"alpha: {alpha}; give a number between 0 and 1, such as 0.05")
    if better not in ("higher", "lower"):
        raise UserError(f"better: {better!r} unknown (known: higher, lower)")
    if resolution is not None and not (resolution > 0 and math.isfinite(resolution)):
        raise UserError(f"resolution: {resolution}; give a positive number in the metric's unit")


def smallest_gap(outcomes: np.ndarray) -> np.ndarray:
    """Find the smallest difference of two outcomes of a study, beyond roundings of float64.

    Args:
        outcomes: of all arms, float [..., outcomes]; NaN: none.

    Returns:
        Float [...]; NaN where all are equal.
    """
    ordered = np.sort(outcomes, axis=-1)
    gaps = np.diff(ordered, axis=-1)
    rounding = 1e-12 * np.abs(ordered).max(-1, initial=0.0, where=~np.isnan(ordered), keepdims=True)
    least = gaps.min(-1, initial=np.inf, where=gaps > rounding)
    return np.where(np.isinf(least), np.nan, least)


def _lost_p(lost: np.ndarray, baseline_lost: np.ndarray, n: int) -> np.ndarray:
    """`lost_runs_p` of arrays of one shape."""
    pairs, which = np.unique(lost * (n + 1) + baseline_lost, return_inverse=True)
    p = np.array([lost_runs_p(*divmod(int(pair), n + 1), n) for pair in pairs])
    return p[which].reshape(lost.shape)


def _saturated(
    values: np.ndarray, of_baseline: np.ndarray, resolution: float | None
) -> float | None:
    """The one outcome of two arms, where the metric cannot show a difference; else None."""
    known = np.concatenate([values, of_baseline])
    known = known[~np.isnan(known)]
    if len(known) < 2 or np.ptp(known) > 0:
        return None
    # outcomes of a resolution may be equal by chance, but not at the ends of an accuracy
    return float(known[0]) if resolution is None or known[0] in (0.0, 1.0) else None


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    known = ~np.isnan(a) & ~np.isnan(b)
    if known.sum() < 3 or np.ptp(a[known]) == 0 or np.ptp(b[known]) == 0:
        return None
    return float(np.corrcoef(a[known], b[known])[0, 1])


def _more_pairs(
    gain: float, deviation: float, of_problems: float, n: int, margin: float, alpha: float
) -> int | None:
    """How many pairs beyond n give the nearer claim (no worse, or worse) a power of 80 %; 0: so few
    problems give it to no number of pairs."""
    if n < 2 or not math.isfinite(deviation):
        return None
    effect = max(gain + margin, -gain)
    needed = special.ndtri(1 - alpha / 2) + special.ndtri(POWER)
    left = (effect / needed) ** 2 - of_problems
    if left <= 0:
        return 0
    pairs = max(n + 1, math.floor(deviation**2 / left))
    while pairs < 1000:
        critical = special.stdtrit(pairs - 1, 1 - alpha / 2)
        error = math.sqrt(deviation**2 / pairs + of_problems)
        if 1 - special.nctdtr(pairs - 1, effect / error, critical) >= POWER:
            break
        pairs += 1
    return pairs - n


def _root(function: Callable[[float], float], low: float, high: float, **options: float) -> float:
    """Where a function is 0 between two places, by Brent's method."""
    from scipy import optimize  # half a second, which every start of a run would take

    return optimize.brentq(function, low, high, **options)


def _spending(alpha: float, time: float) -> float:
    """One-sided error spent at a share `time` of the seeds, O'Brien and Fleming's type."""
    return 2 * special.ndtr(special.ndtri(alpha / 2) / math.sqrt(time))


@cache
def _look_levels(looks: int, alpha: float) -> list[float]:
    """Two-sided levels of all looks, of which either side spends alpha / 2.

    The recursion of Armitage, McPherson and Rowe (1969) for the sum of normal differences: its
    density among studies that have not crossed, on a grid, and at each look the limit beyond which
    is what the look may spend. Levels are then those of t tests (Pocock, 1977).
    """
    if looks == 1:
        return [alpha]
    step, levels, spent = 1 / math.sqrt(looks), [], 0.0
    at, mass = np.zeros(1), np.ones(1)
    for look in range(1, looks + 1):
        total = float(_spending(alpha / 2, look / looks))

        def excess(limit: float, at=at, mass=mass, spend=total - spent) -> float:
            return float((mass * special.ndtr((at - limit) / step)).sum()) - spend

        limit = _root(excess, 0.0, 40 * step * look, xtol=1e-12)
        spent = total
        spread = math.sqrt(look / looks)
        levels.append(2 * float(special.ndtr(-limit / spread)))
        # Gauss-Legendre: the density ends sharply at the limit
        nodes, weights = np.polynomial.legendre.leggauss(400)
        low = -9 * spread
        new = (limit - low) / 2 * nodes + (limit + low) / 2
        density = np.exp(-(((new[:, None] - at) / step) ** 2) / 2) / (step * math.sqrt(2 * math.pi))
        at, mass = new, (limit - low) / 2 * weights * (density @ mass)
    return levels
