"""From the steps of all runs to tables: the mismatch of each variant, their order, and what others report of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.mismatch.bootstrap import interval, means
from experiments.mismatch.variants import CLAIMS, Claim

WINDOW = 50
LAST = 50
K3 = "mismatch/k3"
Runs = dict[str, Any]
"""Seed -> its part of results.json."""


def steps_of(runs: Runs, key: str) -> np.ndarray:
    """A metric of a variant, float64 [seeds, steps]."""
    return np.array([run["steps"][key] for run in runs.values()])


def summarize(variants: dict[str, Runs]) -> dict[str, Any]:
    """`results.json`'s "summary": "variants" in the order of their mean k3, largest first, and "claims"."""
    rows = {name: summary_of(runs) for name, runs in variants.items()}
    order = sorted(rows, key=lambda name: -rows[name]["k3"]["mean"])
    tested = [check(claim, variants) for claim in CLAIMS if {claim.above, claim.below} <= variants.keys()]
    return {"variants": {name: rows[name] for name in order}, "claims": tested}


def summary_of(runs: Runs) -> dict[str, Any]:
    """One variant. Means are over seeds and steps; accuracies are held out, before and after all steps."""
    k3, reward, entropy = (steps_of(runs, key) for key in (K3, "reward/mean", "entropy"))
    windows = k3.reshape(len(k3), -1, WINDOW).mean(axis=(0, 2)) if k3.shape[1] % WINDOW == 0 else []
    accuracy = {seed: run["evaluation"]["eval/accuracy"] for seed, run in runs.items()}
    return {
        "k3": {
            "mean": float(k3.mean()),
            "interval": interval(means(k3)),
            "seeds": dict(zip(runs, k3.mean(axis=1).tolist(), strict=True)),
            f"windows of {WINDOW} steps": [float(value) for value in windows],
        },
        "logprob_abs_diff_mean": float(steps_of(runs, "mismatch/logprob_abs_diff_mean").mean()),
        "logprob_abs_diff_max": float(steps_of(runs, "mismatch/logprob_abs_diff_max").max()),
        "token_mult_prob_error": float(steps_of(runs, "mismatch/token_mult_prob_error").mean()),
        "pearson": float(steps_of(runs, "mismatch/pearson").mean()),
        "zero_steps": int((steps_of(runs, "mismatch/logprob_abs_diff_max") == 0).sum()),
        "steps": int(k3.size),
        f"reward of the last {LAST} steps": {
            "mean": float(reward[:, -LAST:].mean()), "interval": interval(means(reward[:, -LAST:])),
        },
        "entropy": {"first": float(entropy[:, :LAST].mean()), "last": float(entropy[:, -LAST:].mean())},
        "accuracy": {seed: [values[0], values[-1]] for seed, values in accuracy.items()},
    }  # fmt: skip


def check(claim: Claim, variants: dict[str, Runs]) -> dict[str, Any]:
    """Whether an order holds here: `ratio` of the mean k3 with its interval, paired by seed and step, over the seeds that both
    have; "holds" where the whole interval is above 1, "fails" where it is below, else "open"."""
    seeds = [seed for seed in variants[claim.above] if seed in variants[claim.below]]
    above, below = (steps_of({seed: variants[name][seed] for seed in seeds}, K3) for name in (claim.above, claim.below))
    low, high = interval(means(above) / means(below))
    return {
        "above": claim.above,
        "below": claim.below,
        "source": claim.source,
        "ratio": float(above.mean() / below.mean()),
        "interval": (low, high),
        "share of steps": float((above > below).mean()),
        "verdict": "holds" if low > 1 else "fails" if high < 1 else "open",
    }


def table(summary: dict[str, Any]) -> str:
    """The summary in Markdown."""
    columns = ("variant", "k3", "95 % interval", "seeds", "largest difference", "ratio", "pearson", "reward", "accuracy")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for name, row in summary["variants"].items():
        low, high = row["k3"]["interval"]
        seeds = ", ".join(f"{value:.3g}" for value in row["k3"]["seeds"].values())
        reward = row[f"reward of the last {LAST} steps"]["mean"]
        first, last = np.mean(list(row["accuracy"].values()), axis=0)
        lines.append(
            f"| `{name}` | {row['k3']['mean']:.3g} | {low:.3g} - {high:.3g} | {seeds} | {row['logprob_abs_diff_max']:.3g} | "
            f"{row['token_mult_prob_error']:.6g} | {row['pearson']:.7f} | {reward:.3f} | {first:.3f} to {last:.3f} |"
        )
    lines += ["", "| reported | ratio of k3 here | 95 % interval | share of steps | |", "|---|---|---|---|---|"]
    for claim in summary["claims"]:
        low, high = claim["interval"]
        lines.append(
            f"| {claim['source']}: `{claim['above']}` / `{claim['below']}` | {claim['ratio']:.3g} | {low:.3g} - {high:.3g} | "
            f"{claim['share of steps']:.3f} | {claim['verdict']} |"
        )
    return "\n".join(lines) + "\n"
