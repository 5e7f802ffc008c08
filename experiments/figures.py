"""Every measured figure of README.md and docs/results.md, made from the committed records: `python -m experiments.figures`.

docs/results.md is written whole; in README.md what stands between `<!-- figures -->` and `<!-- end of figures -->`. A test makes
both again and compares, and finds no measured figure in the rest of README.md. So a figure cannot drift from its record.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from experiments.depth.__main__ import mean as depth_mean

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
START, END = "<!-- figures -->\n", "<!-- end of figures -->"


def record(path: str) -> Any:
    """A JSON record under experiments/results."""
    return json.loads((RESULTS / path).read_text())


def seeds(study: str) -> dict[str, dict[str, Any]]:
    """Summary of a study of experiments/seeds, by arm."""
    return record(f"seeds/{study}.json")["summary"]


def interval(x: list[float], form: str) -> str:
    """Mean (low to high); of one seed the mean alone."""
    return f"{x[0]:{form}}" if np.isnan(x[1]) else f"{x[0]:{form}} ({x[1]:{form}} to {x[2]:{form}})"


def against(row: dict[str, Any]) -> str:
    """Difference to the baseline, and what the seeds could have seen."""
    if row["difference"] is None:
        return "baseline"
    return f"{interval(row['difference'], '+.3f')}; sees {row['detectable']:.3f}"


def demo() -> str:
    """The demo's table."""
    summary = seeds("demo")
    n, problems = (next(iter(summary.values()))[key] for key in ("seeds", "problems"))
    lines = [
        f"The demo: a 1.3M-parameter byte-level policy spells words backward. Its warm start is supervised, with 55 % of the "
        f"demonstrations cut one letter short; 20 steps of GRPO then teach that away. {n} paired seeds, {problems} "
        f"held-out words, "
        'greedy, float32 compute on a CPU; 95 % intervals over seeds, of k3 its range over seeds. "Sees": the difference that these seeds would have '
        'found in '
        "80 % of such studies.",
        "",
        "| recipe | accuracy before | after | difference to `bf16` | mismatch k3, mean over steps |",
        "|---|---|---|---|---|",
    ]
    for arm, row in summary.items():
        before, after = interval(row["before"], ".3f"), interval(row["after"], ".3f")
        lines.append(f"| `{arm}` | {before} | {after} | {against(row)} | {interval(row['k3'], '.1e')} |")
    return "\n".join(lines)


def recipes() -> str:
    """Mismatch of every recipe."""
    summary = seeds("recipes")
    row = next(iter(summary.values()))
    lines = [
        f"Mismatch of every recipe, bfloat16 compute, demo's policy kept unsure of itself "
        f"(`experiments/runs/mismatch.toml`), 80 steps, "
        f"{row['seeds']} paired seeds, {row['problems']} held-out words.",
        "",
        "| recipe | k3, mean over steps | its median step | largest difference of a log-probability | accuracy after, "
        "less `bf16`'s |",
        "|---|---|---|---|---|",
    ]
    for arm, row in sorted(summary.items(), key=lambda item: -item[1]["k3"][0]):
        k3 = interval(row["k3"], ".1e")
        lines.append(f"| `{arm}` | {k3} | {row['k3, median step']:.1e} | {row['largest']:.1e} | {against(row)} |")
    return "\n".join(lines)


def depth() -> str:
    """What the mismatch is made of, by depth."""
    points = record("depth/results.json")["points"]
    lines = [
        "What the mismatch is made of, and how it grows with depth: SmolLM2-135M-Instruct cut to its first layers, "
        "forward passes "
        "alone, ten sets of prompts; bfloat16 compute. Mean k3 (95 % interval by bootstrap over the sets). The parts are "
        "measured "
        "between programs that differ in one thing, and need not add up.",
        "",
    ]
    chosen = sorted((p for p in points if p["weights"] == "smollm2" and p["dtype"] == "bfloat16"), key=lambda p: p["depth"])
    last = chosen[-1]
    heads = [f"{p['depth']} layers" for p in chosen]
    lines += [
        f"| recipe | {' | '.join(heads)} | of the last: formats | FP8 cache | order of sums |",
        "|---" * (len(heads) + 4) + "|",
    ]
    for name in last["k3"]:
        cells = [f"{depth_mean(p['k3'][name]['total'])[0]:.1e}" for p in chosen[:-1]]
        middle, low, high = depth_mean(last["k3"][name]["total"])
        parts = [f"{depth_mean(last['k3'][name][part])[0]:.1e}" for part in ("formats", "cache", "order")]
        lines.append(f"| `{name}` | {' | '.join([*cells, f'{middle:.1e} ({low:.1e} to {high:.1e})', *parts])} |")
    return "\n".join(lines)


