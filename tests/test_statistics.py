"""Statistics of paired runs: against closed forms and published values, and against studies whose
truth is known."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

from experiments import coverage
from fp8rl_jax.errors import UserError
from fp8rl_jax.statistics import (
    VERDICTS,
    Interval,
    Look,
    compare_arms,
    detectable_difference,
    exact_interval,
    holm,
    judge,
    lost_runs_p,
    over_problems,
    over_seeds,
    sentence,
    smallest_gap,
    t_interval,
    wilson_interval,
)

BASE = [0.90, 0.91, 0.92, 0.905, 0.915]
EQUAL = [0.903, 0.905, 0.918, 0.907, 0.913]


def one(arm, base=BASE, margin=0.02, **options):
    """The comparison of a single arm."""
    names = {"collapsed", "base_collapsed"} & options.keys()
    marks = {
        {"collapsed": "arm", "base_collapsed": "base"}[name]: options.pop(name) for name in names
    }
    return compare_arms(
        {"base": base, "arm": arm}, "base", margin, collapsed=marks or None, **options
    )["arm"]


def test_t_interval_is_students():
    # Student's t with 4 degrees of freedom: 2.776445 at 97.5 %, 2.131847 at 95 %
    values, error = [1.0, 2.0, 3.0, 4.0, 5.0], math.sqrt(2.5 / 5)
    for level, t in ((0.95, 2.776445), (0.9, 2.131847)):
        assert dataclasses.astuple(t_interval(values, level)) == pytest.approx(
            (3.0, 3 - t * error, 3 + t * error, 5), rel=1e-6
        )
    wide = t_interval([0.1, 0.9, 0.95], least=0.0, most=1.0)
    assert (wide.low, wide.high) == (0.0, 1.0) and wide.mean == pytest.approx(0.65)
    assert t_interval([7.0]) == Interval(7.0, -math.inf, math.inf, 1)
    assert math.isnan(t_interval([]).mean)


def test_wilson_intervals():
    assert wilson_interval(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson_interval(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson_interval(0.9, 50) == pytest.approx((0.7864, 0.9565), abs=1e-4)


def test_holm_steps_down_and_stops():
    """p of 0.01, 0.04, 0.03 and 0.005 at 0.05, Holm's own way: two are rejected."""
    levels = 0.05 / np.array([4, 3, 2, 1])
    rejected, at = holm(np.array([[0.01, 0.04, 0.03, 0.005], [0.02, 0.001, 0.001, 0.001]]), levels)
    assert rejected.tolist() == [[True, False, False, True], [True, True, True, True]]
    assert at[0] == pytest.approx([0.05 / 3, 0.025, 0.025, 0.0125])
    assert sorted(at[1]) == pytest.approx(sorted(levels)) and at[1, 0] == 0.05


@pytest.mark.parametrize(
    ("looks", "limits"),
    [
        # one-sided 0.025, O'Brien and Fleming's type: the R packages ldbounds and gsDesign
        (1, [1.9600]),
        (2, [2.9626, 1.9686]),
        (5, [4.8769, 3.3569, 2.6803, 2.2898, 2.0310]),
    ],
)
def test_levels_of_looks_are_those_published(looks, limits):
    levels = [Look(number, looks).level(0.05) for number in range(1, looks + 1)]
    assert stats.norm.isf(np.array(levels) / 2) == pytest.approx(limits, abs=2e-4)
    assert Look(looks, looks).spent(0.05) == pytest.approx(0.05)
    assert Look(1, looks).spent(0.05) == pytest.approx(levels[0])


def test_detectable_difference_has_its_power():
    """The non-central t by numerical integration over chi; near (t(0.975) + t(0.8)) s / sqrt(n)."""
    n, deviation = 5, 0.01
    difference = detectable_difference(deviation, n, 0.05)
    assert difference is not None
    shift, critical = difference / deviation * math.sqrt(n), stats.t.ppf(0.975, n - 1)
    power, _ = integrate.quad(
        lambda chi: (
            stats.chi.pdf(chi, n - 1) * stats.norm.sf(critical * chi / math.sqrt(n - 1) - shift)
        ),
        0,
        30,
    )
    assert power == pytest.approx(0.8, abs=1e-6)
    usual = (critical + stats.t.ppf(0.8, n - 1)) * deviation / math.sqrt(n)
    assert difference == pytest.approx(usual, rel=0.03)
    assert (
        detectable_difference(deviation, 1) is None and detectable_difference(math.inf, 5) is None
    )


