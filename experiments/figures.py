"""Every measured figure of README.md, docs/results.md, docs/formats.md and docs/training.md, made
from the committed records: `python -m experiments.figures`.

docs/results.md opens with a row for each question, then has every record in full, and is written
whole; but for number formats, whose tables and picture are docs/formats.md's. README.md has the
rows of the main questions between `<!-- figures -->` and `<!-- end of figures -->`;
docs/training.md has tables of its sections between such marks with a section's name. A test makes all of them again and compares, and finds no
measured figure in the rest of README.md. So a figure cannot drift from its record.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import training_page
from experiments.depth import mean as depth_mean
from experiments.depth import table as depth_table
from experiments.fake_quantization import summary
from experiments.formats.page import Records, draw, tables
from fp8rl_jax.statistics import Interval, compare_arms, t_interval

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
START, END = "<!-- figures -->\n", "<!-- end of figures -->"


def record(path: str) -> Any:
    """A JSON record under experiments/results."""
    return json.loads((RESULTS / path).read_text())


@dataclass(frozen=True)
class ArmFigures:
    """What an ablation's record says of an arm."""

    before: Interval
    """Held-out accuracy before training, over seeds."""
    after: Interval
    judged: Interval
    """The same under the judge's recipe; of no seeds where there is no judge."""
    k3: tuple[float, float, float]
    """Mean over steps: its mean over seeds, the least and the largest."""
    k3_median: float
    """Of all steps of all seeds."""
    largest: float
    """Largest difference of a log-probability."""
    clipped: float
    """Mean share of tokens whose importance weight was cut."""
    comparison: dict[str, Any] | None
    """With the baseline, as the record has it."""


@dataclass(frozen=True)
class Study:
    """An ablation's committed record."""

    arms: dict[str, ArmFigures]
    seeds: int
    problems: int
    steps: int


@cache
def study(name: str) -> Study:
    """Read experiments/results/ablations/NAME.json."""
    kept = record(f"ablations/{name}.json")
    compared = {row["arm"]: row for row in kept["comparisons"]}
    arms = {}
    for arm in kept["arms"]:
        whole = [run for run in arm["runs"] if run["outcome"] is not None]
        series = [{name: of["values"] for name, of in run["series"].items()} for run in whole]
        k3 = [float(np.mean(each["mismatch/k3"])) for each in series]
        judged = [run["judged"]["judged/accuracy"] for run in whole if run["judged"]]
        arms[arm["name"]] = ArmFigures(
            t_interval([each["eval/accuracy"][0] for each in series]),
            t_interval([each["eval/accuracy"][-1] for each in series]),
            t_interval(judged),
            (float(np.mean(k3)), min(k3), max(k3)),
            float(np.median(np.concatenate([each["mismatch/k3"] for each in series]))),
            max(max(each["mismatch/logprob_abs_diff_max"]) for each in series),
            float(np.mean([np.mean(each["mismatch/is_clip_frac"]) for each in series])),
            compared.get(arm["name"]),
        )
    first = kept["arms"][0]["runs"][0]
    return Study(
        arms,
        len(kept["seeds"]),
        len(first["by_problem"]["correct"]),
        len(first["series"]["mismatch/k3"]["values"]),
    )


def estimate(x: Interval, form: str) -> str:
    """Mean (low to high); of one seed the mean alone."""
    return interval([x.mean, x.low, x.high] if x.n > 1 else [x.mean, np.nan, np.nan], form)


def interval(x: Sequence[float], form: str) -> str:
    """Mean (low to high); the mean alone where the limits are not known."""
    return f"{x[0]:{form}}" if np.isnan(x[1]) else f"{x[0]:{form}} ({x[1]:{form}} to {x[2]:{form}})"


def against(arm: ArmFigures) -> str:
    """Difference to the baseline with its interval, and what the record claims of it."""
    return "baseline" if arm.comparison is None else difference_of(arm.comparison)


def difference_of(row: dict[str, Any]) -> str:
    """A row of a record's comparisons: the difference, its interval and the verdict."""
    limits = row["difference"]
    level = f"{100 * (1 - row['alpha']):.4g} %: "
    mean, low, high = (f"{round(limits[key], 3) + 0.0:+.3f}" for key in ("mean", "low", "high"))
    return f"{mean} ({level}{low} to {high}): {row['sentence'].rpartition(': ')[2]}"


def prose(text: str) -> str:
    """A paragraph of one line."""
    return " ".join(text.split())


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


K3 = "mismatch k3, mean over steps (range over seeds)"


def learned(found: Study) -> str:
    """A table of what was learned: accuracies, difference and mismatch of each arm."""
    rows = [
        [
            f"`{name}`",
            estimate(arm.before, ".3f"),
            estimate(arm.after, ".3f"),
            against(arm),
            interval(arm.k3, ".1e"),
            f"{arm.largest:.1e}",
        ]
        for name, arm in found.arms.items()
    ]
    heads = [
        *("recipe", "accuracy before", "after", "difference to `bf16`", K3),
        "largest difference of a log-probability",
    ]
    return table(heads, rows)


def demo() -> str:
    """The demo's table."""
    found = study("demo")
    about = prose(f"""
        The demo: a byte-level policy of 1.3 million parameters spells words backward. Its warm start is supervised, with 55 %
        of the demonstrations cut one letter short; {found.steps} steps of GRPO then teach that away. {found.seeds} paired
        seeds, {found.problems} held-out words, greedy, float32 compute on a CPU. `make ablation` makes this table's record.
    """)
    return f"{about}\n\n{learned(found)}"


def recipes() -> str:
    """Mismatch of every recipe."""
    found = study("recipes")
    about = prose(f"""
        Mismatch of every recipe: bfloat16 compute, the demo's policy kept unsure of itself
        (`experiments/runs/mismatch.toml`), {found.steps} steps, {found.seeds} paired seeds, {found.problems} held-out words.
        Where both sides have the same formats, what is left are sums that two programs make in two orders, and that round to
        neighbouring bfloat16 numbers in a few tokens of some steps: hence a mean far above the median. Exact mode has none.
    """)
    rows = [
        [
            f"`{name}`",
            interval(arm.k3, ".1e"),
            f"{arm.k3_median:.1e}",
            f"{arm.largest:.1e}",
            against(arm),
        ]
        for name, arm in sorted(found.arms.items(), key=lambda item: -item[1].k3[0])
    ]
    heads = [
        *("recipe", "k3, mean over steps (range over seeds)", "its median step"),
        *("largest difference of a log-probability", "accuracy after, less `bf16`'s"),
    ]
    return f"{about}\n\n{table(heads, rows)}"


def tensor_core_sums() -> str:
    """Errors of sums as Hopper's tensor cores make them, by a published model of them."""
    about = prose("""
        Hopper's tensor cores keep 13 fraction bits of a sum of FP8 products and of each addend, and cut the rest towards zero.
        Computed by a published model of them ([tensor_cores.py](../pallas_kernels/check/tensor_cores.py); its bits are those of
        an implementation that was held against H100s), no card took part: errors of sums of k products, as parts of the sum of
        magnitudes, the largest of 4,096 sums and their mean. Kernels of this library let tensor cores add 128 products and go on
        in float32; the rows in which tensor cores add all of 4,096 show what that is for. Data of one sign are positive normal
        numbers, lognormal ones have a sigma of 2; e4m3 is scaled by the row's largest number.
    """)
    rows = [
        [
            of["data"],
            of["operands"].removeprefix("float8_").removesuffix("fn"),
            f"{of['k']:,}",
            f"{of['added by tensor cores']:,}",
            f"{of['largest']:.1e}",
            f"{of['mean']:+.1e}",
        ]
        for of in record("exact/tensor_cores.json")["rows"]
    ]
    heads = ["data", "operands", "k", "added by tensor cores", "largest error", "mean error"]
    return f"{about}\n\n{table(heads, rows)}"


DEPTH_COMMAND = (
    "python -m experiments.depth --weights smollm2 --dtypes bfloat16 "
    "--recipes bf16 fp8-rollout fp8-kv fp8-rl fp8-e2e fp8-e2e-kv infir2"
)


def deep() -> list[dict[str, Any]]:
    """Points of the depth study that are shown, by depth."""
    points = record("depth/results.json")["points"]
    return sorted(
        (p for p in points if p["weights"] == "smollm2" and p["dtype"] == "bfloat16"),
        key=lambda p: p["depth"],
    )


def depth() -> str:
    """What the mismatch is made of, by depth."""
    chosen = deep()
    bf16 = chosen[-1]["k3"]["bf16"]
    about = prose(f"""
        What the mismatch is made of, and how it grows with depth: SmolLM2-135M-Instruct whole ({chosen[-1]["depth"]}
        layers) and cut to its first layers, forward passes alone, bfloat16 compute, {bf16["tokens"]} tokens of {len(bf16["total"])} sets of prompts, sampled by the
        recipe's own rollout. k3, mean / median over the sets; at the greatest depth the mean's 95 % interval by bootstrap over
        the sets, its parts, and how much of it is one token's, the largest. Each part is the k3 between two programs that
        differ in that one thing, so parts need not add up. `fp8-e2e` and `jet-rl` have the same formats on both sides: what is
        left of theirs is a last bit of a sum that flips an e4m3 rounding, which the next layer multiplies. Exact mode is
        without it.
    """)
    return f"{about}\n\n{depth_table(chosen)}"


def correction() -> str:
    """Corrections at a dose where they act."""
    found = study("correction")
    dose = found.arms["none"]
    about = prose(f"""
        Corrections where they act: `fp8-rl` with a KV cache whose scales cover half of the range. In {dose.clipped:.1%} of
        the tokens the trainer's probability is more than twice the rollout's. {found.seeds} paired seeds, {found.problems}
        held-out words, float32 compute. What was learned is judged under the recipe `bf16`, and through the damaged cache.
        `none` less `token_tis`, paired over seeds: judged under `bf16` {without("outcome")}; served through the damaged cache
        {without("served")}. Uncorrected, a policy does better through the cache that samples it, and worse without the damage.
        No arm falls behind by the margin: the dose is a k3 that SmolLM2 has undamaged.
    """)
    return f"{about}\n\n{table(CORRECTED, corrected_rows(found))}"


CORRECTED = [
    *("correction", "accuracy after, judged under `bf16`", "difference to `bf16`"),
    *("served through the damaged cache", K3),
]
"""Heads of `corrected_rows`."""


def corrected_rows(found: Study) -> list[list[str]]:
    """What was learned under each correction, and through the cache that is damaged."""
    return [
        [
            "`bf16` recipe, undamaged" if name == "bf16" else f"`{name}`",
            estimate(arm.judged, ".3f"),
            against(arm),
            estimate(arm.after, ".3f"),
            interval(arm.k3, ".1e"),
        ]
        for name, arm in found.arms.items()
    ]


def high_dose() -> str:
    """Corrections at a dose that costs learning."""
    found = study("high_dose")
    counted = {
        "weights cut": "correction/clip_frac",
        "tokens rejected": "correction/reject_frac",
        "updates taken back": "optim/rejected",
    }
    runs = {arm["name"]: arm["runs"] for arm in record("ablations/high_dose.json")["arms"]}
    gains = "; ".join(
        f"`{name}` {estimate(gain, '+.3f')}, ahead in {ahead} of {gain.n} seeds"
        for name in ("token_tis", "icepop", "mis", "kpop", "mipu")
        for gain, ahead in [less(runs, name, "none", "outcome")]
    )
    about = prose(f"""
        Corrections where a rollout's error costs learning: `fp8-rl` with a KV cache whose scales cover a quarter of the range,
        a k3 of {found.arms["none"].k3[0]:.1f} without a correction. {found.seeds} paired seeds, {found.problems} held-out
        words, float32 compute. What was learned is judged under the recipe `bf16`, and through the damaged cache. `kpop`,
        `p3o` and `mipu`: [objectives.md](objectives.md#built-in-and-from-where). Shares are means over steps and seeds.
        Less `none`, judged, paired over seeds: {gains}. None is whole: all stay behind `bf16`. `p3o`, which pulls to the policy that sampled,
        here the damaged one, is lost. `mipu` begins with token weights and takes updates back beside them, which adds nothing
        here; its tolerances are wider than the paper's, with which a trial of six steps took all of them back.
    """)
    rows = corrected_rows(found)
    for row, name in zip(rows, found.arms, strict=True):
        row += [share(runs[name], metric) for metric in counted.values()]
    return f"{about}\n\n{table([*CORRECTED, *counted], rows)}"


def share(runs: list[dict[str, Any]], metric: str) -> str:
    """Mean over steps and seeds of a metric that is a share; empty where no run has it."""
    return over_steps(runs, metric, ".1%")