def correction() -> str:
    """Corrections at a dose where they act."""
    summary = seeds("correction")
    dose = summary["none"]
    lines = [
        f"Corrections where they act: `fp8-rl` with a KV cache whose scales cover half of the range. In "
        f"{dose['clipped']:.1%} of the "
        f"tokens the trainer's probability is more than twice the rollout's. {dose['seeds']} paired seeds, "
        f"{dose['problems']} held-out "
        "words, float32 compute; the held-out set is answered through the same damaged cache.",
        "",
        "| correction | accuracy after | difference to `bf16` | mismatch k3, mean over steps |",
        "|---|---|---|---|",
    ]
    for arm, row in summary.items():
        name = f"`{arm}` recipe, undamaged" if arm == "bf16" else f"`{arm}`"
        lines.append(f"| {name} | {interval(row['after'], '.3f')} | {against(row)} | {interval(row['k3'], '.1e')} |")
    return "\n".join(lines)


def compute_dtype() -> str:
    """The bf16 recipe in three compute dtypes."""
    summary = seeds("compute_dtype")
    row = next(iter(summary.values()))
    lines = [
        f"The `bf16` recipe, which quantizes nothing, in three compute dtypes: the demo, {row['seeds']} paired seeds, "
        f"{row['problems']} "
        "held-out words. In float16 the loss scale is found while training (arXiv 2510.26788).",
        "",
        "| compute dtype | k3, mean over steps | its median step | largest difference of a log-probability | accuracy "
        "after |",
        "|---|---|---|---|---|",
    ]
    for arm, row in summary.items():
        k3, after = interval(row["k3"], ".1e"), interval(row["after"], ".3f")
        lines.append(f"| {arm} | {k3} | {row['k3, median step']:.1e} | {row['largest']:.1e} | {after} |")
    return "\n".join(lines)


def exact() -> str:
    """Exact mode, an identity: one seed each."""
    runs = record("seeds/exact.json")["runs"]["jet-rl, exact"]["0"]
    moe = [json.loads(line) for line in (RESULTS / "exact/moe_demo-jet-rl-exact/metrics.jsonl").read_text().splitlines()]
    largest = [row["mismatch/logprob_abs_diff_max"] for row in moe if "mismatch/k3" in row]
    before, after = runs["accuracy"][0][1], runs["accuracy"][-1][1]
    return (
        f"Exact mode (`--recipe jet-rl --precision.exact`) on the demo, one seed since it is an identity: the largest "
        f"difference of a "
        f"log-probability over {len(runs['steps']['largest'])} steps is {max(runs['steps']['largest'])}, and with a "
        f"mixture of experts "
        f"(`experiments/runs/moe_demo.toml`) over {len(largest)} steps {max(largest)}. Held-out accuracy goes from "
        f"{before:.3f} to "
        f"{after:.3f}."
    )


def gradients() -> str:
    """Gradients by layout."""
    found = record("gradients/results.json")["distances"]

    def of(name: str) -> str:
        return f"{np.mean(found[name]):.1%}"

    lines = [
        "Gradients under FP8 depend on what stands beside a row: weight gradients quantize groups of 128 tokens, which "
        "span rows. "
        "Relative distance of the linears' gradients, demo's policy, bfloat16 compute, mean of five batches:",
        "",
        "| gradients | `jet-rl` | `bf16` |",
        "|---|---|---|",
        f"| quantized, against the recipe `bf16` | {of('quantization: jet-rl against bf16')} | |",
    ]
    for name in [name.removeprefix("bf16: ") for name in found if name.startswith("bf16: ")]:
        lines.append(f"| {name} | {of(f'jet-rl: {name}')} | {of(f'bf16: {name}')} |")
    return "\n".join(lines)