def test_barnards_test_of_lost_runs():
    """By hand: the more one-sided tables are this one alone, at most likely p = 1/2."""
    assert lost_runs_p(5, 0, 5) == pytest.approx(2.0**-10)
    assert lost_runs_p(3, 0, 3) == pytest.approx(2.0**-6)
    assert lost_runs_p(2, 2, 5) == lost_runs_p(0, 3, 5) == lost_runs_p(5, 5, 5) == 1.0


def test_one_arm_is_a_paired_t_test():
    found = one(EQUAL)
    differences = np.array(EQUAL) - BASE
    assert dataclasses.astuple(found.difference) == pytest.approx(
        dataclasses.astuple(t_interval(differences)), rel=1e-9
    )
    test = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert (found.difference.low, found.difference.high) == pytest.approx(tuple(test), rel=1e-9)
    assert found.verdict == "no worse" and found.alpha == 0.05 and found.more_pairs is None
    assert found.correlation == pytest.approx(stats.pearsonr(EQUAL, BASE).statistic)
    assert found.detectable == pytest.approx(detectable_difference(differences.std(ddof=1), 5))
    assert (found.n, found.lost_p, found.problems) == (5, None, 0)


@pytest.mark.parametrize(
    ("shift", "scale", "verdict"),
    [
        (0.0, 1, "no worse"),
        (-0.01, 1, "no worse"),
        (-0.016, 1, "worse"),
        (-0.016, 4, "can't tell"),
        (-0.05, 1, "worse"),
        (0.02, 1, "better"),
    ],
)
def test_verdict_is_where_the_interval_lies(shift, scale, verdict):
    """Differences of mean 0 and a half-width of 0.0047 times a scale; the same with the sign
    turned."""
    noise = np.array([-0.004, 0.006, 0.0, -0.003, 0.001]) * scale
    arm = (np.array(BASE) + noise + shift).tolist()
    up = one(arm)
    assert up.verdict == verdict
    low, high = up.difference.low, up.difference.high
    assert verdict == (
        "better"
        if low > 0
        else "no worse"
        if low > -0.02
        else "worse"
        if high < 0
        else "can't tell"
    )
    down = one((-np.array(arm)).tolist(), (-np.array(BASE)).tolist(), better="lower")
    assert down.verdict == verdict and down.difference.low == pytest.approx(-high)


def test_arms_share_the_error_by_holm():
    """Three arms: the clearest is tested at alpha / 3, the next at alpha / 2, the last at alpha."""
    differences = np.array([-1.0, 0.5, 0.0, 1.0, -0.5]) / 1000
    outcomes = {"base": BASE} | {
        f"arm {k}": (np.array(BASE) + k * differences).tolist() for k in (4, 1, 2)
    }
    found = compare_arms(outcomes, "base", 0.02)
    assert list(found) == ["arm 4", "arm 1", "arm 2"]
    assert {name: c.alpha for name, c in found.items()} == pytest.approx(
        {"arm 1": 0.05 / 3, "arm 2": 0.025, "arm 4": 0.05}
    )
    for name, comparison in found.items():
        expected = t_interval(np.array(outcomes[name]) - BASE, 1 - comparison.alpha)
        assert comparison.difference.low == pytest.approx(expected.low, rel=1e-9)


def test_a_look_tests_at_its_level():
    found = one(EQUAL, look=Look(1, 2))
    assert found.alpha == pytest.approx(0.0030506, abs=1e-6)
    assert found.difference.low < one(EQUAL).difference.low


def test_one_seed_tells_nothing():
    found = one([0.2], [0.9])
    assert found.verdict == "can't tell" and found.detectable is None and found.more_pairs is None
    assert found.difference == Interval(0.2 - 0.9, -math.inf, math.inf, 1)
    assert sentence(found, 0.02) == "arm - base: -0.700, 1 seed: can't tell; one seed: no interval"