def over_steps(runs: list[dict[str, Any]], metric: str, form: str) -> str:
    """Mean over steps and seeds of a metric; empty where no run has it."""
    found = [run["series"][metric]["values"] for run in runs if metric in run["series"]]
    values = [x for of in found for x in of if x is not None]
    return f"{np.mean(values):{form}}" if values else ""


def losses(name: str, about: str) -> str:
    """Held-out losses of a study on text or on answers, in each arm's own formats and judged."""
    kept = record(f"ablations/{name}.json")
    compared = {row["arm"]: row for row in kept["comparisons"]}
    base = (
        [run["judged"]["judged/loss"] for run in kept["arms"][0]["runs"]] if kept["judge"] else []
    )
    rows = []
    for arm in kept["arms"]:
        row, runs = compared.get(arm["name"]), arm["runs"]
        own = seeds([run["outcome"] for run in runs], ".3f")
        cells = (
            ["baseline", ""] if row is None else [difference_of(row), f"{row['detectable']:.3f}"]
        )
        judged = []
        if base:
            found = [run["judged"]["judged/loss"] for run in runs]
            gaps = [x - y for x, y in zip(found, base, strict=True)]
            judged = ["baseline" if row is None else seeds(gaps, "+.3f")]
        rows.append([f"`{arm['name']}`", own, *cells, *judged])
    what = f"{len(kept['seeds'])} paired seeds; losses in nats, least to greatest over seeds in brackets."
    heads = [
        *("arm", "held-out loss, in its own formats", "less the baseline's", "could be seen"),
        *(["judged: the same weights, nothing quantized, less the baseline's"] if base else []),
    ]
    return f"{prose(about)} {what}\n\n{table(heads, rows)}"


def pretraining() -> str:
    """What formats cost a model from scratch, and MXFP4 beside NVFP4."""
    kept = record("ablations/pretraining.json")
    of = {arm["name"]: [run["outcome"] for run in arm["runs"]] for arm in kept["arms"]}
    pairs, told = (("nvfp4", "mxfp4"), ("nvfp4-plain", "mxfp4-plain")), []
    for base, arm in pairs:
        found = compare_arms(
            {base: of[base], arm: of[arm]}, base, 0.02, 0.05 / len(pairs), "lower"
        )[arm]
        x = found.difference
        limits, seen = f"{x.low:+.3f} to {x.high:+.3f}", f"{found.detectable:.3f}"
        told.append(f"`{arm}` less `{base}` {x.mean:+.3f} ({limits}; {seen} could be seen)")
    about = """A policy of 0.3 million parameters over bytes, from scratch, 300 updates of 1,024 bytes in bfloat16 compute
        ([training.md](training.md#nvfp4-pretraining) says of what). `float32` differs from `bf16` in last bits alone."""
    beside = f"MXFP4 beside NVFP4, at 97.5 %, not registered before: {'; '.join(told)}."
    return f"{losses('pretraining', about)}\n\n{beside}"


def stability_in_rl() -> str:
    """Spikes, skipped updates, gradient norms and sharpness of each arm, at each learning rate."""
    kept = record("ablations/stability.json")

    def spiked(runs: list[dict[str, Any]], what: str) -> str:
        count = sum(run["series"][f"stability/{what}"]["values"][-1] > 0 for run in runs)
        return training_page.of_runs(count, len(runs))

    rows = []
    for arm in kept["arms"]:
        runs, recipe = arm["runs"], arm["recipe"]
        after = [run["series"]["eval/accuracy"]["values"][-1] for run in runs]
        rows.append(
            [
                f"`{recipe}`",
                f"{arm['settings']['optimizer.learning_rate']:g}",
                seeds(after, ".3f"),
                spiked(runs, "grad_norm_spikes"),
                spiked(runs, "loss_spikes"),
                over_steps(runs, "optim/skipped_steps", "g"),
                over_steps(runs, "optim/grad_norm", ".2f"),
                over_steps(runs, "sharpness/0.001", ".4f"),
            ]
        )
    about = prose(f"""
        FP8 in one flow against bfloat16 at three learning rates, the demo in bfloat16 compute: {len(runs[0]["series"]["optim/grad_norm"]["steps"])} steps,
        {len(kept["seeds"])} paired seeds. Runs that had a spike, with the exact 95 % interval of their share; accuracy after
        (least to greatest over seeds); means over steps and seeds of skipped updates, gradient norms and sharpness.
    """)
    heads = [
        *("recipe", "learning rate", "accuracy after", "spikes of the gradient norm"),
        *("of the loss", "skipped updates", "gradient norm", "sharpness at 0.001"),
    ]
    return f"{about}\n\n{table(heads, rows)}"


def steps_to(level: float, runs: list[dict[str, Any]]) -> str:
    """After how many steps the mean of the last three rewards is `level`: mean (range over seeds)
    of the runs that come to it, and how many do."""
    counts = []
    for run in runs:
        means = np.convolve(run["series"]["reward/mean"]["values"], np.ones(3) / 3, "valid")
        if (there := np.flatnonzero(means >= level)).size:
            counts.append(float(there[0] + 3))
    some = f", {len(counts)} of {len(runs)} runs" if len(counts) < len(runs) else ""
    return f"{seeds(counts, '.1f')}{some}" if counts else "none"


def side_by_side(name: str, about: str, counted: dict[str, tuple[str, str]]) -> str:
    """A table of an ablation's arms: accuracies, mismatch, means of other metrics, and how soon
    they earn what the baseline does on average.

    Args:
        about: what it is of; the numbers of seeds, problems and steps are said behind it.
        counted: by head of the column, a metric and how it is written.
    """
    found, kept = study(name), record(f"ablations/{name}.json")
    baseline = next(arm["runs"] for arm in kept["arms"] if arm["name"] == kept["baseline"])
    level = float(over_steps(baseline, "reward/mean", ".2f"))
    judged = any(arm.judged.n for arm in found.arms.values())
    rows = []
    for arm in kept["arms"]:
        figures = found.arms[arm["name"]]
        rows.append(
            [
                f"`{arm['name']}`",
                estimate(figures.after, ".3f"),
                *([estimate(figures.judged, ".3f")] if judged else []),
                against(figures),
                interval(figures.k3, ".1e"),
                *(over_steps(arm["runs"], *metric) for metric in counted.values()),
                steps_to(level, arm["runs"]),
            ]
        )
    heads = [
        *("arm", "accuracy after, as each is served"),
        *(f"judged under `{kept['judge']}`" for _ in range(judged)),
        *(f"difference to `{kept['baseline']}`", K3, *counted),
        f"steps to a reward of {level:.2f}, over seeds",
    ]
    text = prose(f"""
        {about} {found.steps} steps, {found.seeds} paired seeds, {found.problems} held-out problems; means over steps and seeds.
        Last, after how many steps three rewards in a row have the baseline's mean over its whole run.
    """)
    return f"{text}\n\n{table(heads, rows)}"


def less(
    runs: dict[str, list[dict[str, Any]]], name: str, other: str, where: str
) -> tuple[Interval, int]:
    """Accuracy of an arm less another's, paired over seeds, and in how many of them it is ahead.

    Args:
        runs: by arm.
        where: "outcome" as judged, or "served" as the run itself evaluates.
    """
    found = [
        [
            run["outcome"] if where == "outcome" else run["series"]["eval/accuracy"]["values"][-1]
            for run in runs[arm]
        ]
        for arm in (name, other)
    ]
    difference = np.subtract(*found)
    return t_interval(list(difference)), int((difference > 0).sum())


def without(where: str) -> str:
    """Accuracy of no correction less that of token weights, of the lower dose; `where` as `less`
    has it."""
    runs = {arm["name"]: arm["runs"] for arm in record("ablations/correction.json")["arms"]}
    found, ahead = less(runs, "none", "token_tis", where)
    return f"{estimate(found, '+.3f')}, ahead in {ahead} of {found.n} seeds"


def compute_dtype() -> str:
    """The bf16 recipe in three compute dtypes."""
    found = study("compute_dtype")
    about = prose(f"""
        The `bf16` recipe, which quantizes nothing, in three compute dtypes: the demo, {found.seeds} paired seeds,
        {found.problems} held-out words. In float16 the loss scale is found while training (arXiv 2510.26788).
    """)
    rows = [
        [
            name,
            interval(arm.k3, ".1e"),
            f"{arm.k3_median:.1e}",
            f"{arm.largest:.1e}",
            estimate(arm.after, ".3f"),
            against(arm),
        ]
        for name, arm in found.arms.items()
    ]
    heads = [
        *("compute dtype", "k3, mean over steps (range over seeds)", "its median step"),
        *("largest difference of a log-probability", "accuracy after", "less float32's"),
    ]
    return f"{about}\n\n{table(heads, rows)}"


REPLAY = "sampling_replay.json"


def ratios_of(side: dict[str, float]) -> str:
    """Mean and median of ratios, and how many are outside."""
    return f"{side['mean']:.3f}, {side['median']:.3f}, {side['outside']:.1%}"


def sampling_replay() -> str:
    """Ratios under truncated sampling, over the vocabulary and over supports."""
    found = record(REPLAY)
    given = found["arguments"]
    about = prose(f"""
        The importance ratio of a policy with itself, trainer over rollout, where sampling is truncated: {given["model"]} answers
        {found["prompts"]} prompts {given["samples"]} times in {given["new_tokens"]} tokens at most, at temperature 1, and the
        trainer scores the same tokens over the whole vocabulary, then over each token's support
        (`rl.correction.truncated_sampling = "replay"`; `rollout.support_size` {given["support_size"]}). What a recipe does not
        quantize is in float32, without exact mode. Over the vocabulary the mean is about the kept mass; what replay leaves is
        numerics, as where nothing is truncated. "Outside": ratios below 0.9 or above 1.1.
    """)
    rows = []
    for row in found["rows"]:
        replayed = ["", "", ""]
        if "support" in row:
            kept = f"{row['support_mean']:.1f}", f"{row['support_capped']:.1%}"
            replayed = [ratios_of(row["support"]), *kept]
        truncated = f"`{row['recipe']}`", row["truncation"], f"{row['kept_mass']:.3f}"
        rows.append([*truncated, ratios_of(row["vocabulary"]), *replayed, f"{row['tokens']:,}"])
    of = "mean, median, outside"
    heads = [
        *("recipe", "truncation", "kept mass", f"ratio over the vocabulary: {of}"),
        *(f"replayed: {of}", "ids of a support", "capped", "tokens"),
    ]
    return f"{about}\n\n{table(heads, rows)}"


def partial_rollouts() -> str:
    """Completions that are carried over to the next step."""
    found, kept = study("partial_rollouts"), record("ablations/partial_rollouts.json")
    about = prose(f"""
        Does it cost accuracy to carry the longest completions over (`rollout.paged.extra_prompts`)? The demo with `fp8-rl` and
        token weights, {found.steps} steps of 32 prompts, {found.seeds} paired seeds, {found.problems} held-out words.
        Completions have 8 tokens at most here, so few decode steps can be saved: what the table judges is the learning.
    """)
    rows = []
    for arm in kept["arms"]:
        stale, steps = (
            np.mean([run["series"].get(name, {"values": 0.0})["values"] for run in arm["runs"]])
            for name in ("rollout/stale_tokens", "rollout/decode_steps")
        )
        figures = found.arms[arm["name"]]
        rows.append(
            [
                str(arm["settings"].get("rollout.paged.extra_prompts", 0)),
                f"{stale:.0%}",
                f"{steps:.2f}",
                interval(figures.k3, ".1e"),
                f"{figures.clipped:.1%}",
                estimate(figures.after, ".3f"),
                against(figures),
            ]
        )
    heads = [
        *("extra prompts", "tokens of older weights", "decode steps of a rollout", K3),
        *("weights cut", "accuracy after", "difference to 0"),
    ]
    return f"{about}\n\n{table(heads, rows)}"


def kv_calibration() -> str:
    """KV scales of another forward."""
    found, kept = study("kv_calibration"), record("ablations/kv_calibration.json")
    about = prose(f"""
        Which forward may calibrate the KV scales (`precision.kv_calibration`)? One of its own under the new weights, on all of the
        step's tokens (`forward`) or on those of two prompts, or the update's own, under the weights before it (`update`, the
        default), which costs no pass. The demo with `fp8-rl`, {found.steps} steps, {found.seeds} paired seeds, {found.problems} held-out words.
        Saturated is the part of the elements beyond the scales that were served, mean over the steps.
    """)
    rows = []
    for arm in kept["arms"]:
        figures = found.arms[arm["name"]]
        rows.append(
            [
                arm["name"],
                *(over_steps(arm["runs"], f"fp8/sat_frac_{role}", ".1e") for role in "qkv"),
                interval(figures.k3, ".1e"),
                estimate(figures.after, ".3f"),
                against(figures),
            ]
        )
    heads = ["forward", "Q saturated", "K", "V", K3, "accuracy after", "difference to forward"]
    return f"{about}\n\n{table(heads, rows)}"