def compared() -> str:
    """`fp8rl compare` on SmolLM2."""
    lines = [
        "Where rollout and trainer part (`fp8rl compare smollm2-135m --recipe RECIPE --compute-dtype float32`, heat maps: "
        "`fp8rl report "
        "experiments/results/compare`): the same model, 56 tokens scored behind a prompt of 56, float32 compute on a CPU.",
        "",
        "| recipe | what differs first | k3 |",
        "|---|---|---|",
    ]
    for folder in ("bf16", "fp8-rollout", "jet-rl", "jet-rl-exact"):
        found = record(f"compare/{folder}/compare.json")
        first = found["first"]
        where = "nothing: every bit is equal" if not first else f"{first[0]['cause']}, `{first[0]['name']}`"
        lines.append(f"| `{folder}` | {where} | {found['logprobs']['k3']:.1e} |")
    lines.append("")
    for dtype in ("float32", "bfloat16"):
        found = record(f"compare/vllm-{dtype}/compare.json")
        between, rollout, trainer = found["logprobs"], *(found["recorded"][side] for side in "ab")
        lines.append(
            f"Against vLLM's own log-probabilities of {rollout['tokens']} tokens that it sampled (vLLM 0.32 on a CPU, "
            f"recipe `bf16`, "
            f"{dtype}): our rollout is at a k3 of {rollout['k3']:.1e} from them (largest difference "
            f"{rollout['max_abs']:.1e}), our "
            f"trainer at {trainer['k3']:.1e} ({trainer['max_abs']:.1e}), and the two at {between['k3']:.1e} from each other."
        )
        lines.append("")
    return "\n".join(lines).rstrip()


SECTIONS = {
    "The demo": (demo, "python -m experiments.seeds --study demo", "seeds/demo.json"),
    "Mismatch of every recipe": (recipes, "python -m experiments.seeds --study recipes", "seeds/recipes.json"),
    "What the mismatch is made of": (depth, "python -m experiments.depth", "depth/results.json"),
    "Exact mode": (exact, "python -m experiments.seeds --study exact", "seeds/exact.json"),
    "Corrections": (correction, "python -m experiments.seeds --study correction", "seeds/correction.json"),
    "Compute dtypes": (compute_dtype, "python -m experiments.seeds --study compute_dtype", "seeds/compute_dtype.json"),
    "Gradients": (gradients, "python -m experiments.gradients", "gradients/results.json"),
    "Layer by layer, and another engine": (compared, "fp8rl compare ..., in each record", "compare/*/compare.json"),
}
"""Heading -> its text, the command of its record, and the record."""
IN_README = ("The demo", "Mismatch of every recipe", "What the mismatch is made of", "Exact mode", "Corrections")


def readme() -> str:
    """What README.md says of results."""
    parts = []
    for heading in IN_README:
        text, command, path = SECTIONS[heading]
        parts.append(f"{text()}\n\n(`{command}`; record `experiments/results/{path}`)")
    return "\n\n".join(parts) + "\n"


def results() -> str:
    """docs/results.md."""
    parts = [
        "# Results\n\nMade by `python -m experiments.figures` from the committed records; every record holds the commit, "
        "versions and "
        "machine that made it. All of it ran on two CPU cores of a cloud machine (AMD EPYC); nothing has run on a GPU yet."
    ]
    for heading, (text, command, path) in SECTIONS.items():
        parts.append(f"## {heading}\n\n{text()}\n\nCommand: `{command}`. Record: `experiments/results/{path}`.")
    return "\n\n".join(parts) + "\n"


def filled(page: str, text: str) -> str:
    """`page` with `text` between its marks."""
    before, rest = page.split(START, 1)
    return before + START + text + END + rest.split(END, 1)[1]


def main() -> int:
    """Writes both."""
    page = ROOT / "README.md"
    page.write_text(filled(page.read_text(), readme()))
    (ROOT / "docs" / "results.md").write_text(results())
    return 0


if __name__ == "__main__":
    sys.exit(main())