def crossed(rng, n=5, problems=40, of_problem=0.5):
    """Differences of one arm: seeds, problems and both."""
    return (
        rng.normal(0, 0.1, (n, 1))
        + rng.normal(0, of_problem, (1, problems))
        + rng.normal(0, 0.3, (n, problems))
    )


def test_problems_are_a_crossed_factor():
    """Mean squares of the two-way table by sums over cells, and Satterthwaite's degrees."""
    x = crossed(np.random.default_rng(0))
    n, p = x.shape
    by_problem = {"base": np.zeros((n, p)), "arm": x}
    means = {name: table.mean(1).tolist() for name, table in by_problem.items()}
    found = compare_arms(means, "base", 0.02, by_problem=by_problem)["arm"]
    grand = sum(x[i, j] for i in range(n) for j in range(p)) / (n * p)
    seeds = p * sum((x[i].mean() - grand) ** 2 for i in range(n)) / (n - 1)
    problems = n * sum((x[:, j].mean() - grand) ** 2 for j in range(p)) / (p - 1)
    both = sum(
        (x[i, j] - x[i].mean() - x[:, j].mean() + grand) ** 2 for i in range(n) for j in range(p)
    ) / ((n - 1) * (p - 1))
    variance = (seeds + problems - both) / (n * p)
    degrees = (seeds + problems - both) ** 2 / (
        seeds**2 / (n - 1) + problems**2 / (p - 1) + both**2 / ((n - 1) * (p - 1))
    )
    half = stats.t.ppf(0.975, degrees) * math.sqrt(variance)
    assert found.difference.high - found.difference.mean == pytest.approx(half, rel=1e-9)
    assert (found.n, found.problems) == (n, p)
    assert "5 seeds x 40 problems: can't tell" in sentence(found, 0.02)


def test_problems_never_narrow_an_interval():
    rng = np.random.default_rng(1)
    for _ in range(200):
        x = crossed(rng, 3, 20, 0.0)
        tables = {"base": np.zeros(x.shape), "arm": x}
        means = {name: table.mean(1).tolist() for name, table in tables.items()}
        alone = compare_arms(means, "base", 0.02)["arm"]
        both = compare_arms(means, "base", 0.02, by_problem=tables)["arm"]
        assert both.difference.low <= alone.difference.low + 1e-12
        assert both.detectable >= alone.detectable - 1e-12
        if both.verdict != "can't tell":
            assert both.verdict == alone.verdict


def test_equal_arms_have_an_interval_however_few_degrees_are_left():
    """Answers that are right or wrong, four a problem, and two seeds."""
    rng, widest = np.random.default_rng(5), 0.0
    for _ in range(300):
        easy = rng.normal(0, 1.5, 50)
        tables = {
            name: rng.binomial(4, 1 / (1 + np.exp(-easy)), (2, 50)) / 4 for name in ("base", "arm")
        }
        means = {name: table.mean(1).tolist() for name, table in tables.items()}
        found = compare_arms(means, "base", 0.02, resolution=1 / 200, by_problem=tables)["arm"]
        assert found.detectable is not None and math.isfinite(found.detectable)
        alone = compare_arms(means, "base", 0.02, resolution=1 / 200)["arm"]
        more = found.difference.high - alone.difference.high
        widest = max(widest, more)
    assert widest < 1


def test_no_interval_of_an_accuracy_reaches_beyond_what_one_can_be():
    outcomes = {"base": [0.9, 0.5], "arm": [0.4, 0.6]}
    wide, cut = (compare_arms(outcomes, "base", 0.02, **of)["arm"] for of in ({}, {"span": 1.0}))
    assert wide.difference.low < -1 and wide.detectable > 1
    assert (cut.difference.low, cut.difference.high, cut.detectable) == (-1.0, 1.0, None)
    assert cut.verdict == wide.verdict and cut.more_pairs == wide.more_pairs
    alone = compare_arms({"base": [0.9], "arm": [0.4]}, "base", 0.02, span=1.0)["arm"]
    assert alone.difference.low == -math.inf  # not known is not known
    with pytest.raises(UserError, match="span: 0; give a positive number"):
        compare_arms(outcomes, "base", 0.02, span=0)