VLLM = "vllm_engine.json"


def taught(found: Study) -> str:
    """A table of what was learned through each engine."""
    rows = [
        [f"`{name}`", interval(arm.k3, ".1e"), estimate(arm.after, ".3f"), against(arm)]
        for name, arm in found.arms.items()
    ]
    return table(["engine", K3, "accuracy after", "less `static`'s"], rows)


def sums_through_vllm() -> str:
    """SmolLM2 learns sums through vLLM."""
    found = study("vllm_addition")
    before = estimate(found.arms["static"].before, ".2f")
    compared = found.arms["vllm"].comparison
    assert compared is not None
    about = prose(f"""
        SmolLM2-135M-Instruct learns single-digit sums through a vLLM server (`experiments/runs/smollm2_addition.toml`):
        {found.steps} steps of GRPO in float32, {found.seeds} paired seeds, {found.problems} held-out problems, {before} of them
        solved before. With this spread a true difference of {compared["detectable"]:.2f} is seen in 80 % of all cases.
    """)
    return f"{about}\n\n{taught(found)}"


def through_vllm() -> str:
    """vLLM as the rollout engine: what it serves, and what is learned."""
    found, pushed = study("vllm"), record(VLLM)
    about = prose(f"""
        GRPO through vLLM: the demo, {found.steps} steps in float32, {found.seeds} paired seeds, {found.problems} held-out
        words. `static` is our own sampler.
    """)
    learned = taught(found)
    sizes = pushed["arguments"]
    beside = prose(f"""
        What vLLM {pushed["vllm"]} serves, push after push: {sizes["model"]}, {sizes["pushes"]} pushes of weights
        that are moved by {pushed["moved"]:.0%} each time, {sizes["prompts"]} completions of random prompts behind each. Between
        vLLM's log-probabilities of its tokens and our trainer's with the weights that were pushed, in the worst of the
        pushes; and with the weights of the push before, which is what a server would show that kept them.
        Command: `python -m experiments.vllm_engine --python PYTHON --output FILE`. Record: `experiments/results/{VLLM}`.
    """)
    cases = []
    for name, pushes in pushed["cases"].items():
        now = max(pushes, key=lambda push: push["trainer"]["max_abs"])["trainer"]
        before = min((push["previous"] for push in pushes[1:]), key=lambda of: of["mean_abs"])
        cases.append(
            [
                f"`{name}`",
                f"{now['max_abs']:.1e}",
                f"{now['mean_abs']:.1e}",
                f"{now['k3']:.1e}",
                f"{before['mean_abs']:.1e}",
            ]
        )
    heads = [
        *("case", "largest difference", "mean", "k3", "mean, weights of the push before"),
    ]
    return f"{about}\n\n{learned}\n\n{beside}\n\n{table(heads, cases)}"


COLLECTIVES = "collectives.json"
ENGINES = "engines.json"
ENGINE_TEXT = {"static": "our sampler", "paged": "our sampler", "files": "vLLM", "dlpack": "vLLM"}


def engines() -> str:
    """What a sync and a rollout cost with each engine, and what mismatch they leave."""
    found = record(ENGINES)
    given, machine = found["arguments"], found["machine"]
    first, rounds = given["engines"][0], len(found["raw"]["rounds"])
    about = prose(f"""
        {given["model"]}, recipe `{given["recipe"]}`, {given["compute_dtype"]}: {given["prompts"]} prompts of
        {given["prompt_tokens"]} random tokens, {given["new_tokens"]} tokens sampled of each, weights moved by
        {found["moved"]:.0%} before every sync; {rounds} rounds in turns on {machine["threads"]} cores
        ({machine["processor"]}), with a load average of {machine["load_average"][0]:.1f} at the end. `files` is a
        vLLM {found["vllm"]} server, `dlpack` vLLM in the trainer's process; their syncs have the parity check in them. vLLM runs
        {"compiled" if given["compiled"] else "eager, as `rollout.vllm.compiled` leaves it: compiled it decodes faster"}. Times
        are over those of `{first}` in the same round, medians (quartiles); differences of log-probabilities are between
        the engine's and the trainer's.
    """)
    ratios = {(ratio["over"], ratio["part"]): speed(ratio) for ratio in found["ratios"]}
    rows = []
    for name in given["engines"]:
        kept = found["distances"][name]
        share = found["sync_share"][name]
        rows.append(
            [
                f"`{name}`, {ENGINE_TEXT[name]}",
                *(ratios.get((name, part), "1") for part in ("sync", "gen", "seconds")),
                f"{share['median']:.0%}",
                f"{max(each['max_abs'] for each in kept):.1e}",
                f"{np.mean([each['k3'] for each in kept]):.1e}",
            ]
        )
    heads = [
        *("engine", "sync", "rollout", "both", "sync's share of both"),
        *("largest difference", "k3, mean over rounds"),
    ]
    return f"{about}\n\n{table(heads, rows)}"


def served() -> tuple[str, str]:
    """vLLM's log-probabilities after a push."""
    pushes = record(VLLM)["cases"]["float32"]
    worst = max(push["trainer"]["max_abs"] for push in pushes)
    learned, over = costs("vllm", "vllm", "static")
    return (
        f"{learned}; largest difference of a log-probability {worst:.1e} (float32)",
        f"{over}; {len(pushes)} pushes",
    )


def identity() -> dict[str, list[float]]:
    """Largest difference of a log-probability in every step of the exact runs, by "run recipe"."""
    runs = record("exact/identity.json")["runs"]
    return {name: run["differences"] for name, run in runs.items()}


def cost_of_exact() -> dict[tuple[str, str, str], list[float]]:
    """How many times as fast a part of a step is with exact mode as without, by (workload, recipe,
    part), a number a round."""
    found = {}
    for benchmark in record("benchmarks/cpu_exact.json")["benchmarks"]:
        sides = {name.removeprefix("fp8rl_jax/"): name for name in benchmark["sides"]}
        for recipe in ("bf16", "jet-rl"):
            for part in ("seconds", "gen"):
                rounds = [each["seconds"] for each in benchmark["raw"]["rounds"]]
                found[benchmark["workload"]["name"].removesuffix(", exact"), recipe, part] = [
                    seconds[sides[f"{recipe}-plain"]][part]
                    / seconds[sides[f"{recipe}-exact"]][part]
                    for seconds in rounds
                ]
    return found


def on_meshes() -> str:
    """What devices send each other, and the temporary memory of a program beside what is planned."""
    kept = record(COLLECTIVES)
    found, compiling = kept["programs"], kept["compile_seconds"]
    fewest, *_, most_layers = compiling
    prompts, samples, width, new = next(iter(found.values()))["batch"]
    most = max(each["batch"][0] for each in found.values())

    def sent(by_axes: dict[str, int], unit: float) -> str:
        # what is passed on from device to device has no axes
        parts = [
            f"{axes or 'passed on'} {n / unit:{',.0f' if n >= 1000 * unit else '.3g'}}"
            for axes, n in by_axes.items()
            if n >= unit / 100
        ]
        return ", ".join(parts) or "-"

    rows = [
        [
            each["what"],
            f"`{each['recipe']}`",
            each["shape"],
            " x ".join(f"{axis} {size}" for axis, size in each["mesh"].items()),
            sent(each["once"], 1e9),
            sent(each["a_step"], 1e6),
            "-"
            if each["planned"] is None
            else f"{each['temporary'] / 1e9:.1f} ({each['planned'] / 1e9:.1f})",
        ]
        for each in found.values()
    ]
    about = prose(f"""
        Programs compiled for H200s that are not there, of prompts of {width} tokens with {samples} completions of {new} tokens
        ({prompts} prompts an update, of the 32B model {most}): bytes that one device sends over a ring, by the axes of the mesh that they travel along,
        of all but the decode loop, and of a step of it (of all rows at once in the static engine, of a shard's slots in the paged one, of which this is
        the decode program alone). The last column is the memory of temporaries that XLA plans, and what `fp8rl plan` counts for them. Nothing ran.
        The experts of the mixture are 768 wide: over tensor 2 each device multiplies its part of them, over tensor 4 these end inside of the
        weights' blocks of 128, and kernels gather all experts at each product.
        Layers are scanned, so that compiling does not grow with them: an update of {most_layers} layers of the 8B model for 64 devices takes
        {compiling[most_layers] / compiling[fewest]:.2f} times the CPU seconds of one of {fewest} (`--layers`).
    """)
    heads = [
        *("program", "recipe", "shape", "mesh", "sent once, GB", "sent a step, MB"),
        "temporaries (planned), GB",
    ]
    return f"{about}\n\n{table(heads, rows)}"


PROCESSES = "processes.json"


def processes() -> str:
    """How far a run of several processes is from that of one."""
    cases = record(PROCESSES)["cases"]
    first = next(iter(cases.values()))
    counts, metrics = [*first["processes"]], [*first["processes"]["2"]["largest"]]
    about = prose(f"""
        The demo on 4 simulated devices: {len(first["reward"])} steps in one process, and on the same mesh in {" and ".join(counts)} that are joined by
        hand. The largest relative difference to one process over {first["rows"]} rows of metrics, and how many of the samples that
        are written down are the same text.
    """)
    rows = [
        [
            name,
            f"`{' '.join(flag for flag in case['flags'] if 'mesh' in flag or 'recipe' in flag)}`",
            count,
            *(f"{of['largest'][metric]:.1g}" for metric in metrics),
            f"{of['alike']} of {of['samples']}",
        ]
        for name, case in cases.items()
        for count, of in case["processes"].items()
    ]
    heads = ["run", "mesh and recipe", "processes", *(f"`{x}`" for x in metrics), "samples alike"]
    return f"{about}\n\n{table(heads, rows)}"


TPU = "tpu.json"


def for_tpus() -> str:
    """Which programs XLA compiles for TPUs, and the memory that it plans for them."""
    kept = record(TPU)
    found, (shape, layers) = kept["programs"], kept["shape"]
    programs = [*next(iter(found.values()))]

    def cell(of: dict[str, Any]) -> str:
        return (
            f"{of['temporary'] / 1e6:,.0f}"
            if "temporary" in of
            else f"not compiled: `{of['fault']}`"
        )

    rows = []
    for name, by_program in found.items():
        chip, _, recipe = name.partition("/")
        rows.append([chip, f"`{recipe}`", *(cell(by_program[program]) for program in programs)])
    about = prose(f"""
        Compiled by libtpu {kept["libtpu"]} on a machine without a TPU, for {kept["devices"]} chips that share a batch
        ({shape}'s width, {layers} layers): MB of memory beside arguments and results, which for the paged engine include the
        cache. Nothing ran: this says which programs there are, not whether they are right or fast.
    """)
    return f"{about}\n\n{table(['chip', 'recipe', *programs], rows)}"


LAUNCHES = "launches.json"


def launched() -> str:
    """Kernels that a layer launches, in compiled programs."""
    rows = []
    for each in record(LAUNCHES)["programs"]:
        kinds = each["by kind"]
        ours = kinds.get("mosaic_gpu_v2", 0)
        libraries = sum(n for kind, n in kinds.items() if kind.startswith("__"))
        rest = each["a layer"] - ours - libraries
        what = {"static rollout": "a decode step", "update": "an update"}[each["what"]]
        counts = each["a layer"], ours, libraries, rest, each["beside layers"]
        rows.append([what, f"`{each['recipe']}`", *(f"{n:g}" for n in counts)])
    about = prose("""
        Launches of one of Qwen3-8B's layers, counted in programs compiled for an H200: a decode step of the static engine, and an
        update of one micro-batch, in which a layer is computed again for its gradients. An instruction counts as one; a
        library's call may be several kernels. Nothing ran; the profile of a decode step under `fp8-rl` on a card has as many kernels
        of ours ([below](#on-one-h200-after-the-kernels-were-rewritten)). The aims are 14 a layer of a decode step and 80 of an update:
        neither is reached.
    """)
    heads = ["program", "recipe", "a layer", "ours", "libraries'", "XLA's", "beside layers"]
    return f"{about}\n\n{table(heads, rows)}"


PLANS = "plans.json"


