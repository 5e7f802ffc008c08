"""Every measured figure of README.md and docs/results.md, made from the committed records: `python
-m experiments.figures`.

docs/results.md has every record in full and is written whole. README.md has one table between `<!--
figures -->` and `<!-- end of figures -->`, a row for each question. A test makes both again and
compares, and finds no measured figure in the rest of README.md. So a figure cannot drift from its
record.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.depth import mean as depth_mean

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
START, END = "<!-- figures -->\n", "<!-- end of figures -->"


def record(path: str) -> Any:
    """A JSON record under experiments/results."""
    return json.loads((RESULTS / path).read_text())


def seeds(study: str) -> dict[str, dict[str, Any]]:
    """Summary of a study of experiments/seeds, by arm."""
    return record(f"seeds/{study}.json")["summary"]


def steps(study: str) -> int:
    """Training steps of each run of a study."""
    (number,) = {
        len(run["steps"]["k3"])
        for runs in record(f"seeds/{study}.json")["runs"].values()
        for run in runs.values()
    }
    return number


def interval(x: list[float], form: str) -> str:
    """Mean (low to high); of one seed the mean alone."""
    return f"{x[0]:{form}}" if np.isnan(x[1]) else f"{x[0]:{form}} ({x[1]:{form}} to {x[2]:{form}})"


def against(row: dict[str, Any], of: str = "") -> str:
    """Difference to the baseline, and what the seeds could have seen; of: "judged, " for the
    judge's accuracy."""
    if row[f"{of}difference"] is None:
        return "baseline"
    return f"{interval(row[f'{of}difference'], '+.3f')}; sees {row[f'{of}detectable']:.3f}"


def prose(text: str) -> str:
    """A paragraph of one line."""
    return " ".join(text.split())


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def demo() -> str:
    """The demo's table."""
    summary = seeds("demo")
    first = next(iter(summary.values()))
    about = prose(f"""
        The demo: a byte-level policy of 1.3 million parameters spells words backward. Its warm start is supervised, with 55 %
        of the demonstrations cut one letter short; {steps("demo")} steps of GRPO then teach that away. {first["seeds"]} paired
        seeds, {first["problems"]} held-out words, greedy, float32 compute on a CPU; 95 % intervals over seeds, and of k3 its
        range over seeds.
    """)
    rows = [
        [
            f"`{arm}`",
            interval(row["before"], ".3f"),
            interval(row["after"], ".3f"),
            against(row),
            interval(row["k3"], ".1e"),
        ]
        for arm, row in summary.items()
    ]
    heads = [
        "recipe",
        "accuracy before",
        "after",
        "difference to `bf16`",
        "mismatch k3, mean over steps",
    ]
    return f"{about}\n\n{table(heads, rows)}"


def recipes() -> str:
    """Mismatch of every recipe."""
    summary = seeds("recipes")
    first = next(iter(summary.values()))
    about = prose(f"""
        Mismatch of every recipe: bfloat16 compute, the demo's policy kept unsure of itself
        (`experiments/runs/mismatch.toml`), {steps("recipes")} steps, {first["seeds"]} paired seeds, {first["problems"]} held-out
        words.
    """)
    rows = [
        [
            f"`{arm}`",
            interval(row["k3"], ".1e"),
            f"{row['k3, median step']:.1e}",
            f"{row['largest']:.1e}",
            against(row),
        ]
        for arm, row in sorted(summary.items(), key=lambda item: -item[1]["k3"][0])
    ]
    heads = [
        *(
            "recipe",
            "k3, mean over steps (range over seeds)",
            "its median step",
            "largest difference of a log-probability",
        ),
        "accuracy after, less `bf16`'s",
    ]
    return f"{about}\n\n{table(heads, rows)}"


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
    last, rows = chosen[-1]["k3"], []
    about = prose(f"""
        What the mismatch is made of, and how it grows with depth: SmolLM2-135M-Instruct cut to its first layers, forward
        passes alone, {len(last["bf16"]["total"])} sets of prompts, bfloat16 compute. Mean k3, and at the greatest depth its
        95 % interval by bootstrap over the sets and its parts: each is the k3 between two programs that differ in that one
        thing, so parts need not add up. `fp8-e2e` and `jet-rl` have the same formats on both sides: what is left of theirs is
        a last bit of a sum that flips an e4m3 rounding, which the next layer multiplies. Exact mode is without it.
    """)
    for name, parts in last.items():
        cells = [f"{depth_mean(p['k3'][name]['total'])[0]:.1e}" for p in chosen[:-1]]
        cells.append(interval(depth_mean(parts["total"]), ".1e"))
        rows.append(
            [
                f"`{name}`",
                *cells,
                *(f"{depth_mean(parts[part])[0]:.1e}" for part in ("formats", "cache", "order")),
            ]
        )
    heads = [
        "recipe",
        *(f"{p['depth']} layers" for p in chosen),
        "of it: formats",
        "FP8 cache",
        "order of sums",
    ]
    return f"{about}\n\n{table(heads, rows)}"