def test_studies_of_answers_make_wrong_claims_as_often_as_the_page_says():
    row = coverage.answers(5, 1024, 1, 0.7, 400)
    assert 0.91 < row["covered"] < 0.98 and row["better"] < 0.06 and row["worse"] < 0.06
    equal = coverage.answers(2, 50, 4, 0.0, 2000)
    assert equal["better"] + equal["worse"] < 0.05 and 0 < equal["beyond"] < 0.03


def test_of_one_seed_the_interval_is_over_problems():
    x = crossed(np.random.default_rng(2), n=1)
    tables = {"base": np.zeros(x.shape), "arm": x}
    means = {name: table.mean(1).tolist() for name, table in tables.items()}
    found = compare_arms(means, "base", 0.02, by_problem=tables)["arm"]
    assert (found.difference.low, found.difference.high) == pytest.approx(
        tuple(stats.ttest_1samp(x[0], 0).confidence_interval(0.95))
    )
    assert found.verdict == "can't tell" and found.detectable is None
    assert sentence(found, 0.02).endswith(
        "1 seed x 40 problems: can't tell; one seed: the interval is over problems alone"
    )


def test_of_one_seed_without_a_difference_the_rule_of_three_holds():
    tables = {name: np.ones((1, 300)) for name in ("base", "arm")}
    means = {name: [1.0] for name in tables}
    found = compare_arms(means, "base", 0.02, resolution=1 / 300, by_problem=tables)["arm"]
    assert found.difference.high == pytest.approx(3 / 300, rel=0.01)
    untold = compare_arms(means, "base", 0.02, by_problem=tables)["arm"]
    assert untold.difference.high == math.inf


def test_a_failed_run_leaves_the_other_pairs_problems():
    x = crossed(np.random.default_rng(3), n=4)[None]
    lacking = x.copy()
    lacking[:, 3] = np.nan

    def estimate(x):
        step = np.array(0.01)
        return over_problems(over_seeds(x.mean(-1), step), x, step)

    for one, other in zip(estimate(lacking), estimate(x[:, :3]), strict=True):
        assert one == pytest.approx(other, rel=1e-12)


def test_more_seeds_do_not_help_where_problems_are_few():
    x = crossed(np.random.default_rng(4), n=5, problems=20, of_problem=1.0)
    x += 0.1 - x.mean()
    tables = {"base": np.zeros(x.shape), "arm": x}
    means = {name: table.mean(1).tolist() for name, table in tables.items()}
    found = compare_arms(means, "base", 0.02, by_problem=tables)["arm"]
    assert found.more_pairs == 0
    assert sentence(found, 0.02).endswith("more problems would, more seeds would not")


def test_a_failed_run_is_an_outcome():
    """Of the arm: never no worse, however good the others are. Of the baseline: the rest is used."""
    for arm in ([*EQUAL[:3], None, None], [*EQUAL[:3], math.nan, math.inf]):
        found = one(arm, margin=0.5)
        assert found.verdict == "can't tell" and found.more_pairs is None
        assert (found.n, found.difference.n, found.failed) == (5, 3, 2)
        text = sentence(found, 0.5)
        assert "3 of 5 seeds, 2 of 5 failed against 0 of 5: can't tell" in text
    assert one([*EQUAL[:4], None], margin=0.5).verdict == "can't tell"
    assert one(EQUAL, [*BASE[:4], None], margin=0.5).verdict == "no worse"
    gone = one([None] * 5)
    assert gone.verdict == "worse" and gone.difference.n == 0
    assert sentence(gone, 0.02) == (
        "arm - base: no pair has both outcomes, 5 seeds, 5 of 5 failed against 0 of 5: worse"
    )


def test_collapsed_runs_are_counted_and_kept():
    """Four of five: too wide for a t interval, and worse by the counts."""
    arm, down = [0.0, 0.3, 0.1, 0.0, 0.915], [True] * 4 + [False]
    t_alone = one(arm, alpha=0.01)
    assert t_alone.verdict == "can't tell"
    found = one(arm, collapsed=down)
    assert found.verdict == "worse" and found.difference.n == 5
    assert found.difference.mean == pytest.approx(np.mean(arm) - np.mean(BASE))
    assert (found.collapsed, found.baseline_collapsed, found.failed) == (4, 0, 0)
    assert "5 seeds, 4 of 5 collapsed against 0 of 5: worse" in sentence(found, 0.02)
    assert one([None] * 4 + [0.91], collapsed=down).failed == 0
    both = one(arm, BASE, collapsed=down, base_collapsed=down)
    assert both.lost_p == 1.0 and both.baseline_collapsed == 4