def planned() -> str:
    """The best meshes for several models, and what a step takes at least."""
    found = record(PLANS)
    rows = []
    for each in found["plans"]:
        row = [each["shape"], f"{each['devices']}", f"`{each['recipe']}`"]
        if not each["fits"]:
            rows.append([*row, "none fits", *5 * ["-"]])
            continue
        seconds = each["seconds"]
        rollout = seconds["prefill"] + seconds["decode"]
        mesh = " x ".join(f"{axis} {size}" for axis, size in each["mesh"].items())
        times = (rollout, seconds["update"], sum(seconds.values()))
        row += [mesh, f"{each['bytes'] / 1e9:.1f}", *(f"{x:.3g}" for x in times)]
        rows.append([*row, f"{each['tokens']:,.0f}"])
    about = prose(f"""
        What `fp8rl plan` models of several {found["chip"].upper()}s: the mesh with the shortest step among all on which the run fits,
        memory, and the seconds that a step takes at least (of data sheets; nothing was compiled or measured, and real steps
        take longer), of prompts of 1,024 tokens with 8 completions of 2,048, 128 prompts a step or one a device. What is
        exchanged is held to the compiled programs above (`tests/training/test_roofline.py`).
    """)
    heads = ["model", "devices", "recipe", "mesh", "GB a device"]
    heads += ["rollout, s", "update, s", "step at least, s", "tokens/s at most"]
    return f"{about}\n\n{table(heads, rows)}\n\n{_published(found['plans'])}"


class Published(NamedTuple):
    """What others measured, as times as fast as bfloat16."""

    system: str
    phase: str
    """rollout, update or step"""
    gain: str
    recipe: str
    """what comes nearest here"""
    base: str = "bf16"
    """the recipe that it is compared with here"""
    model: tuple[str, int] = ("qwen3-8b", 8)
    """and of which model, on how many devices"""


PUBLISHED = (
    Published("FP8-RL (2601.18150), W8A8 linears, 8B", "rollout", "1.10 to 1.20", "fp8-rollout"),
    Published("FP8-RL, linears and KV cache, 8B", "rollout", "1.44", "fp8-rl"),
    Published("Jet-RL (2601.14243), one FP8 flow, 8B", "rollout", "1.07", "jet-rl"),
    Published("Jet-RL, 32B", "rollout", "1.33", "jet-rl", model=("qwen3-32b", 32)),
    Published("Jet-RL, 8B", "update", "1.41", "jet-rl"),
    Published("Jet-RL, 8B", "step", "1.16", "jet-rl"),
    Published("NeMo RL, end-to-end FP8", "step", "1.18 to 1.33 (15 to 25 % less)", "fp8-e2e"),
    Published("NeMo RL, with KV cache and attention", "rollout", "1.48", "fp8-e2e-kv"),
    Published("NeMo RL, the same beside FP8 linears", "rollout", "1.30", "fp8-e2e-kv", "fp8-e2e"),
)


def _published(plans: list[dict[str, Any]]) -> str:
    """What was published of speeds, what the model leaves room for, and what was measured."""

    def seconds(recipe: str, phase: str, model: tuple[str, int]) -> float:
        (found,) = (
            each.get("seconds_alike", each["seconds"])
            for each in plans
            if (each["shape"], each["devices"], each["recipe"]) == (*model, recipe)
        )
        parts = {"rollout": ("prefill", "decode"), "update": ("update",), "step": [*found]}[phase]
        return sum(found[name] for name in parts)

    rows = []
    for system, phase, gain, recipe, base, model in PUBLISHED:
        room = seconds(base, phase, model) / seconds(recipe, phase, model)
        here = f"`{recipe}` over `{base}`"
        rows.append([system, phase, gain, here, f"{room:.2f}", f"no card for a whole {phase}"])
    about = prose("""
        The speeds that were published of such systems, as times bfloat16, and how much the model above leaves room for: Qwen3-8B on 8
        devices, or Qwen3-32B on 32, both recipes on the mesh that is best for `bf16`. It is a bound: kernels that reach part of a rate, and
        all that is no product, bring it down; and it is of this batch: with fewer rows more of the time goes to weights, and FP8 linears
        gain more. What was measured is a step of the decode loop on one card, and products ([below](#on-one-h200-after-the-kernels-were-rewritten)).
    """)
    heads = ["system", "of", "published", "here", "at most, modelled", "measured"]
    return f"{about}\n\n{table(heads, rows)}"


def exact() -> str:
    """Exact mode: that it is, and what it costs."""
    steps = "; ".join(
        f"{name.split()[0]} under `{name.split()[1]}` {max(values)} in {len(values)} steps"
        for name, values in identity().items()
    )
    found = record("exact/invariant.json")
    tried = {"shapes": sum(found["shapes"].values()), "failed": len(found["failed"])}
    about = prose(f"""
        Exact mode is on by default for recipes whose two sides have the same formats, on one CPU device. Largest difference
        of a log-probability between trainer and rollout, one seed since it is an identity: {steps}. Its operations beside
        attention were drawn at random shapes, {tried["shapes"]} in all, and each run with other rows beside a row, in other
        places, layouts, loops and programs: {tried["failed"]} of them differed in a bit (`python -m experiments.invariant
        --seeds 20`; `experiments/results/exact/invariant.json`).
    """)
    cost = cost_of_exact()
    rows = [
        [
            name,
            f"`{recipe}`",
            *(interval_of(cost[name, recipe, part]) for part in ("seconds", "gen")),
        ]
        for name, recipe, part in cost
        if part == "gen"
    ]
    heads = ["workload", "recipe", "step", "rollout"]
    speed = prose("""
        Speed with exact mode over speed without, medians of rounds in turns (range). Above 1 exact mode is the faster one. It
        makes products of bfloat16 in float32; 8 rows are few for the one form of products that it has
        (`python -m experiments.benchmarks --peers none --benchmarks grpo_step --workloads exact --threads 2 --rounds 5`;
        `experiments/results/benchmarks/cpu_exact.json`). Published for others, on GPUs and other models: IsoExec's
        aligned execution takes 1.25 times the step, with a mean difference of 6.7e-07 where it was 1.65e-02 (SkyRL, on
        vLLM's blog, 2026-08-21); VeXact (arXiv 2605.14220) has equal bits, as a diagnostic.
    """)
    return f"{about}\n\n{speed}\n\n{table(heads, rows)}"


def interval_of(values: list[float]) -> str:
    """Median and range."""
    return f"{np.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def gradients() -> str:
    """Gradients by layout."""
    found = record("gradients/results.json")["distances"]

    def of(name: str) -> str:
        return f"{np.mean(found[name]):.1%} ({min(found[name]):.1%} to {max(found[name]):.1%})"

    about = prose(f"""
        Gradients under FP8 depend on what stands beside a row: weight gradients quantize groups of 128 tokens, which span
        rows. Relative distance of the linears' gradients, the demo's policy, bfloat16 compute, mean (range) of
        {len(found["quantization: jet-rl against bf16"])} batches. "Whole
        groups": prompts and completions padded to 128 tokens, so that no group spans two rows.
    """)
    rows = [["quantized, against the recipe `bf16`", of("quantization: jet-rl against bf16"), ""]]
    for name in (name.removeprefix("bf16: ") for name in found if name.startswith("bf16: ")):
        rows.append([name, of(f"jet-rl: {name}"), of(f"bf16: {name}")])
    return f"{about}\n\n{table(['gradients', '`jet-rl`', '`bf16`'], rows)}"


def compared() -> str:
    """`fp8rl compare` on SmolLM2, and beside vLLM."""
    about = prose("""
        Where rollout and trainer part (heat maps: `fp8rl report experiments/results/compare`): SmolLM2-135M-Instruct, 56
        tokens scored behind a prompt of 56, float32 compute on a CPU.
    """)
    rows = []
    for folder in ("bf16", "fp8-rollout", "jet-rl", "jet-rl-exact"):
        found = record(f"compare/{folder}/compare.json")
        first = found["first"]
        where = (
            "nothing: every bit is equal"
            if not first
            else f"{first[0]['cause']}, `{first[0]['name']}`"
        )
        rows.append([f"`{folder}`", where, f"{found['logprobs']['k3']:.1e}"])
    parts = [about, table(["recipe", "what differs first", "k3"], rows)]
    for dtype in ("float32", "bfloat16"):
        found = record(f"compare/vllm-{dtype}/compare.json")
        between, rollout, trainer = found["logprobs"], *(found["recorded"][side] for side in "ab")
        parts.append(
            prose(f"""
            Beside vLLM's own log-probabilities of {rollout["tokens"]} tokens that it sampled (vLLM 0.32 on a CPU, recipe
            `bf16`, {dtype}): our rollout is at a k3 of {rollout["k3"]:.1e} from them (largest difference
            {rollout["max_abs"]:.1e}), our trainer at {trainer["k3"]:.1e} ({trainer["max_abs"]:.1e}), and the two at
            {between["k3"]:.1e} from each other.
        """)
        )
    return "\n\n".join(parts)


def roundings() -> str:
    """What explicit roundings cost."""
    found = record("benchmarks/cpu_roundings.json")
    cost = " and ".join(
        f"{np.median(x):.2f} ({min(x):.2f} to {max(x):.2f}) under `{name}`"
        for name, x in found["ratio"].items()
    )
    return prose(f"""
        Explicit roundings in bfloat16: a step of the demo takes {cost} times as long as at the commit before them
        ({found["before"]}), medians and ranges of three runs in turns on two CPU cores.
    """)


ROLLOUT = "benchmarks/cpu_kernels.json"
WITHOUT_KERNELS = "benchmarks/cpu_rollout.json"
ON_AVX2 = "benchmarks/cpu_rollout_avx2.json"


def rollout(path: str) -> str:
    """Tokens per second of the rollout, beside other engines."""
    found, rows = record(path), []

    def named(entry, ratio) -> str:
        return f"GRPO, {STEP[ratio['part']]}: " if entry["benchmark"] == "grpo_step" else ""

    for entry in found["benchmarks"]:
        shape = entry["shape"]
        lengths = f"{shape['new_tokens']} tokens each"
        if "median" in shape:
            lengths = f"{shape['median']} tokens in the median, {shape['new_tokens']} at most"
        work = f"{shape['prompts'] * shape['samples']} completions, {lengths}"
        rows += [
            [
                named(entry, each) + work,
                f"`{side(each['under'])}`",
                f"`{side(each['over'])}`",
                speed(each),
            ]
            for each in entry["ratios"]
        ]
    model = found["benchmarks"][0]["workload"]
    about = prose(f"""
        Speed of the rollout: {model["name"]}, {model["compute_dtype"]} compute, {found["machine"]["threads"]} cores
        ({found["machine"]["processor"]}), at {found["commit"][:7]}, {found["rounds"]} rounds in which the sides take turns. Speed of a
        side over another's: median of the rounds (quartiles); above 1 it is the faster one. `bf16` is in exact mode where it
        is not called plain. {uneven(found)}{"" if found["complete"] else "The run was ended before its last benchmark."}
    """)
    return f"{about}\n\n{table(['work', 'side', 'over', 'speed'], rows)}"


FP8_TRAINING = "benchmarks/cpu_fp8_training.json"