def correction() -> str:
    """Corrections at a dose where they act."""
    summary = seeds("correction")
    dose = summary["none"]
    about = prose(f"""
        Corrections where they act: `fp8-rl` with a KV cache whose scales cover half of the range. In {dose["clipped"]:.1%} of
        the tokens the trainer's probability is more than twice the rollout's. {dose["seeds"]} paired seeds,
        {dose["problems"]} held-out words, float32 compute. What was learned is judged under the recipe `bf16`, and through the
        damaged cache.
    """)
    rows = [
        [
            "`bf16` recipe, undamaged" if arm == "bf16" else f"`{arm}`",
            interval(row["judged"], ".3f"),
            against(row, "judged, "),
            *(interval(row["after"], ".3f"), interval(row["k3"], ".1e")),
        ]
        for arm, row in summary.items()
    ]
    heads = [
        *(
            "correction",
            "accuracy after, served undamaged",
            "difference to `bf16`",
            "served through the damaged cache",
        ),
        "mismatch k3, mean over steps (range over seeds)",
    ]
    return f"{about}\n\n{table(heads, rows)}"


def compute_dtype() -> str:
    """The bf16 recipe in three compute dtypes."""
    summary = seeds("compute_dtype")
    first = next(iter(summary.values()))
    about = prose(f"""
        The `bf16` recipe, which quantizes nothing, in three compute dtypes: the demo, {first["seeds"]} paired seeds,
        {first["problems"]} held-out words. In float16 the loss scale is found while training (arXiv 2510.26788).
    """)
    rows = [
        [
            arm,
            interval(row["k3"], ".1e"),
            f"{row['k3, median step']:.1e}",
            f"{row['largest']:.1e}",
            interval(row["after"], ".3f"),
        ]
        for arm, row in summary.items()
    ]
    heads = [
        *("compute dtype", "k3, mean over steps (range over seeds)", "its median step"),
        *("largest difference of a log-probability", "accuracy after"),
    ]
    return f"{about}\n\n{table(heads, rows)}"


def largest_when_exact() -> tuple[float, float]:
    """Largest difference of a log-probability over all steps of the runs in exact mode: the demo,
    and with experts."""
    dense = record("seeds/exact.json")["runs"]["jet-rl, exact"]["0"]["steps"]["largest"]
    lines = (RESULTS / "exact/moe_demo-jet-rl-exact/metrics.jsonl").read_text().splitlines()
    experts = [
        row["mismatch/logprob_abs_diff_max"]
        for row in map(json.loads, lines)
        if "mismatch/k3" in row
    ]
    if len(dense) != len(experts):
        raise ValueError("exact: the text says one number of steps for both runs")
    return max(dense), max(experts)


def exact() -> str:
    """Exact mode, an identity: one seed each."""
    run = record("seeds/exact.json")["runs"]["jet-rl, exact"]["0"]
    dense, experts = largest_when_exact()
    (_, before), *_, (_, after) = run["accuracy"]
    return prose(f"""
        Exact mode (`--recipe jet-rl --precision.exact`) on the demo, one seed since it is an identity: the largest difference
        of a log-probability over {steps("exact")} steps is {dense}, and with a mixture of experts
        (`experiments/runs/moe_demo.toml`; `experiments/results/exact`) over as many steps {experts}.
        Held-out accuracy goes from {before:.3f} to {after:.3f}.
    """)