@pytest.mark.parametrize(
    ("seeds", "lost", "of_baseline", "worse"),
    [(5, 5, 0, True), (5, 4, 0, True), (5, 5, 1, True), (5, 3, 0, False), (3, 3, 0, False)],
)
def test_few_seeds_show_collapse_only_when_nearly_all_do(seeds, lost, of_baseline, worse):
    """As docs/statistics.md says; the outcomes say nothing."""
    arm, base = ([i < count for i in range(seeds)] for count in (lost, of_baseline))
    found = one([0.5] * seeds, [0.5] * seeds, collapsed=arm, base_collapsed=base)
    assert found.verdict == ("worse" if worse else "can't tell")


def test_ties_have_an_interval():
    """Equal differences: as if they spread by two roundings to the smallest step; without a step,
    nothing is told."""
    base = [180 / 256, 183 / 256, 181 / 256]
    found = one(base, base)
    half = stats.t.ppf(0.975, 2) / 256 / math.sqrt(6 * 3)
    assert (found.difference.low, found.difference.high) == pytest.approx((-half, half), rel=1e-9)
    assert found.verdict == "no worse"
    saturated = one([1.0] * 5, [1.0] * 5)
    assert saturated.verdict == "can't tell" and saturated.difference.low == -math.inf
    assert saturated.more_pairs is None
    for end in (0.0, 1.0):  # of an accuracy
        found = one([end] * 5, [end] * 5, resolution=1 / 256)
        assert (found.verdict, found.saturated, found.more_pairs) == ("can't tell", end, None)
        assert f"can't tell; every run of both is at {end:g}, so that nothing could have been" in (
            sentence(found, 0.02)
        )
    for values in ([0.5] * 5, [1.0] * 4 + [255 / 256]):  # equal by chance, and nearly saturated
        assert one(values, values, resolution=1 / 256).verdict == "no worse"
    worse = one([1.0] * 5, [0.5] * 5, resolution=1 / 256)
    assert worse.saturated is None and worse.verdict in ("better", "worse")


def test_few_outcomes_without_ties_are_left_alone():
    """The smallest gap of four numbers is no step: the interval is Student's."""
    found = one([0.3, 0.61], [0.1, 0.4])
    expected = t_interval([0.3 - 0.1, 0.61 - 0.4])
    assert found.difference.low == pytest.approx(expected.low)


def test_smallest_gap_is_beyond_roundings():
    assert smallest_gap(np.array([0.3, 0.1 + 0.2, 0.5, 0.9])) == pytest.approx(0.2)
    found = smallest_gap(np.array([[1.0, 1.0], [1.0, np.nan], [1.0, 3.0]]))
    assert np.isnan(found[:2]).all() and found[2] == 2.0


def test_more_pairs_would_tell():
    """With so many pairs more of this mean and spread, 80 % of the studies tell; with fewer not."""
    arm = (np.array(BASE) + [0.03, -0.03, 0.01, -0.02, 0.015]).tolist()
    found = one(arm)
    assert found.verdict == "can't tell" and found.more_pairs > 1
    assert sentence(found, 0.02).endswith(f"can't tell; about {found.more_pairs} more seeds would")
    differences = np.array(arm) - BASE
    rng = np.random.default_rng(0)
    for extra, tells in ((found.more_pairs, True), (found.more_pairs - 3, False)):
        drawn = rng.normal(differences.mean(), differences.std(ddof=1), (20_000, 5 + extra))
        half = stats.t.ppf(0.975, 4 + extra) * stats.sem(drawn, axis=1)
        assert ((drawn.mean(1) - half > -0.02).mean() > 0.795) == tells


