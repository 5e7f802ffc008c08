"""Learning claims with paired seeds: `python -m experiments.seeds --study demo`.

A study is a run file and arms: flags laid over it. The arms of one seed share prompts, their order,
sampling keys and the warm start. What is missing is trained, what was cut off is resumed, and the
record, the table and the chart are written anew after each run:

    accuracy      held out, greedy, before and after; 95 % interval over seeds (Student's t) and
                  over problems (Wilson's)
    judged        accuracy of the trained model under one recipe for all arms, where the study names
                  one
    difference    arm less the first arm, seed by seed; its mean with a 95 % t interval
    detectable    the true difference that so many seeds would have shown as one in 80 % of all
                  studies, from the spread seen:
                  (t(0.975) + t(0.8)) s / sqrt(n), the usual approximation of what
                  fp8rl_jax/statistics.py computes. Arms that are called alike are so up to this
    k3            mean over steps of the mismatch, and the range of this mean over seeds
"""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from experiments.command import run_command
from fp8rl_jax.errors import UserError
from fp8rl_jax.statistics import t_interval, wilson_interval

ROOT = Path(__file__).parents[1]
DEMO = ("experiments/runs/demo.toml",)
MANY = ("--task.eval-size", "1024", "--evaluation.examples", "1024")
SERIES = {
    "k3": "mismatch/k3",
    "largest": "mismatch/logprob_abs_diff_max",
    "clipped": "mismatch/is_clip_frac",
    "reward": "reward/mean",
}
"""What is kept of each step."""


@dataclass(frozen=True)
class Study:
    """Arms over a run file; the first is what the others are held against.

    Attributes:
        question: what it answers, in a line.
        files: run files, the later over the earlier.
        arms: by name, the flags of each.
        flags: of all arms.
        start: flags of the warm start; None: the model is given.
        seeds: how many.
        judge: a recipe under which the trained models are evaluated once more: what was learned,
            without the rollout's error.
    """

    question: str
    files: tuple[str, ...]
    arms: dict[str, tuple[str, ...]]
    flags: tuple[str, ...] = ()
    start: tuple[str, ...] | None = ()
    seeds: int = 5
    judge: str = ""


def _recipes(*names: str) -> dict[str, tuple[str, ...]]:
    return {name: ("--recipe", name) for name in names}


STUDIES: dict[str, Study] = {
    "demo": Study(
        "Does FP8 rollout cost accuracy on the demo? float32 compute.",
        DEMO,
        _recipes("bf16", "fp8-rl"),
        MANY,
    ),
    "recipes": Study(
        "Mismatch and accuracy of every recipe, bfloat16 compute.",
        (*DEMO, "experiments/runs/mismatch.toml"),
        _recipes(
            "bf16", "fp8-rollout", "fp8-kv", "fp8-rl", "fp8-e2e", "fp8-e2e-kv", "jet-rl", "infir2"
        ),
        (*MANY, "--trainer.steps", "40", "--evaluation.every", "40"),
    ),
    "exact": Study(
        "Exact mode: mismatch of every step, float32 compute. An identity, so one seed.",
        DEMO,
        {
            "bf16": ("--recipe", "bf16"),
            "jet-rl, exact": ("--recipe", "jet-rl", "--precision.exact"),
        },
        MANY,
        seeds=1,
    ),
    "compute_dtype": Study(
        "The bf16 recipe in three compute dtypes.",
        DEMO,
        {
            name: ("--recipe", "bf16", "--compute-dtype", name)
            for name in ("bfloat16", "float16", "float32")
        },
        MANY,
    ),
    "correction": Study(
        "What a correction does where it acts: a KV cache whose scales cover half of the range, "
        "without one and with each.",
        (*DEMO, "experiments/runs/half_margin.toml"),
        {
            "bf16": ("--recipe", "bf16"),
            **{
                name: ("--recipe", "fp8-rl-margin-0.5", "--rl.correction.method", name)
                for name in ("none", "token_tis", "sequence_tis", "icepop")
            },
        },
        MANY,
        judge="bf16",
    ),
    "calibrated_clipping": Study(
        "Clip bounds calibrated for an FP8 trainer against fixed ones; jet-rl, four updates a "
        "rollout, bounds of 5 %.",
        DEMO,
        {
            "fixed": ("--recipe", "jet-rl"),
            "calibrated": ("--recipe", "jet-rl", "--rl.clip-calibration.enabled"),
        },
        (
            *MANY,
            "--trainer.updates-per-rollout",
            "4",
            "--rl.clip-low",
            "0.05",
            "--rl.clip-high",
            "0.05",
        ),
    ),
    "smollm2_addition": Study(
        "SmolLM2-135M-Instruct learns single-digit sums; float32 compute.",
        ("experiments/runs/smollm2_addition.toml",),
        _recipes("bf16", "fp8-rl"),
        ("--trainer.steps", "20"),
        start=None,
        seeds=3,
    ),
}


