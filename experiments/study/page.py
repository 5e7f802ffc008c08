"""docs/study.md and its picture, from the record of `python -m experiments.study`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.figures import prose, table
from experiments.study.plan import Plan, Question
from fp8rl_jax.statistics import Comparison, compare_arms, sentence, t_interval

type Runs = Mapping[str, Mapping[str, Any]]
"""Of the record, by LENGTH/ARM-SEED."""
COLOURS = ("#b3362b", "#2b6cb3", "#3a8a4d", "#8a5fb0", "#c98a1b", "#555555", "#1b9aaa", "#8a8a8a")


def whole(plan: Plan, runs: Runs, length: str, arms: Sequence[str]) -> list[int]:
    """Give the seeds of which all these arms are there."""
    return [seed for seed in plan.seeds if all(f"{length}/{arm}-{seed}" in runs for arm in arms)]


def compare(
    plan: Plan, runs: Runs, length: str, arms: Sequence[str], against: str, alpha: float
) -> dict[str, Comparison]:
    """Compare arms with one over their common seeds, and over problems; nothing where there is no
    common seed, or no problem."""
    names = [against, *arms]
    seeds = whole(plan, runs, length, names)
    of = {name: [runs[f"{length}/{name}-{seed}"] for seed in seeds] for name in names}
    width = max((len(r["by_problem"].get("correct", ())) for r in sum(of.values(), [])), default=0)
    if not width:
        return {}
    return compare_arms(
        {name: [run["outcome"] for run in each] for name, each in of.items()},
        against,
        plan.margin,
        alpha=alpha,
        collapsed={
            name: [run["status"] == "collapsed" for run in each] for name, each in of.items()
        },
        resolution=1 / width / plan.designs[length].base.evaluation.samples,
        by_problem={
            name: np.stack([_by_problem(run, width) for run in each]) for name, each in of.items()
        },
        span=1.0,
    )


def _by_problem(run: Mapping[str, Any], width: int) -> np.ndarray:
    found = run["by_problem"]
    if run["outcome"] is None or not found:
        return np.full(width, np.nan)
    return np.array(found["correct"], float) / found["samples"]


def answer(plan: Plan, runs: Runs, question: Question) -> list[str]:
    """Answer a question: a sentence for each comparison, or what is missing."""
    lengths = question.lengths or tuple(plan.designs)
    against = question.against or plan.file.baseline
    arms = [against, *question.arms]
    seeds = {length: whole(plan, runs, length, arms) for length in lengths}
    lacking = [
        f"{length} tokens: not run yet ({len(found)} of {len(plan.seeds)} seeds)"
        for length, found in seeds.items()
        if len(found) < len(plan.seeds)
    ]
    if lacking:
        return lacking
    if question.longer:
        return _longer(plan, runs, question, lengths, against)
    alpha = plan.file.alpha / len(lengths)
    return [
        f"{length} tokens: {sentence(found, plan.margin)}"
        for length in lengths
        for found in compare(plan, runs, length, question.arms, against, alpha).values()
    ]


def _longer(
    plan: Plan, runs: Runs, question: Question, lengths: Sequence[str], against: str
) -> list[str]:
    """Of each arm, its differences at the longer length beside those at the shorter, by seed."""
    short, long = (f"{length} tokens" for length in lengths)
    lines = []
    for arm in question.arms:
        gaps: dict[str, list[float | None]] = {short: [], long: []}
        for name, length in zip(gaps, lengths, strict=True):
            for seed in plan.seeds:
                pair = [runs[f"{length}/{each}-{seed}"]["outcome"] for each in (arm, against)]
                gaps[name].append(None if None in pair else pair[0] - pair[1])
        alpha = plan.file.alpha / len(question.arms)
        found = compare_arms(gaps, short, plan.margin, alpha=alpha)[long]
        lines.append(f"{arm} - {against}, {sentence(found, plan.margin)}")
    return lines


def _mean(run: Mapping[str, Any], metric: str, last: int = 0) -> float:
    values = run["series"].get(metric, {}).get("values", [])
    known = [value for value in values[-last:] if value is not None]
    return float(np.mean(known)) if known else np.nan


def measured(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What a cell's runs measured, means over steps and seeds; of rewards, entropies and the served
    accuracy over the last steps. NaN: a metric that these runs have not."""

    def of(metric: str, last: int = 0) -> np.ndarray:
        return np.array([_mean(run, metric, last) for run in runs])

    k3, kl = of("mismatch/k3"), of("mismatch/kl")
    # k3 one way and the other add up to 2 cosh d - 2, which is d^2 and a twelfth of d^4
    square = k3 + of("mismatch/policy_kl_error") - kl**2
    each = {
        "k3": k3,
        "sd of dlogp": np.sqrt(np.maximum(square, 0.0)),
        "mean dlogp": -kl,
        "Pearson": of("mismatch/pearson"),
        "reward": of("reward/mean", 5),
        "entropy": of("rollout/entropy", 5),
        "grad norm": of("optim/grad_norm"),
        "ratios clipped": of("clip_ratio/region_mean"),
        "weights clipped": of("correction/clip_frac"),
        "rejected": of("correction/reject_frac"),
        "served": of("eval/accuracy", 1),
    }
    return {
        name: float(np.mean(known)) if len(known := x[~np.isnan(x)]) else np.nan
        for name, x in each.items()
    }