def test_sentence_of_the_issue():
    outcomes = {
        "bf16": BASE,
        "fp8-rl": (np.array(BASE) + [0.014, -0.011, 0.0, -0.006, 0.003]).tolist(),
    }
    found = compare_arms(outcomes, "bf16", 0.02)["fp8-rl"]
    assert sentence(found, 0.02) == (
        "fp8-rl - bf16: 0.000 (95 %: -0.012, 0.012), 5 seeds: no worse within 0.02"
    )
    at_look = compare_arms(outcomes, "bf16", 0.1, look=Look(1, 2))["fp8-rl"]
    assert (
        sentence(at_look, 0.1)
        == "fp8-rl - bf16: 0.00 (99.69 %: -0.03, 0.03), 5 seeds: no worse within 0.1"
    )


def test_a_comparison_is_plain_data():
    for found in (one(EQUAL), one([None] * 5), one([0.2], [0.9], collapsed=[True])):
        assert type(json.loads(json.dumps(dataclasses.asdict(found)))) is dict


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"baseline": "bf61"}, "baseline: 'bf61' is no arm (arms: base, arm)"),
        (
            {"outcomes": {"base": [1.0, 2.0], "arm": [1.0]}},
            "other numbers of seeds (base 2, arm 1)",
        ),
        ({"outcomes": {"base": [], "arm": []}}, "outcomes: no seeds"),
        ({"margin": 0.0}, "margin: 0.0; give a positive number"),
        ({"margin": math.nan}, "margin: nan"),
        ({"alpha": 5.0}, "alpha: 5.0; give a number between 0 and 1"),
        ({"better": "more"}, "better: 'more' unknown (known: higher, lower)"),
        ({"collapsed": {"arn": [True, True]}}, "collapsed: 'arn' is no arm"),
        ({"collapsed": {"arm": [True]}}, "collapsed: 1 runs of 'arm', which has 2 outcomes"),
        ({"resolution": -1.0}, "resolution: -1.0; give a positive number"),
    ],
)
def test_bad_input_is_named(arguments, text):
    good: dict[str, Any] = {
        "outcomes": {"base": [1.0, 2.0], "arm": [1.0, 3.0]},
        "baseline": "base",
        "margin": 0.1,
    }
    with pytest.raises(UserError) as error:
        compare_arms(**{**good, **arguments})
    assert text in str(error.value)


@pytest.mark.parametrize(
    "tables",
    [
        {"base": np.zeros((2, 4))},
        {"base": np.zeros((2, 4)), "arm": np.zeros((2, 5))},
        {"base": np.zeros((3, 4)), "arm": np.zeros((3, 4))},
        {"base": np.zeros((2, 1)), "arm": np.zeros((2, 1))},
        {"base": np.zeros(2), "arm": np.zeros(2)},
    ],
)
def test_problems_that_do_not_fit_are_named(tables):
    with pytest.raises(UserError, match=r"by_problem: give \[seeds, problems\] of every arm"):
        compare_arms({"base": [0.1, 0.2], "arm": [0.1, 0.2]}, "base", 0.02, by_problem=tables)


def test_a_look_that_is_not_planned_is_refused():
    with pytest.raises(UserError, match="look: 3 of 2; give a number from 1 to 2"):
        Look(3, 2)


@pytest.mark.parametrize("effect", coverage.EFFECTS)
def test_many_studies_are_judged_as_each_alone(effect):
    rng = np.random.default_rng(3)
    outcomes, down = coverage.EFFECTS[effect](rng, (40, 3, 5), -coverage.MARGIN)
    together = coverage.judged(outcomes, down, Look(2, 2))
    for study in range(len(outcomes)):
        names = ("base", "a", "b")
        alone = compare_arms(
            dict(zip(names, outcomes[study].tolist(), strict=True)),
            "base",
            coverage.MARGIN,
            collapsed=dict(zip(names, down[study].tolist(), strict=True)),
            look=Look(2, 2),
        )
        for arm, name in enumerate(names[1:]):
            assert VERDICTS[together.verdict[study, arm]] == alone[name].verdict
            assert together.low[study, arm] == pytest.approx(alone[name].difference.low)
            assert together.alpha[study, arm] == pytest.approx(alone[name].alpha)


STUDIES = 4000


def margin_of(rate: float, studies: int = STUDIES) -> float:
    """Four standard errors of a rate, or of none at all four studies."""
    return 4 * math.sqrt(max(rate, 1 / studies) * (1 - rate) / studies) + 1e-3


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads(coverage.RECORD.read_text())