@dataclass(frozen=True)
class Arguments:
    """A study's runs, its record, table and chart."""

    study: str = "demo"
    """One of STUDIES in experiments/seeds.py."""
    seeds: tuple[int, ...] = ()
    """Seeds to train now; default: 0 ... n - 1 of the study."""
    arms: tuple[str, ...] = ()
    """Arms to train now; default: all."""
    runs: str = "runs/seeds"
    """Directory of the runs."""
    output: str = "experiments/results/seeds"
    """Directory of <study>.json, <study>.md and <study>.svg."""
    threads: int = 0
    """Processors to use; 0: all."""
    extra: str = ""
    """More flags of every run, behind the others, as one word: "--trainer.steps 2" to try a study
    out."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        if self.study not in STUDIES:
            return [f"--study: {self.study!r} unknown (known: {', '.join(STUDIES)})"]
        unknown = [name for name in self.arms if name not in STUDIES[self.study].arms]
        return [
            f"--arms: {name!r} unknown (known: {', '.join(STUDIES[self.study].arms)})"
            for name in unknown
        ]


def train(
    study: Study, arm: str, seed: int, directory: Path, start: Path | None, extra: Sequence[str]
) -> None:
    """Train a run, or what is left of it; nothing where it is whole.

    Raises:
        UserError: the run failed.
    """
    if (directory / "model").exists():
        return
    resume = ["--resume"] if any((directory / "checkpoints").glob("[0-9]*")) else []
    model = [] if start is None else ["--model.path", str(start / "model")]
    _fp8rl(
        "train",
        *study.files,
        *study.flags,
        *model,
        *study.arms[arm],
        "--seed",
        str(seed),
        "--output",
        str(directory),
        *extra,
        *resume,
    )


def judge(study: Study, directory: Path) -> None:
    """Evaluate a trained model under the judge's recipe, once, into judged.json."""
    if not study.judge or (directory / "judged.json").exists():
        return
    said = io.StringIO()
    with redirect_stdout(said):
        _fp8rl(
            "eval",
            *study.files,
            *study.flags,
            "--model.path",
            str(directory / "model"),
            "--recipe",
            study.judge,
        )
    (directory / "judged.json").write_text(said.getvalue())


def warm_start(study: Study, directory: Path) -> Path | None:
    """The policy that all runs of a study start from."""
    if study.start is None:
        return None
    if not (directory / "model").exists():
        _fp8rl("sft", *study.files, *study.start, "--sft.output", str(directory))
    return directory


def _fp8rl(*words: str) -> None:
    # in this process: runs of one shape share what is compiled
    from fp8rl_jax.cli.main import main as command

    if command(list(words)):
        raise UserError(f"fp8rl {' '.join(words)}: failed")