def cells_table(plan: Plan, runs: Runs, length: str) -> str:
    """Every cell of a length of which there is a run."""
    rows, names = [], [arm.name for arm in plan.designs[length].arms]
    for name in names:
        of = [runs[f"{length}/{name}-{seed}"] for seed in whole(plan, runs, length, [name])]
        if not of:
            continue
        ends = t_interval([run["outcome"] for run in of if run["outcome"] is not None])
        lost = sum(run["status"] in ("collapsed", "failed") for run in of)
        cells = ["" if np.isnan(x) else f"{x:.3g}" for x in measured(of).values()]
        rows.append([f"`{name}`", str(len(of)), f"{ends.mean:.3f}", *cells, str(lost)])
    if not rows:
        return ""
    heads = ["arm", "seeds", "judged under bf16", *measured([]), "diverged"]
    return f"### {length} tokens\n\n{table(heads, rows)}\n"


def _family(name: str) -> str:
    """What arms of several doses have in common: "tis" of tis-8."""
    return name.rpartition("-")[0] or name


def draw(plan: Plan, runs: Runs, path: Path) -> bool:
    """Draw response against dose, a panel for each length, of arms that learn at the baseline's
    rate; whether there was anything to draw."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "study"
    import matplotlib.pyplot as plt

    baseline = plan.file.baseline
    figure, axes = plt.subplots(
        1, len(plan.designs), figsize=(5.2 * len(plan.designs), 4.4), sharey=True, squeeze=False
    )
    families = dict.fromkeys(
        _family(arm.name)
        for design in plan.designs.values()
        for arm in design.arms
        if arm.name != baseline
    )
    drawn = False
    for axis, (length, design) in zip(axes[0], plan.designs.items(), strict=True):
        (rate,) = (arm.config.optimizer for arm in design.arms if arm.name == baseline)
        for i, family in enumerate(families):
            points = []
            for arm in design.arms:
                name = arm.name
                if _family(name) != family or name == baseline or arm.config.optimizer != rate:
                    continue
                found = compare(plan, runs, length, [name], baseline, plan.file.alpha).get(name)
                if found is None or not found.difference.n:
                    continue
                seeds = whole(plan, runs, length, [name])
                k3 = measured([runs[f"{length}/{name}-{seed}"] for seed in seeds])["k3"]
                x = found.difference
                points.append(
                    (max(k3, 1e-8), x.mean, x.mean - max(x.low, -1), min(x.high, 1) - x.mean)
                )
            if not points:
                continue
            k3, mean, below, above = np.array(sorted(points)).T
            axis.errorbar(
                k3 * 1.02**i,
                mean,
                [below, above],
                fmt="o-",
                markersize=4,
                linewidth=1,
                color=COLOURS[i % len(COLOURS)],
                label=family,
            )
            drawn = True
        axis.axhline(0, color="black", linewidth=0.8)
        axis.axhline(-plan.margin, color="black", linewidth=0.6, linestyle=":")
        axis.set(xscale="log", title=f"{length} tokens", xlabel="dose: mismatch k3 of the run")
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("response: accuracy under bf16, less the baseline's")
    if drawn:
        axes[0][0].legend(fontsize=8)
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return drawn


def page(plan: Plan, record: Mapping[str, Any], picture: bool) -> str:
    """Write docs/study.md."""
    runs, file = record["runs"], plan.file
    done = sum(f"{name}-{seed}" in runs for name in plan.cells for seed in plan.seeds)
    lines = ["# Dose and response", "", file.question, ""]
    if picture:
        lines += ["![Accuracy less the baseline's, by mismatch](study.svg)", ""]
    lines += [
        f"{done} of {len(plan.cells) * len(plan.seeds)} runs are there.",
        "",
        "## Answers",
        "",
    ]
    for question in plan.questions.values():
        lines.append(f"- **{question.ask}**")
        lines += [f"  - {line}" for line in answer(plan, runs, question)]
    tables = [text for length in plan.designs if (text := cells_table(plan, runs, length))]
    if tables:
        lines += ["", "## Every cell", "", *tables]
    low = file.collapse.below
    rule = (
        f" A run has diverged where its outcome ends below {low:g}, or where it failed."
        if low is not None
        else ""
    )
    methods = f"""
        Fixed beforehand, in `experiments/study/study.toml`: {len(plan.cells)} cells, {len(plan.seeds)} paired seeds, the
        outcome ({file.metric.name}, higher is better, of answers sampled at temperature 1), the margin {plan.margin:g}
        and the questions. A question's comparisons share an error of {file.alpha:g}: evenly over lengths, by Holm over
        arms. Intervals are over seeds and held-out problems ([statistics.md](statistics.md)); over seeds alone where lengths
        are compared.{rule} Diverged runs are counted by Barnard's exact test, and none is left out.
    """
    limits = """
        A policy of a few hundred thousand parameters on a task of one kind, some dozens of updates, one size of batch, and
        a start that slips on purpose: what is found is about the mechanism, and no number carries over to large models.
        "Can't tell" means that an effect smaller than what such a study sees may be there.
    """
    lines += ["", "## Methods", "", prose(methods), "", "## Limits", "", prose(limits), ""]
    return "\n".join(lines)


def write_pages(plan: Plan, record: Mapping[str, Any], docs: Path) -> None:
    """Write study.md, and study.svg where there is something to draw."""
    docs.mkdir(parents=True, exist_ok=True)
    picture = draw(plan, record["runs"], docs / "study.svg")
    (docs / "study.md").write_text(page(plan, record, picture), encoding="utf-8")
