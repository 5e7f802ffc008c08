"""What docs/training.md says of the records of `experiments.fp8_lm`, `experiments.fp4` and
`experiments.stability`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import fp8_lm
from experiments.formats.page import MARGIN, Entry, Table, against
from experiments.formats.rows import BASELINE
from fp8rl_jax.statistics import compare_arms, exact_interval
from fp8rl_jax.training.watch import Spikes

PAPER = {
    "as it is": 8.31,
    "0.999 clamped": 14.25,
    "0.999 compensated": 15.31,
    "0.99 compensated": 18.38,
    "0.97 compensated": 20.88,
}
"""Of the table of activations in arXiv 2501.17116, in dB."""
LAST = 10
"""Steps whose losses are averaged for the loss at the end."""


def sections(results: Path) -> dict[str, list[Table]]:
    """Tables by section, of what has been measured.

    Args:
        results: folder of the records.
    """
    found: dict[str, list[Table]] = {}
    for section, path, make in (
        ("fp8-lm", "fp8_lm.json", states),
        ("fp8-lm", "fp8_lm.json", placed),
        ("fp4", "fp4/snr.json", snr),
        ("fp4", "fp4/learning.json", learned),
        ("sharpness", "stability/runs.json", diverged),
    ):
        if (results / path).exists() and (made := make(json.loads((results / path).read_text()))):
            found.setdefault(section, []).append(made)
    return found


def states(record: dict[str, Any]) -> Table:
    """Which precision breaks which state."""
    settings, seeds = record["settings"], {entry["seed"] for entry in record["entries"]}
    about = f"""
        {settings["steps"]} updates of {settings["batch_size"]} examples, {len(seeds)} paired seeds. Command:
        `python -m experiments.fp8_lm`.
    """
    seen = "in the mean (95 %); could be seen"
    heads = ["kept in few bits", "loss", "less the baseline's, of each seed", seen]
    return Table("", about, heads, fp8_lm.rows(record["entries"]))


def placed(record: dict[str, Any]) -> Table:
    """Qwen3-8B's training state on devices: whole tensors, and as it is sharded here."""
    del record
    rows = [[str(n), *(f"{x:.3g}" for x in fp8_lm.placement(n))] for n in (8, 16, 64, 256)]
    about = "Qwen3-8B: the bytes of the device that has most, over the mean."
    return Table("", about, ["devices", "whole tensors, greedy", "fsdp"], rows)


def snr(record: dict[str, Any]) -> Table:
    """Signal to noise of activations in FP4."""
    entries = record["entries"]

    def cell(shared: str, way: str) -> str:
        values = [entry[shared][way] for entry in entries]
        return f"{np.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    rows = [
        [way, f"{PAPER[way]}" if way in PAPER else "", cell("tensor", way), cell("token", way)]
        for way in entries[0]["tensor"]
    ]
    about = f"""
        Signal to noise of {record["settings"]["model"]}'s activations in FP4, 10 log10(sum x^2 / sum (x - q)^2) in dB, beside the
        paper's, of another model: scale and quantiles of a whole tensor, and of each token. Of each kind of linear's inputs the
        median over layers; of the kinds the median, and least to largest.
        Command: `python -m experiments.fp4 --parts snr`.
    """
    return Table("", about, ["outliers", "paper", "ours, a tensor", "ours, a token"], rows)


def learned(record: dict[str, Any]) -> Table | None:
    """Losses after supervised training in FP4, of the seeds that all arms have."""
    whole: dict[str, dict[int, Entry]] = {}
    for entry in record["entries"]:
        whole.setdefault(entry["arm"], {})[entry["seed"]] = entry
    seeds = sorted(set.intersection(*(set(of) for of in whole.values())))
    if len(whole) < 5 or not seeds:
        return None
    keys, settings, rows = ("loss", "unquantized"), record["settings"], []
    losses = {
        key: {arm: [of[seed][key] for seed in seeds] for arm, of in whole.items()} for key in keys
    }
    compared = (
        {key: compare_arms(losses[key], BASELINE, MARGIN, better="lower") for key in keys}
        if len(seeds) > 2
        else {}
    )
    for arm in whole:
        cells = [f"{np.mean(losses[key][arm]):.3f}" for key in keys]
        cells += [
            "baseline" if arm == BASELINE else against(compared[key][arm]) for key in compared
        ]
        rows.append(["nothing quantized" if arm == BASELINE else arm, *cells])
    few = "" if compared else "So few seeds tell nothing of a difference."
    about = f"""
        The demo's policy from random weights, {settings["steps"]} supervised updates of {settings["batch_size"]} examples,
        {len(seeds)} paired seeds, float32 compute, output gradients not quantized. Loss is the mean negative log-likelihood of a
        held-out answer's token, in nats. {few} Command: `python -m experiments.fp4 --parts learning`.
    """
    heads = ["arm", "loss, in its own formats", "the same weights, nothing quantized"]
    heads += ["less the baseline's; could be seen"] * len(compared)
    return Table("", about, heads, rows)


def first_spike(values: Sequence[float | None], logarithms: bool = False) -> int | None:
    """The first step that stands far above those before it."""
    spikes = Spikes(logarithms)
    found = (i for i, x in enumerate(values) if spikes.see(float("nan") if x is None else x))
    return next(found, None)


def _end(losses: Sequence[float | None]) -> float:
    """The mean of the last ones that are finite; infinite where none is."""
    finite = [x for x in losses[-LAST:] if x is not None]
    return float(np.mean(finite)) if finite else float("inf")


def of_runs(count: int, runs: int) -> str:
    """A number of runs, with the exact 95 % interval of their share."""
    low, high = exact_interval(count, runs)
    return f"{count} of {runs} ({100 * low:.0f} to {100 * high:.0f} %)"


def diverged(record: dict[str, Any]) -> Table | None:
    """Shares of diverged runs by format and learning rate; and which spikes first."""
    runs: dict[tuple[str, float], list[Entry]] = {}
    for entry in record["entries"]:
        runs.setdefault((entry["row"], entry["rate"]), []).append(entry)
    names, rates = (list(dict.fromkeys(key[i] for key in runs)) for i in (0, 1))

    def cell(of: list[Entry]) -> str:
        if not of:
            return ""
        count = sum(run["stability/diverged"] > 0 for run in of)
        ends = [_end(run["losses"]) for run in of]
        return f"{of_runs(count, len(of))}; {np.median(ends):.2f}"

    rows = [[f"`{name}`", *(cell(runs.get((name, rate), [])) for rate in rates)] for name in names]
    spiked = [(first_spike(run["losses"]), run) for of in runs.values() for run in of]
    leads = [
        (first_spike(run["sharpness"], logarithms=True), step)
        for step, run in spiked
        if step is not None
    ]
    before = sum(sharp is not None and sharp < step for sharp, step in leads)
    warned = "No run's loss had a spike, so nothing can be told of what comes first."
    if leads:
        low, high = exact_interval(before, len(leads))
        warned = (
            f"Of {len(leads)} runs whose loss had a spike, sharpness had one at an earlier step in "
            f"{before} (exact 95 % interval {100 * low:.0f} to {100 * high:.0f} %)."
        )
    settings = record["settings"]
    about = f"""
        Runs that diverged, with an exact 95 % interval of their share, and the median of the losses at their ends: a policy of
        two layers, {settings["hidden_size"]} wide, {settings["steps"]} supervised updates of {settings["batch_size"]} examples, forward passes
        in the format. {warned} Command: `python -m experiments.stability`.
    """
    return Table("", about, ["format", *(f"rate {rate:g}" for rate in rates)], rows)