def read(directory: Path) -> dict[str, Any]:
    """What the record keeps of a run."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    made = json.loads((directory / "run.json").read_text())
    evaluated = [row for row in rows if "eval/accuracy" in row]
    steps = {
        name: [_digits(row[key]) for row in rows if key in row] for name, key in SERIES.items()
    }
    if bounds := [
        _digits(row["clip_ratio/low_bound"]) for row in rows if "clip_ratio/low_bound" in row
    ]:
        steps["low_bound"] = bounds
    judged = directory / "judged.json"
    return {
        "judged": json.loads(judged.read_text())["eval/accuracy"] if judged.exists() else None,
        "commit": made["commit"],
        "accuracy": [[row["step"], row["eval/accuracy"]] for row in evaluated],
        "problems": int(evaluated[-1]["eval/problems"]),
        "steps": steps,
    }


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % t interval over seeds; of one seed the interval is not known (NaN)."""
    of = t_interval(values)
    return (of.mean, of.low, of.high) if of.n > 1 else (of.mean, float("nan"), float("nan"))


def detectable(differences: Sequence[float]) -> float:
    """Compute the mean difference that a paired t test at 5 % finds with a probability of 80 %.

    Args:
        differences: whose spread is taken for the true one.
    """
    x = np.asarray(differences, float)
    if len(x) < 2:
        return float("nan")
    return float(
        (stats.t.ppf(0.975, len(x) - 1) + stats.t.ppf(0.8, len(x) - 1))
        * x.std(ddof=1)
        / len(x) ** 0.5
    )


def summarize(runs: dict[str, dict[str, Any]], base: str) -> dict[str, dict[str, Any]]:
    """By arm, the numbers of the table; runs: arm -> seed -> `read`."""
    found = {}
    for arm, by_seed in runs.items():
        after = {seed: run["accuracy"][-1][1] for seed, run in by_seed.items()}
        before = [run["accuracy"][0][1] for run in by_seed.values()]
        k3 = [float(np.mean(run["steps"]["k3"])) for run in by_seed.values()]
        problems = min(run["problems"] for run in by_seed.values())
        shared = [seed for seed in after if seed in runs.get(base, {})]
        differences = (
            [after[seed] - runs[base][seed]["accuracy"][-1][1] for seed in shared]
            if arm != base
            else []
        )
        judged = {seed: run["judged"] for seed, run in by_seed.items() if run["judged"] is not None}
        apart = (
            [judged[seed] - runs[base][seed]["judged"] for seed in shared if seed in judged]
            if arm != base
            else []
        )
        found[arm] = {
            "seeds": len(by_seed),
            "problems": problems,
            "before": mean_interval(before),
            "after": mean_interval(list(after.values())),
            "after, over problems": wilson_interval(float(np.mean(list(after.values()))), problems),
            "difference": mean_interval(differences) if differences else None,
            "detectable": detectable(differences) if differences else None,
            "judged": mean_interval(list(judged.values())) if judged else None,
            "judged, difference": mean_interval(apart) if apart else None,
            "judged, detectable": detectable(apart) if apart else None,
            "k3": (float(np.mean(k3)), min(k3), max(k3)),
            "k3, median step": float(
                np.median([x for run in by_seed.values() for x in run["steps"]["k3"]])
            ),
            "largest": float(max(max(run["steps"]["largest"]) for run in by_seed.values())),
            "clipped": float(
                np.mean([np.mean(run["steps"]["clipped"]) for run in by_seed.values()])
            ),
        }
    return found