def gradients() -> str:
    """Gradients by layout."""
    found = record("gradients/results.json")["distances"]

    def of(name: str) -> str:
        return f"{np.mean(found[name]):.1%}"

    about = prose(f"""
        Gradients under FP8 depend on what stands beside a row: weight gradients quantize groups of 128 tokens, which span
        rows. Relative distance of the linears' gradients, the demo's policy, bfloat16 compute, mean of
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


def smollm2_addition() -> str:
    """SmolLM2 learns sums."""
    summary = seeds("smollm2_addition")
    first = next(iter(summary.values()))
    about = prose(f"""
        SmolLM2-135M-Instruct learns single-digit sums (`experiments/runs/smollm2_addition.toml`): {steps("smollm2_addition")}
        steps of GRPO, {first["seeds"]} paired seeds, {first["problems"]} held-out problems, temperature 1, float32 compute on a
        CPU; 95 % intervals over seeds, and of k3 its range over seeds. The weights come from a 4-bit file, so errors of
        quantization measured with them are not those of a bf16 checkpoint.
    """)
    rows = [
        [
            f"`{arm}`",
            interval(row["before"], ".3f"),
            interval(row["after"], ".3f"),
            against(row),
            interval(row["k3"], ".1e"),
            f"{row['largest']:.1e}",
        ]
        for arm, row in summary.items()
    ]
    heads = [
        *(
            "recipe",
            "accuracy before",
            "after",
            "difference to `bf16`",
            "mismatch k3, mean over steps",
        ),
        "largest difference of a log-probability",
    ]
    return f"{about}\n\n{table(heads, rows)}"


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


def study(heading: str, text: Callable[[], str], name: str, optional: bool = False) -> Section:
    """A section of a study of experiments/seeds."""
    return Section(
        heading, text, f"python -m experiments.seeds --study {name}", f"seeds/{name}.json", optional
    )


SECTIONS = (
    study("The demo", demo, "demo"),
    study("SmolLM2 addition", smollm2_addition, "smollm2_addition", optional=True),
    study("Mismatch of every recipe", recipes, "recipes"),
    Section(
        "What the mismatch is made of", depth, "python -m experiments.depth", "depth/results.json"
    ),
    study("Exact mode", exact, "exact"),
    study("Corrections", correction, "correction"),
    study("Compute dtypes", compute_dtype, "compute_dtype"),
    Section("Gradients", gradients, "python -m experiments.gradients", "gradients/results.json"),
    Section(
        "Cost of explicit roundings",
        roundings,
        "fp8rl train ..., in the record",
        "benchmarks/cpu_roundings.json",
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
    """A row of README.md's table; `found` gives the figure, and over what it was found."""

    asked: str
    found: Callable[[], tuple[str, str]]
    heading: str
    """Of the section that has the record."""


def costs(name: str) -> tuple[str, str]:
    """Accuracy of `fp8-rl` less that of `bf16`."""
    row = seeds(name)["fp8-rl"]
    return f"`fp8-rl` less `bf16`: {against(row)}", f"{row['seeds']} seeds"


def mismatches() -> tuple[str, str]:
    """k3 of three recipes."""
    summary = seeds("recipes")
    k3 = ", ".join(
        f"`{name}` {interval(summary[name]['k3'], '.1e')}" for name in ("fp8-rl", "jet-rl", "bf16")
    )
    return f"k3: {k3}", f"{summary['bf16']['seeds']} seeds (range)"


def growth() -> tuple[str, str]:
    """k3 of a shallow and of the whole model."""
    first, last = deep()[0], deep()[-1]

    def of(name: str) -> str:
        shallow, whole = (depth_mean(p["k3"][name]["total"]) for p in (first, last))
        return f"`{name}` {shallow[0]:.1e} to {interval(whole, '.1e')}"

    found = f"k3 from {first['depth']} to {last['depth']} layers: {of('fp8-rl')}, {of('bf16')}"
    return found, f"{len(last['k3']['bf16']['total'])} sets of prompts"


def zero() -> tuple[str, str]:
    """Exact mode."""
    dense, experts = largest_when_exact()
    found = (
        f"`jet-rl`, exact: largest difference of a log-probability in {steps('exact')} steps "
        f"{dense}; with experts {experts}"
    )
    return found, "1 seed (an identity)"


def corrected() -> tuple[str, str]:
    """Accuracy with and without a correction, less that of `bf16`."""
    summary = seeds("correction")
    found = "; ".join(
        f"`{name}` {interval(summary[name]['judged, difference'], '+.3f')}"
        for name in ("none", "token_tis")
    )
    return f"accuracy less `bf16`'s: {found}", f"{summary['none']['seeds']} seeds"


def apart() -> tuple[str, str]:
    """Gradients under FP8."""
    found = record("gradients/results.json")["distances"]["quantization: jet-rl against bf16"]
    return (
        f"`jet-rl` against `bf16`: a relative distance of {np.mean(found):.1%}",
        f"{len(found)} batches",
    )


def agreed() -> tuple[str, str]:
    """Log-probabilities of another engine."""
    rollout = record("compare/vllm-float32/compare.json")["recorded"]["a"]
    return (
        f"k3 {rollout['k3']:.1e}, largest difference {rollout['max_abs']:.1e} (float32)",
        f"{rollout['tokens']} tokens",
    )


CLAIMS = (
    Claim("Does FP8 rollout cost accuracy on the demo?", lambda: costs("demo"), "The demo"),
    Claim(
        "And where SmolLM2-135M learns sums? (From a 4-bit file.)",
        lambda: costs("smollm2_addition"),
        "SmolLM2 addition",
    ),
    Claim(
        "How far is the trainer from the rollout, bfloat16 compute?",
        mismatches,
        "Mismatch of every recipe",
    ),
    Claim(
        "Does that grow with depth? SmolLM2-135M, forward passes",
        growth,
        "What the mismatch is made of",
    ),
    Claim("Can it be made zero?", zero, "Exact mode"),
    Claim("Does a correction help where the rollout is badly off?", corrected, "Corrections"),
    Claim("How far does FP8 move the gradients?", apart, "Gradients"),
    Claim(
        "Does our rollout agree with vLLM's log-probabilities?",
        agreed,
        "Layer by layer, and another engine",
    ),
)


def readme() -> str:
    """README.md's table."""
    rows, sections = [], {section.heading: section for section in SECTIONS}
    for claim in CLAIMS:
        section = sections[claim.heading]
        if section.there:
            found, over = claim.found()
            rows.append([claim.asked, found, over, f"`{section.command.split(' ..., ')[0]}`"])
    return table(["asked", "found (95 % interval)", "over", "command"], rows) + "\n"


def results() -> str:
    """docs/results.md."""
    parts = [
        prose("""
            Made by `python -m experiments.figures` from the committed records; every record holds the commit, versions and
            machine that made it. All of it ran on two CPU cores of a cloud machine (AMD EPYC); nothing has run on a GPU yet.
        """),
        prose("""
            k3 is the mismatch between rollout and trainer, the mean over tokens of rho - 1 - log rho, where rho is the
            trainer's probability of a sampled token over the rollout's. "Sees": the difference that these seeds would have
            found in 80 % of such studies. [glossary.md](glossary.md) explains the words.
        """),
    ]
    for section in SECTIONS:
        if section.there:
            source = f"Command: `{section.command}`. Record: `experiments/results/{section.path}`."
            parts.append(f"## {section.heading}\n\n{section.text()}\n\n{source}")
    return "\n\n".join(["# Results", *parts]) + "\n"


def filled(page: str, text: str) -> str:
    """`page` with `text` between its marks."""
    before, rest = page.split(START, 1)
    return before + START + text + END + rest.split(END, 1)[1]


def main() -> int:
    """Write both."""
    page = ROOT / "README.md"
    page.write_text(filled(page.read_text(), readme()))
    (ROOT / "docs" / "results.md").write_text(results())
    return 0


if __name__ == "__main__":
    sys.exit(main())