@pytest.fixture(scope="module")
def simulated() -> dict:
    # answers of many studies take long; a few of them are simulated in a test of their own
    return coverage.simulate(STUDIES, answered=0)


def test_intervals_and_verdicts_keep_what_they_claim(simulated):
    """Wherever the effect is one that Student's t can have: not skewed; the interval of ties at 10
    seeds, and intervals of several arms together, are what the page says."""
    for part in ("errors", "arms", "looks"):
        for effect, by_n in simulated[part].items():
            for n, row in by_n.items():
                if effect == "skewed":
                    continue
                # looks are planned for normal sums: their t tests err by a little more
                for key in ("worse", "better", "no worse, false"):
                    assert row[key] < 0.026 + margin_of(0.026), (part, effect, n, key)
                if part == "errors" and (effect, n) != ("tied", "10"):
                    assert row["covered"] > 0.95 - margin_of(0.95), (effect, n)
                if part == "errors" and effect in ("normal", "wide"):
                    assert row["covered"] < 0.95 + margin_of(0.95), (effect, n)
    for effect, by_n in simulated["problems"].items():
        for n, row in by_n.items():
            for key in ("worse", "better", "no worse, false"):
                assert row[key] < 0.025 + margin_of(0.025, STUDIES // 5), (effect, n, key)
            assert row["covered"] > 0.945 - margin_of(0.945, STUDIES // 5), (effect, n)
    assert simulated["problems"]["own"]["10"]["covered, seeds alone"] < 0.6
    for n, row in simulated["seen"].items():
        assert row["seen"] == pytest.approx(0.8, abs=margin_of(0.8)), n


def test_the_record_is_of_these_statistics(simulated, record):
    """Fewer studies, the same shares."""
    assert simulated.keys() | {"made"} == record.keys() and record["studies"] == 100_000

    def shares(part, at=()):
        if not isinstance(part, dict):
            return {at: part}
        found = {}
        for key, value in part.items():
            found |= shares(value, (*at, key))
        return found

    for part in ("errors", "arms", "looks", "collapse", "seen", "problems", "hall"):
        drawn, written = shares(simulated[part]), shares(record[part])
        assert drawn.keys() == written.keys()
        for at, share in written.items():
            fewer = STUDIES // 5 if part == "problems" else STUDIES
            abs_ = 1e-9 if at[-1] == "detectable" else margin_of(min(max(share, 0.0), 1.0), fewer)
            abs_ = 0.03 * share if at[-1] == "width" else abs_
            assert drawn[at] == pytest.approx(share, abs=abs_), (part, at)


def test_the_page_states_what_the_record_holds(record):
    page = coverage.PAGE.read_text()
    assert page == coverage.filled(page, coverage.tables(record)), (
        "run: python -m experiments.coverage"
    )


def test_an_effect_of_the_simulation_has_the_mean_it_claims():
    rng = np.random.default_rng(5)
    for effect, draw in coverage.EFFECTS.items():
        for shift in (0.0, -coverage.MARGIN):
            outcomes, _ = draw(rng, (40_000, 2, 5), shift)
            differences = (outcomes[:, 1] - outcomes[:, 0]).ravel()
            error = differences.std() / math.sqrt(differences.size)
            assert abs(differences.mean() - shift) < 5 * error, effect


def test_a_barred_arm_is_not_called_better():
    differences = np.array([[0.1, 0.11, 0.12, 0.1, np.nan]])
    for barred, verdict in ((True, "can't tell"), (False, "better")):
        estimate = over_seeds(differences, np.array(0.01))
        found = judge(
            estimate, 0.02, 0.05, "higher", np.array([0]), np.array(0), 5, np.array([barred])
        )
        assert VERDICTS[found.verdict[0]] == verdict and estimate.pairs[0] == 4


@pytest.mark.parametrize(("count", "n"), [(0, 5), (1, 5), (3, 5), (5, 5), (2, 40)])
def test_an_exact_interval_is_that_of_the_binomial_test(count, n):
    for level in (0.95, 0.8):
        of_scipy = stats.binomtest(count, n).proportion_ci(level, "exact")
        assert exact_interval(count, n, level) == pytest.approx((of_scipy.low, of_scipy.high))