def fp8_training() -> str:
    """What a step costs on a CPU under recipes that train in FP8, now and before."""
    found, old = record(FP8_TRAINING), record("benchmarks/cpu_fp8_training_before.json")

    def ratios(of: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
        return {
            (entry["workload"]["name"], each["under"], each["part"]): each
            for entry in of["benchmarks"]
            for each in entry["ratios"]
        }

    rows, now, before = [], ratios(found), ratios(old)
    for entry in found["benchmarks"]:
        shape, workload = entry["shape"], entry["workload"]
        tokens = shape["prompt_tokens"] * shape["prompts"] + (
            shape["new_tokens"] * shape["prompts"] * shape["samples"]
        )
        for under in dict.fromkeys(each["under"] for each in entry["ratios"]):
            key = workload["name"], under
            (over,) = {each["over"] for each in entry["ratios"]}
            rows.append(
                [
                    f"{workload['compute_dtype']}, {tokens} tokens",
                    f"`{side(under)}`",
                    f"`{side(over)}`",
                    *(speed(now[*key, part]) for part in ("gen", "train", "seconds")),
                    speed(before[*key, "train"]) if (*key, "train") in before else "",
                ]
            )
    about = prose(f"""
        A GRPO step on a CPU under recipes that train in FP8, random weights in SmolLM2-135M's shape,
        {found["machine"]["threads"]} cores, {found["rounds"]} rounds in which the sides take turns. Speed of a side over
        another's: median of the rounds (quartiles); above 1 it is the faster one. At {old["commit"][:7]} (the last column, on the
        same machine) XLA still converted the codes of all layers to float16 and back at each layer, because it has no
        instruction for 8-bit floats on a CPU; now loops stack their bit patterns, and quantization is done by kernels in C.
    """)
    heads = ["compute", "side", "over", "sampling", "training", "the step", "training, before"]
    return f"{about}\n\n{table(heads, rows)}"


def side(name: str) -> str:
    """A side's name: of ours, engine and recipe."""
    return name.removeprefix("fp8rl_jax/")


def speed(ratio: dict[str, Any]) -> str:
    """Median and quartiles of a benchmark's ratio."""
    return f"{ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f})"


def uneven(found: dict[str, Any]) -> str:
    """What was done about completions of different lengths; empty where there are none."""
    return " ".join(
        f"Completions of different lengths: log-normal, each ends at the same given length on every "
        f"side, and no side may sort by it; `{side(name)}` has batches of {batches['rows']} rows, the fastest "
        f"of {', '.join(batches['tried'])}."
        for entry in found["benchmarks"]
        for name, batches in entry["raw"].get("engines", {}).items()
        if batches["tried"]
    )


GPU = "benchmarks/gpu_h200"


def rewritten_kernels() -> str:
    """What was seen on a card while the kernels were rewritten."""
    found = record("benchmarks/h200_kernels.json")
    first = {kind: record(f"{GPU}/{kind}.json")["results"] for kind in ("matmul", "attention")}

    def before(kind: str, shape: str, side: str) -> float:
        """Microseconds of the first record; NaN where it has none."""
        result = first[kind].get(shape)
        return 1e6 * result["seconds"][side]["median"] if result else np.nan

    rows = []
    for name, now in found["times"].items():
        if attended := name.startswith("attention"):
            name = name.split()[1]
            times = before("attention", name, "fp8 cache"), now["fp8"]
            peer = before("attention", name, "cuDNN bf16")
        else:
            times, peer = (before("matmul", name, "fp8"), now["fp8"]), now["bf16"]
        rows.append(
            [
                f"{'attention' if attended else 'matmul'} {name}",
                *("" if np.isnan(x) else f"{x:.0f}" for x in (*times, peer)),
                # of two records no ratio is taken
                "" if attended else f"{peer / now['fp8']:.2f}x",
            ]
        )
    checks, steps = found["checks"][0], found["decode_step"]
    old, new = (np.median(steps[when]["fp8-rl"]["wall_us_step"]) for when in ("before", "after"))
    wrong = ", ".join(checks["wrong"]).removeprefix("real: ")
    about = prose(f"""
        The kernels were rewritten then, and ran on another H200: {checks["passed"]} of {checks["of"]} checks were right,
        `quantize swiglu` and `rms-norm` among them; wrong was {wrong}: Mosaic had swizzled memory that it was not asked to,
        and half of each bfloat16 head went to wrong places (mended since, and the check for compiled kernels now refuses such
        memory; not run on a card again). Microseconds, medians of 3 rounds in turns; bf16 is XLA's product in the same turns,
        and cuDNN's attention of the first record, so that its ratio is not given. A step of the decode loop (Qwen3-8B's shape,
        4 layers, 64 rows of 2,048 tokens, `fp8-rl`) took {old:.0f} us, and after {new:.0f}. What has changed since, and has
        not run on a card, says the record.
    """)
    heads = ["", "before", "after", "bf16", "bf16 / after"]
    return f"{about}\n\n{table(heads, rows)}"


def on_a_gpu() -> str:
    """Kernels on a card: right, and how fast."""
    parts = {path.stem: json.loads(path.read_text()) for path in (RESULTS / GPU).glob("*.json")}
    checks = parts["checks"]["results"]
    wrong = [name.split(": ")[-1] for name, found in checks.items() if not found["passed"]]
    goals = [
        [
            row["figure"],
            *(amount(row[key], row["unit"]) for key in ("must", "aim", "measured")),
            row["status"],
        ]
        for row in parts["figures"]["figures"]
        if row["measured"] is not None
    ]
    (steps,) = parts["decode"]["results"].items()
    (faster,) = (
        each
        for each in steps[1]["ratios"]
        if (each["under"], each["over"]) == ("FP8 weights and cache", "bf16")
    )
    about = prose(f"""
        One {parts["checks"]["device"]}, JAX on CUDA 13: {len(checks) - 1} small checks against float64, each three times,
        {len(checks) - 1 - len(wrong)} right with equal bits each time; wrong: {" and ".join(wrong) or "none"} (copies beyond a row, mended since and
        not run on a card again). Of several shapes the
        least counts. Device time, medians of {len(parts["copy"]["results"]["8 GiB"]["raw"]["rounds"])} rounds in turns; inputs
        are rotated past the cache. The command was ended by its time: what it left is not here. A step of the decode loop at
        Qwen3-8B's shape ({steps[0]} tokens before it) is {faster["median"]:.2f} times as fast with FP8 weights and cache as in bfloat16.
    """)
    products = [
        [
            name,
            *(
                rate(found, side)
                for side in (
                    "fp8",
                    "fp8, x quantized in it",
                    "XLA bf16",
                    "cuBLASLt fp8, per tensor",
                )
            ),
        ]
        for name, found in parts["matmul"]["results"].items()
        if "tflops" in found and found["shape"][0] >= 4096
    ]
    formats = [
        [
            *name.rsplit(" ", 1),
            *(
                rate(found, side)
                for side in ("as stored", "as stored, x quantized in it", "XLA bf16")
            ),
            f"{found['difference']:.4f}",
        ]
        for name, found in parts["formats"]["results"].items()
    ]
    stored = prose("""
        Formats that no kernel of this library multiplies, in TFLOP/s, and how far the product is from the one of what its
        operands stand for (parts of the largest; bfloat16 alone gives 0.003). A Hopper GPU has no product of scaled operands:
        they go through 16 bits on the way, and bfloat16 is faster. They are there for their bits; a Blackwell GPU, which
        multiplies MXFP8 as it is stored, was not at hand.
    """)
    return "\n\n".join(
        (
            about,
            table(["figure", "must", "aim", "measured", ""], goals),
            "Products of 4096 rows, m x n x k, in TFLOP/s:",
            table(
                [
                    "shape",
                    "fp8 blocks",
                    "with quantization of x",
                    "XLA bfloat16",
                    "cuBLASLt fp8, a scale a tensor",
                ],
                products,
            ),
            stored,
            table(
                [
                    "format",
                    "shape",
                    "as stored",
                    "with quantization of x",
                    "XLA bfloat16",
                    "difference",
                ],
                formats,
            ),
        )
    )


def amount(value: float, unit: str) -> str:
    """A GPU's figure: 1,015 TFLOP/s, 1.08x, 45%."""
    return f"{value:.2f}x" if unit == "x" else f"{value:,.0f}{'' if unit == '%' else ' '}{unit}"


def rate(found: dict[str, Any], side: str) -> str:
    """TFLOP/s of a side of a GPU's result."""
    return f"{found['tflops'][side]['median']:,.0f}" if side in found["tflops"] else "-"


def smollm2_addition() -> str:
    """SmolLM2 learns sums."""
    found = study("smollm2_addition")
    about = prose(f"""
        SmolLM2-135M-Instruct learns single-digit sums (`experiments/runs/smollm2_addition.toml`): {found.steps} steps of GRPO,
        {found.seeds} paired seeds, {found.problems} held-out problems with 4 samples each, temperature 1, on a CPU, in
        float32 compute where no other dtype stands. After so few steps accuracy says how fast an arm learns, not where it
        ends. The weights come from a 4-bit file, so errors of quantization measured with them are not those of a bf16
        checkpoint.
    """)
    return f"{about}\n\n{learned(found)}"


def smollm2_recipes() -> str:
    """SmolLM2 learns sums under more recipes."""
    found = study("smollm2_recipes")
    about = prose(f"""
        The same sums under more recipes, in bfloat16 compute where the name says so, with dithered masters and with the other
        cures of [arrival.md](arrival.md): {found.steps} steps, {found.seeds} paired seeds, {found.problems} held-out problems. `bf16` is
        in float32 compute, and was run anew. What `jet-rl` and `jet-rl-bfloat16-master` are ahead by they owe to weights that begin [on
        the border of two cells](arrival.md#on-the-border-of-two-cells): with masters dithered it is gone.
    """)
    return f"{about}\n\n{learned(found)}"


def smollm2_long() -> str:
    """SmolLM2 learns sums for longer, and the masters served in other ways."""
    found = study("smollm2_long")
    about = prose(f"""
        The same sums for {found.steps} steps, where arms end rather than how fast they go: {found.seeds} paired seeds,
        {found.problems} held-out problems, float32 compute where the name does not say bfloat16.
    """)
    runs = arrivals(LONG)
    gains = []
    for recipe in ("bf16", "fp8-rl", "jet-rl"):
        plain = f"{recipe}-bfloat16"
        gain, _ = paired(runs[plain], runs[f"{plain}-dithered"], 0.05)
        gains.append(f"`{recipe}` {estimate(gain, '+.3f')}")
    dithered = prose(f"""
        What dithered masters give in bfloat16 compute by then, paired (95 %): {", ".join(gains)}.
    """)
    masters = prose("""
        Their masters at the end, served in four ways, and what arrived, as [below](#what-arrives-of-an-update):
    """)
    parts = [about, learned(found), dithered, masters, served_in_four_ways(runs)]
    return "\n\n".join(parts)


ARRIVAL = "arrival/results.json"
MORE_ARRIVALS = "arrival/recipes.json"
LONG = "arrival/long.json"
LONG_COMMAND = (
    "python -m experiments.arrival --ablation experiments/ablations/smollm2_long.toml "
    f"--output experiments/results/{LONG} "
    "--record experiments/results/ablations/smollm2_long.json"
)
RECIPES_COMMAND = (
    "python -m experiments.arrival --ablation experiments/ablations/smollm2_recipes.toml "
    f"--output experiments/results/{MORE_ARRIVALS} "
    "--record experiments/results/ablations/smollm2_recipes.json"
)
SERVED_AS = ("masters", "bfloat16", "fp8", "bfloat16, then fp8")


def arrival() -> str:
    """How well each arm's masters do as other policies serve them, and what arrived."""
    about = prose(f"""
        What is served is a rounding of what is learned ([arrival.md](arrival.md)). The runs above, their float32 masters
        served in four ways, each computed in float32: as they are, rounded to bfloat16 and nothing else, in FP8 (linears and
        KV cache), and in FP8 from their bfloat16. `served` is the run's own last evaluation; what arrived, noise and changed
        are of its last sync, and `first` is what arrived at the first one. Mean accuracy (range over seeds). Arms that are not in
        the first table are of `experiments/results/{MORE_ARRIVALS}`; other recipes and float16 were not run.
    """)
    return f"{about}\n\n{served_in_four_ways(arrivals(ARRIVAL, MORE_ARRIVALS))}"


def served_in_four_ways(runs: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """A table of the arrival study's runs, by arm."""
    rows = []
    for arm, of_arm in runs.items():
        sync = [{key: x["values"][-1] for key, x in run["series"].items()} for run in of_arm]
        cells = [seeds([run["outcome"] for run in of_arm], ".3f")]
        cells += [seeds([run["served"][way] for run in of_arm], ".3f") for way in SERVED_AS]
        first = [run["series"]["sync/arrived"]["values"][0] for run in of_arm]
        cells += [f"{np.mean(first):.2g}"]
        cells += [f"{np.mean([x[f'sync/{key}'] for x in sync]):.2g}" for key in HEARD]
        rows.append([f"`{arm}`", str(len(of_arm)), *cells])
    return table(["trained as", "seeds", "served", *SERVED_AS, "first", *HEARD], rows)


ELSEWHERE = {
    "smollm2_largest": "the largest of three numbers",
    "smollm2_rate": "sums, at a third of the learning rate for 20 steps",
    "smollm2_sgd": "sums, by SGD",
    "smollm2_off_grid": "sums, from weights that lie on no 4-bit grid",
}
"""Ablations of the same question, and what they change."""


def elsewhere() -> str:
    """Whether rounding to nearest is deaf under other conditions, too."""
    known = {
        name: what
        for name, what in ELSEWHERE.items()
        if (RESULTS / "ablations" / f"{name}.json").exists()
    }
    about = prose(f"""
        The same question under other conditions, so that it might have come out otherwise: SmolLM2-135M-Instruct, recipe
        `bf16` in bfloat16 compute, masters dithered or where the checkpoint has them, {study("smollm2_largest").seeds} paired
        seeds each. Accuracy before and after (95 % interval over seeds), what arrived of the update at the last sync (range
        over seeds), and the difference, paired. Records: `experiments/results/ablations/`, one for each file of
        `experiments/ablations/` that is named here.
    """)
    rows = []
    for name, what in known.items():
        found = study(name)
        arms = {arm["name"]: arm["runs"] for arm in record(f"ablations/{name}.json")["arms"]}
        for arm, of_arm in found.arms.items():
            last = [run["series"]["sync/arrived"]["values"][-1] for run in arms[arm]]
            changes = [what, f"`{name}.toml`"] if not of_arm.comparison else ["", ""]
            cells = [estimate(x, ".3f") for x in (of_arm.before, of_arm.after)]
            rows.append([*changes, f"`{arm}`", *cells, seeds(last, ".2f"), against(of_arm)])
    heads = ["learns", "file", "masters", "before", "after", "arrived", "less `dithered`"]
    return f"{about}\n\n{table(heads, rows)}"


HEARD = ("arrived", "noise", "changed")


def arrivals(*paths: str) -> dict[str, list[dict[str, Any]]]:
    """Runs of records of the arrival study, by arm, in the order of their seeds; arms of two
    records are the first one's."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        runs: dict[str, list[dict[str, Any]]] = {}
        entries = record(path)["runs"].values() if (RESULTS / path).exists() else ()
        for run in sorted(entries, key=itemgetter("seed")):
            runs.setdefault(run["directory"].rpartition("-")[0], []).append(run)
        found = runs | found
    return found


def cures() -> str:
    """What arrives under each cure, by learning rate and steps."""
    found = record(CURES)
    draws, borders = found["draws"], found["borders"]
    first = {
        cure: movements["in one direction"]["1e-06"]["1"]["arrived"]
        for cure, movements in found["grids"]["e4m3 from bfloat16"].items()
    }
    about = prose(f"""
        Linears of SmolLM2-135M as a checkpoint has them, moved step by step as Adam moves them, and served after each step: by
        each grid, and by each way to round (`experiments/cures.py` has the definitions). Columns are learning rate x steps.
        What arrives of an update in one direction is sync/arrived; noise, and flicker, which is what changes between two syncs
        beside the update and over it, are after 20 steps at 1e-5. Means over {len(found["tensors"])} tensors, with one seed
        each. Of what lets the update arrive, dithered masters flicker least, and keep nothing. An error
        that is carried over keeps a float32 for each weight on both sides, is late, since a weight begins in the middle of its
        cell, and then overshoots, since all that began together flip together. Draws put {draws["bfloat16"]:.2%} of the
        weights into a float32 export where they are of bfloat16, {draws["e4m3"]:.1%} where of e4m3. Of float32 masters of
        a bfloat16 checkpoint, quantized as they are (`e4m3 from bfloat16`), the first sync serves {first["nearest"]:.0f}
        times the update at 1e-6, and {first["dithered"]:.1f} times where they are dithered: what begins [on the border of two
        cells](arrival.md#on-the-border-of-two-cells) crosses it at once, {borders["float32"]:.2%} of these weights with float32
        scales and {borders["power_of_two"]:.1%} with powers of two.
    """)
    if (RESULTS / COSTS).exists():
        about += " " + costs_of_syncs()
    rows = []
    for grid, of_cures in found["grids"].items():
        for cure, movements in of_cures.items():
            steps = movements["in one direction"]
            cells = [f"{steps[rate][after]['arrived']:.2f}" for rate, after in CURED_AT]
            middle = steps["1e-05"]["20"]
            rows.append(
                [grid, cure, *cells, *(f"{middle[key]:.1f}" for key in ("noise", "flicker"))]
            )
    heads = ["grid", "rounded", *(f"{rate} x {steps}" for rate, steps in CURED_AT)]
    return f"{about}\n\n{table([*heads, 'noise', 'flicker'], rows)}"


def costs_of_syncs() -> str:
    """What measuring, and stochastic rounding, cost a weight sync."""
    found = record(COSTS)
    of = {
        kind: [each[kind][1] for each in found["over plain"].values() if kind in each]
        for kind in ("measured", "stochastic")
    }
    measured, stochastic = (f"{min(each):.2f} to {max(each):.2f}" for each in of.values())
    return prose(f"""
        A weight sync that measures sync/* takes {measured} times one that does not, one that rounds stochastically {stochastic}
        times (medians of {found["arguments"]["rounds"]} rounds in turns on a CPU, SmolLM2-135M's shape, by recipe and compute
        dtype: `python -m experiments.sync_costs`, `experiments/results/{COSTS}`).
    """)


CURES, COSTS = "arrival/cures.json", "arrival/costs.json"
CURED_AT = tuple(product(("1e-06", "1e-05", "0.0001"), ("6", "20", "200")))
"""Learning rates and steps."""


def seeds(values: list[float], form: str) -> str:
    """Mean (least to largest); of one seed its value."""
    limits = [min(values), max(values)] if len(values) > 1 else [np.nan] * 2
    return interval([float(np.mean(values)), *limits], form)


def fake_quantization() -> str:
    """Our mismatch beside that of fake quantization in torch."""
    found = record(FAKE)
    tokens = found["completions"]["tokens"]
    about = prose(f"""
        Is the mismatch what the formats make of this model, or what our code does? {tokens} tokens that our rollout sampled
        (SmolLM2-135M-Instruct, `fp8-rollout`, float32 compute), scored by transformers with fake quantization that was
        written independently in torch, and by ours. k3 is between the unquantized and the quantized scoring of one program.
        Below: relative errors of each kind of linear, medians over tokens. No product by itself is further off than
        independent normal numbers make it; it is the inputs, off already, that pile up (`accumulated`).
    """)
    return f"{about}\n\n{summary(found)}"


FAKE = "fake_quantization.json"


def qerl() -> str:
    """QeRL's noise: what is learned with it, and what it does to a larger policy."""
    arms = {arm["name"]: arm["runs"] for arm in record("ablations/qerl.json")["arms"]}
    found = [run["series"]["mismatch/k3"]["values"] for run in arms["bf16-noise"]]
    first = len(found[0]) // 10
    table_of_runs = side_by_side(
        "qerl",
        f"""Adapters and norms beside a frozen base in four formats, with noise on the norms of what is served (5e-2 to 5e-4 in
        ten stages) and without. The demo with longer words, answers drawn at temperature 1. The dose is small: the norms' weights
        are about 1 here, and a sigma of 5e-2, the first and largest, makes a k3 of {np.mean([of[first : 2 * first] for of in found]):.1e}.""",
        REWARD | ENTROPY,
    )
    kept = record(EXPLORATION)
    about = prose(f"""
        The same sigma is another dose in another model, as z / w counts. SmolLM2-135M reads {kept["rows"][0]["tokens"]:,} tokens that it has
        sampled without noise ({kept["prompts"]} prompts), with each base and noise on its norms, {kept["draws"]} draws a sigma. Entropy of the
        distribution over the next token, less that of the same base without noise; of a base without noise, less that of the
        unquantized one (95 % over prompts). Command: `python -m experiments.exploration`. Record: `experiments/results/{EXPLORATION}`.
    """)
    rows = [
        [
            f"`{row['base']}`",
            f"{row['sigma']:g}",
            f"{row['entropy']:.3f}",
            interval([row["less"][x] for x in ("mean", "low", "high")], "+.3f"),
            f"{row['k3']:.1e}",
        ]
        for row in kept["rows"]
    ]
    heads = ["base", "sigma", "entropy, nats", "less without", "k3 against it"]
    return f"{table_of_runs}\n\n{about}\n\n{table(heads, rows)}"


EXPLORATION = "exploration.json"


@dataclass(frozen=True)
class Section:
    """A section of docs/results.md.

    Attributes:
        heading: as it stands there.
        text: makes it.
        command: what made its record.
        path: of the record.
        optional: the section is left out where there is no record.
    """

    heading: str
    text: Callable[[], str]
    command: str
    path: str
    optional: bool = False

    @property
    def there(self) -> bool:
        return not self.optional or (RESULTS / self.path).exists()


def ablation(heading: str, text: Callable[[], str], name: str, optional: bool = False) -> Section:
    """A section of an ablation."""
    command = f"fp8rl ablate experiments/ablations/{name}.toml"
    return Section(heading, text, command, f"ablations/{name}.json", optional)


REWARD = {"reward": ("reward/mean", ".3f")}
ENTROPY = {"entropy of the rollout, nats": ("rollout/entropy", ".3f")}
SIDE_BY_SIDE: tuple[tuple[str, str, str, dict[str, tuple[str, str]]], ...] = (
    (
        "INT4 with quantization-aware training",
        "int4_qat",
        """INT4 weights of 128 to a scale in the rollout alone, in the trainer alone and in both (`int4-qat`), against neither;
        no importance weights. The demo with longer words (`experiments/runs/mismatch.toml`), answers drawn at temperature 1.""",
        REWARD | ENTROPY,
    ),
    (
        "NVFP4 in reinforcement learning",
        "nvfp4_rl",
        """NVFP4 on both sides: the form for reinforcement learning (`nvfp4-rl`), that for pretraining (`nvfp4`), and what of
        the latter is taken over one at a time. The demo with longer words, answers drawn at temperature 1.""",
        REWARD | ENTROPY,
    ),
    (
        "Shuffle-R1",
        "shuffle_r1",
        """Of 16 samples drawn of each prompt: all of them, the half whose rewards differ most in pairs, and as many drawn from
        these pairs by advantage. Four updates a step.""",
        REWARD
        | {
            "rows of advantage 0": ("advantages/frac_zero", ".1%"),
            "gradient norm": ("optim/grad_norm", ".2f"),
        },
    ),
    (
        "Do updates arrive in a mixture of experts?",
        "moe_dither",
        """The demo with experts and replayed routes, from a model in bfloat16, in bfloat16 compute. Rounded to nearest the first
        updates hardly arrive and the last ones do: so many steps at 1e-5 take weights out of their cells.""",
        REWARD | {"arrived": ("sync/arrived", ".2f")},
    ),
    (
        "And from a checkpoint in FP8?",
        "smollm2_fp8_start",
        """SmolLM2-135M in block FP8 learns sums under `jet-rl` in float32 compute, where nothing but FP8 rounds. (An export of the
        same 4-bit file; a start on no 4-bit grid is in bfloat16 compute, [above](#does-it-arrive-elsewhere).)""",
        REWARD | {"arrived": ("sync/arrived", ".2f")},
    ),
)
"""Heading, ablation, what it is of, and the metrics beside accuracies and mismatch."""

SECTIONS = (
    ablation("The demo", demo, "demo"),
    ablation("SmolLM2 addition", smollm2_addition, "smollm2_addition", optional=True),
    Section(
        "SmolLM2 addition under more recipes",
        smollm2_recipes,
        RECIPES_COMMAND,
        "ablations/smollm2_recipes.json",
        optional=True,
    ),
    Section(
        "SmolLM2 addition for longer",
        smollm2_long,
        LONG_COMMAND,
        "ablations/smollm2_long.json",
        optional=True,
    ),
    Section(
        "What arrives of an update",
        arrival,
        "python -m experiments.arrival",
        ARRIVAL,
        optional=True,
    ),
    Section(
        "Does it arrive elsewhere?",
        elsewhere,
        "fp8rl ablate FILE, each in its file",
        "ablations/smollm2_largest.json",
        optional=True,
    ),
    Section("Ways to let it arrive", cures, "python -m experiments.cures", CURES),
    ablation("Mismatch of every recipe", recipes, "recipes"),
    Section("What the mismatch is made of", depth, DEPTH_COMMAND, "depth/results.json"),
    Section(
        "What sums of tensor cores lose",
        tensor_core_sums,
        "python -m pallas_kernels.check.tensor_cores --output experiments/results/exact/tensor_cores.json",
        "exact/tensor_cores.json",
    ),
    Section(
        "Beside fake quantization in torch", fake_quantization, "make peers", FAKE, optional=True
    ),
    Section(
        "What devices send each other",
        on_meshes,
        "python -m experiments.collectives",
        COLLECTIVES,
        optional=True,
    ),
    Section(
        "One process and several",
        processes,
        "python -m experiments.processes",
        PROCESSES,
        optional=True,
    ),
    Section("Programs for TPUs", for_tpus, "make compile-tpu", TPU, optional=True),
    Section(
        "Launches of a layer", launched, "python -m experiments.launches", LAUNCHES, optional=True
    ),
    Section(
        "Meshes before the devices", planned, "python -m experiments.plans", PLANS, optional=True
    ),
    Section("Exact mode", exact, "python -m experiments.identity", "exact/identity.json"),
    ablation("Corrections", correction, "correction"),
    ablation("Corrections at a high dose", high_dose, "high_dose", optional=True),
    Section(
        "Truncated sampling",
        sampling_replay,
        "python -m experiments.sampling_replay --output FILE",
        REPLAY,
    ),
    *(
        ablation(heading, partial(side_by_side, name, about, counted), name, optional=True)
        for heading, name, about, counted in SIDE_BY_SIDE
    ),
    ablation("Stability of reinforcement learning", stability_in_rl, "stability", optional=True),
    ablation("Pretraining", pretraining, "pretraining", optional=True),
    ablation(
        "InfiR2's second stage",
        partial(
            losses,
            "infir2_sft",
            """Supervised training on words spelled backward of what the study above has made of each arm and seed, in the
            formats that it was made in; loss of a token of a held-out answer.""",
        ),
        "infir2_sft",
        optional=True,
    ),
    ablation("QeRL", qerl, "qerl"),
    ablation("Compute dtypes", compute_dtype, "compute_dtype"),
    ablation("Partial rollouts", partial_rollouts, "partial_rollouts"),
    ablation("KV calibration", kv_calibration, "kv_calibration"),
    ablation("vLLM as the rollout engine", through_vllm, "vllm"),
    ablation("SmolLM2 addition through vLLM", sums_through_vllm, "vllm_addition", optional=True),
    Section(
        "Rollout engines in turns",
        engines,
        "python -m experiments.engines ..., in the record",
        ENGINES,
        optional=True,
    ),
    Section("Gradients", gradients, "python -m experiments.gradients", "gradients/results.json"),
    Section(
        "Cost of explicit roundings",
        roundings,
        "fp8rl train ..., in the record",
        "benchmarks/cpu_roundings.json",
    ),
    *(
        Section(
            f"Speed of the rollout{when}",
            partial(rollout, path),
            "python -m experiments.benchmarks --benchmarks generation grpo_step uneven_generation ..., in the record",
            path,
            optional=True,
        )
        for when, path in (
            ("", ROLLOUT),
            (" before the CPU kernels", WITHOUT_KERNELS),
            (" before the CPU kernels, with AVX2", ON_AVX2),
        )
    ),
    Section(
        "FP8 training on a CPU",
        fp8_training,
        "python -m experiments.benchmarks --benchmarks grpo_step --workloads ..., in the record",
        FP8_TRAINING,
    ),
    Section(
        "On one H200",
        on_a_gpu,
        "python -m experiments.benchmarks.gpu --output FOLDER",
        f"{GPU}/*.json",
    ),
    Section(
        "On one H200, after the kernels were rewritten",
        rewritten_kernels,
        "python -m experiments.benchmarks.gpu --output FOLDER --parts checks matmul attention decode",
        "benchmarks/h200_kernels.json",
    ),
    Section(
        "Layer by layer, and another engine",
        compared,
        "fp8rl compare ..., in each record",
        "compare/*/compare.json",
    ),
)


@dataclass(frozen=True)
class Claim:
    """A question's row; `found` gives the figure, and over what it was found."""

    asked: str
    found: Callable[[], tuple[str, str]]
    heading: str = ""
    """Of the section that has the record; empty: docs/training.md has it."""
    command: str = ""
    """Where another than the section's made it."""
    path: str = ""
    """Of the record, without a section."""
    is_main: bool = False
    """README.md has it, too."""


def costs(name: str, arm: str = "fp8-rl", baseline: str = "bf16") -> tuple[str, str]:
    """Accuracy of an arm less that of the baseline."""
    found = study(name)
    return (
        f"`{arm}` less `{baseline}`: {against(found.arms[arm])}",
        f"{found.seeds} seeds x {found.problems} problems",
    )


def gained(name: str, arms: Sequence[str]) -> tuple[str, str]:
    """Accuracy of arms before training and after it."""
    found = study(name)
    texts = [
        f"`{arm}` from {estimate(found.arms[arm].before, '.3f')} to {estimate(found.arms[arm].after, '.3f')}"
        for arm in arms
    ]
    return (
        f"accuracy in {found.steps} steps: {', '.join(texts)}",
        f"{found.seeds} seeds x {found.problems} problems",
    )


def paired(
    before: list[dict[str, Any]], after: list[dict[str, Any]], alpha: float
) -> tuple[Interval, int]:
    """Outcomes of an arm's runs less those of another's, over seeds and problems, at level 1 -
    alpha; and the number of problems."""
    runs = {"before": before, "after": after}
    correct = {
        name: np.array([run["by_problem"]["correct"] for run in of], float)
        / of[0]["by_problem"]["samples"]
        for name, of in runs.items()
    }
    outcomes = {name: [run["outcome"] for run in of] for name, of in runs.items()}
    (found,) = compare_arms(outcomes, "before", alpha, by_problem=correct, span=1.0).values()
    return found.difference, correct["before"].shape[1]


def heard(
    plain: str, sync: int, unit: str, paths: tuple[str, ...] = (ARRIVAL, MORE_ARRIVALS)
) -> tuple[str, str]:
    """What arrives with dithered masters and without, and the difference in accuracy.

    Args:
        plain: an arm of the arrival study, one of which is called so and dithered.
        sync: which.
        unit: what stands behind the first number.
        paths: records of the study.
    """
    names, runs = (plain, f"{plain}-dithered"), arrivals(*paths)
    x, problems = paired(*(runs[name] for name in names), 0.05)
    without, with_draws = (
        np.mean([run["series"]["sync/arrived"]["values"][sync] for run in runs[name]])
        for name in names
    )
    return (
        f"{without:.2g} {unit}, and with dithered masters (the default) {with_draws:.2f}; accuracy "
        f"with less without: {x.mean:+.3f} ({x.low:+.3f} to {x.high:+.3f})",
        f"{x.n} seeds x {problems} problems",
    )


def from_fp8() -> tuple[str, str]:
    """What arrives and what is learned from a checkpoint in FP8, rounded to nearest and dithered."""
    runs = {arm["name"]: arm["runs"] for arm in record("ablations/smollm2_fp8_start.json")["arms"]}
    arrived = {name: over_steps(of, "sync/arrived", ".2f") for name, of in runs.items()}
    found, over = costs("smollm2_fp8_start", "nearest", "dithered")
    return (
        f"{arrived['nearest']} of it, and with dithered masters (the default) {arrived['dithered']}; "
        f"accuracy, {found}",
        over,
    )


def mismatches() -> tuple[str, str]:
    """k3 of three recipes."""
    found = study("recipes")
    k3 = ", ".join(
        f"`{name}` {interval(found.arms[name].k3, '.1e')}" for name in ("fp8-rl", "jet-rl", "bf16")
    )
    return f"k3: {k3}", f"{found.seeds} seeds (range)"


def growth() -> tuple[str, str]:
    """k3 of the shallowest and of the deepest model."""
    first, last = deep()[0], deep()[-1]

    def of(name: str) -> str:
        shallow, whole = (p["k3"][name]["total"] for p in (first, last))
        grown = f"{np.mean(shallow):.1e} to {interval(depth_mean(whole), '.1e')}"
        return f"`{name}` {grown}, in the median {np.median(shallow):.1e} to {np.median(whole):.1e}"

    found = f"k3 from {first['depth']} to {last['depth']} layers: {of('fp8-rl')}; {of('bf16')}"
    return found, f"{len(last['k3']['bf16']['total'])} sets of prompts (bootstrap)"


def zero() -> tuple[str, str]:
    """Exact mode."""
    runs = identity()
    steps = [len(values) for values in runs.values()]
    lowest = min(np.median(x) for (_, _, part), x in cost_of_exact().items() if part == "seconds")
    found = (
        f"exact mode: largest difference of a log-probability {max(map(max, runs.values()))}, for "
        f"{1 / lowest:.2f} times the step's time at most in the median"
    )
    return found, f"{len(runs)} runs of {min(steps)} to {max(steps)} steps (an identity)"


def corrected(name: str, corrections: Sequence[str]) -> tuple[str, str]:
    """Accuracy without a correction and with some, less that of `bf16`."""
    found = study(name)
    text = "; ".join(f"`{arm}` {against(found.arms[arm])}" for arm in ("none", *corrections))
    dose = f"k3 {found.arms['none'].k3[0]:.2g}; accuracy less `bf16`'s: {text}"
    return dose, f"{found.seeds} seeds x {found.problems} problems"


def replayed() -> tuple[str, str]:
    """Ratios outside of a band under top-p, over the vocabulary and replayed."""
    rows = {(row["recipe"], row["truncation"]): row for row in record(REPLAY)["rows"]}
    recipes, truncation = ("bf16", "fp8-rl"), "top_p = 0.8"
    texts = []
    for recipe in recipes:
        row, plain = rows[recipe, truncation], rows[recipe, "none"]
        before, after, without = (
            of["outside"] for of in (row["vocabulary"], row["support"], plain["vocabulary"])
        )
        texts.append(f"`{recipe}` {before:.0%} to {after:.0%} ({without:.0%} without truncation)")
    tokens = " and ".join(f"{rows[recipe, truncation]['tokens']:,}" for recipe in recipes)
    return (
        f"ratios outside 0.9 to 1.1, {truncation}: {'; '.join(texts)}",
        f"{tokens} tokens, one rollout each",
    )


def trained_on_what_is_served() -> tuple[str, str]:
    """INT4 weights on one side and on both."""
    found = study("int4_qat")
    k3 = ", ".join(
        f"`{name}` {found.arms[name].k3[0]:.1e}" for name in ("rollout", "trainer", "both")
    )
    text = f"k3 {k3}; accuracy of `both` less that of `none`: {against(found.arms['both'])}"
    return text, f"{found.seeds} seeds x {found.problems} problems"


def each_less(name: str, arms: Sequence[str], metric: str = "accuracy") -> tuple[str, str]:
    """The primary metric of some arms less that of the baseline."""
    kept = record(f"ablations/{name}.json")
    compared = {row["arm"]: row for row in kept["comparisons"]}
    text = "; ".join(f"`{arm}` {difference_of(compared[arm])}" for arm in arms)
    over, problems = f"{len(kept['seeds'])} seeds", compared[arms[0]]["problems"]
    over += f" x {problems} problems" if problems else ""
    return f"{metric} less `{kept['baseline']}`'s: {text}", over


def explored() -> tuple[str, str]:
    """Entropy of the rollout and accuracy with QeRL's noise, less those without, on each base; and
    what noise does to a larger policy."""
    runs = {arm["name"]: arm["runs"] for arm in record("ablations/qerl.json")["arms"]}
    bases = [name for name in runs if f"{name}-noise" in runs]
    alpha, texts, problems = (
        0.05 / len(bases),
        [],
        0,
    )  # each base is a question; they share one error
    for base in bases:
        pair = runs[base], runs[f"{base}-noise"]
        x, problems = paired(*pair, alpha)
        entropies = " to ".join(over_steps(of, "rollout/entropy", ".2f") for of in pair)
        texts.append(f"`{base}` {entropies} nats, {x.mean:+.3f} ({x.low:+.3f} to {x.high:+.3f})")
    added = {
        (row["base"], row["sigma"]): f"{row['less']['mean']:+.2f}"
        for row in record(EXPLORATION)["rows"]
    }
    return (
        "the demo: entropy of the rollout without and with, and accuracy with less without "
        f"({100 * (1 - alpha):.4g} %): {'; '.join(texts)}. SmolLM2-135M: a sigma of 0.01 adds "
        f"{added['bf16', 0.01]} nats unquantized, NVFP4 alone {added['nvfp4', 0.0]}, INT4 {added['int4', 0.0]}",
        f"{len(runs[bases[0]])} seeds x {problems} problems",
    )


def apart() -> tuple[str, str]:
    """Gradients under FP8."""
    found = record("gradients/results.json")["distances"]["quantization: jet-rl against bf16"]
    return (
        f"`jet-rl` against `bf16`: a relative distance of {np.mean(found):.1%} "
        f"({min(found):.1%} to {max(found):.1%})",
        f"{len(found)} batches (range)",
    )


def agreed() -> tuple[str, str]:
    """Log-probabilities of another engine."""
    rollout = record("compare/vllm-float32/compare.json")["recorded"]["a"]
    return (
        f"k3 {rollout['k3']:.1e}, largest difference {rollout['max_abs']:.1e} (float32)",
        f"{rollout['tokens']} tokens",
    )


def beside(path: str = ROLLOUT) -> tuple[str, str]:
    """Our fastest engine's speed over vLLM's, by work."""
    found, fastest = record(path), []
    for entry in found["benchmarks"]:
        if ratios := [ratio for ratio in entry["ratios"] if ratio["over"] == "vllm"]:
            fastest.append((entry, max(ratios, key=itemgetter("median"))))
    text = "; ".join(
        f"`{side(ratio['under'])}` {speed(ratio)} "
        + ("at different lengths" if "median" in entry["shape"] else "at equal lengths")
        for entry, ratio in fastest
    )
    return f"times vLLM's tokens per second: {text}", f"{found['rounds']} rounds (quartiles)"


def stepped() -> tuple[str, str]:
    """Our speed over tunix's, of a GRPO step and of its parts, and the memory of each."""
    found = record(ROLLOUT)
    (step,) = (entry for entry in found["benchmarks"] if entry["benchmark"] == "grpo_step")
    peaks = {side: peak["median"] / 2**30 for side, peak in step["peak_bytes"].items()}
    tunix, ours = peaks.pop("tunix"), *peaks.values()
    text = "; ".join(
        f"{STEP[ratio['part']]} {speed(ratio)}"
        for ratio in step["ratios"]
        if ratio["over"] == "tunix"
    )
    return (
        f"times tunix's speed, in exact mode, the default: {text}; peak memory of the process "
        f"{ours:.1f} GiB, tunix's {tunix:.1f}",
        f"{found['rounds']} rounds (quartiles)",
    )


STEP = {"seconds": "the step", "gen": "sampling", "train": "the rest"}


def of_training(section: str, at: int, arms: Sequence[str]) -> tuple[str, str]:
    """Differences of some rows of a table of docs/training.md.

    Args:
        section, at: the table, by its place among those of its section.
        arms: first cells of the rows; the last but what could be seen is in the fourth.
    """
    found = training_page.sections(RESULTS)[section][at]
    rows = {row[0]: row[3].rpartition("; ")[0] for row in found.rows}
    told = "; ".join(f"{arm} {rows[arm]}" for arm in arms)
    (count,) = re.findall(r"(\d+) paired seeds", found.about)
    return f"loss less that without: {told}", f"{count} seeds"


def without_scales() -> tuple[str, str]:
    """Shares of diverged runs at the highest learning rate, of floats of few bits as they are."""
    (found,) = training_page.sections(RESULTS)["sharpness"]
    told = "; ".join(f"{row[0]} {row[-1].partition(';')[0]}" for row in found.rows)
    count = len({entry["seed"] for entry in record("stability/runs.json")["entries"]})
    return f"runs that diverged at the highest rate: {told}", f"{count} seeds"


def spiked_in_rl() -> tuple[str, str]:
    """Runs with a spike, of each recipe at all learning rates."""
    kept = record("ablations/stability.json")
    runs: dict[str, list[dict[str, Any]]] = {}
    for arm in kept["arms"]:
        runs.setdefault(arm["recipe"], []).extend(arm["runs"])

    def share(of: list[dict[str, Any]]) -> str:
        names = ("stability/grad_norm_spikes", "stability/loss_spikes")
        spiked = sum(any(run["series"][name]["values"][-1] > 0 for name in names) for run in of)
        return training_page.of_runs(spiked, len(of))

    told = ", ".join(f"`{recipe}` {share(of)}" for recipe, of in runs.items())
    return (
        f"runs with a spike of loss or gradient norm: {told}",
        f"{len(kept['seeds'])} seeds at each of {len(kept['arms']) // len(runs)} learning rates",
    )


CLAIMS = (
    Claim(
        "What does the demo learn?",
        lambda: gained("demo", ("bf16", "fp8-rl")),
        "The demo",
        is_main=True,
    ),
    Claim(
        "Does FP8 rollout cost accuracy on the demo?",
        lambda: costs("demo"),
        "The demo",
        is_main=True,
    ),
    Claim(
        "And where SmolLM2-135M learns sums, a few steps in? (From a 4-bit file.)",
        lambda: costs("smollm2_addition"),
        "SmolLM2 addition",
        is_main=True,
    ),
    Claim(
        "And where it ends, after 20 steps?",
        lambda: costs("smollm2_long"),
        "SmolLM2 addition for longer",
        is_main=True,
    ),
    Claim(
        "How much of its first 6 updates does the same model hear in bfloat16 compute, the default dtype?",
        partial(heard, "bf16-bfloat16", -1, "of it"),
        "What arrives of an update",
        is_main=True,
    ),
    Claim(
        "And of 20?",
        partial(heard, "bf16-bfloat16", -1, "of it", (LONG,)),
        "SmolLM2 addition for longer",
        is_main=True,
    ),
    Claim(
        "And of the first one, where FP8 weights are made of float32 masters (`jet-rl`, float32 compute)?",
        partial(heard, "jet-rl", 0, "times the update"),
        "What arrives of an update",
        RECIPES_COMMAND,
    ),
    Claim(
        "And how much of it from a checkpoint in block FP8, rounded to nearest (`jet-rl`, float32 compute)?",
        from_fp8,
        "And from a checkpoint in FP8?",
    ),
    Claim(
        "How far is the trainer from the rollout, bfloat16 compute?",
        mismatches,
        "Mismatch of every recipe",
        is_main=True,
    ),
    Claim(
        "Does that grow with depth? SmolLM2-135M, forward passes",
        growth,
        "What the mismatch is made of",
        is_main=True,
    ),
    Claim("Can it be made zero?", zero, "Exact mode", is_main=True),
    Claim(
        "Does a correction help where the rollout is off as FP8's is on SmolLM2?",
        partial(corrected, "correction", ("token_tis",)),
        "Corrections",
        is_main=True,
    ),
    Claim(
        "And where it is so far off that learning is lost?",
        partial(corrected, "high_dose", ("token_tis", "kpop", "mipu")),
        "Corrections at a high dose",
        is_main=True,
    ),
    Claim(
        "Does replaying what top-p left of each token mend the ratios? SmolLM2-135M",
        replayed,
        "Truncated sampling",
    ),
    Claim(
        "INT4 weights in the rollout, in the trainer, or in both: what is left of the mismatch?",
        trained_on_what_is_served,
        "INT4 with quantization-aware training",
    ),
    Claim(
        "What do NVFP4 on both sides, and the parts of its form for pretraining, cost in RL?",
        partial(
            each_less, "nvfp4_rl", ("nvfp4-rl", "nvfp4", "gradients", "transform", "stochastic")
        ),
        "NVFP4 in reinforcement learning",
    ),
    Claim(
        "Does QeRL's noise on a frozen base explore more, and learn more?",
        explored,
        "QeRL",
    ),
    Claim(
        "Do Shuffle-R1's pairs learn more from as many samples drawn?",
        partial(each_less, "shuffle_r1", ("pairs", "shuffled_pairs")),
        "Shuffle-R1",
    ),
    Claim(
        "What do formats cost a model that is trained from scratch on text? Nats a byte",
        partial(
            each_less, "pretraining", ("nvfp4", "nvfp4-plain", "mxfp4", "mxfp8", "infir2"), "loss"
        ),
        "Pretraining",
    ),
    Claim(
        "And FP8 in pretraining and in supervised training behind it (InfiR2)?",
        partial(each_less, "infir2_sft", ("infir2", "infir2-float32_scales"), "loss"),
        "InfiR2's second stage",
    ),
    Claim(
        "Which state of training breaks in few bits (FP8-LM)? Nats a token",
        partial(
            of_training,
            "fp8-lm",
            0,
            ("fp8-lm-o2", "master e4m3", "master e4m3, drawn", "second moment e4m3"),
        ),
        command="python -m experiments.fp8_lm",
        path="fp8_lm.json",
    ),
    Claim(
        "What do FP4's estimator and clamping give? Nats a token",
        partial(of_training, "fp4", 1, ("straight through", "estimator", "clamping", "both")),
        command="python -m experiments.fp4 --parts learning",
        path="fp4/learning.json",
    ),
    Claim(
        "How few bits does training bear without scales (To FP8 and Back Again)?",
        without_scales,
        command="python -m experiments.stability",
        path="stability/runs.json",
    ),
    Claim(
        "Does FP8 make reinforcement learning spike?",
        spiked_in_rl,
        "Stability of reinforcement learning",
    ),
    Claim("How far does FP8 move the gradients?", apart, "Gradients"),
    Claim(
        "How fast is the rollout on a CPU, beside vLLM's?",
        beside,
        "Speed of the rollout",
        is_main=True,
    ),
    Claim(
        "And before the CPU kernels, on another machine, with AVX-512?",
        partial(beside, WITHOUT_KERNELS),
        "Speed of the rollout before the CPU kernels",
        is_main=True,
    ),
    Claim("And a GRPO step, beside tunix's?", stepped, "Speed of the rollout", is_main=True),
    Claim(
        "Does our rollout agree with vLLM's log-probabilities?",
        agreed,
        "Layer by layer, and another engine",
        is_main=True,
    ),
    Claim(
        "Does GRPO learn the demo through vLLM as through our sampler?",
        served,
        "vLLM as the rollout engine",
    ),
)


def rows_of(claims: Sequence[Claim], linked: bool = False) -> str:
    """A table of questions and what was found; `linked` to the sections of docs/results.md."""
    rows, sections = [], {section.heading: section for section in SECTIONS}
    for claim in claims:
        section = sections.get(claim.heading) or Section("", str, "", claim.path, optional=True)
        if section.there:
            found, over = claim.found()
            command, cut, _ = (claim.command or section.command).partition(" ..., ")
            place = f"#{anchor(claim.heading)}" if claim.heading else "training.md"
            asked = f"[{claim.asked}]({place})" if linked else claim.asked
            more = ", with the record's arguments" if cut else ""
            rows.append([asked, found, over, f"`{command}`{more}"])
    return table(["asked", "found (95 % interval)", "over", "command"], rows) + "\n"


def anchor(heading: str) -> str:
    """A heading as the end of a link to it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def readme() -> str:
    """README.md's table."""
    return rows_of([claim for claim in CLAIMS if claim.is_main])


def results() -> str:
    """docs/results.md."""
    parts = [
        prose("""
            Made by `python -m experiments.figures` from the committed records; every record holds the commit, versions and
            machine that made it. Those of ablations, comparisons, exact runs, entropies, sampling replay, depth, gradients and fake
            quantization have a fingerprint of the code's behaviour as well, those of number formats one of each row's quantizers, and tests fail
            where that has changed; the others have their commit alone. All of it ran on two CPU cores of a cloud machine, but what [one H200](#on-one-h200) did.
        """),
        prose("""
            k3 is the mismatch between rollout and trainer, the mean over tokens of rho - 1 - log rho, where rho is the
            trainer's probability of a sampled token over the rollout's. Accuracies have 95 % intervals over seeds. Differences
            are over seeds and held-out problems, at 95 % where no other level stands, with the verdict of `fp8rl ablate`:
            [statistics.md](statistics.md) has what it claims. [glossary.md](glossary.md) explains the words.
            FP8-LM's, FP4's and the sharpness study's tables are in [training.md](training.md).
        """),
        f"## In short\n\n{rows_of(CLAIMS, linked=True)}".rstrip(),
    ]
    for section in SECTIONS:
        if section.there:
            source = f"Command: `{section.command}`. Record: `experiments/results/{section.path}`."
            parts.append(f"## {section.heading}\n\n{section.text()}\n\n{source}")
    return "\n\n".join(["# Results", *parts]) + "\n"


def filled(page: str, text: str, name: str = "") -> str:
    """`page` with `text` between its marks, those of a name where it has several."""
    start = START.replace("figures", f"figures: {name}") if name else START
    assert start in page, f"docs: no mark {start.strip()}"
    before, rest = page.split(start, 1)
    return before + start + text + END + rest.split(END, 1)[1]


def training(page: str) -> str:
    """docs/training.md with the tables of each of its sections that has a record."""
    for name, text in training_page.sections(RESULTS).items():
        tables = "\n".join(
            f"{prose(each.about)}\n\n{table(each.heads, each.rows)}\n" for each in text
        )
        page = filled(page, f"\n{tables}\n", name)
    return page


def formats() -> str:
    """The tables of docs/formats.md."""
    parts = [
        f"## {each.heading}\n\n{prose(each.about)}\n\n{table(each.heads, each.rows)}\n"
        for each in tables(Records(RESULTS / "formats"))
    ]
    return "\n" + "\n".join(parts)


def main() -> int:
    """Write all."""
    docs = ROOT / "docs"
    for page, text in ((ROOT / "README.md", readme()), (docs / "formats.md", formats())):
        page.write_text(filled(page.read_text(), text))
    page = docs / "training.md"
    page.write_text(training(page.read_text()))
    (docs / "results.md").write_text(results())
    draw(Records(), docs / "formats.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