def table(study: Study, summary: dict[str, dict[str, Any]]) -> str:
    """The summary in Markdown."""

    def whole(x: Sequence[float] | None, form: str) -> str:
        if x is None:
            return ""
        return f"{x[0]:{form}}" + ("" if np.isnan(x[1]) else f" ({x[1]:{form}} to {x[2]:{form}})")

    judged = any(row["judged"] for row in summary.values())
    heads = (
        "arm",
        "seeds",
        "before",
        "after",
        "over problems",
        "difference",
        "detectable",
        "k3",
        "largest |d|",
        "clipped",
    )
    heads += (f"after, under {study.judge}", "its difference") if judged else ()
    lines = [study.question, "", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for arm, row in summary.items():
        low, high = row["after, over problems"]
        against = (
            ("", "")
            if row["difference"] is None
            else (whole(row["difference"], "+.3f"), f"{row['detectable']:.3f}")
        )
        cells = (
            f"`{arm}`",
            str(row["seeds"]),
            whole(row["before"], ".3f"),
            whole(row["after"], ".3f"),
            f"{low:.3f} to {high:.3f}",
            *against,
            whole(row["k3"], ".1e"),
            f"{row['largest']:.1e}",
            f"{row['clipped']:.2%}",
            *(
                (whole(row["judged"], ".3f"), whole(row["judged, difference"], "+.3f"))
                if judged
                else ()
            ),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw mismatch by step, and held-out accuracy.

    A line is the mean over seeds, a band their range.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    for arm, by_seed in runs.items():
        k3 = np.asarray([run["steps"]["k3"] for run in by_seed.values()])
        evaluated = np.asarray([run["accuracy"] for run in by_seed.values()])
        line = left.plot(np.maximum(k3.mean(0), 1e-16), label=arm)[0]
        left.fill_between(
            range(k3.shape[1]),
            np.maximum(k3.min(0), 1e-16),
            k3.max(0),
            alpha=0.15,
            color=line.get_color(),
        )
        steps, accuracy = evaluated[0, :, 0], evaluated[..., 1]
        right.plot(
            steps, accuracy.mean(0), marker="o", markersize=3, label=arm, color=line.get_color()
        )
        right.fill_between(
            steps, accuracy.min(0), accuracy.max(0), alpha=0.15, color=line.get_color()
        )
    left.set(yscale="log", xlabel="step", ylabel="mismatch, k3")
    right.set(xlabel="step", ylabel="held-out accuracy")
    right.legend(fontsize=7)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("seeds", Arguments, run, argv)


def run(arguments: Arguments) -> None:
    """Seed by seed, so that a call that is cut off leaves all arms of the first seeds."""
    if arguments.threads:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-arguments.threads :])
    os.chdir(ROOT)
    study, output = STUDIES[arguments.study], Path(arguments.output)
    folder = Path(arguments.runs) / arguments.study
    start = warm_start(study, folder / "warm-start")
    for seed in arguments.seeds or range(study.seeds):
        for arm in arguments.arms or study.arms:
            train(
                study, arm, seed, folder / f"{arm}-seed{seed}", start, shlex.split(arguments.extra)
            )
            judge(study, folder / f"{arm}-seed{seed}")
            write(arguments.study, folder, output)
    print((output / f"{arguments.study}.md").read_text())


def write(name: str, folder: Path, output: Path) -> None:
    """Record, table and chart of all runs of a study that are whole."""
    from experiments.benchmarks.machine import facts

    study, runs = STUDIES[name], {}
    for arm in study.arms:
        whole = {
            seed: folder / f"{arm}-seed{seed}"
            for seed in range(100)
            if (folder / f"{arm}-seed{seed}" / "model").exists()
        }
        if whole:
            runs[arm] = {str(seed): read(directory) for seed, directory in whole.items()}
    summary = summarize(runs, next(iter(study.arms)))
    output.mkdir(parents=True, exist_ok=True)
    record = {
        "question": study.question,
        "made": facts("experiments.seeds", ["--study", name]),
        "summary": summary,
        "runs": runs,
    }
    partial = output / f"{name}.json.partial"
    partial.write_text(json.dumps(record) + "\n")
    partial.replace(output / f"{name}.json")
    (output / f"{name}.md").write_text(table(study, summary))
    draw(runs, output / f"{name}.svg")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
